"""The loop's rules, with an engine that trains nothing: what is saved, checked, gone back to, and when."""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.training import checkpoint, distributed, guards, loop, parents, probe, run_directory
from recipes.training.faults import StopSignals
from recipes.training.prepare import prepare
from recipes.training.recipe_file import load_recipe
from recipes.training.step import StepResult
from tests.conftest import add_checkpoint


class FakeSaver:
    """Remembers what is done, in `events`, and makes empty directories."""

    def __init__(self, recipe, events: list, _sizes, _data, _order_samples, parent):
        self.directory, self.events, self.kept = recipe.run_directory / "checkpoints", events, recipe.checkpoint
        self.total = recipe.total_steps
        events.append(f"parent {parent}")

    def save(self, progress):
        (self.directory / f"global_step{progress.step}").mkdir()
        self.events.append(f"save {progress.step}")

    def due(self, step):
        return step == self.total or self.kept.every_steps is not None and step % self.kept.every_steps == 0

    def flags(self):
        return []

    def advance(self):
        pass

    def finish(self):
        pass

    def close(self, _everything, beat):
        beat()
        self.events.append("saver closed")


class FakeReplicas:
    def __init__(self, events: list):
        self.events = events

    def check(self, step):
        self.events.append(f"check {step}")


@pytest.fixture
def train(tiny, monkeypatch, caplog):
    """train(*overrides, losses=[...], ...) -> (events, log): a whole run of as many steps, in this process."""
    events: list[str] = []
    place = SimpleNamespace(rank=0, local_rank=0, world_size=1, local_world_size=1)
    monkeypatch.setattr(distributed, "start_process_group", lambda _: "cpu")
    monkeypatch.setattr(distributed, "broadcast", lambda value: value)
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "stop_process_group", lambda: None)
    monkeypatch.setattr(probe, "check_checkpoint_directory", lambda *_: None)
    monkeypatch.setattr(run_directory, "start_logging", lambda *_: None)
    monkeypatch.setattr(guards, "ReplicaCheck", lambda _engine: FakeReplicas(events))
    earlier: list = []

    def choose(recipe, *_):
        saved = checkpoint.checkpoint_files.checkpoints(recipe.run_directory / "checkpoints")
        return saved[-1] if saved else None

    def resume(_engine, _recipe, _sizes, path, *_):
        step = checkpoint.checkpoint_files.step_of(path)
        events.append(f"resume {step}")
        recent = {"loss": [2.0] * 3, "grad_norm": [1.0] * 3}
        return checkpoint.Progress(step, step * 8, 0, step, left_out=list(earlier), recent=recent)

    monkeypatch.setattr(checkpoint, "choose", choose)
    monkeypatch.setattr(checkpoint, "resume", resume)
    monkeypatch.setattr(checkpoint, "Saver", lambda _engine, recipe, *rest: FakeSaver(recipe, events, *rest))
    for kept in ("close", "beat"):
        monkeypatch.setattr(guards.Watchdog, kept, lambda *_, kept=kept: events.append(f"watchdog {kept}"))

    def prepare_it(*overrides):
        arguments = loop.parse_arguments("", ["--recipe", str(tiny), "schedule.decay=constant", *overrides])
        return prepare(arguments, 1, "cpu")

    def run(*overrides, losses, left_out=(), stop_at=None, not_applied=()):
        earlier.extend(left_out)
        taken = iter(enumerate(losses, 1))

        def train_step(_engine, _batch, _sizes, flags, **_options):
            number, loss = next(taken)
            if number == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            applied = number not in not_applied
            return StepResult(loss, 1.0, 0.1, 128, applied, tuple(flags()), None)

        def validate(*_):
            events.append("validate")
            return 1.0, 10

        prepared = prepare_it(*overrides)
        run_directory.open_run_directory(prepared)
        watch = SimpleNamespace(start=lambda _: None, logs=Path(prepared.recipe.run_directory) / "logs", rank=0)
        caplog.clear()
        with caplog.at_level(logging.INFO, "recipes"):
            loop.train(prepared, place, watch, lambda: loop.Method(lambda _: None, train_step, validate))
        return [event for event in events if event.split()[0] in ("save", "check", "resume")], caplog.text

    run.events, run.prepare = events, prepare_it
    before = {number: signal.getsignal(number) for number in StopSignals.NUMBERS}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
    while run_directory._held:
        run_directory._held.pop().close()


ROLLBACK = ("guards.spike=rollback", "guards.spike_window=3")


