"""Time of an optimizer step, by part, from data sheets and an efficiency that published runs were fitted with.

What is modelled: products at an efficiency that falls with narrow matrices, causal attention at half of its square,
collectives at a share of the links' speed, ZeRO's hidden behind the computation as far as they fit, tensor, expert and
sequence parallelism's not, idle pipeline stages, and the update. `benchmarks/plan_accuracy.py` fits the constants
(calibration.yaml) and compares with runs that were left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

from launch.hardware import Hardware, Kind
from launch.planning.shape import BYTES, Layer, Shape, on_rank, stages_of
from recipes.training.ds_config import precision, zero_stage
from recipes.training.sizes import Sizes

CALIBRATION_FILE = Path(__file__).with_name("calibration.yaml")
UPDATE_BYTES = 34  # read and written a parameter by Adam: gradient, master weight, two moments, weight
HOST_UPDATE_GB_S = 20  # of the same on a host, one rank's share


@dataclass(frozen=True)
class Calibration:
    """Attributes:
    efficiency: share of a kind's peak that wide products reach, by generation.
    half_width: matrix width at which products reach half of that.
    expert_efficiency: factor on it for experts' products.
    passes: how often a block's hidden values are read or written by what is not a product, forward and backward.
    recompute_cost: of a forward pass, what computing it again costs.
    link_efficiency: share of a link's speed that collectives reach.
    overlap: share of the computation that ZeRO's collectives can hide behind.
    median_error, largest_error: on the runs that were left out of the fit.
    """

    efficiency: dict[str, float]
    half_width: float
    expert_efficiency: float
    passes: float
    recompute_cost: float
    link_efficiency: float
    overlap: float
    median_error: float
    largest_error: float
    source: str


@functools.cache
def calibration() -> Calibration:
    return Calibration(**yaml.safe_load(CALIBRATION_FILE.read_text()))


@dataclass(frozen=True)
class Work:
    """What one step has to do.

    Attributes:
        recomputed: share of the blocks that are computed again in backward.
        size: bytes of a weight or activation; sums: of a gradient where they are added up.
        offload: whether the optimizer's part is done by the host.
        interleaved: pieces of the model on each pipeline rank; DeepSpeed's schedules have one.
        split_head: as in `on_rank`.
    """

    shape: Shape
    sizes: Sizes
    seq_length: int
    partition: str = "parameters"
    zero: int = 1
    recomputed: float = 0.0
    size: int = 2
    sums: int = 4
    offload: bool = False
    interleaved: int = 1
    split_head: bool = False

    @property
    def tokens(self) -> int:
        return self.sizes.global_batch * self.seq_length


def work_of(recipe, config: dict, sizes: Sizes, shape: Shape) -> Work:
    low, interval = precision(config), recipe.compute.activation_checkpoint_interval
    layers = recipe.model.num_hidden_layers
    return Work(
        shape,
        sizes,
        recipe.data.seq_length,
        recipe.pipeline.partition,
        zero_stage(config),
        -(-layers // interval) / layers if interval else 0.0,
        BYTES[low],
        BYTES[config.get("data_types", {}).get("grad_accum_dtype") or low],
        config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none",
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; `compute` to `experts` are of the busiest pipeline stage.

    `bytes_sent` are one rank's a step, by kind of traffic.
    """

    compute: float
    tensor: float
    sequence: float
    experts: float
    data: float
    pipeline: float
    idle: float
    update: float
    bytes_sent: dict[str, int]

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.tensor
            + self.sequence
            + self.experts
            + self.data
            + self.pipeline
            + self.idle
            + self.update
        )


