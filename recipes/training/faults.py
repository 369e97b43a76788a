"""How ranks end: stop signals agreed on at a step boundary, and a fault on one rank that ends all of them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from data_prep.errors import InputError
from data_prep.files import write_json

POLL_S = 0.5
FAULT, USER_MISTAKE = 1, 2
REPORT_VARIABLE = "LAUNCH_RUN_REPORT"  # set by launch.run: a file for what a rank refuses before the run has begun


class StopSignals:
    """Remembers that SIGTERM, SIGUSR1 or SIGINT came; the training loop asks at each step boundary.

    Installed only when there is something to save: before that the signals end the process as usual.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self.received: str | None = None
        for number in self.NUMBERS:
            signal.signal(number, self._remember)

    def _remember(self, number, _frame) -> None:
        self.received = signal.Signals(number).name

    def stop_requested(self) -> bool:
        return self.received is not None


class SkipGuard:
    """Ends a run whose updates are left out time after time: gradients that are not finite, or spikes."""

    def __init__(self, most_in_a_row: int):
        self.most_in_a_row, self.in_a_row, self.spikes = most_in_a_row, 0, 0

    def check(self, step: int, applied: bool, spiked: bool = False) -> None:
        """Raises FloatingPointError at the limit, naming the last good step. `spiked`: the update was left out for that."""
        self.in_a_row = 0 if applied else self.in_a_row + 1
        self.spikes = 0 if applied else self.spikes + spiked
        if self.in_a_row >= self.most_in_a_row:
            causes = {0: "the gradients not being finite", self.in_a_row: "the loss being a spike"}
            cause = causes.get(
                self.spikes, f"{self.spikes} for a spike of the loss, the others' gradients not being finite"
            )
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row had no update, {cause}; the last good step was "
                f"{step - self.in_a_row} (guards.max_skipped_in_a_row)"
            )


def failure_file(logs: Path, rank: int) -> Path:
    return logs / f"failed_rank_{rank}.json"


def failures(logs: Path) -> list[dict]:
    """What ranks reported in `logs`, earliest first; reports of earlier starts can be among them."""
    found = [report for file in logs.glob("failed_rank_*.json") if (report := read_report(file)) is not None]
    return sorted(found, key=lambda failure: failure["time"])


def read_report(file: Path) -> dict | None:
    """What a rank wrote, None while there is nothing whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def describe(failure: dict) -> str:
    """One line: whose fault, what."""
    if failure["exit_code"] == USER_MISTAKE:
        return f"error: {failure['error']}"
    return f"error: rank {failure['rank']} on {failure['host']} failed: {failure['error']} (see {failure['log']})"


class FaultWatch:
    """Ends this rank when another one has failed, even while a collective blocks the main thread.

    A failing rank writes logs/failed_rank_N.json; a daemon thread in every other one polls for it and leaves at once.
    Without it the deepspeed launcher ends ranks that hold a signal handler one after the other, 30 s each. Until
    `start` the launcher's way is quick enough.
    """

    def __init__(self, run_directory: Path, rank: int):
        self.run_directory, self.rank = run_directory, rank
        self.logs = run_directory / "logs"
        self.start_id: str | None = None
        self._closed = threading.Event()

    def start(self, start_id: str) -> None:
        """Watch from now on. `start_id`: the same on all ranks, and new at every start: old reports don't count."""
        self.start_id = start_id
        threading.Thread(target=self._watch, name="fault-watch", daemon=True).start()

    def _others(self) -> list[dict]:
        found = failures(self.logs) if self.start_id else []
        return [f for f in found if f["start_id"] == self.start_id and f["rank"] != self.rank]

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            for failure in self._others()[:1]:
                logging.getLogger(__name__).info("leaving: %s", describe(failure))
                _leave(failure["exit_code"])

    def close(self) -> None:
        self._closed.set()

    def fail(self, error: BaseException) -> None:
        """Report this rank's failure and leave the process: no clean-up that could block on the other ranks.

        A KeyboardInterrupt is no failure: whoever sent it ends the other ranks too.
        """
        self.close()
        if isinstance(error, KeyboardInterrupt):
            _leave(FAULT)
        first = not self._others()
        mistake = isinstance(error, InputError)
        text = str(error) if mistake else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        failure = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "error": text,
            "exit_code": USER_MISTAKE if mistake else FAULT,
            "time": time.time(),
            "start_id": self.start_id,
            "log": str(self.logs / f"rank_{self.rank}.log"),
            "traceback": None if mistake else "".join(traceback.format_exception(error)),
        }
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_json(failure_file(self.logs, self.rank), failure)
        except OSError as problem:
            print(f"could not report the failure below in {self.logs}: {problem}", file=sys.stderr)
        if mistake and self.rank != 0:
            time.sleep(2 * POLL_S)  # a mistake that all ranks see is printed once, by rank 0
            first = not self._others()
        if first:
            if not mistake:
                print(failure["traceback"], file=sys.stderr, flush=True)
                logging.getLogger(__name__).info("failed", exc_info=error)
            print(describe(failure), file=sys.stderr, flush=True)
            if self.start_id:  # this start owns the run directory
                write_state(self.run_directory, "failed", None, text)
        _leave(failure["exit_code"])


def write_state(run_directory: Path, state: str, step: int | None, cause: str | None, **more) -> None:
    """state.json: running | finished | stopped | failed, the last step known, the cause, and `more`."""
    previous = run_directory / "state.json"
    if step is None and previous.exists():
        try:
            step = json.loads(previous.read_text(encoding="utf-8")).get("step")
        except ValueError:
            step = None
    try:
        write_json(previous, {"state": state, "step": step, "cause": cause, **more, "time": time.time()})
    except OSError as problem:
        print(f"could not write {previous}: {problem}", file=sys.stderr)


def refuse_before_start(error: InputError | ConnectionError) -> int:
    """A mistake, or a storage out of reach, before the process group exists: every rank has found it, local rank 0 prints it.

    The others wait for the launcher to end them: one that left first would take rank 0 down before it printed.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
        if REPORT_VARIABLE in os.environ and isinstance(error, InputError):
            Path(os.environ[REPORT_VARIABLE]).write_text(f"error: {error}", encoding="utf-8")
    else:
        time.sleep(20)
    return USER_MISTAKE if isinstance(error, InputError) else FAULT


def _leave(code: int) -> None:
    for child in multiprocessing.active_children():  # such as DeepSpeed's decoupled writer, which would wait for ever
        child.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
