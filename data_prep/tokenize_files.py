"""Tokenize text into MMIDIDX token file pairs, the format that Megatron and gpt-neox read.

The output is PREFIX_KEY_document.bin and .idx, with PREFIX_KEY_document.json beside them, which records sources, counts,
tokenizer, versions and checksums, and .rejects.txt, which names the bad records that were left out, if any. With
--num_shards N there are N such sets, PREFIX_KEY_document_00000_of_0000N and so on: joined in order they are byte for
byte the single output. The bytes depend on neither workers nor interruptions; the same command goes on from the shards
that are finished.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import xxhash

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import atomic_open, make_directory, read_json, remove_leftovers, write_json
from data_prep.records import HARMLESS, BadRecord
from data_prep.sources import Piece, Source, add_input_arguments, inputs_of, parse, split_sources
from data_prep.token_file import TokenFileWriter, file_of, token_dtype
from data_prep.tokenizer import LONGEST_SEGMENT, GigatokenEncoder, TextTokenizer, choose_encoder

# Chunks wait for their turn while all that are in work hold less than this; a larger one is in work alone.
IN_WORK_BYTES = 1 << 26
NOT_CUT = BadRecord(
    "too_long", f"over {LONGEST_SEGMENT / 1e6:.1f}M characters without a place where this tokenizer can cut it"
)


@dataclass(frozen=True)
class TokenizeJob:
    """All that decides the output.

    Attributes:
        shards: what each shard is made of.
        prefix: path of the output, without shard and suffix.
        overwrite: whether outputs of other jobs may be replaced.
    """

    sources: tuple[Source, ...]
    shards: tuple[tuple[Piece, ...], ...]
    prefix: Path
    tokenizer: str
    tokenizer_sha256: str
    end_token: str | None
    json_key: str
    append_eod: bool
    on_bad_record: str
    max_record_bytes: int
    deduplicate: bool
    engine: str
    overwrite: bool

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard_prefix(self, shard: int) -> Path:
        if self.num_shards == 1:
            return self.prefix
        return self.prefix.with_name(f"{self.prefix.name}_{shard:05d}_of_{self.num_shards:05d}")

    @functools.cached_property
    def identity(self) -> dict:
        """What an output says that it was made by, in the terms of the command line."""
        return {
            "sources": [source.describe() for source in self.sources],
            "tokenizer": self.tokenizer_sha256,
            "eod_token": self.end_token if self.append_eod else None,
            "json_key": self.json_key,
            "num_shards": self.num_shards,
            "on_bad_record": self.on_bad_record,
            "max_record_mb": self.max_record_bytes / 1e6,
            "text_separator": next((s.separator for s in self.sources if hasattr(s, "separator")), None),
            "deduplicate": self.deduplicate,
            "engine": self.engine,
        }


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
    _worker = ChunkTokenizer(*arguments)


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


def hashes_file(job: TokenizeJob, shard: int) -> Path:
    prefix = job.shard_prefix(shard)
    return prefix.with_name(f".{prefix.name}.hashes.npy")


def seen_before(job: TokenizeJob, shard: int) -> Seen:
    """The hashes of all earlier shards. Raises InputError when one of these is missing."""
    seen = Seen()
    for earlier in range(shard):
        if finished_shard(job, earlier) is None or not hashes_file(job, earlier).exists():
            raise InputError(
                f"--deduplicate makes shards in order: shard {shard} of {job.prefix} needs the hashes of shard {earlier}; "
                f"make them all with one tokenize_files command, after removing {job.prefix}_* where that was finished once"
            )
        seen.add_new(np.load(hashes_file(job, earlier)))
    return seen


def without(chunk: Chunk, drop: np.ndarray) -> None:
    """Take documents out of a chunk, and count them as duplicates."""
    if drop.any():
        chunk.ids = chunk.ids[np.repeat(~drop, chunk.lengths)]
        chunk.lengths = chunk.lengths[~drop]
        chunk.counts["duplicate"] += int(drop.sum())


@functools.lru_cache(1)
def tokenizer_and_encoder(job: TokenizeJob):
    """(tokenizer, encoder) of a job; prints why it is not the faster encoder. The first records are the sample."""
    tokenizer = TextTokenizer(job.tokenizer, job.end_token)
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise InputError(f"tokenizer {job.tokenizer} here is another one than where this job was made")
    sample: list[str] = []
    for piece in job.shards[0][:1]:
        with closing(piece.chunks(job.json_key, job.max_record_bytes)) as chunks:
            for chunk in chunks:
                texts = (piece.parse(r, job.json_key, job.max_record_bytes) for r in chunk.records[:200])
                sample = [text[:10_000] for text in texts if isinstance(text, str)]
                break
    encoder, note = choose_encoder(tokenizer, job.engine, sample)
    if note:
        print(note)
    return tokenizer, encoder


def finished_shard(job: TokenizeJob, shard: int) -> dict | None:
    """The report of a finished shard, None where there is none. Raises InputError for an output of another job."""
    prefix = job.shard_prefix(shard)
    index, data, record = (file_of(prefix, suffix) for suffix in (".idx", ".bin", ".json"))
    if not record.exists():
        if index.exists() and not job.overwrite:
            raise InputError(
                f"{index} exists without a record of what made it; choose another --output_prefix or pass --overwrite"
            )
        return None
    made_by = read_json(record)
    if difference := first_difference(made_by.get("job"), job.identity):
        if job.overwrite:
            return None
        raise InputError(
            f"{record} exists, of another job ({difference}); choose another --output_prefix or pass --overwrite"
        )
    whole = index.exists() and data.exists()
    whole = whole and data.stat().st_size == made_by["tokens"] * np.dtype(made_by["dtype"]).itemsize
    return made_by if whole else None


def first_difference(there: dict | None, here: dict) -> str | None:
    """Where two jobs part, None when they are the same."""
    if not there:
        return "it does not say which"
    for key, value in here.items():
        if there.get(key) != value:
            if key == "sources":
                pairs = zip(there[key], value, strict=False)
                number = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(there[key]), len(value)))
                there, value = ((s[number] if number < len(s) else "none") for s in (there[key], value))
                return f"source {number + 1} was {there}, is {value}"
            return f"{key} was {there.get(key)}, is {value}"
    return None


def tokenize_shard(
    job: TokenizeJob,
    shard: int,
    workers: int,
    progress: Callable[[int, int, int], None] | None = None,
    seen: Seen | None = None,
) -> dict:
    """Make one shard: .bin, .idx, .json, and .rejects.txt where records were left out; returns the report in the .json.

    Returns at once when the finished shard is there. Raises InputError, leaving no output: for a missing file, the first
    bad record when `on_bad_record` is "stop", and when no document is left.

    Args:
        workers: processes, where gigatoken can't be used.
        progress: called with the (stored bytes, bytes of records, tokens) that were done since the last call.
        seen: with `deduplicate`, the hashes of all earlier shards; by default they are read.
    """
    if report := finished_shard(job, shard):
        if seen is not None and shard + 1 < job.num_shards:
            seen.add_new(np.load(hashes_file(job, shard)))
        if progress:
            progress(sum(piece.stored_bytes for piece in job.shards[shard]), 0, 0)
        return report
    if job.deduplicate and seen is None:
        seen = seen_before(job, shard)
    tokenizer, encoder = tokenizer_and_encoder(job)
    prefix = job.shard_prefix(shard)
    make_directory(prefix.parent, "output directory")
    remove_leftovers(prefix)
    counts: Counter = Counter()
    text_bytes = 0
    hashes: list[np.ndarray] = [np.empty(0, np.uint64)]
    begin = time.perf_counter()
    report = {}

    def publish_the_rest(writer: TokenFileWriter) -> None:
        stack.close()
        left_out = {reason: count for reason, count in sorted(counts.items()) if count and reason != "special_in_text"}
        if not set(left_out) - set(HARMLESS):
            file_of(prefix, ".rejects.txt").unlink()
        if job.deduplicate and job.num_shards > 1:
            with atomic_open(hashes_file(job, shard), "wb") as handle:
                np.save(handle, np.concatenate(hashes))
        report.update(
            {
                "documents": writer.documents,
                "tokens": writer.total_tokens,
                "max_token_id": writer.max_token_id,
                "vocab_size": tokenizer.vocab_size,
                "dtype": writer.dtype.name,
                "left_out": left_out,
                "special_in_text": counts["special_in_text"],
                "text_bytes": text_bytes,
                "json_key": job.json_key,
                "append_eod": job.append_eod,
                "engine": "gigatoken" if isinstance(encoder, GigatokenEncoder) else "tokenizers",
                "tokenizer": {
                    "path": tokenizer.name,
                    "sha256": tokenizer.sha256,
                    "eos_token": tokenizer.end_token,
                },
                "versions": {
                    name: importlib.metadata.version(name) for name in ("tokenizers", "gigatoken", "numpy", "xxhash")
                },
                "seconds": max(round(time.perf_counter() - begin, 2), 0.01),
                "checksums": writer.checksums,
                "shard": shard,
                "sources": job.identity["sources"],
                "job": job.identity,
            }
        )
        write_json(file_of(prefix, ".json"), report)

    with ExitStack() as stack, TokenFileWriter(prefix, tokenizer.vocab_size, publish_the_rest) as writer:
        rejects = stack.enter_context(atomic_open(file_of(prefix, ".rejects.txt")))
        with closing(tokenized_chunks(job, shard, workers, encoder, tokenizer.path)) as chunks:
            for piece, stored, chunk in chunks:
                for number, bad in chunk.bad:
                    place = piece.place(number)
                    if job.on_bad_record == "stop":
                        raise InputError(f"{place}: {bad.detail}; mend the record or pass --on_bad_record skip")
                    rejects.write(f"{place}: {bad.reason}: {bad.detail}\n")
                if seen is not None:
                    new = seen.add_new(chunk.hashes)
                    hashes.append(chunk.hashes[new])
                    without(chunk, ~new)
                writer.add(chunk.ids, chunk.lengths)
                counts.update(chunk.counts)
                text_bytes += chunk.text_bytes
                if progress:
                    progress(stored, chunk.text_bytes, len(chunk.ids))
    return report


def finish(job: TokenizeJob) -> dict:
    """Check that all shards are there; write PREFIX.json over them, remove what only unfinished jobs need; the report.

    Raises InputError naming the shards that are missing.
    """
    reports = [finished_shard(job, shard) for shard in range(job.num_shards)]
    if missing := [shard for shard, report in enumerate(reports) if report is None]:
        named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InputError(f"{job.prefix}: {len(missing)} of {job.num_shards} shards are missing: {named}")
    if job.num_shards == 1:
        report = reports[0]
    else:
        totals = Counter()
        for report in reports:
            totals.update(report["left_out"])
        report = {
            **reports[0],
            **{key: sum(report[key] for report in reports) for key in ("documents", "tokens", "special_in_text")},
            **{key: sum(report[key] for report in reports) for key in ("text_bytes", "seconds")},
            "max_token_id": max(report["max_token_id"] for report in reports),
            "left_out": dict(sorted(totals.items())),
            "shards": [
                {
                    "prefix": job.shard_prefix(shard).name,
                    **{key: report[key] for key in ("documents", "tokens", "checksums")},
                }
                for shard, report in enumerate(reports)
            ],
        }
        for key in ("shard", "checksums"):
            del report[key]
        write_json(file_of(job.prefix, ".json"), report)
    for shard in range(job.num_shards):
        hashes_file(job, shard).unlink(missing_ok=True)
    if job.overwrite:
        for path in other_outputs(job):
            path.unlink()
    return {"prefix": str(job.prefix), **report}


def other_outputs(job: TokenizeJob) -> list[Path]:
    """Files of the same prefix with another number of shards: read together, documents would be there twice."""
    name = re.escape(job.prefix.name)
    if not job.prefix.parent.is_dir():
        return []
    ours = {job.shard_prefix(shard).name for shard in range(job.num_shards)} | {job.prefix.name}
    pattern = re.compile(rf"\.?({name}(?:_\d{{5}}_of_\d{{5}})?)\.(?:bin|idx|json|rejects\.txt|hashes\.npy)")
    found = ((pattern.fullmatch(path.name), path) for path in sorted(job.prefix.parent.iterdir()))
    return [path for match, path in found if match and match[1] not in ours]


def is_all_there(job: TokenizeJob) -> bool:
    """Whether the whole output is finished. Raises InputError when another job's output is in the way."""
    others = [] if job.overwrite else other_outputs(job)
    whole = file_of(job.prefix, ".json")
    if job.num_shards > 1 and whole.exists() and not job.overwrite:
        if difference := first_difference(read_json(whole).get("job"), job.identity):
            raise InputError(
                f"{whole} exists, of another job ({difference}); choose another --output_prefix or pass --overwrite"
            )
    done = [finished_shard(job, shard) is not None for shard in range(job.num_shards)]
    if others:
        raise InputError(
            f"{others[0]} exists, of another number of shards; choose another --output_prefix or pass --overwrite"
        )
    return all(done) and whole.exists() and first_difference(read_json(whole).get("job"), job.identity) is None


