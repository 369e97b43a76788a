"""The transformers classes of relu2_llama.py; an export takes this file along."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Relu2LlamaConfig(LlamaConfig):
    model_type = "relu2_llama"


class Relu2MLP(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden):
        return self.down_proj(torch.relu(self.up_proj(hidden)).square())


class Relu2DecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = Relu2MLP(config)


class Relu2LlamaForCausalLM(LlamaForCausalLM):
    config_class = Relu2LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        layers = [Relu2DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        self.model.layers = torch.nn.ModuleList(layers)


AutoConfig.register("relu2_llama", Relu2LlamaConfig)
AutoModelForCausalLM.register(Relu2LlamaConfig, Relu2LlamaForCausalLM)
Relu2LlamaConfig.register_for_auto_class()
Relu2LlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
