"""Convert a run's checkpoint to one that any layout can load: `python -m recipes.convert RUN [--step N] --output DIR`.

DeepSpeed's ds_to_universal does it for ZeRO 1-3, in the names of the layout that saved it; here they become those of the
transformers model, and stage 0, which ds_to_universal doesn't know, is read directly. A run that is resumed in another layout
calls this itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from data_prep.errors import InputError, OneLineParser, quiet_libraries, run_command
from data_prep.files import make_directory, replace_directory, write_json
from recipes.training import checkpoint_files
from recipes.training.ds_config import load_ds_config
from recipes.training.recipe_file import load_recipe


def convert(recipe, checkpoint: Path, output: Path, workers: int = 1) -> None:
    """Write `checkpoint`, whole or not at all, as recipes.training.universal describes.

    Args:
        workers: processes of ds_to_universal.
    """
    from recipes.models.pipeline import pipeline_layers, pipeline_parameter_names
    from recipes.training import universal

    manifest = checkpoint_files.read_manifest(checkpoint)
    checkpoint_files.check_same_model(checkpoint, recipe)
    layers = None  # of a pipeline
    if manifest["layout"].get("pipeline_parts") is not None:
        layers = pipeline_layers(recipe.model, recipe.data.seq_length)
    names = {} if layers is None else pipeline_parameter_names(layers)
    shapes = universal.whole_shapes(recipe)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    make_directory(temporary, "output directory")
    try:
        if any(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")):
            _zero_states(checkpoint, temporary / "work", workers)
            os.rename(temporary / "work" / "zero", temporary / "zero")
            shutil.rmtree(temporary / "work")
            (temporary / "latest_universal").unlink()
        else:
            _plain_states(checkpoint, temporary, names, shapes)
        _rename(temporary, names)
        _add_from_model_files(checkpoint, temporary, layers, shapes)
        for path in (temporary / "zero").iterdir():
            if path.name not in shapes:  # optimizer_state.pt, the second name of a tied weight
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        progress = _load(_model_files(checkpoint)[0])["progress"]
        write_json(temporary / checkpoint_files.MANIFEST, {**manifest, "progress": progress, "files": {}})
        replace_directory(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _zero_states(checkpoint: Path, folder: Path, workers: int) -> None:
    from deepspeed.checkpoint import ds_to_universal

    arguments = SimpleNamespace(
        input_folder=str(checkpoint),
        output_folder=str(folder),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=False,  # patterns of one pipeline stage match nothing in another
        inject_missing_state=True,
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ds_to_universal.main(arguments)


def _plain_states(checkpoint: Path, folder: Path, names: dict, shapes: dict) -> None:
    """Adam's moments, and the master weights where there are some, of a checkpoint of stage 0."""
    from recipes.training import universal

    files = sorted(checkpoint.glob("expp_rank_*_optim_states.pt"), key=_number) or _model_files(checkpoint)
    parts: dict[tuple[str, str], list] = {}
    for file in files:
        model = file if file.name.startswith("mp_rank") else checkpoint / "mp_rank_00_model_states.pt"
        listed = _load(model)["parameters"]
        for name, key, tensor in _listed_states(_load(file)["optimizer"], listed):
            parts.setdefault((names.get(name, universal.whole_name(name)), key), []).append(tensor)
    for (name, key), tensors in parts.items():
        _save(folder, name, key, _merge(name, tensors, shapes))


def _listed_states(optimizer: dict, listed: list) -> list:
    """(name, key, tensor) of each state that an optimizer without ZeRO keeps.

    Without fused kernels bf16 and fp16 training keeps a master weight and moments of each parameter, with them those of each
    group, flat; fp32 training keeps moments only.

    Args:
        listed: universal.listed_parameters of the engine that saved it.
    """
    from recipes.training import universal

    base, found = optimizer.get("optimizer_state_dict", optimizer), []
    flat = optimizer.get("fp32_groups_flat")
    for number, group in enumerate(listed):
        keys = base["param_groups"][number]["params"]
        if flat is not None:
            lengths = [math.prod(shape) for _, shape in group]
            states = {universal.WEIGHT: flat[number], **{key: base["state"][keys[0]][key] for key in universal.MOMENTS}}
            for key, tensor in states.items():
                for (name, shape), values in zip(group, tensor.split(lengths), strict=True):
                    found.append((name, key, values.view(shape)))
            continue
        for position, ((name, _), index) in enumerate(zip(group, keys, strict=True)):
            if "fp32_groups" in optimizer:
                found.append((name, universal.WEIGHT, optimizer["fp32_groups"][number][position]))
            found += [(name, key, base["state"][index][key]) for key in universal.MOMENTS]
    return found


