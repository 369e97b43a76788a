"""A family's model cut into the layers of a deepspeed.pipe.PipelineModule.

The layers are the transformers model's own modules: embedding, blocks, final norm, head. They pass hidden states
[batch, sequence, hidden] on, or (hidden states, position_ids) where the first is given (input_ids, position_ids): then
positions restart at each document and attention does not cross documents. The head returns logits.
"""

from __future__ import annotations

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from recipes import models

TIED = "embedding"  # key of an embedding that is the output head too


def pipeline_layers(settings, seq_length: int, attention: str = "sdpa") -> list[LayerSpec]:
    """The layers, each built by the stage that holds it; their parameters are still to be drawn or loaded.

    The family's model must have the structure that transformers' decoders share: `model.embed_tokens`, `model.layers`,
    `model.norm`, `model.rotary_emb` and `lm_head`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # for its classes and completed config only
        whole = AutoModelForCausalLM.from_config(
            models.family(settings.family).hf_config(settings, seq_length), attn_implementation=attention
        )
    config, decoder = whole.config, whole.model
    vocabulary = (config.vocab_size, config.hidden_size)
    blocks = [
        LayerSpec(Block, type(layer), type(decoder.rotary_emb), config, index)
        for index, layer in enumerate(decoder.layers)
    ]
    norm = LayerSpec(FinalNorm, type(decoder.norm), config)
    if config.tie_word_embeddings:
        head = TiedLayerSpec(TIED, Embedding, *vocabulary, forward_fn=tied_head)
        return [TiedLayerSpec(TIED, Embedding, *vocabulary), *blocks, norm, head]
    return [LayerSpec(Embedding, *vocabulary), *blocks, norm, LayerSpec(Head, *vocabulary)]


def pipeline_parameter_names(layers: list[LayerSpec]) -> dict[str, str]:
    """{name in the PipelineModule's state: name in the transformers model}, one to one."""
    names = {}
    for number, layer in enumerate(layers):
        tied = isinstance(layer, TiedLayerSpec)
        with torch.device("meta"):
            module = layer.build()
        for name in module.state_dict():
            names[f"tied_modules.{layer.key}.{name}" if tied else f"{number}.{name}"] = module.whole_name(name)
    return names


class Embedding(torch.nn.Embedding):
    def forward(self, inputs):
        input_ids, positions = _split(inputs)
        return _join(super().forward(input_ids), positions)

    def whole_name(self, name: str) -> str:
        return f"model.embed_tokens.{name}"


class Block(torch.nn.Module):
    """One decoder layer, with the rotary positions that the whole model computes once for all."""

    def __init__(self, layer_class, rotary_class, config, index: int):
        super().__init__()
        self.config, self.index = config, index
        self.layer = layer_class(config, index)
        self.rotary_emb = rotary_class(config)

    def forward(self, inputs):
        from transformers.masking_utils import create_causal_mask

        hidden, positions = _split(inputs)
        position_ids = positions
        if positions is None:  # transformers finds borders of documents in positions, where there are any
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        # None where the implementation is causal by itself.
        mask = create_causal_mask(self.config, hidden, None, past_key_values=None, position_ids=positions)
        rotary = self.rotary_emb(hidden, position_ids)
        hidden = self.layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rotary)
        return _join(hidden, positions)

    def whole_name(self, name: str) -> str:
        return f"model.layers.{self.index}.{name.removeprefix('layer.')}"


class FinalNorm(torch.nn.Module):
    def __init__(self, norm_class, config):
        super().__init__()
        self.norm = norm_class(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs):
        return self.norm(_split(inputs)[0])

    def whole_name(self, name: str) -> str:
        return f"model.{name}"


class Head(torch.nn.Linear):
    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def whole_name(self, name: str) -> str:
        return f"lm_head.{name}"


def tied_head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, embedding.weight)


def _split(inputs):
    return inputs if isinstance(inputs, tuple) else (inputs, None)


def _join(hidden: torch.Tensor, positions: torch.Tensor | None):
    return hidden if positions is None else (hidden, positions)
