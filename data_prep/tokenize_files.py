"""Tokenize JSONL files into one MMIDIDX token file pair, the format that Megatron and gpt-neox read.

The output is PREFIX_KEY_document.bin and .idx, with PREFIX_KEY_document.json beside them, which records sources, counts,
tokenizer and versions, and .rejects.txt, which names the bad records that were left out, if any. The bytes depend on neither the number of workers nor the chunking.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import atomic_open, make_directory, write_json
from data_prep.records import HARMLESS, BadRecord, parse_record
from data_prep.sources import COMPRESSED, find_inputs, line_chunks
from data_prep.token_file import TokenFileWriter, file_of, token_dtype
from data_prep.tokenizer import GigatokenEncoder, TextTokenizer, choose_encoder


@dataclass
class Chunk:
    """What one piece of input became: ids of its documents back to back, their lengths, and the records left out."""

    ids: np.ndarray
    lengths: np.ndarray
    bytes_read: int
    counts: Counter = field(default_factory=Counter)
    bad: list[tuple[int, BadRecord]] = field(default_factory=list)


class ChunkTokenizer:
    """Turns lines into a Chunk.

    Args:
        tokenizer: a path; loaded once a process.
        key: of the text.
        append_eod: whether each document gets the end-of-document id.
        encoder: what to encode with (see `choose_encoder`); None: the tokenizer itself.
    """

    def __init__(self, tokenizer: str, key: str, append_eod: bool, encoder=None):
        self.tokenizer = TextTokenizer(tokenizer)
        self.encoder = encoder or self.tokenizer
        self.key = key
        self.append_eod = append_eod
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, first_line: int, lines: list[bytes]) -> Chunk:
        texts, counts, bad = [], Counter(), []
        for number, line in enumerate(lines, first_line):
            text = parse_record(line, self.key)
            if isinstance(text, BadRecord):
                counts[text.reason] += 1
                if text.reason not in HARMLESS:
                    bad.append((number, text))
                continue
            counts["special_in_text"] += any(token in text for token in self.tokenizer.special_tokens)
            texts.append(text)
        ids, lengths = self.encoder.encode(texts) if texts else (np.empty(0, self.dtype), np.empty(0, np.int32))
        counts["skipped_empty"] += int((lengths == 0).sum())  # text that a normalizer removes whole
        lengths = lengths[lengths > 0]
        if self.append_eod:
            ids, lengths = np.insert(ids, np.cumsum(lengths), self.tokenizer.end_id), lengths + 1
        return Chunk(ids.astype(self.dtype), lengths, sum(map(len, lines)), counts, bad)


_worker: ChunkTokenizer


def _start_worker(*arguments) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = ChunkTokenizer(*arguments)


def _tokenize_in_worker(first_line: int, lines: list[bytes]) -> Chunk:
    return _worker(first_line, lines)


def tokenized_chunks(paths: list[Path], workers: int, encoder, *arguments) -> Iterator[tuple[Path, Chunk]]:
    """Chunks of all files in input order, with at most two chunks a worker in memory.

    With the tokenizer itself as encoder, in `workers` processes; with gigatoken, which has threads of its own and
    leaves Python meanwhile, in two threads here, so that one parses while the other encodes.
    """
    if isinstance(encoder, GigatokenEncoder):
        workers, pool, tokenize = 2, ThreadPoolExecutor(2), ChunkTokenizer(*arguments, encoder)
    elif workers > 1:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=arguments)
        tokenize = _tokenize_in_worker
    else:
        pool, tokenize = ThreadPoolExecutor(1), ChunkTokenizer(*arguments)
    with pool:
        pending: deque = deque()
        pieces = ((source, *piece) for source in paths for piece in line_chunks(source))
        for source, first, lines in pieces:
            pending.append((source, pool.submit(tokenize, first, lines)))
            if len(pending) >= 2 * workers:
                path, future = pending.popleft()
                yield path, future.result()
        while pending:
            path, future = pending.popleft()
            yield path, future.result()


def sample_texts(path: Path, key: str, most: int = 200) -> list[str]:
    """Texts of the first good records of a file, for comparing encoders."""
    _, lines = next(line_chunks(path), (1, []))
    texts = (parse_record(line, key) for line in lines[:most])
    return [text for text in texts if isinstance(text, str)]


def tokenize(
    paths: list[Path],
    output_prefix: Path,
    tokenizer_path: str,
    *,
    json_key: str = "text",
    workers: int = 1,
    on_bad_record: str = "stop",
    append_eod: bool = True,
    engine: str = "auto",
) -> dict:
    """Write `output_prefix`_KEY_document.{bin,idx,json,rejects.txt} from the records of `paths`; returns the report in the .json.

    Raises InputError, leaving no output: for a missing file or tokenizer, a tokenizer without an end token when
    `append_eod`, the first bad record when `on_bad_record` is "stop", and when no document is left.
    """
    from tqdm import tqdm

    tokenizer = TextTokenizer(tokenizer_path)
    if append_eod and tokenizer.end_id is None:
        raise InputError(
            f"tokenizer {tokenizer_path} names no eos_token; set one in its tokenizer_config.json or pass --append_eod false"
        )
    encoder, note = choose_encoder(tokenizer, engine, sample_texts(paths[0], json_key))
    if note:
        print(note)
    prefix = output_prefix.with_name(f"{output_prefix.name}_{json_key}_document")
    counts: Counter = Counter()
    begin = time.perf_counter()
    # Text of compressed files is larger than they are, by a factor that only reading them tells.
    plain = all(path.suffix not in COMPRESSED for path in paths)
    size, text_bytes = sum(path.stat().st_size for path in paths) if plain else None, 0
    make_directory(prefix.parent, "output directory")
    with (
        atomic_open(file_of(prefix, ".rejects.txt")) as rejects,
        TokenFileWriter(prefix, tokenizer.vocab_size) as writer,
        tqdm(total=size, unit="B", unit_scale=True, disable=None, desc="tokenizing") as progress,
    ):
        for path, chunk in tokenized_chunks(paths, workers, encoder, tokenizer_path, json_key, append_eod):
            for line, bad in chunk.bad:
                if on_bad_record == "stop":
                    raise InputError(f"{path}:{line}: {bad.detail}; mend the record or pass --on_bad_record skip")
                rejects.write(f"{path}:{line}: {bad.reason}: {bad.detail}\n")
            writer.add(chunk.ids, chunk.lengths)
            counts.update(chunk.counts)
            progress.update(chunk.bytes_read)
            text_bytes += chunk.bytes_read
        if writer.documents:  # about to be published: the old record must not stand beside the new tokens
            file_of(prefix, ".json").unlink(missing_ok=True)
    left_out = {reason: count for reason, count in sorted(counts.items()) if count and reason != "special_in_text"}
    if not set(left_out) - set(HARMLESS):
        file_of(prefix, ".rejects.txt").unlink()
    report = {
        "documents": writer.documents,
        "tokens": writer.total_tokens,
        "max_token_id": writer.max_token_id,
        "vocab_size": tokenizer.vocab_size,
        "dtype": writer.dtype.name,
        "left_out": left_out,
        "special_in_text": counts["special_in_text"],
        "sources": [{"path": str(path.resolve()), "bytes": path.stat().st_size} for path in paths],
        "text_bytes": text_bytes,
        "json_key": json_key,
        "append_eod": append_eod,
        "engine": "gigatoken" if isinstance(encoder, GigatokenEncoder) else "tokenizers",
        "tokenizer": {
            "path": str(Path(tokenizer_path).resolve()),
            "sha256": tokenizer.sha256,
            "eos_token": tokenizer.end_token,
        },
        "versions": {name: importlib.metadata.version(name) for name in ("tokenizers", "gigatoken", "numpy")},
        "seconds": max(round(time.perf_counter() - begin, 2), 0.01),
    }
    write_json(file_of(prefix, ".json"), report)
    return {"prefix": str(prefix), **report}


def summary(report: dict) -> str:
    """The closing line: where, how much, and what was left out by reason."""
    left_out = "".join(f" {reason}={count}" for reason, count in report["left_out"].items())
    special = f" special_in_text={report['special_in_text']}" if report["special_in_text"] else ""
    return (
        f"{report['prefix']}: docs={report['documents']} tokens={report['tokens']}{left_out}{special} "
        f"({report['text_bytes'] / 1e6 / report['seconds']:.1f} MB/s)"
    )


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.tokenize_files", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", nargs="+", required=True, help="JSONL files, directories or globs; .gz, .xz, .zst too"
    )
    parser.add_argument("--output_prefix", type=Path, required=True, help="output path before _KEY_document.{bin,idx}")
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json, or the file")
    parser.add_argument("--json_key", default="text", help="key of the text (default: text)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes of engine tokenizers (default: one a core)"
    )
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
    parser.add_argument("--overwrite", action="store_true", help="replace existing token files")
    arguments = parser.parse_args(argv)
    if "/" in arguments.json_key or not arguments.output_prefix.name:
        raise InputError(
            f"--output_prefix {arguments.output_prefix} and --json_key {arguments.json_key} make no file name"
        )
    existing = arguments.output_prefix.with_name(f"{arguments.output_prefix.name}_{arguments.json_key}_document.idx")
    if existing.exists() and not arguments.overwrite:
        raise InputError(f"{existing} exists; choose another --output_prefix or pass --overwrite")
    report = tokenize(
        find_inputs(arguments.input),
        arguments.output_prefix,
        arguments.tokenizer,
        json_key=arguments.json_key,
        workers=arguments.workers,
        on_bad_record=arguments.on_bad_record,
        append_eod=arguments.append_eod == "true",
        engine=arguments.engine,
    )
    print(summary(report))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
