"""Which sample comes when: the order of training samples, a pure function of (files, weights, phases, seed).

A sample is `seq_length + 1` consecutive tokens of a source's document stream; neighbours share the boundary token,
so each token but the first is a label exactly once. Two orders:

- "epoch": every epoch shuffles documents and samples anew from (seed, source, epoch), so the order does not
  depend on how long the run is. Tokens after the last whole sample of an epoch are dropped.
- "megatron": bit for bit the order of Megatron-LM's GPTDataset, which depends on the number of samples asked for.

Several sources are blended as Megatron's BlendedDataset does it. Positions are counted in samples drawn so far.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.blend import Blend
from data_prep.errors import InputError
from data_prep.order_cache import OrderCache
from data_prep.remote import RemoteFiles
from data_prep.token_file import Tokens, is_url, open_tokens


class Source(Protocol):
    """Something that yields sample k, k = 0, 1, ...

    `read` fills `rows`, [samples, seq_length + 1], with the token ids of samples `numbers` and returns for each the
    positions 1 .. seq_length at which a document begins.
    """

    samples_per_epoch: int

    def read(self, numbers: np.ndarray, rows: np.ndarray) -> list[list[int]]: ...

    def describe(self, number: int) -> str: ...


def _random_state(*keys: int) -> np.random.RandomState:
    # RandomState, not Generator: numpy promises to keep its streams for ever, and a resumed run depends on them.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(keys)))


class DocumentStream:
    """Documents of a token file laid end to end in a given order.

    Args:
        tokens: the file.
        order: int32 [D], document numbers.
        starts: int64 [D + 1]; entry d is the stream position of the first token of document order[d].
    """

    def __init__(self, tokens: Tokens, order: np.ndarray, starts: np.ndarray):
        # Views: indexing np.memmap itself costs several times as much.
        self.tokens, self.order, self.starts = tokens, order.view(np.ndarray), starts.view(np.ndarray)

    @staticmethod
    def starts_of(tokens: Tokens, order: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(tokens.lengths[order], dtype=np.int64)])

    def locate(self, position: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into `order`, token offset in that document) of stream positions; empty documents are passed over."""
        entry = self.starts.searchsorted(position, side="right") - 1
        return entry, position - self.starts[entry]

    def read(self, positions: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        """Fill each row with token ids from its stream position on; returns where in it a document begins, 0 left out."""
        length = rows.shape[1]
        first, offsets = self.locate(positions)
        end = self.starts.searchsorted(positions + length, side="left")
        borders = []
        for row, entry, stop, offset in zip(rows, first.tolist(), end.tolist(), offsets.tolist(), strict=True):
            filled, begins = 0, []
            for document in self.order[entry:stop].tolist():
                piece = self.tokens.document(document)[offset : offset + length - filled]
                if len(piece):  # some documents are empty
                    begins.append(filled)
                    row[filled : filled + len(piece)] = piece
                    filled, offset = filled + len(piece), 0
            borders.append(begins[1:])
        return borders


class EpochSource:
    """The "epoch" order over one token file.

    Args:
        tokens: the file.
        seq_length: inputs per sample (a sample reads one token more).
        seed: data seed.
        key: the source's place in the list of files, so that two sources never share a shuffle.
        cache: keeps the index arrays of large files.

    Raises InputError when the file holds less than one sample.
    """

    def __init__(self, tokens: Tokens, seq_length: int, seed: int, key: int = 0, cache: OrderCache | None = None):
        self.tokens, self.seq_length, self.seed, self.key = tokens, seq_length, seed, key
        self.samples_per_epoch = _samples_in(tokens, seq_length)
        self._cache = cache or OrderCache(None)
        self._epochs: OrderedDict[int, tuple[DocumentStream, np.ndarray]] = OrderedDict()

    def _build(self, epoch: int) -> dict[str, np.ndarray]:
        random = _random_state(self.seed, self.key, epoch)
        order = np.arange(len(self.tokens), dtype=np.int32)
        random.shuffle(order)
        samples = np.arange(self.samples_per_epoch, dtype=np.int64)
        random.shuffle(samples)
        return {"order": order, "starts": DocumentStream.starts_of(self.tokens, order), "samples": samples}

    def _epoch(self, epoch: int) -> tuple[DocumentStream, np.ndarray]:
        if epoch not in self._epochs:
            key = {
                "order": "epoch",
                "lengths": self.tokens.lengths_hash,
                "seq_length": self.seq_length,
                "seed": [self.seed, self.key, epoch],
            }
            elements = len(self.tokens) + self.samples_per_epoch
            arrays = self._cache.arrays(key, elements, lambda: self._build(epoch))
            stream = DocumentStream(self.tokens, arrays["order"], arrays["starts"])
            self._epochs[epoch] = stream, arrays["samples"].view(np.ndarray)
            if len(self._epochs) > 2:  # a batch can straddle two epochs, never three
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def read(self, numbers: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        epoch, last = (int(number) // self.samples_per_epoch for number in (numbers[0], numbers[-1]))
        if epoch != last:  # numbers ascend; the rows of the first epoch, then the others
            cut = int(np.searchsorted(numbers, (epoch + 1) * self.samples_per_epoch))
            return self.read(numbers[:cut], rows[:cut]) + self.read(numbers[cut:], rows[cut:])
        stream, samples = self._epoch(epoch)
        return stream.read(samples[numbers - epoch * self.samples_per_epoch] * self.seq_length, rows)

    def describe(self, number: int) -> str:
        epoch, within = divmod(number, self.samples_per_epoch)
        stream, samples = self._epoch(epoch)
        entry, offset = stream.locate(int(samples[within]) * self.seq_length)
        return f"{self.tokens.prefix}, document {int(stream.order[entry])}, token {int(offset)}"


class MegatronSource:
    """Megatron-LM's GPTDataset order over one token file: document index, sample index, shuffle index.

    Args:
        num_samples: how many samples will be wanted; the order depends on it.
        The others as in EpochSource.

    Attributes:
        document_index: int32 [epochs · D].
        sample_index: int64 [samples + 1, 2], (entry of document_index, token offset) where each sample starts.
        shuffle_index: [samples], the order in which samples are drawn.
    """

    SEPARATE_LAST_EPOCH_BELOW = 0.80

    def __init__(self, tokens: Tokens, seq_length: int, seed: int, num_samples: int, cache: OrderCache | None = None):
        self.tokens, self.seq_length, self.seed, self.num_samples = tokens, seq_length, seed, num_samples
        self.samples_per_epoch = _samples_in(tokens, seq_length)
        key = {
            "order": "megatron",
            "lengths": tokens.lengths_hash,
            "seq_length": seq_length,
            "seed": seed,
            "num_samples": num_samples,
        }
        arrays = (cache or OrderCache(None)).arrays(key, len(tokens) + num_samples, self._build)
        self.document_index = arrays["order"].view(np.ndarray)
        self.shuffle_index = arrays["samples"].view(np.ndarray)
        self._stream = DocumentStream(tokens, self.document_index, arrays["starts"])

    def _build(self) -> dict[str, np.ndarray]:
        total, seq_length, num_samples = self.tokens.total_tokens, self.seq_length, self.num_samples
        epochs = max(1, -(-(num_samples * seq_length + 1) // total))
        samples_before_last = ((epochs - 1) * total - 1) // seq_length
        from_last = num_samples - samples_before_last
        separate = epochs > 1 and from_last < int(self.SEPARATE_LAST_EPOCH_BELOW * self.samples_per_epoch)
        random = np.random.RandomState(self.seed)
        documents = np.arange(len(self.tokens), dtype=np.int32)
        parts = [epochs - 1, 1] if separate else [epochs]
        order = np.concatenate([_shuffled(np.tile(documents, part), random) for part in parts])
        count = (epochs * total - 1) // seq_length
        dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
        blocks = [(0, samples_before_last), (samples_before_last, count)] if separate else [(0, count)]
        samples = np.concatenate([_shuffled(np.arange(start, stop, dtype=dtype), random) for start, stop in blocks])
        return {"order": order, "starts": DocumentStream.starts_of(self.tokens, order), "samples": samples}

    @property
    def sample_index(self) -> np.ndarray:
        starts = np.arange(len(self.shuffle_index) + 1, dtype=np.int64) * self.seq_length
        index = np.stack(self._stream.locate(starts), axis=1)
        index[0] = 0  # Megatron's first row is (0, 0) even when the first document is empty
        return index

    def read(self, numbers: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        return self._stream.read(self.shuffle_index[numbers].astype(np.int64) * self.seq_length, rows)

    def describe(self, number: int) -> str:
        entry, offset = self._stream.locate(int(self.shuffle_index[number]) * self.seq_length)
        return f"{self.tokens.prefix}, document {int(self.document_index[entry])}, token {int(offset)}"


class SyntheticSource:
    """Seeded tokens that need no file: sample k is a pure function of (seed, k).

    Ids follow a cubic power law, low ids being the most frequent, so that a model has something to learn.
    """

    samples_per_epoch = 2**62

    def __init__(self, vocab_size: int, seq_length: int, seed: int):
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed

    def read(self, numbers: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        for number, row in zip(numbers.tolist(), rows, strict=True):
            uniform = _random_state(self.seed, number).random_sample(self.seq_length + 1)
            row[:] = (uniform**3 * self.vocab_size).astype(np.int64)
        return [[] for _ in rows]

    def describe(self, number: int) -> str:
        return f"synthetic sample {number}"


@dataclass(frozen=True)
class DataSpec:
    """What to draw samples from, and how.

    Attributes:
        files: (prefix, weight) pairs, or None for synthetic tokens.
        seq_length: inputs per sample.
        order: "epoch" or "megatron".
        seed: data seed.
        num_samples: samples the whole run will draw; part of the order under "megatron" only.
        vocab_size: ids must lie below it.
        max_epochs: most epochs of any source, or None for no bound (set: small data may repeat within a batch).
        phases: (first sample, files) of later phases, which replace the files before; under "epoch" only.
        document_mask: whether a token sees its own document only.
        cache_dir: for remote files and large indices; None: indices in memory, no remote files.
        cache_limit_gib: most that remote files may take there.
    """

    files: tuple[tuple[str, float], ...] | None
    seq_length: int
    order: str
    seed: int
    num_samples: int
    vocab_size: int
    max_epochs: float | None = None
    phases: tuple[tuple[int, tuple[tuple[str, float], ...]], ...] = ()
    document_mask: bool = False
    cache_dir: str | None = None
    cache_limit_gib: float | None = None


@dataclass(frozen=True)
class Phase:
    """A part of the run with files and weights of its own.

    Attributes:
        start: its first sample.
        sources: for each of its files, the place in SampleStream.sources.
        blend: over them, from `start` on.
        begun: samples of each that earlier phases have drawn.
    """

    start: int
    sources: list[int]
    blend: Blend
    begun: list[int]


class SampleStream:
    """Samples 0, 1, 2, ... of a run: [seq_length + 1] token ids each, in the order that `spec` defines.

    A file that several phases draw from goes on in each where the one before left it: nothing of it is lost or repeated.
    """

    def __init__(self, spec: DataSpec):
        self.spec = spec
        cache = OrderCache(None if spec.cache_dir is None else Path(spec.cache_dir) / "index")
        if spec.files is None:
            self.phases, self._starts, self.files = [Phase(0, [0], Blend([1.0]), [0])], [0], []
            self.sources: list[Source] = [SyntheticSource(spec.vocab_size, spec.seq_length, spec.seed)]
            return
        plan = [(0, spec.files), *spec.phases]
        ends = [start for start, _ in plan[1:]] + [spec.num_samples]
        places: dict[tuple[str, int], int] = {}  # (prefix, which of its mentions in a phase) -> place
        self.phases = []
        drawn: dict[int, int] = {}
        for number, ((start, files), end) in enumerate(zip(plan, ends, strict=True)):
            mentions = [(prefix, [p for p, _ in files[:n]].count(prefix)) for n, (prefix, _) in enumerate(files)]
            sources = [places.setdefault(mention, len(places)) for mention in mentions]
            blend = Blend([weight for _, weight in files], max(end - start, 0), cache)
            phase = Phase(start, sources, blend, [drawn.get(source, 0) for source in sources])
            self.phases.append(phase)
            if number < len(spec.phases):
                for source, count in zip(sources, blend.counts(end - start), strict=True):
                    drawn[source] = drawn.get(source, 0) + count
        self._starts = [phase.start for phase in self.phases]
        self.remote = RemoteFiles(Path(spec.cache_dir) / "files", spec.cache_limit_gib) if spec.cache_dir else None
        self.files = [open_tokens(prefix, self.remote if is_url(prefix) else None) for prefix, _ in places]
        if spec.order == "epoch":
            self.sources = [
                EpochSource(file, spec.seq_length, spec.seed, key, cache) for key, file in enumerate(self.files)
            ]
        else:
            self.sources = [
                MegatronSource(
                    file,
                    spec.seq_length,
                    spec.seed,
                    _megatron_samples(spec.num_samples, weight, len(self.files)),
                    cache,
                )
                for file, weight in zip(self.files, self.phases[0].blend.weights, strict=True)
            ]

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Holds every id of every source."""
        return np.result_type(*(file.dtype for file in self.files)) if self.files else np.dtype(np.int64)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over all sources of the first phase."""
        return sum(self.sources[source].samples_per_epoch for source in self.phases[0].sources)

    def check(self, global_batch_size: int) -> None:
        """Raises InputError when the data can't give what the run will ask for."""
        spec = self.spec
        if spec.files is None:
            return
        for phase in self.phases:
            samples = sum(self.sources[source].samples_per_epoch for source in phase.sources)
            if samples < global_batch_size and spec.max_epochs is None:
                where = "the data has" if phase.start == 0 else f"the data from sample {phase.start} on has"
                raise InputError(
                    f"{where} {samples} samples of {spec.seq_length} tokens, fewer than global_batch_size "
                    f"{global_batch_size}: give more data, lower global_batch_size, or set data.max_epochs to allow repeats "
                    "within a batch"
                )
        if spec.max_epochs is not None:
            for file, epochs in zip(self.files, self.epochs(spec.num_samples), strict=True):
                if epochs > spec.max_epochs:
                    raise InputError(
                        f"the schedule draws {spec.num_samples} samples, {epochs:.2f} epochs of {file.prefix}, more than "
                        f"data.max_epochs {spec.max_epochs:g}: shorten the schedule, give more data, or raise data.max_epochs"
                    )
        remote = [file for file in self.files if is_url(file.prefix)]
        if remote:
            self.remote.check_room(remote)

    def prefetch(self) -> None:
        """Start bringing remote files here, in the order of the phases."""
        if remote := [file for file in self.files if is_url(file.prefix)]:
            self.remote.prefetch(remote)

    def _drawn_in(self, number: int, draws: int) -> list[int]:
        """How many of the run's first `draws` samples each file of phase `number` gives, in that phase."""
        phase = self.phases[number]
        end = self._starts[number + 1] if number + 1 < len(self.phases) else draws
        return phase.blend.counts(max(min(draws, end) - phase.start, 0))

    def counts(self, draws: int) -> list[int]:
        """How many of the first `draws` samples each source gives."""
        counts = [0] * len(self.sources)
        for number, phase in enumerate(self.phases):
            for source, count in zip(phase.sources, self._drawn_in(number, draws), strict=True):
                counts[source] += count
        return counts

    def epochs(self, draws: int) -> list[float]:
        """Epochs of each source that `draws` samples take."""
        return [
            count / source.samples_per_epoch for count, source in zip(self.counts(draws), self.sources, strict=True)
        ]

    def summary(self, draws: int) -> str:
        """What `draws` samples take of each source, phase by phase: a line a phase."""
        if self.spec.files is None:
            return "data: synthetic"
        lines = []
        for number, phase in enumerate(self.phases):
            counts = self._drawn_in(number, draws)
            parts = []
            for source, weight, count in zip(phase.sources, phase.blend.weights, counts, strict=True):
                size = self.sources[source].samples_per_epoch
                name = str(self.files[source].prefix).rpartition("/")[2]
                parts.append(f"{name} (weight {weight:.4g}, {count:,} of {size:,} samples, {count / size:.2f} epochs)")
            start = f"from sample {phase.start:,} on, " if phase.start else ""
            lines.append(f"data: {start}{sum(counts):,} samples of {self.spec.seq_length} tokens: {', '.join(parts)}")
        return "\n".join(lines)

    def _find(self, number: int) -> tuple[int, int]:
        """(place in `sources`, sample number within that source)."""
        phase = self.phases[bisect.bisect_right(self._starts, number) - 1]
        source, within = phase.blend.draw(number - phase.start)
        return phase.sources[source], phase.begun[source] + within

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """Samples `numbers`, ascending: ([samples, seq_length + 1] ids, for each the positions at which a document begins).

        Raises InputError for an id outside the vocabulary, naming its document.
        """
        rows = np.empty((len(numbers), self.spec.seq_length + 1), dtype=self.dtype)
        if len(self.sources) == 1:
            borders = self.sources[0].read(numbers, rows)
        else:
            places = np.array([self._find(number) for number in numbers.tolist()])
            borders = [[] for _ in rows]
            for source in np.unique(places[:, 0]):
                chosen = np.flatnonzero(places[:, 0] == source)
                part = np.empty((len(chosen), rows.shape[1]), dtype=self.dtype)
                for row, begins in zip(chosen, self.sources[source].read(places[chosen, 1], part), strict=True):
                    borders[row] = begins
                rows[chosen] = part
        if rows.max() >= self.spec.vocab_size or rows.min() < 0:
            wrong = (rows >= self.spec.vocab_size) | (rows < 0)
            row = int(np.flatnonzero(wrong.any(axis=1))[0])
            source, within = self._find(int(numbers[row]))
            raise InputError(
                f"token id {int(rows[row][wrong[row]][0])} is outside the model's vocabulary of {self.spec.vocab_size} "
                f"(sample from {self.sources[source].describe(within)}): the files were made with another tokenizer; set "
                "model.vocab_size or tokenize again"
            )
        return rows, borders

    def sample(self, number: int) -> np.ndarray:
        """The ids of sample `number`, [seq_length + 1]. Raises InputError as `read` does."""
        return self.read(np.array([number]))[0][0]

    def fingerprint(self, order: str | None = None, num_samples: int | None = None) -> dict:
        """What the order depends on, as JSON values: compared when a run resumes.

        Files are known by content, not by path or time: moving or copying them changes nothing.

        Args:
            order, num_samples: in place of the stream's own.
        """
        spec = replace(self.spec, order=order or self.spec.order, num_samples=num_samples or self.spec.num_samples)
        common = {"seq_length": spec.seq_length, "order": spec.order, "seed": spec.seed}
        if spec.files is None:
            return {**common, "files": "synthetic", "vocab_size": spec.vocab_size}
        if spec.order == "megatron":
            common["num_samples"] = spec.num_samples
        if spec.document_mask:
            common["document_mask"] = "attention"
        identity = [{"documents": len(file), "content": content_hash(file)} for file in self.files]
        files, *later = [
            [
                {"weight": round(weight, 12), **identity[source]}
                for source, weight in zip(phase.sources, phase.blend.weights, strict=True)
            ]
            for phase in self.phases
        ]
        if later:
            common["phases"] = [
                {"start": start, "files": of} for start, of in zip(self._starts[1:], later, strict=True)
            ]
        return {**common, "files": files}


def content_hash(tokens: Tokens, blocks: int = 64, block_bytes: int = 4096) -> str:
    """sha256 over each pair's whole .idx, the size of .bin, and `blocks` evenly spread pieces of .bin (all of a small one).

    Bounded reads: a corpus of terabytes is identified in about the time that reading its .idx takes. Of a remote pair
    whose record has checksums, those stand for the content, so that nothing is fetched for it.
    """
    digest = hashlib.sha256()
    for pair in tokens.pairs:
        if is_url(pair.prefix) and (checksums := pair.read_record().get("checksums")):
            digest.update(repr(sorted(checksums.items())).encode())
            continue
        with open(pair.local(".idx"), "rb") as index:
            while chunk := index.read(1 << 24):
                digest.update(chunk)
        data_path = pair.local(".bin")
        size = data_path.stat().st_size
        digest.update(str(size).encode())
        with open(data_path, "rb") as data:
            last = max(size - block_bytes, 0)
            for position in sorted({last * block // (blocks - 1) for block in range(blocks)}):
                data.seek(position)
                digest.update(data.read(block_bytes))
    return digest.hexdigest()


def _samples_in(tokens: Tokens, seq_length: int) -> int:
    count = (tokens.total_tokens - 1) // seq_length
    if count < 1:
        raise InputError(
            f"{tokens.prefix} holds {tokens.total_tokens} tokens, too few for one sample of seq_length {seq_length} + 1: "
            "give more data or lower data.seq_length"
        )
    return count


def _shuffled(values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(values)
    return values


def _megatron_samples(num_samples: int, weight: float, sources: int) -> int:
    # Megatron's BlendedMegatronDatasetBuilder asks each source for half a per cent more than its share.
    if sources == 1:
        return num_samples
    return math.ceil(math.ceil(num_samples * weight) * 1.005)
