"""Prove on your own devices that a recipe's layout trains what one process would: a shrunken copy against plain torch.

    python -m launch.prove R.yaml [--deepspeed_config C.json] [--device cpu|cuda] [--dtype fp32|bf16] [KEY=VALUE ...]

The model is made small (layers, width, experts, vocabulary); family, optimizer, clipping, ZeRO stage, offload and the kinds of
parallelism stay, each of these at size 2. Layouts are walked from one process to all kinds together; the first whose loss,
gradient norm or weights leave those of plain torch ends the walk with exit code 1.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from data_prep.errors import InputError, run_command
from launch.check import take_recipe
from recipes.training.ds_config import load_ds_config, parallel_sizes, zero_stage
from recipes.training.recipe_file import effective_yaml, load_recipe, recipe_parser
from recipes.training.settings import REPOSITORY

STEPS = 4
SMALL_EPS, LARGEST_RATE = 1e-4, 1e-3
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
KINDS = ("tensor", "sequence", "expert", "pipeline")


def walk(kinds: list[str]) -> list[tuple[str, ...]]:
    """Layouts in the order they are tried: one process, data, each kind, pairs, all; "data" is two data-parallel ranks."""
    axes = ["data", *kinds]
    sets = [(), *((axis,) for axis in axes), *itertools.combinations(axes, 2), tuple(axes)]
    # Experts are spread over data-parallel ranks: without a second one there is nothing to spread.
    tried = dict.fromkeys(layout for layout in sets if "expert" not in layout or len(layout) == 1 or "data" in layout)
    return sorted(tried, key=lambda layout: (ranks_of(layout), len(layout)))


def ranks_of(layout: tuple[str, ...]) -> int:
    kinds = set(layout) - {"expert"}
    return 2 ** len(kinds | ({"data"} if "expert" in layout else set()))


def small_model(model: dict, kinds: list[str]) -> dict:
    """The recipe's `model` section at a size of seconds, whose heads, widths and experts every layout divides."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if "sequence" in kinds else 2}
    if model.get("num_attention_heads") == model.get("num_key_value_heads"):
        heads["num_key_value_heads"] = 4
    sizes = {
        **heads,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    }
    small = {key: sizes[key] if key in sizes and value is not None else value for key, value in model.items()}
    for key in ("n_group", "topk_group"):
        if model.get(key) == 1:
            small[key] = 1
    if model.get("head_dim") is not None:
        small["head_dim"] = 16
    if model.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    return {**small, "attention_dropout": 0.0, "init_from": None}


def write_copy(recipe, config: dict, layout: tuple[str, ...], kinds: list[str], device: str, dtype: str, folder: Path):
    """Write the small recipe and ds_config of one layout; returns the recipe's path."""
    copy = yaml.safe_load(effective_yaml(recipe))
    copy["model"] = small_model(copy["model"], kinds)
    ranks = 2 ** (len(kinds) + 1)
    copy.update(
        name="prove",
        output_dir=str(folder),
        global_batch_size=2 * ranks,
        deepspeed_config=str(folder / f"{'_'.join(layout) or 'single'}.json"),
        validation={"every_steps": None, "samples": 1},
        schedule={"steps": 100, "warmup_steps": 2, "decay": "constant"},
    )
    copy["data"].update(
        files="synthetic", validation_files=None, tokenizer=None, phases=None, order="epoch", seq_length=32,
        max_epochs=None, document_mask="none", cache_dir=None,
    )  # fmt: skip
    copy["monitor"].update(tensorboard=False)
    uses_pipeline = recipe.pipeline.stages is not None
    copy["pipeline"].update(
        stages=(2 if "pipeline" in layout else 1) if uses_pipeline else None,
        tensor_parallel_size=2 if uses_pipeline and "tensor" in layout else 1,
    )
    config = json.loads(json.dumps(config))
    for key in ("train_batch_size", "gradient_accumulation_steps", "tensor_parallel", "sequence_parallel_size"):
        config.pop(key, None)
    config["train_micro_batch_size_per_gpu"] = 1
    for key in ("bf16", "bfloat16", "fp16"):
        config.pop(key, None)
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if "tensor" in layout and not uses_pipeline:
        config["tensor_parallel"] = {"autotp_size": 2}
    if "sequence" in layout:
        config["sequence_parallel_size"] = 2
    experts = config.pop("expert_parallel", None)
    if experts is not None and "expert" in layout:
        config["expert_parallel"] = {**experts, "autoep_size": 2}
        if device == "cpu":
            config["expert_parallel"]["use_grouped_mm"] = False
    params = config["optimizer"].setdefault("params", {})
    if config["optimizer"]["type"].lower() != "sgd":
        # Adam divides by a gradient's own size: with the usual 1e-8 a gradient that is nothing but rounding moves its weight as
        # far as any other, and two right layouts drift apart. A larger term also shows a wrong gradient scale.
        params["eps"] = max(params.get("eps", 0.0), SMALL_EPS)
        # and in steps so large that the loss is steep, bf16's rounding alone changes the gradient norm by a tenth
        params["lr"] = min(params.get("lr", LARGEST_RATE), LARGEST_RATE)
        if device == "cpu":  # nothing is compiled
            params["torch_adam"] = True
    if device == "cpu":
        config["zero_force_ds_cpu_optimizer"] = False
    Path(copy["deepspeed_config"]).write_text(json.dumps(config))
    path = folder / f"{'_'.join(layout) or 'single'}.yaml"
    path.write_text(yaml.safe_dump(copy))
    return path


