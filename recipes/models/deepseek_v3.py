"""The DeepSeek-V3 family: multi-head latent attention (MLA), routed and shared experts, dense first layers.

MLA (arXiv:2412.19437, section 2.1): queries, and keys with values, go through a narrow latent with an RMSNorm; each
head's query and key have a part without positions (qk_nope_head_dim) and a rotary one (qk_rope_head_dim), the rotary
key being shared by all heads. Routing: sigmoid scores; the topk_group groups of experts with the largest sums of two
scores are kept, the top k experts of those taken, their weights rescaled to sum to 1 and multiplied by
routed_scaling_factor. transformers stacks a layer's experts as in qwen3_moe.

What balances the experts: nothing here. `mlp.gate.e_score_correction_bias`, which DeepSeek moves after each step
against the experts' load, is a buffer that takes part in choosing experts; transformers never updates it, and
DeepSpeed's AutoEP copies it into its router as a buffer without updating it either (its preset deepseek_v3 refuses
load_balance_coeff). It is zero, or what init_from holds, and stays so; it is kept in checkpoints and exports.
All parameters, the router's weight among them, are trained. There is no multi-token prediction layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.models import InitSettings, decoder

# Projections that write to the residual stream; their initial std is scaled by depth (GPT-2's rule).
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
# Attention stays whole: the rotary key reaches all heads past the split projections, so a rank would see only its own
# heads' part of that gradient. Experts are for expert parallelism.
TENSOR_PLAN = {
    "column": ("mlp.gate_proj", "mlp.up_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "row": ("mlp.down_proj", "mlp.shared_experts.down_proj"),
    "gathered": ("lm_head",),
    "summed": (),
}


@dataclass
class Settings:
    """Names and meanings are those of transformers' DeepseekV3Config."""

    family: str = "deepseek_v3"
    vocab_size: int = MISSING  # entries, padding rows included
    hidden_size: int = MISSING
    intermediate_size: int = MISSING  # width of the dense first layers' SwiGLU feed-forward
    moe_intermediate_size: int = MISSING  # width of one expert
    first_k_dense_replace: int = 3  # layers at the start with a dense feed-forward
    n_routed_experts: int = MISSING  # in each later layer
    n_shared_experts: int = 1  # used by every token; one feed-forward of n_shared_experts · moe_intermediate_size
    num_experts_per_tok: int = MISSING  # routed experts that a token uses
    n_group: int = 1  # groups of routed experts
    topk_group: int = 1  # groups that a token's experts come from
    norm_topk_prob: bool = True  # the routed experts' weights are made to sum to 1
    routed_scaling_factor: float = 2.5  # factor on those weights
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    q_lora_rank: int | None = MISSING  # width of the queries' latent; null: none
    kv_lora_rank: int = MISSING  # width of the latent of keys and values
    qk_nope_head_dim: int = 128  # a head's query and key without positions
    qk_rope_head_dim: int = 64  # a head's query and key with rotary positions
    v_head_dim: int = 128  # a head's value
    rope_theta: float = 10000.0
    rope_scaling: Any = None  # {rope_type: yarn, factor: ..., ...} for longer contexts; null: none
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    init: InitSettings = field(default_factory=InitSettings)
    init_from: str | None = None  # Hugging Face checkpoint to start from, directory or hub name; null: drawn weights


def check(settings: Settings, seq_length: int, need) -> None:
    decoder.check_common(settings, need)
    sizes = ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    decoder.check_positive(settings, need, *sizes, *widths, "routed_scaling_factor")
    rank, rotary = settings.q_lora_rank, settings.qk_rope_head_dim
    need(rank is None or rank > 0, "model.q_lora_rank", f"{rank} must be positive or null")
    need(rotary % 2 == 0, "model.qk_rope_head_dim", f"{rotary} must be even for rotary positions")
    first, layers = settings.first_k_dense_replace, settings.num_hidden_layers
    need(0 <= first <= layers, "model.first_k_dense_replace", f"{first} must lie in 0 .. {layers} (the layers)")
    experts, groups, kept = settings.n_routed_experts, settings.n_group, settings.topk_group
    need(
        groups > 0 and experts % groups == 0 and experts // groups >= 2,
        "model.n_group",
        f"{groups} must divide n_routed_experts {experts} into groups of at least 2: a group is scored by its best two",
    )
    need(0 < kept <= groups, "model.topk_group", f"{kept} must lie in 1 .. {groups} (n_group)")
    decoder.check_top_k(settings, experts // groups * kept, need)


def hf_config(settings: Settings, seq_length: int):
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **decoder.config_arguments(settings, seq_length),
        intermediate_size=settings.intermediate_size,
        moe_intermediate_size=settings.moe_intermediate_size,
        first_k_dense_replace=settings.first_k_dense_replace,
        n_routed_experts=settings.n_routed_experts,
        n_shared_experts=settings.n_shared_experts,
        num_experts_per_tok=settings.num_experts_per_tok,
        n_group=settings.n_group,
        topk_group=settings.topk_group,
        norm_topk_prob=settings.norm_topk_prob,
        routed_scaling_factor=settings.routed_scaling_factor,
        num_key_value_heads=settings.num_attention_heads,
        q_lora_rank=settings.q_lora_rank,
        kv_lora_rank=settings.kv_lora_rank,
        qk_nope_head_dim=settings.qk_nope_head_dim,
        qk_rope_head_dim=settings.qk_rope_head_dim,
        v_head_dim=settings.v_head_dim,
        num_nextn_predict_layers=0,
    )


def parameters_by_part(settings: Settings) -> dict[str, int]:
    h, heads, layers = settings.hidden_size, settings.num_attention_heads, settings.num_hidden_layers
    query = heads * (settings.qk_nope_head_dim + settings.qk_rope_head_dim)
    q_rank, kv_rank = settings.q_lora_rank, settings.kv_lora_rank
    queries = h * query if q_rank is None else q_rank * (h + query)
    keys_and_values = h * (kv_rank + settings.qk_rope_head_dim)
    keys_and_values += kv_rank * heads * (settings.qk_nope_head_dim + settings.v_head_dim)
    output = heads * settings.v_head_dim * h
    sparse, expert = layers - settings.first_k_dense_replace, 3 * h * settings.moe_intermediate_size
    return decoder.parts(
        settings,
        attention=layers * (queries + keys_and_values + output),
        dense_mlp=settings.first_k_dense_replace * 3 * h * settings.intermediate_size,
        experts=sparse * settings.n_routed_experts * expert,
        router=sparse * settings.n_routed_experts * h,
        shared_experts=sparse * settings.n_shared_experts * expert,
        norms=layers * (2 * h + (q_rank or 0) + kv_rank) + h,
    )


def parameter_count(settings: Settings) -> int:
    """Total parameters; a tied output head is counted once, the routing bias, a buffer, not."""
    return sum(parameters_by_part(settings).values())


def active_parts(settings: Settings) -> dict[str, int]:
    return decoder.active_parts(parameters_by_part(settings), settings.num_experts_per_tok, settings.n_routed_experts)


def active_parameter_count(settings: Settings) -> int:
    """Parameters that one token uses: all but the experts it is not routed to."""
    return sum(active_parts(settings).values())


def flops_per_token(settings: Settings, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: decoder.flops_per_token's formula with MLA's own widths."""
    width = settings.qk_nope_head_dim + settings.qk_rope_head_dim + settings.v_head_dim
    width *= settings.num_attention_heads
    return decoder.flops_per_token(active_parts(settings), settings.num_hidden_layers, width, seq_length)
