"""Training steps on one GPU: tokens/s, model TFLOPs, MFU and peak memory, beside the planned one, of two shapes, options on and off.

    python benchmarks/gpu_step.py [--wheels FOLDER] [--curve_s 0] [--output FILE.json]

Shapes: 1.3B (24 layers of width 2048) and 8B's width (4096, 8 layers), bf16 with fp32 master weights, 4,096 tokens a sequence,
ZeRO-1 on one rank. MFU = model FLOPs / seconds / peak, model FLOPs by recipes.models' flops_per_token (the PaLM paper's formula:
attention at full length, recomputation not counted), the peak that of the dense bf16 matrix units in PEAK_TFLOPS. Each case runs in
a process of its own: 3 steps of warm-up, then --steps timed ones.

--wheels installs deepspeed and what it needs from a folder, offline, beside the torch and transformers that are there; to
fill it for Python 3.12, with the versions of requirements.txt:

    pip download --no-deps -d FOLDER --python-version 3.12 --only-binary :all: hjson pydantic pydantic-core \\
        annotated-types typing-inspection omegaconf xxhash orjson psutil py-cpuinfo msgpack einops ninja
    pip wheel --no-deps -w FOLDER deepspeed==0.19.8

--curve_s N trains recipes/125m.yaml for N seconds instead, and keeps its loss curve. The script has not been run on a GPU
yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

# Dense bf16, by the vendors' data sheets.
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "A100": 312.0, "B200": 2250.0, "MI300X": 1307.4, "4090": 165.2}
SHAPES = {
    "1.3B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
             "num_key_value_heads": 16, "vocab_size": 50304},
    "8B width": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
ADAM = ["ds.optimizer.params.torch_adam=true", "ds.optimizer.params.fused=true"]  # DeepSpeed's own wants a compiler
BEST = ["compute.compile=true", "loss.chunk_tokens=4096", *ADAM]
LIMIT_S = 100  # for one case
# Shape, micro batch, options; the first is what the bar is for, each other leaves out or adds one thing.
CASES = [
    ("1.3B", 8, [*BEST]),
    ("1.3B", 8, [*BEST, "compute.compile=false"]),
    ("1.3B", 4, [*BEST, "loss.chunk_tokens=null"]),
    ("1.3B", 8, [*BEST, "ds.optimizer.params.fused=false"]),
    ("1.3B", 8, [*BEST, "compute.attention=flash_attention_2"]),
    ("1.3B", 8, [*BEST, "compute.activation_checkpoint_interval=1"]),
    ("1.3B", 8, [*BEST, "data.document_mask=attention"]),
    ("8B width", 4, [*BEST]),
    ("8B width", 4, [*BEST, "compute.activation_checkpoint_interval=1"]),
]


def install(wheels: Path) -> None:
    """Into a folder of their own: what the image has (torch, transformers) stays as it is."""
    target = tempfile.mkdtemp()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*command, "--no-deps", "--target", target, *sorted(map(str, wheels.glob("*.whl")))], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([target, os.environ.get("PYTHONPATH", "")])


def recipe_of(shape: dict, micro_batch: int, folder: Path) -> Path:
    import yaml

    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    recipe = {
        "name": "gpu_step",
        "output_dir": str(folder),
        "model": {"family": "llama", **shape},
        "global_batch_size": micro_batch,
        "data": {"files": "synthetic", "seq_length": 4096},
        "schedule": {"steps": 100000, "decay": "constant"},
        "deepspeed_config": str(folder / "ds.json"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def build_on_device(settings, *arguments):
    """build_model with weights drawn on the device: a billion of them take a CPU minutes."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from recipes.models import build

    def initial_values(name, shape, *_):
        return torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0.0, settings.init.std)

    device = torch.device(get_accelerator().current_device_name())
    with device, mock.patch.object(build, "initial_values", initial_values):
        return build.build_model(settings, *arguments)


