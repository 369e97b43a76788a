"""Before the first step: every rank can write checkpoints, all see the same directory, and there is room for two."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from pathlib import Path

from data_prep.errors import InputError
from recipes import models
from recipes.training import checkpoint_files, distributed

logger = logging.getLogger("recipes")


def check_checkpoint_directory(recipe, config: dict, rank: int) -> str | None:
    """Raises InputError, on every rank, when checkpoints can't be written; returns a warning when space is short."""
    directory, host = recipe.run_directory / "checkpoints", socket.gethostname()
    token = distributed.broadcast(directory / f".probe_{uuid.uuid4().hex}" if rank == 0 else None)
    fault = _write(token) if rank == 0 else None
    distributed.barrier()
    seen = token.exists()
    if rank != 0 and seen:
        fault = _write(token.with_name(f"{token.name}_{rank}"))
    answers = distributed.gather((fault, seen, host))
    if rank == 0:
        for path in directory.glob(".probe_*"):
            path.unlink(missing_ok=True)
    for number, (fault, _, where) in enumerate(answers):
        if fault is not None:
            raise InputError(f"rank {number} on {where} can't write checkpoints in {directory}: {fault}")
    for number, (_, seen, where) in enumerate(answers):
        if not seen:
            raise InputError(
                f"{directory} is node-local, not shared: rank {number} on {where} does not see what rank 0 on "
                f"{answers[0][2]} writes there; put output_dir on a file system that all hosts share"
            )
    hosts = len({where for *_, where in answers})
    logger.info("%s is shared by all ranks: %d on %d host%s", directory, len(answers), hosts, "s" * (hosts > 1))
    free = shutil.disk_usage(directory).free if rank == 0 else 0
    size, free = distributed.broadcast((checkpoint_bytes(recipe, config), free))
    room = f"{free / 2**30:.1f} GiB are free in {directory}, one checkpoint takes about {size / 2**30:.1f} GiB"
    if free < size:
        raise InputError(f"{room}: make room, or use another output_dir")
    return f"{room}: make room for the second" if free < 2 * size else None


def checkpoint_bytes(recipe, config: dict) -> int:
    """Size of the newest checkpoint, or what one is expected to take."""
    earlier = checkpoint_files.checkpoints(recipe.run_directory / "checkpoints")
    for path in reversed(earlier):
        if checkpoint_files.incomplete_because(path) is None:
            return checkpoint_files.size_of(path)
    parameters = models.family(recipe.model.family).parameter_count(recipe.model)
    return checkpoint_files.expected_bytes(parameters, config)


def _write(path: Path) -> str | None:
    """Write a small file; returns why that failed."""
    try:
        with open(path, "wb") as file:
            file.write(b"probe")
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None
