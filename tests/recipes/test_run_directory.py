import json
import logging
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from monitoring.metrics import MetricsWriter
from recipes.training import distributed, loop, run_directory
from recipes.training.recipe_file import load_recipe
from recipes.training.sizes import Sizes


@pytest.mark.parametrize(
    ("resume", "step", "unsaved", "state", "said"),
    [
        ("latest", 3, 0, "stopped", "stopped at step 3 of 8 by SIGTERM; the same command goes on from here"),
        # The same command would move the run aside, or go back to step 2.
        ("none", 3, 0, "stopped", "the same command with --resume latest goes on from here"),
        ("2", 3, 0, "stopped", "the same command with --resume latest goes on from here"),
        ("latest", 4, 1, "stopped", "the same command goes on from step 3"),
        ("latest", 8, 0, "finished", "finished at step 8"),
    ],
)
def test_the_closing_line_says_how_to_go_on(tiny, caplog, resume, step, unsaved, state, said):
    recipe, _ = load_recipe(tiny, resume=resume)
    for saved in (2, step - unsaved):
        (recipe.run_directory / "checkpoints" / f"global_step{saved}").mkdir(parents=True, exist_ok=True)
    with caplog.at_level(logging.INFO, "recipes"):
        run_directory.record_end(recipe, step, "SIGTERM")
    assert said in caplog.text
    written = json.loads((recipe.run_directory / "state.json").read_text())
    assert (written["state"], written["step"]) == (state, step)
    assert written["cause"] == ("SIGTERM" if state == "stopped" else None)


def test_a_run_directory_that_can_not_be_written(tiny, capsys, monkeypatch):
    """The plain script: one line with the mend, and code 2. As on a read-only disk, the lock can't be opened."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    run = tiny.parent / "runs" / "tiny"
    (run / ".lock").mkdir(parents=True)
    assert loop.run("recipes/pretrain.py", "", None, ["--recipe", str(tiny)]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told == f"error: {run} can't be written: Is a directory; make it writable, or use another output_dir"


@pytest.mark.parametrize("file", ["metrics.jsonl", "logs/samples_rank_0.jsonl", "light_state/random_state_rank_0.tmp"])
def test_what_a_full_disk_refuses_is_named(tiny, file):
    from recipes.training.checkpoint import Progress
    from recipes.training.light_state import LightStates

    recipe, _ = load_recipe(tiny, ["checkpoint.light_every_steps=1"])
    path = recipe.run_directory / file
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        if "metrics" in file:
            MetricsWriter(recipe.run_directory, 1, 1, tensorboard=False).write(1, {"validation_loss": 1.0})
        elif "samples" in file:
            batch = SimpleNamespace(samples=np.zeros(2), checksum=lambda: 0)
            run_directory.SampleLog(recipe, 0).write(1, batch)
        else:
            with mock.patch.object(distributed, "broadcast", lambda value: value):
                LightStates(recipe, Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1), 0, Progress()).see(Progress(1), 0)
