"""Whole optimizer steps of training data for one data-parallel rank, read ahead in a background thread."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from dataclasses import dataclass

import numpy as np

from data_prep.samples import SampleStream

IGNORED_LABEL = -100


@dataclass(frozen=True)
class StepBatch:
    """One rank's data for one optimizer step.

    Attributes:
        inputs: int64 [accumulation, micro_batch, seq_length].
        labels: the same shape; labels[..., t] is the token that follows inputs[..., t], or IGNORED_LABEL.
        positions: the same shape, with a document mask: the position in the document, 0 at the row's begin and where a
            document begins, which is how attention finds the borders too; else None.
        samples: int64 [accumulation, micro_batch], sample numbers of the run.
        tokens: labels that count in the loss.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None
    samples: np.ndarray
    tokens: int

    def checksum(self) -> int:
        """CRC-32 of the inputs: two runs that read the same tokens agree on it."""
        return zlib.crc32(np.ascontiguousarray(self.inputs).tobytes())


def rank_samples(consumed: int, micro_batch: int, accumulation: int, data_parallel: int, rank: int) -> np.ndarray:
    """Sample numbers [accumulation, micro_batch] of one rank in the step that begins after `consumed` samples.

    The global order is cut into blocks of micro_batch · data_parallel, each in rank order, so it does not depend on
    how many ranks there are (the same block layout as Megatron's).
    """
    block = consumed + np.arange(accumulation)[:, None] * micro_batch * data_parallel
    return block + rank * micro_batch + np.arange(micro_batch)[None, :]


def collate(stream: SampleStream, samples: np.ndarray) -> StepBatch:
    """Read `samples` [accumulation, micro_batch] and cut inputs and labels: the one place where labels are shifted.

    With a document mask, the label at a document's last token, which is the next document's first, counts nowhere.

    Raises InputError for an id outside the vocabulary, naming its document.
    """
    length = stream.spec.seq_length
    # Ascending, as `rank_samples` makes them, but for the repeated last one of a short validation.
    rows, borders = stream.read(samples.ravel())
    inputs, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    positions, tokens, shape = None, labels.size, (*samples.shape, length)
    if stream.spec.document_mask:
        row = np.repeat(np.arange(len(borders)), [len(begins) for begins in borders])
        begin = np.fromiter((begin for begins in borders for begin in begins), np.int64, len(row))
        labels[row, begin - 1] = IGNORED_LABEL
        tokens -= len(row)
        positions = np.zeros((len(borders), length), dtype=np.int64)
        inside = begin < length
        positions[row[inside], begin[inside]] = begin[inside]
        np.maximum.accumulate(positions, axis=1, out=positions)  # where each token's document begins
        np.subtract(np.arange(length), positions, out=positions)
        positions = positions.reshape(shape)
    return StepBatch(inputs.reshape(shape), labels.reshape(shape), positions, samples, tokens)


class StepLoader:
    """Reads steps ahead in a thread; `next()` returns them in order.

    Args:
        stream: the run's samples.
        sizes: has micro_batch, accumulation and data (the data-parallel size).
        rank: the data-parallel rank.
        consumed_samples: where to start.
        ahead: steps kept ready.

    Attributes:
        wait_s: seconds that the last `next()` waited for its step.

    An error while reading is raised by the `next()` that asks for that step.
    """

    def __init__(self, stream: SampleStream, sizes, rank: int, consumed_samples: int = 0, ahead: int = 2):
        self._stream = stream
        self._place = (sizes.micro_batch, sizes.accumulation, sizes.data, rank)
        self._step_samples = sizes.micro_batch * sizes.accumulation * sizes.data
        self._ready: queue.Queue = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._read, args=(consumed_samples,), name="data-loader", daemon=True)
        self._thread.start()

    def _read(self, consumed: int) -> None:
        while not self._closed.is_set():
            try:
                item = collate(self._stream, rank_samples(consumed, *self._place))
            except Exception as error:  # handed to the training thread, which raises it
                item = error
            consumed += self._step_samples
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return

    def next(self) -> StepBatch:
        """The next step's data."""
        begin = time.perf_counter()
        item = self._ready.get()
        self.wait_s = time.perf_counter() - begin
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
