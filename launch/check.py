"""Check a recipe and its ds_config before any device is used: `python -m launch.check R.yaml [--world_size N]`.

Exit code 0 when the run could start, 2 with one line saying what must be mended. Warnings (likely a mistake) and notes
stop nothing.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from data_prep.errors import InputError, run_command
from launch.hardware import Hardware, hardware_of, kind_of
from launch.planning.shape import shape_of
from launch.planning.speed import step_time, work_of
from launch.run import find_accelerator
from recipes import models
from recipes.training import checkpoint_files
from recipes.training.ds_config import load_ds_config, precision, zero_stage
from recipes.training.prepare import Prepared, prepare
from recipes.training.recipe_file import load_recipe, recipe_parser
from recipes.training.remarks import remarks
from recipes.training.settings import REPOSITORY
from recipes.training.sizes import check_topology


def check(arguments, world_size: int | None, accelerator: str | None = None, files: bool = True) -> Prepared:
    """`prepare`, and what depends on where the ranks are. Raises InputError for the first mistake.

    Args:
        arguments: of `check_parser`.
        world_size, accelerator, files: as in `prepare`.
    """
    prepared = prepare(arguments, world_size, accelerator, files=files)
    hardware = hardware_for(arguments, prepared)
    if prepared.sizes is not None:
        where = prepared.recipe.deepspeed_config
        check_topology(prepared.sizes, hardware.devices_per_node, where, arguments.allow_cross_node)
    return prepared


def hardware_for(arguments, prepared: Prepared) -> Hardware:
    """The ds_config's `_hardware`, with what the command line states in its place."""
    hardware = hardware_of(prepared.ds_config, prepared.recipe.deepspeed_config)
    if arguments.devices_per_node is not None:
        if arguments.devices_per_node < 1:
            raise InputError(f"--devices_per_node {arguments.devices_per_node} must be positive")
        hardware = replace(hardware, devices_per_node=arguments.devices_per_node)
    if getattr(arguments, "devices", None) is not None:
        if arguments.devices < 1:
            raise InputError(f"--devices {arguments.devices} must be positive")
        hardware = replace(hardware, devices=arguments.devices)
    return hardware


def expert_remarks(prepared: Prepared, hardware: Hardware) -> list[str]:
    """What it costs that experts' ranks don't all reach each other by the fast link."""
    sizes, recipe = prepared.sizes, prepared.recipe
    if sizes is None or sizes.world <= hardware.near or hardware.near % sizes.expert == 0:
        return []
    shape = shape_of(recipe.model, precision(prepared.ds_config))
    time = step_time(work_of(recipe, prepared.ds_config, sizes, shape), kind_of(hardware.device), hardware)
    return [
        f"warning: expert_parallel.autoep_size: {sizes.expert} ranks are more than the {hardware.near} that the fast link "
        f"joins: experts' tokens cross the network, predicted {time.experts:.2f} of {time.total:.2f} s a step"
    ]


def check_space(prepared: Prepared) -> list[str]:
    """Refuse an output_dir that one checkpoint does not fit; warn where a second does not."""
    recipe = prepared.recipe
    parameters = models.family(recipe.model.family).parameter_count(recipe.model)
    need = checkpoint_files.expected_bytes(parameters, prepared.ds_config)
    there = next(path for path in [recipe.run_directory, *recipe.run_directory.parents] if path.exists())
    free = shutil.disk_usage(there).free
    said = f"output_dir: one checkpoint takes {need / 1e9:,.1f} GB, {there} has {free / 1e9:,.1f} GB free"
    if need > free:
        raise InputError(f"{said}; free some, or choose another output_dir")
    return [f"warning: {said}: the next one is written before an older one goes"] if 2 * need > free else []


def describe(prepared: Prepared) -> str:
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


def all_remarks(prepared: Prepared, hardware: Hardware) -> list[str]:
    return expert_remarks(prepared, hardware) + remarks(prepared.recipe, prepared.ds_config, prepared.sizes)


def check_parser(description: str, **options):
    """The options of launch.check and of what calls it."""
    parser = recipe_parser(description, **options)
    parser.add_argument("--devices_per_node", type=int, help="in place of the ds_config's _hardware.devices_per_node")
    return parser


def take_recipe(arguments, usage: str) -> None:
    """Move the recipe from the front of `overrides` to `recipe`; NAME.HARDWARE takes ds_configs/NAME.HARDWARE.json."""
    if not arguments.overrides or "=" in arguments.overrides[0]:
        raise InputError(f"name a recipe first; usage: {usage}")
    arguments.recipe, *arguments.overrides = arguments.overrides
    name, _, variant = arguments.recipe.partition(".")
    if (
        variant in ("", "yaml", "json")
        or "/" in arguments.recipe
        or Path(arguments.recipe).is_file()
        or arguments.deepspeed_config
    ):
        return
    folder = REPOSITORY / "ds_configs"
    known = sorted(path.stem for path in folder.glob(f"{name}.*json"))
    if not known:
        return
    if arguments.recipe not in known:
        raise InputError(f"{folder} has no {arguments.recipe}.json; for {name} there are {', '.join(known)}")
    arguments.recipe, arguments.deepspeed_config = name, str(folder / f"{arguments.recipe}.json")


def shipped() -> list[tuple[str, Path]]:
    """(name of a recipe in recipes/, a ds_config made for it): NAME.json, or NAME.HARDWARE.json."""
    return [(path.name.split(".")[0], path) for path in sorted((REPOSITORY / "ds_configs").glob("*.json"))]


def main(argv: list[str] | None = None) -> int:
    usage = "python -m launch.check [options] R.yaml [KEY=VALUE ...]"
    parser = check_parser(__doc__.splitlines()[0], prog="python -m launch.check", usage=usage)
    parser.add_argument("--world_size", type=int, help="ranks (default: _hardware.devices, if stated)")
    parser.add_argument(
        "--all", action="store_true", help="every shipped ds_config, at its _hardware.devices, data left out"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.all:
        for key in ("world_size", "deepspeed_config"):
            if getattr(arguments, key) is not None:
                raise InputError(f"--{key} does not go with --all, which takes every shipped ds_config as it stands")
        for arguments.recipe, path in shipped():
            arguments.deepspeed_config = str(path)
            hardware = hardware_of(load_ds_config(path), path.name)
            prepared = check(arguments, hardware.devices, hardware.accelerator, files=False)
            title = f"{path.name}, {hardware.devices} x {kind_of(hardware.device).name}"
            print("\n".join([title, describe(prepared), *all_remarks(prepared, hardware)]), end="\n\n")
        return 0
    take_recipe(arguments, f"{usage}, or --all")
    recipe, overrides = load_recipe(arguments.recipe, arguments.overrides, arguments.deepspeed_config)
    config, world_size, accelerator = load_ds_config(recipe.deepspeed_config, overrides), arguments.world_size, None
    if "_hardware" in config:  # what it is for, not what this machine is
        hardware = hardware_of(config, recipe.deepspeed_config)
        world_size, accelerator = world_size or hardware.devices, hardware.accelerator
    prepared = check(arguments, world_size, accelerator or find_accelerator())
    said = [*check_space(prepared), *all_remarks(prepared, hardware_for(arguments, prepared))]
    print("\n".join([describe(prepared), *said]))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
