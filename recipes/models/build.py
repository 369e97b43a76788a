"""Building a model and its initial weights."""

from __future__ import annotations

import hashlib
import math

import torch

from data_prep.errors import InputError
from recipes import models


def build_model(settings, seq_length: int, seed: int, zero_stage: int = 0, ds_config: dict | None = None):
    """The transformers model of `settings` with its initial weights drawn, partitioned as it is made under ZeRO-3.

    Args:
        settings: the recipe's `model` section.
        seq_length: longest sequence, tokens.
        seed: of the initial weights.
        zero_stage, ds_config: the ds_config as the engine will get it; read by zero.Init at stage 3.
    """
    import contextlib

    import deepspeed
    from transformers import AutoModelForCausalLM

    config = models.family(settings.family).hf_config(settings, seq_length)
    context = deepspeed.zero.Init(config_dict_or_path=ds_config) if zero_stage == 3 else contextlib.nullcontext()
    with context:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    initialize_weights(model, settings, seed)
    expected = models.family(settings.family).parameter_count(settings)
    counted = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    assert counted == expected, f"{settings.family}: built {counted} parameters, parameter_count says {expected}"
    return model


@torch.no_grad()
def initialize_weights(model, settings, seed: int) -> None:
    """Draw every parameter from a generator seeded by (seed, parameter name): the same weights in every layout.

    This replaces transformers' own initialization, which depends on the order in which modules are made and which
    under deepspeed.zero.Init does not happen at all (embeddings keep torch's std of 1.0).
    """
    import deepspeed

    residual = models.family(settings.family).RESIDUAL_PROJECTIONS
    for name, parameter in model.named_parameters():
        # At stage 3 the parameter is a shard: gathered here, written by rank 0 and broadcast on leaving.
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
            if partitioned and torch.distributed.get_rank() != 0:
                continue
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = settings.init.std
                if settings.init.scale_residual and name.endswith(residual):
                    std /= math.sqrt(2 * settings.num_hidden_layers)
                # Drawn on the CPU in fp32: a GPU's stream would depend on its kind, and bf16's on rounding.
                values = torch.empty(parameter.shape, dtype=torch.float32)
                values.normal_(0.0, std, generator=torch.Generator().manual_seed(_name_seed(seed, name)))
                parameter.copy_(values)


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def parameter_groups(model, weight_decay: float) -> list[dict]:
    """Optimizer groups: matrices decay; embeddings, norm gains and biases do not. Tied parameters appear once.

    Each group carries `name`: AutoEP looks it up, and DeepSpeed logs it.
    """
    no_decay_modules = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    groups = {
        "decay": {"name": "decay", "params": [], "weight_decay": weight_decay},
        "no_decay": {"name": "no_decay", "params": [], "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # ZeRO-3 shards are flat; ds_shape is the shape of the whole.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        plain = len(shape) < 2 or name in no_decay_modules
        groups["no_decay" if plain else "decay"]["params"].append(parameter)
    groups = [group for group in groups.values() if group["params"]]
    if not groups:
        raise InputError("the model has no trainable parameter")
    return groups
