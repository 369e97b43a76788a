"""Inputs: which sources a command line names, in which order, and how they are split into shards."""

from __future__ import annotations

import argparse
import glob
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.errors import InputError
from data_prep.formats import (
    COMPRESSED,
    Arrow,
    HubDataset,
    JsonLines,
    Parquet,
    Piece,
    Source,
    TextFile,
    is_saved,
    load_dataset,
    reading,
)
from data_prep.records import HARMLESS

CLASSES = {"jsonl": JsonLines, "parquet": Parquet, "arrow": Arrow, "text": TextFile}
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".ipc", ".feather"),
    "text": (".txt", ".text", ".md", ".rst", ".tex"),
}
MAX_RECORD_BYTES = 128_000_000


def find_dataset(name: str, config: str | None, split: str, streaming: bool) -> HubDataset:
    """The source for a dataset; a saved one is memory-mapped, whether `streaming` or not."""
    source = HubDataset(name, None, None, config, split, streaming and not is_saved(name))
    dataset = load_dataset(source)
    if source.streaming:
        return source
    return replace(source, size=dataset.data.nbytes, modified=dataset._fingerprint)


def natural_key(name: str) -> list:
    """Sorts part2 before part10: digits as numbers, the rest as text."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def format_of(name: str) -> str | None:
    """The format that the suffix tells, compressed or not."""
    path = Path(name)
    suffix = (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
    return next((form for form, suffixes in FORMATS.items() if suffix in suffixes), None)


def find_inputs(names: list[str], form: str | None = None, separator: str | None = None) -> list[Source]:
    """The files that `names` stand for: files, directories (all files of one format below), globs, and URLs of these.

    Names keep their order; what one of them stands for comes in natural order. Raises InputError for a name that stands
    for nothing, a file of no known format when `form` is None, or a file named twice.
    """
    sources: list[Source] = []
    seen: set[str] = set()
    for name in names:
        for path, size, modified in _find_remote(name, form) if "://" in name else _find_local(name, form):
            kind = form or format_of(path)
            if kind is None:
                raise InputError(f"--input {path}: its suffix tells no format; pass --format {'|'.join(FORMATS)}")
            if (real := path if "://" in path else str(Path(path).resolve())) in seen:
                raise InputError(f"--input names {path} twice: its documents would be there twice")
            seen.add(real)
            if not size and (kind in ("parquet", "arrow") or Path(path).suffix in COMPRESSED):
                raise InputError(f"--input {path} is empty, which no whole file of its format is; get the file again")
            source = CLASSES[kind](path, size, modified)
            sources.append(replace(source, separator=separator) if kind == "text" else source)
    return sources


def _find_local(name: str, form: str | None) -> list[tuple[str, int, int]]:
    path = Path(name)
    if path.is_file():
        found = [path]
    elif path.is_dir():
        inside = {str(p): p for p in path.rglob("*") if p.is_file()}
        found = [inside[one] for one in _of_one_format(name, list(inside), form)]
    else:
        found = [p for p in map(Path, glob.glob(name, recursive=True)) if p.is_file()]
        if not found:
            raise InputError(f"--input {name} {'matches no file' if glob.has_magic(name) else 'does not exist'}")
    found.sort(key=lambda p: natural_key(p.as_posix()))
    return [(str(p), (stat := p.stat()).st_size, stat.st_mtime_ns) for p in found]


def _find_remote(name: str, form: str | None) -> list[tuple[str, int, str]]:
    import fsspec

    with reading(name, "a URL"):
        system, path = fsspec.core.url_to_fs(name)
        if system.isfile(path):
            found = [path]
        elif system.isdir(path):
            found = _of_one_format(name, system.find(path), form)
        else:
            found = [p for p in system.glob(path) if system.isfile(p)] if glob.has_magic(path) else []
            if not found:
                raise InputError(f"--input {name} {'matches no file' if glob.has_magic(path) else 'does not exist'}")
        result = []
        for one in sorted(found, key=natural_key):
            info = system.info(one)
            tags = ("ETag", "etag", "LastModified", "last_modified", "mtime", "created")
            modified = next((str(info[tag]) for tag in tags if info.get(tag)), None)
            if info["size"] is None:
                raise InputError(f"--input {one}: its server tells no size; download it first")
            result.append((system.unstrip_protocol(one), info["size"], modified))
        return result


def _of_one_format(name: str, inside: list[str], form: str | None) -> list[str]:
    """The files of a directory to be read: of `form`, or of the one data format there; text only where there is none."""
    there = {format_of(path) for path in inside} - {None}
    data = there - {"text"} or there
    if form is None and len(data) > 1:
        raise InputError(f"--input {name} holds files of several formats ({', '.join(sorted(data))}); pass --format")
    wanted = {form} if form else data
    found = [path for path in inside if format_of(path) in wanted]
    if not found:
        suffixes = FORMATS[form] if form else [suffix for suffixes in FORMATS.values() for suffix in suffixes]
        raise InputError(f"--input {name} holds no {', '.join(suffixes)} file, compressed or not")
    return found


def split_sources(sources: list[Source], parts: int) -> list[tuple[Piece, ...]]:
    """The sources in order as `parts` contiguous runs of about equal size.

    Raises InputError with the number possible when one would be empty.
    """
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + source.extent)
    total = starts[-1]
    targets = [total * number // parts for number in range(1, parts)]
    cuts = [0, *(_cut(sources, starts, target) for target in targets), total]
    if any(one >= other for one, other in zip(cuts, cuts[1:], strict=False)) and parts > 1:
        # Large pieces that can't be cut lie at the targets: choose among all places, each once.
        for spacing in (total // (4 * parts), 1):
            places = sorted(
                {0, total, *starts, *(b + p for b, s in zip(starts, sources, strict=False) for p in s.cuts(spacing))}
            )
            if len(places) > parts:
                break
        else:
            raise InputError(f"--num_shards {parts}: the input can be split into {len(places) - 1} at most")
        chosen = [0]
        for number, target in enumerate(targets, 1):
            index = max(chosen[-1] + 1, min(bisect_left(places, target), len(places) - 1 - (parts - number)))
            chosen.append(index)
        cuts = [*(places[index] for index in chosen), total]
    return [
        tuple(
            Piece(source, max(begin - start, 0), min(end - start, stop - start))
            for source, start, stop in zip(sources, starts, starts[1:], strict=False)
            if max(begin, start) < min(end, stop)
        )
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]


def _cut(sources: list[Source], starts: list[int], target: int) -> int:
    """The place nearest to `target` where the row of sources can be cut."""
    number = min(bisect_right(starts, target), len(sources)) - 1
    return starts[number] + sources[number].cut(target - starts[number])


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what to read, the same in every command that reads text."""
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        help="files, directories, globs or URLs; JSONL and text also as .gz, .xz, .zst",
    )
    parser.add_argument("--format", choices=list(FORMATS), help="of --input (default: by suffix)")
    parser.add_argument("--json_key", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--text_separator", help=r"cuts text files into documents; \n and \t are understood")
    parser.add_argument("--dataset", help="instead of --input: a dataset of the hub, its folder, or a saved one")
    parser.add_argument("--dataset_config", help="configuration of the dataset")
    parser.add_argument("--dataset_split", default="train", help="split of the dataset (default: train)")
    parser.add_argument("--streaming", action="store_true", help="read the dataset without downloading it first")
    parser.add_argument("--max_record_mb", type=float, default=MAX_RECORD_BYTES / 1e6, help="default: 128")


def inputs_of(arguments: argparse.Namespace) -> list[Source]:
    """The sources that the options of `add_input_arguments` name."""
    if bool(arguments.input) == bool(arguments.dataset):
        raise InputError("give either --input or --dataset")
    if arguments.dataset:
        return [find_dataset(arguments.dataset, arguments.dataset_config, arguments.dataset_split, arguments.streaming)]
    separator = arguments.text_separator
    if separator is not None:
        separator = separator.replace("\\n", "\n").replace("\\t", "\t")
        if not separator:
            raise InputError("--text_separator is empty; leave it out for one document a file")
    return find_inputs(arguments.input, arguments.format, separator)


def iterate_texts(sources: list[Source], key: str, most_bytes: int = MAX_RECORD_BYTES) -> Iterator[str]:
    """Texts of all records; raises InputError at the first bad one, as `tokenize_files` does by default."""
    for piece in (Piece(source, 0, source.extent) for source in sources):
        for chunk in piece.chunks(key, most_bytes):
            for number, record in enumerate(chunk.records, chunk.first):
                text = piece.parse(record, key, most_bytes)
                if isinstance(text, str):
                    yield text
                elif text.reason not in HARMLESS:
                    raise InputError(f"{piece.place(number)}: {text.detail}")
