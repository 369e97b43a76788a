import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import megatron_order
from data_prep.errors import InputError
from data_prep.samples import DataSpec, EpochSource, MegatronSource, SampleStream
from data_prep.token_file import TokenFile
from tests.conftest import random_documents, write_tokens


def spec(*files, seq_length=4, order="epoch", num_samples=20, seed=3, vocab_size=100, **more):
    pairs = tuple((str(path), weight) for path, weight in files)
    return DataSpec(pairs or None, seq_length, order, seed, num_samples, vocab_size, **more)


def ids_of(source, number):
    rows = np.empty((1, source.seq_length + 1), np.int64)
    source.read(np.array([number]), rows)
    return rows[0].tolist()


@pytest.mark.parametrize(("ids", "samples"), [(13, 3), (12, 2)])
def test_a_stream_is_cut_without_loss_or_overlap(tmp_path, ids, samples):
    source = EpochSource(TokenFile(write_tokens(tmp_path / "a", [np.arange(ids)])), 4, seed=0)
    assert source.samples_per_epoch == samples
    drawn = sorted(ids_of(source, n) for n in range(samples))
    assert drawn == [list(range(4 * n, 4 * n + 5)) for n in range(samples)]


def test_too_short_a_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="4 tokens, too few for one sample of seq_length 4"):
        SampleStream(spec((write_tokens(tmp_path / "a", [[1, 2, 3, 4]]), 1)))


def test_one_token_documents(tmp_path):
    # 5 0 6 0 7 0: documents of one token and their end.
    tokens = TokenFile(write_tokens(tmp_path / "a", [[5, 0], [6, 0], [7, 0]]))
    source = EpochSource(tokens, 2, seed=0)
    assert source.samples_per_epoch == 2
    assert all(ids_of(source, n)[1] == 0 or ids_of(source, n)[0] == 0 for n in range(2))


