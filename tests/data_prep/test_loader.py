import threading
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.errors import InputError
from data_prep.loader import IGNORED_LABEL, StepLoader, collate, rank_samples
from data_prep.samples import DataSpec, SampleStream
from tests.conftest import write_tokens


def stream(tmp_path, samples=20, seq_length=4):
    prefix = write_tokens(tmp_path / "a", [np.arange(samples * seq_length + 1) % 97], 97)
    return SampleStream(DataSpec(((str(prefix), 1.0),), seq_length, "epoch", 1, 100, 97))


def sizes(micro_batch, accumulation, data):
    return SimpleNamespace(micro_batch=micro_batch, accumulation=accumulation, data=data)


def test_ranks_share_a_batch_without_overlap_and_its_order_does_not_depend_on_them():
    per_rank = [rank_samples(100, micro_batch=2, accumulation=3, data_parallel=2, rank=r) for r in (0, 1)]
    assert per_rank[0].tolist() == [[100, 101], [104, 105], [108, 109]]
    assert per_rank[1].tolist() == [[102, 103], [106, 107], [110, 111]]
    alone = rank_samples(100, micro_batch=2, accumulation=6, data_parallel=1, rank=0)
    assert np.concatenate(per_rank, axis=1).ravel().tolist() == alone.ravel().tolist()


def test_three_ranks_of_ten_samples():
    ranks = [rank_samples(0, micro_batch=2, accumulation=1, data_parallel=3, rank=r).ravel().tolist() for r in range(3)]
    assert sorted(sum(ranks, [])) == list(range(6))


def test_labels_are_the_next_tokens(tmp_path):
    batch = collate(stream(tmp_path), np.arange(6).reshape(3, 2))
    assert batch.inputs.shape == batch.labels.shape == (3, 2, 4)
    assert ((batch.inputs + 1) % 97 == batch.labels).all()
    assert batch.tokens == 24 and batch.inputs.dtype == np.int64


def test_resuming_anywhere_gives_the_same_steps(tmp_path):
    def steps(consumed, count):
        loader = StepLoader(stream(tmp_path), sizes(1, 1, 2), rank=0, consumed_samples=consumed)
        drawn = [loader.next() for _ in range(count)]
        loader.close()
        return [(b.samples.ravel().tolist(), b.checksum()) for b in drawn]

    whole = steps(0, 25)
    assert steps(0, 7) + steps(14, 6) + steps(26, 12) == whole
    epoch_of = [s // 20 for samples, _ in whole for s in samples]
    assert epoch_of == sorted(epoch_of)


def test_reading_errors_reach_the_caller(tmp_path):
    prefix = write_tokens(tmp_path / "a", [np.arange(41)], 64)
    bad = SampleStream(DataSpec(((str(prefix), 1.0),), 4, "epoch", 1, 100, 20))
    loader = StepLoader(bad, sizes(1, 1, 1), rank=0)
    with pytest.raises(InputError, match="outside the model's vocabulary of 20"):
        for _ in range(10):
            loader.next()
    loader.close()


def test_wait_is_measured_and_closing_does_not_hang(tmp_path, monkeypatch):
    read, allowed = SampleStream.read, threading.Event()

    def read_when_allowed(self, numbers):
        allowed.wait()
        return read(self, numbers)

    monkeypatch.setattr(SampleStream, "read", read_when_allowed)
    loader = StepLoader(stream(tmp_path), sizes(2, 2, 1), rank=0, ahead=1)
    threading.Timer(0.2, allowed.set).start()
    loader.next()
    assert loader.wait_s > 0.1
    loader.close()
    assert not loader._thread.is_alive()


def masked(tmp_path, documents, seq_length, mask=True):
    prefix = write_tokens(tmp_path / "masked", documents)
    spec = DataSpec(((str(prefix), 1.0),), seq_length, "megatron", 1, 1, 64, document_mask=mask)
    return collate(SampleStream(spec), np.array([[0]]))


def test_document_mask_begins_positions_anew_and_ignores_the_label_across_a_border(tmp_path):
    # One document twice, so that the shuffle changes nothing: 5 6 7 9 | 5 6 7 9, read as six inputs and their labels.
    batch = masked(tmp_path, [[5, 6, 7, 9]] * 2, 6)
    assert batch.inputs.tolist() == [[[5, 6, 7, 9, 5, 6]]]
    assert batch.labels.tolist() == [[[6, 7, 9, IGNORED_LABEL, 6, 7]]]
    assert batch.positions.tolist() == [[[0, 1, 2, 3, 0, 1]]] and batch.tokens == 5
    plain = masked(tmp_path, [[5, 6, 7, 9]] * 2, 6, mask=False)
    assert plain.positions is None and plain.labels.tolist() == [[[6, 7, 9, 5, 6, 7]]] and plain.tokens == 6


def test_a_sample_that_ends_at_a_border(tmp_path):
    # The label alone lies in the next document: ignored, and no position begins anew.
    batch = masked(tmp_path, [[5, 6, 7, 9]] * 2, 4)
    assert batch.labels.tolist() == [[[6, 7, 9, IGNORED_LABEL]]]
    assert batch.positions.tolist() == [[[0, 1, 2, 3]]] and batch.tokens == 3


def test_documents_of_one_token_and_none(tmp_path):
    batch = masked(tmp_path, [[9], [9], [], [9], [9], [9]], 4)
    assert batch.positions.tolist() == [[[0, 0, 0, 0]]] and batch.tokens == 0
