"""Copies of checkpoints elsewhere, and going on from them, without ranks."""

import json
import shutil
import time

import fsspec
import pytest

from data_prep.errors import InputError, run_command
from recipes.training import checkpoint, distributed, loop, upload
from recipes.training import checkpoint_files as files
from recipes.training.prepare import prepare
from tests.conftest import add_checkpoint

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
        def put_file(self, _local, _remote, callback):
            for _ in range(blocks):
                time.sleep(0.05)
                callback.relative_update(1)
            time.sleep(0.4)  # stalled

    monkeypatch.setattr(files, "open_remote", lambda url: (Slow(), "root"))
    uploader, beats = upload.Uploader(URL), []
    uploader.begin(run.add(9))
    uploader.finish(lambda: beats.append(time.monotonic()))
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
