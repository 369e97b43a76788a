"""Predicted against published throughput, and the fit of the planner's constants: `python benchmarks/plan_accuracy.py [--fit]`.

Every second row is fitted on, the others show the error. --fit searches the constants again and writes
launch/planning/calibration.yaml. All rows are bf16, of other trainers than DeepSpeed: they show what the hardware gives to a
tuned program. Left out are rows in fp8, rows whose layout isn't published, and nanotron's small batches on many nodes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from data_prep.errors import run_command
from data_prep.files import write_text
from launch.hardware import Hardware, kind_of
from launch.planning.shape import shape_of
from launch.planning.speed import CALIBRATION_FILE, Calibration, Work, calibration, step_time
from recipes import models
from recipes.training.sizes import Sizes

FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
RECOMPUTE = "arXiv:2205.05198, table 5, selective recomputation"
BRIDGE = "NVIDIA Megatron-Bridge performance summary, 25.11"
TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, torch.compile"
BLOOM = "bigscience train/tr11-176B-ml: 105 s a step"


def gpt(hidden: int, layers: int, heads: int, vocab: int = 50368) -> dict:
    """GPT's two matrices of width 4 · hidden have the parameters of three of 8/3 · hidden."""
    return {
        "family": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": True,
    }


MPT = {
    "125m": gpt(768, 12, 12),
    "350m": gpt(1024, 24, 16),
    "760m": gpt(1536, 24, 16),
    "1b": gpt(2048, 24, 16),
    "3b": gpt(2560, 32, 20),
    "7b": gpt(4096, 32, 32),
    "13b": gpt(5120, 40, 40),
    "30b": gpt(7168, 48, 56),
    "70b": gpt(8192, 80, 64),
}
LLAMA_8B = {
    **gpt(4096, 32, 32, 128256),
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
GPT_OSS_120B = {  # its windowed layers are counted as full ones
    "family": "qwen3_moe",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "moe_intermediate_size": 2880,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
QWEN3_235B = {
    "family": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
}
DEEPSEEK_V3 = {
    "family": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
}


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        recomputed: share of the blocks that are computed again.
        published: tokens a second and GPU, or, up to 1, the share of the peak that is used (MFU, attention counted whole).
    """

    name: str
    source: str
    kind: str
    model: dict
    gpus: int
    micro: int
    batch: int
    published: float
    seq_length: int = 2048
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    interleaved: int = 1
    zero: int = 3
    recomputed: float = 0.0
    fast_domain: int = 8
    memory_gb_s: float | None = None  # where it is not that of the kind


def foundry(model: str, gpus: int, kind: str, micro: int, batch: int, published: float, **more) -> Row:
    name = f"MPT-{model}, {gpus} GPUs" + (", 4096 tokens" if more.get("seq_length") == 4096 else "")
    return Row(name, FOUNDRY, kind, MPT[model], gpus, micro, batch, published, **more)


def megatron(
    name: str, hidden: int, layers: int, heads: int, gpus: int, pipeline: int, batch: int, mfu: float, micro=1
):
    model = gpt(hidden, layers, heads, 51200)
    more = {"tensor": 8, "pipeline": pipeline, "zero": 0, "interleaved": 3 if 1 < pipeline < 64 else 1}
    return Row(f"Megatron {name}", RECOMPUTE, "a100-80gb", model, gpus, micro, batch, mfu, **more)


ROWS = [
    foundry("125m", 8, "a100-80gb", 40, 640, 142830),
    foundry("350m", 8, "a100-80gb", 32, 512, 58782),
    foundry("1b", 8, "a100-80gb", 14, 448, 20513),
    foundry("3b", 8, "a100-80gb", 10, 160, 10811),
    foundry("7b", 8, "a100-80gb", 6, 96, 4641),
    foundry("13b", 8, "a100-80gb", 2, 48, 2262),
    foundry("30b", 8, "a100-80gb", 3, 504, 916, recomputed=1),
    foundry("70b", 64, "a100-80gb", 8, 2048, 410, recomputed=1),
    foundry("7b", 128, "a100-40gb", 18, 2304, 3623, recomputed=1),
    foundry("70b", 128, "a100-40gb", 4, 512, 376, recomputed=1),
    megatron("22B", 6144, 48, 64, 8, 1, 4, 0.415, micro=4),
    megatron("175B", 12288, 96, 96, 64, 8, 64, 0.514),
    megatron("530B", 20480, 105, 128, 280, 35, 280, 0.560),
    megatron("1T", 25600, 128, 160, 512, 64, 512, 0.563),
    Row(
        "BLOOM 176B",
        BLOOM,
        "a100-80gb",
        gpt(14336, 70, 112, 250880),
        384,
        2,
        2048,
        2048 * 2048 / 105 / 384,
        tensor=4,
        pipeline=12,
        zero=1,
        recomputed=1,
    ),
    foundry("760m", 8, "h100-80gb", 24, 384, 63147),
    foundry("1b", 8, "h100-80gb", 14, 112, 45455),
    foundry("1b", 64, "h100-80gb", 20, 1280, 44402),
    foundry("3b", 16, "h100-80gb", 10, 480, 24142),
    foundry("7b", 8, "h100-80gb", 6, 48, 10643),
    foundry("7b", 8, "h100-80gb", 16, 256, 8611, seq_length=4096, recomputed=1),
    foundry("13b", 64, "h100-80gb", 2, 128, 4800),
    foundry("30b", 32, "h100-80gb", 14, 1344, 2308, recomputed=1),
    foundry("70b", 64, "h100-80gb", 8, 2048, 1039, recomputed=1),
    Row("Llama-3.1-8B, 8 GPUs", TITAN, "h100-80gb", LLAMA_8B, 8, 2, 16, 6667, 8192, memory_gb_s=2400),
    Row("Llama-3.1-8B, 128 GPUs", TITAN, "h100-80gb", LLAMA_8B, 128, 2, 256, 6514, 8192, memory_gb_s=2400),
    Row("GPT-OSS-120B", BRIDGE, "h100-80gb", GPT_OSS_120B, 64, 4, 512, 5630, 4096, pipeline=4, expert=8, zero=1),
    Row("GPT-OSS-120B", BRIDGE, "b200-180gb", GPT_OSS_120B, 64, 4, 512, 8213, 4096, expert=8, zero=1),
    Row(
        "GPT-OSS-120B", BRIDGE, "gb200-186gb", GPT_OSS_120B, 64, 1, 1280, 15876, 8192, expert=64, zero=1, fast_domain=72
    ),
    Row(
        "Qwen3-235B-A22B",
        BRIDGE,
        "gb200-186gb",
        QWEN3_235B,
        256,
        1,
        8192,
        4916,
        4096,
        pipeline=8,
        expert=32,
        interleaved=3,
        zero=1,
        fast_domain=72,
    ),
    Row(
        "DeepSeek-V3",
        BRIDGE,
        "gb200-186gb",
        DEEPSEEK_V3,
        256,
        1,
        4096,
        3139,
        4096,
        pipeline=4,
        expert=64,
        interleaved=4,
        zero=1,
        fast_domain=72,
    ),
]


def published(row: Row) -> float:
    """Tokens a second and GPU."""
    if row.published > 1:
        return row.published
    settings = settings_of(row)
    flops = models.family(settings.family).flops_per_token(settings, row.seq_length)
    return row.published * kind_of(row.kind).bf16_tflops * 1e12 / flops


def settings_of(row: Row):
    return models.family(row.model["family"]).Settings(**row.model)


@functools.cache
def _shape(number: int):
    return shape_of(settings_of(ROWS[number]), "bf16")


def predicted(row: Row, constants: Calibration) -> float:
    """Tokens a second and GPU."""
    data = row.gpus // (row.tensor * row.pipeline)
    accumulation = max(1, row.batch // (row.micro * data))
    sizes = Sizes(row.gpus, data, row.tensor, row.pipeline, 1, row.expert, row.micro, accumulation, row.batch)
    work = Work(
        _shape(ROWS.index(row)),
        sizes,
        row.seq_length,
        zero=row.zero,
        recomputed=row.recomputed,
        interleaved=row.interleaved,
        partition="cost",
        split_head=True,
    )
    kind = kind_of(row.kind)
    if row.memory_gb_s is not None:
        kind = replace(kind, memory_gb_s=row.memory_gb_s)
    hardware = Hardware(kind.name, row.gpus, 8, row.fast_domain)
    return work.tokens / step_time(work, kind, hardware, constants).total / row.gpus


def errors(rows: list[Row], constants: Calibration) -> list[float]:
    """predicted / published - 1, of each row."""
    return [predicted(row, constants) / published(row) - 1 for row in rows]


SEARCHED = ("half_width", "expert_efficiency", "passes", "recompute_cost", "link_efficiency", "overlap")


def fit(rows: list[Row], start: Calibration) -> Calibration:
    """Constants that make the mean square of the errors smallest: each in turn a little up or down, in smaller steps."""
    values = {**{f"efficiency.{k}": v for k, v in start.efficiency.items()}}
    values |= {key: getattr(start, key) for key in SEARCHED}

    def constants() -> Calibration:
        efficiency = {key.partition(".")[2]: value for key, value in values.items() if "." in key}
        return replace(start, efficiency=efficiency, **{k: v for k, v in values.items() if "." not in k})

    def cost() -> float:
        return statistics.mean(error**2 for error in errors(rows, constants()))

    best, step = cost(), 0.3
    while step > 0.005:
        improved = False
        for key in values:
            for factor in (1 + step, 1 / (1 + step)):
                before = values[key]
                values[key] = before * factor if key in ("half_width", "passes") else min(before * factor, 0.95)
                if (now := cost()) < best - 1e-9:
                    best, improved = now, True
                else:
                    values[key] = before
        step = step if improved else step / 2
    return constants()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="search the constants again and write calibration.yaml")
    arguments = parser.parse_args(argv)
    fitted, held_out = ROWS[::2], ROWS[1::2]
    constants = calibration()
    if arguments.fit:
        constants = fit(fitted, constants)
        left = [abs(error) for error in errors(held_out, constants)]
        rounded = {
            key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(constants).items()
        }
        rounded["efficiency"] = {key: round(value, 4) for key, value in constants.efficiency.items()}
        rounded |= {"median_error": round(statistics.median(left), 3), "largest_error": round(max(left), 3)}
        rounded["source"] = f"{len(fitted)} of {len(ROWS)} published bf16 runs, benchmarks/plan_accuracy.py"
        write_text(CALIBRATION_FILE, yaml.safe_dump(rounded, sort_keys=False))
        constants = Calibration(**rounded)
    print("| run | device | layout | published | predicted | error |\n|---|---|---|---|---|---|")
    for row in ROWS:
        layout = [f"tensor {row.tensor}"] * (row.tensor > 1) + [f"pipeline {row.pipeline}"] * (row.pipeline > 1)
        layout += [f"expert {row.expert}"] * (row.expert > 1) + [f"data sharded, stage {row.zero}"] * (row.zero > 1)
        error, mark = predicted(row, constants) / published(row) - 1, "" if row in held_out else " (fitted)"
        print(
            f"| {row.name} | {row.gpus} x {row.kind} | {', '.join(layout) or 'data'} | {published(row):,.0f} | "
            f"{predicted(row, constants):,.0f} | {error:+.0%}{mark} |"
        )
    for name, rows in (("fitted", fitted), ("left out", held_out)):
        sizes = [abs(error) for error in errors(rows, constants)]
        print(f"\n{name}: {len(rows)} runs, error median {statistics.median(sizes):.0%}, largest {max(sizes):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
