"""The DeepSpeed engine of a recipe: model, parameter groups, optimizer of the ds_config, schedule of the recipe."""

from __future__ import annotations

import copy
import re
from functools import partial

import deepspeed
import torch
from deepspeed.utils import groups
from torch.utils.checkpoint import checkpoint

from data_prep.errors import InputError
from recipes import models
from recipes.models.build import build_model, parameter_groups
from recipes.training.ds_config import engine_config, precision, zero_stage
from recipes.training.losses import attach_loss
from recipes.training.schedule import recipe_factor
from recipes.training.step import guard_stage_0


def build_engine(prepared):
    """Returns the engine, its weights drawn from the recipe's seed or loaded from model.init_from."""
    recipe, sizes = prepared.recipe, prepared.sizes
    config = engine_config(prepared.ds_config, sizes)
    stage = zero_stage(config)
    if sizes.tensor > 1:
        config["tensor_parallel"].setdefault("partition_config", tensor_partition(recipe.model.family))
    try:
        model = build_model(recipe.model, recipe.data.seq_length, recipe.seed, stage, config, recipe.compute.attention)
    except ImportError as error:  # of an attention implementation
        raise InputError(f"compute.attention {recipe.compute.attention}: {' '.join(str(error).split())}") from None
    attach_loss(model, recipe.model, recipe.loss)
    recompute_activations(model.model.layers, recipe.compute.activation_checkpoint_interval)
    weight_decay = config["optimizer"].get("params", {}).get("weight_decay", 0.0)
    factor = recipe_factor(recipe)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, weight_decay),
        config=copy.deepcopy(config),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        mpu=_sequence_parallel(model, recipe, sizes),
        dist_init_required=False,
    )
    if stage == 0 and precision(config) == "fp32":
        guard_stage_0(engine, groups.get_tensor_model_parallel_group() if sizes.tensor > 1 else None)
    elif stage == 0:
        forget_empty_step(engine)
    if recipe.compute.compile:
        for block in model.model.layers:
            block.compile()
    return engine


def forget_empty_step(engine) -> None:
    """Let the optimizer's first step be its first.

    Without ZeRO in bf16 or fp16, DeepSpeed 0.19.8 allocates the optimizer's states by a step with zero gradients, which
    Adam counts: its bias correction then made the first update of a run a quarter too small.
    """
    optimizer = engine.optimizer.optimizer
    for values in [*optimizer.state.values(), *optimizer.param_groups]:  # DeepSpeed's FusedAdam counts by group
        if "step" in values:
            values["step"] = torch.zeros_like(values["step"]) if torch.is_tensor(values["step"]) else 0


def tensor_partition(family: str) -> dict:
    """The family's TENSOR_PLAN as AutoTP's partition_config; embedding and head stay whole on each rank.

    Left to itself, DeepSpeed 0.19.8 follows the plan in the transformers config: it refuses those of the families with
    experts, and makes a tied head return a part of the logits.
    """
    plan = models.family(family).TENSOR_PLAN
    kinds = {
        "column": {"partition_type": "column"},
        "row": {"partition_type": "row"},
        "summed": {"partition_type": "skip", "grad_allreduce": True},
    }
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [rf".*\.{re.escape(name)}\.weight$" for name in plan[kind]], **options}
            for kind, options in kinds.items()
            if plan[kind]
        ],
    }


def recompute_activations(blocks, interval: int) -> None:
    """Keep only the input of every `interval`-th block for backward, which computes the block again; 0: of none.

    Args:
        blocks: transformers' decoder layers, which know how.
    """
    for block in blocks:
        block.gradient_checkpointing = interval > 0 and block.self_attn.layer_idx % interval == 0
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def _sequence_parallel(model, recipe, sizes):
    if sizes.sequence == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=recipe.compute.attention,
        sequence_parallel_size=sizes.sequence,
        micro_batch_size=sizes.micro_batch,
        seq_length=recipe.data.seq_length,
        seq_length_is_variable=False,
    )
