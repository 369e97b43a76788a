"""Input files: which ones a command line names, in which order, and their bytes, decompressed."""

from __future__ import annotations

import glob
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from data_prep.errors import InputError, of_file

TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson")
COMPRESSED = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}


def natural_key(path: Path) -> list:
    """Sorts part2 before part10: digits as numbers, the rest as text."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.as_posix())]


def find_inputs(names: list[str]) -> list[Path]:
    """The files that `names` stand for: files, directories (all JSONL files below, compressed or not), and globs.

    Names keep their order; what one of them stands for comes in natural order of the paths. Raises InputError for a
    name that stands for nothing, or a file named twice.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_file():
            found.append(path)
            continue
        if path.is_dir():
            inside = [p for p in path.rglob("*") if p.is_file() and _is_text(p)]
            wanted = f"holds no {', '.join(TEXT_SUFFIXES)} file, compressed or not"
        else:
            inside = [p for p in map(Path, glob.glob(name, recursive=True)) if p.is_file()]
            wanted = "does not exist" if not glob.has_magic(name) else "matches no file"
        if not inside:
            raise InputError(f"--input {name} {wanted}")
        found.extend(sorted(inside, key=natural_key))
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise InputError(f"--input names {path} twice: its documents would be there twice")
        seen.add(path.resolve())
    return found


def _is_text(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix in TEXT_SUFFIXES


def line_chunks(path: Path, chunk_bytes: int = 1 << 22) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first line, lines) of about `chunk_bytes` of text each, decompressed by the name's suffix.

    All members of a .gz and all frames of a .zst or .xz are read. Raises InputError, naming the file, when it can't be
    read, is cut short, or is not what its name says.
    """
    from backports import zstd

    openers = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}
    first = 1
    try:
        with openers.get(path.suffix, open)(path, "rb") as handle:
            while lines := handle.readlines(chunk_bytes):
                yield first, lines
                first += len(lines)
    except EOFError:
        raise InputError(
            f"{path} is truncated: its compressed data ends before its end mark; get the file again"
        ) from None
    except (gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError, zlib.error) as error:
        raise InputError(f"{path} is not {COMPRESSED[path.suffix]}, or damaged: {error}") from None
    except OSError as error:
        raise of_file(error) from None
