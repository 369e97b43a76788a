"""Real runs that meet faults while they save, and go on elsewhere from a copy on S3."""

import json
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from benchmarks import kill_storm
from launch import run
from recipes.training import checkpoint_files
from recipes.training.distributed import free_port
from tests.conftest import launch_run, make_tiny, metrics

pytestmark = pytest.mark.slow
FAULTS = Path(__file__).resolve().parents[1] / "faults"


def losses(folder) -> dict[int, float]:
    """{step: loss}; of a step that two starts took, both must agree."""
    found = {}
    for line in metrics(folder / "runs" / "tiny"):
        if "loss" in line:
            assert found.setdefault(line["step"], line["loss"]) == line["loss"], line["step"]
    return found


def fault(kind, rank=1, step=1) -> dict[str, str]:
    """Environment of a run with a fault of tests/faults."""
    return {"PYTHONPATH": str(FAULTS), "FAULT_RANK": str(rank), "FAULT_STEP": str(step), "FAULT_KIND": kind}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    assert launch_run(make_tiny(folder)).code == 0
    return losses(folder)


def test_faults_while_saving_lose_nothing(tmp_path, whole):
    recipe = make_tiny(tmp_path)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"

    def latest():
        assert [checkpoint_files.step_of(p) for p in checkpoint_files.checkpoints(checkpoints)] == [3]
        return (checkpoints / "latest").read_text()

    finished = launch_run(recipe, env=fault("nan", rank=0, step=6))
    assert finished.code == 1 and "holds NaN or infinity: the checkpoint is not published" in finished.last_line
    assert latest() == "global_step3"
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").write_text("".join(lines[:6]))  # without the poisoned steps

    finished = launch_run(recipe, env=fault("disk_full"))
    assert finished.code == 1 and finished.last_line.startswith("error: rank 1 on "), finished.output
    assert "No space left on device" in finished.last_line and "the next step is 4" in finished.output
    assert latest() == "global_step3" and (checkpoints / ".incomplete_global_step6").is_dir()

    finished = launch_run(recipe, env=fault("kill_writing", rank=0))
    assert finished.code == 1 and "the next step is 4" in finished.output
    assert latest() == "global_step3"

    finished = launch_run(recipe)
    assert finished.code == 0 and "the next step is 4" in finished.output, finished.output
    assert checkpoint_files.unfinished(checkpoints) == []
    assert losses(tmp_path) == whole


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for a few checkpoints."""
    path = tmp_path / "small_disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting isn't permitted: {mounted.stderr.decode()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_disk_that_is_really_full(tmp_path, small_disk):
    options = [f"output_dir={small_disk}/runs", f"data.cache_dir={tmp_path}/cache", "checkpoint.every_steps=1"]
    finished = launch_run(make_tiny(tmp_path), *options)
    assert finished.code == 1 and "No space left on device: " in finished.last_line, finished.output
    run = small_disk / "runs" / "tiny"
    assert f"'{run}/" in finished.last_line and "Logging error" not in finished.output
    # The other rank can have taken the room that the failed file has left.
    state = json.loads((run / "state.json").read_text())["state"]
    assert state == "failed" or f"could not write {run}/state.json: [Errno 28] No space left" in finished.output
    latest = (run / "checkpoints" / "latest").read_text()
    found = checkpoint_files.find(run / "checkpoints", "latest")
    assert found.chosen.name == latest and found.passed_over == []


def test_a_streak_without_updates_ends_the_run_and_leaves_the_checkpoint_before_it(tmp_path):
    options = ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "guards.max_skipped_in_a_row=3"]
    finished = launch_run(make_tiny(tmp_path), *options, env=fault("nan_loss", rank=1, step=4))
    assert finished.code == 1 and "3 steps in a row had no update" in finished.last_line, finished.output
    assert "the last good step was 3 (guards.max_skipped_in_a_row)" in finished.last_line
    for step in (4, 5, 6):
        assert f"step {step} had no update; ranks with a loss that is not finite: 1" in finished.output
    run = tmp_path / "runs" / "tiny"
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.checkpoints(run / "checkpoints")] == [3]
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 2, 3] and lines[-1]["loss"] is None


def test_output_below_a_file_is_told_before_a_step(tmp_path):
    (tmp_path / "file").write_text("")
    finished = launch_run(make_tiny(tmp_path), f"output_dir={tmp_path}/file/runs")
    assert finished.code == 2 and f"{tmp_path}/file/runs" in finished.last_line and "step 1/" not in finished.output


def test_copies_on_s3_and_going_on_from_them(tmp_path, whole, s3):
    bucket = "checkpoints"
    s3.mkdir(bucket)
    recipe = make_tiny(tmp_path / "here")
    options = [f"checkpoint.upload=s3://{bucket}/runs", "checkpoint.keep_last=1", "checkpoint.keep_every=6"]
    finished = launch_run(recipe, *options, "schedule.steps=7", "schedule.decay=constant")
    assert finished.code == 0, finished.output
    here = tmp_path / "here" / "runs" / "tiny" / "checkpoints"
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.checkpoints(here)] == [6, 7]
    remote = {path.split("/")[-1] for path in s3.ls(f"{bucket}/runs/tiny")}
    assert "global_step7" in remote and remote <= {"global_step3", "global_step6", "global_step7"}
    older = max(
        int(name.removeprefix("global_step")) for name in remote - {"global_step7"}
    )  # 6 where 3 was fast enough
    names = {Path(path).name for path in s3.find(f"{bucket}/runs/tiny/global_step7")}
    assert names == {*checkpoint_files.files_of(here / "global_step7"), "manifest.json"}

    # Elsewhere, with the newest copy damaged: the one before it.
    s3.pipe_file(f"{bucket}/runs/tiny/global_step7/mp_rank_00_model_states.pt", b"damaged")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "there" / "runs" / "tiny" / "checkpoints")
    finished = launch_run(tmp_path / "there" / "tiny.yaml", *options, "schedule.steps=8", "schedule.decay=constant")
    assert finished.code == 0, finished.output
    assert "global_step7: the content of mp_rank_00_model_states.pt does not match" in finished.output
    assert f"uploaded global_step{older} " not in finished.output  # it is whole there
    assert "resumed from" in finished.output and f"global_step{older}; the next step is {older + 1}" in finished.output
    assert sorted(losses(tmp_path / "there")) == list(range(1, 9))

    # Back to step 6: what was copied of the steps behind it is no more gone on from, here and there.
    finished = launch_run(recipe, *options, "schedule.steps=7", "schedule.decay=constant", "--resume", "6")
    assert finished.code == 0 and "global_step8 belongs to the abandoned branch" in finished.output, finished.output
    assert (here / "global_step7.replaced_1").is_dir()
    names = {Path(path).name for path in s3.find(f"{bucket}/runs/tiny/global_step8")}
    assert "manifest.replaced_1.json" in names and "manifest.json" not in names
    assert checkpoint_files.remote_steps(f"s3://{bucket}/runs/tiny")[0] == 7

    finished = launch_run(recipe, *options, "--resume", "none")
    assert finished.code == 2 and "holds checkpoints of an earlier run, up to step 7" in finished.last_line


def test_a_step_that_never_ends_is_ended_with_all_stacks(tmp_path):
    recipe = make_tiny(tmp_path)
    finished = launch_run(
        recipe, "guards.watchdog_s=8", "checkpoint.every_steps=null", env=fault("hang", rank=1, step=4)
    )
    assert finished.code == 1 and "no step ended for 8 s after step 3" in finished.last_line, finished.output
    assert re.search(r"rank 1 on \S+ is suspected: it is in hang \(sitecustomize.py:\d+\)", finished.last_line)
    assert "while rank 0 waits in all_reduce" in finished.last_line
    for rank, function in ((0, "all_reduce"), (1, "hang")):
        log = (tmp_path / "runs" / "tiny" / "logs" / f"rank_{rank}.log").read_text()
        assert re.search(rf"File \".*\", line \d+ in {function}\n", log) and log.count("Thread 0x") > 1


def test_a_flipped_bit_ends_the_run_unsaved(tmp_path):
    """At the next save, although the next check of its own would come later."""
    options = ["guards.replica_check_every=6", "ds.zero_optimization.stage=0", "checkpoint.every_steps=2"]
    options.append("checkpoint.asynchronous=false")
    finished = launch_run(make_tiny(tmp_path), *options, env=fault("flip", rank=1, step=3))
    assert finished.code == 1 and "replicas differ after step 4: rank 0 on " in finished.last_line, finished.output
    assert "step 4 is not saved" in finished.last_line
    saved = checkpoint_files.checkpoints(tmp_path / "runs" / "tiny" / "checkpoints")
    assert [path.name for path in saved] == ["global_step2"]


def test_loss_spikes(tmp_path):
    recipe = make_tiny(tmp_path)
    run = tmp_path / "runs" / "tiny"
    guard = ["guards.spike_window=3", "schedule.decay=constant"]
    finished = launch_run(recipe, *guard, "guards.spike=rollback", env=fault("spike", rank=0, step=5))
    assert finished.code == 0, finished.output
    assert re.search(r"step 5: loss .* going back to global_step3, without samples 32 to 40", finished.output)
    manifest = checkpoint_files.read_manifest(run / "checkpoints" / "global_step8")
    assert manifest["left_out"] == [[32, 40]] and manifest["consumed_samples"] == 9 * 8
    drawn = [json.loads(line) for line in (run / "logs" / "samples_rank_0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in drawn] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    spiked = set(drawn[4]["samples"])
    assert drawn[5] == drawn[3] and all(not spiked & set(line["samples"]) for line in drawn[5:])

    # Started again, it goes on behind the samples drawn; another spike's update is left out.
    finished = launch_run(
        recipe, *guard, "guards.spike=skip_step", "schedule.steps=10", env=fault("spike", rank=1, step=2)
    )
    assert finished.code == 0 and re.search(r"step 10: loss .*; the update was left out", finished.output)
    assert checkpoint_files.read_manifest(run / "checkpoints" / "global_step10")["consumed_samples"] == 11 * 8
    lines = {line["step"]: line for line in metrics(run) if "loss" in line}
    assert [lines[step]["applied_updates"] for step in (8, 9, 10)] == [8, 9, 9]


def test_a_pipeline_stopped_in_a_validation_goes_on_bitwise(tmp_path):
    """With dropout; one rank alone is told, twice, in the validation after step 4."""
    pipeline = {"script": "pretrain_pipeline"}
    recipes = [make_tiny(tmp_path / name) for name in ("whole", "broken")]
    assert launch_run(recipes[0], "pipeline.stages=2", **pipeline).code == 0
    told = {**fault("stop", rank=1, step=2), "FAULT_IN": "validate"}
    stopped = launch_run(recipes[1], "pipeline.stages=2", env=told, **pipeline)
    assert stopped.code == 0 and "stopped at step 5 of 8 by a signal to another rank" in stopped.output, stopped.output
    checkpoints = tmp_path / "broken" / "runs" / "tiny" / "checkpoints"
    assert [path.name for path in checkpoint_files.checkpoints(checkpoints)] == ["global_step3", "global_step5"]
    finished = launch_run(recipes[1], "pipeline.stages=2", **pipeline)
    assert finished.code == 0 and "the next step is 6" in finished.output, finished.output
    whole, broken = losses(tmp_path / "whole"), losses(tmp_path / "broken")
    assert whole == broken and sorted(whole) == list(range(1, 9))
    final = [tmp_path / name / "runs" / "tiny" / "checkpoints" / "global_step8" for name in ("whole", "broken")]
    entries = [checkpoint_files.read_manifest(path)["files"] for path in final]
    layers = [name for name in entries[0] if name.startswith("layer_")]
    assert layers and all(entries[0][name] == entries[1][name] for name in [*layers, "random_state_rank_1.pt"])


def test_runs_that_begin_where_another_was(tmp_path, whole):
    recipe = make_tiny(tmp_path)
    assert launch_run(recipe, "schedule.steps=3", "schedule.decay=constant").code == 0
    parent = f"{tmp_path}/runs/tiny@3"
    later = ["data.validation_files=null", "checkpoint.every_steps=null"]
    finished = launch_run(recipe, "name=branch", "--branch_from", parent, "schedule.steps=5", "seed=8", *later)
    assert finished.code == 0 and "the next step is 4" in finished.output, finished.output
    manifest = checkpoint_files.read_manifest(tmp_path / "runs" / "branch" / "checkpoints" / "global_step5")
    assert manifest["parent"] == parent and manifest["applied_updates"] == 5 and manifest["consumed_samples"] == 40
    finished = launch_run(
        recipe, "name=start", "--start_from", parent, "schedule.steps=1", "schedule.warmup_steps=0", *later, ranks=1
    )
    assert finished.code == 0, finished.output
    manifest = checkpoint_files.read_manifest(tmp_path / "runs" / "start" / "checkpoints" / "global_step1")
    assert manifest["parent"] == parent and manifest["applied_updates"] == 1
    first = {line["step"]: line["loss"] for line in metrics(tmp_path / "runs" / "start") if "loss" in line}[1]
    assert first < whole[1] - 0.01  # three steps better than drawn weights
    assert [p.name for p in checkpoint_files.checkpoints(tmp_path / "runs" / "tiny" / "checkpoints")] == [
        "global_step3"
    ]
    finished = launch_run(recipe, "name=other", "--start_from", f"{tmp_path}/runs/tiny@5")
    assert finished.code == 2 and "no checkpoint of step 5 in " in finished.last_line


# A kill while the next checkpoint is on its way costs the steps taken meanwhile, too, unless training waits for it.
@pytest.mark.parametrize(("asynchronous", "kills", "intervals"), [(True, 5, 2), (False, 3, 1)])
def test_a_storm_of_kills(tmp_path, asynchronous, kills, intervals):
    result = kill_storm.storm(tmp_path, kills, seed=3, asynchronous=asynchronous)
    assert result["wrong"] == [] and result["starts"] > kills, result
    assert result["most_steps_lost_to_one_kill"] <= intervals * result["interval"]


def test_a_port_that_is_taken_after_it_was_chosen(tmp_path, monkeypatch, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = iter([port, free_port()])
        monkeypatch.setattr(run, "free_port", lambda: next(ports))
        handlers = {number: signal.getsignal(number) for number in run.faults.StopSignals.NUMBERS}
        command = ["--num_accelerators", "1", "recipes/pretrain.py", "--recipe", str(make_tiny(tmp_path))]
        code = run.main([*command, "schedule.steps=1", "schedule.warmup_steps=0"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert code == 0 and "somebody took that port meanwhile; starting on port" in capfd.readouterr().out
