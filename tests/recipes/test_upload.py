"""Copies of checkpoints at a URL, and going on from them, in one process; with ranks and S3: test_faults.py."""

import json
import logging
import shutil
import time

import fsspec
import pytest

from data_prep.errors import InputError, run_command
from recipes.training import checkpoint, distributed, loop, upload
from recipes.training import checkpoint_files as files
from recipes.training.prepare import prepare
from tests.conftest import add_checkpoint, publish_checkpoint

URL = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    monkeypatch.setattr(distributed, "broadcast", lambda value: value)
    monkeypatch.setattr(upload.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(upload.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(upload.dist, "barrier", lambda: None)
    monkeypatch.setattr(upload, "POLL_S", 0.01)


@pytest.fixture
def run(tiny):
    return Run(tiny)


class Run:
    """Checkpoints 3 and 6 of a run, here and in memory."""

    def __init__(self, tiny):
        self.system, self.tiny = fsspec.filesystem("memory"), tiny
        self.system.store.clear()
        self.prepared = self.prepare()
        self.directory = self.prepared.recipe.run_directory / "checkpoints"
        uploader = upload.Uploader(f"{URL}/tiny")
        for step in (3, 6):
            uploader.begin(self.add(step))
            uploader.finish()

    def add(self, step, **changes):
        return add_checkpoint(self.prepared.recipe, self.prepared.ds_config, self.prepared.sizes, step, **changes)

    def prepare(self, *arguments):
        words = ["--recipe", str(self.tiny), f"checkpoint.upload={URL}", *arguments]
        return prepare(loop.parse_arguments("", words), 1, "cpu")

    def choose(self, *arguments):
        """What a start goes on from."""
        prepared = self.prepare(*arguments)
        return checkpoint.choose_or_fetch(prepared.recipe, prepared.ds_config, prepared.sizes)

    def content(self, step):
        return (self.directory / files.tag(step) / "model.pt").read_bytes()


def test_the_watchdog_hears_of_an_upload_as_long_as_it_moves(run, monkeypatch):
    """The last upload takes as long as it takes; one that stands still must not."""
    blocks = 5

    class Slow:
        def exists(self, _path):
            return False

        def put_file(self, _local, _remote, callback):
            for _ in range(blocks):
                time.sleep(0.05)
                callback.relative_update(1)
            time.sleep(0.4)  # stalled

    monkeypatch.setattr(files, "open_remote", lambda url: (Slow(), "root"))
    uploader, beats = upload.Uploader(URL), []
    uploader.begin(run.add(9))
    uploader.finish(beat=lambda: beats.append(time.monotonic()))
    assert uploader.path is None and len(beats) >= 2 * blocks
    assert max(after - before for before, after in zip(beats, beats[1:], strict=False)) > 0.3


@pytest.mark.parametrize("damage", [b"", b"w" * 42])
def test_where_no_local_one_will_do_a_remote_one_is_fetched(run, damage, caplog):
    """Cut short, which the checks before the ranks see, or changed, which only the ranks' checksums tell."""
    whole = run.content(6)
    assert len(whole) == 42
    for step in (3, 6):
        (run.directory / files.tag(step) / "model.pt").write_bytes(damage[: 7 * step])
    with caplog.at_level("INFO", "recipes"):
        assert run.choose() == run.directory / "global_step6"
    assert run.content(6) == whole and (run.directory / "global_step6.replaced_1").is_dir()
    assert "no complete checkpoint in" in caplog.text and f"; steps in {URL}/tiny: 3, 6" in caplog.text


def test_a_step_that_is_only_remote_is_fetched(run):
    shutil.rmtree(run.directory / "global_step3")
    assert run.choose("--resume", "3") == run.directory / "global_step3"
    with pytest.raises(
        InputError, match=f"no checkpoint of step 5 in .*; steps there: 3, 6; steps in {URL}/tiny: 3, 6"
    ):
        run.prepare("--resume", "5")
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    assert run.choose() == run.directory / "global_step6"


def test_a_damaged_remote_one_is_passed_over_and_one_out_of_reach_is_not(run, monkeypatch):
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    run.system.pipe_file("/bucket/runs/tiny/global_step6/model.pt", b"damaged")
    assert run.choose() == run.directory / "global_step3"
    shutil.rmtree(run.directory / "global_step3")

    def refuse(*_, **__):
        raise OSError("timed out")

    monkeypatch.setattr(type(run.system), "get_file", refuse)
    with pytest.raises(ConnectionError, match=r"global_step6 can't be fetched: timed out"):
        run.choose()


def test_an_abandoned_branch_is_left_there_too(run):
    """The run directory is lost after `--resume 3`: the copies from before are no more gone on from."""
    upload.abandon(f"{URL}/tiny", 3)
    assert files.remote_steps(f"{URL}/tiny") == [3]
    kept = "/bucket/runs/tiny/global_step6/"
    assert json.loads(run.system.cat_file(f"{kept}manifest.replaced_1.json"))["step"] == 6
    assert run.system.cat_file(f"{kept}model.pt") == run.content(6)
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    assert run.choose() == run.directory / "global_step3"
    uploader = upload.Uploader(f"{URL}/tiny")
    uploader.begin(run.add(6))  # of the new branch
    uploader.finish()
    upload.abandon(f"{URL}/tiny", 3)
    assert run.system.exists(f"{kept}manifest.replaced_2.json")


def test_a_run_goes_on_elsewhere_without_its_parent(run):
    for step in (3, 6):
        shutil.rmtree(run.directory / files.tag(step))
    parent = str(run.directory.parents[1] / "parent")
    uploader = upload.Uploader(f"{URL}/tiny")
    uploader.begin(run.add(7, parent=f"{parent}@2"))
    uploader.finish()
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    assert run.choose("--branch_from", f"{parent}@2") == run.directory / "global_step7"
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    with pytest.raises(InputError, match=f"this run began from {parent}@2, not {parent}@3"):
        run.choose("--branch_from", f"{parent}@3")
    run.system.store.clear()
    shutil.rmtree(run.directory)
    with pytest.raises(InputError, match="no checkpoint of step 2 in .*parent"):
        run.prepare("--branch_from", f"{parent}@2")


def test_a_storage_out_of_reach_is_no_mistake_and_a_bad_url_is(run, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(type(run.system), "glob", refuse)
    assert run_command(lambda: run.prepare("--resume", "none")) == 1
    assert capsys.readouterr().err == f"error: checkpoint.upload: {URL}/tiny can't be listed: OSError: no route\n"
    shutil.rmtree(run.directory)
    run.directory.mkdir()
    with pytest.raises(ConnectionError, match="no route"):
        run.choose()
    for url in ("nowhere://bucket", "s3://Bad_Name!!"):
        with pytest.raises(InputError, match=f"checkpoint.upload: {url}"):
            run.prepare("--resume", "none", f"checkpoint.upload={url}")


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """An uploader of a run's only rank, to a directory that isn't there yet; checkpoints 2, 4 and 6 are here."""
    monkeypatch.setattr(upload, "PAUSE_S", 0)
    caplog.set_level(logging.INFO, "recipes")
    for step in (2, 4, 6):
        publish_checkpoint(tmp_path / "here", step, model=b"m" * step, shard=b"s")
    return lambda: upload.Uploader(f"file://{tmp_path}/not/there/tiny")


def uploaded(caplog) -> list[int]:
    """The steps, in order."""
    words = [message.split() for message in caplog.messages]
    return [int(line[1].removeprefix("global_step")) for line in words if line[0] == "uploaded"]


def test_a_directory_that_is_not_there_is_made(start, tmp_path, caplog):
    uploader = start()
    uploader.begin(tmp_path / "here" / "global_step4")
    uploader.finish(everything=True)
    assert uploaded(caplog) == [4]
    copy = tmp_path / "not" / "there" / "tiny" / "global_step4"
    assert files.damaged_because(copy, ["model.pt", "shard.pt"]) is None
    assert files.remote_steps(uploader.url) == [4]


def test_what_an_earlier_start_has_not_uploaded_is(start, tmp_path, caplog):
    there = tmp_path / "not" / "there" / "tiny"
    for step in (2, 4, 6):
        publish_checkpoint(there, step, model=b"m" * step, shard=b"s")
    (there / "global_step6" / "manifest.json").unlink()
    (there / "global_step2" / "model.pt").write_bytes(b"")
    publish_checkpoint(tmp_path / "here", 8, model=b"m")
    (publish_checkpoint(tmp_path / "here", 9, model=b"m") / "model.pt").unlink()  # nothing to upload

    uploader = start()
    uploader.catch_up(tmp_path / "here")
    assert {files.step_of(path) for path in uploader.needed()} == {2, 4, 6, 8, 9}
    uploader._work.result()
    uploader.advance()
    assert sorted(files.step_of(path) for path in uploader.needed()) == [2, 6, 8]
    uploader.begin(publish_checkpoint(tmp_path / "here", 10, model=b"m"))  # a new one comes before those that wait
    uploader.finish(everything=True)
    assert uploaded(caplog) == [8, 10, 6, 2] and uploader.needed() == []
    assert files.remote_steps(uploader.url) == [10, 8, 6, 4, 2]
    again = start()
    again.catch_up(tmp_path / "here")
    again.finish(everything=True)
    assert len(uploaded(caplog)) == 4


def test_a_run_that_is_stopped_leaves_them_to_the_next_start(start, tmp_path, caplog):
    uploader = start()
    uploader.catch_up(tmp_path / "here")
    uploader.begin(tmp_path / "here" / "global_step6")
    uploader.finish(everything=False)
    assert uploaded(caplog) == [6]


def test_the_manifest_there_goes_first_when_a_step_is_uploaded_anew(start, tmp_path):
    there = publish_checkpoint(tmp_path / "not" / "there" / "tiny", 4, model=b"old", shard=b"s")
    uploader = start()
    uploader.begin(tmp_path / "here" / "global_step4")
    uploader._work.result()
    assert sorted(path.name for path in there.iterdir()) == ["model.pt", "shard.pt"]
    assert (there / "model.pt").read_bytes() == b"old"
    uploader.finish(everything=True)
    assert files.incomplete_because(there) is None and (there / "model.pt").read_bytes() == b"mmmm"


def test_storage_that_can_not_be_reached_is_reported(start, tmp_path, caplog):
    (tmp_path / "not").write_text("a file")
    uploader = start()
    uploader.catch_up(tmp_path / "here")
    uploader.begin(tmp_path / "here" / "global_step6")
    uploader.finish(everything=True)
    looked, copied = caplog.messages
    assert "what is missing there can't be told: NotADirectoryError: " in looked
    assert copied.startswith("global_step6 was not uploaded to file://") and uploader.needed() == []


def test_a_checkpoint_that_has_gone_meanwhile_ends_nothing(start, tmp_path, caplog):
    uploader = start()
    uploader.begin(tmp_path / "here" / "global_step8")
    uploader.finish(everything=True)
    assert "global_step8 was not uploaded" in caplog.text
