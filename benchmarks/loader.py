"""Samples a second of the loader against raw memmap slices of the same samples.

    python benchmarks/loader.py [--samples 20000] [--seq_length 2048]

Both sides make int64 batches of 8 samples, by turns, the file in the page cache. The raw side is handed the place of every
piece beforehand and does nothing but slice and copy; the loader finds the pieces, checks ids against the vocabulary, and
cuts inputs and labels. The first pass over the samples is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from data_prep.loader import collate
from data_prep.samples import DataSpec, SampleStream
from data_prep.token_file import TokenFileWriter

BATCH = 8


def write_file(prefix: Path, tokens: int, mean: int) -> None:
    random = np.random.RandomState(0)
    lengths = random.randint(1, 2 * mean, tokens // mean).astype(np.int32)
    with TokenFileWriter(prefix, 50_000) as writer:
        writer.add(random.randint(0, 50_000, int(lengths.sum())).astype(np.uint16), lengths)


def pieces_of(stream: SampleStream, number: int) -> list[tuple[int, int]]:
    """(first token in .bin, tokens) of every piece of a sample."""
    place, within = stream._find(number)
    source = stream.sources[place]
    epoch, place = divmod(within, source.samples_per_epoch)
    documents, samples = source._epoch(epoch)
    position, left, pieces = int(samples[place]) * source.seq_length, source.seq_length + 1, []
    while left:
        entry, offset = (int(value) for value in documents.locate(position))
        document = int(documents.order[entry])
        length = min(left, int(source.tokens.lengths[document]) - offset)
        pieces.append((int(source.tokens.offsets[document]) + offset, length))
        position, left = position + length, left - length
    return pieces


def raw(data: np.memmap, batch: list[list[tuple[int, int]]], seq_length: int) -> np.ndarray:
    rows = np.empty((len(batch), seq_length + 1), dtype=np.int64)
    for row, parts in zip(rows, batch, strict=True):
        filled = 0
        for start, length in parts:
            row[filled : filled + length] = data[start : start + length]
            filled += length
    return rows


def compare(stream: SampleStream, data: np.memmap, count: int) -> tuple[float, float]:
    """Seconds (raw, ours) for `count` samples."""
    pieces = [pieces_of(stream, number) for number in range(count)]
    for _ in range(2):
        raw_s = ours_s = 0.0
        for first in range(0, count, BATCH):
            begin = time.perf_counter()
            raw(data, pieces[first : first + BATCH], stream.spec.seq_length)
            between = time.perf_counter()
            collate(stream, np.arange(first, first + BATCH)[None])
            raw_s, ours_s = raw_s + between - begin, ours_s + time.perf_counter() - between
    return raw_s, ours_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    arguments = parser.parse_args()
    count = arguments.samples // BATCH * BATCH
    for mean, mask in ((400, False), (400, True), (4000, False)):
        with tempfile.TemporaryDirectory() as folder:
            prefix = Path(folder) / "tokens"
            write_file(prefix, arguments.tokens, mean)
            files = ((str(prefix), 1.0),)
            stream = SampleStream(DataSpec(files, arguments.seq_length, "epoch", 1, count, 50_000, document_mask=mask))
            data = np.memmap(f"{prefix}.bin", mode="r", dtype=np.uint16)
            raw_s, ours_s = compare(stream, data, count)
            print(
                f"documents of {mean} tokens{', document mask' if mask else ''}: raw {count / raw_s:,.0f} samples/s, ours "
                f"{count / ours_s:,.0f} samples/s ({count / ours_s * arguments.seq_length / 1e6:,.0f}M tokens/s): "
                f"{ours_s / raw_s:.2f} times the raw time"
            )


if __name__ == "__main__":
    main()
