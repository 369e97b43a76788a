"""The dense Qwen3 family: Llama's blocks with an RMSNorm on each head's query and key, and a head size of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.models import InitSettings, decoder

# Projections that write to the residual stream; their initial std is scaled by depth (GPT-2's rule).
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
TENSOR_PLAN = {**decoder.TENSOR_PLAN, "summed": ("self_attn.q_norm", "self_attn.k_norm")}


@dataclass
class Settings:
    """Names and meanings are those of transformers' Qwen3Config."""

    family: str = "qwen3"
    vocab_size: int = MISSING  # entries, padding rows included
    hidden_size: int = MISSING
    intermediate_size: int = MISSING  # width of the SwiGLU feed-forward
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
    decoder.check_positive(settings, need, "intermediate_size")
    decoder.check_grouped_attention(settings, settings.head_dim, need)


def hf_config(settings: Settings, seq_length: int):
    from transformers import Qwen3Config

    return Qwen3Config(
        **decoder.config_arguments(settings, seq_length),
        intermediate_size=settings.intermediate_size,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
    )


def parameters_by_part(settings: Settings) -> dict[str, int]:
    h, d, layers = settings.hidden_size, settings.head_dim, settings.num_hidden_layers
    return decoder.parts(
        settings,
        attention=layers * h * d * (2 * settings.num_attention_heads + 2 * settings.num_key_value_heads),
        dense_mlp=layers * 3 * h * settings.intermediate_size,
        norms=layers * (2 * h + 2 * d) + h,
    )


def parameter_count(settings: Settings) -> int:
    """Total parameters; a tied output head is counted once."""
    return sum(parameters_by_part(settings).values())


active_parameter_count = parameter_count  # a dense model uses all of them for every token


def flops_per_token(settings: Settings, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: decoder.flops_per_token's formula."""
    width = 2 * settings.num_attention_heads * settings.head_dim
    return decoder.flops_per_token(parameters_by_part(settings), settings.num_hidden_layers, width, seq_length)
