"""Memory of the fullest rank, by part, under DeepSpeed 0.19.8's ways of keeping weights, gradients and optimizer states.

Model states were compared with the bytes that ranks really allocate, activations with the tensors that backward saves:
docs/planning.md, tests/launch/planning/.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from launch.planning.shape import BYTES, Layer, Shape, on_rank, stages_of
from recipes.training.ds_config import optimizer_states, precision, selects_own_engine, zero_stage

GIB = 2**30
FRAMEWORK_GIB = 2.0  # CUDA context, libraries, NCCL's own buffers
FRAGMENTATION = 0.05  # of what changes from moment to moment
ENGINE_BUCKET = 500_000_000  # elements that DeepSpeed reduces at once where no bucket size is read


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `host` is in the host's memory, all others on the device.

    Attributes:
        weights: as the forward pass uses them, gathered ones not counted.
        gradients: as they are added up, low-precision ones before that included.
        master: fp32 weights of the optimizer; optimizer: its states.
        buckets: of reductions; gathered: weights of ZeRO-3 put together for a time.
        activations: kept for backward; recomputed: of the block that is computed again; logits: of one chunk.
        framework: what is not torch's tensors; fragmentation: lost between tensors.
    """

    weights: int
    gradients: int
    master: int
    optimizer: int
    buckets: int
    gathered: int
    activations: int
    recomputed: int
    logits: int
    framework: int
    fragmentation: int
    host: int

    @property
    def model_states(self) -> int:
        return self.weights + self.gradients + self.master + self.optimizer

    @property
    def device(self) -> int:
        return sum(asdict(self).values()) - self.host


def fullest_rank(recipe, config: dict, sizes, shape: Shape) -> tuple[Memory, int]:
    """(memory of the fullest rank, its pipeline stage)."""
    cut = stages_of(shape, sizes.pipeline, recipe.pipeline.partition)
    stages = [rank_memory(recipe, config, sizes, shape, layers, number) for number, layers in enumerate(cut)]
    return max(((memory, number) for number, memory in enumerate(stages)), key=lambda pair: pair[0].device)


def rank_memory(recipe, config: dict, sizes, shape: Shape, layers: tuple[Layer, ...], stage: int) -> Memory:
    """Memory of a rank that holds `layers`, as pipeline stage number `stage`."""
    mine = [on_rank(layer, sizes) for layer in layers]
    states = model_states(config, sizes, mine)
    zero, zero_optimization, size = zero_stage(config), config.get("zero_optimization", {}), BYTES[precision(config)]
    held = sum(layer.parameters for layer in mine)
    largest = max(layer.parameters for layer in mine)
    bucket = min(int(zero_optimization.get("reduce_bucket_size", ENGINE_BUCKET)), held)
    if zero == 0 or states["kind"] == "bf16 optimizer":
        buckets = min(ENGINE_BUCKET, held) * (4 if states["kind"] == "bf16 optimizer" else size)
    else:
        buckets = bucket * size * (2 if zero_optimization.get("overlap_comm", zero == 3) else 1)
    gathered = 0
    if zero == 3:
        live = int(zero_optimization.get("stage3_max_live_parameters", 1_000_000_000))
        prefetch = int(zero_optimization.get("stage3_prefetch_bucket_size", 50_000_000))
        gathered = min(max(live, largest + prefetch), held) * size
    kept, recomputed, logits = activations(recipe, sizes, shape, mine, precision(config))
    kept += between_stages(recipe, sizes, shape, size, stage)
    in_flight = min(sizes.accumulation, sizes.pipeline - stage)
    changing = buckets + gathered + kept * in_flight + recomputed + logits
    return Memory(
        **{key: states[key] for key in ("weights", "gradients", "master", "optimizer", "host")},
        buckets=buckets,
        gathered=gathered,
        activations=kept * in_flight,
        recomputed=recomputed,
        logits=logits,
        framework=int(FRAMEWORK_GIB * GIB),
        fragmentation=int(FRAGMENTATION * changing),
    )


def between_stages(recipe, sizes, shape: Shape, size: int, stage: int) -> int:
    """Bytes that DeepSpeed 0.19.8's pipeline keeps of one micro batch beside what backward needs.

    What a stage sends on, and, beside the copy that its first layer keeps, what it has been sent. Between tensor ranks
    the first is split, and the second put together in place.
    """
    hidden = sizes.micro_batch * recipe.data.seq_length * shape.hidden * size
    sent, received = stage + 1 < sizes.pipeline, stage > 0 and sizes.tensor == 1
    return hidden // sizes.tensor * sent + hidden * received


