"""A model as the planner sees it: layers with the parameters they hold, and what each leaves in memory for backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from recipes import models

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ROUTING_BYTES = 38  # of indices and weights, a token and expert that it uses


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer of the model, in the order in which pipelines cut it.

    Attributes:
        whole: on every tensor-parallel rank; split: divided among them; experts: divided among expert-parallel ranks.
        matrices: elements of weights that a token is multiplied with: of the experts, those that it uses.
        kind: "embedding", "block", "norm" or "head".
        saved_whole, saved_split: what backward needs of this layer, in bytes a token; the second is divided among
            tensor-parallel ranks.
        saved_always: what the balance loss keeps of it even where the block is computed again.
    """

    kind: str
    whole: int = 0
    split: int = 0
    experts: int = 0
    matrices: int = 0
    expert_matrices: int = 0
    saved_whole: float = 0
    saved_split: float = 0
    saved_always: float = 0

    @property
    def parameters(self) -> int:
        return self.whole + self.split + self.experts


@dataclass(frozen=True)
class Shape:
    """Attributes:
    layers: embedding, blocks, final norm, head.
    tied: the head has no parameters of its own.
    attention_width: of all heads together, (query and key width) + (value width).
    num_experts, top_k: of a block with experts; 0 without.
    """

    layers: tuple[Layer, ...]
    hidden: int
    vocabulary: int
    tied: bool
    attention_width: int
    num_experts: int
    top_k: int
    expert_width: int

    @property
    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == "block"]


def shape_of(settings, precision: str) -> Shape:
    """The shape of a recipe's `model` section, from its family's own counts.

    Args:
        precision: "fp32", "bf16" or "fp16": of the activations.
    """
    family = models.family(settings.family)
    counts = family.parameters_by_part(settings)
    num_layers, hidden, size = settings.num_hidden_layers, settings.hidden_size, BYTES[precision]
    num_experts = getattr(settings, "num_experts", None) or getattr(settings, "n_routed_experts", 0)
    top_k = getattr(settings, "num_experts_per_tok", 0)
    dense = set(getattr(settings, "mlp_only_layers", []))
    dense |= set(range(getattr(settings, "first_k_dense_replace", 0)))
    num_dense = len(dense) if num_experts else num_layers
    num_sparse = num_layers - num_dense
    splits_attention = any("self_attn" in name for name in family.TENSOR_PLAN["column"])
    attention, norms = counts["attention"] // num_layers, (counts["norms"] - hidden) // num_layers
    attention_saved = _attention_saved(settings, size)
    norms_saved = 2 * ((4 + 2 * size) * hidden + 4)  # fp32 copy, normalized and scaled values, and their factor
    blocks = []
    for index in range(num_layers):
        sparse = bool(num_experts) and index not in dense
        split, whole, experts, saved_whole, saved_split = attention, norms, 0, norms_saved, attention_saved
        saved_always = 0
        if not splits_attention:
            split, whole = 0, norms + attention
            saved_whole, saved_split = norms_saved + attention_saved, 0
        if sparse:
            experts = counts["experts"] // num_sparse
            whole += counts["router"] // num_sparse
            shared = counts["shared_experts"] // num_sparse
            split += shared
            saved_split += 4 * size * (shared // (3 * hidden))
            width = settings.moe_intermediate_size
            saved_whole += top_k * ((4 * width + 2 * hidden) * size + ROUTING_BYTES) + 8 * num_experts
            if getattr(settings, "router_aux_loss_coef", 0):
                saved_always = 4 * num_experts
            if hasattr(settings, "n_group") and size == 2:
                saved_whole += 4 * hidden  # DeepSeek-V3's router computes in fp32
        else:
            split += counts["dense_mlp"] // num_dense
            saved_split += 4 * size * settings.intermediate_size  # gate, its silu, up, their product
        used = experts * top_k // num_experts if sparse else 0
        dense_matrices = whole + split - norms
        saved = (saved_whole, saved_split, saved_always)
        blocks.append(Layer("block", whole, split, experts, dense_matrices, used, *saved))
    vocabulary = settings.vocab_size * hidden
    tied = settings.tie_word_embeddings
    layers = (
        Layer("embedding", whole=vocabulary),
        *blocks,
        Layer("norm", whole=hidden, saved_whole=norms_saved / 2),
        Layer("head", whole=0 if tied else vocabulary, matrices=vocabulary),
    )
    assert sum(layer.parameters for layer in layers) == family.parameter_count(settings)
    width = (family.flops_per_token(settings, 2) - family.flops_per_token(settings, 1)) // (6 * num_layers)
    expert_width = getattr(settings, "moe_intermediate_size", 0)
    return Shape(
        layers, hidden, settings.vocab_size, tied, width, num_experts, top_k if num_experts else 0, expert_width
    )


def _attention_saved(settings, size: int) -> float:
    """Bytes a token that attention keeps for backward, without the norm before it, by a fused kernel (sdpa)."""
    heads = settings.num_attention_heads
    if hasattr(settings, "kv_lora_rank"):
        query, value = settings.qk_nope_head_dim + settings.qk_rope_head_dim, settings.v_head_dim
        latents = settings.kv_lora_rank + (settings.q_lora_rank or 0)
        return (4 + 2 * size) * latents + heads * (size * (2 * query + settings.qk_nope_head_dim + 2 * value) + 4)
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    query, key = heads * width, settings.num_key_value_heads * width
    saved = size * (2 * query + 2 * key) + 4 * heads  # queries, output, keys, values; a number a head for the softmax
    if models.family(settings.family).TENSOR_PLAN["summed"]:  # norms of queries and keys
        saved += (4 + size) * (query + key) + 4 * (heads + settings.num_key_value_heads)
    return saved


def on_rank(layer: Layer, sizes, split_head: bool = False) -> Layer:
    """The part of a layer that one rank holds and keeps.

    Args:
        split_head: whether tensor-parallel ranks divide the head, which those of this repository don't.
    """
    tensor, expert = sizes.tensor, sizes.expert
    if layer.kind == "head" and split_head:
        layer = replace(layer, whole=0, split=layer.whole)
    return replace(
        layer,
        split=layer.split // tensor,
        experts=layer.experts // expert,
        saved_split=layer.saved_split / tensor,
    )


@functools.cache
def stages_of(shape: Shape, stages: int, partition: str) -> list[tuple[Layer, ...]]:
    """The layers of each pipeline stage, as deepspeed.pipe.PipelineModule would cut them.

    "type:..." is taken to mean blocks, and "cost", which is measured at the start, matrix products.
    """
    if stages == 1:
        return [shape.layers]
    from deepspeed.runtime import utils

    if partition == "uniform":
        bounds = utils.partition_uniform(len(shape.layers), stages)
    else:
        head = shape.layers[0].parameters if shape.tied else shape.layers[-1].parameters
        weights = [layer.parameters for layer in shape.layers[:-1]] + [head]
        if partition == "cost":
            weights = [layer.matrices + layer.expert_matrices for layer in shape.layers]
        if partition.startswith("type:"):
            weights = [int(layer.kind == "block") for layer in shape.layers]
        bounds = utils.partition_balanced(weights, stages)
    cut = [shape.layers[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    if shape.tied:  # the last stage has a copy of the embedding
        cut[-1] = (*cut[-1][:-1], replace(cut[-1][-1], whole=shape.layers[0].whole))
    return cut
