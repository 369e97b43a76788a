"""Everything that can be decided before a process group exists: recipe, ds_config, sizes, data, run directory.

`launch.run` and `launch.check` call it before any rank starts, and every rank calls it again. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.errors import InputError, of_file
from data_prep.samples import DataSpec, SampleStream
from recipes.training import checkpoint_files, ds_config, ds_config_rules
from recipes.training.recipe_file import load_recipe
from recipes.training.settings import SYNTHETIC, Recipe
from recipes.training.sizes import Sizes, check_topology, resolve_sizes


@dataclass
class Prepared:
    """A run that has passed every check that needs no device.

    `sizes` is None where the world size is not known yet.
    """

    recipe: Recipe
    ds_config: dict
    sizes: Sizes | None


def prepare(
    arguments,
    world_size: int | None,
    accelerator: str | None = None,
    files: bool = True,
    content: bool = True,
    script: str | None = None,
    devices_per_node: int | None = None,
) -> Prepared:
    """Read and check what `arguments` (of `recipe_file.recipe_parser`) name. Raises InputError for the first mistake.

    Args:
        world_size: ranks in all; None where not known yet.
        accelerator: "cpu", "cuda", ... where known.
        files: whether to look at the data and the run directory too.
        content: whether to compare the content of the data with the checkpoint's (one rank is enough).
        script: the entry script that is to run the recipe, where known.
        devices_per_node: ranks that share a host, where known.
    """
    try:
        return _prepare(arguments, world_size, accelerator, files, content, script, devices_per_node)
    except OSError as error:
        if error.filename is None:
            raise
        raise of_file(error) from None


def _prepare(arguments, world_size, accelerator, files, content, script, devices_per_node) -> Prepared:
    recipe, overrides = load_recipe(
        arguments.recipe, [*arguments.overrides, *_references(arguments)], arguments.deepspeed_config, arguments.resume
    )
    if script is not None and Path(script).stem != Path(recipe.entry_script).stem:
        state = (
            "has no pipeline.stages"
            if recipe.pipeline.stages is None
            else f"has pipeline.stages {recipe.pipeline.stages}"
        )
        raise InputError(f"{arguments.recipe} {state}: start it with {recipe.entry_script}, not {script}")
    config = ds_config.load_ds_config(recipe.deepspeed_config, overrides)
    where = " ".join([recipe.deepspeed_config, *(f"ds.{override}" for override in overrides)])
    ds_config_rules.check_ds_config(config, where, accelerator)
    ds_config_rules.check_layout(recipe, config, where, accelerator)
    parallel = ds_config.parallel_sizes(config, recipe.pipeline)
    sizes = None if world_size is None else resolve_sizes(recipe.global_batch_size, config, world_size, **parallel)
    if sizes is not None and devices_per_node is not None:
        check_topology(sizes, devices_per_node, where, arguments.allow_cross_node)
    if not files:
        return Prepared(recipe, config, sizes)
    if recipe.model.init_from is not None:
        from recipes.models.hf_weights import SourceWeights

        SourceWeights.open(recipe.model, recipe.data.seq_length)  # its config and list of weights; no tensor is read
    # As "epoch": sizes are the same, and Megatron's order for a whole run is too slow to build twice.
    stream = training_stream(recipe, order="epoch")
    held_out = validation_stream(recipe)
    check_data(recipe, [stream] if held_out is None else [stream, held_out[0]])
    check_run_directory(recipe, config, sizes, stream if content else None)
    return Prepared(recipe, config, sizes)


def check_data(recipe: Recipe, streams: list[SampleStream]) -> None:
    """Token files fit the vocabulary, by the records beside them, and so does the tokenizer."""
    for tokens in [pair for stream in streams for file in stream.files for pair in file.pairs]:
        made_by = tokens.read_record()
        highest = made_by.get("max_token_id", -1)
        if not isinstance(highest, int):
            raise InputError(
                f"{tokens.prefix}.json: max_token_id {highest!r} is no number; tokenize again, or remove the file"
            )
        if highest >= recipe.model.vocab_size:
            raise InputError(
                f"{tokens.prefix} holds token id {highest}, outside model.vocab_size {recipe.model.vocab_size}; set "
                f"model.vocab_size to at least {made_by.get('vocab_size', highest + 1)} or tokenize with another tokenizer"
            )
    if recipe.data.tokenizer is not None:
        check_tokenizer(recipe.data.tokenizer, recipe.model.vocab_size)


def check_tokenizer(tokenizer: str, vocab_size: int) -> None:
    """The tokenizer, a directory or a name on the hub, is there, and every id of its, added tokens included, has an embedding row."""
    from data_prep.tokenizer import TextTokenizer

    if Path(tokenizer).is_absolute() and not Path(tokenizer).is_dir():
        raise InputError(
            f"data.tokenizer {tokenizer} does not exist; give a directory that AutoTokenizer loads, or null"
        )
    size = TextTokenizer(tokenizer).vocab_size
    if size > vocab_size:
        raise InputError(
            f"data.tokenizer {tokenizer} has {size} tokens, model.vocab_size is {vocab_size}: raise it to at least {size}"
        )


def training_stream(recipe: Recipe, num_samples: int | None = None, order: str | None = None) -> SampleStream:
    """The training samples. Raises InputError when the data can't give what the schedule asks for.

    Args:
        num_samples: samples that the order is made for; default: those of the schedule.
        order: in place of the recipe's.
    """
    num_samples = num_samples or recipe.total_steps * recipe.global_batch_size
    spec = _data_spec(recipe, recipe.data.files, order or recipe.data.order, recipe.seed, num_samples)
    # A phase begins with the sample that holds its first token, or the next one.
    phases = tuple(
        (-(-phase["from_tokens"] // recipe.data.seq_length), _pairs(phase["files"])) for phase in recipe.data.phases
    )
    stream = SampleStream(replace(spec, max_epochs=recipe.data.max_epochs, phases=phases))
    stream.check(recipe.global_batch_size)
    return stream


def validation_stream(recipe: Recipe) -> tuple[SampleStream, int] | None:
    """The validation samples and how many of them one validation takes; None without validation files.

    Always the same samples: the first ones of the first epoch's shuffle.
    """
    if recipe.data.validation_files is None:
        return None
    # Synthetic validation tokens must not be the training ones: another seed.
    stream = SampleStream(_data_spec(recipe, recipe.data.validation_files, "epoch", recipe.seed + 1, 0))
    wanted = recipe.validation.samples
    return stream, min(wanted or stream.samples_per_epoch, stream.samples_per_epoch)


def _data_spec(recipe: Recipe, files, order: str, seed: int, num_samples: int) -> DataSpec:
    data = recipe.data
    return DataSpec(
        None if files == SYNTHETIC else _pairs(files),
        data.seq_length,
        order,
        seed,
        num_samples,
        recipe.model.vocab_size,
        document_mask=data.document_mask == "attention",
        cache_dir=data.cache_dir or str(Path(recipe.output_dir) / ".cache"),
        cache_limit_gib=data.cache_limit_gib,
    )


def _pairs(files: list[dict]) -> tuple[tuple[str, float], ...]:
    return tuple((entry["path"], entry["weight"]) for entry in files)


def _references(arguments) -> list[str]:
    given = ((key, getattr(arguments, key)) for key in ("start_from", "branch_from"))
    return [f"checkpoint.{key}={value}" for key, value in given if value is not None]


def check_parent(recipe: Recipe, config: dict, sizes: Sizes | None) -> None:
    """The checkpoint that a run without one of its own begins from is whole and of this model."""
    if recipe.checkpoint.branch_from is not None:
        path = checkpoint_files.parent_checkpoint(recipe.checkpoint.branch_from)
        checkpoint_files.check_compatible(path, recipe, config, sizes)
    elif recipe.checkpoint.start_from is not None:
        checkpoint_files.check_same_model(checkpoint_files.parent_checkpoint(recipe.checkpoint.start_from), recipe)


def check_run_directory(recipe: Recipe, config: dict, sizes: Sizes | None, stream: SampleStream | None) -> None:
    """Checkpoints in the run directory are of this model, batch, layout and data, and one is whole."""
    if recipe.checkpoint.resume == "none":
        if recipe.checkpoint.upload is not None and stream is not None:
            url = checkpoint_files.remote_directory(recipe)
            if steps := checkpoint_files.remote_steps(url):
                raise InputError(
                    f"{url} holds checkpoints of an earlier run, up to step {steps[0]}: use another name=... or "
                    "checkpoint.upload, or move them away"
                )
        check_parent(recipe, config, sizes)
        return
    try:
        found = checkpoint_files.find(recipe.run_directory / "checkpoints", recipe.checkpoint.resume)
    except InputError as error:
        if recipe.checkpoint.upload is None:
            raise
        if stream is not None:  # one rank asks for all
            checkpoint_files.remote_candidates(recipe, str(error))
        return  # the one that is fetched is checked then
    if found.chosen is None:
        # Elsewhere a run goes on from its own copies, and its parent may not be there.
        copies = recipe.checkpoint.upload is not None and checkpoint_files.parent_asked_for(recipe) is not None
        if not copies or stream is not None and not checkpoint_files.remote_candidates(recipe, None):
            check_parent(recipe, config, sizes)
        return
    checkpoint_files.check_compatible(found.chosen, recipe, config, sizes)
    checkpoint_files.check_same_parent(found.chosen, recipe)
    num_samples = checkpoint_files.order_samples(recipe, found.chosen)
    if stream is not None:
        checkpoint_files.check_same_data(found.chosen, stream.fingerprint(recipe.data.order, num_samples))
