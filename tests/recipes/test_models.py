import numpy as np
import pytest
import torch

from data_prep.loader import collate
from data_prep.samples import DataSpec, SampleStream
from recipes import models
from recipes.models import llama
from recipes.models.build import build_model, parameter_groups
from recipes.training.step import token_loss_sum
from tests.conftest import write_tokens


def settings(**changes):
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return llama.Settings(**{**shape, **changes})


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_that_of_the_model(tied):
    chosen = settings(tie_word_embeddings=tied)
    model = build_model(chosen, 16, seed=1)
    assert sum(p.numel() for p in model.parameters()) == llama.parameter_count(chosen)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_published_parameter_counts():
    llama_3_1_8b = settings(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert llama.parameter_count(llama_3_1_8b) == 8_030_261_248


def test_flops_by_hand():
    # h 8, 4 heads of 2, 2 kv heads: attention 8*2*(4+4+2+2)=192; feed-forward 3*8*16=384; 2 layers, head 32*8=256.
    chosen = settings(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    expected = 6 * (2 * (192 + 384) + 256) + 12 * 2 * 8 * 16
    assert llama.flops_per_token(chosen, 16) == expected
    chosen.tie_word_embeddings = True
    assert llama.flops_per_token(chosen, 16) == expected


def test_initial_weights_follow_seed_and_name():
    one, same, other = (build_model(settings(num_hidden_layers=4), 16, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    layers = [one[f"model.layers.{n}.self_attn.q_proj.weight"] for n in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])


def test_initial_standard_deviations():
    chosen = settings(vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    for name, value in build_model(chosen, 16, seed=1).named_parameters():
        if value.dim() == 1:
            assert (value == 1).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert value.std().item() == pytest.approx(0.02 / (2 if residual else 1), rel=0.05), name


def test_parameter_groups():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))

    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(6, 4)
            self.linear = torch.nn.Linear(4, 4)
            self.norm = Norm()
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)

    toy = Toy()
    groups = {group["name"]: group for group in parameter_groups(toy, 0.1)}
    names = {id(p): name for name, p in toy.named_parameters()}
    assert [names[id(p)] for p in groups["decay"]["params"]] == ["linear.weight"]
    assert [names[id(p)] for p in groups["no_decay"]["params"]] == ["embedding.weight", "linear.bias", "norm.gain"]
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)
    optimizer = torch.optim.AdamW(list(groups.values()), lr=0.1)
    before = {name: p.detach().clone() for name, p in toy.named_parameters()}
    for parameter in toy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(toy.linear.weight, before["linear.weight"] * (1 - 0.1 * 0.1))
    assert torch.equal(toy.norm.gain, before["norm.gain"]) and torch.equal(toy.head.weight, before["embedding.weight"])


def test_untied_head_decays_and_embedding_does_not():
    model = build_model(settings(tie_word_embeddings=False), 16, seed=1)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: [names[id(p)] for p in g["params"]] for g in parameter_groups(model, 0.1)}
    assert "lm_head.weight" in groups["decay"] and "model.embed_tokens.weight" in groups["no_decay"]
    assert len(groups["decay"]) + len(groups["no_decay"]) == len(names)


@pytest.mark.parametrize(("shift", "low"), [(1, True), (2, False), (0, False)])
def test_labels_are_shifted_exactly_once(tmp_path, shift, low):
    """A model that predicts token t+1 from token t has no loss; one that predicts t or t+2 has."""
    prefix = write_tokens(tmp_path / "a", [np.arange(91) % 9], 9)
    stream = SampleStream(DataSpec(((str(prefix), 1.0),), 9, "epoch", 0, 10, 9))
    batch = collate(stream, np.arange(4).reshape(1, 4))
    inputs, labels = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.labels[0])
    logits = 20.0 * torch.nn.functional.one_hot((inputs + shift) % 9, 9)
    loss = token_loss_sum(logits, labels).item() / batch.tokens
    assert loss < 1e-3 if low else loss > 5


def test_ignored_labels_count_nowhere_and_real_end_tokens_do():
    # Row 5 6 0 7 0 | 0 0: the end token 0 is also the padding. Ignoring goes by position, not by value.
    labels = torch.tensor([[6, 0, 7, 0, -100, -100]])
    logits = torch.zeros(1, 6, 8)
    assert int((labels != -100).sum()) == 4
    assert token_loss_sum(logits, labels).item() == pytest.approx(4 * np.log(8))


def test_model_interface():
    for name in models.FAMILIES:
        module = models.family(name)
        assert all(
            hasattr(module, part) for part in ("Settings", "check", "hf_config", "parameter_count", "flops_per_token")
        )
