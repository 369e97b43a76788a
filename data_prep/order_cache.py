"""Large index arrays on disk: computed once a node, memory-mapped by every rank and every later run.

An entry is a directory named by a hash of everything that its content depends on, so it can't be stale; it gets its name
by a rename once it is whole, so it can't be half there. Entries can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_prep.files import fsync_directory, make_directory

logger = logging.getLogger("recipes")
FORMAT = 1  # raise it whenever the same key would give other arrays
KEEP_FROM = 1 << 20  # elements; smaller orders take milliseconds to compute


class OrderCache:
    """Keeps arrays under `directory`; with None, computes them anew each time."""

    def __init__(self, directory: str | Path | None):
        self.directory = None if directory is None else Path(directory)

    def arrays(self, key: dict, elements: int, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The arrays of `key`, memory-mapped, or what `build` returns where that is not worth keeping.

        Any number of processes may ask at once: the first builds, the others wait. A builder that is killed leaves
        nothing under the final name, and the next one builds.

        Args:
            key: JSON values, all that the arrays depend on.
            elements: their number in all, roughly.
        """
        if self.directory is None or elements < KEEP_FROM:
            return build()
        name = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:32]
        entry = make_directory(self.directory, "data.cache_dir") / name
        with locked(entry.with_suffix(".lock")):
            if (found := _read(entry)) is not None:
                logger.info("sample order: cache hit, %s", entry)
                return found
            begin = time.perf_counter()
            writing = entry.with_name(f".{name}.{os.getpid()}.tmp")
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            try:
                for array_name, array in build().items():
                    with open(writing / f"{array_name}.npy", "wb") as file:
                        np.save(file, array)
                        file.flush()
                        os.fsync(file.fileno())
                shutil.rmtree(entry, ignore_errors=True)  # damaged, else it had been read
                os.rename(writing, entry)
                fsync_directory(entry.parent)
            finally:
                shutil.rmtree(writing, ignore_errors=True)
            logger.info("sample order: made in %.1f s, kept in %s", time.perf_counter() - begin, entry)
            return _read(entry)


def _read(entry: Path) -> dict[str, np.ndarray] | None:
    try:
        return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))} or None
    except (OSError, ValueError, EOFError):  # cut short or foreign
        return None


@contextlib.contextmanager
def locked(path: Path):
    """Held by one process of this node at a time; it ends with its process.

    Where the file system has no locks, several build at once, each under a name of its own: the work is done twice,
    and the result is the same.
    """
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
