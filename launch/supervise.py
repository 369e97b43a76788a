"""Start a run, and start it again after each fault, with growing pauses, until it ends or gets no further.

    python -m launch.supervise [--max_restarts N] [--pause_s S] [deepspeed options] recipes/pretrain.py --recipe R.yaml ...

For machines where nothing else restarts a job: under a scheduler that requeues, use that alone. The arguments are those of
`launch.run`, which does each start. A mistake in what was given (exit code 2) and a signal to this command end it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import psutil

from data_prep.errors import InputError, OneLineParser, run_command
from launch import run
from recipes.training import checkpoint_files, faults
from recipes.training.settings import Recipe

MARK = "LAUNCH_SUPERVISED"  # in the environment of all that one start has started
LONGEST_PAUSE_S = 600
SAVE_S = 60  # for ranks that outlive their launcher to save and leave


class Supervisor:
    """Starts `launch.run`, and passes this process's signals on to it."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self.stopped = threading.Event()
        for number in faults.StopSignals.NUMBERS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number, _frame) -> None:
        self.stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def start(self, command: list[str]) -> tuple[int, str]:
        """One start, until nothing of it is left: (exit code, the last line that begins with "error:")."""
        mark, causes = uuid.uuid4().hex, []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.run", *command],
            env={**os.environ, MARK: mark},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt from the terminal comes through us, once
        )
        copier = threading.Thread(target=_copy, args=(self._process.stderr, causes))
        copier.start()
        code = self._process.wait()
        end_left_over(mark)  # before the copier: what is left holds the pipe open
        copier.join()
        return code, causes[-1] if causes else f"launch.run ended with code {code}"


def _copy(stream, causes: list[str]) -> None:
    """To our own stderr; what follows "error: " into `causes`."""
    for line in stream:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.startswith("error: "):
            causes.append(line.removeprefix("error: ").strip())


def end_left_over(mark: str) -> None:
    """End what a killed launch.run has left: ranks would hold the run directory, or work on alone."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.terminate()
                left.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(left, timeout=SAVE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive)


def published(recipe: Recipe | None) -> set[tuple[int, int]]:
    """(step, time of its manifest) of each checkpoint: one that is saved again at the same step is another."""
    found = set()
    for path in checkpoint_files.checkpoints(recipe.run_directory / "checkpoints") if recipe is not None else []:
        with contextlib.suppress(OSError):  # no checkpoint, or deleted meanwhile
            found.add((checkpoint_files.step_of(path), (path / checkpoint_files.MANIFEST).stat().st_mtime_ns))
    return found


def saved_since(recipe: Recipe | None, before: set[tuple[int, int]]) -> bool:
    """Whether there is a checkpoint that was not there in `before`, of `published`, and is later than the one asked for.

    One that was only fetched counts where the newest is asked for.
    """
    if recipe is None:
        return False
    resume = recipe.checkpoint.resume
    begun = int(resume) if resume.isdecimal() else -1
    return any(step > begun for step, _ in published(recipe) - before)


def was_stopped(recipe: Recipe | None) -> bool:
    """Whether the run saved and left on a signal, such as when its launcher was killed."""
    state = faults.read_report(recipe.run_directory / "state.json") if recipe is not None else None
    return isinstance(state, dict) and state.get("state") == "stopped"


def going_on(command: list[str], recipe: Recipe) -> list[str]:
    """The command for a run that has saved: --resume none, or STEP, would throw that away."""
    return command if recipe.checkpoint.resume == "latest" else [*command, "--resume", "latest"]


def not_negative(kind: type):
    """For argparse: a number of `kind` from 0 on."""

    def read(text: str):
        try:
            number = kind(text)
        except ValueError:
            number = -1
        if not 0 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
        return number

    return read


def devices_present() -> int | None:
    """NVIDIA devices that the driver has now; None where there is no such driver."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or None


def fitting(command: list[str], accelerator: str | None) -> list[str]:
    """The command for the devices that are there: as given, or with as many ranks as they allow, the global batch kept."""
    options, launcher, script, arguments = run.split_command(command)
    asked, present = run.world_size_of(options), devices_present()
    if asked is None or present is None or present >= asked:
        return command
    for ranks in range(present, 0, -1):
        fewer = {**options, "--num_accelerators": str(ranks)}
        try:
            run.check_script(run.find_script(script, options), arguments, fewer, accelerator, content=False)
        except InputError as error:
            refused = error
            continue
        print(f"{present} of {asked} devices are left: going on with {ranks} ranks", file=sys.stderr, flush=True)
        return [*(_without_count(launcher)), "--num_accelerators", str(ranks), script, *arguments]
    raise InputError(f"{present} of {asked} devices are left, and the run can't go on with fewer ranks: {refused}")


def _without_count(launcher: list[str]) -> list[str]:
    kept, words = [], iter(launcher)
    for word in words:
        name, separator, _ = word.partition("=")
        if name not in ("--num_accelerators", "--num_gpus"):
            kept.append(word)
        elif not separator:
            next(words)
    return kept


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m launch.supervise",
        description=__doc__.splitlines()[0],
        epilog="then as launch.run",
    )
    restarts, seconds = not_negative(int), not_negative(float)
    parser.add_argument(
        "--max_restarts", type=restarts, default=5, help="in a row without a new checkpoint (default: 5)"
    )
    parser.add_argument("--pause_s", type=seconds, default=10, help="before the first restart; doubled each time")
    own, command = parser.parse_known_args(argv)
    options, _, script, arguments = run.split_command(command)
    accelerator = run.find_accelerator()
    recipe = run.check_script(run.find_script(script, options), arguments, options, accelerator, content=False)
    supervisor, failures, first = Supervisor(), 0, ""
    while True:
        before = published(recipe)
        code, cause = supervisor.start(command if not failures else fitting(command, accelerator))
        if code == faults.USER_MISTAKE or supervisor.stopped.is_set() or code == 0 and not was_stopped(recipe):
            return code if code >= 0 else faults.FAULT
        if code == 0:
            cause = "stopped by a signal that did not come through this command"
        if saved_since(recipe, before):
            failures, command = 0, going_on(command, recipe)
            recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="latest"))
        first = cause if failures == 0 else first
        failures += 1
        if failures > own.max_restarts:
            print(
                f"error: {failures} starts in a row without a new checkpoint; the first ended so: {first}",
                file=sys.stderr,
            )
            return faults.FAULT
        pause = min(own.pause_s * 2 ** (failures - 1), LONGEST_PAUSE_S)
        print(f"starting again in {pause:g} s ({failures} of {own.max_restarts}): {cause}", file=sys.stderr, flush=True)
        if supervisor.stopped.wait(pause):
            return faults.FAULT


if __name__ == "__main__":
    sys.exit(run_command(main))
