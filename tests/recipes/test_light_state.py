"""Light states in one process: what is written, and that steps taken again are compared."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from recipes.training.sizes import Sizes

SIZES = Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start of the run at a step, after which dropout has drawn as often as steps were taken."""
    from recipes.training import distributed
    from recipes.training.checkpoint import Progress
    from recipes.training.light_state import LightStates

    monkeypatch.setattr(distributed, "broadcast", lambda value: value)
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    recipe = SimpleNamespace(run_directory=tmp_path, checkpoint=SimpleNamespace(light_every_steps=2))

    def started(first, steps, seed=0, sizes=SIZES):
        progress = Progress(first, 8 * first, 64 * first, first)
        light = LightStates(recipe, sizes, 0, progress)
        torch.manual_seed(seed)
        torch.rand(first)
        for _ in range(steps):
            torch.rand(1)
            progress.advance(8, 64, True)
            light.see(progress, 100 * progress.step)
        return light

    return started


def test_how_far_a_run_had_got_is_told_and_the_same_steps_are_no_news(start, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert start(0, 5).reached is None and caplog.messages == []
        state = json.loads((tmp_path / "state.json").read_text())
        assert (state["state"], state["step"], state["consumed_samples"], state["metrics_bytes"]) == (
            "running",
            4,
            32,
            400,
        )
        assert start(1, 0).reached == 4
        assert caplog.messages == ["the run had got to step 4: steps 2 to 4 are taken again"]
        start(1, 5)
    assert len(caplog.messages) == 2  # nothing differed
    assert [path.name for path in (tmp_path / "light_state").iterdir()] == ["random_state_rank_0.pt"]


def test_steps_that_come_out_otherwise_are_told(start, tmp_path, caplog):
    start(0, 5)
    start(3, 1, seed=1)
    assert caplog.messages == ["step 4, taken again, did not come out as before: rank 0: random_state differ"]
    caplog.clear()
    start(0, 5)
    caplog.clear()
    start(3, 1, seed=1, sizes=Sizes(2, 2, 1, 1, 1, 1, 1, 1, 2))  # of another layout, whose ranks draw otherwise
    assert caplog.messages == []
    (tmp_path / "light_state" / "random_state_rank_0.pt").write_bytes(b"cut")
    assert start(0, 1).reached is None