def test_epochs_are_different_permutations_the_same_in_a_new_process(tmp_path):
    prefix = write_tokens(tmp_path / "a", [np.arange(n * 4, n * 4 + 4) for n in range(10)] + [[99]], 100)
    source = EpochSource(TokenFile(prefix), 4, seed=5)
    epochs = [[ids_of(source, 10 * epoch + n) for n in range(10)] for epoch in range(3)]
    assert all(len({tuple(s) for s in epoch}) == 10 for epoch in epochs)
    assert len({json.dumps(epoch) for epoch in epochs}) == 3
    program = (
        "import json, sys; from data_prep.samples import *; from data_prep.token_file import TokenFile\n"
        "s, rows = EpochSource(TokenFile(sys.argv[1]), 4, seed=5), np.empty((30, 5), np.int64)\n"
        "s.read(np.arange(30), rows); print(json.dumps(rows.tolist()))"
    )
    again = subprocess.run([sys.executable, "-c", program, str(prefix)], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == [sample for epoch in epochs for sample in epoch]


def test_epoch_order_does_not_depend_on_the_length_of_the_run(tmp_path):
    prefix = write_tokens(tmp_path / "a", random_documents(20))
    short, long = (SampleStream(spec((prefix, 1), num_samples=n)) for n in (5, 5000))
    assert all((short.sample(n) == long.sample(n)).all() for n in range(200))


def reference_megatron(documents, seq_length, seed, wanted):
    """Megatron-LM's GPTDataset, written the slow way: indices by walking documents as its C++ helper does."""
    lengths = [len(d) for d in documents]
    total, epochs, tokens = sum(lengths), 0, 0
    while tokens < wanted * seq_length + 1:
        epochs, tokens = epochs + 1, tokens + total
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * total - 1) // seq_length
        separate = wanted - before < int(0.80 * ((total - 1) // seq_length))
    random = np.random.RandomState(seed)

    def document_index(count):
        index = np.mgrid[0:count, 0 : len(documents)][1].reshape(-1).astype(np.int32)
        random.shuffle(index)
        return index

    parts = [document_index(epochs - 1), document_index(1)] if separate else [document_index(epochs)]
    order = np.concatenate(parts)
    rows, entry, offset = [(0, 0)], 0, 0
    for _ in range((epochs * total - 1) // seq_length):
        left = seq_length + 1
        while left:
            here = lengths[order[entry]] - offset
            left -= here
            if left <= 0:
                offset += left + here - 1
                left = 0
            else:
                entry, offset = entry + 1, 0
        rows.append((entry, offset))
    count = len(rows) - 1
    blocks = [(0, before), (before, count)] if separate else [(0, count)]
    shuffled = []
    for start, stop in blocks:
        block = np.arange(start, stop, dtype=np.uint32)
        random.shuffle(block)
        shuffled.append(block)
    return order, np.array(rows), np.concatenate(shuffled), separate


@pytest.mark.parametrize(("wanted", "separate"), [(5, False), (70, True), (90, False), (500, True)])
def test_megatron_order(tmp_path, wanted, separate):
    documents = random_documents(12) + [[7]]
    source = MegatronSource(TokenFile(write_tokens(tmp_path / "a", documents)), 8, seed=11, num_samples=wanted)
    order, rows, shuffled, was_separate = reference_megatron(documents, 8, 11, wanted)
    assert was_separate == separate
    assert (source.document_index == order).all() and source.document_index.dtype == np.int32
    assert (source.sample_index == rows).all()
    assert (source.shuffle_index == shuffled).all() and source.shuffle_index.dtype == np.uint32
    stream = np.concatenate([documents[d] for d in order])
    for number in range(wanted):
        start = int(shuffled[number]) * 8
        assert ids_of(source, number) == stream[start : start + 9].tolist()


# Printed by `python benchmarks/megatron_order.py`: the samples of megatron-core 0.16.1's own datasets.
MEGATRON_CORE = {
    ((1.0,), 5): "10d18a8c31161afd59ce16b87f0a47b8fdcacab70cfaca37338ae54435391bfd",
    ((1.0,), 70): "efcfe6b83983ca904d2c9d795ca4f591a7c2d708e47236cb124d0f9de1e7c12d",
    ((1.0,), 90): "38cfcbc8c7f18b286668f85ace8b5585b85e8d6acb166e59b4a9c68de1a40368",
    ((1.0,), 500): "3e898e7a88e5f3b55737bd781308df8a690c1f4f97bc200fadea36fd9a222e51",
    ((2.0, 1.0), 20): "d9eda8174be7a0e05124fb260c8f0ede0faeae1425c2ec588d4c04e545ffe5fa",
    ((2.0, 1.0), 400): "a2f66e8c9f59e5065bc8f1148c6faccaef00549ab9bc79fbe6f84251448c38aa",
}


@pytest.mark.parametrize(("weights", "wanted"), MEGATRON_CORE)
def test_samples_are_those_of_megatron_core(tmp_path, weights, wanted):
    samples = megatron_order.our_samples(megatron_order.write_files(tmp_path), weights, wanted)
    assert hashlib.sha256(samples.tobytes()).hexdigest() == MEGATRON_CORE[weights, wanted]


def test_blend_of_a_small_weight_and_of_a_small_source(tmp_path):
    a = write_tokens(tmp_path / "a", [np.arange(41)])
    b = write_tokens(tmp_path / "b", [np.arange(41)])
    stream = SampleStream(spec((a, 0.999), (b, 0.001), num_samples=20))
    assert 1 <= stream.counts(20)[1] <= 2
    assert all(len(stream.sample(n)) == 5 for n in range(20))
    small = write_tokens(tmp_path / "small", [np.arange(9)])
    stream = SampleStream(spec((small, 0.5), (b, 0.5), num_samples=10))
    assert stream.counts(10) == [5, 5]
    assert stream.epochs(10) == [2.5, 0.5]
    assert "small (weight 0.5, 5 of 2 samples, 2.50 epochs)" in stream.summary(10)
    with pytest.raises(InputError, match=r"2\.50 epochs of .*small.* more than data\.max_epochs 2"):
        SampleStream(spec((small, 0.5), (b, 0.5), num_samples=10, max_epochs=2)).check(2)


def test_less_data_than_one_batch(tmp_path):
    stream = SampleStream(spec((write_tokens(tmp_path / "a", [np.arange(13)]), 1)))
    with pytest.raises(InputError, match="3 samples of 4 tokens, fewer than global_batch_size 4"):
        stream.check(4)
    # With repeats allowed, samples come round again: 8 draws of 3 samples.
    stream = SampleStream(spec((tmp_path / "a", 1), num_samples=8, max_epochs=3))
    stream.check(4)
    firsts = [int(stream.sample(n)[0]) // 4 for n in range(8)]
    assert sorted(firsts[:3]) == sorted(firsts[3:6]) == [0, 1, 2]


def test_id_beyond_the_vocabulary_names_file_and_document(tmp_path):
    stream = SampleStream(spec((write_tokens(tmp_path / "a", [[1] * 10, [99] * 10], 100), 1), vocab_size=99))
    with pytest.raises(InputError, match=r"token id 99 is outside the model's vocabulary of 99 .*a, document \d"):
        for n in range(4):
            stream.sample(n)


def test_fingerprint_follows_content_not_place(tmp_path):
    documents = random_documents(20)
    prints = []
    for name, changed in (("a", False), ("b", False), ("c", True)):
        if changed:
            documents[7] = (documents[7] + 1) % 64
        prints.append(SampleStream(spec((write_tokens(tmp_path / name, documents), 1))).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert json.loads(json.dumps(prints[0])) == prints[0]
    assert SampleStream(spec((tmp_path / "a", 1), seed=4)).fingerprint() != prints[0]


def test_regenerated_data_is_seen(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1] * 10] * 3)
    before = SampleStream(spec((prefix, 1))).fingerprint()
    write_tokens(prefix, [[2] * 7] * 5)
    stream = SampleStream(spec((prefix, 1)))
    assert stream.fingerprint()["files"][0]["documents"] == 5 and stream.fingerprint() != before
    assert all((stream.sample(n) == 2).all() for n in range(20))


def test_synthetic_samples_need_no_file():
    stream = SampleStream(spec(seq_length=32, vocab_size=50))
    samples = np.stack([stream.sample(n) for n in range(20)])
    assert samples.shape == (20, 33) and samples.min() >= 0 and samples.max() < 50
    assert (samples[3] == SampleStream(spec(seq_length=32, vocab_size=50)).sample(3)).all()
    assert (samples[0] != samples[1]).any()


def phases(*pieces):
    return tuple((start, tuple((str(path), weight) for path, weight in files)) for start, files in pieces)


def identity(tmp_path, name, samples):
    """A file whose sample n, whatever the shuffle, is known by its ids: documents of exactly one sample."""
    return write_tokens(tmp_path / name, [np.arange(samples * 4 + 1)], 1000)


def test_a_file_goes_on_in_the_next_phase_where_it_stood(tmp_path):
    a, b = identity(tmp_path, "a", 30), identity(tmp_path, "b", 30)
    plain = SampleStream(spec((a, 1), vocab_size=1000))
    changed = SampleStream(
        spec((a, 1), vocab_size=1000, num_samples=40, phases=phases((7, [(b, 1), (a, 1)]), (23, [(a, 1)])))
    )
    drawn = [changed.sample(n).tolist() for n in range(40)]
    assert drawn[:7] == [plain.sample(n).tolist() for n in range(7)]
    # Draws 7 .. 22: half of each file; then a alone. a's samples in order, none twice, none left out.
    of_a = drawn[:7] + drawn[8:23:2] + drawn[23:]
    assert of_a == [plain.sample(n).tolist() for n in range(7 + 8 + 17)]
    alone = SampleStream(spec((a, 1), (b, 1), vocab_size=1000))  # there b is the second file too
    assert drawn[7:23:2] == [ids_of(alone.sources[1], n) for n in range(8)]
    assert changed.counts(40) == [32, 8] and changed.counts(9) == [8, 1]
    assert "from sample 7 on, 16 samples" in changed.summary(40)


def test_phases_are_part_of_the_fingerprint(tmp_path):
    a = identity(tmp_path, "a", 30)
    prints = [
        SampleStream(spec((a, 1), vocab_size=1000, phases=later)).fingerprint()
        for later in ((), phases((7, [(a, 2)])), phases((8, [(a, 2)])))
    ]
    assert all(one != other for n, one in enumerate(prints) for other in prints[:n])
    assert json.loads(json.dumps(prints)) == prints


def test_a_phase_with_less_than_a_batch_is_refused(tmp_path):
    stream = SampleStream(
        spec((identity(tmp_path, "a", 30), 1), vocab_size=1000, phases=phases((9, [(identity(tmp_path, "b", 3), 1)])))
    )
    with pytest.raises(InputError, match="data from sample 9 on has 3 samples .* fewer than global_batch_size 4"):
        stream.check(4)


def test_shards_give_the_samples_of_the_whole(tmp_path):
    documents = random_documents(30)
    write_tokens(tmp_path / "whole", documents)
    for number, (first, last) in enumerate(((0, 11), (11, 12), (12, 30))):
        write_tokens(tmp_path / f"cut_0000{number}_of_00003", documents[first:last])
    whole, cut = (SampleStream(spec((tmp_path / name, 1))) for name in ("whole", "cut"))
    assert all((whole.sample(n) == cut.sample(n)).all() for n in range(100))
    (tmp_path / "cut_00001_of_00003.idx").unlink()
    with pytest.raises(InputError, match="cut has 2 of its 3 shards"):
        SampleStream(spec((tmp_path / "cut", 1)))
    write_tokens(tmp_path / "cut_00000_of_00002", documents)
    with pytest.raises(InputError, match="shards of several jobs, of 00002 and of 00003"):
        SampleStream(spec((tmp_path / "cut", 1)))


@pytest.mark.parametrize("order", ["epoch", "megatron"])
def test_an_index_on_disk_changes_nothing(tmp_path, monkeypatch, caplog, order):
    monkeypatch.setattr("data_prep.order_cache.KEEP_FROM", 0)
    caplog.set_level("INFO")
    a, b = (write_tokens(tmp_path / name, random_documents(30, seed=n)) for n, name in enumerate("ab"))

    def samples(**more):
        caplog.clear()
        stream = SampleStream(spec((a, 2), (b, 1), order=order, num_samples=300, **more))
        return [stream.sample(n).tolist() for n in range(300)]

    plain = samples()
    assert samples(cache_dir=str(tmp_path / "cache")) == plain and "sample order: made" in caplog.text
    assert "cache hit" not in caplog.text
    assert samples(cache_dir=str(tmp_path / "cache")) == plain and "cache hit" in caplog.text
    assert "made" not in caplog.text
    # Anything that the order depends on makes another entry: seed, length, content.
    for change in ({"seed": 4}, {"seq_length": 5}):
        assert samples(cache_dir=str(tmp_path / "cache"), **change) == samples(**change) != plain
        samples(cache_dir=str(tmp_path / "cache"), **change)
        assert "cache hit" in caplog.text
    write_tokens(a, random_documents(20, seed=9))
    assert samples(cache_dir=str(tmp_path / "cache")) == samples() != plain
