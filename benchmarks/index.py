"""Time to open a large token file and to have the first sample, in both orders, without and from the cache, and to blend.

    python benchmarks/index.py [--documents 20000000] [--tokens 10000000000] [--seq_length 2048]

The token file is sparse: its index is real, its .bin holes. Each figure is one run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from data_prep.blend import Blend
from data_prep.order_cache import OrderCache
from data_prep.samples import EpochSource, MegatronSource
from data_prep.token_file import DTYPE_CODES, HEADER, MAGIC, TokenFile


def sparse_token_file(prefix: Path, documents: int, tokens: int) -> None:
    """Write an index of `documents` documents with `tokens` tokens in all, lengths uniform around their mean."""
    random = np.random.RandomState(0)
    mean = tokens // documents
    lengths = random.randint(1, 2 * mean, documents).astype("<i4")
    lengths[-1] += tokens - int(lengths.sum(dtype=np.int64)) if tokens > lengths.sum(dtype=np.int64) else 0
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * 2
    with open(f"{prefix}.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, DTYPE_CODES[np.dtype(np.uint16)], documents, documents + 1))
        for array in (lengths, offsets.astype("<i8"), np.arange(documents + 1, dtype="<i8")):
            index.write(array.tobytes())
    with open(f"{prefix}.bin", "wb") as data:
        data.truncate(2 * int(lengths.sum(dtype=np.int64)))


def timed(what: str, function):
    begin = time.perf_counter()
    value = function()
    print(f"{what:<44} {time.perf_counter() - begin:6.1f} s")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--tokens", type=int, default=10_000_000_000)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--blend_samples", type=int, default=100_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "big"
        sparse_token_file(prefix, arguments.documents, arguments.tokens)
        tokens = timed("open", lambda: TokenFile(prefix))
        print(f"  {len(tokens):,} documents, {tokens.total_tokens:,} tokens")
        cache, length = OrderCache(Path(folder) / "cache"), arguments.seq_length
        first = np.array([0])
        rows = np.empty((1, length + 1), np.int64)
        for name, kept in (
            ("epoch order in memory", None),
            ("epoch order into the cache", cache),
            ("epoch order from the cache", cache),
        ):
            timed(f"{name}, first sample", lambda kept=kept: EpochSource(tokens, length, 1, 0, kept).read(first, rows))
        wanted = (tokens.total_tokens - 1) // length
        for name, kept in (("in memory", None), ("into the cache", cache), ("from the cache", cache)):
            megatron = timed(
                f"Megatron's order {name}, first sample",
                lambda kept=kept: first_sample(MegatronSource(tokens, length, 1, wanted, kept), rows),
            )
        timed("  its sample index", lambda: megatron.sample_index)
    blend = Blend([1.0 + n / 10 for n in range(10)], arguments.blend_samples)
    timed(f"blend of 10 files, {arguments.blend_samples:,} samples", lambda: blend.draw(arguments.blend_samples - 1))


def first_sample(source: MegatronSource, rows: np.ndarray) -> MegatronSource:
    source.read(np.array([0]), rows)
    return source


if __name__ == "__main__":
    main()
