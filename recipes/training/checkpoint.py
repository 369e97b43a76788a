"""Saving and resuming: DeepSpeed writes and reads its own files; ours are the random states, the manifest and `latest`."""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from data_prep.errors import InputError
from data_prep.files import write_text
from recipes.training import checkpoint_files, distributed, own_engines, universal, upload
from recipes.training.async_checkpoint import SnapshotEngine, memory_limit
from recipes.training.ds_config import selects_own_engine
from recipes.training.schedule import recipe_factor

logger = logging.getLogger("recipes")
HYPERPARAMETERS = ("weight_decay", "betas", "eps", "momentum")


@dataclass
class Progress:
    """Where a run stands; the checkpoint's client state.

    Samples advance with every step, the learning rate with applied updates only: a step with non-finite gradients
    consumes its samples and applies nothing.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    applied_updates: int = 0
    skipped_steps: int = 0
    left_out: list = field(default_factory=list)  # [begin, end) of samples that a rollback has passed over
    recent: dict = field(default_factory=dict)  # losses and norms that the spike detector compares with

    def advance(self, samples: int, tokens: int, applied: bool) -> None:
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.applied_updates += applied
        self.skipped_steps += not applied

    def counters(self) -> dict:
        """The values of metrics.jsonl that come from here (the step has a place of its own there)."""
        names = ("consumed_samples", "consumed_tokens", "applied_updates", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def pass_over(self) -> bool:
        """Move on from the begin of samples that are left out to their end; whether there were any."""
        begun = self.consumed_samples
        for begin, end in sorted(self.left_out):
            if begin == self.consumed_samples:
                self.consumed_samples = end
        return self.consumed_samples != begun


def seed_ranks(seed: int, step: int, rank: int) -> None:
    """Seed dropout and every other source of randomness: a pure function of (seed, step, rank)."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1] % 2**32))
    random.seed(int(words[2]))


