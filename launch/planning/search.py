"""Every layout that the checker allows on N devices, ranked by the planner's own predicted speed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from data_prep.errors import InputError
from launch.hardware import Hardware, Kind
from launch.planning.memory import GIB, Memory, fits_host, fullest_rank, host_memory
from launch.planning.shape import Shape
from launch.planning.speed import StepTime, step_time, work_of
from recipes.training import ds_config, ds_config_rules
from recipes.training.settings import PipelineSettings
from recipes.training.sizes import MICRO, Sizes, check_topology, divisors, resolve_sizes

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
TENSOR_SIZES = (1, 2, 4, 8, 16)  # beyond a node's only where groups may cross nodes


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        config: the ds_config; overrides: those of the recipe that go with it.
    """

    config: dict
    overrides: dict[str, object]
    sizes: Sizes
    memory: Memory
    time: StepTime
    tokens_per_s: float


def search(
    recipe, config: dict, shape: Shape, kind: Kind, hardware: Hardware, allow_cross_node: bool = False
) -> list[Candidate]:
    """Candidates that fit, fastest first."""
    found = []
    for changed, variant, overrides in _variants(recipe, config, shape, hardware):
        try:
            ds_config_rules.check_ds_config(variant, "", kind.accelerator)
            ds_config_rules.check_layout(changed, variant, "", kind.accelerator)
            parallel = ds_config.parallel_sizes(variant, changed.pipeline)
            sizes = resolve_sizes(changed.global_batch_size, variant, hardware.devices, **parallel)
            check_topology(sizes, hardware.devices_per_node, "", allow_cross_node)
        except InputError:
            continue
        memory, _ = fullest_rank(changed, variant, sizes, shape)
        if memory.device > kind.memory_gib * GIB:
            continue
        if not fits_host(host_memory(changed, variant, sizes, shape, hardware.per_node), hardware):
            continue
        work = work_of(changed, variant, sizes, shape)
        time = step_time(work, kind, hardware)
        found.append(Candidate(variant, overrides, sizes, memory, time, work.tokens / time.total))
    return sorted(found, key=lambda candidate: -candidate.tokens_per_s)


def _variants(recipe, config: dict, shape: Shape, hardware: Hardware):
    """(recipe, ds_config, the recipe's overrides) of every combination that is worth a check."""
    sizes = divisors(hardware.devices)
    tensors = [size for size in TENSOR_SIZES if size in sizes]
    stages = [size for size in sizes if size <= recipe.model.num_hidden_layers]
    experts = [size for size in sizes if size <= shape.num_experts] or [1]
    plain = {key: value for key, value in config.items() if key not in ("tensor_parallel", "sequence_parallel_size")}
    for zero in (1, 2, 3):
        for pipeline in stages if zero == 1 and not shape.num_experts else [1]:
            for tensor in tensors:
                for expert in experts:
                    for micro in MICRO_BATCHES:
                        for interval in (0, 1):
                            variant = copy.deepcopy(plain)
                            variant[MICRO] = micro
                            variant["zero_optimization"] = {**plain.get("zero_optimization", {}), "stage": zero}
                            overrides = {"compute.activation_checkpoint_interval": interval}
                            section, loss = PipelineSettings(), recipe.loss
                            if pipeline > 1:
                                section = replace(recipe.pipeline, stages=pipeline, tensor_parallel_size=tensor)
                                loss = replace(loss, chunk_tokens=None)
                                overrides |= {
                                    "pipeline.stages": pipeline,
                                    "pipeline.tensor_parallel_size": tensor,
                                    "loss.chunk_tokens": "null",
                                }
                            else:
                                if recipe.pipeline != section:
                                    overrides |= {
                                        "pipeline.stages": "null",
                                        "pipeline.tensor_parallel_size": 1,
                                        "pipeline.partition": section.partition,
                                    }
                                if tensor > 1:
                                    variant["tensor_parallel"] = {"autotp_size": tensor}
                            if "expert_parallel" in variant:
                                variant["expert_parallel"] = {**plain["expert_parallel"], "autoep_size": expert}
                            elif expert > 1:
                                continue
                            compute = replace(recipe.compute, activation_checkpoint_interval=interval)
                            yield replace(recipe, pipeline=section, compute=compute, loss=loss), variant, overrides
