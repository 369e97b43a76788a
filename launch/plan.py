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
from launch.hardware import Hardware, Kind, check_topology, kind_of
from launch.planning.memory import FRAGMENTATION, FRAMEWORK_GIB, GIB, Memory, fullest_rank
from launch.planning.shape import shape_of
from launch.planning.speed import StepTime, calibration, step_time, work_of
from recipes import models
from recipes.training import checkpoint_files, ds_config
from recipes.training.ds_config import precision, zero_stage
from recipes.training.prepare import Prepared
from recipes.training.sizes import MICRO, Sizes, resolve_sizes

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
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.device <= self.kind.memory_gib * GIB

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
    return Plan(prepared, sizes, kind, hardware, memory, stage, time)


def sizes_for(prepared: Prepared, devices: int) -> Sizes:
    recipe, config = prepared.recipe, prepared.ds_config
    return resolve_sizes(recipe.global_batch_size, config, devices, **ds_config.parallel_sizes(config, recipe.pipeline))


def usable_devices(prepared: Prepared, devices: int) -> str:
    """Which numbers of devices near `devices` the layout and the batch can use."""
    recipe, config = prepared.recipe, prepared.ds_config
    parallel = ds_config.parallel_sizes(config, recipe.pipeline)
    unit = parallel["tensor"] * parallel["pipeline"] * parallel["sequence"] * parallel["expert"]

    def works(number: int) -> bool:
        try:
            sizes_for(prepared, number)
            return True
        except InputError:
            return False

    most = unit * recipe.global_batch_size
    below = next((n for n in range(devices // unit * unit, 0, -unit) if works(n)), None)
    above = next((n for n in range((devices // unit + 1) * unit, most + 1, unit) if works(n)), None)
    usable = " or ".join(str(number) for number in (below, above) if number)
    return f"it can use {usable}, a multiple of {unit}" if unit > 1 else f"it can use {usable}"


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
    if plan.fits:
        return f"fits: {need:.1f} of {have:.1f} GiB"
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
    lines += ["", f"step             {time.total:8.3f} s, {sizes.accumulation} micro batches"]
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


def run_search(prepared: Prepared, kind: Kind, hardware: Hardware, output: Path | None) -> None:
    from launch.planning.search import search

    recipe, config = prepared.recipe, prepared.ds_config
    found = search(recipe, config, shape_of(recipe.model, precision(config)), kind, hardware)
    if not found:
        raise InputError(f"no layout of {recipe.name} fits {hardware.devices} x {kind.name}; try more GPUs, or offload")
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
        best = found[0]
        note = {**config.get("_hardware", {}), "device": kind.name, "devices": hardware.devices}
        note |= {"devices_per_node": hardware.devices_per_node, "fast_domain": hardware.near}
        write_text(
            output,
            json.dumps({"_hardware": note, **{k: v for k, v in best.config.items() if k != "_hardware"}}, indent=2)
            + "\n",
        )
        print(f"{output}: the first; run it with {' '.join(_overrides(best.overrides))}")


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
    take_recipe(arguments, usage)
    prepared = check(arguments, None, files=False)
    hardware = hardware_for(arguments, prepared)
    for key, value in (("devices", arguments.gpus), ("fast_domain", arguments.fast_domain)):
        if value is not None:
            if value < 1:
                raise InputError(f"--{'gpus' if key == 'devices' else key} {value} must be positive")
            hardware = replace(hardware, **{key: value})
    kind = kind_of(arguments.gpu or hardware.device)
    if arguments.search:
        run_search(prepared, kind, hardware, arguments.write)
        return 0
    try:
        sizes = sizes_for(prepared, hardware.devices)
    except InputError as error:
        line = f"does not fit: {hardware.devices} GPUs can't be used: {error}; {usable_devices(prepared, hardware.devices)}"
        print(json.dumps({"recipe": prepared.recipe.name, "fits": False, "verdict": line}) if arguments.json else line)
        return MISFIT if arguments.require_fit else 0
    check_topology(sizes, hardware, prepared.recipe.deepspeed_config, arguments.allow_cross_node)
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
        print(
            "\n".join(
                [table(plan), verdict(plan, arguments), *all_remarks(prepared, replace(hardware, device=kind.name))]
            )
        )
    return MISFIT if arguments.require_fit and not plan.fits else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
