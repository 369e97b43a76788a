"""Real runs that meet faults while they save, and go on elsewhere from a copy on S3."""

import shutil
from pathlib import Path

import pytest

from recipes.training import checkpoint_files
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


def launch_faulty(recipe, kind, *, rank=1, step=1, **options):
    fault = {"PYTHONPATH": str(FAULTS), "FAULT_RANK": str(rank), "FAULT_STEP": str(step), "FAULT_KIND": kind}
    return launch_run(recipe, env={**fault, **options.pop("env", {})}, **options)


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

    finished = launch_faulty(recipe, "nan", rank=0, step=6)
    assert finished.code == 1 and "holds NaN or infinity: the checkpoint is not published" in finished.last_line
    assert latest() == "global_step3"
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").write_text("".join(lines[:6]))  # without the poisoned steps

    finished = launch_faulty(recipe, "disk_full")
    assert finished.code == 1 and finished.last_line.startswith("error: rank 1 on "), finished.output
    assert "No space left on device" in finished.last_line and "the next step is 4" in finished.output
    assert latest() == "global_step3" and (checkpoints / ".incomplete_global_step6").is_dir()

    finished = launch_faulty(recipe, "kill_writing", rank=0)
    assert finished.code == 1 and "the next step is 4" in finished.output
    assert latest() == "global_step3"

    finished = launch_run(recipe)
    assert finished.code == 0 and "the next step is 4" in finished.output, finished.output
    assert checkpoint_files.unfinished(checkpoints) == []
    assert losses(tmp_path) == whole


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
    names = {Path(path).name for path in s3.find(f"{bucket}/runs/tiny/global_step7")}
    assert names == {*checkpoint_files.files_of(here / "global_step7"), "manifest.json"}

    # Elsewhere, with the newest copy damaged: the one before it.
    s3.pipe_file(f"{bucket}/runs/tiny/global_step7/mp_rank_00_model_states.pt", b"damaged")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "there" / "runs" / "tiny" / "checkpoints")
    finished = launch_run(tmp_path / "there" / "tiny.yaml", *options, "schedule.steps=8", "schedule.decay=constant")
    assert finished.code == 0, finished.output
    assert "global_step7: the content of mp_rank_00_model_states.pt does not match" in finished.output
    assert "resumed from" in finished.output and "global_step6; the next step is 7" in finished.output
    assert sorted(losses(tmp_path / "there")) == list(range(1, 9))

    finished = launch_run(recipe, *options, "--resume", "none")
    assert finished.code == 2 and "holds checkpoints of an earlier run, up to step 8" in finished.last_line
