"""The one place where a run's numbers are written: metrics.jsonl, TensorBoard, and the step line on the screen."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path

from data_prep.files import naming

# Training lines of metrics.jsonl, in this order. Validation lines have step, validation_loss, validation_tokens.
KEYS = """
    step consumed_samples consumed_tokens loss grad_norm lr applied_updates skipped_steps loss_scale
    step_time_s data_wait_s tokens_per_s tokens_per_s_per_device model_tflops_per_device mfu memory_gib
    attempt time
    """.split()
# Of models with experts: for each of their layers, tokens of the busiest expert / tokens of the average one.
BY_LAYER = "expert_load"
# Where the recipe has them: nats² and none, means over tokens before their weights; `loss` holds neither.
OPTIONAL = ("z_loss", "balance_loss", BY_LAYER)
# Keys whose values are no curve.
NOT_PLOTTED = {"step", "attempt", "time"}


def jsonable(values: dict) -> dict:
    """`values` with every non-finite number replaced by null, and KEY_reason saying what it was: valid JSON always."""
    clean = {}
    for key, value in values.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        clean[key] = value if finite else None
        if not finite:
            clean[f"{key}_reason"] = str(value)
    return clean


class MetricsWriter:
    """Appends lines to RUN/metrics.jsonl and scalars to RUN/tensorboard. For rank 0 alone.

    Args:
        run_directory: the run.
        attempt: number of this start of the run, from 1; on every line, so that readers can tell repeated steps apart.
        first_step: first step that this attempt will write; TensorBoard hides what an earlier attempt wrote from it on.
    """

    def __init__(self, run_directory: Path, attempt: int, first_step: int, tensorboard: bool = True):
        self.attempt = attempt
        self._path = run_directory / "metrics.jsonl"
        self._file = open(self._path, "a+b")
        if self._file.tell():
            self._file.seek(-1, 2)
            if self._file.read() != b"\n":  # a disk that was full has cut the last line: what follows stays readable
                self._file.write(b"\n")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(run_directory / "tensorboard"), purge_step=first_step if attempt > 1 else None
            )

    def write(self, step: int, values: dict) -> None:
        """One line of metrics.jsonl; finite numbers go to TensorBoard too."""
        values = {"step": step, **values, "attempt": self.attempt, "time": time.time()}
        if "validation_loss" not in values:
            values = {key: values[key] for key in (*KEYS, *(key for key in OPTIONAL if key in values))}
        line = jsonable(values)
        with naming(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        if self._board is not None:
            group = "validation" if "validation_loss" in line else "train"
            for key, value in line.items():
                if key == BY_LAYER:
                    for layer, load in enumerate(value):
                        self._board.add_scalar(f"{BY_LAYER}/layer_{layer}", load, step)
                elif isinstance(value, (int, float)) and key not in NOT_PLOTTED:
                    self._board.add_scalar(f"{group}/{key.removeprefix('validation_')}", value, step)

    @property
    def position(self) -> int:
        """Bytes of metrics.jsonl."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class StepClock:
    """Times of steps, what lies between them (validation, saving) left out.

    Args:
        flops_per_token: model FLOPs, forward and backward.
        devices: ranks in all.
        peak_tflops: of one device, or None where unknown.
    """

    def __init__(self, flops_per_token: int, devices: int, peak_tflops: float | None):
        self.flops_per_token, self.devices, self.peak_tflops = flops_per_token, devices, peak_tflops
        self._begin = 0.0
        self._recent: deque[float] = deque(maxlen=20)

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self, tokens: int) -> dict:
        """Speeds of the step that took `tokens` tokens over all ranks, by metrics.jsonl's names."""
        seconds = time.perf_counter() - self._begin
        self._recent.append(seconds)
        per_second = tokens / seconds
        tflops = per_second * self.flops_per_token / self.devices / 1e12
        return {
            "step_time_s": seconds,
            "tokens_per_s": per_second,
            "tokens_per_s_per_device": per_second / self.devices,
            "model_tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }

    def eta_s(self, steps_left: int) -> float:
        # The median: a first step that compiles, or a disk that stalls, is not the rule.
        ordered = sorted(self._recent)
        return ordered[len(ordered) // 2] * steps_left


def step_line(step: int, total: int, values: dict, eta_s: float) -> str:
    """One line a step: step/total, loss, gradient norm, learning rate, tokens/s, time to go."""

    def number(value, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    width = len(str(total))
    skipped = "" if values["applied"] else "  (no update: non-finite gradients)"
    return (
        f"step {step:>{width}}/{total}  loss {number(values['loss'], '.4f')}  grad_norm {number(values['grad_norm'], '.3f')}  "
        f"lr {values['lr']:.2e}  {values['tokens_per_s']:,.0f} tok/s  ETA {duration(eta_s)}{skipped}"
    )


def duration(seconds: float) -> str:
    seconds = round(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds % 60:02}s" if minutes else f"{seconds}s"


def read_metrics(run_directory: Path) -> tuple[list[dict], list[dict]]:
    """(training lines, validation lines) of a run by step; where attempts repeat a step, the later one counts.

    A last line cut short by a kill is left out.
    """
    training: dict[int, dict] = {}
    validation: dict[int, dict] = {}
    for text in (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        kind = validation if "validation_loss" in line else training
        kind[line["step"]] = line
    # Steps that an abandoned attempt reached and a later one, resumed before them, has not reached yet.
    attempts = [line["attempt"] for _, line in sorted(training.items())]
    if attempts and max(attempts) != attempts[-1]:
        last = max(step for step, line in training.items() if line["attempt"] == max(attempts))
        training = {step: line for step, line in training.items() if step <= last}
        validation = {step: line for step, line in validation.items() if step <= last}
    return [training[s] for s in sorted(training)], [validation[s] for s in sorted(validation)]
