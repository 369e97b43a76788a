"""Export a run's checkpoint to Hugging Face format: `python -m recipes.export_hf RUN --output DIR`.

The result loads with AutoModelForCausalLM and AutoTokenizer, without this repository.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, quiet_libraries, run_command
from data_prep.files import make_directory, read_json, replace_directory, write_json
from recipes import models
from recipes.training import checkpoint_files
from recipes.training.recipe_file import load_recipe
from recipes.training.settings import Recipe

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
RECORD = "export.json"


def full_weights(recipe: Recipe, checkpoint: Path, beside: Path) -> dict:
    """{name: tensor} of the whole model: the fp32 master weights where the training kept some, else the weights.

    Args:
        beside: where a checkpoint that must be converted first may take twice its size for the time of it.
    """
    from recipes.convert import convert
    from recipes.training import universal

    layout = checkpoint_files.read_manifest(checkpoint)["layout"]
    split = layout.get("pipeline_parts") is not None or max(layout["tensor"], layout["expert"]) > 1
    if layout["zero_stage"] > 0 and not split:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(None):  # it narrates
            return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        converted = Path(folder) / "converted"
        convert(recipe, checkpoint, converted)
        # Their files may go: they stay mapped.
        shapes = universal.whole_shapes(recipe)
        return {name: universal.read(converted, name, universal.WEIGHT, shape) for name, shape in shapes.items()}


def export(recipe: Recipe, checkpoint: Path, output: Path, dtype: str | None = None) -> None:
    """Write model, config and tokenizer to `output`, which appears whole or not at all.

    Args:
        dtype: fp32, bf16 or fp16; default: what the forward pass used in training.

    Raises InputError when the checkpoint's weights are not those of the recipe's model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.models.build import persistent_buffers

    manifest = checkpoint_files.read_manifest(checkpoint)
    dtype = dtype or manifest["layout"]["precision"]
    if (fault := checkpoint_files.damaged_because(checkpoint, list(manifest["files"]))) is not None:
        raise InputError(f"{checkpoint}: {fault}; export another step")
    config = models.family(recipe.model.family).hf_config(recipe.model, recipe.data.seq_length)
    tokenizer = None
    if recipe.data.tokenizer is not None:
        directory = Path(recipe.data.tokenizer)
        if directory.is_absolute() and not directory.is_dir():
            raise InputError(
                f"data.tokenizer {recipe.data.tokenizer} does not exist any more; mend it in {recipe.run_directory}/recipe.yaml"
            )
        tokenizer = AutoTokenizer.from_pretrained(recipe.data.tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.dtype = getattr(torch, DTYPES[dtype])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    buffers = persistent_buffers(model)
    expected = {name: tensor.shape for name, tensor in [*model.named_parameters(), *buffers.items()]}
    weights = full_weights(recipe, checkpoint, make_directory(output.parent, "output directory"))
    missing = [name for name in expected if name not in weights]
    wrong = [name for name in expected if name in weights and weights[name].shape != expected[name]]
    if missing or wrong:
        raise InputError(
            f"{checkpoint} does not hold this recipe's model: missing {missing[:3]}, of another shape {wrong[:3]}"
        )
    # Parameters as named_parameters lists them: a tied head is there once, and the format refuses aliases. Buffers keep
    # the fp32 that they have in training.
    dtypes = {name: torch.float32 if name in buffers else config.dtype for name in expected}
    state = {name: weights[name].to(dtypes[name]).contiguous() for name in expected}

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    make_directory(temporary, "output directory")
    try:
        model.save_pretrained(temporary, state_dict=state)
        if tokenizer is not None:
            tokenizer.model_max_length = recipe.data.seq_length
            tokenizer.save_pretrained(temporary)
        write_json(temporary / RECORD, {"run": str(recipe.run_directory), "step": manifest["step"], "dtype": dtype})
        for file in temporary.iterdir():
            file.chmod(0o666 & ~_umask())  # safetensors writes 0600: a colleague could not load it
        replace_directory(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m recipes.export_hf", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="checkpoint step (default: the newest complete one)")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: the precision of the training's forward pass")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing export")
    arguments = parser.parse_args(argv)
    quiet_libraries()
    if not (arguments.run / "recipe.yaml").is_file():
        raise InputError(f"{arguments.run} is no run directory: it has no recipe.yaml")
    recipe, _ = load_recipe(arguments.run / "recipe.yaml")
    found = checkpoint_files.find(
        arguments.run / "checkpoints", "latest" if arguments.step is None else str(arguments.step)
    )
    if found.chosen is None:
        raise InputError(f"{arguments.run} has no checkpoint yet")
    for path, why in found.passed_over:
        print(f"passing over {path}: {why}", file=sys.stderr)
    if arguments.output.exists():
        if not (arguments.output / RECORD).is_file():
            raise InputError(f"{arguments.output} exists and is no export of ours; choose another --output")
        if not arguments.overwrite:
            step = read_json(arguments.output / RECORD)["step"]
            raise InputError(
                f"{arguments.output} exists (an export of step {step}); choose another --output or pass --overwrite"
            )
    export(recipe, found.chosen, arguments.output, arguments.dtype)
    print(f"{arguments.output}: step {checkpoint_files.step_of(found.chosen)} of {arguments.run}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
