"""A Llama whose feed-forward is up · relu² · down, without a gate (arXiv:2109.08668). `model.family: docs.examples.relu2_llama`."""

from dataclasses import dataclass

from recipes.models import decoder, llama
from recipes.models.llama import RESIDUAL_PROJECTIONS, check, head_dim  # noqa: F401

TENSOR_PLAN = {
    **decoder.TENSOR_PLAN,
    "column": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"),
}


@dataclass
class Settings(llama.Settings):
    family: str = "docs.examples.relu2_llama"


def hf_config(settings, seq_length):
    from docs.examples.modeling_relu2_llama import Relu2LlamaConfig

    return Relu2LlamaConfig(**llama.config_arguments(settings, seq_length))


def parameters_by_part(settings):
    matrices = 2 * settings.num_hidden_layers * settings.hidden_size * settings.intermediate_size
    return {**llama.parameters_by_part(settings), "dense_mlp": matrices}


def parameter_count(settings):
    return sum(parameters_by_part(settings).values())


active_parameter_count = parameter_count


def flops_per_token(settings, seq_length):
    width = 2 * settings.num_attention_heads * head_dim(settings)
    return decoder.flops_per_token(parameters_by_part(settings), settings.num_hidden_layers, width, seq_length)
