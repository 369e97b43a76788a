"""Fixtures: small token files, a tiny recipe, and launches in their own process group with a time limit."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

os.environ.setdefault("DS_ACCELERATOR", "cpu")
REPOSITORY = Path(__file__).resolve().parents[1]


def write_tokens(prefix: Path, documents, vocab_size: int = 64) -> Path:
    from data_prep.token_file import TokenFileWriter

    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def random_documents(count: int, vocab_size: int = 64, seed: int = 0) -> list[np.ndarray]:
    random = np.random.RandomState(seed)
    return [random.randint(0, vocab_size, random.randint(5, 60)) for _ in range(count)]


def publish_checkpoint(directory: Path, step: int, changes: dict | None = None, **files: bytes) -> Path:
    """A checkpoint of files NAME.pt. `changes`: of its manifest."""
    from recipes.training import checkpoint_files

    path = directory / checkpoint_files.incomplete_tag(step)
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name}.pt").write_bytes(content)
    counts = ("consumed_samples", "consumed_tokens", "applied_updates", "skipped_steps", "global_batch_size")
    manifest = {
        **dict.fromkeys((*counts, "total_steps", "seed", "optimizer_steps", "order_samples"), 8),
        **{"left_out": [], "parent": None, "loss_scale": None, "model": {}, "data": {"files": "synthetic"}},
        "layout": {"precision": "fp32", "zero_stage": 1},
        "files": {name: checkpoint_files.entry_of(path / name) for name in checkpoint_files.files_of(path)},
        **(changes or {}),
    }
    return checkpoint_files.publish(directory, step, manifest)


TINY_RECIPE = {
    "name": "tiny",
    "seed": 7,
    "model": {
        "family": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "attention_dropout": 0.1,
    },
    "global_batch_size": 8,
    "data": {"files": "train", "validation_files": "validation", "seq_length": 16},
    "validation": {"every_steps": 4, "samples": 13},
    "schedule": {"steps": 8, "warmup_steps": 2, "decay": "cosine"},
    "checkpoint": {"every_steps": 3},
    "monitor": {"samples": True},
    "deepspeed_config": "ds.json",
}
TINY_DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}


@pytest.fixture
def tiny(tmp_path):
    """A folder with tiny.yaml, ds.json and token files; returns the recipe's path."""
    return make_tiny(tmp_path)


def make_tiny(folder: Path, **changes) -> Path:
    """`changes` replace top-level settings of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder / "train", random_documents(60))
    write_tokens(folder / "validation", random_documents(10, seed=1))
    (folder / "ds.json").write_text(json.dumps(TINY_DS_CONFIG))
    recipe = {**TINY_RECIPE, "output_dir": "runs", **changes}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "tiny.yaml"


def add_checkpoint(recipe, ds_config: dict, sizes, step: int, **changes) -> Path:
    """A checkpoint of a run as the recipe says, with a file that holds no weights. `changes`: of its manifest."""
    from recipes.training import checkpoint_files, prepare
    from recipes.training.checkpoint import Progress

    samples = recipe.total_steps * recipe.global_batch_size
    manifest = {
        **Progress(step, step * recipe.global_batch_size).counters(),
        **checkpoint_files.compatibility(recipe),
        "layout": checkpoint_files.layout(ds_config, sizes),
        "total_steps": recipe.total_steps,
        "data": prepare.training_stream(recipe).fingerprint(recipe.data.order, samples),
        "order_samples": samples,
        **changes,
    }
    return publish_checkpoint(recipe.run_directory / "checkpoints", step, manifest, model=b"weights" * step)


@pytest.fixture(scope="session")
def s3():
    """An S3 server on this machine, for this process and the ones it starts: its file system.

    One for all tests, since fsspec keeps the file systems that it has made, endpoints included.
    """
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield fsspec.filesystem("s3", use_listings_cache=False)
    server.stop()


class Finished:
    def __init__(self, code: int, output: str, seconds: float):
        self.code, self.output, self.seconds = code, output, seconds

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


def launch(command, *, env=None, when=None, then=None, limit_s: float = 150) -> Finished:
    """Run a command in a process group of its own; returns its code and output. It is ended, and the test fails, at the limit.

    Args:
        when, then: once `when()` holds, `then(process)` is called, once.
    """
    begin = time.monotonic()
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
    )
    try:
        while when is not None and process.poll() is None and time.monotonic() - begin < limit_s:
            if when():
                then(process)
                break
            time.sleep(0.05)
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Not the group alone: torchrun gives each rank a session of its own.
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        output, _ = process.communicate()
        pytest.fail(f"still running after {limit_s} s: {command}\n{output}")
    return Finished(process.returncode, output, time.monotonic() - begin)


def launch_run(recipe: Path, *overrides: str, ranks: int = 2, script: str = "pretrain", **options) -> Finished:
    command = [sys.executable, "-m", "launch.run", "--num_accelerators", ranks, f"recipes/{script}.py"]
    return launch([*command, "--recipe", recipe, *overrides], **options)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_step(run: Path) -> int:
    steps = [line["step"] for line in metrics(run)] if (run / "metrics.jsonl").exists() else []
    return max(steps, default=-1)
