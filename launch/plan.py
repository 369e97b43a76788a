"""Predict memory, speed, days and checkpoint size of a run: `python -m launch.plan R.yaml [--gpus N] [--gpu KIND]`.

Number and kind of GPUs are those of the ds_config's _hardware unless given. Exit code 0 when a plan could be made, whether
the run fits or not; with --require_fit 3 when it doesn't; 2 for a mistake.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data_prep.errors import InputError, run_command
from data_prep.files import write_text
from launch.check import all_remarks, check, check_parser, hardware_for, take_recipe
from launch.hardware import Hardware, Kind, kind_of
from launch.planning.memory import (
    FRAGMENTATION,
    FRAMEWORK_GIB,
    GIB,
    HostMemory,
    Memory,
    fits_host,
    fullest_rank,
    host_memory,
)
from launch.planning.search import Candidate, search
from launch.planning.shape import shape_of
from launch.planning.speed import StepTime, calibration, step_time, work_of
from recipes import models
from recipes.training import checkpoint_files, ds_config
from recipes.training.ds_config import precision, zero_stage
from recipes.training.prepare import Prepared
from recipes.training.settings import Recipe
from recipes.training.sizes import MICRO, Sizes, check_topology, divisors, resolve_sizes

STORAGE_GB_S = 2.0  # that one node writes to shared storage
MISFIT = 3  # exit code of --require_fit
SHOWN = 10  # layouts of --search


@dataclass(frozen=True)
class Plan:
    """Attributes:
    stage: the pipeline stage of the fullest rank.
    """

    prepared: Prepared
    sizes: Sizes
    kind: Kind
    hardware: Hardware
    memory: Memory
    stage: int
    host: HostMemory
    time: StepTime

    @property
    def fits_device(self) -> bool:
        return self.memory.device <= self.kind.memory_gib * GIB

    @property
    def fits(self) -> bool:
        return self.fits_device and fits_host(self.host, self.hardware)

    @property
    def tokens_per_s(self) -> float:
        return self.prepared.recipe.tokens_per_step / self.time.total

    @property
    def flops_per_token(self) -> int:
        recipe = self.prepared.recipe
        return models.family(recipe.model.family).flops_per_token(recipe.model, recipe.data.seq_length)

    @property
    def mfu(self) -> float:
        peak = self.kind.fp32_tflops if precision(self.prepared.ds_config) == "fp32" else self.kind.bf16_tflops
        return self.tokens_per_s * self.flops_per_token / (self.hardware.devices * peak * 1e12)

    @property
    def days(self) -> float:
        return self.prepared.recipe.total_steps * self.time.total / 86400

    @property
    def checkpoint(self) -> int:
        recipe = self.prepared.recipe
        return checkpoint_files.expected_bytes(
            models.family(recipe.model.family).parameter_count(recipe.model), self.prepared.ds_config
        )

    @property
    def calibrated(self) -> str:
        constants = calibration()
        if self.kind.calibration not in constants.efficiency:
            return "not calibrated: an efficiency of 1 is assumed"
        return (
            f"calibrated on {self.kind.calibration}: {constants.source}; error on runs left out: median "
            f"{constants.median_error:.0%}, largest {constants.largest_error:.0%}"
        )


def make_plan(prepared: Prepared, sizes: Sizes, kind: Kind, hardware: Hardware) -> Plan:
    recipe, config = prepared.recipe, prepared.ds_config
    shape = shape_of(recipe.model, precision(config))
    memory, stage = fullest_rank(recipe, config, sizes, shape)
    time = step_time(work_of(recipe, config, sizes, shape), kind, hardware)
    host = host_memory(recipe, config, sizes, shape, hardware.per_node)
    return Plan(prepared, sizes, kind, hardware, memory, stage, host, time)


def sizes_for(prepared: Prepared, devices: int) -> Sizes:
    recipe, config = prepared.recipe, prepared.ds_config
    return resolve_sizes(recipe.global_batch_size, config, devices, **ds_config.parallel_sizes(config, recipe.pipeline))


def usable_devices(prepared: Prepared) -> list[int]:
    """Every number of devices that the layout and the batch can use, ascending; none where the batch sizes don't go together."""
    recipe, config = prepared.recipe, prepared.ds_config
    parallel = ds_config.parallel_sizes(config, recipe.pipeline)
    model_ranks = parallel["tensor"] * parallel["pipeline"] * parallel["sequence"]

    def works(number: int) -> bool:
        try:
            sizes_for(prepared, number)
            return True
        except InputError:
            return False

    return [number for data in divisors(recipe.global_batch_size) if works(number := model_ranks * data)]