def run_case(shape: str, micro_batch: int, overrides: list[str], steps: int) -> dict:
    from recipes import models
    from recipes.training import distributed
    from recipes.training.loop import parse_arguments
    from recipes.training.prepare import prepare, training_stream

    with tempfile.TemporaryDirectory() as name:
        recipe_file = recipe_of(SHAPES[shape], micro_batch, Path(name))
        arguments = parse_arguments("", ["--recipe", str(recipe_file), *overrides])
        place = distributed.find_place()
        prepared = prepare(arguments, 1, distributed.choose_accelerator())
        distributed.start_process_group(place)
        import torch

        from data_prep.loader import StepLoader
        from launch.planning.memory import fullest_rank
        from launch.planning.shape import shape_of
        from recipes.training import engine as engines
        from recipes.training.ds_config import precision
        from recipes.training.step import train_step

        recipe, sizes = prepared.recipe, prepared.sizes
        with mock.patch.object(engines, "build_model", build_on_device):
            engine = engines.build_engine(prepared)
        loader = StepLoader(training_stream(recipe), sizes, 0)
        losses = []
        for step in range(3 + steps):
            if step == 3:
                torch.accelerator.synchronize()
                begin = time.perf_counter()
            losses.append(train_step(engine, loader.next(), sizes).loss)
        torch.accelerator.synchronize()
        seconds = (time.perf_counter() - begin) / steps
        loader.close()
        family, device = models.family(recipe.model.family), torch.cuda.get_device_name()
        tokens = recipe.tokens_per_step
        tflops = family.flops_per_token(recipe.model, recipe.data.seq_length) * tokens / seconds / 1e12
        planned, _ = fullest_rank(
            recipe, prepared.ds_config, sizes, shape_of(recipe.model, precision(prepared.ds_config))
        )
        peak = next((value for name, value in PEAK_TFLOPS.items() if name in device), None)
        return {
            "parameters": family.parameter_count(recipe.model),
            "device": device,
            "torch": torch.__version__,
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "model_tflops": tflops,
            "mfu": None if peak is None else tflops / peak,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            # What torch allocates: neither the CUDA context nor what fragmentation costs.
            "planned_gib": (planned.device - planned.framework - planned.fragmentation) / 2**30,
            "loss": losses[-1],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--curve_s", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", type=int, help="run this one here, and print its JSON")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(run_case(*CASES[options.case], options.steps)))
        return 0
    if options.wheels is not None:
        install(options.wheels)
    if options.curve_s:
        return train_curve(options.curve_s, options.output)
    results = []
    for number, (shape, micro_batch, overrides) in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(number), "--steps", str(options.steps)]
        what = f"{shape:<9} micro batch {micro_batch}  {' '.join(overrides)}"
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{what}\n    not done in {LIMIT_S} s", flush=True)
            continue
        if finished.returncode:
            print(f"{what}\n    failed: {finished.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        result = json.loads(finished.stdout.strip().splitlines()[-1])
        results.append({"shape": shape, "micro_batch": micro_batch, "overrides": overrides, **result})
        mfu = "" if result["mfu"] is None else f"  MFU {result['mfu']:.1%}"
        print(
            f"{what}\n    {result['parameters'] / 1e9:.2f}B parameters: {result['tokens_per_s']:,.0f} tokens/s  "
            f"{result['model_tflops']:.0f} TFLOPs{mfu}  "
            f"peak {result['peak_gib']:.1f} GiB, planned {result['planned_gib']:.1f}",
            flush=True,
        )
        if options.output:
            options.output.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "results": results}, indent=1))
    return 0 if len(results) == len(CASES) else 1


def train_curve(seconds: int, output: Path | None) -> int:
    """recipes/125m.yaml on the source text of Python's standard library for so many seconds; its losses beside `output`."""
    folder = Path(tempfile.mkdtemp())
    steps = [
        ["-m", "data_prep.corpus", "stdlib", folder / "text.jsonl"],
        ["-m", "data_prep.train_tokenizer", "--input", folder / "text.jsonl", "--vocab_size", "32768", "--output", folder / "t"],
        ["-m", "data_prep.tokenize_files", "--input", folder / "text.jsonl", "--output_prefix", folder / "all", "--tokenizer", folder / "t"],
    ]  # fmt: skip
    for arguments in steps:
        subprocess.run([sys.executable, *map(str, arguments)], check=True, cwd=REPOSITORY)
    overrides = [
        f"data.files={folder}/all_text_document", "data.validation_files=null", f"data.tokenizer={folder}/t",
        "data.max_epochs=null", f"output_dir={folder}", "name=curve", "monitor.tensorboard=false", *ADAM,
    ]  # fmt: skip
    command = [sys.executable, "recipes/pretrain.py", "--recipe", "125m", *overrides]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        if process.wait(seconds):
            return 1
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    metrics = folder / "curve" / "metrics.jsonl"
    print(metrics.read_text().splitlines()[-1])
    if output is not None:
        output.with_suffix(".curve.jsonl").write_text(metrics.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
