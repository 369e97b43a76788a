"""Formats of stored text: what a source is, how it can be cut, and its records.

A source has positions 0 .. `extent`, in the unit that its format can be cut by, and gives the records between two of
them in chunks. It knows how to name each record in a message, and how many stored bytes each chunk took.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import gzip
import lzma
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import InputError
from data_prep.records import BYTE_ORDER_MARK, BadRecord, parse_record, parse_text, too_long

COMPRESSED = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
# Small enough that reading, parsing and encoding overlap, large enough that calls don't count.
CHUNK_BYTES = 1 << 20


@dataclass
class Records:
    """A chunk of consecutive records, the reader's no more: whoever gets it may empty the list.

    Attributes:
        first: number of the first record, counted from 0 at the start position.
        records: bytes of a JSON line or a text, None for a null, or a BadRecord for what could not be held.
        stored: bytes of the stored file that were read for it.
    """

    first: int
    records: list[bytes | BadRecord | None]
    stored: int

    @property
    def size(self) -> int:
        return sum(len(record) for record in self.records if isinstance(record, bytes))


@dataclass(frozen=True)
class Source(abc.ABC):
    """One stored file, or a dataset.

    Attributes:
        name: path, URL or name of a dataset, as messages show it.
        size: stored bytes; for a dataset the bytes in memory, None where not known.
        modified: what changes when the content does: a local file's mtime in ns, a remote one's tag or time.
    """

    name: str
    size: int | None
    modified: int | str | None

    is_json = False

    @property
    def extent(self) -> int:
        """The last position. A source that can't be cut has the positions 0 and `extent` alone."""
        return self.size

    def cut(self, position: int) -> int:
        """The position nearest to `position` at which the source can be cut."""
        return 0 if 2 * position < self.extent else self.extent

    def cuts(self, spacing: int) -> list[int]:
        """Positions inside at which it can be cut, `spacing` apart where there are many."""
        return []

    def records_before(self, position: int) -> int:
        return 0

    def place(self, start: int, number: int) -> str:
        """NAME:N of a record, N counted from 1 at the start of the source."""
        return f"{self.name}:{_records_before(self, start) + number + 1}"

    @abc.abstractmethod
    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        """Records between two positions, in chunks of about CHUNK_BYTES; none of more than `most_bytes` is held.

        Raises InputError, naming the source, when it can't be read or has no such column.
        """

    def describe(self) -> dict:
        """What the record of the output keeps of it."""
        path = self.name if "://" in self.name else str(Path(self.name).resolve())
        return {"path": path, "bytes": self.size, "modified": self.modified}


@dataclass(frozen=True)
class Piece:
    """The records of a source between two positions."""

    source: Source
    start: int
    stop: int

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes it takes, 0 where that is not known."""
        return round((self.source.size or 0) * (self.stop - self.start) / max(self.source.extent, 1))

    def chunks(self, key: str, most_bytes: int) -> Iterator[Records]:
        return self.source.chunks(self.start, self.stop, key, most_bytes)

    def place(self, number: int) -> str:
        return self.source.place(self.start, number)

    def parse(self, record: bytes | BadRecord | None, key: str, most_bytes: int) -> str | BadRecord:
        return parse(record, self.source.is_json, key, most_bytes)


def parse(record: bytes | BadRecord | None, is_json: bool, key: str, most_bytes: int) -> str | BadRecord:
    if isinstance(record, BadRecord):
        return record
    if record is not None and len(record) > most_bytes:
        return too_long(most_bytes)
    return parse_record(record, key) if is_json else parse_text(record)


@functools.lru_cache(64)
def _records_before(source: Source, position: int) -> int:
    return source.records_before(position)


@contextlib.contextmanager
def reading(name: str, what: str):
    """Turns what the readers of stored data raise into an InputError that names the file."""
    from backports import zstd

    try:
        yield
    except InputError:
        raise
    except EOFError:
        raise InputError(
            f"{name} is truncated: its compressed data ends before its end mark; get the file again"
        ) from None
    except (gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError, zlib.error) as error:
        raise InputError(f"{name} is not {COMPRESSED[Path(name).suffix]}, or damaged: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or first_line(error)}") from None
    except Exception as error:  # Arrow's, datasets' and those of remote file systems have no common base
        raise InputError(f"{name} can't be read as {what}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def open_stored(name: str):
    """The stored bytes of a path or an fsspec URL."""
    if "://" in name:
        import fsspec

        return fsspec.open(name, "rb").open()
    return open(name, "rb")


def decompressed(raw, name: str):
    """The bytes in `raw`, decompressed by the name's suffix: all members of a .gz, all frames of a .zst or .xz."""
    from backports import zstd

    openers = {".gz": gzip.open, ".xz": XzStreams, ".zst": zstd.open}
    suffix = Path(name).suffix
    return openers[suffix](raw) if suffix in openers else raw


