"""The Llama family: RMSNorm before attention and feed-forward, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.models import InitSettings, decoder

# Projections that write to the residual stream; their initial std is scaled by depth (GPT-2's rule).
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
TENSOR_PLAN = decoder.TENSOR_PLAN


@dataclass
class Settings:
    """Names and meanings are those of transformers' LlamaConfig."""

    family: str = "llama"
    vocab_size: int = MISSING  # entries, padding rows included
    hidden_size: int = MISSING
    intermediate_size: int = MISSING  # width of the SwiGLU feed-forward
    num_hidden_layers: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int | None = None  # null: hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    rope_scaling: Any = None  # {rope_type: llama3, factor: ..., ...} for longer contexts; null: none
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    init: InitSettings = field(default_factory=InitSettings)
    init_from: str | None = None  # Hugging Face checkpoint to start from, directory or hub name; null: drawn weights


def head_dim(settings: Settings) -> int:
    if settings.head_dim is not None:
        return settings.head_dim
    return settings.hidden_size // settings.num_attention_heads


def check(settings: Settings, seq_length: int, need) -> None:
    decoder.check_common(settings, need)
    decoder.check_positive(settings, need, "intermediate_size")
    hidden, heads = settings.hidden_size, settings.num_attention_heads
    # LlamaConfig insists on it even where head_dim is stated.
    need(hidden % heads == 0, "model.hidden_size", f"{hidden} is not divisible by num_attention_heads {heads}")
    decoder.check_grouped_attention(settings, head_dim(settings), need)


def config_arguments(settings: Settings, seq_length: int) -> dict:
    return {
        **decoder.config_arguments(settings, seq_length),
        "intermediate_size": settings.intermediate_size,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": head_dim(settings),
    }


def hf_config(settings: Settings, seq_length: int):
    from transformers import LlamaConfig

    return LlamaConfig(**config_arguments(settings, seq_length))


def parameters_by_part(settings: Settings) -> dict[str, int]:
    h, d, layers = settings.hidden_size, head_dim(settings), settings.num_hidden_layers
    return decoder.parts(
        settings,
        attention=layers * h * d * (2 * settings.num_attention_heads + 2 * settings.num_key_value_heads),
        dense_mlp=layers * 3 * h * settings.intermediate_size,
        norms=(2 * layers + 1) * h,
    )


def parameter_count(settings: Settings) -> int:
    """Total parameters; a tied output head is counted once."""
    return sum(parameters_by_part(settings).values())


active_parameter_count = parameter_count  # a dense model uses all of them for every token


def flops_per_token(settings: Settings, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: decoder.flops_per_token's formula."""
    width = 2 * settings.num_attention_heads * head_dim(settings)
    return decoder.flops_per_token(parameters_by_part(settings), settings.num_hidden_layers, width, seq_length)
