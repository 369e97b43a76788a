"""A checkpoint that knows no layout, in DeepSpeed's universal format: written by recipes.convert, loaded here by any layout.

    DIRECTORY/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt    NAME and shape: those of the transformers model
    DIRECTORY/manifest.json                             of the checkpoint that it was made from, and its progress

DeepSpeed's own loader looks for the names of the loading layout, and knows neither stage 0 nor a pipeline's tensor ranks.
Here each rank copies its part of each tensor to where its optimizer keeps it, whatever the layout.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups

from data_prep.files import read_json
from recipes.convert import convert
from recipes.models.build import full_shape, persistent_buffers
from recipes.models.pipeline import pipeline_layers, pipeline_parameter_names
from recipes.training import distributed
from recipes.training.checkpoint_files import MANIFEST

WEIGHT, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
GATE, UP, DOWN = ".mlp.experts.w1", ".mlp.experts.w3", ".mlp.experts.w2"  # AutoEP's [experts, ...] of a layer
FUSED, FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"  # transformers', the gate's rows first


def whole_name(name: str) -> str:
    """The transformers name of a parameter that AutoEP has moved; others keep theirs."""
    return name.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.router.", ".mlp.gate.")


def tensor_path(directory: Path, name: str, key: str) -> Path:
    return directory / "zero" / name / f"{key}.pt"


def read(directory: Path, name: str, key: str, shape) -> torch.Tensor:
    """A whole tensor, mapped from its file. DeepSpeed writes ZeRO-3's flat and bare."""
    value = torch.load(tensor_path(directory, name, key), map_location="cpu", mmap=True, weights_only=False)
    return (value["param"] if isinstance(value, dict) else value).view(shape)


@dataclass(frozen=True)
class Piece:
    """Where the optimizer keeps `numel` elements of a parameter: from `first` on in the flattened parameter (this rank's
    tensor-parallel or expert-parallel part), from `start` on in the flattened `master`, which keys the optimizer's state."""

    first: int
    numel: int
    master: torch.Tensor
    start: int


