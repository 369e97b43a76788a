"""The training loss, computed inside the model's forward: the logits of a large vocabulary need never exist whole."""

from __future__ import annotations

import types

import torch
from torch.utils.checkpoint import checkpoint

from data_prep.loader import IGNORED_LABEL
from recipes.models.balance import sequence_balance


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy(reduction="sum") whose backward turns the log-probabilities into the gradient where they lie.

    torch's keeps them beside a gradient of the same size and one of mostly zeros: three times the logits of a large
    vocabulary, and as many passes over them. A second backward through the same graph is an error.
    """

    @staticmethod
    def forward(ctx, logits, labels):
        log_probabilities, labelled = logits.log_softmax(-1), labels != IGNORED_LABEL
        chosen = labels.where(labelled, 0).unsqueeze(-1)
        ctx.save_for_backward(log_probabilities, chosen, labelled)
        return -log_probabilities.gather(-1, chosen).squeeze(-1).where(labelled, 0).sum()

    @staticmethod
    def backward(ctx, gradient):
        log_probabilities, chosen, labelled = ctx.saved_tensors
        logits_gradient = log_probabilities.exp_()
        logits_gradient.scatter_add_(-1, chosen, logits_gradient.new_full((), -1).expand_as(chosen))
        return logits_gradient.mul_((labelled * gradient).unsqueeze(-1)), None


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over tokens, in fp32. logits [..., vocabulary], labels [...].

    Labels are already shifted (data_prep.loader.collate); IGNORED_LABEL counts nowhere.
    """
    return _CrossEntropySum.apply(logits.float(), labels)


def z_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits)))², summed over labelled tokens, in fp32 (PaLM, arXiv:2204.02311, section 5)."""
    normalizers = logits.float().logsumexp(dim=-1)
    return (normalizers.square() * (labels != IGNORED_LABEL)).sum()


def head_losses(head, hidden: torch.Tensor, labels: torch.Tensor, z_loss: float, chunk_tokens: int | None):
    """(cross-entropy, z-loss) summed over tokens, hidden [batch, sequence, width].

    With `chunk_tokens`, that many tokens' logits exist at a time: each chunk's are computed again in backward.
    """

    def losses(hidden: torch.Tensor, labels: torch.Tensor):
        logits = head(hidden)
        z = z_loss_sum(logits, labels) if z_loss else logits.new_zeros((), dtype=torch.float32)
        return token_loss_sum(logits, labels), z

    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    if chunk_tokens is None or chunk_tokens >= len(labels):
        return losses(hidden, labels)
    # deepspeed's TiledFusedLogitsLoss computes the head's gradient before it knows the factor that the loss is
    # multiplied with, and leaves that factor out of it: wrong with accumulation, with uneven tokens, and in fp16.
    pieces = [
        checkpoint(losses, *piece, use_reentrant=False)
        for piece in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    ]
    return tuple(torch.stack(sums).sum() for sums in zip(*pieces, strict=True))


def attach_loss(model, settings, loss) -> None:
    """Let model(input_ids=..., labels=..., [position_ids=...]) return sums over tokens instead of logits:

        trained        what the gradient is of: cross-entropy, and the weighted z-loss and balance loss, if any
        cross_entropy  the loss that is reported; detached
        z_loss, balance_loss  where the recipe has them: without their weights; detached
        expert_use     [layers, experts] tokens that chose each expert, where the router's choices are known; detached

    Without labels it returns what it did before.

    Args:
        model: a transformers decoder with `model` and `lm_head`.
        settings: the recipe's model section.
        loss: settings.LossSettings.
    """
    balance = getattr(settings, "router_aux_loss_coef", 0.0)
    # A bound method of the class, not of the instance: DeepSpeed may replace modules below it afterwards.
    whole = type(model).forward

    def forward(self, input_ids, labels=None, **arguments):
        if labels is None:
            return whole(self, input_ids=input_ids, **arguments)
        if hasattr(settings, "router_aux_loss_coef"):
            arguments["output_router_logits"] = True
        outputs = self.model(input_ids=input_ids, use_cache=False, **arguments)
        cross_entropy, z = head_losses(self.lm_head, outputs.last_hidden_state, labels, loss.z_loss, loss.chunk_tokens)
        sums = {"trained": cross_entropy + loss.z_loss * z, "cross_entropy": cross_entropy.detach()}
        if loss.z_loss:
            sums["z_loss"] = z.detach()
        if (router_logits := getattr(outputs, "router_logits", None)) is not None:
            top_k = settings.num_experts_per_tok
            with torch.set_grad_enabled(torch.is_grad_enabled() and balance > 0):
                imbalance, sums["expert_use"] = sequence_balance(router_logits, labels, top_k)
            sums["trained"] = sums["trained"] + balance * imbalance
            if balance:
                sums["balance_loss"] = imbalance.detach()
        return sums

    model.forward = types.MethodType(forward, model)