def model_states(config: dict, sizes, mine: list[Layer]) -> dict:
    """Bytes of weights, gradients, master weights and optimizer states of a rank that holds `mine`, and host memory.

    Experts are spread over the data-parallel ranks that hold the same ones, all else over all data-parallel ranks.
    """
    size, stage = BYTES[precision(config)], zero_stage(config)
    zero = config.get("zero_optimization", {})
    sums = BYTES[config.get("data_types", {}).get("grad_accum_dtype") or precision(config)]
    moments = optimizer_states(config)
    experts = sum(layer.experts for layer in mine)
    dense = sum(layer.parameters for layer in mine) - experts
    spread = sizes.data * sizes.sequence

    def part(bytes_each: int, stages: bool) -> int:
        if not stages:
            return (dense + experts) * bytes_each
        return dense * bytes_each // spread + experts * bytes_each // (spread // sizes.expert)

    kind = "zero"
    if stage == 0:
        kind = "plain" if size == 4 else "fp16 optimizer"
    elif stage == 1 and precision(config) == "bf16" and sums == 4 and not _offloads(zero, "offload_optimizer"):
        kind = "bf16 optimizer"
    weights = part(size, stage == 3)
    if kind == "plain":
        gradients, master = part(4, False), 0
    elif kind == "fp16 optimizer":
        gradients, master = part(size, False), part(4, False)
    elif kind == "bf16 optimizer":  # whole in fp32, and bf16 ones until they are added to them
        gradients, master = part(4 + size, False), part(4, True)
    else:
        gradients, master = part(max(sums, size) if stage == 1 else sums, stage > 1), part(4, True)
    optimizer = part(4 * moments, stage > 0)
    host = {}
    if where := _offloads(zero, "offload_optimizer"):
        # ZeRO-3 adds gradients up beside those that the optimizer is given. The others keep a low-precision buffer of the
        # new weights; ZeRO-2 adds gradients up on the device where it does so in fp32 for bf16, else in another buffer.
        host[where] = {"optimizer": optimizer, "master": master, "gradients": part(4 + sums * (stage == 3), True)}
        buffers, on_device = size * (stage < 3), stage < 2 or stage == 2 and sums > size
        if stage == 2 and not on_device and sizes.accumulation > 1:
            buffers += size
        host[where]["buffers"] = part(buffers, True)
        master, optimizer = 0, 0
        gradients = gradients if on_device else 0
    if where := _offloads(zero, "offload_param"):
        host[where] = {**host.get(where, {}), "weights": weights}
        weights = 0
    host = host.get("cpu", {})
    return {
        "weights": weights,
        "gradients": gradients,
        "master": master,
        "optimizer": optimizer,
        "host": sum(host.values()),
        "host_parts": host,
        "kind": kind,
    }


def _offloads(zero: dict, key: str) -> str | None:
    """Where to: "cpu" or "nvme"."""
    device = zero.get(key, {}).get("device", "none")
    return None if device == "none" else device


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the node that has most.

    Attributes:
        states: what is offloaded, by part; NVMe's buffers are not counted.
        copies: what a checkpoint is written from in the background. Where they don't fit, training waits for the save.
    """

    states: dict[str, int]
    copies: int

    @property
    def offloaded(self) -> int:
        return sum(self.states.values())


def host_memory(recipe, config: dict, sizes, shape: Shape, ranks: int) -> HostMemory:
    """Host memory of `ranks` ranks, which share a node."""
    cut = stages_of(shape, sizes.pipeline, recipe.pipeline.partition)
    stages = [[on_rank(layer, sizes) for layer in layers] for layers in cut]
    states = max((model_states(config, sizes, mine) for mine in stages), key=lambda found: found["host"])["host_parts"]
    copies = 0
    if recipe.checkpoint.asynchronous and not selects_own_engine(config):
        copies = max(checkpoint_copies(config, sizes, mine, ranks) for mine in stages)
        if recipe.checkpoint.host_memory_gib is not None:
            copies = min(copies, ranks * int(recipe.checkpoint.host_memory_gib * GIB))
    return HostMemory({part: size * ranks for part, size in states.items()}, copies)


def fits_host(host: HostMemory, hardware) -> bool:
    """Whether what is offloaded fits the node; where its memory is not stated, it is not judged."""
    return hardware.host_memory_gib is None or host.offloaded <= hardware.host_memory_gib * GIB


def checkpoint_copies(config: dict, sizes, mine: list[Layer], ranks: int) -> int:
    """Bytes of the copies of a checkpoint's files on the node whose ranks write the weights.

    Each rank writes its part of master weights and moments, in ZeRO-3 of the weights too; else the first data-parallel
    rank of each model part does. torch rounds a file's pinned memory up to a power of two.
    """
    size, stage = BYTES[precision(config)], zero_stage(config)
    kept = 4 * optimizer_states(config) + (0 if stage == 0 and size == 4 else 4)
    experts = sum(layer.experts for layer in mine)
    dense = sum(layer.parameters for layer in mine) - experts
    spread = sizes.data * sizes.sequence
    own = dense // spread + experts * sizes.expert // spread
    if stage == 3:
        return ranks * (_pinned(kept * own) + _pinned(size * own))
    whole = size + (kept if stage == 0 else 0)
    files = ranks * _pinned(kept * own) if stage else 0
    files += min(ranks, sizes.tensor) * _pinned(whole * dense)
    return files + min(ranks, sizes.tensor * sizes.expert) * whole * experts


def _pinned(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def activations(recipe, sizes, shape: Shape, mine: list[Layer], low: str) -> tuple[int, int, int]:
    """Bytes that one micro batch leaves for backward on a rank, of the block that is computed again, and of its logits.

    Experts are taken to be used evenly.
    """
    tokens = sizes.micro_batch * recipe.data.seq_length // sizes.sequence
    interval, size = recipe.compute.activation_checkpoint_interval, BYTES[low]
    kept = recomputed = 0.0
    blocks = [layer for layer in mine if layer.kind == "block"]
    for index, layer in enumerate(blocks):
        saved = layer.saved_whole + layer.saved_split
        if sizes.expert > 1 and layer.experts:
            saved += 2 * size * shape.top_k * shape.hidden  # sent to the experts' ranks and back
        if interval and index % interval == 0:
            recomputed = max(recomputed, saved * tokens)
            saved = size * shape.hidden + layer.saved_always
        kept += saved * tokens
    others = [layer for layer in mine if layer.kind != "block"]
    kept += tokens * sum(layer.saved_whole for layer in others)
    logits = 0
    if any(layer.kind == "head" for layer in mine):
        # Logits, their fp32 copy where they are not, and the log-softmax, which becomes the gradient.
        chunk = min(recipe.loss.chunk_tokens or tokens, tokens)
        logits = chunk * shape.vocabulary * (size + 8 if low != "fp32" else 8)
    return int(kept), int(recomputed), logits
