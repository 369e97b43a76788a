"""The DeepSpeed engine of a recipe: model, parameter groups, optimizer of the ds_config, schedule of the recipe."""

from __future__ import annotations

import copy

import deepspeed
import torch

from recipes.models.build import build_model, parameter_groups
from recipes.training.ds_config import engine_config, precision, zero_stage
from recipes.training.schedule import recipe_factor
from recipes.training.step import guard_stage_0


def build_engine(prepared):
    """Returns the engine, its weights drawn from the recipe's seed."""
    recipe = prepared.recipe
    config = engine_config(prepared.ds_config, prepared.sizes)
    stage = zero_stage(config)
    model = build_model(recipe.model, recipe.data.seq_length, recipe.seed, stage, config)
    weight_decay = config["optimizer"].get("params", {}).get("weight_decay", 0.0)
    factor = recipe_factor(recipe)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, weight_decay),
        config=copy.deepcopy(config),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        dist_init_required=False,
    )
    if stage == 0 and precision(config) == "fp32":
        guard_stage_0(engine)
    return engine
