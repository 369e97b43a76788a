"""The background writer of checkpoints: alone, and on two ranks under every kind of engine."""

import errno
import io
import json
import logging
import os
import random
import sys
import threading
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.training import checkpoint_files
from tests.conftest import launch, make_tiny


def snapshot_engine(folder, **options):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from recipes.training.async_checkpoint import SnapshotEngine

    engine = SnapshotEngine(**{"asynchronous": True, "memory_limit": 2**30, **options})
    engine.info = CheckpointCommitInfo("tag", str(folder), False)
    (folder / "tag").mkdir(exist_ok=True)
    return engine


def write(engine, folder, state, name="a.pt"):
    engine.create(engine.info)
    engine.save(state, str(folder / "tag" / name))
    engine.commit(engine.info)
    engine.start()
    return engine.result()


@pytest.fixture
def held(monkeypatch):
    """The writer waits until this event is set."""
    from recipes.training import async_checkpoint

    event, write_state = threading.Event(), async_checkpoint.write_state

    def late(path, state):
        assert event.wait(30)
        return write_state(path, state)

    monkeypatch.setattr(async_checkpoint, "write_state", late)
    yield event
    event.set()


def test_what_is_written_is_the_state_at_the_save(tmp_path, held):
    engine = snapshot_engine(tmp_path)
    state = {
        "weights": OrderedDict(w=torch.ones(3, 4), empty=torch.empty(0), scalar=torch.tensor(5)),
        "list": [1, (torch.ones(2, dtype=torch.bfloat16), "text")],
    }
    engine.create(engine.info)
    engine.save(state, str(tmp_path / "tag" / "a.pt"))
    engine.commit(engine.info)
    engine.start()
    assert engine.busy()
    state["weights"]["w"].fill_(2)
    state["list"][1][0].fill_(2)
    state["list"][0] = 7
    held.set()
    entries = engine.result()
    loaded = engine.load(tmp_path / "tag" / "a.pt")
    assert torch.equal(loaded["weights"]["w"], torch.ones(3, 4)) and loaded["weights"]["scalar"] == 5
    assert torch.equal(loaded["list"][1][0], torch.ones(2, dtype=torch.bfloat16))
    assert loaded["list"][0] == 1 and loaded["list"][1][1] == "text" and loaded["weights"]["empty"].numel() == 0
    assert entries == {"a.pt": checkpoint_files.entry_of(tmp_path / "tag" / "a.pt")}
    assert not engine.busy()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_memory_is_written_once_and_views_alone(tmp_path, asynchronous):
    engine = snapshot_engine(tmp_path, asynchronous=asynchronous)
    flat = torch.arange(100_000.0)
    parts = flat.view(4, -1)[1], flat.view(4, -1).t()[:10]
    write(engine, tmp_path, {"tied": flat[:10_000], "again": flat[:10_000], "part": parts[0], "slanted": parts[1]})
    loaded = engine.load(tmp_path / "tag" / "a.pt")
    assert loaded["tied"].data_ptr() == loaded["again"].data_ptr()
    assert torch.equal(loaded["part"], parts[0]) and torch.equal(loaded["slanted"], parts[1])
    assert (tmp_path / "tag" / "a.pt").stat().st_size < 4 * (10_000 + 25_000 + 40) + 5_000


def test_host_memory_is_taken_once_and_within_its_limit(tmp_path, caplog):
    engine = snapshot_engine(tmp_path, memory_limit=5_000)
    write(engine, tmp_path, {"w": torch.ones(1_000)})
    buffer = engine._buffers["a.pt"]
    write(engine, tmp_path, {"w": torch.full((1_000,), 3.0)})
    assert engine._buffers["a.pt"] is buffer and engine.host_memory == 4_032
    assert torch.equal(engine.load(tmp_path / "tag" / "a.pt")["w"], torch.full((1_000,), 3.0))
    with caplog.at_level(logging.WARNING):
        entries = write(engine, tmp_path, {"w": torch.ones(500)}, "b.pt")
    assert "b.pt needs" in caplog.text and "training waits for it" in caplog.text
    assert engine.host_memory == 4_032 and list(entries) == ["b.pt"]
    assert torch.equal(engine.load(tmp_path / "tag" / "b.pt")["w"], torch.ones(500))