class XzStreams:
    """The bytes of all streams of a .xz. lzma.open takes damage at the begin of a later one for the file's end."""

    def __init__(self, raw):
        self._raw, self._decompressor = raw, lzma.LZMADecompressor()

    def read(self, size: int) -> bytes:
        block = b""
        while not block:
            stored = b""
            if self._decompressor.eof:
                stored = self._decompressor.unused_data
                while not (stored := stored.lstrip(b"\0")):  # padding
                    if not (stored := self._raw.read(1 << 16)):
                        return b""
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input and not (stored := self._raw.read(1 << 16)):
                raise EOFError
            block = self._decompressor.decompress(stored, size)
        return block


def split_records(read: Callable[[int], bytes], delimiter: bytes, most_bytes: int) -> Iterator[list[bytes | BadRecord]]:
    """Lists of what lies between delimiters, without them, one list a read; only one that is not too long is held."""
    held, size = [], 0  # of the record that has not ended yet: its parts, while it is not too long, and its length
    tail = b""  # its last bytes, where a delimiter may have begun
    while block := read(CHUNK_BYTES):
        records = (tail + block).split(delimiter)
        if len(records) > 1:
            size += len(records[0]) - len(tail)
            if size > most_bytes:
                records[0] = too_long(most_bytes)
            elif held:
                records[0] = b"".join([*held, records[0][len(tail) :]])[:size]
            rest = records.pop()
            yield records
            held, size = [rest], len(rest)
        else:
            [rest] = records
            size += len(block)
            # `size` may count the begin of a delimiter, which is not the record's.
            held = [*held, block] if size < most_bytes + len(delimiter) else []
        tail = rest[max(len(rest) - len(delimiter) + 1, 0) :]
    if size:
        yield [too_long(most_bytes) if size > most_bytes else b"".join(held)]


class JsonLines(Source):
    """One JSON object a line. A plain file can be cut between any two lines, a compressed one nowhere."""

    is_json = True

    @property
    def _plain(self) -> bool:
        return Path(self.name).suffix not in COMPRESSED

    def cut(self, position: int) -> int:
        """The start of the first line that starts at `position` or later."""
        if not self._plain:
            return super().cut(position)
        if position == 0:
            return 0
        with reading(self.name, "jsonl"), open_stored(self.name) as raw:
            raw.seek(position - 1)
            while block := raw.read(1 << 16):
                if (newline := block.find(b"\n")) >= 0:
                    return raw.tell() - len(block) + newline + 1
        return self.extent

    def cuts(self, spacing: int) -> list[int]:
        found: list[int] = []
        position = 0
        while self._plain and (position := self.cut(position + max(spacing, 1))) < self.extent:
            found.append(position)
        return found

    def records_before(self, position: int) -> int:
        if not position:
            return 0
        count = 0
        with reading(self.name, "jsonl"), open_stored(self.name) as raw:
            while position and (block := raw.read(min(position, CHUNK_BYTES))):
                count += block.count(b"\n")
                position -= len(block)
        return count

    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        with reading(self.name, "jsonl"), open_stored(self.name) as raw:
            stored = raw.seek(start) if start else 0
            if self._plain:

                def read(size: int) -> bytes:
                    return raw.read(min(size, stop - raw.tell()))
            else:
                read = decompressed(raw, self.name).read
            first = 0
            for lines in split_records(read, b"\n", most_bytes):
                count, now = len(lines), raw.tell()
                yield Records(first, lines, now - stored)
                first, stored = first + count, now


