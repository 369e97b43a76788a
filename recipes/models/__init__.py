"""Architectures. Each family is one module, imported without torch, that owns everything particular to it:

    Settings                 dataclass of the recipe's `model` section
    check(settings, seq_length, need)   its rules; need(condition, key, message) refuses
    hf_config(settings, seq_length)     the transformers config
    parameter_count(settings)           total parameters, tied ones counted once
    flops_per_token(settings, seq_length)  model FLOPs of forward and backward

`model.family` in the recipe names the module.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from data_prep.errors import InputError

FAMILIES = {"llama": "recipes.models.llama"}


@dataclass
class InitSettings:
    """How initial weights are drawn: every matrix and embedding from N(0, std²), norms 1, biases 0."""

    std: float = 0.02
    scale_residual: bool = True  # divide std by sqrt(2 · layers) in the projections that write to the residual stream


def family(name: str | None, where: str = "model.family"):
    """The module of a model family. Raises InputError with the nearest known name."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(str(name), FAMILIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known families: {', '.join(FAMILIES)}"
        raise InputError(f"{where}: model.family {name!r} is unknown; {hint}")
    return importlib.import_module(FAMILIES[name])
