"""Saving and resuming: DeepSpeed writes and reads its own files; ours are the random states, the manifest and `latest`."""

from __future__ import annotations

import logging
import random
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from data_prep.errors import InputError
from data_prep.files import write_text
from recipes.training import checkpoint_files, distributed, universal
from recipes.training.async_checkpoint import SnapshotEngine, memory_limit
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

    def advance(self, samples: int, tokens: int, applied: bool) -> None:
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.applied_updates += applied
        self.skipped_steps += not applied

    def counters(self) -> dict:
        """The values of metrics.jsonl that come from here (the step has a place of its own there)."""
        return {key: value for key, value in asdict(self).items() if key != "step"}


def seed_ranks(seed: int, step: int, rank: int) -> None:
    """Seed dropout and every other source of randomness: a pure function of (seed, step, rank)."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1] % 2**32))
    random.seed(int(words[2]))


class Saver:
    """Saves a run's checkpoints, on all ranks together; at most one is on its way.

    `save` begins one. At each step boundary `advance` is told whether any rank's writer is `busy`, and takes the
    checkpoint on its way to the next stage, at the same step on every rank: "writing" the files, "publishing" the
    manifest and `latest` by rank 0. `finish` waits for all of it.
    """

    def __init__(self, engine, recipe, sizes, fingerprint: dict, order_samples: int):
        """
        Args:
            fingerprint: of the data, compared on resume.
            order_samples: number of samples that the order was made for (part of the order under "megatron").
        """
        self.engine, self.recipe, self.sizes = engine, recipe, sizes
        self.data = {"data": fingerprint, "order_samples": order_samples}
        self.directory = recipe.run_directory / "checkpoints"
        limit = memory_limit(recipe.checkpoint.host_memory_gib, distributed.find_place().local_world_size)
        self.writer = engine.checkpoint_engine = SnapshotEngine(recipe.checkpoint.asynchronous, limit)
        self._stage: str | None = None
        self._manifest: dict = {}
        if dist.get_rank() == 0:
            for path in checkpoint_files.unfinished(self.directory):
                shutil.rmtree(path)  # left by a run that ended while saving

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint of `progress.step`, once the one before is published."""
        self.finish()
        memory, rank = self.writer.host_memory, dist.get_rank()
        writing = self.directory / checkpoint_files.incomplete_tag(progress.step)
        state = {"progress": asdict(progress), **self.data, "parameters": universal.listed_parameters(self.engine)}
        self.engine.save_checkpoint(str(self.directory), tag=writing.name, client_state=state, save_latest=False)
        self.writer.save(_random_state(), str(writing / f"random_state_rank_{rank}.pt"))
        # What DeepSpeed copied itself: optimizer states from NVMe, in folders. Listed once: on a network file system
        # two ranks can see two lists.
        copied = distributed.broadcast(_in_folders(writing) if rank == 0 else None)
        self._manifest = {
            **asdict(progress),
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
            gib = self.writer.host_memory / 2**30
            logger.info("checkpoints are copied to %.2f GiB of host memory on this rank", gib)
        if not self.recipe.checkpoint.asynchronous:
            self.finish()

    def busy(self) -> bool:
        """Whether this rank's writer is at work. Raises what it raised."""
        return self.writer.busy()

    def advance(self, busy: bool) -> None:
        """`busy`: whether any rank's writer is."""
        if not busy and self._stage is not None:
            self._next_stage()

    def finish(self) -> None:
        """Wait until the checkpoint on its way, if any, is published."""
        while self._stage is not None:
            self._next_stage()

    def _next_stage(self) -> None:
        step, rank = self._manifest["step"], dist.get_rank()
        if self._stage == "writing":
            files = {name: entry for part in distributed.gather(self.writer.result()) for name, entry in part.items()}
            manifest = {**self._manifest, "files": dict(sorted(files.items()))}
            if rank == 0:
                self.writer.run(lambda: checkpoint_files.publish(self.directory, step, manifest))
            self._stage = "publishing"
        else:
            if rank == 0:
                self.writer.result()
            dist.barrier()
            self._stage = None
            logger.info("saved %s", self.directory / checkpoint_files.tag(step))


def _in_folders(path: Path) -> list[str]:
    return [name for name in checkpoint_files.files_of(path) if "/" in name]


def layout(engine, sizes) -> dict:
    """checkpoint_files.layout, and at which layers a pipeline's stages begin: with measured costs they can change."""
    parts = [int(part) for part in engine.module.parts] if isinstance(engine.module, PipelineModule) else None
    return {**checkpoint_files.layout(engine.config, sizes), "pipeline_parts": parts}


def choose(recipe, sizes) -> Path | None:
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
        names = list(checkpoint_files.read_manifest(found.chosen)["files"])[rank :: sizes.world]
        faults = [f for f in distributed.gather(checkpoint_files.damaged_because(found.chosen, names)) if f]
        if not faults:
            break
        damaged[found.chosen] = faults[0]
    for path, why in found.passed_over:
        logger.warning("passing over %s: %s", path, why)
    return found.chosen


def resume(engine, recipe, sizes, path: Path, fingerprint: dict) -> Progress:
    """Load a checkpoint into the engine and restore this rank's random states; returns where the run stands.

    One of another layout is converted first. Its random states are of other ranks: they are drawn anew.

    The rate of the next update, and the optimizer's hyperparameters, are those of the recipe and the ds_config as they
    are now.

    Raises InputError when the data is not the data that the checkpoint was trained on.
    """
    manifest = checkpoint_files.read_manifest(path)
    checkpoint_files.check_same_data(path, fingerprint)
    progress, rank = Progress(**{field.name: manifest[field.name] for field in fields(Progress)}), dist.get_rank()
    if checkpoint_files.same_layout(manifest["layout"], layout(engine, sizes)):
        groups = engine.lr_scheduler.optimizer.param_groups
        wanted = [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in groups]
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise RuntimeError(f"DeepSpeed could not load {path}")
        _restore_random_state(torch.load(path / f"random_state_rank_{rank}.pt", weights_only=True))
        _apply_hyperparameters(engine, wanted)
    else:
        logger.info("%s is of another layout, %s: converting it", path, manifest["layout"])
        checkpoint_files.check_convertible(path, engine.config)
        universal.convert_and_load(engine, recipe, sizes, path, manifest)
        seed_ranks(recipe.seed, progress.step, rank)
    if manifest["total_steps"] != recipe.total_steps:
        logger.warning(
            "the schedule has changed: %d steps in the checkpoint, %d now", manifest["total_steps"], recipe.total_steps
        )
    _apply_schedule(engine, recipe_factor(recipe))
    if rank == 0 and recipe.checkpoint.resume != "latest":
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


def _random_state() -> dict:
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
