"""Building a model and its initial weights."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math

import torch
import torch.distributed as dist

from data_prep.errors import InputError
from recipes import models

logger = logging.getLogger("recipes")


def build_model(
    settings, seq_length: int, seed: int, zero_stage: int = 0, ds_config: dict | None = None, attention: str = "sdpa"
):
    """The transformers model of `settings` with its initial weights, partitioned as it is made under ZeRO-3.

    The weights are drawn, or under settings.init_from those of a Hugging Face checkpoint.

    Args:
        settings: the recipe's `model` section.
        seq_length: longest sequence, tokens.
        seed: of the drawn weights.
        zero_stage, ds_config: the ds_config as the engine will get it; read by zero.Init at stage 3.
        attention: transformers' name of the implementation.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM

    from recipes.models.hf_weights import SourceWeights

    family = models.family(settings.family)
    source = None if settings.init_from is None else SourceWeights.open(settings, seq_length)
    config = family.hf_config(settings, seq_length)
    context = deepspeed.zero.Init(config_dict_or_path=ds_config) if zero_stage == 3 else contextlib.nullcontext()
    with context:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if zero_stage == 3:
        make_rotary_tables_again(model)
    expected = family.parameter_count(settings)
    counted = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    assert counted == expected, f"{settings.family}: built {counted} parameters, parameter_count says {expected}"
    parameters = dict(model.named_parameters())
    if source is None:
        initialize_weights(parameters, settings, seed)
    else:
        tensors = {**parameters, **persistent_buffers(model)}
        padded = source.check({name: full_shape(tensor) for name, tensor in tensors.items()}, model)
        initialize_weights({name: parameters[name] for name in padded}, settings, seed)
        source.load(tensors)
    return model


def make_rotary_tables_again(model) -> None:
    """Give a model made under zero.Init the rotary tables that it has at every other stage.

    DeepSpeed 0.19.8 makes every tensor there in the weights' low precision: rounded to bf16 the tables turn position 8191
    by up to 15 radians too far.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "inv_freq"):
                setattr(parent, name, type(child)(child.config).to(child.inv_freq.device))


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of the whole, which a ZeRO-3 shard does not have itself."""
    return getattr(tensor, "ds_shape", tensor.shape)


def persistent_buffers(model) -> dict[str, torch.Tensor]:
    """{name: buffer} of the buffers that belong to the model's state, such as DeepSeek-V3's routing bias."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


@torch.no_grad()
def initialize_weights(parameters: dict[str, torch.nn.Parameter], settings, seed: int) -> None:
    """Draw parameters from generators seeded by (seed, parameter name): the same weights in every layout.

    This replaces transformers' own initialization, which depends on the order in which modules are made and which
    under deepspeed.zero.Init does not happen at all (embeddings keep torch's std of 1.0).

    Args:
        parameters: by their names in the transformers model, whatever the layout calls them.
    """
    import deepspeed

    named = list(parameters.items())
    # Whole parameters every rank draws for itself. ZeRO-3 shards are drawn by one rank each, as many at a time as
    # there are ranks, and spread by it.
    partitioned = any(hasattr(parameter, "ds_id") for parameter in parameters.values())
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if partitioned else (0, 1)
    for begin in range(0, len(named), ranks):
        block = named[begin : begin + ranks]
        if rank < len(block):
            name, parameter = block[rank]
            mine = initial_values(name, full_shape(parameter), settings, seed)
        for owner, (_, parameter) in enumerate(block):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=owner, enabled=partitioned):
                if owner == rank:
                    parameter.copy_(mine)


def initial_values(name: str, shape: torch.Size, settings, seed: int) -> torch.Tensor:
    """Initial values of one parameter, by the rule of models.InitSettings.

    They are drawn on the CPU in fp32: a GPU's stream would depend on its kind, and bf16's on rounding. Experts, stacked
    along the first dimension, are drawn one by one, so that a part of them can be drawn without the others.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = settings.init.std
    if settings.init.scale_residual and name.endswith(models.family(settings.family).RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * settings.num_hidden_layers)
    values = torch.empty(shape)
    parts = [(name, values)] if len(shape) == 2 else [(f"{name}/{n}", value) for n, value in enumerate(values)]
    for part, value in parts:
        value.normal_(0.0, std, generator=torch.Generator().manual_seed(_name_seed(seed, part)))
    return values


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
        plain = len(full_shape(parameter)) < 2 or name in no_decay_modules
        groups["no_decay" if plain else "decay"]["params"].append(parameter)
    groups = [group for group in groups.values() if group["params"]]
    if not groups:
        raise InputError("the model has no trainable parameter")
    return groups
