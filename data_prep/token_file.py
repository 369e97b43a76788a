"""Token files in Megatron's MMIDIDX format: PREFIX.bin holds the tokens, PREFIX.idx says where each document lies.

Megatron-LM, Megatron-DeepSpeed, gpt-neox and datatrove read and write the same bytes. All integers are
little-endian; PREFIX.idx is

    magic b"MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | N sequences u64 | M document indices u64
    | N lengths i32 (tokens) | N byte offsets i64 | M document indices i64 | optionally N modes i8

A "document" here is what the format calls a sequence; Megatron's GPTDataset draws samples from sequences too.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from data_prep.errors import InputError
from data_prep.files import fsync_directory, make_directory, read_json

if TYPE_CHECKING:
    from data_prep.remote import RemoteFiles

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
DTYPE_CODES = {np.dtype(dtype): code for code, dtype in TOKEN_DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """The stored type for ids 0 .. vocab_size - 1: uint16 where they fit, else int32 (the format has no uint32).

    Megatron's writer changes to int32 at 65,500 already; readers take the type from the file.
    """
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def token_prefix(path: str | Path) -> Path | str:
    """The prefix of a token file pair, whether `path` is the prefix itself or one of its two files; of a URL, a string."""
    if is_url(path):
        return str(path).removesuffix(".bin").removesuffix(".idx")
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def file_of(prefix: Path | str, suffix: str) -> Path | str:
    # Not with_suffix: prefixes such as "v1.2_text_document" contain dots.
    return prefix + suffix if isinstance(prefix, str) else prefix.with_name(prefix.name + suffix)


class TokenFile:
    """A memory-mapped token file pair, opened for reading.

    Args:
        prefix: path or URL without .bin/.idx.
        cache: keeps files of a URL on this node; only .idx is fetched here, .bin when its first token is read.

    Attributes:
        prefix: as a path; of a URL, the URL.
        lengths: int32 [N], tokens in each document.
        dtype: of the stored ids.
        total_tokens: T.

    Raises InputError naming the file when it is missing, empty, truncated or of another format.
    """

    def __init__(self, prefix: str | Path, cache: RemoteFiles | None = None):
        self.prefix = token_prefix(prefix)
        self._cache = cache
        index_name, data_name = file_of(self.prefix, ".idx"), file_of(self.prefix, ".bin")
        index_path, data_size = self.local(".idx"), self._size(".bin")
        index_size = index_path.stat().st_size
        with open(index_path, "rb") as handle:
            header = handle.read(HEADER.size)
        if header.startswith(LEGACY_MAGIC):
            raise InputError(f"{index_name} is a legacy TNTIDX file, not MMIDIDX; tokenize the text again")
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise InputError(f"{index_name} ({index_size} bytes) is not a MMIDIDX index; tokenize the text again")
        _, version, code, sequences, index_entries = HEADER.unpack(header)
        if version != 1:
            raise InputError(f"{index_name} has format version {version}; only version 1 is known")
        if code not in TOKEN_DTYPES:
            raise InputError(f"{index_name} has dtype code {code}, which holds no token ids; the file is damaged")
        expected = HEADER.size + 12 * sequences + 8 * index_entries
        if index_size not in (expected, expected + sequences):
            raise InputError(f"{index_name} has {index_size} bytes, its header says {expected}: truncated or damaged")
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        if sequences == 0 or data_size == 0:
            raise InputError(f"{data_name} holds no tokens; its source was empty or every record was skipped")
        raw = np.memmap(index_path, mode="r", dtype=np.uint8).view(np.ndarray)
        start = HEADER.size
        self.lengths = raw[start : start + 4 * sequences].view("<i4")
        start += 4 * sequences
        self._byte_offsets = raw[start : start + 8 * sequences].view("<i8")
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.total_tokens = int(ends[-1])
        if self.total_tokens * self.dtype.itemsize != data_size:
            raise InputError(
                f"{data_name} has {data_size} bytes, but the index counts {self.total_tokens} tokens of "
                f"{self.dtype.itemsize} bytes = {self.total_tokens * self.dtype.itemsize}: one of the two is truncated or stale"
            )
        if int(self.lengths.min()) < 0 or not np.array_equal(
            (ends - self.lengths) * self.dtype.itemsize, self._byte_offsets
        ):
            raise InputError(f"{index_name} is damaged: its offsets are not the running sum of its lengths")

    def local(self, suffix: str) -> Path:
        """The path on this node of the file with `suffix`, fetched if it is remote."""
        name = file_of(self.prefix, suffix)
        if self._cache is not None:
            return self._cache.fetch(name)
        if not name.is_file():
            raise InputError(f"token file {name} does not exist; python -m data_prep.tokenize_files makes one")
        return name

    def _size(self, suffix: str) -> int:
        if self._cache is not None:
            return self._cache.size(file_of(self.prefix, suffix))
        return self.local(suffix).stat().st_size

    @property
    def pairs(self) -> list[TokenFile]:
        """The file pairs that this consists of: itself."""
        return [self]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """[T], all tokens back to back, in the stored dtype; memory-mapped."""
        # A view: slices of np.memmap itself cost several times as much.
        return np.memmap(self.local(".bin"), mode="r", dtype=self.dtype.newbyteorder("<")).view(np.ndarray)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N], first token of each document, counted in tokens from the start of .bin."""
        return self._byte_offsets // self.dtype.itemsize

    @functools.cached_property
    def lengths_hash(self) -> str:
        """Identifies `lengths`: all that an order of samples depends on."""
        return lengths_hash(self.lengths)

    def read_record(self) -> dict:
        """What `tokenize_files` recorded in .json beside the pair; {} where there is none."""
        name = file_of(self.prefix, ".json")
        if self._cache is not None:
            return read_json(self._cache.fetch(name)) if self._cache.exists(name) else {}
        return read_json(name) if name.exists() else {}

    def fetch(self) -> None:
        """Bring .bin to this node, where it is remote."""
        self.local(".bin")

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, [length], not copied."""
        start = int(self._byte_offsets[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]


class ShardedTokens:
    """The pairs PREFIX_00000_of_0000N ... as if they were one: documents in shard order. Attributes as TokenFile's."""

    def __init__(self, prefix: str | Path, pairs: list[TokenFile]):
        self.prefix, self.pairs = token_prefix(prefix), pairs
        dtypes = {pair.dtype for pair in pairs}
        if len(dtypes) > 1:
            raise InputError(f"the shards of {self.prefix} store different types, {dtypes}: they are not of one job")
        if any(pair.read_record().get("job") != pairs[0].read_record().get("job") for pair in pairs):
            raise InputError(f"the shards of {self.prefix} are of several jobs; run the command that makes them again")
        self.dtype = pairs[0].dtype
        self.lengths = np.concatenate([pair.lengths for pair in pairs])
        self.total_tokens = sum(pair.total_tokens for pair in pairs)
        self._firsts = np.cumsum([0, *map(len, pairs)])

    @functools.cached_property
    def lengths_hash(self) -> str:
        return lengths_hash(self.lengths)

    def read_record(self) -> dict:
        return self.pairs[0].read_record()

    def fetch(self) -> None:
        for pair in self.pairs:
            pair.fetch()

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.pairs[shard].document(number - int(self._firsts[shard]))


