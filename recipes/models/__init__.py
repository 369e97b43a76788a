"""Architectures. Each family is one module, imported without torch, that owns everything particular to it:

    Settings                 dataclass of the recipe's `model` section
    check(settings, seq_length, need)   its rules; need(condition, key, message) refuses
    hf_config(settings, seq_length)     the transformers config, which AutoModelForCausalLM builds
    parameters_by_part(settings)        {part: parameters}, tied ones counted once; the parts are decoder.PARTS
    parameter_count(settings)           their sum
    active_parameter_count(settings)    those that one token uses
    flops_per_token(settings, seq_length)  model FLOPs of forward and backward
    RESIDUAL_PROJECTIONS     endings of the names of parameters that write to the residual stream
    TENSOR_PLAN              which linear layers tensor parallelism splits, and how (decoder.TENSOR_PLAN explains)

`model.family` in the recipe names one of FAMILIES, or a module of yours as `package.module` (docs/add_a_model.md).
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from data_prep.errors import InputError

FAMILIES = {
    "llama": "recipes.models.llama",
    "qwen3": "recipes.models.qwen3",
    "qwen3_moe": "recipes.models.qwen3_moe",
    "deepseek_v3": "recipes.models.deepseek_v3",
}
INTERFACE = (
    "Settings",
    "check",
    "hf_config",
    "parameters_by_part",
    "parameter_count",
    "active_parameter_count",
    "flops_per_token",
    "RESIDUAL_PROJECTIONS",
    "TENSOR_PLAN",
)


@dataclass
class InitSettings:
    """How initial weights are drawn: every matrix, embedding, router and expert from N(0, std²), norms 1, biases 0."""

    std: float = 0.02
    scale_residual: bool = True  # divide std by sqrt(2 · layers) in the projections that write to the residual stream


def family(name: str | None, where: str = "model.family"):
    """The module of a model family. Raises InputError with the nearest known name, or what a module of yours lacks."""
    if name in FAMILIES:
        return importlib.import_module(FAMILIES[name])
    if "." in str(name):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InputError(f"{where}: model.family {name!r} can't be imported: {error}") from None
        if missing := [part for part in INTERFACE if not hasattr(module, part)]:
            raise InputError(f"{where}: model.family {name!r} lacks {', '.join(missing)}; see docs/add_a_model.md")
        return module
    close = difflib.get_close_matches(str(name), FAMILIES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known families: {', '.join(FAMILIES)}, or package.module"
    raise InputError(f"{where}: model.family {name!r} is unknown; {hint}")
