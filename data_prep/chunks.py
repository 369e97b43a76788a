"""From chunks of records to chunks of ids, in several threads or processes, in input order and bounded memory."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
import xxhash

from data_prep.formats import Piece, parse
from data_prep.records import HARMLESS, BadRecord
from data_prep.token_file import token_dtype
from data_prep.tokenize_job import TokenizeJob
from data_prep.tokenizer import LONGEST_SEGMENT, GigatokenEncoder, TextTokenizer

# Nothing more is read while the chunks in work hold more than this.
IN_WORK_BYTES = 1 << 26
NOT_CUT = BadRecord(
    "too_long", f"over {LONGEST_SEGMENT / 1e6:.1f} MB without a place where this tokenizer lets a text be cut"
)


@dataclass
class Chunk:
    """What one piece of input became: ids of its documents back to back, their lengths, and the records left out.

    `hashes` holds one of each document's text, or is None when they are not asked for.
    """

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    counts: Counter = field(default_factory=Counter)
    bad: list[tuple[int, BadRecord]] = field(default_factory=list)
    hashes: np.ndarray | None = None

    def leave_out(self, documents: np.ndarray) -> None:
        """Take documents out, [documents] bool, and count them as duplicates."""
        if documents.any():
            self.ids = self.ids[np.repeat(~documents, self.lengths)]
            self.lengths = self.lengths[~documents]
            self.counts["duplicate"] += int(documents.sum())


class ChunkTokenizer:
    """Turns records into a Chunk. `tokenizer` is a local path; `encoder` is what to encode with, by default itself."""

    def __init__(self, job: TokenizeJob, tokenizer: Path, encoder=None):
        self.tokenizer = TextTokenizer(tokenizer, job.end_token)
        self.encoder = encoder or self.tokenizer
        self.key, self.append_eod, self.most_bytes = job.json_key, job.append_eod, job.max_record_bytes
        self.hashing = job.deduplicate
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, is_json: bool, first: int, records: list) -> Chunk:
        segments, starts, hashes, bad = [], [], [], []
        counts: Counter = Counter()
        size = 0
        records.reverse()
        for number in range(first, first + len(records)):
            record = records.pop()  # large ones are not held any longer than they are needed
            size += len(record) if isinstance(record, bytes) else 0
            text = parse(record, is_json, self.key, self.most_bytes)
            del record
            if isinstance(text, str):
                parts = self.tokenizer.segments(text)
                if parts is None:
                    text = NOT_CUT
            if isinstance(text, BadRecord):
                counts[text.reason] += 1
                if text.reason not in HARMLESS:
                    bad.append((number, text))
                continue
            counts["special_in_text"] += self.tokenizer.mentions_special(text)
            if self.hashing:
                hashes.append(xxhash.xxh3_64_intdigest(text.encode()))
            starts.append(len(segments))
            segments += parts
        text = parts = None
        if not segments:
            return Chunk(np.empty(0, self.dtype), np.empty(0, np.int32), size, counts, bad, np.empty(0, np.uint64))
        ids, lengths = self.encoder.encode(segments)
        del segments
        if len(starts) < len(lengths):
            lengths = np.add.reduceat(lengths, starts)
        written = lengths > 0
        counts["skipped_empty"] += int((~written).sum())  # text that a normalizer removes whole
        return Chunk(
            self._joined(ids, lengths),
            lengths[written] + self.append_eod,
            size,
            counts,
            bad,
            np.array(hashes, np.uint64)[written] if self.hashing else None,
        )

    def _joined(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """`ids` in the stored type, the end-of-document id after each document that is not empty."""
        if not self.append_eod:
            return ids.astype(self.dtype)
        end = np.array([self.tokenizer.end_id], self.dtype)
        parts, begin = [np.empty(0, self.dtype)], 0
        for stop in np.cumsum(lengths, dtype=np.int64).tolist():
            if stop > begin:
                parts += (ids[begin:stop], end)
                begin = stop
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")


_worker: ChunkTokenizer


def _start_worker(*arguments) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = ChunkTokenizer(*arguments)


def _end_with_parent() -> None:
    """A pool's processes don't see that their parent was killed: they would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def _tokenize_in_worker(*arguments) -> Chunk:
    return _worker(*arguments)


def tokenized_chunks(
    job: TokenizeJob, shard: int, workers: int, encoder, tokenizer: Path
) -> Iterator[tuple[Piece, int, Chunk]]:
    """(piece, stored bytes, Chunk) of a shard in input order, with a bounded number of bytes in work.

    With the tokenizer itself as encoder, in `workers` processes; with gigatoken, which has threads of its own and
    leaves Python meanwhile, in two threads here, so that one parses while the other encodes.
    """
    if isinstance(encoder, GigatokenEncoder):
        workers, pool, tokenize = 2, ThreadPoolExecutor(2), ChunkTokenizer(job, tokenizer, encoder)
    elif workers > 1:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(job, tokenizer))
        tokenize = _tokenize_in_worker
    else:
        pool, tokenize = ThreadPoolExecutor(1), ChunkTokenizer(job, tokenizer)
    pending: deque = deque()
    in_work = 0

    def next_done():
        nonlocal in_work
        piece, stored, size, future = pending.popleft()
        in_work -= size
        return piece, stored, future.result()

    try:
        for piece in job.shards[shard]:
            for chunk in piece.chunks(job.json_key, job.max_record_bytes):
                size, stored = chunk.size, chunk.stored
                future = pool.submit(tokenize, piece.source.is_json, chunk.first, chunk.records)
                del chunk
                pending.append((piece, stored, size, future))
                in_work += size
                while len(pending) >= 2 * workers or in_work > IN_WORK_BYTES:
                    yield next_done()
        while pending:
            yield next_done()
    finally:
        pool.shutdown(cancel_futures=True)


class Seen:
    """The hashes of all texts so far: sorted arrays, of which each is more than twice as large as the next."""

    def __init__(self):
        self._arrays: list[np.ndarray] = []

    def add_new(self, hashes: np.ndarray) -> np.ndarray:
        """Which of `hashes` are new, the first of equals alone, [len(hashes)] bool; from now on they are not."""
        new = np.zeros(len(hashes), bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        for array in self._arrays:
            places = np.searchsorted(array, hashes)
            new &= array[np.minimum(places, len(array) - 1)] != hashes
        if new.any():
            self._arrays.append(np.sort(hashes[new]))
        while len(self._arrays) > 1 and len(self._arrays[-2]) <= 2 * len(self._arrays[-1]):
            self._arrays[-2:] = [np.sort(np.concatenate(self._arrays[-2:]), kind="stable")]
        return new
