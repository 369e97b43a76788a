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


def fetch(recipe, config: dict, sizes) -> None:
    """Fetch the checkpoint to resume from, where no local one can be resumed from; on all ranks together.

    Raises InputError when the remote ones can't be read, none of them is whole, or they are of another run.
    """
    resume = recipe.checkpoint.resume
    if recipe.checkpoint.upload is None or resume == "none":
        return
    directory, url = recipe.run_directory / "checkpoints", checkpoint_files.remote_directory(recipe)
    steps, fault = distributed.broadcast(_wanted_steps(directory, url, resume) if dist.get_rank() == 0 else None)
    if fault is not None:
        raise InputError(fault)
    faults = []
    for step in steps:
        faults = _fetch(directory, url, step)
        if not faults:
            path = directory / checkpoint_files.tag(step)
            logger.info("fetched %s from %s", path.name, url)
            checkpoint_files.check_compatible(path, recipe, config, sizes)
            return
        logger.warning("passing over %s/%s: %s", url, checkpoint_files.tag(step), faults[0])
    if faults:
        raise InputError(f"no whole checkpoint in {url}: {faults[0]}; start anew with another name=...")


def _wanted_steps(directory: Path, url: str, resume: str) -> tuple[list[int], str | None]:
    """(steps to try, newest first; why that can't be told). No steps: a local checkpoint will do, or there is none."""
    try:
        if checkpoint_files.find(directory, resume).chosen is not None:
            return [], None
    except InputError:
        pass  # local ones are there, and none can be used: perhaps a remote one can
    try:
        steps = checkpoint_files.remote_steps(url)
    except InputError as error:
        return [], str(error)
    return (steps if resume == "latest" else [step for step in steps if step == int(resume)]), None


def _fetch(directory: Path, url: str, step: int) -> list[str]:
    """Fetch one checkpoint, each rank its part, and publish it here; returns what is wrong with it."""
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
    except Exception as error:
        fault = " ".join(str(error).split())
    faults = [fault for fault in distributed.gather(fault) if fault is not None]
    if rank == 0 and not faults:
        checkpoint_files.publish(directory, step, manifest)
    dist.barrier()
    return faults