@dataclass(frozen=True)
class TextFile(Source):
    """Plain text: one document a file, or split at `separator`. A byte order mark goes, CRLF becomes LF."""

    separator: str | None = None

    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        with reading(self.name, "text"), open_stored(self.name) as raw:
            stream = decompressed(raw, self.name)
            begun = False

            def read(size: int) -> bytes:
                nonlocal begun
                block = stream.read(size)
                while block.endswith(b"\r") and (more := stream.read(1)):
                    block += more
                if not begun:
                    block, begun = block.removeprefix(BYTE_ORDER_MARK), True
                return block.replace(b"\r\n", b"\n")

            first = stored = 0
            if self.separator is None:
                parts, size = [], 0
                while size <= most_bytes and (block := read(CHUNK_BYTES)):
                    parts.append(block)
                    size += len(block)
                texts = [too_long(most_bytes) if size > most_bytes else b"".join(parts)]
                del parts
                yield Records(0, texts, self.size)
                return
            for texts in split_records(read, self.separator.encode(), most_bytes):
                count, now = len(texts), raw.tell()
                yield Records(first, texts, now - stored)
                first, stored = first + count, now


def text_column(table, key: str, name: str):
    """One column of an Arrow table or batch as an array of bytes. InputError when it isn't there, or isn't text."""
    import pyarrow as pa

    names = table.schema.names
    if key not in names:
        raise InputError(f"{name} has no column {key!r} (columns: {', '.join(names)}); see --json_key")
    column = table.column(key)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        raise InputError(f"{name}: column {key!r} is {kind}, not text (columns: {', '.join(names)}); see --json_key")
    return column


