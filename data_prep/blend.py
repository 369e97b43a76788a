"""Which source the k-th sample of a blend comes from: Megatron-LM's rule, many draws at a time."""

from __future__ import annotations

import math

import numpy as np

from data_prep.errors import InputError
from data_prep.order_cache import OrderCache

BLOCK = 4096  # draws between two stored rows of counts


class Blend:
    """Interleaves sources by weight as Megatron does: at draw k, the source that lags furthest behind.

    Draw k takes the source with the largest w_i · max(k, 1) − (samples taken from i), ties to the lowest index, so any
    prefix is within one sample of its share. The sequence does not depend on the length of the run.

    Args:
        weights: one positive number a source; normalised here. Raises InputError for zero, negative or NaN ones.
        draws: how many will probably be wanted; more are computed when they are asked for.
        cache: keeps the first `draws` on disk.
    """

    def __init__(self, weights: list[float], draws: int = 0, cache: OrderCache | None = None):
        for weight in weights:
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                raise InputError(
                    f"data weight {weight} is not a positive number; leave a file out instead of weighting it 0"
                )
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights]
        self._draws = max(draws, BLOCK)
        self._cache = cache or OrderCache(None)
        self._sources = np.empty(0, dtype=np.min_scalar_type(len(weights) - 1))
        self._counts = np.zeros((1, len(weights)), dtype=np.int64)  # row b: draws of each source before draw b · BLOCK

    def _extend(self, k: int) -> None:
        """Compute draws until there are more than k."""
        if not len(self._sources):
            length = -(-self._draws // BLOCK) * BLOCK
            key = {"blend": self.weights, "draws": length}
            arrays = self._cache.arrays(key, length, lambda: self._compute(0, length))
            self._sources, self._counts = arrays["sources"].view(np.ndarray), arrays["counts"].view(np.ndarray)
        while len(self._sources) <= k:
            arrays = self._compute(len(self._sources), len(self._sources))
            self._sources = np.concatenate([self._sources, arrays["sources"]])
            self._counts = np.concatenate([self._counts, arrays["counts"][1:]])

    def _compute(self, begin: int, length: int) -> dict[str, np.ndarray]:
        sources = greedy_draws(np.array(self.weights), begin, self._counts[-1], length).astype(self._sources.dtype)
        blocks = sources.reshape(-1, BLOCK)
        counts = np.stack([(blocks == source).sum(axis=1) for source in range(len(self.weights))], axis=1)
        counts = np.concatenate([self._counts[-1:], self._counts[-1] + np.cumsum(counts, axis=0)])
        return {"sources": sources, "counts": counts}

    def draw(self, k: int) -> tuple[int, int]:
        """(source, sample number within that source) of draw k, k = 0, 1, ..."""
        if len(self.weights) == 1:
            return 0, k
        if k >= len(self._sources):
            self._extend(k)
        source, block = self._sources[k], k // BLOCK
        within = np.count_nonzero(self._sources[block * BLOCK : k] == source)
        return int(source), int(self._counts[block, source] + within)

    def counts(self, draws: int) -> list[int]:
        """How many of the first `draws` draws each source gives."""
        if len(self.weights) == 1:
            return [draws]
        if draws > len(self._sources):
            self._extend(draws - 1)
        block = draws // BLOCK
        rest = np.bincount(self._sources[block * BLOCK : draws], minlength=len(self.weights))
        return [int(count) for count in self._counts[block] + rest]


def greedy_draws(weights: np.ndarray, begin: int, counts: np.ndarray, length: int) -> np.ndarray:
    """Sources [length] of draws begin .. begin + length - 1, exactly as one draw after another would give them.

    One draw needs the counts before it, so the draws are cut into segments that run side by side, each from a guess of
    its counts some draws earlier: greedy choice forgets a wrong guess quickly. A segment is exact when its predecessor,
    itself exact, ends on the counts that it started from; the rare one that did not is run again from there.

    Args:
        weights: float64 [n], normalised.
        counts: int64 [n], draws of each source before `begin`.
    """
    warm_up = max(256, 32 * len(weights))
    segments = min(max(length // (4 * warm_up), 1), 4096)
    steps = -(-length // segments)
    first = begin + steps * np.arange(segments, dtype=np.float64)
    guess_at = np.maximum(first - warm_up, begin)
    state = _rounded_shares(weights, guess_at)
    state[:, guess_at == begin] = counts[:, None]
    for ago in range(warm_up, 0, -1):
        running = np.flatnonzero(first - ago >= begin)
        part = state[:, running]
        _advance(weights, first[running] - ago, part)
        state[:, running] = part
    starts = state.copy()
    drawn = np.empty((steps, segments), dtype=np.min_scalar_type(len(weights) - 1))
    for step in range(steps):
        drawn[step] = _advance(weights, first + step, state)
    for segment in range(1, segments):
        if not np.array_equal(state[:, segment - 1], starts[:, segment]):
            one = state[:, segment - 1 : segment].copy()
            for step in range(steps):
                drawn[step, segment] = _advance(weights, first[segment] + step, one)[0]
            state[:, segment] = one[:, 0]
    return drawn.T.reshape(-1)[:length]


def _advance(weights: np.ndarray, at, state: np.ndarray) -> np.ndarray:
    """One draw in each column: at [columns] or scalar, state [n, columns] counts, changed in place; returns sources."""
    chosen = np.argmax(weights[:, None] * np.maximum(at, 1.0) - state, axis=0)
    state[chosen, np.arange(state.shape[1])] += 1
    return chosen


def _rounded_shares(weights: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Whole counts [n, columns] near weights · at that sum to `at`: the largest remainders are rounded up."""
    shares = np.outer(weights, at)
    counts = np.floor(shares)
    missing = np.rint(at - counts.sum(axis=0))
    order = np.argsort(counts - shares, axis=0, kind="stable")
    np.put_along_axis(
        counts, order, np.take_along_axis(counts, order, 0) + (np.arange(len(weights))[:, None] < missing), 0
    )
    return counts