Tokens = TokenFile | ShardedTokens


def open_tokens(prefix: str | Path, cache: RemoteFiles | None = None) -> Tokens:
    """The token file `prefix`, one pair or shards.

    Args:
        cache: for a URL (see data_prep.remote.cache_for).

    Raises InputError as TokenFile does, and when a shard is missing.
    """
    prefix = token_prefix(prefix)
    pattern = file_of(prefix, "_[0-9][0-9][0-9][0-9][0-9]_of_[0-9][0-9][0-9][0-9][0-9].idx")
    if cache is not None:
        names = [] if cache.exists(file_of(prefix, ".idx")) else cache.glob(pattern)
    else:
        names = [] if file_of(prefix, ".idx").exists() else sorted(map(str, prefix.parent.glob(pattern.name)))
    if not names:
        return TokenFile(prefix, cache)
    counts = {name.removesuffix(".idx").rpartition("_of_")[2] for name in names}
    if len(counts) > 1:
        raise InputError(f"{prefix} has shards of several jobs, of {' and of '.join(sorted(counts))}; remove one set")
    count = int(counts.pop())
    if len(names) != count:
        raise InputError(f"{prefix} has {len(names)} of its {count} shards; run the command that makes them again")
    # Of some shards no document stays; of all of them is an error, as for any file.
    filled = [name for name in names if _sequences(Path(name) if cache is None else cache.fetch(name)) != 0]
    return ShardedTokens(prefix, [TokenFile(name, cache) for name in filled or names])