def column_texts(column, most_bytes: int) -> Iterator[list[bytes | BadRecord | None]]:
    """Lists of about CHUNK_BYTES of texts, as bytes: whether they are UTF-8 is for the parser, text by text."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    for part in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if pa.types.is_string_view(part.type):
            part = part.cast(pa.large_string())
        if pa.types.is_dictionary(part.type):
            lengths = pc.take(pc.binary_length(part.dictionary), part.indices)
        else:
            lengths = pc.binary_length(part)
        ends = np.cumsum(np.asarray(pc.fill_null(lengths, 0)), dtype=np.int64)
        first = 0
        while first < len(part):
            begin = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, begin + CHUNK_BYTES, side="right")), first + 1)
            if last == first + 1 and ends[first] - begin > most_bytes:
                yield [too_long(most_bytes)]
            else:
                texts = part.slice(first, last - first)
                texts = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
                wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
                yield texts.view(pa.large_binary() if wide else pa.binary()).to_pylist()
            first = last


def table_chunks(tables, key: str, name: str, most_bytes: int) -> Iterator[Records]:
    """Chunks of the texts of (table or batch, stored bytes of it)."""
    first = 0
    for table, stored in tables:
        for texts in column_texts(text_column(table, key, name), most_bytes):
            count = len(texts)
            yield Records(first, texts, stored)
            first, stored = first + count, 0


class Parquet(Source):
    """Rows of a Parquet file. Positions are stored bytes of its row groups; it can be cut between these."""

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Position of each row group, and of the end."""
        starts = [0]
        with self._file() as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                size = sum(group.column(n).total_compressed_size for n in range(group.num_columns))
                starts.append(starts[-1] + size)
        return starts

    @contextlib.contextmanager
    def _file(self):
        import pyarrow.parquet as pq

        with reading(self.name, "parquet"), open_stored(self.name) as raw:
            # With a buffer size, pages are read one after the other; else a whole column of a row group is.
            yield pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)

    @property
    def extent(self) -> int:
        return self._starts[-1]

    def cut(self, position: int) -> int:
        return min(self._starts, key=lambda start: abs(start - position))

    def cuts(self, spacing: int) -> list[int]:
        return sorted(set(self._starts[1:-1]) - {0, self.extent})

    def records_before(self, position: int) -> int:
        with self._file() as file:
            groups = range(bisect_left(self._starts, position))
            return sum(file.metadata.row_group(number).num_rows for number in groups)

    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        def batches():
            with self._file() as file:
                text_column(file.schema_arrow.empty_table(), key, self.name)
                groups = range(bisect_left(self._starts, start), bisect_left(self._starts, stop))
                for number in groups:
                    group = file.metadata.row_group(number)
                    paths = [group.column(n).path_in_schema for n in range(group.num_columns)]
                    text_bytes = group.column(paths.index(key)).total_uncompressed_size
                    rows = max(1, min(1024, CHUNK_BYTES * group.num_rows // max(text_bytes, 1)))
                    share = (self._starts[number + 1] - self._starts[number]) / max(group.num_rows, 1)
                    for batch in file.iter_batches(rows, [number], [key], use_threads=False):
                        yield batch, int(share * batch.num_rows)

        with reading(self.name, "parquet"):
            yield from table_chunks(batches(), key, self.name, most_bytes)


class Arrow(Source):
    """Rows of an Arrow IPC file or stream, whichever it is."""

    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        import pyarrow as pa

        def batches():
            with open_stored(self.name) if "://" in self.name else pa.memory_map(self.name) as raw:
                is_file = raw.read(6) == b"ARROW1"
                raw.seek(0)
                if is_file:
                    file = pa.ipc.open_file(raw)
                    for number in range(file.num_record_batches):
                        yield file.get_batch(number), self.size // file.num_record_batches
                else:
                    stored = 0
                    for batch in pa.ipc.open_stream(raw):
                        yield batch, (now := raw.tell()) - stored
                        stored = now

        with reading(self.name, "arrow"):
            yield from table_chunks(batches(), key, self.name, most_bytes)


@dataclass(frozen=True)
class HubDataset(Source):
    """A dataset of the Hugging Face hub, a local folder of one, or what `save_to_disk` wrote.

    Positions are rows; with `streaming`, the dataset's own shards.
    """

    config: str | None = None
    split: str = "train"
    streaming: bool = False

    @property
    def extent(self) -> int:
        return load_dataset(self).num_shards if self.streaming else len(load_dataset(self))

    def cut(self, position: int) -> int:
        return position

    def cuts(self, spacing: int) -> list[int]:
        return list(range(max(spacing, 1), self.extent, max(spacing, 1)))

    def place(self, start: int, number: int) -> str:
        if self.streaming:
            return f"{self.name}, row {number + 1} from shard {start} on"
        return f"{self.name}:{start + number + 1}"

    def chunks(self, start: int, stop: int, key: str, most_bytes: int) -> Iterator[Records]:
        def tables():
            dataset = load_dataset(self)
            if self.streaming:
                for number in range(start, stop):
                    shard = dataset.shard(dataset.num_shards, number).with_format("arrow")
                    yield from ((table, 0) for table in shard.iter(64))
                return
            share = dataset.data.nbytes / max(len(dataset), 1)
            rows = max(1, min(10_000, int(CHUNK_BYTES / max(share, 1))))
            for table in dataset.select(range(start, stop)).with_format("arrow").iter(rows):
                yield table, int(share * len(table))

        with reading(self.name, "a dataset"):
            yield from table_chunks(tables(), key, self.name, most_bytes)

    def describe(self) -> dict:
        return {"dataset": self.name, "config": self.config, "split": self.split, "modified": self.modified}


@functools.lru_cache(4)
def load_dataset(source: HubDataset):
    """The dataset itself. Raises InputError when it can't be had, or has no such split."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with reading(source.name, "a dataset"):
        if not is_saved(source.name):
            return datasets.load_dataset(source.name, source.config, split=source.split, streaming=source.streaming)
        loaded = datasets.load_from_disk(source.name)
        splits = loaded if isinstance(loaded, dict) else {str(loaded.split or source.split): loaded}
        if source.split not in splits:
            raise InputError(f"{source.name} has no split {source.split!r} (splits: {', '.join(splits)})")
        return splits[source.split]


def is_saved(name: str) -> bool:
    """Whether `save_to_disk` wrote this directory, of one split or of several."""
    return (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file()