def nearest(usable: list[int], devices: int, prepared: Prepared) -> str:
    parallel = ds_config.parallel_sizes(prepared.ds_config, prepared.recipe.pipeline)
    unit = parallel["tensor"] * parallel["pipeline"] * parallel["sequence"] * parallel["expert"]
    below, above = [n for n in usable if n < devices], [n for n in usable if n > devices]
    said = " or ".join(str(number) for number in (*below[-1:], *above[:1]))
    return f"it can use {said}, a multiple of {unit}" if unit > 1 else f"it can use {said}"


def easier(plan: Plan):
    """(key, value) of overrides that each need less memory, the cheapest in time first."""
    recipe, config = plan.prepared.recipe, plan.prepared.ds_config
    if recipe.compute.activation_checkpoint_interval != 1:
        yield "compute.activation_checkpoint_interval", 1
    if recipe.loss.chunk_tokens is None and recipe.pipeline.stages is None:
        yield "loss.chunk_tokens", 2048
    micro = config[MICRO]
    while micro > 1:
        micro //= 2
        yield f"ds.{MICRO}", micro
    if recipe.pipeline.stages is None:
        for stage in range(zero_stage(config) + 1, 3 if plan.sizes.tensor > 1 else 4):
            yield "ds.zero_optimization.stage", stage
    yield "ds.zero_optimization.offload_optimizer.device", "cpu"


def changes_that_fit(plan: Plan, arguments) -> list[str] | None:
    """Overrides that make the run fit, each added only when those before it were not enough; None: none of ours do."""
    changes: dict[str, object] = {}
    for key, value in easier(plan):
        changes[key] = value
        lighter = copy.copy(arguments)
        lighter.overrides = [*arguments.overrides, *_overrides(changes)]
        try:
            prepared = check(lighter, None, files=False)
            sizes = sizes_for(prepared, plan.hardware.devices)
        except InputError:
            continue
        if make_plan(prepared, sizes, plan.kind, plan.hardware).fits:
            return _overrides(changes)
    return None


