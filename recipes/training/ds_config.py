"""The ds_config JSON: read as DeepSpeed reads it, overridden, and what it says. Needs no torch.

ds_config_rules.py checks it; ds_config_keys.py has the names.
"""

from __future__ import annotations

import copy
from pathlib import Path

import hjson

from data_prep.errors import InputError
from recipes.training.recipe_file import parse_value
from recipes.training.sizes import ACCUMULATION, BATCH, MICRO, Sizes

OWN_ENGINES = ("checkpoint", "datastates_ckpt")  # sections that select one of DeepSpeed's checkpoint engines


def load_ds_config(path: str | Path, overrides: list[str] = ()) -> dict:
    """Read the JSON (hjson, duplicate keys refused, as in DeepSpeed) and apply KEY.PATH=VALUE overrides."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"ds_config {path} does not exist; see deepspeed_config in the recipe")
    try:
        config = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or not config:
        raise InputError(f"{path}: the file holds no JSON object")
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, last = key.split(".")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise InputError(f"override ds.{override}: {section} is a value in {path}, not a section")
        target[last] = parse_value(value)
    return config


def parallel_sizes(config: dict, pipeline) -> dict[str, int]:
    """Ranks of each kind, as `resolve_sizes` takes them, from the JSON and the recipe's pipeline section."""
    staged, expert = pipeline.stages is not None, config.get("expert_parallel", {})
    tensor = pipeline.tensor_parallel_size if staged else config.get("tensor_parallel", {}).get("autotp_size") or 1
    return {
        "tensor": tensor,
        "pipeline": pipeline.stages if staged else 1,
        "sequence": config.get("sequence_parallel_size", 1),
        "expert": expert.get("autoep_size", 1) if expert.get("enabled") else 1,
    }


def selects_own_engine(config: dict) -> bool:
    """Whether one of DeepSpeed's own engines is to write checkpoints, not recipes/training/async_checkpoint.py."""
    return any(key in config for key in OWN_ENGINES)


def engine_config(config: dict, sizes: Sizes) -> dict:
    """The dict that the engine is given: the user's, with the batch keys alone rewritten.

    train_batch_size is left out: with tensor parallelism DeepSpeed counts the tensor ranks in it.
    """
    config = copy.deepcopy(config)
    config.pop(BATCH, None)
    config.pop("sequence_parallel_size", None)  # the engine learns it from the groups that Ulysses makes
    config[MICRO], config[ACCUMULATION] = sizes.micro_batch, sizes.accumulation
    return config


def zero_stage(config: dict) -> int:
    return config.get("zero_optimization", {}).get("stage", 0)


def optimizer_states(config: dict) -> int:
    """fp32 values that the optimizer keeps for a parameter, a master weight not counted."""
    states = {"lion": 1, "adagrad": 1, "muon": 1, "sgd": 0}
    return states.get(config["optimizer"]["type"].lower(), 2)


def precision(config: dict) -> str:
    """ "bf16", "fp16" or "fp32": what the weights in the forward pass are."""
    if is_enabled(config, "fp16"):
        return "fp16"
    return "bf16" if is_enabled(config, "bf16") or is_enabled(config, "bfloat16") else "fp32"


def is_enabled(config: dict, key: str) -> bool:
    return bool(config.get(key, {}).get("enabled", False))


def _no_duplicates(pairs) -> dict:
    values: dict = {}
    for key, value in pairs:
        if key in values:
            raise InputError(f"key {key!r} stands twice in one section; keep one")
        values[key] = value
    return values