def _sequences(index: Path) -> int | None:
    """How many sequences an .idx has by its header; None where that can't be told."""
    with open(index, "rb") as handle:
        header = handle.read(HEADER.size)
    return HEADER.unpack(header)[3] if len(header) == HEADER.size and header.startswith(MAGIC) else None


def lengths_hash(lengths: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(lengths))


class TokenFileWriter:
    """Writes one token file pair under temporary names; `close()` fsyncs and renames .bin, then .idx.

    Used as a context manager: an exception removes the temporary files, and no output appears.

    Args:
        may_be_empty: whether a pair without documents is written, as one shard of several can be.
        before_publishing: called with the writer once both files are whole and a former index is gone, for what is to
            lie beside them: where there is an index, that is there too.

    Attributes:
        checksums: "xxh3_128:HEX" of .bin and .idx, by suffix, once closed.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int,
        before_publishing: Callable[[TokenFileWriter], None] | None = None,
        may_be_empty: bool = False,
    ):
        self.prefix = token_prefix(prefix)
        self.vocab_size = vocab_size
        self.checksums: dict[str, str] = {}
        self._before_publishing, self._may_be_empty = before_publishing, may_be_empty
        self._hash = xxhash.xxh3_128()
        self.dtype = token_dtype(vocab_size)
        self.max_token_id = -1
        self.total_tokens = 0
        self._lengths: list[np.ndarray] = []
        make_directory(self.prefix.parent, "output directory")
        self._temporary = {s: file_of(self.prefix, f"{s}.{os.getpid()}.tmp") for s in (".bin", ".idx")}
        try:
            self._data = open(self._temporary[".bin"], "wb")
        except OSError as error:
            raise InputError(f"can't write {self._temporary['.bin']}: {error.strerror}") from None

    def add(self, ids, lengths=None) -> None:
        """Append documents: `ids` [sum of lengths], `lengths` [documents] (default: all of `ids` is one document).

        Raises InputError when an id is negative or not below `vocab_size`.
        """
        ids = np.asarray(ids)
        lengths = np.asarray([len(ids)] if lengths is None else lengths, dtype=np.int32)
        if len(ids):
            highest = int(ids.max())
            if highest >= self.vocab_size or int(ids.min()) < 0:
                position = int(np.argmax((ids >= self.vocab_size) | (ids < 0)))
                document = self.documents + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
                raise InputError(
                    f"document {document} holds token id {int(ids[position])}, outside the vocabulary of "
                    f"{self.vocab_size}; the tokenizer and its vocabulary size do not belong together"
                )
            self.max_token_id = max(self.max_token_id, highest)
        stored = np.ascontiguousarray(ids, dtype=self.dtype.newbyteorder("<"))
        self._hash.update(stored)
        self._data.write(stored)
        self._lengths.append(lengths)
        self.total_tokens += len(ids)

    @property
    def documents(self) -> int:
        return sum(len(part) for part in self._lengths)

    def close(self) -> None:
        """Publish the pair. Raises InputError, leaving no output, when no document was added but one must be."""
        if self.documents == 0 and not self._may_be_empty:
            raise InputError(f"0 documents written to {self.prefix}: the input is empty or every record was skipped")
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        # int64 before the running sum: int32 offsets wrap at 2 GiB.
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        count = len(lengths)
        index_hash = xxhash.xxh3_128()
        with open(self._temporary[".idx"], "wb") as index:
            for part in (
                HEADER.pack(MAGIC, 1, DTYPE_CODES[self.dtype], count, count + 1),
                lengths.astype("<i4"),
                offsets.astype("<i8"),
                np.arange(count + 1, dtype="<i8"),
            ):
                index_hash.update(part)
                index.write(part)
            index.flush()
            os.fsync(index.fileno())
        self._data.flush()
        os.fsync(self._data.fileno())
        self._data.close()
        hashes = {".bin": self._hash, ".idx": index_hash}
        self.checksums = {suffix: f"xxh3_128:{one.hexdigest()}" for suffix, one in hashes.items()}
        # A stale index over new data would be read as whole: it goes first, the new one comes last.
        file_of(self.prefix, ".idx").unlink(missing_ok=True)
        if self._before_publishing is not None:
            self._before_publishing(self)
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary[suffix], file_of(self.prefix, suffix))
        fsync_directory(self.prefix.parent)

    def abort(self) -> None:
        """Remove what is not published."""
        self._data.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()