def _overrides(changes: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def verdict(plan: Plan, arguments) -> str:
    need, have = plan.memory.device / GIB, plan.kind.memory_gib
    node, node_has = plan.host.offloaded / GIB, plan.hardware.host_memory_gib
    if plan.fits:
        host = f"; {node:.1f} of {node_has} GiB of a node's host" if node and node_has else ""
        return f"fits: {need:.1f} of {have:.1f} GiB{host}"
    if plan.fits_device:
        said = f"{node:.1f} GiB of host memory a node for what is offloaded, of {node_has} GiB"
        return f"does not fit: {said}; what would: more nodes, a larger host, or no offload on larger GPUs"
    changes = changes_that_fit(plan, arguments)
    mend = (
        " ".join(changes) if changes else f"more GPUs, more stages, or `--search` on more than {plan.hardware.devices}"
    )
    return f"does not fit: {need:.1f} GiB of {have:.1f} GiB; what would: {mend}"


def as_dict(plan: Plan) -> dict:
    """What --json prints, the verdict aside: bytes, seconds, plain numbers."""
    recipe, config = plan.prepared.recipe, plan.prepared.ds_config
    family = models.family(recipe.model.family)
    return {
        "recipe": recipe.name,
        "deepspeed_config": Path(recipe.deepspeed_config).name,
        "gpu": plan.kind.name,
        "gpus": plan.hardware.devices,
        "gpus_per_node": plan.hardware.devices_per_node,
        "fast_domain": plan.hardware.near,
        "layout": plan.sizes.as_dict(),
        "zero_stage": zero_stage(config),
        "precision": precision(config),
        "parameters": family.parameter_count(recipe.model),
        "active_parameters": family.active_parameter_count(recipe.model),
        "parameters_by_part": family.parameters_by_part(recipe.model),
        "flops_per_token": plan.flops_per_token,
        "fits": plan.fits,
        "memory_bytes": {**asdict(plan.memory), "device": plan.memory.device},
        "memory_available_bytes": int(plan.kind.memory_gib * GIB),
        "fullest_stage": plan.stage,
        "host_bytes_per_node": {
            **plan.host.states,
            "offloaded": plan.host.offloaded,
            "checkpoint_copies": plan.host.copies,
        },
        "host_memory_available_bytes": plan.hardware.host_memory_gib and plan.hardware.host_memory_gib * GIB,
        "step_s": {key: value for key, value in asdict(plan.time).items() if key != "bytes_sent"}
        | {"total": plan.time.total},
        "bytes_sent_per_step": plan.time.bytes_sent,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s / plan.hardware.devices,
        "mfu": plan.mfu,
        "steps": recipe.total_steps,
        "days": plan.days,
        "gpu_hours": plan.days * 24 * plan.hardware.devices,
        "checkpoint_bytes": plan.checkpoint,
        "checkpoint_write_s": plan.checkpoint / (STORAGE_GB_S * 1e9 * plan.hardware.nodes),
        "calibration": plan.calibrated,
    }


def table(plan: Plan) -> str:
    """The plan for a screen."""
    values, sizes, memory, time = as_dict(plan), plan.sizes, plan.memory, plan.time
    parallel = ", ".join(
        f"{name} {size}"
        for name in ("data", "tensor", "pipeline", "sequence", "expert")
        if (size := getattr(sizes, name)) > 1
    )
    lines = [
        f"{values['recipe']} ({values['deepspeed_config']}) on {values['gpus']} x {values['gpu']}, "
        f"{plan.hardware.nodes} nodes: {parallel or 'one device'}, ZeRO stage {values['zero_stage']}, {values['precision']}",
        f"{sizes}",
        "",
        f"parameters       {values['parameters']:,}, of which a token uses {values['active_parameters']:,}",
        "  " + ", ".join(f"{part} {count:,}" for part, count in values["parameters_by_part"].items() if count),
        f"FLOPs a token    {values['flops_per_token']:.4g}, forward and backward",
        "",
        f"memory a GPU     {memory.device / GIB:8.2f} GiB of {plan.kind.memory_gib:.1f}"
        + (f", the fullest stage being {plan.stage} of {sizes.pipeline}" if sizes.pipeline > 1 else ""),
    ]
    said = {
        "framework": f"framework ({FRAMEWORK_GIB:g} GiB taken for context and communicators)",
        "fragmentation": f"fragmentation ({FRAGMENTATION:.0%} of what changes)",
        "host": "on the host, a GPU",
        "master": "fp32 master weights",
        "optimizer": "optimizer states",
        "buckets": "communication buckets",
        "gathered": "gathered layers (ZeRO-3)",
        "recomputed": "the block that is computed again",
    }
    for key, value in asdict(memory).items():
        if value:
            lines.append(f"  {said.get(key, key):<52}{value / GIB:8.2f}")
    lines += ["", *host_lines(plan), "", f"step             {time.total:8.3f} s, {sizes.accumulation} micro batches"]
    told = {
        "compute": "computation",
        "data": "ZeRO's communication that computation does not hide",
        "idle": "idle pipeline stages",
        "update": "optimizer update",
    }
    for key, value in asdict(time).items():
        if key != "bytes_sent" and value:
            lines.append(f"  {told.get(key, f'{key} communication'):<52}{value:8.3f}  {value / time.total:4.0%}")
    sent = ", ".join(f"{key} {value / GIB:.1f}" for key, value in time.bytes_sent.items() if value)
    lines += [
        f"sent a step      {sent or 'nothing'} GiB a GPU",
        f"speed            {plan.tokens_per_s:,.0f} tokens/s, {values['tokens_per_s_per_gpu']:,.0f} a GPU, MFU {plan.mfu:.1%}",
        f"                 {plan.calibrated}",
        f"run              {values['steps']:,} steps, {plan.days:,.1f} days, {values['gpu_hours']:,.0f} GPU hours",
        f"checkpoint       {plan.checkpoint / 1e9:,.1f} GB, {values['checkpoint_write_s']:,.0f} s at {STORAGE_GB_S:g} GB/s a node",
        "",
    ]
    return "\n".join(lines)


def host_lines(plan: Plan) -> list[str]:
    """Host memory of the node that has most: what is offloaded, and a checkpoint's copies."""
    host, have = plan.host, plan.hardware.host_memory_gib
    if not host.offloaded:
        of = "nothing is offloaded"
    elif have is None:
        of = "not judged: the ds_config states no _hardware.host_memory_gib for these hosts"
    else:
        of = f"of {have} are offloaded"
    lines = [f"host, a node     {host.offloaded / GIB:8.2f} GiB {of}"]
    said = {
        "optimizer": "optimizer states",
        "master": "fp32 master weights",
        "gradients": "gradients",
        "buffers": "low-precision buffers",
    }
    lines += [f"  {said.get(part, part):<52}{size / GIB:8.2f}" for part, size in host.states.items() if size]
    if host.copies:
        waits = have is not None and host.copies > (have * GIB - host.offloaded) / 2
        line = "beside them, a checkpoint's copies" if host.offloaded else "a checkpoint's copies"
        why = "  more than half of what is left: training waits for a save" if waits else ""
        lines.append(f"  {line:<52}{host.copies / GIB:8.2f}{why}")
    return lines


def run_search(prepared: Prepared, kind: Kind, hardware: Hardware, arguments) -> int:
    recipe, config, output = prepared.recipe, prepared.ds_config, arguments.write
    shape = shape_of(recipe.model, precision(config))
    found = search(recipe, config, shape, kind, hardware, arguments.allow_cross_node)
    if not found:
        line = f"no layout of {recipe.name} fits {hardware.devices} x {kind.name}; try more GPUs, or offload"
        if not arguments.require_fit:
            raise InputError(line)
        print(misfit(recipe, line, arguments.json))
        return MISFIT
    if output is not None:
        write_layout(output, found[0], kind, hardware)
    if arguments.json:
        layouts = [
            {
                "layout": candidate.sizes.as_dict(),
                "zero_stage": zero_stage(candidate.config),
                "overrides": _overrides(candidate.overrides),
                "memory_bytes": candidate.memory.device,
                "step_s": candidate.time.total,
                "tokens_per_s": candidate.tokens_per_s,
            }
            for candidate in found
        ]
        about = {"recipe": recipe.name, "gpu": kind.name, "gpus": hardware.devices}
        print(json.dumps({**about, "layouts": layouts}, indent=2))
        return 0
    print(f"{len(found)} layouts fit {hardware.devices} x {kind.name}; the fastest:")
    for candidate in found[:SHOWN]:
        sizes = candidate.sizes
        layout = " ".join(f"{name}={getattr(sizes, name)}" for name in ("data", "tensor", "pipeline", "expert"))
        recompute = "recompute" if candidate.overrides["compute.activation_checkpoint_interval"] else "keep"
        print(
            f"  {candidate.tokens_per_s:14,.0f} tokens/s  {candidate.memory.device / GIB:6.1f} GiB  ZeRO "
            f"{zero_stage(candidate.config)} {layout} micro={sizes.micro_batch} {recompute}"
        )
    if output is not None:
        print(f"{output}: the first; take it with --deepspeed_config {output}")
    return 0


def write_layout(output: Path, best: Candidate, kind: Kind, hardware: Hardware) -> None:
    """The ds_config of `best`: its `_hardware` what was searched for, its `_recipe` what the recipe says otherwise."""
    note = {**best.config.get("_hardware", {}), "device": kind.name, "devices": hardware.devices}
    note |= {"devices_per_node": hardware.devices_per_node, "fast_domain": hardware.near}
    note["host_memory_gib"] = hardware.host_memory_gib
    note = {key: value for key, value in note.items() if value is not None}
    notes = {"_hardware": note, "_recipe": [*best.config.get("_recipe", []), *_overrides(best.overrides)]}
    write_text(
        output, json.dumps({**notes, **{k: v for k, v in best.config.items() if k not in notes}}, indent=2) + "\n"
    )


def misfit(recipe: Recipe, line: str, as_json: bool) -> str:
    return json.dumps({"recipe": recipe.name, "fits": False, "verdict": line}) if as_json else line


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # nothing runs here; without it DeepSpeed looks for devices, and warns
    usage = "python -m launch.plan [options] R.yaml [KEY=VALUE ...]"
    parser = check_parser(__doc__.splitlines()[0], prog="python -m launch.plan", usage=usage)
    parser.add_argument("--gpus", type=int, help="default: the ds_config's _hardware.devices")
    parser.add_argument("--gpu", help="kind, or its unique beginning: launch/gpu_kinds.yaml")
    parser.add_argument(
        "--fast_domain", type=int, help="GPUs that reach each other by the fast link (default: a node's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, plain numbers")
    parser.add_argument("--require_fit", action="store_true", help=f"exit {MISFIT} where the run does not fit")
    parser.add_argument("--search", action="store_true", help="rank the layouts that fit")
    parser.add_argument("--write", type=Path, metavar="C.json", help="with --search: write the first's ds_config")
    parser.add_argument(
        "--pipeline_chart", type=Path, metavar="FILE", help="draw the pipeline's schedules (.png, .svg)"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.write is not None and not arguments.search:
        raise InputError("--write goes with --search")
    if arguments.pipeline_chart is not None and arguments.search:
        raise InputError("--pipeline_chart draws one layout, not those of --search: leave one of the two out")
    take_recipe(arguments, usage)
    prepared = check(arguments, None, files=False)
    hardware = hardware_for(arguments, prepared)
    kind = kind_of(hardware.device if arguments.gpu is None else arguments.gpu)
    if kind != kind_of(hardware.device):  # other machines than the ds_config's
        node = arguments.devices_per_node or kind.devices_per_node
        beyond = kind.fast_domain if kind.fast_domain > kind.devices_per_node else None
        hardware = Hardware(kind.name, hardware.devices, node, beyond)
    for key, value in (("devices", arguments.gpus), ("fast_domain", arguments.fast_domain)):
        if value is not None:
            if value < 1:
                raise InputError(f"--{'gpus' if key == 'devices' else key} {value} must be positive")
            hardware = replace(hardware, **{key: value})
    if arguments.search:
        return run_search(prepared, kind, hardware, arguments)
    try:
        sizes = sizes_for(prepared, hardware.devices)
    except InputError as error:
        if not (usable := usable_devices(prepared)):
            raise
        near = nearest(usable, hardware.devices, prepared)
        line = f"does not fit: {hardware.devices} GPUs can't be used: {error}; {near}"
        print(misfit(prepared.recipe, line, arguments.json))
        return MISFIT if arguments.require_fit else 0
    where = prepared.recipe.deepspeed_config
    check_topology(sizes, hardware.devices_per_node, where, arguments.allow_cross_node)
    prepared = replace(prepared, sizes=sizes)
    plan = make_plan(prepared, sizes, kind, hardware)
    if arguments.pipeline_chart is not None:
        from launch.planning.chart import draw

        if sizes.pipeline == 1:
            raise InputError("--pipeline_chart needs pipeline.stages of 2 or more in the recipe")
        shares = draw(sizes.pipeline, sizes.accumulation, arguments.pipeline_chart)
        print("\n".join(f"{name}: {share:.1%} idle" for name, share in shares.items()), file=sys.stderr)
    if arguments.json:
        print(json.dumps({**as_dict(plan), "verdict": verdict(plan, arguments)}, indent=2))
    else:
        print("\n".join([table(plan), verdict(plan, arguments), *all_remarks(prepared, hardware)]))
    return MISFIT if arguments.require_fit and not plan.fits else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
