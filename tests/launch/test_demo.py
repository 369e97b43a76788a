"""The demo, whole: nothing compiled, nothing downloaded, a model that learned and loads anywhere."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from monitoring.metrics import read_metrics
from monitoring.report import resumes
from tests.conftest import REPOSITORY, launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    environment = {
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),  # where DeepSpeed would compile
        "CC": "false",
        "CXX": "false",
        "http_proxy": "http://127.0.0.1:9",  # where downloads would end
        "https_proxy": "http://127.0.0.1:9",
    }
    finished = launch(["bash", "launch/demo.sh", "--out", folder / "out"], env=environment, limit_s=900)
    assert finished.code == 0, finished.output
    return folder, finished


def test_it_compiles_nothing(demo):
    folder, _ = demo
    assert not (folder / "extensions").exists()


def test_it_learns_and_was_interrupted_and_resumed(demo):
    folder, _ = demo
    training, validation = read_metrics(folder / "out" / "runs" / "demo")
    assert validation[0]["step"] == 0 and validation[-1]["step"] == training[-1]["step"]
    assert validation[0]["validation_loss"] - validation[-1]["validation_loss"] >= 2.5
    assert [line["step"] for line in training] == list(range(1, len(training) + 1))
    assert len(resumes(training)) == 1 and abs(resumes(training)[0] - len(training) // 2) <= 3


def test_the_screen_shows_what_happened_and_no_noise(demo):
    folder, finished = demo
    shown = finished.output
    for text in (
        "step   1/150  loss ",
        "SIGTERM passed to 2 ranks",
        "the same command goes on from here",
        "resumed from",
        "== summary",
        "validation loss  8.",
        "tokens/s (median step)",
        "loss curve",
        "TensorBoard",
        "exported model",
    ):
        assert text in shown, text
    assert "warning" not in shown.lower() and "deprecated" not in shown.lower() and "Traceback" not in shown
    assert (folder / "out" / "runs" / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_export_loads_without_this_repository_and_agrees_with_training(demo, tmp_path):
    folder, _ = demo
    export = folder / "out" / "export"
    program = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "m, t = (k.from_pretrained(sys.argv[1]) for k in (M, T)); print(m.num_parameters(), len(t), t.eos_token_id)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program, str(export)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert loaded.stdout.split() == ["3148224", "4096", "0"]
    data = folder / "out" / "data" / "validation_text_document"
    command = [sys.executable, "-m", "recipes.evaluate_model", export, "--data", data, "--samples", "64"]
    finished = launch(command)
    assert finished.code == 0, finished.output
    loss = float(finished.output.split("loss ")[-1].split()[0])
    _, validation = read_metrics(folder / "out" / "runs" / "demo")
    assert abs(loss - validation[-1]["validation_loss"]) < 0.4  # other samples of the same file


def test_a_second_call_uses_what_is_there_and_a_third_waits_for_it(demo):
    folder, _ = demo
    command = ["bash", "launch/demo.sh", "--out", folder / "out"]
    checkpoints = folder / "out" / "runs" / "demo" / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    other = subprocess.Popen([str(c) for c in command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    finished = launch(command)
    output, _ = other.communicate(timeout=120)
    assert finished.code == 0 and other.returncode == 0
    for shown in (finished.output, output):
        assert shown.count("used again") == 6, shown
    assert ("waiting for it" in finished.output) != ("waiting for it" in output)
    assert {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")} == before
    assert (
        json.loads((folder / "out" / "runs" / "demo" / "environment.json").read_text())["attempts"][-1]["attempt"] == 2
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo.sh --steps 0", "--steps 0 must be positive"),
        ("demo.sh --stpes 3", "unknown option --stpes"),
        ("demo.sh --out", "--out needs a value"),
        ("setup.sh --torch gpu", "--torch gpu is not keep, cpu or cuNNN"),
        ("setup.sh --torch=", "--torch  is not keep, cpu or cuNNN"),
        ("setup.sh --torch", "--torch needs a value"),
    ],
)
def test_bad_options(command, message):
    finished = launch(["bash", *f"launch/{command}".split()])
    assert finished.code == 2 and message in finished.last_line


@pytest.mark.parametrize("script", ["demo.sh", "setup.sh"])
def test_help(script):
    finished = launch(["bash", f"launch/{script}", "--help"])
    assert finished.code == 0 and f"bash launch/{script} [" in finished.output


def stub_setup(tmp_path, **programs) -> dict:
    """A copy of what setup.sh reads, beside stub programs that come first on the PATH; returns the environment."""
    for name in ("requirements.txt", "pyproject.toml", "launch/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        program = tmp_path / "bin" / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": getattr(sys, "_base_executable", sys.executable),
    }


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA Version: 13.0 |",
            "2.13.0 (cu130): the NVIDIA driver runs CUDA up to 13.0",
        ),
        (
            "| NVIDIA-SMI 610.43  KMD Version: 610.43  CUDA UMD Version: 13.3 |",
            "2.13.0 (cu130): the NVIDIA driver runs CUDA up to 13.3",
        ),
        ("| Driver Version: 570.0   CUDA Version: 12.8 |", "2.13.0 (cu126): the NVIDIA driver runs CUDA up to 12.8"),
        ("| Driver Version: 525.0   CUDA Version: 12.0 |", "error: the NVIDIA driver runs CUDA up to 12.0"),
        ("nothing known", "error: nvidia-smi answers but names no CUDA version"),
    ],
)
def test_setup_chooses_by_the_driver_and_says_why(tmp_path, header, said):
    # Stopped at making the environment: what it chose has been said by then.
    environment = stub_setup(tmp_path, nvidia_smi=f"echo '{header}'", mktemp="exit 9")
    finished = launch(["bash", tmp_path / "launch" / "setup.sh"], env=environment)
    assert said in finished.output and finished.code == (2 if "error" in said else 9)


@pytest.mark.parametrize(("version", "kept"), [("2.11.0a0+local", True), ("2.6.0", False)])
def test_setup_keeps_a_torch_that_fits(tmp_path, version, kept):
    environment = stub_setup(tmp_path, nvidia_smi="exit 1", mktemp="exit 9")
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text(f"__version__ = '{version}'")
    environment["PYTHONPATH"] = str(tmp_path / "site")
    finished = launch(["bash", tmp_path / "launch" / "setup.sh"], env=environment)
    if kept:
        assert f"kept as it is: {environment['PYTHON']} imports torch {version}" in finished.output
    else:
        assert f"2.13.0 (cpu): no NVIDIA driver answers (the torch {version} of " in finished.output
        finished = launch(["bash", tmp_path / "launch" / "setup.sh", "--torch", "keep"], env=environment)
        assert finished.code == 2 and "is outside >=2.11,<2.14" in finished.last_line