def step_time(work: Work, kind: Kind, hardware: Hardware, constants: Calibration | None = None) -> StepTime:
    constants = constants or calibration()
    sizes, shape, size = work.sizes, work.shape, work.size
    tokens = sizes.micro_batch * work.seq_length // sizes.sequence  # of one rank's micro batch
    cut = [
        [on_rank(layer, sizes, work.split_head) for layer in stage]
        for stage in stages_of(shape, sizes.pipeline, work.partition)
    ]
    mine = max(cut, key=lambda stage: compute_time(work, stage, tokens, kind, constants))
    compute = compute_time(work, mine, tokens, kind, constants)
    blocks = [layer for layer in mine if layer.kind == "block"]
    hidden_bytes = tokens * shape.hidden * size
    links = Links(kind, hardware, constants.link_efficiency)

    # Forward, backward and recomputation of a block sum its output over the ranks twice each.
    tensor_bytes = 2 * (2 + work.recomputed) * len(blocks) * hidden_bytes if sizes.tensor > 1 else 0
    tensor = links.all_reduce(tensor_bytes, sizes.tensor, 1)
    # Ulysses: queries, keys and values to the heads' ranks and the output back, forward and backward.
    sequence_bytes = 4 * (2 + work.recomputed) * len(blocks) * hidden_bytes if sizes.sequence > 1 else 0
    sequence = links.all_to_all(sequence_bytes, sizes.sequence, 1)
    sparse = sum(1 for layer in blocks if layer.experts)
    expert_bytes = 2 * (2 + work.recomputed) * sparse * hidden_bytes * shape.top_k if sizes.expert > 1 else 0
    experts = links.all_to_all(expert_bytes, sizes.expert, 1)
    pipeline_bytes = 2 * hidden_bytes if sizes.pipeline > 1 else 0
    pipeline = links.send(pipeline_bytes, sizes)

    micro = sizes.accumulation
    data_bytes, per_micro, per_step = data_parallel(work, mine, links)
    hidden_behind = constants.overlap * compute
    data = micro * max(0.0, per_micro - hidden_behind) + max(0.0, per_step - hidden_behind)
    each = compute + tensor + sequence + experts + pipeline
    update = update_time(work, mine, kind)
    return StepTime(
        compute=compute * micro,
        tensor=tensor * micro,
        sequence=sequence * micro,
        experts=experts * micro,
        data=data,
        pipeline=pipeline * micro,
        idle=each * (sizes.pipeline - 1) / work.interleaved,
        update=update,
        bytes_sent={
            "tensor": int(tensor_bytes * micro),
            "sequence": int(sequence_bytes * micro),
            "experts": int(expert_bytes * micro),
            "pipeline": int(pipeline_bytes * micro),
            "data": int(data_bytes),
        },
    )


def compute_time(work: Work, mine: list[Layer], tokens: int, kind: Kind, constants: Calibration) -> float:
    """Seconds of forward, backward and recomputation of one micro batch."""
    shape, tensor = work.shape, work.sizes.tensor
    peak = 1e12 * (kind.fp32_tflops if work.size == 4 else kind.bf16_tflops)
    top = constants.efficiency.get(kind.calibration, 1.0)

    def efficiency(width: float) -> float:
        return top * width / (width + constants.half_width)

    seconds = 0.0
    for layer in mine:
        again = work.recomputed * constants.recompute_cost if layer.kind == "block" else 0
        passes = 3 + again
        attention = shape.attention_width / tensor * work.seq_length / 2 if layer.kind == "block" else 0
        share = tensor if layer.split or layer.kind == "head" and work.split_head else 1
        dense = 2 * (layer.matrices / share + attention)
        seconds += passes * tokens * dense / (peak * efficiency(shape.hidden / tensor))
        if layer.expert_matrices:
            experts = peak * efficiency(shape.expert_width) * constants.expert_efficiency
            seconds += passes * tokens * 2 * layer.expert_matrices / experts
        if layer.kind == "block":
            rows = shape.top_k if layer.experts else 1  # each expert's copy of a token is moved as well
            moved = constants.passes * (1 + again / 3) * tokens * shape.hidden * work.size * (1 + rows) / 2
            seconds += moved / tensor / (kind.memory_gb_s * 1e9)
    return seconds


