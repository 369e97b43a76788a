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
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from data_prep.chunks import Seen, tokenized_chunks
from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import atomic_open, make_directory, remove_leftovers, write_json
from data_prep.records import HARMLESS
from data_prep.sources import add_input_arguments, inputs_of, split_sources
from data_prep.token_file import TokenFileWriter, file_of
from data_prep.tokenize_job import TokenizeJob, finished_shard, hashes_file, other_outputs, own_record
from data_prep.tokenizer import GigatokenEncoder, TextTokenizer, choose_encoder


def add_hashes(seen: Seen, job: TokenizeJob, shard: int) -> None:
    """Add the hashes of a shard. Raises InputError when they are not there: not made yet, or finished and removed."""
    if finished_shard(job, shard) is None or not hashes_file(job, shard).exists():
        raise InputError(
            f"--deduplicate makes shards in order, and the hashes of shard {shard} of {job.prefix} are not there; let one "
            f"tokenize_files command make all shards, and remove {job.prefix}* first where they were finished once"
        )
    seen.add_new(np.load(hashes_file(job, shard)))


@functools.lru_cache(1)
def tokenizer_and_encoder(job: TokenizeJob):
    """(tokenizer, encoder) of a job; prints why it is not the faster encoder. The first records are the sample."""
    tokenizer = TextTokenizer(job.tokenizer, job.end_token)
    if tokenizer.sha256 != job.tokenizer_sha256:
        raise InputError(f"tokenizer {job.tokenizer} here is another one than where this job was made")
    encoder, note = choose_encoder(tokenizer, job.engine, sample_texts(job))
    if note:
        print(note)
    return tokenizer, encoder


def sample_texts(job: TokenizeJob, most: int = 200, most_bytes: int = 1 << 23) -> list[str]:
    """The beginnings of the first good records, for comparing encoders."""
    sample: list[str] = []
    read = 0
    for piece in job.shards[0]:
        with closing(piece.chunks(job.json_key, job.max_record_bytes)) as chunks:
            for chunk in chunks:
                texts = (piece.parse(record, job.json_key, job.max_record_bytes) for record in chunk.records[:most])
                sample += (text[:10_000] for text in texts if isinstance(text, str))
                read += chunk.size
                if len(sample) >= most or read >= most_bytes:
                    return sample[:most]
    return sample


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
        if seen is not None and job.num_shards > 1:
            add_hashes(seen, job, shard)
        if progress:
            progress(sum(piece.stored_bytes for piece in job.shards[shard]), 0, 0)
        return report
    if job.deduplicate and seen is None:
        seen = Seen()
        for earlier in range(shard):
            add_hashes(seen, job, earlier)
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
                "sources": job.made_of(shard),
                "job": job.identity,
            }
        )
        write_json(file_of(prefix, ".json"), report)

    may_be_empty = job.num_shards > 1
    with ExitStack() as stack, TokenFileWriter(prefix, tokenizer.vocab_size, publish_the_rest, may_be_empty) as writer:
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
                    chunk.leave_out(~new)
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
    if job.num_shards > 1:
        own_record(job, job.prefix, job.made_of())  # refuses another job's
        remove_leftovers(job.prefix)
    reports = [finished_shard(job, shard) for shard in range(job.num_shards)]
    if missing := [shard for shard, report in enumerate(reports) if report is None]:
        named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InputError(f"{job.prefix}: {len(missing)} of {job.num_shards} shards are missing: {named}")
    if not any(report["documents"] for report in reports):
        for path in (
            file_of(job.shard_prefix(n), end) for n in range(job.num_shards) for end in (".idx", ".bin", ".json")
        ):
            path.unlink(missing_ok=True)
        raise InputError(f"0 documents written to {job.prefix}: every record of every shard was skipped")
    if job.num_shards == 1:
        report = reports[0]
    else:
        totals = Counter()
        for report in reports:
            totals.update(report["left_out"])
        report = {
            **reports[0],
            "sources": job.made_of(),
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


def is_all_there(job: TokenizeJob) -> bool:
    """Whether the whole output is finished. Raises InputError when another job's output is in the way."""
    whole = own_record(job, job.prefix, job.made_of())
    done = [finished_shard(job, shard) is not None for shard in range(job.num_shards)]
    if not job.overwrite and (others := other_outputs(job)):
        raise InputError(
            f"{others[0]} exists, of another --num_shards; choose another --output_prefix or pass --overwrite"
        )
    return whole is not None and all(done)


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
    if not 1 <= arguments.num_shards < 100_000 or arguments.max_record_mb <= 0:
        raise InputError("--num_shards must lie in 1 .. 99999, and --max_record_mb be positive")
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
