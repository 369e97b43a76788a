import json
import math

import pytest

from data_prep.errors import InputError
from monitoring import report
from monitoring.metrics import KEYS, MetricsWriter, StepClock, duration, jsonable, read_metrics, step_line

VALUES = {
    "consumed_samples": 8,
    "consumed_tokens": 128,
    "loss": 3.0,
    "grad_norm": 1.5,
    "lr": 1e-3,
    "applied": True,
    "applied_updates": 1,
    "skipped_steps": 0,
    "loss_scale": None,
    "step_time_s": 0.5,
    "data_wait_s": 0.0,
    "tokens_per_s": 256.0,
    "tokens_per_s_per_device": 128.0,
    "model_tflops_per_device": 0.1,
    "mfu": None,
    "memory_gib": 1.0,
}


def write(run, attempt, steps, validation=(), **changes):
    run.mkdir(exist_ok=True)
    writer = MetricsWriter(run, attempt, steps[0], tensorboard=True)
    for step in steps:
        writer.write(step, {**VALUES, **changes})
        if step in validation:
            writer.write(step, {"validation_loss": 2.0, "validation_tokens": 100})
    writer.close()


def test_lines_have_every_key_and_are_valid_json(tmp_path):
    write(tmp_path / "run", 1, [1, 2], validation=[2], loss=math.nan, grad_norm=math.inf)
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [key for key in lines[0] if not key.endswith("_reason")] == KEYS
    assert lines[0]["loss"] is None and lines[0]["loss_reason"] == "nan"
    assert lines[0]["grad_norm"] is None and lines[0]["grad_norm_reason"] == "inf"
    assert lines[2]["validation_loss"] == 2.0 and lines[2]["step"] == 2


def test_jsonable_leaves_finite_values():
    assert jsonable({"a": 1.5, "b": None, "c": 3, "d": "x"}) == {"a": 1.5, "b": None, "c": 3, "d": "x"}


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path / "run", 1, [1, 2], validation=[2])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.0), (2, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation/loss")] == [(2, 2.0)]
    assert "train/loss_scale" not in events.Tags()["scalars"]


def test_a_repeated_step_counts_once_and_an_abandoned_branch_not_at_all(tmp_path):
    run = tmp_path / "run"
    write(run, 1, [1, 2, 3, 4, 5], loss=5.0)
    write(run, 2, [3, 4], loss=4.0)
    training, _ = read_metrics(run)
    assert [(line["step"], line["loss"]) for line in training] == [(1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0)]
    assert report.resumes(training) == [3]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    assert len(read_metrics(run)[0]) == 4


def test_speed_of_a_step(monkeypatch):
    times = iter([10.0, 10.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StepClock(flops_per_token=10**9, devices=2, peak_tflops=100.0)
    clock.start()
    values = clock.stop(2048)  # micro 2 x accumulation 4 x sequence 128 x data parallel 2
    assert values["tokens_per_s"] == 4096 and values["tokens_per_s_per_device"] == 2048
    assert values["model_tflops_per_device"] == pytest.approx(2.048) and values["mfu"] == pytest.approx(0.02048)
    assert clock.eta_s(10) == 5.0


def test_step_line():
    line = step_line(7, 120, VALUES, 75.0)
    assert line == "step   7/120  loss 3.0000  grad_norm 1.500  lr 1.00e-03  256 tok/s  ETA 1m15s"
    assert "grad_norm n/a" in step_line(7, 120, {**VALUES, "grad_norm": None}, 1)
    assert "no update: non-finite gradients" in step_line(7, 120, {**VALUES, "applied": False}, 1)


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (65, "1m05s"), (3700, "1h01m"), (200000, "2d07h")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_report_and_picture(tmp_path, capsys):
    run = tmp_path / "run"
    write(run, 1, [1, 2, 3], validation=[1], loss=5.0)
    write(run, 2, [3, 4], validation=[4], loss=4.0)
    (run / "state.json").write_text('{"state": "finished", "step": 4, "cause": null}')
    report.main([str(run)])
    printed = capsys.readouterr().out
    assert "training loss    5.0000 (step 1) -> 4.0000 (step 4)" in printed and "resumed          at step 3" in printed
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="has no metrics.jsonl"):
        report.main([str(tmp_path)])
