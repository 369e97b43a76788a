"""Which sample comes when: the order of training samples, a pure function of (files, weights, seed).

A sample is `seq_length + 1` consecutive tokens of a source's document stream; neighbours share the boundary token,
so each token but the first is a label exactly once. Two orders:

- "epoch": every epoch shuffles documents and samples anew from (seed, source, epoch), so the order does not
  depend on how long the run is. Tokens after the last whole sample of an epoch are dropped.
- "megatron": bit for bit the order of Megatron-LM's GPTDataset, which depends on the number of samples asked for.

Several sources are blended as Megatron's BlendedDataset does it. Positions are counted in samples drawn so far.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.errors import InputError
from data_prep.token_file import TokenFile, file_of


class Source(Protocol):
    """Something that yields sample k, k = 0, 1, ...: [seq_length + 1] token ids in the stored dtype."""

    samples_per_epoch: int

    def sample(self, number: int) -> np.ndarray: ...

    def describe(self, number: int) -> str: ...


def _random_state(*keys: int) -> np.random.RandomState:
    # RandomState, not Generator: numpy promises to keep its streams for ever, and a resumed run depends on them.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(keys)))


class DocumentStream:
    """Documents of a token file laid end to end in a given order.

    Args:
        tokens: the file.
        order: int32 [D], document numbers.
    """

    def __init__(self, tokens: TokenFile, order: np.ndarray):
        self.tokens = tokens
        self.order = order
        # [D + 1]; entry d is the stream position of the first token of document order[d].
        self.starts = np.concatenate([[0], np.cumsum(tokens.lengths[order], dtype=np.int64)])

    def locate(self, position: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into `order`, token offset in that document) of stream positions; empty documents are passed over."""
        entry = np.searchsorted(self.starts, position, side="right") - 1
        return entry, position - self.starts[entry]

    def read(self, position: int, count: int) -> np.ndarray:
        """[count] token ids from stream position `position` on."""
        out = np.empty(count, dtype=self.tokens.dtype)
        entry, offset = (int(value) for value in self.locate(position))
        filled = 0
        while filled < count:
            piece = self.tokens.document(int(self.order[entry]))[offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            entry, offset = entry + 1, 0
        return out


class EpochSource:
    """The "epoch" order over one token file.

    Args:
        tokens: the file.
        seq_length: inputs per sample (a sample reads one token more).
        seed: data seed.
        key: the source's place in the list of files, so that two sources never share a shuffle.

    Raises InputError when the file holds less than one sample.
    """

    def __init__(self, tokens: TokenFile, seq_length: int, seed: int, key: int = 0):
        self.tokens, self.seq_length, self.seed, self.key = tokens, seq_length, seed, key
        self.samples_per_epoch = _samples_in(tokens, seq_length)
        self._epochs: OrderedDict[int, tuple[DocumentStream, np.ndarray]] = OrderedDict()

    def _epoch(self, epoch: int) -> tuple[DocumentStream, np.ndarray]:
        if epoch not in self._epochs:
            random = _random_state(self.seed, self.key, epoch)
            order = np.arange(len(self.tokens), dtype=np.int32)
            random.shuffle(order)
            samples = np.arange(self.samples_per_epoch, dtype=np.int64)
            random.shuffle(samples)
            self._epochs[epoch] = DocumentStream(self.tokens, order), samples
            if len(self._epochs) > 2:  # a batch can straddle two epochs, never three
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def sample(self, number: int) -> np.ndarray:
        epoch, within = divmod(number, self.samples_per_epoch)
        stream, samples = self._epoch(epoch)
        return stream.read(int(samples[within]) * self.seq_length, self.seq_length + 1)

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

    def __init__(self, tokens: TokenFile, seq_length: int, seed: int, num_samples: int):
        self.tokens, self.seq_length, self.num_samples = tokens, seq_length, num_samples
        self.samples_per_epoch = _samples_in(tokens, seq_length)
        total = tokens.total_tokens
        epochs = max(1, -(-(num_samples * seq_length + 1) // total))
        samples_before_last = ((epochs - 1) * total - 1) // seq_length
        from_last = num_samples - samples_before_last
        separate = epochs > 1 and from_last < int(self.SEPARATE_LAST_EPOCH_BELOW * self.samples_per_epoch)

        random = np.random.RandomState(seed)
        documents = np.arange(len(tokens), dtype=np.int32)
        parts = [epochs - 1, 1] if separate else [epochs]
        self.document_index = np.concatenate([_shuffled(np.tile(documents, part), random) for part in parts])
        self._stream = DocumentStream(tokens, self.document_index)
        count = (epochs * total - 1) // seq_length
        dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
        blocks = [(0, samples_before_last), (samples_before_last, count)] if separate else [(0, count)]
        self.shuffle_index = np.concatenate(
            [_shuffled(np.arange(start, stop, dtype=dtype), random) for start, stop in blocks]
        )

    @functools.cached_property
    def sample_index(self) -> np.ndarray:
        starts = np.arange(len(self.shuffle_index) + 1, dtype=np.int64) * self.seq_length
        index = np.stack(self._stream.locate(starts), axis=1)
        index[0] = 0  # Megatron's first row is (0, 0) even when the first document is empty
        return index

    def sample(self, number: int) -> np.ndarray:
        start = int(self.shuffle_index[number]) * self.seq_length
        return self._stream.read(start, self.seq_length + 1)

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

    def sample(self, number: int) -> np.ndarray:
        uniform = _random_state(self.seed, number).random_sample(self.seq_length + 1)
        return (uniform**3 * self.vocab_size).astype(np.int64)

    def describe(self, number: int) -> str:
        return f"synthetic sample {number}"


class Blend:
    """Interleaves sources by weight as Megatron does: at draw k, the source that lags furthest behind.

    Draw k takes the source with the largest w_i · max(k, 1) − (samples taken from i), ties to the lowest index, so any
    prefix is within one sample of its share. The sequence does not depend on the length of the run.

    Args:
        weights: one positive number a source; normalised here. Raises InputError for zero, negative or NaN ones.
    """

    BLOCK = 1 << 16

    def __init__(self, weights: list[float]):
        for weight in weights:
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                raise InputError(
                    f"data weight {weight} is not a positive number; leave a file out instead of weighting it 0"
                )
        total = math.fsum(weights)
        self.weights = [weight / total for weight in weights]
        self._counts = [0] * len(weights)
        self._sources = np.empty(0, dtype=np.int16)
        self._numbers = np.empty(0, dtype=np.int64)

    def _extend(self) -> None:
        begin = len(self._sources)
        sources = np.empty(self.BLOCK, dtype=np.int16)
        numbers = np.empty(self.BLOCK, dtype=np.int64)
        counts, weights, indices = self._counts, self.weights, range(len(self.weights))
        for k in range(self.BLOCK):
            at = max(begin + k, 1)
            lags = [weights[i] * at - counts[i] for i in indices]
            chosen = lags.index(max(lags))
            sources[k], numbers[k] = chosen, counts[chosen]
            counts[chosen] += 1
        self._sources = np.concatenate([self._sources, sources])
        self._numbers = np.concatenate([self._numbers, numbers])

    def draw(self, k: int) -> tuple[int, int]:
        """(source, sample number within that source) of draw k, k = 0, 1, ..."""
        if len(self.weights) == 1:
            return 0, k
        while k >= len(self._sources):
            self._extend()
        return int(self._sources[k]), int(self._numbers[k])


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
    """

    files: tuple[tuple[str, float], ...] | None
    seq_length: int
    order: str
    seed: int
    num_samples: int
    vocab_size: int
    max_epochs: float | None = None


class SampleStream:
    """Samples 0, 1, 2, ... of a run: [seq_length + 1] token ids each, in the order that `spec` defines."""

    def __init__(self, spec: DataSpec):
        self.spec = spec
        if spec.files is None:
            self.blend = Blend([1.0])
            self.sources: list[Source] = [SyntheticSource(spec.vocab_size, spec.seq_length, spec.seed)]
            return
        self.blend = Blend([weight for _, weight in spec.files])
        files = [TokenFile(prefix) for prefix, _ in spec.files]
        if spec.order == "epoch":
            self.sources = [EpochSource(file, spec.seq_length, spec.seed, key) for key, file in enumerate(files)]
        else:
            self.sources = [
                MegatronSource(
                    file, spec.seq_length, spec.seed, _megatron_samples(spec.num_samples, weight, len(files))
                )
                for file, weight in zip(files, self.blend.weights, strict=True)
            ]

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over all sources."""
        return sum(source.samples_per_epoch for source in self.sources)

    def check(self, global_batch_size: int) -> None:
        """Raises InputError when the data can't give what the run will ask for."""
        spec = self.spec
        if spec.files is None:
            return
        if self.samples_per_epoch < global_batch_size and spec.max_epochs is None:
            raise InputError(
                f"the data has {self.samples_per_epoch} samples of {spec.seq_length} tokens, fewer than "
                f"global_batch_size {global_batch_size}: give more data, lower global_batch_size, or set data.max_epochs "
                "to allow repeats within a batch"
            )
        if spec.max_epochs is not None:
            for source, epochs in zip(self.sources, self.epochs(spec.num_samples), strict=True):
                if epochs > spec.max_epochs:
                    raise InputError(
                        f"the schedule draws {spec.num_samples} samples, {epochs:.2f} epochs of "
                        f"{source.describe(0).split(',')[0]}, more than data.max_epochs {spec.max_epochs:g}: shorten the "
                        "schedule, give more data, or raise data.max_epochs"
                    )

    def epochs(self, draws: int) -> list[float]:
        """Epochs of each source that `draws` samples take, to within one sample."""
        return [
            draws * weight / s.samples_per_epoch for weight, s in zip(self.blend.weights, self.sources, strict=True)
        ]

    def summary(self, draws: int) -> str:
        """One line: each source's share and the epochs that `draws` samples take of it."""
        if self.spec.files is None:
            return "data: synthetic"
        parts = [
            f"{Path(prefix).name} (weight {weight:.4g}, {source.samples_per_epoch:,} samples, {epochs:.2f} epochs)"
            for (prefix, _), weight, source, epochs in zip(
                self.spec.files, self.blend.weights, self.sources, self.epochs(draws), strict=True
            )
        ]
        return f"data: {draws:,} samples of {self.spec.seq_length} tokens from {', '.join(parts)}"

    def sample(self, number: int) -> np.ndarray:
        """Sample `number`, [seq_length + 1]. Raises InputError for an id outside the vocabulary, naming its document."""
        source, within = self.blend.draw(number)
        ids = self.sources[source].sample(within)
        wrong = ids[(ids >= self.spec.vocab_size) | (ids < 0)]
        if len(wrong):
            raise InputError(
                f"token id {int(wrong[0])} is outside the model's vocabulary of {self.spec.vocab_size} (sample from "
                f"{self.sources[source].describe(within)}): the files were made with another tokenizer; set "
                "model.vocab_size or tokenize again"
            )
        return ids

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
        weights = self.blend.weights
        files = [
            {"weight": round(weight, 12), "documents": len(source.tokens), "content": content_hash(source.tokens)}
            for weight, source in zip(weights, self.sources, strict=True)
        ]
        return {**common, "files": files}


def content_hash(tokens: TokenFile, blocks: int = 64, block_bytes: int = 4096) -> str:
    """sha256 over the whole .idx, the size of .bin, and `blocks` evenly spread pieces of .bin (all of a small one).

    Bounded reads: a corpus of terabytes is identified in about the time that reading its .idx takes.
    """
    digest = hashlib.sha256()
    with open(file_of(tokens.prefix, ".idx"), "rb") as index:
        while chunk := index.read(1 << 24):
            digest.update(chunk)
    data_path = Path(file_of(tokens.prefix, ".bin"))
    size = data_path.stat().st_size
    digest.update(str(size).encode())
    with open(data_path, "rb") as data:
        last = max(size - block_bytes, 0)
        for position in sorted({last * block // (blocks - 1) for block in range(blocks)}):
            data.seek(position)
            digest.update(data.read(block_bytes))
    return digest.hexdigest()


def _samples_in(tokens: TokenFile, seq_length: int) -> int:
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
