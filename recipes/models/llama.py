"""The Llama family: RMSNorm before attention and feed-forward, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.models import InitSettings

# Projections that write to the residual stream; their initial std is scaled by depth (GPT-2's rule).
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


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
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    init: InitSettings = field(default_factory=InitSettings)


def head_dim(settings: Settings) -> int:
    if settings.head_dim is not None:
        return settings.head_dim
    return settings.hidden_size // settings.num_attention_heads


def check(settings: Settings, seq_length: int, need) -> None:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        need(getattr(settings, key) > 0, f"model.{key}", f"{getattr(settings, key)} must be positive")
    hidden, heads, kv = settings.hidden_size, settings.num_attention_heads, settings.num_key_value_heads
    need(
        settings.head_dim is not None or hidden % heads == 0,
        "model.hidden_size",
        f"{hidden} is not divisible by num_attention_heads {heads}; change one, or state model.head_dim",
    )
    need(
        kv > 0 and heads % kv == 0,
        "model.num_key_value_heads",
        f"{kv} must be positive and divide num_attention_heads {heads}",
    )
    need(
        head_dim(settings) > 0 and head_dim(settings) % 2 == 0,
        "model.head_dim",
        f"{head_dim(settings)} must be positive and even for rotary positions",
    )
    need(settings.rope_theta > 0, "model.rope_theta", f"{settings.rope_theta:g} must be positive")
    need(settings.rms_norm_eps > 0, "model.rms_norm_eps", f"{settings.rms_norm_eps:g} must be positive")
    need(
        0 <= settings.attention_dropout < 1,
        "model.attention_dropout",
        f"{settings.attention_dropout:g} must lie in 0 .. 1",
    )
    need(settings.init.std > 0, "model.init.std", f"{settings.init.std:g} must be positive")


def hf_config(settings: Settings, seq_length: int):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=head_dim(settings),
        max_position_embeddings=seq_length,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        rms_norm_eps=settings.rms_norm_eps,
        tie_word_embeddings=settings.tie_word_embeddings,
        attention_dropout=settings.attention_dropout,
        initializer_range=settings.init.std,
        use_cache=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _matrix_parameters(settings: Settings) -> int:
    """Parameters of the matrices that every token is multiplied with: all layers and the output head."""
    h, d = settings.hidden_size, head_dim(settings)
    attention = h * d * (2 * settings.num_attention_heads + 2 * settings.num_key_value_heads)
    feed_forward = 3 * h * settings.intermediate_size
    return settings.num_hidden_layers * (attention + feed_forward) + settings.vocab_size * h


def parameter_count(settings: Settings) -> int:
    """Total parameters; a tied output head is counted once."""
    norms = (2 * settings.num_hidden_layers + 1) * settings.hidden_size
    embedding = 0 if settings.tie_word_embeddings else settings.vocab_size * settings.hidden_size
    return _matrix_parameters(settings) + embedding + norms


def flops_per_token(settings: Settings, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: 6 · (matrix parameters) + 12 · layers · heads · head_dim · seq_length.

    The PaLM paper's formula (arXiv:2204.02311, appendix B): attention at full length, not halved for causality; the
    output head counted, the embedding lookup not; recomputation not counted.
    """
    attention = 12 * settings.num_hidden_layers * settings.num_attention_heads * head_dim(settings) * seq_length
    return 6 * _matrix_parameters(settings) + attention
