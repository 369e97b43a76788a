"""Writing files so that a file under its final name is always whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from data_prep.errors import InputError, of_file


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable (a rename is only safe once its directory is on disk)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path, what: str) -> Path:
    """Create `path` and its parents. Raises InputError naming `what` when it can't be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{what} {path} can't be created: {error.strerror}; choose a writable directory") from None
    return path


@contextlib.contextmanager
def naming(path: Path):
    """An OSError that names no file, as that of a full disk does, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "w"):
    """Open a temporary file beside `path`; on leaving, fsync it and rename it to `path`.

    An exception inside the block removes the temporary file and leaves whatever `path` held before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"}))
    try:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        handle.close()
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with naming(path), atomic_open(path) as handle:
        handle.write(text)


def write_json(path: Path, value) -> None:
    """Write `value` as indented, strictly valid JSON (NaN and infinity raise ValueError)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """Read a file that holds a JSON object. Raises InputError naming the file when it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise of_file(error) from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); it was cut short or edited by hand") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object")
    return value


def replace_directory(new: Path, final: Path) -> None:
    """Rename `new` to `final`; what was there goes only once the new one is in its place."""
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files for `path`, with whatever suffixes, that processes left that are no more."""
    import psutil

    name = re.escape(path.name)
    for one in path.parent.iterdir():
        match = re.fullmatch(rf"\.*{name}\..*\.(\d+)\.tmp", one.name)
        if match and not psutil.pid_exists(int(match[1])):
            one.unlink(missing_ok=True)
