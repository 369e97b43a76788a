"""A small model of every family, the documentation's example among them, for tests that go over all families."""

import math

from recipes import models

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**COMMON, "num_key_value_heads": 2}
EXAMPLE = "docs.examples.relu2_llama"
SMALL = {
    "llama": {**GROUPED, "intermediate_size": 48},
    "qwen3": {**GROUPED, "intermediate_size": 48, "head_dim": 10},
    "qwen3_moe": {
        **GROUPED,
        "head_dim": 10,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **COMMON,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    EXAMPLE: {**GROUPED, "intermediate_size": 48},
}


def small(family: str, **changes):
    return models.family(family).Settings(**{**SMALL[family], **changes})


def meta_model(settings, seq_length: int = 16):
    """The transformers model without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(models.family(settings.family).hf_config(settings, seq_length))


def checked(settings, seq_length: int = 16) -> None:
    """Run the family's rules; ValueError with key and message for the first broken one."""

    def need(condition, key, message):
        if not condition:
            raise ValueError(f"{key} {message}")

    models.family(settings.family).check(settings, seq_length, need)


def residual_std(settings) -> float:
    return settings.init.std / math.sqrt(2 * settings.num_hidden_layers)
