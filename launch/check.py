"""Check a recipe and its ds_config before any device is used: `python -m launch.check R.yaml [--world_size N]`.

Exit code 0 when the run could start, 2 with one line saying what must be mended.
"""

from __future__ import annotations

import sys

from data_prep.errors import InputError, run_command
from launch.run import find_accelerator
from recipes import models
from recipes.training.ds_config import precision, zero_stage
from recipes.training.prepare import prepare
from recipes.training.settings import REPOSITORY, recipe_parser


def describe(prepared) -> str:
    """What the checked run is, in three lines."""
    recipe = prepared.recipe
    parameters = models.family(recipe.model.family).parameter_count(recipe.model)
    tokens = recipe.total_steps * recipe.tokens_per_step
    lines = [
        f"{recipe.name}: {recipe.model.family}, {parameters:,} parameters, ZeRO stage {zero_stage(prepared.ds_config)}, "
        f"{precision(prepared.ds_config)}",
        f"{recipe.total_steps:,} steps of {recipe.tokens_per_step:,} tokens = {tokens:,} tokens",
    ]
    if prepared.sizes is not None:
        lines.append(str(prepared.sizes))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    usage = "python -m launch.check [options] R.yaml [KEY=VALUE ...]"
    parser = recipe_parser(__doc__.splitlines()[0], prog="python -m launch.check", usage=usage)
    parser.add_argument("--world_size", type=int, help="ranks; without it, sizes that depend on them are not checked")
    parser.add_argument(
        "--all", action="store_true", help="every shipped recipe, at its ds_config's _hardware, data left out"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.all:
        for path in sorted((REPOSITORY / "recipes").glob("*.yaml")):
            arguments.recipe = path
            devices = prepare(arguments, None, files=False).ds_config.get("_hardware", {}).get("devices")
            print(describe(prepare(arguments, devices, files=False)), end="\n\n")
        return 0
    if not arguments.overrides or "=" in arguments.overrides[0]:
        raise InputError(f"name a recipe first, or pass --all; usage: {usage}")
    arguments.recipe, *arguments.overrides = arguments.overrides
    print(describe(prepare(arguments, arguments.world_size, find_accelerator())))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
