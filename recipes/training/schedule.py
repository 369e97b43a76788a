"""The learning rate as a factor of its peak (the optimizer's `lr` in the ds_config)."""

from __future__ import annotations

import math


def schedule_factor(update: int, *, total: int, warmup: int, decay: str, decay_steps: int, final_ratio: float) -> float:
    """Factor for optimizer update `update` + 1, counted from 0 (the index that torch's LambdaLR passes).

    The first update of a warm-up of W updates uses 1/W, never 0; update W uses the peak; the last update, number
    `total`, uses `final_ratio` (1 when constant).

    Args:
        total, warmup, decay_steps: in updates; decay_steps is the last part of warmup_stable_decay.
        decay: "constant", "cosine" (half a cosine, arXiv:1608.03983), "linear", "warmup_stable_decay" (arXiv:2404.06395,
            with a linear decay).
    """
    number = update + 1
    if number < warmup:
        return number / warmup
    if decay == "constant":
        return 1.0
    begin = total - decay_steps if decay == "warmup_stable_decay" else warmup
    done = min(max(number - begin, 0) / max(total - begin, 1), 1.0)
    if decay == "cosine":
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))
    return final_ratio + (1 - final_ratio) * (1 - done)


def recipe_factor(recipe):
    """The factor function of a recipe: update index from 0 -> factor of the peak rate."""
    options = {
        "total": recipe.total_steps,
        "warmup": recipe.steps_of("warmup"),
        "decay": recipe.schedule.decay,
        "decay_steps": recipe.steps_of("decay"),
        "final_ratio": recipe.schedule.final_ratio,
    }
    return lambda update: schedule_factor(update, **options)
