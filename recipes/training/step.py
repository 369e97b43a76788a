"""One optimizer step and one validation, over a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data_prep.loader import IGNORED_LABEL, StepBatch, collate, rank_samples
from data_prep.samples import SampleStream


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    Attributes:
        loss: mean over the tokens of the global batch, nats.
        grad_norm: before clipping; not finite when the update was left out.
        lr: used in this step.
        tokens: in the global batch.
        applied: whether the weights were updated.
        stop_requested: whether any rank has been told to stop.
        saving: whether any rank is writing a checkpoint in the background.
        loss_scale: of fp16 training, else None.
    """

    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    applied: bool
    stop_requested: bool
    saving: bool
    loss_scale: float | None

    def metrics(self) -> dict:
        """The values of metrics.jsonl that come from here."""
        return {key: getattr(self, key) for key in ("loss", "grad_norm", "lr", "applied", "loss_scale")}


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over tokens, in fp32. logits [batch, sequence, vocabulary], labels [batch, sequence].

    Labels are already shifted (data_prep.loader.collate); IGNORED_LABEL counts nowhere.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def forward(engine, batch: StepBatch, micro: int) -> torch.Tensor:
    """Logits [micro_batch, sequence, vocabulary] of one micro batch.

    With a document mask, the positions, which begin again at each border, are all that transformers needs: without an
    attention mask it takes a row for packed where they do, and keeps attention within each document.
    """
    arguments = {"input_ids": batch.inputs[micro]}
    if batch.positions is not None:
        arguments["position_ids"] = batch.positions[micro]
    arguments = {name: torch.from_numpy(array).to(engine.device) for name, array in arguments.items()}
    return engine(**arguments, use_cache=False).logits


def train_step(
    engine, batch: StepBatch, sizes, stop: Callable[[], bool], saving: Callable[[], bool] = lambda: False
) -> StepResult:
    """Forward, backward and update over one global batch.

    The gradient is that of (sum of token losses) / (tokens), both over the whole global batch. DeepSpeed averages over
    micro batches and data-parallel ranks, so each micro batch's sum is multiplied by accumulation · data / tokens.

    Args:
        batch: this rank's part.
        stop: asked at the end of the step whether this rank has been told to stop.
        saving: asked then whether this rank is writing a checkpoint in the background.
    """
    tokens = torch.tensor(batch.tokens, dtype=torch.int64, device=engine.device)
    dist.all_reduce(tokens)  # of all ranks, needed before the first backward; stays on the device
    factor = sizes.accumulation * sizes.data / tokens.clamp(min=1)
    lr = engine.lr_scheduler.get_last_lr()[0]
    loss_sum = torch.zeros((), dtype=torch.float32, device=engine.device)
    for micro in range(sizes.accumulation):
        labels = torch.from_numpy(batch.labels[micro]).to(engine.device)
        micro_sum = token_loss_sum(forward(engine, batch, micro), labels)
        engine.backward(micro_sum * factor)
        engine.step()
        loss_sum += micro_sum.detach()
    # The flags travel with the loss, so that all ranks leave, and publish a checkpoint, at the same step.
    totals = torch.cat([loss_sum[None], loss_sum.new_tensor([float(stop()), float(saving())])])
    dist.all_reduce(totals)
    loss, stopping, writing = totals.tolist()
    grad_norm = engine.get_global_grad_norm()
    return StepResult(
        loss=loss / max(int(tokens), 1),
        grad_norm=None if grad_norm is None else float(grad_norm),
        lr=lr,
        tokens=int(tokens),
        applied=engine.was_step_applied(),
        stop_requested=stopping > 0,
        saving=writing > 0,
        loss_scale=engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None,
    )


def guard_stage_0(engine) -> None:
    """Give fp32 training without ZeRO what every other path has: the gradient norm, and no update from non-finite ones.

    DeepSpeed 0.19 hands that case to the plain optimizer: get_global_grad_norm() is None, and one NaN is written to all
    weights. The engine reads `_global_grad_norm` and `overflow` off its optimizer; both are set here before each
    update, and an overflow leaves the update out. The engine then counts the skip and holds the schedule itself.
    """
    optimizer = engine.optimizer
    take_model_step, optimizer_step = engine._take_model_step, optimizer.step

    def guarded_model_step(lr_kwargs):
        # Before the engine clips. Gradients are already averaged over the ranks, so every rank finds the same norm.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        optimizer._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.overflow = not bool(torch.isfinite(optimizer._global_grad_norm))
        take_model_step(lr_kwargs)

    @functools.wraps(optimizer_step)  # keeps the mark by which the schedule knows its optimizer
    def guarded_optimizer_step(*arguments, **options):
        return None if optimizer.overflow else optimizer_step(*arguments, **options)

    engine._take_model_step, optimizer.step = guarded_model_step, guarded_optimizer_step


@torch.no_grad()
def validate(engine, stream: SampleStream, samples: int, sizes, rank: int) -> tuple[float, int]:
    """Loss over the first `samples` samples of `stream`, token-weighted over all ranks: (nats a token, tokens).

    Args:
        rank: the data-parallel rank.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    block = sizes.micro_batch * sizes.data
    for begin in range(0, samples, block):
        mine = rank_samples(begin, sizes.micro_batch, 1, sizes.data, rank)
        batch = collate(stream, np.minimum(mine, samples - 1))
        # The last block can be short: its surplus rows run, since ZeRO-3 needs every rank in every forward, unlabelled.
        labels = np.where((mine < samples)[..., None], batch.labels, IGNORED_LABEL)[0]
        labels = torch.from_numpy(labels).to(engine.device)
        totals += torch.stack(
            [token_loss_sum(forward(engine, batch, 0), labels).double(), (labels != IGNORED_LABEL).sum().double()]
        )
    engine.train()
    dist.all_reduce(totals)
    loss_sum, tokens = totals.tolist()
    return loss_sum / max(tokens, 1), int(tokens)
