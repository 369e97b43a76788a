import pytest
import torch
from deepspeed.pipe import TiedLayerSpec

from recipes.models.build import build_model
from recipes.models.pipeline import pipeline_layers, pipeline_parameter_names
from recipes.training.recipe_rules import LAYERS
from tests.recipes.families import EXAMPLE, SMALL, small

LENGTH = 16


def test_partitions_by_type_are_checked_against_the_layers_there_are():
    layers = pipeline_layers(small("llama", tie_word_embeddings=False), LENGTH)
    assert set(LAYERS) == {spec.typename.__name__ for spec in layers}


CASES = [
    *((family, {}) for family in SMALL),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [0], "intermediate_size": 24}),
    (EXAMPLE, {"tie_word_embeddings": True}),
]


class Stages(torch.nn.Module):
    """The layers in one process, named and tied as PipelineModule does it."""

    def __init__(self, layers):
        super().__init__()
        self.tied_modules, self.functions = torch.nn.ModuleDict(), []
        for number, layer in enumerate(layers):
            if not isinstance(layer, TiedLayerSpec):
                self.add_module(str(number), layer.build())
                self.functions.append(getattr(self, str(number)))
                continue
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module, function = self.tied_modules[layer.key], layer.forward_fn
            self.functions.append(module if function is None else lambda x, m=module, f=function: f(m, x))

    def forward(self, inputs):
        for function in self.functions:
            inputs = function(inputs)
        return inputs


def whole_and_stages(family, **changes):
    settings = small(family, **changes)
    whole, layers = build_model(settings, LENGTH, seed=3).eval(), pipeline_layers(settings, LENGTH)
    stages, names = Stages(layers).eval(), pipeline_parameter_names(layers)
    assert set(names) == set(stages.state_dict())
    stages.load_state_dict({name: whole.state_dict()[names[name]] for name in names})
    return whole, stages, names


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_layers_in_sequence_give_the_models_logits(family, changes):
    whole, stages, names = whole_and_stages(family, **changes)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 64
    with torch.no_grad():
        assert torch.equal(stages(tokens), whole(tokens, use_cache=False).logits)
    saved = set(whole.state_dict())
    if "tie_word_embeddings" in changes:
        saved.remove("lm_head.weight")
    assert set(names.values()) == saved and len(set(names.values())) == len(names)


@pytest.mark.parametrize("family", SMALL)
def test_positions_that_restart_keep_documents_apart(family):
    whole, stages, _ = whole_and_stages(family)
    tokens = torch.arange(LENGTH).view(1, LENGTH) * 5 % 64
    positions = torch.cat([torch.arange(6), torch.arange(10)]).view(1, LENGTH)
    with torch.no_grad():
        ours = stages((tokens, positions))
        apart = [whole(part, use_cache=False).logits for part in (tokens[:, :6], tokens[:, 6:])]
        together = whole(tokens, use_cache=False).logits
    assert torch.allclose(ours, torch.cat(apart, dim=1), atol=1e-6)
    assert not torch.allclose(ours[:, 6:], together[:, 6:], atol=1e-4)


def test_gradients_reach_a_tied_embedding_from_both_ends():
    whole, stages, names = whole_and_stages("llama", tie_word_embeddings=True)
    tokens = torch.arange(LENGTH).view(1, LENGTH)
    whole(tokens, use_cache=False).logits.square().sum().backward()
    stages(tokens).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in stages.named_parameters():
        assert torch.allclose(parameter.grad, gradients[names[name]], rtol=1e-4, atol=1e-6), name
