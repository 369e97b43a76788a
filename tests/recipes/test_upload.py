"""Copies of checkpoints at a URL, in one process; with ranks and S3: test_faults.py."""

import logging

import pytest

from recipes.training import checkpoint_files
from tests.conftest import publish_checkpoint


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """An uploader of a run's only rank, to a directory that isn't there yet; checkpoints 2, 4 and 6 are here."""
    from recipes.training import distributed, upload

    monkeypatch.setattr(upload, "PAUSE_S", 0)
    monkeypatch.setattr(upload.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(upload.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
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
    assert checkpoint_files.damaged_because(copy, ["model.pt", "shard.pt"]) is None
    assert checkpoint_files.remote_steps(uploader.url) == [4]


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
    assert {checkpoint_files.step_of(path) for path in uploader.needed()} == {2, 4, 6, 8, 9}
    uploader._work.result()
    uploader.advance()
    assert [checkpoint_files.step_of(path) for path in uploader.needed()] == [8, 6, 2]
    uploader.begin(publish_checkpoint(tmp_path / "here", 10, model=b"m"))  # a new one comes before those that wait
    uploader.finish(everything=True)
    assert uploaded(caplog) == [8, 10, 6, 2] and uploader.needed() == []
    assert checkpoint_files.remote_steps(uploader.url) == [10, 8, 6, 4, 2]
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
    assert checkpoint_files.incomplete_because(there) is None and (there / "model.pt").read_bytes() == b"mmmm"


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
