"""The loss that keeps a router's experts evenly used, for families with `router_aux_loss_coef`."""

from __future__ import annotations

import torch

from data_prep.loader import IGNORED_LABEL


def sequence_balance(
    router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(balance loss summed over tokens, in fp32, to be added, times its coefficient, to the sum of token losses;
    fp32 [layers, experts] labelled tokens that chose each expert, detached).

    For a sequence of T labelled tokens and a layer of E experts: E · Σ_e f_e · P_e, with f_e the number of its tokens
    that chose expert e divided by T, P_e the mean of their router probability (softmax over all experts) of e. This is
    equations 4-6 of Switch Transformer (arXiv:2101.03961) for top k, per sequence as in DeepSeek-V3 (arXiv:2412.19437,
    equations 17-20), averaged over the layers; even use gives k. A sequence counts T times, so that the sum divided by
    the tokens of the global batch does not depend on how the batch is split: over micro batches together the product
    f · P would. Unlabelled tokens count nowhere.

    Args:
        router_logits: of each layer with experts [batch · sequence, experts]: `router_logits` of a forward with
            output_router_logits=True.
        labels: [batch, sequence], as for the token loss.
        top_k: experts that a token uses.
    """
    kept = (labels != IGNORED_LABEL).unsqueeze(-1)  # [batch, sequence, 1]
    tokens = kept.sum(dim=1).clamp(min=1)  # [batch, 1]
    total, uses = torch.zeros((), device=labels.device), []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1).view(*labels.shape, -1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        used = (torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0) * kept).sum(dim=1)  # [batch, experts]
        # T · E · Σ_e (uses / T) · (probability / T)
        total = total + (used * (probabilities * kept).sum(dim=1) / tokens).sum() * logits.shape[-1]
        uses.append(used.sum(dim=0))
    return total / len(router_logits), torch.stack(uses)
