"""The one resolver of batch and parallel sizes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from data_prep.errors import InputError

MICRO, ACCUMULATION, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True)
class Sizes:
    """Batch sizes in sequences, parallel sizes in ranks: world = data · tensor · pipeline · sequence."""

    world: int
    data: int
    tensor: int
    pipeline: int
    sequence: int
    expert: int
    micro_batch: int
    accumulation: int
    global_batch: int

    # Ranks are numbered pipeline stage by stage; within a stage, tensor or sequence ranks are neighbours.
    def data_rank(self, rank: int) -> int:
        """Which part of each batch a rank reads; the ranks that share a model read the same."""
        return rank // (self.tensor * self.sequence) % self.data

    def sequence_rank(self, rank: int) -> int:
        """Which part of each sequence a rank computes."""
        return rank % self.sequence

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = micro batch {self.micro_batch} x accumulation {self.accumulation} "
            f"x data parallel {self.data} on {self.world} rank{'s' if self.world > 1 else ''}"
        )


def resolve_sizes(
    global_batch_size: int | None,
    ds_config: dict,
    world_size: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    expert: int = 1,
) -> Sizes:
    """Derive the accumulation from the global batch (or the reverse) and check that everything agrees.

    Args:
        global_batch_size: sequences an optimizer step; None: taken from the JSON.
        ds_config: the JSON. States the micro batch; may state accumulation or train_batch_size, which must then agree.
        world_size: ranks in all.

    Raises InputError naming the key and the numbers.
    """
    stated = {key: _positive_integer(ds_config[key], key) for key in (MICRO, ACCUMULATION, BATCH) if key in ds_config}
    if global_batch_size is not None:
        global_batch_size = _positive_integer(global_batch_size, "global_batch_size")
    _positive_integer(world_size, "world size")
    model_ranks = tensor * pipeline * sequence
    if world_size % model_ranks:
        raise InputError(
            f"world size {world_size} is not divisible by {model_ranks} = tensor {tensor} x pipeline {pipeline} x "
            f"sequence {sequence}; change the number of ranks or the parallel sizes"
        )
    data = world_size // model_ranks
    if expert > 1 and data % expert:
        raise InputError(f"expert parallel size {expert} does not divide the data-parallel size {data}")
    if MICRO not in stated:
        raise InputError(f"the ds_config states no {MICRO}: add it (sequences one rank takes at once)")
    micro, accumulation = stated[MICRO], stated.get(ACCUMULATION)
    batch = global_batch_size if global_batch_size is not None else stated.get(BATCH)
    if batch is None:
        if accumulation is None:
            raise InputError(f"neither a global batch size nor {ACCUMULATION} is given: state global_batch_size")
        batch = micro * accumulation * data
    if accumulation is None:
        if batch % (micro * data):
            below, above = batch // (micro * data), -(-batch // (micro * data))
            nearest = " or ".join(str(n * micro * data) for n in (below, above) if n)
            raise InputError(
                f"global_batch_size {batch} is not divisible by {MICRO} {micro} x data-parallel size {data} = "
                f"{micro * data}: use a global_batch_size of {nearest}, another micro batch or another number of ranks"
            )
        accumulation = batch // (micro * data)
    if batch != micro * accumulation * data:
        raise InputError(
            f"{batch} != {micro}*{accumulation}*{data}: global_batch_size {batch} is not {MICRO} {micro} x "
            f"{ACCUMULATION} {accumulation} x data-parallel size {data}; leave {ACCUMULATION} out to have it derived"
        )
    if BATCH in stated and stated[BATCH] != batch:
        raise InputError(
            f"{BATCH} {stated[BATCH]} in the ds_config is not global_batch_size {batch}; leave {BATCH} out"
        )
    return Sizes(world_size, data, tensor, pipeline, sequence, expert, micro, accumulation, batch)


def check_topology(sizes: Sizes, devices_per_node: int, where: str, allow_cross_node: bool = False) -> None:
    """Refuse tensor and sequence groups across nodes: they wait for each other in every layer.

    Ranks of such a group are neighbours: pipeline stages lie furthest apart, then data-parallel ranks.
    """
    node = devices_per_node
    for name, size in (("tensor", sizes.tensor), ("sequence", sizes.sequence)):
        if sizes.world > node and node % size and not allow_cross_node:
            raise InputError(
                f"{where}: {name} parallel size {size} does not divide the {node} devices of a node: groups would cross nodes "
                "and wait for the network in every layer; use a divisor, or --allow_cross_node"
            )


def divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _positive_integer(value, key: str) -> int:
    # bool is an int, and DeepSpeed takes 8.0 and fails later on "8": all three are refused here.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} must be a positive integer, not {value!r}")
    return value