def run_cases(cases: list[dict], ranks: int, device: str, folder: Path) -> dict:
    """Results of launch/prove_ranks.py by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    output = folder / f"results_{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    command += [str(REPOSITORY / "launch" / "prove_ranks.py"), str(folder / "cases.json"), str(output)]
    finished = subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": device}, capture_output=True, text=True)
    if not output.exists():
        tail = "\n".join((finished.stdout + finished.stderr).strip().splitlines()[-15:])
        raise InputError(f"{ranks} ranks could not be run:\n{tail}")
    return json.loads(output.read_text())


def first_difference(ours: dict, plain: dict, tolerance: float, bitwise: bool = True) -> str | None:
    """Where a layout leaves plain torch: the step, and the parameters that left it first; None where nowhere.

    Args:
        bitwise: whether ranks must hold the same weights to the last bit where they hold the same ones.
    """
    if "error" in ours:
        return ours["error"]
    wrong = [name for name, value in plain["initial_weights"].items() if ours["initial_weights"].get(name) != value]
    if wrong:
        return f"before step 1: other initial weights in {_named(wrong)}"
    for step in range(STEPS):
        found = []
        for key in ("loss", "grad_norm"):
            here, there = ours[key][step], plain[key][step]
            if not math.isclose(here, there, rel_tol=tolerance):
                found.append(f"{key} {here:.6g} instead of {there:.6g}")
        moved = plain["moved"][step]
        scale = max(moved.values())
        wrong = [name for name in moved if abs(ours["moved"][step][name] - moved[name]) > 10 * tolerance * scale]
        if found or wrong:
            where = f"; weights moved otherwise in {_named(wrong)}" if wrong else ""
            return f"step {step + 1}: {', '.join(found) or 'loss and gradient norm agree'}{where}"
    if bitwise and ours["apart"]:
        return f"after step {STEPS}: ranks hold other values of the same weights in {_named(ours['apart'])}"
    return None


def _named(names: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(part_of(name), []).append(name)
    return "; ".join(f"{part} ({members[0]}{', ...' if len(members) > 1 else ''})" for part, members in groups.items())


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, by its name."""
    for part, marks in (
        ("experts", (".experts.",)),
        ("shared experts", (".shared_experts.",)),
        ("router", (".mlp.gate.",)),
        ("norms", ("norm",)),
        ("attention", (".self_attn.",)),
        ("feed-forward", (".mlp.",)),
        ("embedding", ("embed_tokens",)),
    ):
        if any(mark in name for mark in marks):
            return part
    return "head"


def devices_here(device: str) -> int | None:
    """How many devices there are; None for no bound."""
    if device == "cpu":
        return None
    import torch

    return torch.accelerator.device_count()


def main(argv: list[str] | None = None) -> int:
    usage = "python -m launch.prove [options] R.yaml [KEY=VALUE ...]"
    parser = recipe_parser(__doc__.splitlines()[0], prog="python -m launch.prove", usage=usage)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    arguments = parser.parse_intermixed_args(argv)
    take_recipe(arguments, usage)
    recipe, overrides = load_recipe(arguments.recipe, arguments.overrides, arguments.deepspeed_config)
    config = load_ds_config(recipe.deepspeed_config, overrides)
    if (kind := config["optimizer"]["type"]).lower() not in ("adam", "adamw", "sgd"):
        raise InputError(
            f"optimizer.type {kind}: plain torch here knows Adam, AdamW and SGD; prove with ds.optimizer.type=AdamW"
        )
    sizes = parallel_sizes(config, recipe.pipeline)
    kinds = [kind for kind in KINDS if sizes[kind] > 1]
    layouts, here = walk(kinds), devices_here(arguments.device)
    print(
        f"{recipe.name}: {recipe.model.family} with ZeRO {zero_stage(config)}, {arguments.dtype} on {arguments.device}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copies = {}
        for layout in layouts:
            path = write_copy(recipe, config, layout, kinds, arguments.device, arguments.dtype, folder)
            copies[layout] = {"name": " x ".join(layout) or "one process", "recipe": str(path), "overrides": [],
                              "steps": STEPS, "moved": True}  # fmt: skip
        plain = run_cases([{**copies[()], "plain": True, "name": "plain torch"}], 1, arguments.device, folder)
        plain = plain["plain torch"]
        if "error" in plain:
            raise InputError(f"plain torch: {plain['error']}")
        for ranks, group in itertools.groupby(layouts, ranks_of):
            cases = [copies[layout] for layout in group]
            if here is not None and ranks > here:
                print(f"not tried, {ranks} devices wanted, {here} here: {', '.join(case['name'] for case in cases)}")
                continue
            results = run_cases(cases, ranks, arguments.device, folder)
            for case in cases:
                error = results[case["name"]].get("error", "")
                if error.startswith(f"{InputError.__name__}: "):
                    raise InputError(f"{case['name']}: {error.removeprefix(f'{InputError.__name__}: ')}")
                bitwise = arguments.device == "cpu"  # a GPU adds up an embedding's gradient in any order
                difference = first_difference(results[case["name"]], plain, TOLERANCE[arguments.dtype], bitwise)
                print(
                    f"{ranks} rank{'s' if ranks > 1 else ' '}  {case['name']:<32} {difference or 'equal'}", flush=True
                )
                if difference:
                    print(f"{case['name']} does not train what one process would", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
