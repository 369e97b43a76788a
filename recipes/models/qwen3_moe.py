"""The Qwen3-MoE family: Qwen3's attention, and in place of the feed-forward SwiGLU experts, top k of them a token.

The router's probabilities are a softmax over all experts; the k largest are taken, rescaled to sum to 1 under
norm_topk_prob. transformers keeps a layer's experts stacked: `mlp.experts.gate_up_proj` [experts, 2 · width, hidden]
and `mlp.experts.down_proj` [experts, hidden, width]. Nothing in the forward pass balances the experts: that is
balance.sequence_balance, weighted with router_aux_loss_coef.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.models import InitSettings, decoder

# Projections that write to the residual stream; their initial std is scaled by depth (GPT-2's rule).
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
# Dense layers and attention; experts are for expert parallelism.
TENSOR_PLAN = {**decoder.TENSOR_PLAN, "summed": ("self_attn.q_norm", "self_attn.k_norm")}


@dataclass
class Settings:
    """Names and meanings are those of transformers' Qwen3MoeConfig."""

    family: str = "qwen3_moe"
    vocab_size: int = MISSING  # entries, padding rows included
    hidden_size: int = MISSING
    moe_intermediate_size: int = MISSING  # width of one expert
    num_experts: int = MISSING  # in each layer
    num_experts_per_tok: int = MISSING  # experts that a token uses
    norm_topk_prob: bool = True  # their weights are made to sum to 1
    router_aux_loss_coef: float = 0.001  # weight of the balance loss; 0: none
    mlp_only_layers: list[int] = field(default_factory=list)  # layers, from 0, with a dense feed-forward
    intermediate_size: int | None = None  # width of that dense feed-forward
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = 128  # not tied to hidden_size / num_attention_heads
    rope_theta: float = 1000000.0
    rope_scaling: Any = None  # {rope_type: yarn, factor: ..., ...} for longer contexts; null: none
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    init: InitSettings = field(default_factory=InitSettings)
    init_from: str | None = None  # Hugging Face checkpoint to start from, directory or hub name; null: drawn weights


def check(settings: Settings, seq_length: int, need) -> None:
    decoder.check_common(settings, need)
    decoder.check_positive(settings, need, "moe_intermediate_size", "num_experts")
    decoder.check_top_k(settings, settings.num_experts, need)
    decoder.check_grouped_attention(settings, settings.head_dim, need)
    coefficient = settings.router_aux_loss_coef
    need(coefficient >= 0, "model.router_aux_loss_coef", f"{coefficient:g} must not be negative")
    dense, layers = settings.mlp_only_layers, settings.num_hidden_layers
    need(
        len(set(dense)) == len(dense) and all(0 <= layer < layers for layer in dense),
        "model.mlp_only_layers",
        f"{dense} must hold different numbers in 0 .. {layers - 1}",
    )
    need(
        (settings.intermediate_size or 0) > 0 or not dense and settings.intermediate_size is None,
        "model.intermediate_size",
        f"{settings.intermediate_size} must be positive: the width of the dense layers {dense}",
    )


def hf_config(settings: Settings, seq_length: int):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **decoder.config_arguments(settings, seq_length),
        intermediate_size=settings.intermediate_size or settings.moe_intermediate_size,  # without dense layers unused
        moe_intermediate_size=settings.moe_intermediate_size,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.num_experts_per_tok,
        norm_topk_prob=settings.norm_topk_prob,
        router_aux_loss_coef=settings.router_aux_loss_coef,
        mlp_only_layers=list(settings.mlp_only_layers),
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
    )


def parameters_by_part(settings: Settings) -> dict[str, int]:
    h, d, layers = settings.hidden_size, settings.head_dim, settings.num_hidden_layers
    dense = len(settings.mlp_only_layers)
    return decoder.parts(
        settings,
        attention=layers * h * d * (2 * settings.num_attention_heads + 2 * settings.num_key_value_heads),
        dense_mlp=dense * 3 * h * (settings.intermediate_size or 0),
        experts=(layers - dense) * settings.num_experts * 3 * h * settings.moe_intermediate_size,
        router=(layers - dense) * settings.num_experts * h,
        norms=layers * (2 * h + 2 * d) + h,
    )


def parameter_count(settings: Settings) -> int:
    """Total parameters; a tied output head is counted once."""
    return sum(parameters_by_part(settings).values())


def active_parts(settings: Settings) -> dict[str, int]:
    return decoder.active_parts(parameters_by_part(settings), settings.num_experts_per_tok, settings.num_experts)


def active_parameter_count(settings: Settings) -> int:
    """Parameters that one token uses: all but the experts it is not routed to."""
    return sum(active_parts(settings).values())


def flops_per_token(settings: Settings, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: decoder.flops_per_token's formula."""
    width = 2 * settings.num_attention_heads * settings.head_dim
    return decoder.flops_per_token(active_parts(settings), settings.num_hidden_layers, width, seq_length)