def test_what_the_writer_raises_is_raised_at_the_next_step(tmp_path):
    engine = snapshot_engine(tmp_path)
    engine.create(engine.info)
    engine.save({"w": torch.ones(3)}, str(tmp_path / "tag" / "folder_that_is_missing" / "a.pt"))
    engine.start()
    with pytest.raises(FileNotFoundError, match="folder_that_is_missing"):
        while engine.busy():
            pass


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("of", ["module", "layer", "optimizer"])
def test_weights_that_are_not_finite_are_refused(tmp_path, asynchronous, bad, of):
    engine = snapshot_engine(tmp_path, asynchronous=asynchronous)
    weights = torch.ones(10, dtype=torch.bfloat16)
    module = {"mask": torch.full((2, 2), -torch.inf), "n": torch.arange(3)}
    state = {"module": module, "buffer_names": ["mask", "n"], "optimizer": {"state": [weights]}}
    if of == "module":
        module["w"] = weights
    elif of == "layer":  # a pipeline's file
        state = {"w": weights}
    write(engine, tmp_path, state)
    weights[7] = float(bad)
    with pytest.raises(FloatingPointError, match="a.pt holds NaN or infinity"):
        write(engine, tmp_path, state)


@pytest.mark.parametrize("at", ["write", "flush", "fsync"])
def test_a_file_that_can_not_be_written_is_named_and_removed(tmp_path, monkeypatch, at):
    """torch raises an error of its own while it closes the archive that a full disk has cut."""
    from recipes.training import async_checkpoint

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if at == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        raw = io.FileIO

        class Full(raw):
            def write(self, data):
                return refuse() if at == "write" and self.tell() > 4096 or at == "flush" else super().write(data)

        monkeypatch.setattr(
            async_checkpoint, "open", lambda path, mode: io.BufferedWriter(Full(path, mode)), raising=False
        )
    size = 100_000 if at == "write" else 10
    with pytest.raises(OSError, match="No space left on device: '.*a.pt'"):
        async_checkpoint.write_state(tmp_path / "a.pt", {"w": torch.ones(size)})
    assert list(tmp_path.iterdir()) == []


def test_random_states_are_restored(tmp_path):
    """Of torch, numpy and Python, from a file that torch.load reads with weights_only=True."""
    from recipes.training import checkpoint

    def draw():
        return torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), [random.gauss(0, 1) for _ in range(3)]

    checkpoint.seed_ranks(7, 3, 1)
    np.random.standard_normal(), random.gauss(0, 1)  # one of two is kept for later
    torch.save(checkpoint.random_state(), tmp_path / "random.pt")
    drawn = draw()
    assert draw() != drawn
    checkpoint._restore_random_state(torch.load(tmp_path / "random.pt", weights_only=True))
    assert draw() == drawn


def test_what_a_conversion_left_is_removed_and_nothing_else(tmp_path):
    from recipes.training import universal

    ours = [".converted", "..converted.123.tmp", "..converted.4.old"]
    foreign = [
        "global_step6.converted_hf",
        ".converted_hf",
        "x.converted",
        "..converted.123.tmp.mine",
        "..converted.x.tmp",
    ]
    for name in (*ours, *foreign):
        (tmp_path / name).mkdir()
    (tmp_path / "..converted.5.tmp").write_text("mine")
    (tmp_path / "..converted.6.tmp").symlink_to(tmp_path / foreign[0])
    universal.remove_leftovers(tmp_path / ".converted")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, "..converted.5.tmp", "..converted.6.tmp"}


class FakeDataStates:
    """What DeepSpeed calls of DataStates; the files are whole only after `wait`."""

    def __init__(self, _config, _rank):
        self.asked = []

    def save(self, state, path):
        self.asked.append((state, path))

    def wait(self, persist):
        for state, path in self.asked:
            torch.save(state, path)
        self.asked = []

    def load(self, path, map_location):
        return torch.load(path, map_location)


