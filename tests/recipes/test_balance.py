import pytest
import torch

from recipes.models.balance import sequence_balance
from recipes.models.build import build_model
from tests.recipes.families import small


def test_by_hand():
    # Two experts, top 1. Sequence 0: tokens choose expert 0, 0, 1 (the last unlabelled); sequence 1: one labelled token.
    p = torch.tensor([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]], [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]])
    p[0, 1] = torch.tensor([0.75, 0.25])
    labels = torch.tensor([[3, 4, -100], [5, -100, -100]])
    first = 2 * 2 * (1.0 * 0.75)  # 2 tokens, 2 experts, all on expert 0 with mean probability 0.75
    second = 1 * 2 * (1.0 * 0.75)
    loss, uses = sequence_balance((p.log().view(6, 2),), labels, top_k=1)
    assert loss.item() == pytest.approx(first + second)
    assert uses.tolist() == [[2, 1]]  # labelled tokens alone
    # A second layer used evenly: E · Σ (1/2 · 1/2) = 1 a token; the layers are averaged.
    even = torch.tensor([[[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]], [[0.5, 0.5]] * 3]).log().view(6, 2)
    both = sequence_balance((p.log().view(6, 2), even), labels, top_k=1)[0].item()
    assert both == pytest.approx((first + second + 2 * 1.0 + 1 * 1.0) / 2)


def test_one_sequence_without_padding_is_transformers_own_loss():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    ours = sequence_balance((logits,), torch.ones(1, 12, dtype=torch.int64), top_k=3)[0] / 12
    assert ours.item() == pytest.approx(load_balancing_loss_func((logits,), 8, 3).item(), rel=1e-6)


def test_the_routers_gradient_does_not_depend_on_the_micro_batch():
    """The same four sequences at once, and one by one: 12 labelled tokens and 4 each, and very uneven."""
    tokens = torch.arange(4 * 12).view(4, 12) * 11 % 64
    labels = tokens.roll(-1, 1)
    labels[1, 3:], labels[3, 1:] = -100, -100

    def gradient(micro: int) -> torch.Tensor:
        model = build_model(small("qwen3_moe"), 16, seed=1)
        for ids, wanted in zip(tokens.split(micro), labels.split(micro), strict=True):
            logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
            (sequence_balance(logits, wanted, 2)[0] / int((labels != -100).sum())).backward()
        return torch.stack([layer.mlp.gate.weight.grad for layer in model.model.layers])

    whole = gradient(4)
    assert whole.abs().max() > 0
    for micro in (1, 2):
        assert torch.allclose(gradient(micro), whole, rtol=1e-5, atol=1e-9)
