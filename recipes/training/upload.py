"""Published checkpoints copied to object storage (`checkpoint.upload`), in the background; and fetched from there.

    URL/NAME/global_stepN/    the files of the checkpoint, manifest.json last: without it a copy is no checkpoint

Any URL that fsspec knows; credentials come from the environment or fsspec's configuration. Nothing is deleted there but
the manifest of a step that is copied anew.
"""

from __future__ import annotations

import json
import logging
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
        self._moved = Callback()  # counts what is copied

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
        # Read by the thread that publishes: in the order opposite to that in which one moves on.
        return [path for path in (*self._older, self._next, self.path) if path is not None]

    def finish(self, everything: bool = True, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the checkpoints of this start, or for `everything`: what an earlier one has left, too.

        `beat` is called, on all ranks, as long as a copy of any rank moves.
        """
        self._leaving, before = not everything, None
        while self._stage is not None:
            now = distributed.gather((self.busy(), self._moved.value))
            if now != before:
                beat()
            before = now
            if any(busy for busy, _ in now):
                time.sleep(POLL_S)
            else:
                self.advance()

    def _go_on(self) -> None:
        self._stage = None
        if self._next is not None:
            self._clear(self._next)
            self._next = None
        elif self._older and not self._leaving:
            self._clear(self._older[0])
            del self._older[0]
        else:
            self.path = None

    def _clear(self, path: Path) -> None:
        self.path = path
        self._put("clear")

    def _put(self, stage: str) -> None:
        path, url, rank, world = self.path, f"{self.url}/{self.path.name}", dist.get_rank(), dist.get_world_size()
        self._do(stage, lambda: _put_part(path, url, stage, rank, world, self._moved))

    def _do(self, stage: str, work: Callable) -> None:
        self._stage, self._work = stage, self._thread.submit(work)


def _put_part(path: Path, url: str, stage: str, rank: int, world: int, moved: Callback) -> str | None:
    """A rank's part of a stage; returns why that failed, None when it did not. `moved` is told of each block."""
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
                system.put_file(str(path / name), f"{root}/{name}", callback=moved)
                moved.relative_update()  # a local file system tells of no blocks
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
        checkpoint_files.remove_unfinished(directory)
        writing.mkdir()
    dist.barrier()
    fault, manifest = None, {}
    try:
        system, root = checkpoint_files.open_remote(f"{url}/{checkpoint_files.tag(step)}")
        manifest = json.loads(system.cat_file(f"{root}/{checkpoint_files.MANIFEST}"))
        checkpoint_files.check_manifest(manifest, step)
        for name in list(manifest["files"])[rank :: dist.get_world_size()]:
            (writing / name).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{root}/{name}", str(writing / name))
            if checkpoint_files.entry_of(writing / name) != manifest["files"][name]:
                raise ValueError(f"the content of {name} does not match its checksum")
    except (ValueError, FileNotFoundError) as error:
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
