"""What the families share as decoder-only transformers of pre-norm blocks: rules, config keys, counts. Needs no torch."""

from __future__ import annotations

PARTS = ("embedding", "attention", "dense_mlp", "experts", "router", "shared_experts", "norms", "head")

# Linear layers by the ending of their module names. "column" ones are split by output features, "row" ones by input
# features with a sum over the ranks behind them, "gathered" ones by output features with the output put together
# again. "summed" modules stay whole, but each rank sees its own heads only: their gradients are summed over the ranks.
TENSOR_PLAN = {
    "column": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    "row": ("self_attn.o_proj", "mlp.down_proj"),
    "gathered": ("lm_head",),
    "summed": (),
}

# rope_type: its keys and those that may be left out. Names and meanings are those of transformers' rope_parameters.
ROPE_SCALING = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    ),
}


def check_common(settings, need) -> None:
    """The rules of the settings that every family has."""
    check_positive(settings, need, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    need(settings.rope_theta > 0, "model.rope_theta", f"{settings.rope_theta:g} must be positive")
    need(settings.rms_norm_eps > 0, "model.rms_norm_eps", f"{settings.rms_norm_eps:g} must be positive")
    need(
        0 <= settings.attention_dropout < 1,
        "model.attention_dropout",
        f"{settings.attention_dropout:g} must lie in 0 .. 1",
    )
    need(settings.init.std > 0, "model.init.std", f"{settings.init.std:g} must be positive")
    need(settings.init_from != "", "model.init_from", "must be a directory or a name on the Hugging Face hub, or null")
    _check_rope_scaling(settings.rope_scaling, need)


def check_positive(settings, need, *keys: str) -> None:
    for key in keys:
        need(getattr(settings, key) > 0, f"model.{key}", f"{getattr(settings, key)} must be positive")


def check_grouped_attention(settings, head_dim: int, need) -> None:
    heads, kv = settings.num_attention_heads, settings.num_key_value_heads
    need(
        kv > 0 and heads % kv == 0,
        "model.num_key_value_heads",
        f"{kv} must be positive and divide num_attention_heads {heads}",
    )
    need(
        head_dim > 0 and head_dim % 2 == 0,
        "model.head_dim",
        f"{head_dim} must be positive and even for rotary positions",
    )


def check_top_k(settings, num_experts: int, need) -> None:
    top_k = settings.num_experts_per_tok
    need(0 < top_k <= num_experts, "model.num_experts_per_tok", f"{top_k} must lie in 1 .. {num_experts} (the experts)")


def _check_rope_scaling(scaling, need) -> None:
    if scaling is None:
        return
    key = "model.rope_scaling"
    rope_type = scaling.get("rope_type") if isinstance(scaling, dict) else None
    need(rope_type in ROPE_SCALING, key, f"{scaling!r} needs a rope_type, one of {', '.join(ROPE_SCALING)}")
    required, optional = ROPE_SCALING[rope_type]
    given = {name: value for name, value in scaling.items() if name != "rope_type"}
    for name in required:
        need(name in given, key, f"of type {rope_type} needs {name}")
    for name, value in given.items():
        known = (*required, *optional)
        need(name in known, key, f"of type {rope_type} has no {name}; its keys: {', '.join(known)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        need(number, f"{key}.{name}", f"{value!r} must be a positive number")
    if rope_type == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        need(low < high, key, f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")


def config_arguments(settings, seq_length: int) -> dict:
    """Arguments of a transformers config that every family sets alike."""
    return {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "max_position_embeddings": seq_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta, **(settings.rope_scaling or {})},
        "rms_norm_eps": settings.rms_norm_eps,
        "tie_word_embeddings": settings.tie_word_embeddings,
        "attention_dropout": settings.attention_dropout,
        "initializer_range": settings.init.std,
        "use_cache": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def parts(settings, **counts: int) -> dict[str, int]:
    """{part: parameters} with embedding and head filled in: a tied head has none of its own."""
    vocabulary = settings.vocab_size * settings.hidden_size
    known = {"embedding": vocabulary, "head": 0 if settings.tie_word_embeddings else vocabulary, **counts}
    return {part: known.get(part, 0) for part in PARTS}


def active_parts(counts: dict[str, int], top_k: int, num_experts: int) -> dict[str, int]:
    """{part: parameters} that one token uses: top_k of the routed experts and all the rest."""
    return {**counts, "experts": counts["experts"] * top_k // num_experts}


def flops_per_token(active: dict[str, int], layers: int, attention_width: int, seq_length: int) -> int:
    """Model FLOPs a token, forward and backward: 6 · (matrix parameters) + 6 · layers · attention_width · seq_length.

    The PaLM paper's formula (arXiv:2204.02311, appendix B): attention at full length, not halved for causality; the
    output head counted, tied or not, the embedding lookup and the norms not; recomputation not counted. Of the routed
    experts those that a token uses are counted.

    Args:
        active: {part: parameters} that one token uses.
        attention_width: of all heads together, (query and key width) + (value width).
    """
    matrices = sum(active[part] for part in ("attention", "dense_mlp", "experts", "router", "shared_experts"))
    head = active["head"] or active["embedding"]
    return 6 * (matrices + head) + 6 * layers * attention_width * seq_length