def _rename(folder: Path, names: dict[str, str]) -> None:
    """Names of the saving layout to those of the transformers model.

    Args:
        names: of a pipeline; empty without one.
    """
    import torch

    from recipes.training import universal

    zero = folder / "zero"
    for path in list(zero.iterdir()):
        name = names.get(path.name, universal.whole_name(path.name))
        if name != path.name:
            os.rename(path, zero / name)
    for gate in list(zero.glob(f"*{universal.GATE}")):
        layer = gate.name.removesuffix(universal.GATE)
        up = layer + universal.UP
        for file in gate.glob("*.pt"):
            if file.stem in (universal.WEIGHT, *universal.MOMENTS):
                both = [_load(zero / name / file.name) for name in (gate.name, up)]
                _save(folder, layer + universal.FUSED, file.stem, torch.cat([one["param"] for one in both], dim=1))
        shutil.rmtree(gate)
        shutil.rmtree(zero / up)
        os.rename(zero / (layer + universal.DOWN), zero / (layer + universal.FUSED_DOWN))


def _add_from_model_files(checkpoint: Path, folder: Path, layers, shapes: dict) -> None:
    """What no optimizer keeps: buffers, and the weights of fp32 training without ZeRO."""
    import torch

    from recipes.training import universal

    missing = {name for name in shapes if not universal.tensor_path(folder, name, universal.WEIGHT).is_file()}
    if not missing:
        return
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for file in _model_files(checkpoint) if layers is None else []:
        for name, tensor in _load(file)["module"].items():
            parts.setdefault(universal.whole_name(name), {})[_number(file)] = tensor
    for file in checkpoint.glob("layer_*-model_*-model_states.pt") if layers is not None else []:
        layer, rank = map(int, re.findall(r"\d+", file.name))
        with torch.device("meta"):
            module = layers[layer].build()
        for name, tensor in _load(file).items():
            parts.setdefault(module.whole_name(name), {})[rank] = tensor
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for file in checkpoint.glob("layer_*_expert_*_model_states.pt"):
        for name, tensor in _load(file).items():
            name, _, number = name.rpartition(".")
            experts.setdefault(name, {})[int(number)] = tensor
    for name in [name for name in experts if name.endswith(universal.GATE)]:
        layer = name.removesuffix(universal.GATE)
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(experts[layer + ending].items())])
            for ending in (universal.GATE, universal.UP, universal.DOWN)
        )
        parts[layer + universal.FUSED] = {0: torch.cat([gate, up], dim=1)}
        parts[layer + universal.FUSED_DOWN] = {0: down}
    absent = sorted(missing - parts.keys())
    if absent:
        raise InputError(f"{checkpoint} does not hold this recipe's model: missing {absent[:3]}")
    for name in missing:
        tensors = [tensor for _, tensor in sorted(parts[name].items())]
        _save(folder, name, universal.WEIGHT, _merge(name, tensors, shapes))


def _merge(name: str, parts: list, shapes: dict):
    """The whole of a tensor from what each tensor-parallel or expert-parallel rank holds."""
    import torch

    from recipes.training import universal

    if name.endswith((universal.GATE, universal.UP, universal.DOWN)):
        return torch.cat(parts)
    shape = shapes.get(name)
    if shape is None or parts[0].shape == shape:
        return parts[0]
    dim = next(dim for dim, size in enumerate(shape) if parts[0].shape[dim] != size)
    return torch.cat(parts, dim=dim)


def _model_files(checkpoint: Path) -> list[Path]:
    files = sorted(checkpoint.glob("mp_rank_*_model_states.pt"), key=_number)
    return files or [checkpoint / "zero_pp_rank_0_mp_rank_00_model_states.pt"]


def _number(file: Path) -> int:
    return int(re.search(r"\d+", file.name).group())


def _load(file: Path):
    import torch

    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


def _save(folder: Path, name: str, key: str, tensor) -> None:
    import torch

    from recipes.training import universal

    path = universal.tensor_path(folder, name, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"param": tensor.float().contiguous()}, path)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m recipes.convert", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="checkpoint step (default: the newest complete one)")
    parser.add_argument("--output", type=Path, required=True, help="directory to write; must not exist")
    arguments = parser.parse_args(argv)
    quiet_libraries()
    if not (arguments.run / "recipe.yaml").is_file():
        raise InputError(f"{arguments.run} is no run directory: it has no recipe.yaml")
    recipe, _ = load_recipe(arguments.run / "recipe.yaml")
    step = "latest" if arguments.step is None else str(arguments.step)
    found = checkpoint_files.find(arguments.run / "checkpoints", step)
    if found.chosen is None:
        raise InputError(f"{arguments.run} has no checkpoint yet")
    for path, why in found.passed_over:
        print(f"passing over {path}: {why}", file=sys.stderr)
    if arguments.output.exists():
        raise InputError(f"{arguments.output} exists; choose another --output")
    checkpoint_files.check_convertible(found.chosen, load_ds_config(arguments.run / "ds_config.json"))
    convert(recipe, found.chosen, arguments.output, workers=max(1, (os.cpu_count() or 1) // 2))
    print(f"{arguments.output}: step {checkpoint_files.step_of(found.chosen)} of {arguments.run}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