@pytest.fixture
def datastates(monkeypatch, tmp_path):
    """Our wrapper around DeepSpeed's engine for DataStates, and a checkpoint's commit info."""
    from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, DataStatesCheckpointEngine

    from recipes.training.own_engines import OwnEngine

    monkeypatch.setitem(sys.modules, "datastates", SimpleNamespace(CheckpointEngine=FakeDataStates))
    (tmp_path / "tag").mkdir()
    return OwnEngine(DataStatesCheckpointEngine(None, 0)), CheckpointCommitInfo("tag", str(tmp_path), False)


@pytest.mark.parametrize("by", ["step", "end"])
def test_datastates_is_committed_at_the_next_step_or_at_the_end(datastates, tmp_path, by):
    engine, info = datastates
    state, file = {"w": torch.ones(3)}, tmp_path / "tag" / "a.pt"
    engine.create(info)
    engine.save(state_dict=state, path=str(file))
    engine.save_plain({"n": 1}, str(tmp_path / "tag" / "b.pt"))
    engine.start()
    assert engine.busy() and not file.exists() and engine.is_decoupled()
    if by == "step":
        engine.commit(engine.get_commit_info())
    entries = engine.result()
    assert entries == {name: checkpoint_files.entry_of(tmp_path / "tag" / name) for name in ("a.pt", "b.pt")}
    assert engine.get_commit_info() is None and not engine.busy()
    assert torch.equal(engine.load(str(file))["w"], torch.ones(3))


def test_deepspeed_s_own_engines_publish_nothing_bad(datastates, tmp_path):
    engine, info = datastates
    engine.create(info)
    with pytest.raises(FloatingPointError, match="a.pt holds NaN or infinity"):
        engine.save({"w": torch.tensor([1.0, torch.nan])}, str(tmp_path / "tag" / "a.pt"))
    engine.inner.save = lambda state, path: None  # as a decoupled engine whose process has died
    engine.save({"w": torch.ones(1)}, str(tmp_path / "tag" / "a.pt"))
    engine.start()
    with pytest.raises(FileNotFoundError, match="a.pt"):
        engine.result()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    make_tiny(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    finished = launch([*torchrun, "-m", "tests.recipes.checkpoint_checks", folder], limit_s=300)
    assert finished.code == 0, finished.output
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [*(f"stage {n}" for n in range(4)), "bf16", *(f"experts {n}" for n in range(4)), "pipeline 0", "pipeline 1"],
)
def test_every_engine_trains_on_and_loads_what_was_at_the_save(results, engine):
    """Two ranks; the writers are held until training has done another step."""
    for rank in results[engine]:
        assert rank == {"busy": True, "unpublished": True, "moved_on": True, "same": True, "draws": True, "step": 2}, (
            engine
        )


WRITERS = {"torch": "TorchCheckpointEngine", "python": "FastCheckpointEngine", "decoupled": "DecoupledCheckpointEngine"}
OWN = [
    *(f"{writer}, pipeline {stage}" for writer in ("torch", "python") for stage in (0, 1)),
    *(
        f"{writer}, {model} {stage}"
        for writer, stages in (("torch", (0, 1, 2, 3)), ("python", (0, 1, 2, 3)), ("decoupled", (0, 3)))
        for model in ("stage", "bf16", "experts")
        for stage in stages
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN)
def test_deepspeed_s_own_engines_load_what_was_at_the_save(results, case):
    """Two ranks, two saves: one that the next step commits, one at the end of the run; no process is left."""
    writer = case.split(",")[0]
    for rank in results[case]:
        assert rank == {
            "engine": WRITERS[writer],
            "decoupled": writer == "decoupled",
            "left": 0,
            "steps": [2, 3],
            "damage": [None, None],
            "same 2": True,
            "same 3": True,
        }


@pytest.mark.slow
def test_a_second_save_waits_for_the_first(results):
    for rank in results["second save"]:
        assert rank == {"first": [], "held": True, "second": [1], "both": [1, 2]}


@pytest.mark.slow
def test_rank_0_s_clock_decides_for_all(results):
    for rank, told in enumerate(results["clock"]):
        assert told["flags"] == [False, rank == 0, False] and told["patient"] == [False] * 3
        assert told["due"] is True and told["not due"] == [False, False] and told["while writing"] is False
        assert told["uploader"] == [
            "advance",
            "advance",
            "begin",
        ]  # asked on again in a later step: nothing waits for it
