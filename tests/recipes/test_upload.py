"""Copies of checkpoints elsewhere, without ranks."""

import time

import pytest

from recipes.training import checkpoint_files as files
from recipes.training import distributed, upload


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    monkeypatch.setattr(distributed, "broadcast", lambda value: value)
    monkeypatch.setattr(upload.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(upload.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(upload.dist, "barrier", lambda: None)


def add(directory, step, content=b"m"):
    path = directory / files.incomplete_tag(step)
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    return files.publish(directory, step, {"files": {"model.pt": files.entry_of(path / "model.pt")}})


def test_the_watchdog_hears_of_an_upload_as_long_as_it_moves(tmp_path, monkeypatch):
    """The last upload takes as long as it takes; one that stands still must not."""
    blocks = 5

    class Slow:
        def put_file(self, _local, _remote, callback):
            for _ in range(blocks):
                time.sleep(0.05)
                callback.relative_update(1)
            time.sleep(0.4)  # stalled

    monkeypatch.setattr(files, "open_remote", lambda url: (Slow(), "root"))
    monkeypatch.setattr(upload, "POLL_S", 0.01)
    uploader, beats = upload.Uploader("memory://bucket"), []
    uploader.begin(add(tmp_path, 3))
    uploader.finish(lambda: beats.append(time.monotonic()))
    assert uploader.path is None and len(beats) >= 2 * blocks
    assert max(after - before for before, after in zip(beats, beats[1:], strict=False)) > 0.3
