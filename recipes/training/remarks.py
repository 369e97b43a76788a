"""What a run that may start should still be told: warnings (likely a mistake) and notes (worth knowing). Needs no torch."""

from __future__ import annotations

import shutil

from recipes.training.ds_config import precision, zero_stage
from recipes.training.settings import Recipe
from recipes.training.sizes import Sizes

LONG_WARMUP = 0.5  # of the run
LARGE_BUBBLE = 0.1  # of the step


def remarks(recipe: Recipe, config: dict, sizes: Sizes | None) -> list[str]:
    """Lines that begin with "warning: " or "note: ", warnings first."""
    warnings, notes = [], []
    stage, low = zero_stage(config), precision(config)
    accumulation = None if sizes is None else sizes.accumulation
    if low != "fp32" and config.get("data_types", {}).get("grad_accum_dtype") != "fp32" and accumulation != 1:
        warnings.append(
            f"data_types.grad_accum_dtype: gradients of {accumulation or 'several'} micro batches are added up in {low}, which "
            "loses small ones; state fp32"
        )
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if offload != "none" and not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        warnings.append(
            "zero_optimization.offload_optimizer: DeepSpeed's CPU Adam is compiled at the start, and this machine has no C++ "
            "compiler; install g++ where the run starts"
        )
    warmup, total = recipe.steps_of("warmup"), recipe.total_steps
    if warmup > LONG_WARMUP * total:
        warnings.append(f"schedule: the warm-up is {warmup:,} of {total:,} steps")
    if recipe.pipeline.stages is not None:
        stages, layers = recipe.pipeline.stages, recipe.model.num_hidden_layers
        if layers % stages:
            notes.append(
                f"pipeline.stages: {layers} layers on {stages} stages are {layers % stages} stages of "
                f"{layers // stages + 1} and {stages - layers % stages} of {layers // stages}, less what embedding and head weigh"
            )
        if accumulation is not None and stages > 1:
            idle = (stages - 1) / (accumulation + stages - 1)
            line = f"pipeline.stages: {stages} stages and {accumulation} micro batches leave each device idle {idle:.0%} of a step"
            if accumulation < stages:
                warnings.append(
                    f"{line}; use a smaller micro batch, a larger global_batch_size or fewer data-parallel ranks"
                )
            elif idle > LARGE_BUBBLE:
                notes.append(line)
    unused = [key for key in config.get("zero_optimization", {}) if key.startswith("stage3_") and stage != 3]
    if unused:
        notes.append(f"zero_optimization.{unused[0]}: is for stage 3 and unused at stage {stage}")
    if config["gradient_clipping"] == 0:
        notes.append("gradient_clipping: is off")
    if recipe.model.vocab_size % 64:
        notes.append(
            f"model.vocab_size: {recipe.model.vocab_size} is no multiple of 64; GPUs multiply padded sizes faster "
            f"({-(-recipe.model.vocab_size // 64) * 64})"
        )
    return [f"warning: {line}" for line in warnings] + [f"note: {line}" for line in notes]