def test_a_spike_with_nothing_to_go_back_to_is_a_warning(train):
    """In the last step: the run ends with its checkpoint."""
    events, log = train(*ROLLBACK, "checkpoint.every_steps=null", losses=[2.0] * 7 + [90.0])
    assert "step 8: loss 90 is above" in log and "no checkpoint to go back to: going on" in log
    assert events == ["save 8"] and "finished at step 8" in log


def test_going_back(train):
    events, log = train(*ROLLBACK, losses=[2.0] * 4 + [90.0] + [2.0] * 5)
    assert events == ["save 3", "resume 3", "save 6", "save 8"]
    assert "going back to global_step3, without samples 32 to 40" in log


def add(train, *overrides, step=3, **changes):
    """A checkpoint that the next start goes on from."""
    prepared = train.prepare(*overrides)
    return add_checkpoint(prepared.recipe, prepared.ds_config, prepared.sizes, step, **changes)


def test_a_run_with_checkpoints_keeps_the_parent_that_it_has(train, tiny):
    parent = f"{tiny.parent}/runs/parent@2"
    add(train, "name=parent", step=2)
    add(train, parent=parent)
    _, log = train("--branch_from", parent, losses=[2.0] * 5)
    assert f"parent {parent}" in train.events and f"begun from {parent}, this run has checkpoints of its own" in log


def test_the_recipe_kept_of_a_run_with_a_parent_can_be_started(train, tiny, monkeypatch):
    """By name or as a parent's: the weights that it began with are not part of it."""
    add(train, "name=parent", step=2)

    def with_weights(prepared, _rank):
        model = replace(prepared.recipe.model, init_from="exported")
        return replace(prepared, recipe=replace(prepared.recipe, model=model))

    monkeypatch.setattr(parents, "with_parent_weights", with_weights)
    parent = f"{tiny.parent}/runs/parent@2"
    train("--start_from", parent, losses=[2.0] * 8)
    kept, _ = load_recipe(tiny.parent / "runs" / "tiny" / "recipe.yaml")
    assert kept.checkpoint.start_from == parent and f"parent {parent}" in train.events


def test_a_requeued_command_without_the_parent_keeps_it_too(train, tiny):
    add(train, parent="/elsewhere/parent@2")
    train(losses=[2.0] * 5)
    assert "parent /elsewhere/parent@2" in train.events


def test_rollbacks_of_earlier_starts_count(train):
    add(train)
    earlier = [[800, 808], [816, 824], [832, 840]]
    with pytest.raises(FloatingPointError, match="step 5: loss 90 is above .* after 1 rollbacks"):
        train(*ROLLBACK, "guards.max_rollbacks=1", losses=[2.0, 90.0], left_out=earlier)
    assert "save 5" not in train.events


@pytest.mark.parametrize(
    ("steps", "events", "said"),
    [
        (5, ["save 3"], "stopped at step 5 of 8 by SIGTERM; the same command goes on from step 3"),
        # With nothing to go back to, as other steps.
        (2, ["save 2"], "stopped at step 2 of 8 by SIGTERM; the same command goes on from here"),
        # Nobody would take the last step again.
        (8, ["save 3", "save 6", "resume 6"], "stopped at step 6 of 8 by SIGTERM"),
    ],
)
def test_a_spike_in_the_step_of_a_stop_signal_is_not_saved(train, steps, events, said):
    window = "guards.spike_window=1"
    found, log = train(*ROLLBACK, window, losses=[2.0] * (steps - 1) + [90.0], stop_at=steps)
    assert found == events and said in log


def test_replicas_are_checked_before_every_save(train):
    every = ("guards.replica_check_every=5", "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    events, _ = train(*every, losses=[2.0] * 6, stop_at=6)
    assert events == [
        "check 0",
        *(e for s in (2, 4) for e in (f"check {s}", f"save {s}")),
        "check 5",
        "check 6",
        "save 6",
    ]


def test_the_watchdog_is_there_until_the_last_upload(train):
    train(losses=[2.0] * 8)
    assert train.events[-3:] == ["watchdog beat", "saver closed", "watchdog close"]


def test_an_update_left_out_for_a_spike_is_told_as_that(train, caplog):
    skip = ("guards.spike=skip_step", "guards.spike_window=3", "guards.max_skipped_in_a_row=2")
    with pytest.raises(
        FloatingPointError, match="2 steps in a row had no update, the loss being a spike; the last good"
    ):
        train(*skip, losses=[2.0] * 4 + [90.0] * 2, not_applied=(5, 6))
    assert "step 6: loss 90 is above" in caplog.text and "the gradients alone" not in caplog.text
