"""Light states: where a run stands, without its weights, written far more often than checkpoints.

    RUN/state.json                          step, samples, tokens, updates, bytes of metrics.jsonl (rank 0)
    RUN/light_state/random_state_rank_N.pt  the random states of each rank at that step

After a fault they tell how far the run had got. The start that goes on from an older checkpoint takes the steps up to
there again, and must arrive at the same samples and the same random states.
"""

from __future__ import annotations

import io
import logging
import os

import torch

from data_prep.files import naming
from recipes.training import distributed, faults
from recipes.training.checkpoint import Progress, random_state

logger = logging.getLogger("recipes")


class LightStates:
    """Writes a light state every `checkpoint.light_every_steps`, on all ranks, and compares what is taken again.

    Args:
        first: progress at which this start begins.
    """

    def __init__(self, recipe, sizes, rank: int, first: Progress):
        self.run_directory, self.every, self.rank = recipe.run_directory, recipe.checkpoint.light_every_steps, rank
        self.sizes = sizes.as_dict()
        self.file = self.run_directory / "light_state" / f"random_state_rank_{rank}.pt"
        before = self._read()
        # Ranks can have been killed between two writes: what counts is where rank 0 was.
        reached = distributed.broadcast(before["step"] if before else 0)
        self._before = before if before and before["step"] == reached else None
        self.reached = reached if reached > first.step else None
        if self.reached:
            logger.info("the run had got to step %d: steps %d to %d are taken again", reached, first.step + 1, reached)

    def see(self, progress: Progress, metrics_bytes: int | None) -> None:
        """After each step: compare or write, where it is time for that. `metrics_bytes`: size of metrics.jsonl, on rank 0."""
        if progress.step == self.reached:
            self._compare(progress)
            self.reached = None
        if self.every is not None and progress.step % self.every == 0:
            self._write(progress, metrics_bytes)

    def _compare(self, progress: Progress) -> None:
        now, differing = self._state(progress), []
        if self._before is not None and self._before["sizes"] == self.sizes:
            differing = [key for key in ("counters", "random_state") if not same(self._before[key], now[key])]
        found = distributed.gather(differing)
        if any(found):
            what = "; ".join(f"rank {rank}: {', '.join(keys)}" for rank, keys in enumerate(found) if keys)
            logger.warning("step %d, taken again, did not come out as before: %s differ", progress.step, what)

    def _write(self, progress: Progress, metrics_bytes: int | None) -> None:
        self.file.parent.mkdir(exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        content = io.BytesIO()  # not straight to the file: torch hides why that could not be written
        torch.save(self._state(progress), content)
        with naming(temporary):
            temporary.write_bytes(content.getbuffer())
        os.replace(temporary, self.file)  # not made durable: after a power cut an older one, or none, does as well
        if self.rank == 0:
            faults.write_state(
                self.run_directory, "running", progress.step, None, **progress.counters(), metrics_bytes=metrics_bytes
            )

    def _state(self, progress: Progress) -> dict:
        counters = progress.counters()
        return {"step": progress.step, "sizes": self.sizes, "counters": counters, "random_state": random_state()}

    def _read(self) -> dict | None:
        try:
            return torch.load(self.file, weights_only=True)
        except Exception:  # none, or cut short: torch raises many kinds
            return None


def same(before, now) -> bool:
    """Whether two states of tensors, numbers and containers are equal."""
    if isinstance(before, torch.Tensor):
        return isinstance(now, torch.Tensor) and torch.equal(before, now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(same(value, now[key]) for key, value in before.items())
    if isinstance(before, (list, tuple)):
        return len(before) == len(now) and all(map(same, before, now))
    return before == now
