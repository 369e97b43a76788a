"""Published checkpoints copied to object storage (`checkpoint.upload`), in the background; and fetched from there.

    URL/NAME/global_stepN/    the files of the checkpoint, manifest.json last: without it a copy is no checkpoint

Any URL that fsspec knows; credentials come from the environment or fsspec's configuration. Nothing is deleted there but
the manifest of a step that is copied anew.
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

from data_prep.errors import InputError
from recipes.training import checkpoint_files, distributed

logger = logging.getLogger("recipes")
TRIES, PAUSE_S = 3, 5


class Uploader:
    """Copies one checkpoint at a time, each rank its part. A copy that fails is reported; training goes on.

    Its stages: "clear" a manifest that is there already, "files", "manifest". Before the first one, "look" for the local
    checkpoints that are not whole there.
    """

    def __init__(self, url: str):
        self.url = url
        self.path: Path | None = None  # of the checkpoint on its way
        self._stage: str | None = None
        self._next: Path | None = None  # the newest that was published meanwhile
        self._older: list[Path] = []  # of earlier starts, newest first
        self._leaving = False
        self._thread = ThreadPoolExecutor(1, "checkpoint-upload")
        self._work: Future | None = None

    def catch_up(self, directory: Path) -> None:
        """Begin to copy the checkpoints in `directory` that are not whole at the URL, newest first."""
        there = self._older = checkpoint_files.checkpoints(directory)[::-1] if dist.get_rank() == 0 else []
        self._do("look", lambda: _not_whole(there, self.url))

    def begin(self, path: Path) -> None:
        """Start to copy a published checkpoint, or remember it while an earlier one is on its way."""
        self._older = [older for older in self._older if older != path]  # saved anew
        if self._stage is not None:
            if self._next is not None:
                logger.warning("%s has to wait: %s will not be uploaded in this start", path.name, self._next.name)
            self._next = path
            return
        self._clear(path)

    def busy(self) -> bool:
        """Whether this rank is copying."""
        return self._work is not None and not self._work.done()

    def advance(self) -> None:
        """The next stage; called on all ranks when none is busy."""
        if self._stage is None:
            return
        results = distributed.gather(self._work.result())
        if self._stage == "look":
            found, failed = results[0]
            self._older = [path for path in found if path != self._next]
            if failed is not None:
                logger.warning("%s: what is missing there can't be told: %s", self.url, failed)
            self._go_on()
            return
        failed = next((fault for fault in results if fault), None)
        if failed is None and self._stage != "manifest":
            self._put("files" if self._stage == "clear" else "manifest")
            return
        if failed is None:
            logger.info("uploaded %s to %s", self.path.name, self.url)
        else:
            logger.warning("%s was not uploaded to %s: %s", self.path.name, self.url, failed)
        self._go_on()

    def needed(self) -> list[Path]:
        """Checkpoints that must not be deleted yet."""
        return [path for path in (self.path, self._next, *self._older) if path is not None]

    def finish(self, everything: bool) -> None:
        """Wait for the checkpoints of this start, or for `everything`: what an earlier one has left, too."""
        self._leaving = not everything
        while self._stage is not None:
            self.advance()

    def _go_on(self) -> None:
        self._stage, self.path = None, None
        if self._next is not None:
            path, self._next = self._next, None
            self._clear(path)
        elif self._older and not self._leaving:
            self._clear(self._older.pop(0))

    def _clear(self, path: Path) -> None:
        self.path = path
        self._put("clear")

    def _put(self, stage: str) -> None:
        path, url, rank, world = self.path, f"{self.url}/{self.path.name}", dist.get_rank(), dist.get_world_size()
        self._do(stage, lambda: _put_part(path, url, stage, rank, world))

    def _do(self, stage: str, work: Callable) -> None:
        self._stage, self._work = stage, self._thread.submit(work)


def _put_part(path: Path, url: str, stage: str, rank: int, world: int) -> str | None:
    """A rank's part of a stage; returns why that failed, None when it did not."""
    if rank != 0 and stage != "files":
        return None
    for tried in range(1, TRIES + 1):
        try:
            system, root = checkpoint_files.open_remote(url)
            manifest = checkpoint_files.MANIFEST
            if stage == "clear":
                if system.exists(f"{root}/{manifest}"):
                    system.rm_file(f"{root}/{manifest}")
                return None
            names = list(checkpoint_files.read_manifest(path)["files"])[rank::world] if stage == "files" else [manifest]
            for name in names:
                system.put_file(str(path / name), f"{root}/{name}")
            return None
        except Exception as error:  # whatever the storage's client raises
            fault = _reason(error)
            if tried < TRIES:
                time.sleep(PAUSE_S)
    return fault


def _not_whole(paths: list[Path], url: str) -> tuple[list[Path], str | None]:
    """(those of `paths` that are whole here and not at the URL, why that can't be told)."""
    missing = []
    try:
        for path in paths:
            if checkpoint_files.incomplete_because(path) is None and not _is_whole(path, f"{url}/{path.name}"):
                missing.append(path)
    except Exception as error:
        return missing, _reason(error)
    return missing, None


def _is_whole(path: Path, url: str) -> bool:
    """Whether the copy has this manifest and files of the sizes in it."""
    system, root = checkpoint_files.open_remote(url)
    try:
        if system.cat_file(f"{root}/{checkpoint_files.MANIFEST}") != (path / checkpoint_files.MANIFEST).read_bytes():
            return False
    except FileNotFoundError:
        return False
    sizes = {name: about["size"] for name, about in system.find(root, detail=True).items()}
    files = checkpoint_files.read_manifest(path)["files"]
    return all(sizes.get(f"{root}/{name}") == entry["bytes"] for name, entry in files.items())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
