"""Rules that need nothing but the recipe."""

from __future__ import annotations

import re

from data_prep.errors import InputError
from data_prep.token_file import is_url
from recipes import models
from recipes.training.settings import SYNTHETIC, PipelineSettings, Recipe

LAYERS = ("Embedding", "Block", "FinalNorm", "Head")  # classes of recipes/models/pipeline.py


def check_recipe(recipe: Recipe, where) -> None:
    """Rules that need nothing but the recipe. `where(key)` names the place of a key. Raises InputError."""

    def need(condition: bool, key: str, message: str) -> None:
        if not condition:
            raise InputError(f"{where(key)}: {key} {message}")

    need(
        "/" not in recipe.name and recipe.name not in ("", ".", ".."),
        "name",
        f"{recipe.name!r} must be a plain directory name",
    )
    need(0 <= recipe.seed < 2**32, "seed", f"{recipe.seed} must lie in 0 .. 2^32 - 1")
    need(recipe.global_batch_size > 0, "global_batch_size", f"{recipe.global_batch_size} must be positive")
    need(recipe.data.seq_length > 0, "data.seq_length", f"{recipe.data.seq_length} must be positive")
    need(recipe.data.order in ("epoch", "megatron"), "data.order", f"{recipe.data.order!r} must be epoch or megatron")
    need(
        recipe.data.document_mask in ("none", "attention"),
        "data.document_mask",
        f"{recipe.data.document_mask!r} must be none or attention",
    )
    attentions = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager")
    need(
        recipe.compute.attention in attentions,
        "compute.attention",
        f"{recipe.compute.attention!r} must be one of {', '.join(attentions)}",
    )
    interval = recipe.compute.activation_checkpoint_interval
    need(interval >= 0, "compute.activation_checkpoint_interval", f"{interval} must be 0 (off) or positive")
    need(recipe.loss.z_loss >= 0, "loss.z_loss", f"{recipe.loss.z_loss:g} must not be negative")
    check_pipeline(recipe, need)
    if recipe.data.phases:
        need(recipe.data.order == "epoch", "data.phases", "needs data.order=epoch: Megatron's order has no phases")
        need(recipe.data.files != SYNTHETIC, "data.phases", f"needs token files, not {SYNTHETIC}")
    need(recipe.data.prefetch_steps > 0, "data.prefetch_steps", f"{recipe.data.prefetch_steps} must be positive")
    shapes = ("constant", "cosine", "linear", "warmup_stable_decay")
    need(
        recipe.schedule.decay in shapes,
        "schedule.decay",
        f"{recipe.schedule.decay!r} must be one of {', '.join(shapes)}",
    )
    need(
        0 <= recipe.schedule.final_ratio <= 1,
        "schedule.final_ratio",
        f"{recipe.schedule.final_ratio:g} must lie in 0 .. 1",
    )
    total, warmup, decay = (recipe.steps_of(name) for name in ("steps", "warmup", "decay"))
    need(
        recipe.schedule.tokens is None or recipe.schedule.tokens >= recipe.tokens_per_step,
        "schedule.tokens",
        f"{recipe.schedule.tokens} are fewer than one batch, {recipe.tokens_per_step} = global_batch_size x data.seq_length",
    )
    need(total > 0, "schedule.steps", "(or schedule.tokens) must be given and positive: how long is the run?")
    need(
        0 <= warmup <= total,
        "schedule.warmup_steps",
        f"is {warmup} steps, the whole run {total}: shorten the warm-up or lengthen the run",
    )
    if recipe.schedule.decay == "warmup_stable_decay":
        need(
            0 < decay <= total - warmup,
            "schedule.decay_steps",
            f"is {decay} steps; it must lie in 1 .. {total - warmup} (run {total} less warm-up {warmup})",
        )
    else:
        need(decay == 0, "schedule.decay_steps", "belongs to schedule.decay=warmup_stable_decay")
    for key, value in (
        ("data.max_epochs", recipe.data.max_epochs),
        ("data.cache_limit_gib", recipe.data.cache_limit_gib),
        ("loss.chunk_tokens", recipe.loss.chunk_tokens),
        ("schedule.warmup_tokens", recipe.schedule.warmup_tokens or None),
        ("monitor.peak_tflops", recipe.monitor.peak_tflops),
        ("validation.every_steps", recipe.validation.every_steps),
        ("validation.samples", recipe.validation.samples),
        ("checkpoint.every_steps", recipe.checkpoint.every_steps),
        ("checkpoint.every_minutes", recipe.checkpoint.every_minutes),
        ("checkpoint.light_every_steps", recipe.checkpoint.light_every_steps),
        ("checkpoint.keep_last", recipe.checkpoint.keep_last),
        ("checkpoint.keep_every", recipe.checkpoint.keep_every),
        ("checkpoint.host_memory_gib", recipe.checkpoint.host_memory_gib),
        ("monitor.log_every_steps", recipe.monitor.log_every_steps),
        ("guards.max_skipped_in_a_row", recipe.guards.max_skipped_in_a_row),
        ("guards.watchdog_s", recipe.guards.watchdog_s),
        ("guards.replica_check_every", recipe.guards.replica_check_every),
        ("guards.spike_window", recipe.guards.spike_window),
        ("guards.spike_threshold", recipe.guards.spike_threshold),
        ("guards.max_rollbacks", recipe.guards.max_rollbacks),
    ):
        need(value is None or value > 0, key, f"{value} must be positive")
    if recipe.data.validation_files == SYNTHETIC:
        need(recipe.validation.samples is not None, "validation.samples", "must be a number: synthetic data has no end")
    resume = recipe.checkpoint.resume
    need(
        resume in ("latest", "none") or (resume.isascii() and resume.isdecimal()),
        "checkpoint.resume",
        f"{resume!r} must be latest, none or a step number",
    )
    spike = recipe.guards.spike
    need(
        spike in (None, "warn", "skip_step", "rollback"),
        "guards.spike",
        f"{spike!r} must be warn, skip_step, rollback or null",
    )
    need(
        spike != "skip_step" or recipe.pipeline.stages is None,
        "guards.spike",
        "skip_step needs a step whose loss is known before its update, which a pipeline's is not: use rollback",
    )
    need(
        spike != "rollback" or recipe.data.order == "epoch",
        "guards.spike",
        "rollback needs data.order=epoch: Megatron's order has no samples in place of the skipped ones",
    )
    start, branch = recipe.checkpoint.start_from, recipe.checkpoint.branch_from
    need(
        start is None or branch is None, "checkpoint.start_from", "and checkpoint.branch_from are both given; keep one"
    )
    need(
        start is None or recipe.model.init_from is None,
        "checkpoint.start_from",
        "and model.init_from both say where the weights come from; keep one",
    )
    upload = recipe.checkpoint.upload
    a_url = upload is None or is_url(upload) and upload.rstrip("/").partition("://")[2]
    need(a_url, "checkpoint.upload", f"{upload!r} must be a URL, such as s3://bucket/runs")
    keep_every, every = recipe.checkpoint.keep_every, recipe.checkpoint.every_steps
    need(
        keep_every is None or every is not None and keep_every % every == 0,
        "checkpoint.keep_every",
        f"{keep_every} must be a multiple of checkpoint.every_steps {every}: other steps are not saved",
    )
    models.family(recipe.model.family).check(recipe.model, recipe.data.seq_length, need)


