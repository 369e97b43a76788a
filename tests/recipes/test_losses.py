"""The cross-entropy that reuses its memory, against torch's."""

import math

import pytest
import torch
import torch.nn.functional as F

from recipes.training.losses import token_loss_sum, z_loss_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [0, 3, 10])
def test_loss_and_gradient_are_torch_s(dtype, ignored):
    torch.manual_seed(1)
    logits = (9 * torch.randn(2, 5, 17)).to(dtype)
    labels = torch.randint(0, 17, (2, 5))
    labels.view(-1)[:ignored] = -100
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = token_loss_sum(ours, labels)
    (loss * 0.3).backward()
    expected = F.cross_entropy(theirs.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    (expected * 0.3).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad.dtype == dtype and torch.equal(ours.detach(), logits)


def test_a_second_backward_is_an_error():
    loss = token_loss_sum(torch.randn(4, 7, requires_grad=True), torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("masked", [0, 1])
def test_z_loss_leaves_masked_tokens_out(masked):
    labels = torch.tensor([0, 1, 0])
    labels[:masked] = -100
    total = z_loss_sum(torch.zeros(3, 2), labels)
    assert float(total) / (3 - masked) == pytest.approx(math.log(2) ** 2)  # 0.4805
