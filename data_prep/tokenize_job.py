"""What one tokenization makes of what, and which of its output is there already."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import xxhash

from data_prep.errors import InputError
from data_prep.files import read_json
from data_prep.formats import Piece, Source
from data_prep.token_file import file_of


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

    def made_of(self, shard: int | None = None) -> list[dict]:
        """The sources of one shard, by default of all."""
        if shard is None or self.num_shards == 1:
            return [source.describe() for source in self.sources]
        return [{**piece.source.describe(), "from": piece.start, "to": piece.stop} for piece in self.shards[shard]]

    @functools.cached_property
    def identity(self) -> dict:
        """What an output says that it was made by, in the terms of the command line."""
        return {
            "sources": f"xxh3_128:{xxhash.xxh3_128_hexdigest(json.dumps(self.made_of()).encode())}",
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


def hashes_file(job: TokenizeJob, shard: int) -> Path:
    prefix = job.shard_prefix(shard)
    return prefix.with_name(f".{prefix.name}.hashes.npy")


def finished_shard(job: TokenizeJob, shard: int) -> dict | None:
    """The report of a finished shard, None where there is none. Raises InputError for an output of another job."""
    prefix = job.shard_prefix(shard)
    index, data = file_of(prefix, ".idx"), file_of(prefix, ".bin")
    report = own_record(job, prefix, job.made_of(shard))
    if report is None:
        if index.exists() and not file_of(prefix, ".json").exists() and not job.overwrite:
            raise InputError(
                f"{index} exists, and nothing says what made it; choose another --output_prefix or pass --overwrite"
            )
        return None
    size = report["tokens"] * np.dtype(report["dtype"]).itemsize
    return report if index.exists() and data.exists() and data.stat().st_size == size else None


def own_record(job: TokenizeJob, prefix: Path, sources: list[dict]) -> dict | None:
    """What `prefix`.json says when this job made it, from `sources`; None when it isn't there, or may be replaced.

    Raises InputError, naming the first difference, when another job made it.
    """
    path = file_of(prefix, ".json")
    if not path.exists():
        return None
    record = read_json(path)
    difference = first_difference(record.get("job", {}), job.identity, record.get("sources", []), sources)
    if difference and not job.overwrite:
        raise InputError(
            f"{path} exists, made by another job ({difference}); choose another --output_prefix or pass --overwrite"
        )
    return None if difference else record


def first_difference(there: dict, here: dict, sources_there: list, sources_here: list) -> str | None:
    """Where two jobs part, None when they are the same."""
    for key, value in here.items():
        if key not in there:
            return f"it does not say its {key}"
        if there[key] != value and key != "sources":
            return f"{key} was {there[key]}, is {value}"
    for number, (one, other) in enumerate(zip_longest(sources_there, sources_here), 1):
        if one is None or other is None:
            return f"it has {len(sources_there)} sources, not {len(sources_here)}"
        for key, value in other.items():
            if one.get(key) != value:
                return f"source {number}: {key} was {one.get(key)}, is {value}"
    return "its other shards have other sources" if there["sources"] != here["sources"] else None


def other_outputs(job: TokenizeJob) -> list[Path]:
    """Files of the same prefix with another number of shards: read together, documents would be there twice."""
    if not job.prefix.parent.is_dir():
        return []
    name = re.escape(job.prefix.name)
    ours = {job.shard_prefix(shard).name for shard in range(job.num_shards)} | {job.prefix.name}
    pattern = re.compile(rf"\.?({name}(?:_\d{{5}}_of_\d{{5}})?)\.(?:bin|idx|json|rejects\.txt|hashes\.npy)")
    found = ((pattern.fullmatch(path.name), path) for path in sorted(job.prefix.parent.iterdir()))
    return [path for match, path in found if match and match[1] not in ours]