def _names_layers(partition: str) -> bool:
    """Whether it is type:REGEX, and the expression finds a class of recipes/models/pipeline.py, as DeepSpeed looks."""
    kind, _, expression = partition.partition(":")
    try:
        return kind == "type" and any(re.search(expression, name, re.IGNORECASE) for name in LAYERS)
    except re.error:
        return False


def check_pipeline(recipe: Recipe, need) -> None:
    pipeline = recipe.pipeline
    if pipeline.stages is None:
        for key in ("tensor_parallel_size", "partition"):
            default = getattr(PipelineSettings, key)
            need(
                getattr(pipeline, key) == default,
                f"pipeline.{key}",
                "needs pipeline.stages; without stages the tensor size is tensor_parallel.autotp_size in the ds_config",
            )
        return
    need(pipeline.stages > 0, "pipeline.stages", f"{pipeline.stages} must be positive")
    layers = recipe.model.num_hidden_layers
    need(
        pipeline.stages <= layers,
        "pipeline.stages",
        f"{pipeline.stages} stages are more than the model's {layers} layers",
    )
    need(
        pipeline.tensor_parallel_size > 0,
        "pipeline.tensor_parallel_size",
        f"{pipeline.tensor_parallel_size} must be positive",
    )
    need(
        pipeline.partition in ("parameters", "uniform", "cost") or _names_layers(pipeline.partition),
        "pipeline.partition",
        f"{pipeline.partition!r} must be parameters, uniform, cost, or type:REGEX that finds {', '.join(LAYERS)}",
    )
