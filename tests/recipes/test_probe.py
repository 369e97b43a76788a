import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest

from data_prep.errors import InputError
from recipes.training import checkpoint_files, probe
from recipes.training.recipe_file import load_recipe

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


def test_a_directory_that_all_can_write(recipe):
    assert probe.check_checkpoint_directory(recipe, FP32, 0) is None
    assert list((recipe.run_directory / "checkpoints").iterdir()) == []


def test_a_rank_that_can_not_write_is_named(recipe):
    recipe.other = ("Permission denied", True, "host_b")
    with pytest.raises(InputError, match="rank 1 on host_b can't write checkpoints in .*: Permission denied"):
        probe.check_checkpoint_directory(recipe, FP32, 0)


def test_a_directory_that_is_not_shared(recipe):
    recipe.other = (None, False, "host_b")
    with pytest.raises(InputError, match="rank 1 on host_b does not see what rank 0 on .* writes there"):
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
    path = recipe.run_directory / "checkpoints" / checkpoint_files.incomplete_tag(2)
    path.mkdir()
    (path / "model.pt").write_bytes(b"m" * 1234)
    entries = {"model.pt": checkpoint_files.entry_of(path / "model.pt")}
    checkpoint_files.publish(path.parent, 2, {"files": entries})
    assert probe.checkpoint_bytes(recipe, FP32) == 1234