@dataclass(frozen=True)
class Links:
    """Seconds of collectives over the fast domain and the network.

    A group's ranks are `stride` apart. Where a group spans fast domains, its members in one share all their network
    cards, and the slower of the two kinds of link decides.
    """

    kind: Kind
    hardware: Hardware
    efficiency: float

    def speed(self, group: int, stride: int) -> float:
        """Bytes a second of a ring over the group, each rank's."""
        near = max(1, min(group, self.hardware.near // stride))
        fast, network = self.kind.fast_gb_s * 1e9, self.kind.network_gb_s * 1e9 * near
        return self.efficiency * (fast if near == group else min(fast, network) if near > 1 else network)

    def all_gather(self, bytes_whole: float, group: int, stride: int) -> float:
        return bytes_whole * (group - 1) / group / self.speed(group, stride) if group > 1 else 0.0

    def all_reduce(self, bytes_whole: float, group: int, stride: int) -> float:
        return 2 * self.all_gather(bytes_whole, group, stride)

    def all_to_all(self, bytes_sent: float, group: int, stride: int) -> float:
        """What goes to other fast domains takes the rank's own network card."""
        if group == 1:
            return 0.0
        near = max(1, min(group, self.hardware.near // stride))
        far = bytes_sent * (group - near) / group / (self.kind.network_gb_s * 1e9)
        close = bytes_sent * (near - 1) / group / (self.kind.fast_gb_s * 1e9)
        return max(far, close) / self.efficiency

    def send(self, bytes_sent: float, sizes: Sizes) -> float:
        apart = sizes.world // sizes.pipeline >= self.hardware.near
        return bytes_sent / (1e9 * (self.kind.network_gb_s if apart else self.kind.fast_gb_s) * self.efficiency)


def data_parallel(work: Work, mine: list[Layer], links: Links) -> tuple[float, float, float]:
    """(bytes a rank sends a step, seconds a micro batch, seconds a step) of ZeRO's own collectives.

    Stage 3 gathers weights for forward, backward and recomputation, and scatters gradients, every micro batch; stage 2
    scatters gradients every micro batch; stages 0 and 1 once a step. Stages 1 and 2 gather the new weights once a step.
    """
    sizes = work.sizes
    spread, stride = sizes.data * sizes.sequence, sizes.tensor
    experts = sum(layer.experts for layer in mine)
    parts = [(sum(layer.parameters for layer in mine) - experts, spread, stride)]
    if experts:
        parts.append((experts, spread // sizes.expert, stride * sizes.expert))
    gradient = work.sums if work.zero == 1 and work.size == 2 else work.size
    sent = micro = step = 0.0
    for parameters, group, apart in parts:
        weights, gradients = parameters * work.size, parameters * gradient
        if work.zero == 3:
            gathers = 2 * weights
            micro += links.all_gather(gathers + gradients, group, apart)
            sent += (gathers + gradients) * sizes.accumulation
        elif work.zero == 2:
            micro += links.all_gather(gradients, group, apart)
            step += links.all_gather(weights, group, apart)
            sent += gradients * sizes.accumulation + weights
        else:
            step += links.all_reduce(gradients, group, apart)
            step += links.all_gather(weights, group, apart) if work.zero == 1 else 0.0
            sent += 2 * gradients + (weights if work.zero == 1 else 0)
    return sent if spread > 1 else 0.0, micro, step


def update_time(work: Work, mine: list[Layer], kind: Kind) -> float:
    """Seconds of the optimizer's update of a rank's part."""
    experts = sum(layer.experts for layer in mine)
    dense = sum(layer.parameters for layer in mine) - experts
    spread = work.sizes.data * work.sizes.sequence if work.zero else 1
    own = dense / spread + experts / max(1, spread // work.sizes.expert)
    if work.offload:
        moved = own * (work.sums + work.size)
        return own * UPDATE_BYTES / (HOST_UPDATE_GB_S * 1e9) + moved / (kind.host_gb_s * 1e9)
    return own * UPDATE_BYTES / (kind.memory_gb_s * 1e9)
