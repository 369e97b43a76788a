"""Published checkpoints copied to object storage (`checkpoint.upload`), in the background; and fetched from there.

    URL/NAME/global_stepN/    the files of the checkpoint, manifest.json last: without it a copy is no checkpoint

Any URL that fsspec knows; credentials come from the environment or fsspec's configuration. Nothing is deleted there.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from fsspec import Callback

from data_prep.errors import InputError
from recipes.training import checkpoint_files, distributed

logger = logging.getLogger("recipes")
TRIES, PAUSE_S, POLL_S = 3, 5, 0.5


class Uploader:
    """Copies one checkpoint at a time, each rank its part. A copy that fails is reported; training goes on."""

    def __init__(self, url: str):
        self.url = url
        self.path: Path | None = None  # of the checkpoint on its way
        self._next: Path | None = None  # the newest that was published meanwhile
        self._thread = ThreadPoolExecutor(1, "checkpoint-upload")
        self._work: Future | None = None
        self._moved = Callback()  # counts what is copied

    def begin(self, path: Path) -> None:
        """Start to copy a published checkpoint, or remember it while an earlier one is on its way."""
        if self.path is not None:
            if self._next is not None:
                logger.warning("%s is still being uploaded: %s will not be", self.path.name, self._next.name)
            self._next = path
            return
        names = list(checkpoint_files.read_manifest(path)["files"])
        self.path, self._stage = path, "files"
        self._put(names[dist.get_rank() :: dist.get_world_size()])

    def busy(self) -> bool:
        """Whether this rank is copying."""
        return self._work is not None and not self._work.done()

    def advance(self) -> None:
        """The next stage; called on all ranks when none is busy."""
        if self.path is None:
            return
        failed = next((fault for fault in distributed.gather(self._work.result()) if fault), None)
        if failed is None and self._stage == "files":
            self._stage = "manifest"
            self._put([checkpoint_files.MANIFEST] if dist.get_rank() == 0 else [])
            return
        if failed is None:
            logger.info("uploaded %s to %s", self.path.name, self.url)
        else:
            logger.warning("%s was not uploaded to %s: %s", self.path.name, self.url, failed)
        self.path, path, self._next = None, self._next, None
        if path is not None:
            self.begin(path)

    def needed(self) -> list[Path]:
        """Checkpoints that must not be deleted yet."""
        return [path for path in (self.path, self._next) if path is not None]

    def finish(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for all of it. `beat` is called, on all ranks, as long as a copy of any rank moves."""
        before = None
        while self.path is not None:
            now = distributed.gather((self.busy(), self._moved.value))
            if now != before:
                beat()
            before = now
            if any(busy for busy, _ in now):
                time.sleep(POLL_S)
            else:
                self.advance()

    def _put(self, names: list[str]) -> None:
        self._work = self._thread.submit(_put_files, self.path, f"{self.url}/{self.path.name}", names, self._moved)


def _put_files(path: Path, url: str, names: list[str], moved: Callback) -> str | None:
    """Copy files; returns why that failed, None when it did not. `moved` is told of each block."""
    for tried in range(1, TRIES + 1):
        try:
            system, root = checkpoint_files.open_remote(url)
            for name in names:
                system.put_file(str(path / name), f"{root}/{name}", callback=moved)
            return None
        except Exception as error:  # whatever the storage's client raises
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if tried < TRIES:
                time.sleep(PAUSE_S)
    return fault


def fetch(recipe, config: dict, sizes, fault: str | None) -> Path | None:
    """Fetch the remote checkpoint to resume from, on all ranks together; None where there is none.

    Args:
        fault: why no local one can be resumed from; None where there are none.

    Raises InputError when none is whole, or it is of another run; ConnectionError when they can't be read now.
    """
    directory, url = recipe.run_directory / "checkpoints", checkpoint_files.remote_directory(recipe)
    steps, error = distributed.broadcast(_candidates(recipe, fault) if dist.get_rank() == 0 else None)
    if error is not None:
        raise error
    faults = [fault] if fault is not None else []
    if steps:
        local = fault or f"no checkpoint in {directory}"
        logger.info("%s; steps in %s: %s", local, url, ", ".join(map(str, reversed(steps))))
    for step in steps:
        damage = _fetch(directory, url, step)
        if damage is None:
            path = directory / checkpoint_files.tag(step)
            logger.info("fetched %s from %s", path.name, url)
            checkpoint_files.check_compatible(path, recipe, config, sizes)
            checkpoint_files.check_same_parent(path, recipe)
            return path
        logger.warning("passing over %s/%s: %s", url, checkpoint_files.tag(step), damage)
        faults.append(f"{checkpoint_files.tag(step)}: {damage}")
    if steps:
        raise InputError(f"no whole checkpoint in {url}: {'; '.join(faults)}; start anew with another name=...")
    return None


def _candidates(recipe, fault: str | None) -> tuple[list[int], Exception | None]:
    try:
        return checkpoint_files.remote_candidates(recipe, fault), None
    except (InputError, ConnectionError) as error:
        return [], error


def abandon(url: str, step: int) -> None:
    """Rename the manifests of remote checkpoints after `step`, which belong to a branch that is left.

    They can't be fetched any more; their files stay until one of the same step is uploaded.
    """
    for later in [other for other in checkpoint_files.remote_steps(url) if other > step]:
        system, root = checkpoint_files.open_remote(f"{url}/{checkpoint_files.tag(later)}")
        number = 1
        while system.exists(aside := f"{root}/manifest.replaced_{number}.json"):
            number += 1
        try:
            system.mv(f"{root}/{checkpoint_files.MANIFEST}", aside)
        except Exception as error:  # whatever the storage's client raises
            raise ConnectionError(f"{aside} can't be written: {' '.join(str(error).split())}") from None
        logger.info(
            "%s/%s belongs to the abandoned branch; its manifest is now %s", url, root.rpartition("/")[2], aside
        )


def _fetch(directory: Path, url: str, step: int) -> str | None:
    """Fetch one checkpoint, each rank its part, and publish it here; returns what is wrong with it, None when nothing is.

    Raises ConnectionError when it can't be read now.
    """
    writing, rank = directory / checkpoint_files.incomplete_tag(step), dist.get_rank()
    if rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
    dist.barrier()
    fault, manifest = None, {}
    try:
        system, root = checkpoint_files.open_remote(f"{url}/{checkpoint_files.tag(step)}")
        manifest = json.loads(system.cat_file(f"{root}/{checkpoint_files.MANIFEST}"))
        for name in list(manifest["files"])[rank :: dist.get_world_size()]:
            (writing / name).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{root}/{name}", str(writing / name))
            if checkpoint_files.entry_of(writing / name) != manifest["files"][name]:
                raise ValueError(f"the content of {name} does not match its checksum")
    except (ValueError, TypeError, KeyError, FileNotFoundError) as error:
        fault = " ".join(str(error).split())
    except Exception as error:  # whatever the storage's client raises: it may be whole
        fault = ConnectionError(f"{url}/{checkpoint_files.tag(step)} can't be fetched: {' '.join(str(error).split())}")
    faults = [fault for fault in distributed.gather(fault) if fault is not None]
    for fault in faults:
        if isinstance(fault, ConnectionError):
            raise fault
    if rank == 0 and not faults:
        checkpoint_files.publish(directory, step, manifest)
    dist.barrier()
    return faults[0] if faults else None