def pieces(optimizer) -> Iterator[tuple[torch.nn.Parameter, Piece]]:
    """The pieces that this rank's optimizer holds, under any ZeRO stage and precision."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            start = 0
            for parameter in group:
                numel = parameter.ds_tensor.numel()
                yield parameter, Piece(optimizer._get_param_partition_rank(parameter) * numel, numel, master, start)
                start += numel
    elif hasattr(optimizer, "bit16_groups") or hasattr(
        optimizer, "bf16_groups"
    ):  # ZeRO 1 and 2, bf16 with fp32 gradients
        model_groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        for group, kept in zip(model_groups, optimizer.optimizer.param_groups, strict=True):
            for parameter in group:
                if (mapping := parameter._hp_mapping) is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield parameter, Piece(here.start, here.numel, kept["params"][0], there.start)
    elif hasattr(optimizer, "fp16_groups"):  # stage 0 in bf16 or fp16: one master weight a parameter, or one a group
        flat = getattr(optimizer, "fp32_groups_flat", None)
        for number, group in enumerate(optimizer.fp16_groups):
            start = 0
            for position, parameter in enumerate(group):
                master = optimizer.fp32_groups[number][position] if flat is None else flat[number]
                yield parameter, Piece(0, parameter.numel(), master, start)
                start += 0 if flat is None else parameter.numel()
    else:  # stage 0 in fp32
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, Piece(0, parameter.numel(), parameter, 0)


def listed_parameters(engine) -> list[list]:
    """[[name, shape] of each parameter] of each optimizer group, without ZeRO: DeepSpeed's files don't tell them."""
    if engine.zero_optimization() or hasattr(engine.optimizer, "bf16_groups"):
        return []
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    model_groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    return [[[names[id(parameter)], list(parameter.shape)] for parameter in group] for group in model_groups]


def optimizer_steps(engine) -> int:
    """The updates that the optimizer itself counts."""
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def convert_and_load(engine, recipe, sizes, checkpoint: Path) -> dict:
    """Load a checkpoint of any layout; returns its progress.

    Rank 0 converts it in a process of its own: the others wait longer than a collective may take.
    """
    converted = recipe.run_directory / "checkpoints" / ".converted"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        work = None
        if dist.get_rank() == 0:
            remove_leftovers(converted)
            work = pool.submit(convert, recipe, checkpoint, converted, max(1, (os.cpu_count() or 1) // 2))
        while not distributed.broadcast(work is not None and work.done()):
            time.sleep(0.5)
        fault = distributed.broadcast(work and work.exception())
    if fault is not None:
        raise fault
    manifest = read_json(converted / MANIFEST)
    load(engine, recipe, sizes, converted, manifest["optimizer_steps"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(converted)
    progress = manifest["progress"]
    engine.global_steps, engine.global_samples = progress["step"], progress["consumed_samples"]
    engine.skipped_steps = progress["skipped_steps"]
    engine.lr_scheduler.last_epoch = progress["applied_updates"]
    if manifest["loss_scale"] is not None:
        engine.optimizer.loss_scale = manifest["loss_scale"]
    return progress


def remove_leftovers(converted: Path) -> None:
    """Remove what a run left that ended in a conversion to `converted`: the names that `convert` writes, no others."""
    name = re.escape(converted.name)
    for path in converted.parent.iterdir() if converted.parent.is_dir() else []:
        if re.fullmatch(rf"{name}|\.{name}\.\d+\.(tmp|old)", path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


@torch.no_grad()
def load(engine, recipe, sizes, directory: Path, steps: int) -> None:
    """Weights and optimizer state into an engine.

    Args:
        steps: that Adam has counted.
    """
    names, optimizer = {}, engine.optimizer
    if isinstance(engine.module, PipelineModule):
        names = pipeline_parameter_names(pipeline_layers(recipe.model, recipe.data.seq_length))
    shapes = whole_shapes(recipe)
    base = getattr(optimizer, "optimizer", optimizer)
    held: dict[int, Piece] = {id(parameter): piece for parameter, piece in pieces(optimizer)}

    def part(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return _part(_source(directory, names.get(name, whole_name(name)), key, shapes), tensor, sizes)

    zero_3 = engine.zero_optimization_partition_weights()
    if zero_3:
        optimizer.checkpoint_event_prologue()
    for name, buffer in persistent_buffers(engine.module).items():
        buffer.copy_(part(name, WEIGHT, buffer))
    for name, parameter in engine.module.named_parameters():
        weight = part(name, WEIGHT, parameter)
        piece = held.get(id(parameter))
        if not zero_3:
            parameter.copy_(weight)
        if piece is not None:
            mine = _flat_piece(weight, piece)
            if zero_3:
                parameter.ds_tensor.copy_(mine)
            piece.master.view(-1).narrow(0, piece.start, piece.numel).copy_(mine)
            state = base.state[piece.master]
            state["step"] = _step(base, piece.master, steps)
            for key in MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(piece.master)
                moment = _flat_piece(part(name, key, parameter), piece)
                state[key].view(-1).narrow(0, piece.start, piece.numel).copy_(moment)
    if zero_3:
        optimizer.checkpoint_event_epilogue()


def _step(base: torch.optim.Optimizer, master: torch.Tensor, steps: int):
    """Torch's Adam counts in a tensor, DeepSpeed's in an int."""
    if not isinstance(base, torch.optim.Adam):
        return steps
    return torch.tensor(float(steps), device=master.device if base.defaults["fused"] else "cpu")


def whole_shapes(recipe) -> dict[str, torch.Size]:
    """{name: shape} of the transformers model's parameters and persistent buffers; a tied head is there once."""
    from transformers import AutoModelForCausalLM

    from recipes import models

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            models.family(recipe.model.family).hf_config(recipe.model, recipe.data.seq_length)
        )
    return {name: tensor.shape for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]}


def _source(directory: Path, name: str, key: str, shapes: dict) -> torch.Tensor:
    """A whole tensor by its transformers name, or by AutoEP's."""
    for ending, fused in ((GATE, FUSED), (UP, FUSED), (DOWN, FUSED_DOWN)):
        if name.endswith(ending):
            whole = name.removesuffix(ending) + fused
            tensor = read(directory, whole, key, shapes[whole])
            return tensor if ending == DOWN else tensor.chunk(2, dim=1)[ending == UP]
    return read(directory, name, key, shapes[name])


def _part(whole: torch.Tensor, tensor: torch.Tensor, sizes) -> torch.Tensor:
    """What a rank's tensor holds of `whole`: all of it, some experts, or some rows or columns of a matrix."""
    shape = full_shape(tensor)
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            if is_moe_param(tensor):
                number = groups._get_expert_parallel_rank(tensor.group_name)
            else:
                number = dist.get_rank() % sizes.tensor
            whole = whole.narrow(dim, number * size, size)
    return whole


def _flat_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Elements of a parameter, and zeros behind its end, where ZeRO-3 pads."""
    flat = tensor.flatten()[piece.first : piece.first + piece.numel]
    return torch.nn.functional.pad(flat, (0, piece.numel - len(flat)))
