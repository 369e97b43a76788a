import logging
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from data_prep.errors import InputError
from recipes.training import probe
from recipes.training.recipe_file import load_recipe
from tests.conftest import publish_checkpoint

FP32 = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def recipe(tiny, monkeypatch):
    """A recipe with a checkpoint directory, and a second rank that answers as told."""
    loaded, _ = load_recipe(tiny)
    (loaded.run_directory / "checkpoints").mkdir(parents=True)
    loaded.other = (None, True, "host_b")
    ranks = SimpleNamespace(broadcast=lambda v: v, barrier=lambda: None, gather=lambda v: [v, loaded.other])
    monkeypatch.setattr(probe, "distributed", ranks)
    return loaded


def test_a_directory_that_all_can_write(recipe, caplog):
    with caplog.at_level(logging.INFO, "recipes"):
        assert probe.check_checkpoint_directory(recipe, FP32, 0) is None
    directory = recipe.run_directory / "checkpoints"
    assert list(directory.iterdir()) == []
    assert caplog.messages == [f"{directory} is shared by all ranks: 2 on 2 hosts"]


class Ranks:
    """`distributed` for ranks that are threads."""

    def __init__(self, world: int):
        self._wait, self._values = threading.Barrier(world), [None] * world
        self.here = threading.local()

    def gather(self, value):
        self._wait.wait(20)
        self._values[self.here.rank] = value
        self._wait.wait(20)
        return list(self._values)

    def broadcast(self, value):
        return self.gather(value)[0]

    def barrier(self):
        self.gather(None)


@pytest.mark.parametrize("fault", ["a file", "rank 1 can't write"])
def test_every_rank_names_the_directory(recipe, monkeypatch, fault):
    ranks, directory, write = Ranks(2), recipe.run_directory / "checkpoints", probe._write
    monkeypatch.setattr(probe, "distributed", ranks)
    if fault == "a file":
        directory.rmdir()
        directory.write_text("")
    else:
        monkeypatch.setattr(probe, "_write", lambda path: "Read-only file system" if ranks.here.rank else write(path))

    def refused(rank: int) -> str:
        ranks.here.rank = rank
        return str(pytest.raises(InputError, probe.check_checkpoint_directory, recipe, FP32, rank).value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(refused, (0, 1)))
    assert told[0] == told[1] and f"can't write checkpoints in {directory}: " in told[0]
    assert told[0].startswith("rank 0" if fault == "a file" else "rank 1")


def test_a_rank_that_can_not_write_is_named(recipe):
    recipe.other = ("Permission denied", True, "host_b")
    with pytest.raises(InputError, match="rank 1 on host_b can't write checkpoints in .*: Permission denied"):
        probe.check_checkpoint_directory(recipe, FP32, 0)


def test_a_directory_that_is_not_shared(recipe):
    recipe.other = (None, False, "host_b")
    with pytest.raises(
        InputError, match="is node-local, not shared: rank 1 on host_b does not see what rank 0 on .* writes there"
    ):
        probe.check_checkpoint_directory(recipe, FP32, 0)


def test_this_rank_can_not_write(recipe):
    (recipe.run_directory / "checkpoints").rmdir()
    (recipe.run_directory / "checkpoints").write_text("a file")
    with pytest.raises(InputError, match="rank 0 on .* can't write checkpoints in .*checkpoints: Not a directory"):
        probe.check_checkpoint_directory(recipe, FP32, 0)


def test_room_for_the_next_two(recipe, monkeypatch):
    # 64 x 32 embedding, tied; two layers of 32 x (32 + 16 + 16 + 32) + 3 x 32 x 64 + 2 norms; the last norm
    parameters = 64 * 32 + 2 * (32 * 96 + 3 * 32 * 64 + 64) + 32
    assert probe.checkpoint_bytes(recipe, FP32) == 16 * parameters
    assert probe.checkpoint_bytes(recipe, {**FP32, "bf16": {"enabled": True}}) == 14 * parameters
    size = 16 * parameters
    for free, outcome in ((2 * size, None), (2 * size - 1, "make room for the second"), (size - 1, InputError)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        if outcome is InputError:
            with pytest.raises(InputError, match="GiB are free in .*: make room, or use another output_dir"):
                probe.check_checkpoint_directory(recipe, FP32, 0)
        else:
            warning = probe.check_checkpoint_directory(recipe, FP32, 0)
            assert warning is None if outcome is None else outcome in warning


def test_the_newest_checkpoint_tells_the_size(recipe):
    publish_checkpoint(recipe.run_directory / "checkpoints", 2, model=b"m" * 1234)
    assert probe.checkpoint_bytes(recipe, FP32) == 1234
