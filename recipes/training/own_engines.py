"""DeepSpeed's own checkpoint engines, published as ours are: the ds_config's `checkpoint` or `datastates_ckpt` selects one.

They write the files, in the training thread or in processes of their own. Once the files are whole, a thread hashes them
and makes them durable. Which work with what: docs/upstream.md; ds_config_rules.check_layout refuses the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from deepspeed.runtime.checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.utils import groups

from recipes.training import checkpoint_files
from recipes.training.async_checkpoint import BackgroundEngine, check_finite, write_state

logger = logging.getLogger("recipes")


class OwnEngine(BackgroundEngine):
    """Around the engine that deepspeed.initialize has built.

    A decoupled engine's files are whole after `commit`, which DeepSpeedEngine.step calls before the next update and
    `result` calls where no step came.
    """

    host_memory = 0

    def __init__(self, inner: CheckpointEngine):
        super().__init__()
        self.inner = inner
        self._uncommitted: CheckpointCommitInfo | None = None

    # DeepSpeed's interface. `is_data_parallel_writer` stays the base class's: see `wrap`.

    def create(self, info: CheckpointCommitInfo) -> None:
        self.inner.create(info)
        self._uncommitted, self._folder = info, Path(info.save_dir) / info.tag
        self._names: list[str] = []
        self._written: dict[str, dict] = {}

    def save(self, state_dict, path: str) -> None:
        check_finite(Path(path).name, state_dict)
        self.inner.save(state_dict, path)
        self._names.append(Path(path).relative_to(self._folder).as_posix())

    def load(self, path: str, map_location=None):
        if isinstance(self.inner, (FastCheckpointEngine, DecoupledCheckpointEngine)):
            # They leave torch.load at weights_only=True, which refuses DeepSpeed's own ZeRO states.
            return torch.load(path, map_location=map_location, weights_only=False)
        return self.inner.load(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        self.inner.commit(info)
        self._uncommitted = None
        if self.is_decoupled():
            self.run(self._entries)
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return self._uncommitted  # DataStates' engine does not tell, so that DeepSpeed would never commit it

    def is_decoupled(self) -> bool:
        return self.inner.is_decoupled()

    def preserves_storage_sharing(self) -> bool:
        return self.inner.preserves_storage_sharing()

    def cleanup(self) -> None:
        self.inner.cleanup()

    # Ours, as SnapshotEngine's.

    def save_plain(self, state, path: str) -> None:
        """Save what is not DeepSpeed's, small and in torch's format, on this rank whether it is a writer or not."""
        self._written[Path(path).name] = write_state(Path(path), state)

    def start(self, others: Iterable[str] = ()) -> None:
        self._names += others
        if not self.is_decoupled():
            self.run(self._entries)

    def busy(self) -> bool:
        return self._uncommitted is not None or super().busy()

    def result(self):
        if self._uncommitted is not None:
            self.commit(self._uncommitted)
        return super().result()

    def _entries(self) -> dict[str, dict]:
        return self._written | {name: checkpoint_files.entry_of(self._folder / name) for name in self._names}


def wrap(engine) -> OwnEngine:
    """Put an OwnEngine around the checkpoint engine of a DeepSpeedEngine, once; returns it."""
    if not isinstance(engine.checkpoint_engine, OwnEngine):
        inner = engine.checkpoint_engine
        engine.checkpoint_engine = OwnEngine(inner)
        # With `checkpoint.writer` every data-parallel rank would write the same whole file, all at once.
        first = groups._get_sequence_data_parallel_rank() == 0
        engine.save_non_zero_checkpoint = first or engine.zero_optimization_partition_weights()
        logger.info("checkpoints are written by DeepSpeed's %s", type(inner).__name__)
    return engine.checkpoint_engine
