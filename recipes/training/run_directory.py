"""The run directory: what a run was started with, its logs, its state."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

from data_prep.errors import InputError
from data_prep.files import make_directory, naming, read_json, write_json, write_text
from recipes.training import checkpoint_files, faults
from recipes.training.recipe_file import effective_yaml
from recipes.training.settings import REPOSITORY

PACKAGES = ("deepspeed", "torch", "transformers", "tokenizers", "numpy", "omegaconf")
logger = logging.getLogger("recipes")


def open_run_directory(prepared) -> None:
    """Rank 0 makes the directory and locks it; with --resume none an earlier run there is moved aside, whole.

    Raises InputError when another run is at work in it, or it can't be written.
    """
    directory = prepared.recipe.run_directory
    make_directory(directory, "run directory")
    _held.append(_lock(directory))
    if prepared.recipe.checkpoint.resume == "none" and checkpoint_files.checkpoints(directory / "checkpoints"):
        moved = checkpoint_files.set_aside(directory)
        print(f"--resume none: the earlier run in {directory} was moved to {moved}")
        make_directory(directory, "run directory")
        _held.append(_lock(directory))
    for name in ("checkpoints", "logs"):
        make_directory(directory / name, "run directory")


_held: list = []  # open lock files; the locks end with the process


def _lock(directory: Path):
    try:
        file = open(directory / ".lock", "a")
    except OSError as error:
        raise InputError(
            f"{directory} can't be written: {error.strerror}; make it writable, or use another output_dir"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"another run is at work in {directory}: wait for it, stop it, or use another name=... for this one"
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def check_unlocked(directory: Path) -> None:
    """Raises InputError when another run is at work in `directory`."""
    if directory.is_dir():
        _lock(directory).close()


def record_start(prepared, device) -> int:
    """Write recipe.yaml, ds_config.json and environment.json; returns the attempt's number, from 1. Rank 0 only."""
    directory, recipe = prepared.recipe.run_directory, prepared.recipe
    environment = directory / "environment.json"
    attempts = read_json(environment)["attempts"] if environment.exists() else []
    attempts.append(
        {
            "attempt": len(attempts) + 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": [sys.executable, *sys.argv],
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "device": str(device),
            "sizes": prepared.sizes.as_dict(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "git": _git_state(),
        }
    )
    write_json(environment, {"attempts": attempts})
    # Without `_recipe`, which recipe.yaml has in it.
    config = {key: value for key, value in prepared.ds_config.items() if key != "_recipe"}
    write_text(directory / "ds_config.json", json.dumps(config, indent=2) + "\n")
    kept = dataclasses.replace(
        recipe,
        deepspeed_config=str(directory / "ds_config.json"),
        checkpoint=dataclasses.replace(recipe.checkpoint, resume="latest"),  # started again, it goes on
    )
    write_text(directory / "recipe.yaml", effective_yaml(kept))
    for file in (directory / "logs").glob("failed_rank_*.json"):  # of an earlier start: all ranks of this one are here
        file.unlink(missing_ok=True)
    faults.write_state(directory, "running", None, None)
    return len(attempts)


def record_end(recipe, step: int, signal_name: str | None) -> None:
    """state.json and the closing line: finished, or stopped by a signal (to this rank, or to another: None)."""
    finished = step >= recipe.total_steps
    cause = None if finished else signal_name or "a signal to another rank"
    faults.write_state(recipe.run_directory, "finished" if finished else "stopped", step, cause)
    if finished:
        logger.info("finished at step %d: %s", step, recipe.run_directory)
    else:
        again = "the same command" + ("" if recipe.checkpoint.resume == "latest" else " with --resume latest")
        saved = checkpoint_files.checkpoints(recipe.run_directory / "checkpoints")
        newest = checkpoint_files.step_of(saved[-1]) if saved else 0
        where = "here" if newest == step else f"step {newest}"
        logger.info("stopped at step %d of %d by %s; %s goes on from %s", step, recipe.total_steps, cause, again, where)


def start_logging(directory: Path, rank: int) -> None:
    """Every rank to logs/rank_N.log; rank 0 to the screen too. Python warnings and DeepSpeed's log go the same way."""
    to_file = logging.FileHandler(directory / "logs" / f"rank_{rank}.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        to_screen = logging.StreamHandler(sys.stdout)
        to_screen.setFormatter(logging.Formatter("%(message)s"))
        to_screen.addFilter(lambda record: record.name == "recipes" or record.levelno >= logging.WARNING)
        handlers.append(to_screen)
    logging.raiseExceptions = False  # a full disk is told by what must be written, not by every line of a log
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # DeepSpeed 0.19.8 calls functions that torch 2.13 has renamed; no user can do anything about it.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+_tensor.*deprecated", category=FutureWarning)
    deepspeed_logger = logging.getLogger("DeepSpeed")
    deepspeed_logger.handlers = []
    deepspeed_logger.propagate = True


def _git_state() -> dict | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(git("status", "--porcelain").splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None


class SampleLog:
    """With monitor.samples, which samples a rank drew: a line a step in logs/samples_rank_N.jsonl."""

    def __init__(self, recipe, rank: int):
        self._path = recipe.run_directory / "logs" / f"samples_rank_{rank}.jsonl"
        self._file = open(self._path, "a", encoding="utf-8") if recipe.monitor.samples else None

    def write(self, step: int, batch) -> None:
        """`batch`: the rank's StepBatch; its checksum tells whether two runs read the same tokens."""
        if self._file is not None:
            line = {"step": step, "samples": batch.samples.ravel().tolist(), "crc32": batch.checksum()}
            with naming(self._path):
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()


def memory_gib() -> float:
    """Most device memory that this rank has held; on a CPU, the process's resident memory now."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        import psutil

        return psutil.Process().memory_info().rss / 2**30
    return get_accelerator().max_memory_allocated() / 2**30