class Saver:
    """Saves a run's checkpoints, on all ranks together; at most one is on its way.

    `save` begins one. At each step boundary `advance` is told what any rank's `flags` say, and takes the checkpoint on
    its way to the next stage, at the same step on every rank: "writing" the files, then "publishing" the manifest and
    `latest` by rank 0, who also deletes the checkpoints that are no longer kept. `finish` waits for all of it.
    """

    def __init__(self, engine, recipe, sizes, fingerprint: dict, order_samples: int, parent: str | None = None):
        """
        Args:
            fingerprint: of the data, compared on resume.
            order_samples: number of samples that the order was made for (part of the order under "megatron").
            parent: RUN@STEP that the run began from.
        """
        self.engine, self.recipe, self.sizes = engine, recipe, sizes
        self.parent = parent
        self.data = {"data": fingerprint, "order_samples": order_samples}
        self.directory = recipe.run_directory / "checkpoints"
        if selects_own_engine(engine.config):
            self.writer = own_engines.wrap(engine)
        else:
            limit = memory_limit(recipe.checkpoint.host_memory_gib, distributed.find_place().local_world_size)
            self.writer = engine.checkpoint_engine = SnapshotEngine(recipe.checkpoint.asynchronous, limit)
        self._stage: str | None = None
        self._manifest: dict = {}
        uploads = recipe.checkpoint.upload is not None
        self.uploader = upload.Uploader(checkpoint_files.remote_directory(recipe)) if uploads else None
        if self.uploader is not None:
            self.uploader.catch_up(self.directory)
        self._saved_at, self._time_is_up = time.monotonic(), False
        if dist.get_rank() == 0:
            for path, aside in checkpoint_files.remove_unfinished(self.directory):
                logger.warning("%s is in the way of a checkpoint; moved to %s", path, aside)

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint of `progress.step`, once the one before is published."""
        self.finish()
        self._saved_at, self._time_is_up = time.monotonic(), False
        memory, rank = self.writer.host_memory, dist.get_rank()
        writing = self.directory / checkpoint_files.incomplete_tag(progress.step)
        state = {"progress": asdict(progress), **self.data, "parameters": universal.listed_parameters(self.engine)}
        self.engine.save_checkpoint(str(self.directory), tag=writing.name, client_state=state, save_latest=False)
        self.writer.save_plain(random_state(), str(writing / f"random_state_rank_{rank}.pt"))
        # What DeepSpeed copied itself: optimizer states from NVMe, in folders. Listed once: on a network file system
        # two ranks can see two lists.
        copied = distributed.broadcast(_in_folders(writing) if rank == 0 else None)
        self._manifest = {
            "step": progress.step,
            **progress.counters(),
            "left_out": progress.left_out,
            "parent": self.parent,
            **checkpoint_files.compatibility(self.recipe),
            "layout": layout(self.engine, self.sizes),
            "total_steps": self.recipe.total_steps,
            "seed": self.recipe.seed,
            "optimizer_steps": universal.optimizer_steps(self.engine),
            "loss_scale": self.engine._get_optimizer_loss_scale() if self.engine.fp16_enabled() else None,
            **self.data,
        }
        self.writer.start(copied[rank :: self.sizes.world])
        self._stage = "writing"
        if self.writer.host_memory > memory:
            mebibytes = self.writer.host_memory / 2**20
            logger.info("checkpoints are copied to %.0f MiB of host memory on this rank", mebibytes)
        if not self.recipe.checkpoint.asynchronous:
            self.finish()

    def flags(self) -> list[bool]:
        """Of this rank: writing, time for a checkpoint (by rank 0's clock), uploading. Raises what the writer raised."""
        minutes = self.recipe.checkpoint.every_minutes
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        uploading = self.uploader is not None and self.uploader.busy()
        return [self.writer.busy(), late and self._stage is None and dist.get_rank() == 0, uploading]

    def advance(self, writing: bool, time_is_up: bool, uploading: bool) -> None:
        """Go on where nobody is at work any more. Arguments: the flags, each true where any rank's is."""
        self._time_is_up = time_is_up
        if not uploading and self.uploader is not None:  # first: the stage below can begin an upload
            self.uploader.advance()
        if not writing and self._stage is not None:
            self._next_stage()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        every = self.recipe.checkpoint.every_steps
        return self._time_is_up or step == self.recipe.total_steps or every is not None and step % every == 0

    def finish(self) -> None:
        """Wait until the checkpoint on its way, if any, is published."""
        while self._stage is not None:
            self._next_stage()

    def close(self, everything: bool = True, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the newest checkpoint and its upload, and end a writer's process.

        Args:
            everything: wait for the uploads too that an earlier start has left.
            beat: called as long as an upload moves.
        """
        self.finish()
        beat()
        self.writer.cleanup()
        if self.uploader is not None:
            self.uploader.finish(everything, beat)
            if dist.get_rank() == 0 and (kept := checkpoint_files.checkpoints(self.directory)):
                self._retire(kept[-1])  # what an upload still needed

    def _next_stage(self) -> None:
        step, rank = self._manifest["step"], dist.get_rank()
        if self._stage == "writing":
            files = {name: entry for part in distributed.gather(self.writer.result()) for name, entry in part.items()}
            manifest = {**self._manifest, "files": dict(sorted(files.items()))}
            if rank == 0:
                self.writer.run(lambda: self._publish(step, manifest))
            self._stage = "publishing"
        else:
            if rank == 0:
                self.writer.result()
            dist.barrier()
            self._stage = None
            path = self.directory / checkpoint_files.tag(step)
            logger.info("saved %s", path)
            if self.uploader is not None:
                self.uploader.begin(path)

    def _publish(self, step: int, manifest: dict) -> None:
        path = checkpoint_files.publish(self.directory, step, manifest)
        self._retire(path)
        free, size = shutil.disk_usage(self.directory).free, checkpoint_files.size_of(path)
        if free < 2 * size:
            logger.warning("room for %.1f more checkpoints is left in %s", free / size, self.directory)

    def _retire(self, newest: Path) -> None:
        keep = self.recipe.checkpoint
        if keep.keep_last is not None:
            needed = self.uploader.needed() if self.uploader is not None else []
            for old in checkpoint_files.retire(newest, keep.keep_last, keep.keep_every, needed):
                logger.info("deleted %s", old)


def _in_folders(path: Path) -> list[str]:
    return [name for name in checkpoint_files.files_of(path) if "/" in name]


def layout(engine, sizes) -> dict:
    """checkpoint_files.layout, and at which layers a pipeline's stages begin: with measured costs they can change."""
    parts = [int(part) for part in engine.module.parts] if isinstance(engine.module, PipelineModule) else None
    return {**checkpoint_files.layout(engine.config, sizes), "pipeline_parts": parts}


def choose(recipe) -> Path | None:
    """The checkpoint to resume from, the same on every rank, its checksums verified; None for a fresh start.

    Raises InputError, on every rank, when checkpoints are there but none is usable.
    """
    if recipe.checkpoint.resume == "none":
        return None
    directory, rank = recipe.run_directory / "checkpoints", dist.get_rank()
    damaged: dict[Path, str] = {}
    while True:
        found, fault = None, None
        if rank == 0:
            try:
                found = checkpoint_files.find(directory, recipe.checkpoint.resume, damaged)
            except InputError as error:
                fault = str(error)
        found, fault = distributed.broadcast((found, fault))
        if fault is not None:
            raise InputError(fault)
        if found.chosen is None:
            return None
        fault = damage(found.chosen)
        if fault is None:
            break
        damaged[found.chosen] = fault
    for path, why in found.passed_over:
        logger.warning("passing over %s: %s", path, why)
    return found.chosen


def choose_or_fetch(recipe, config: dict, sizes) -> Path | None:
    """As `choose`; where no local checkpoint can be resumed from, a remote one is fetched, if there is any."""
    fault, remote = None, recipe.checkpoint.upload is not None and recipe.checkpoint.resume != "none"
    try:
        path = choose(recipe)
        if path is not None or not remote:
            return path
    except InputError as error:
        if not remote:
            raise
        fault = str(error)
    return upload.fetch(recipe, config, sizes, fault)


def damage(path: Path) -> str | None:
    """Why files of a checkpoint do not have their checksums, None when all do; each rank reads its part."""
    try:
        names = list(checkpoint_files.read_manifest(path)["files"])[dist.get_rank() :: dist.get_world_size()]
        fault = checkpoint_files.damaged_because(path, names)
    except InputError as error:  # on this rank alone: the others are about to gather
        fault = str(error)
    faults = distributed.gather(fault)
    return next((fault for fault in faults if fault is not None), None)


def resume(engine, recipe, sizes, path: Path, fingerprint: dict, branch: bool = False) -> Progress:
    """Load a checkpoint into the engine and restore this rank's random states; returns where the run stands.

    One of another layout is converted first. Its random states are of other ranks: they are drawn anew.

    The rate of the next update, and the optimizer's hyperparameters, are those of the recipe and the ds_config as they
    are now.

    Args:
        branch: the checkpoint is another run's: its data can be other data, and nothing is changed in its directory.

    Raises InputError when the data is not the data that the checkpoint was trained on.
    """
    manifest = checkpoint_files.read_manifest(path)
    if not branch:
        checkpoint_files.check_same_data(path, fingerprint)
    rank = dist.get_rank()
    if checkpoint_files.same_layout(manifest["layout"], layout(engine, sizes)):
        groups = engine.lr_scheduler.optimizer.param_groups
        wanted = [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in groups]
        if selects_own_engine(engine.config):
            own_engines.wrap(engine)
        loaded, state = engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise RuntimeError(f"DeepSpeed could not load {path}")
        progress = Progress(**state["progress"])
        _restore_random_state(torch.load(path / f"random_state_rank_{rank}.pt", weights_only=True))
        _apply_hyperparameters(engine, wanted)
    else:
        logger.info("converting %s, which is of another layout: %s", path, manifest["layout"])
        checkpoint_files.check_convertible(path, engine.config)
        progress = Progress(**universal.convert_and_load(engine, recipe, sizes, path))
        seed_ranks(recipe.seed, progress.step, rank)
    if manifest["total_steps"] != recipe.total_steps:
        logger.warning(
            "the schedule has changed: %d steps in the checkpoint, %d now", manifest["total_steps"], recipe.total_steps
        )
    _apply_schedule(engine, recipe_factor(recipe))
    if rank == 0 and recipe.checkpoint.resume != "latest" and not branch:
        if recipe.checkpoint.upload is not None:  # first: where it fails, nothing has changed here
            upload.abandon(checkpoint_files.remote_directory(recipe), progress.step)
        write_text(path.parent / "latest", path.name)
        for later in checkpoint_files.checkpoints(path.parent):
            if checkpoint_files.step_of(later) > progress.step:
                logger.info("%s belongs to the abandoned branch; moved to %s", later, checkpoint_files.set_aside(later))
    return progress


def _apply_hyperparameters(engine, wanted: list[dict]) -> None:
    # Loading restores the groups' hyperparameters too, so that a ds_config changed since would have no effect.
    for group, values in zip(engine.lr_scheduler.optimizer.param_groups, wanted, strict=True):
        for key, value in values.items():
            before = group.get(key)
            same = list(before) == list(value) if isinstance(before, (list, tuple)) else before == value
            if not same:
                logger.warning(
                    "group %s: %s has changed: %s in the checkpoint, %s now", group["name"], key, before, value
                )
                group[key] = value


def _apply_schedule(engine, factor) -> None:
    # Loading restores the rates of the checkpoint: a changed schedule would act one update late, a changed peak never.
    scheduler, peak = engine.lr_scheduler, engine.config["optimizer"]["params"]["lr"]
    before = scheduler.base_lrs[0]
    if before != peak:
        logger.warning("the peak learning rate has changed: %g in the checkpoint, %g now", before, peak)
    scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
    rates = [peak * factor(scheduler.last_epoch)] * len(scheduler.base_lrs)
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def random_state() -> dict:
    """All of this rank's random states, as tensors and plain numbers: torch.load takes them with weights_only=True."""
    from deepspeed.accelerator import get_accelerator

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), next_gauss],
    }
    if get_accelerator().device_name() != "cpu":
        state["device"] = get_accelerator().get_rng_state().cpu()
    return state


def _restore_random_state(state: dict) -> None:
    from deepspeed.accelerator import get_accelerator

    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words), next_gauss))
    if "device" in state:
        get_accelerator().set_rng_state(state["device"])