def summary(report: dict) -> str:
    """The closing line: where, how much, how fast and with what, and what was left out by reason."""
    left_out = "".join(f" {reason}={count}" for reason, count in report["left_out"].items())
    special = f" special_in_text={report['special_in_text']}" if report["special_in_text"] else ""
    return (
        f"{report['prefix']}: docs={report['documents']} tokens={report['tokens']}{left_out}{special} "
        f"({report['engine']}: {report['text_bytes'] / 1e6 / report['seconds']:.1f} MB/s, "
        f"{report['tokens'] / report['seconds']:,.0f} tokens/s)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that decide the output."""
    add_input_arguments(parser)
    parser.add_argument("--output_prefix", type=Path, required=True, help="output path before _KEY_document.{bin,idx}")
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json, the file, or a hub name")
    parser.add_argument("--eod_token", help="end-of-document token (default: the tokenizer's eos_token)")
    parser.add_argument("--num_shards", type=int, default=1, help="file pairs to write (default: 1)")
    parser.add_argument(
        "--engine",
        choices=["auto", "gigatoken", "tokenizers"],
        default="auto",
        help="auto: gigatoken where it gives the same ids",
    )
    parser.add_argument("--on_bad_record", choices=["stop", "skip"], default="stop", help="default: stop")
    parser.add_argument(
        "--append_eod", choices=["true", "false"], default="true", help="end each document (default: true)"
    )
    parser.add_argument("--deduplicate", action="store_true", help="keep the first of documents with the same text")
    parser.add_argument("--overwrite", action="store_true", help="replace the output of another job")


def job_of(arguments: argparse.Namespace) -> TokenizeJob:
    """The job that the options of `add_arguments` ask for. Raises InputError for what can be told before any work."""
    prefix, key = arguments.output_prefix, arguments.json_key
    if "/" in key or not prefix.name:
        raise InputError(f"--output_prefix {prefix} and --json_key {key} make no file name")
    if arguments.num_shards < 1 or arguments.max_record_mb <= 0:
        raise InputError("--num_shards and --max_record_mb must be positive")
    sources = inputs_of(arguments)
    tokenizer = TextTokenizer(arguments.tokenizer, arguments.eod_token)
    if arguments.append_eod == "true" and tokenizer.end_id is None:
        raise InputError(
            f"tokenizer {arguments.tokenizer} names no eos_token; pass --eod_token, or --append_eod false for none"
        )
    return TokenizeJob(
        sources=tuple(sources),
        shards=tuple(split_sources(sources, arguments.num_shards)),
        prefix=prefix.with_name(f"{prefix.name}_{key}_document"),
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        end_token=tokenizer.end_token,
        json_key=key,
        append_eod=arguments.append_eod == "true",
        on_bad_record=arguments.on_bad_record,
        max_record_bytes=int(arguments.max_record_mb * 1e6),
        deduplicate=arguments.deduplicate,
        engine=arguments.engine,
        overwrite=arguments.overwrite,
    )


def tokenize(job: TokenizeJob, workers: int) -> dict:
    """Make all shards that are not there yet, in order, with a progress bar on a terminal; returns the report."""
    from tqdm import tqdm

    done = Counter()
    begin = time.perf_counter()
    total = sum(piece.stored_bytes for pieces in job.shards for piece in pieces)
    seen = Seen() if job.deduplicate else None
    with tqdm(total=total or None, unit="B", unit_scale=True, disable=None, desc="tokenizing") as bar:

        def progress(stored: int, text_bytes: int, tokens: int) -> None:
            done.update(text=text_bytes, tokens=tokens)
            seconds = time.perf_counter() - begin
            bar.set_postfix_str(
                f"text {done['text'] / 1e6 / seconds:.1f} MB/s, {done['tokens'] / seconds:,.0f} tokens/s", refresh=False
            )
            bar.update(stored)

        for shard in range(job.num_shards):
            tokenize_shard(job, shard, workers, progress, seen)
    return finish(job)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.tokenize_files", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes of engine tokenizers (default: one a core)"
    )
    arguments = parser.parse_args(argv)
    job = job_of(arguments)
    if is_all_there(job):
        print(f"{summary(finish(job))}; all of it was there")
        return 0
    print(summary(tokenize(job, arguments.workers)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
