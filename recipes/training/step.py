"""One optimizer step and one validation, over a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from data_prep.loader import IGNORED_LABEL, StepBatch, collate, rank_samples
from data_prep.samples import SampleStream
from recipes.training import distributed


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    Attributes:
        loss: mean over the tokens of the global batch, nats.
        grad_norm: before clipping; not finite when the update was left out.
        lr: used in this step.
        tokens: in the global batch.
        applied: whether the weights were updated.
        flags: of train_step's `flags`, each true where any rank's is.
        loss_scale: of fp16 training, else None.
        expert_load: of each layer with experts, tokens of the busiest expert / tokens of the average one; else None.
        bad_ranks: where the update was left out, the ranks whose own loss was not finite.
        other_losses: z_loss and balance_loss where the recipe has them: means as `loss`, before their weights.
    """

    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    applied: bool
    flags: tuple[bool, ...]
    loss_scale: float | None
    expert_load: list[float] | None = None
    bad_ranks: tuple[int, ...] = ()
    other_losses: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict:
        """The values of metrics.jsonl that come from here."""
        values = {key: getattr(self, key) for key in ("loss", "grad_norm", "lr", "applied", "loss_scale")}
        values.update(self.other_losses)
        return values if self.expert_load is None else {**values, "expert_load": self.expert_load}


def forward(engine, batch: StepBatch, micro: int, sizes) -> dict[str, torch.Tensor]:
    """The loss sums (losses.attach_loss) of this rank's part of one micro batch.

    With a document mask, the positions, which begin again at each border, are all that transformers needs: without an
    attention mask it takes a row for packed where they do, and keeps attention within each document.
    """
    arguments = {"input_ids": batch.inputs[micro], "labels": batch.labels[micro]}
    if batch.positions is not None:
        arguments["position_ids"] = batch.positions[micro]
    if sizes.sequence > 1:
        length = batch.inputs.shape[-1] // sizes.sequence
        mine = slice(length * sizes.sequence_rank(dist.get_rank()), length * (sizes.sequence_rank(dist.get_rank()) + 1))
        arguments["position_ids"] = np.broadcast_to(np.arange(batch.inputs.shape[-1]), batch.inputs[micro].shape)
        arguments = {name: np.ascontiguousarray(array[:, mine]) for name, array in arguments.items()}
    return engine(**{name: torch.from_numpy(array).to(engine.device) for name, array in arguments.items()})


def train_step(
    engine,
    batch: StepBatch,
    sizes,
    flags: Callable[[], list[bool]] = list,
    spikes: Callable[[float], bool] | None = None,
) -> StepResult:
    """Forward, backward and update over one global batch.

    The gradient is that of (sum of token losses) / (tokens), both over the whole global batch. DeepSpeed averages over
    micro batches and data-parallel ranks, so each micro batch's sum is multiplied by accumulation · data / tokens. With
    sequence parallelism, ZeRO-3 of DeepSpeed 0.19.8 averages over the sequence ranks as well, stages 1 and 2 do not.

    Args:
        batch: this rank's part.
        flags: asked in the step for this rank's signals to all, such as that it has been told to stop.
        spikes: given the step's loss before the last backward: whether to leave the update out.
    """
    tokens = torch.tensor(batch.tokens, dtype=torch.int64, device=engine.device)
    dist.all_reduce(tokens)  # of all ranks, needed before the first backward; stays on the device
    tokens //= sizes.tensor * sizes.sequence  # which hold the same rows
    averaged = sizes.data * (sizes.sequence if engine.zero_optimization_stage() == 3 else 1)
    factor = sizes.accumulation * averaged / tokens.clamp(min=1)
    lr = engine.lr_scheduler.get_last_lr()[0]
    loss_sum = torch.zeros((), dtype=torch.float32, device=engine.device)
    others: dict[str, torch.Tensor] = {}
    for micro in range(sizes.accumulation):
        sums = forward(engine, batch, micro, sizes)
        loss_sum += sums["cross_entropy"]
        if spikes is not None and micro == sizes.accumulation - 1:
            total = loss_sum.clone()
            dist.all_reduce(total)
            if spikes(float(total) / sizes.tensor / max(int(tokens), 1)):
                factor = factor * float("nan")  # DeepSpeed leaves an update with such gradients out, on all ranks
        engine.backward(sums["trained"] * factor)
        engine.step()
        for name in sums.keys() - {"trained", "cross_entropy"}:
            others[name] = others.get(name, 0) + sums[name]
    expert_use = others.pop("expert_use", None)
    # The flags travel with the losses, so that all ranks act on them at the same step.
    names = sorted(others)
    own = torch.stack([loss_sum, *(others[name] for name in names)])
    totals = torch.cat([own, own.new_tensor(flags())])
    dist.all_reduce(totals)  # a copy: loss_sum stays this rank's own
    values, counted = totals.tolist(), sizes.tensor * max(int(tokens), 1)
    loss, *rest = (value / counted for value in values[: len(own)])
    raised = values[len(own) :]
    if expert_use is not None:
        dist.all_reduce(expert_use)
    grad_norm, applied = engine.get_global_grad_norm(), engine.was_step_applied()
    return StepResult(
        loss=loss,
        grad_norm=None if grad_norm is None else float(grad_norm),
        lr=lr,
        tokens=int(tokens),
        applied=applied,
        flags=tuple(count > 0 for count in raised),
        loss_scale=engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None,
        expert_load=None if expert_use is None else (expert_use.amax(1) / expert_use.mean(1).clamp(min=1)).tolist(),
        bad_ranks=() if applied else ranks_not_finite(loss_sum),
        other_losses=dict(zip(names, rest, strict=True)),
    )


def ranks_not_finite(own_loss: torch.Tensor) -> tuple[int, ...]:
    """The ranks whose `own_loss` is NaN or infinite; to be called by all of them."""
    finite = distributed.gather(bool(torch.isfinite(own_loss)))
    return tuple(rank for rank, one in enumerate(finite) if not one)


def guard_stage_0(engine, tensor_group=None, pipe_group=None) -> None:
    """Give fp32 training without ZeRO what every other path has: the gradient norm, and no update from non-finite ones.

    DeepSpeed 0.19 hands that case to the plain optimizer: get_global_grad_norm() is None, one NaN is written to all
    weights, and clipping uses a mean of the ranks' norms where experts differ from rank to rank. The engine reads
    `_global_grad_norm` and `overflow` off its optimizer; both are set here before each update, clipping goes by that
    norm, and an overflow leaves the update out. The engine then counts the skip and holds the schedule itself. A
    pipeline's own clipping would go by each stage's norm alone.

    Args: as `gradient_norm`.
    """
    optimizer = engine.optimizer
    take_model_step, optimizer_step = engine._take_model_step, optimizer.step

    def guarded_model_step(lr_kwargs):
        optimizer._global_grad_norm = gradient_norm(engine.module.parameters(), tensor_group, pipe_group)
        optimizer.overflow = not bool(torch.isfinite(optimizer._global_grad_norm))
        take_model_step(lr_kwargs)

    def clip_by_that_norm():
        torch.nn.utils.clip_grads_with_norm_(
            engine.module.parameters(), engine.gradient_clipping(), optimizer._global_grad_norm
        )

    @functools.wraps(optimizer_step)  # keeps the mark by which the schedule knows its optimizer
    def guarded_optimizer_step(*arguments, **options):
        return None if optimizer.overflow else optimizer_step(*arguments, **options)

    engine._take_model_step, optimizer.step = guarded_model_step, guarded_optimizer_step
    engine.clip_fp32_gradients = clip_by_that_norm


def gradient_norm(parameters, tensor_group=None, pipe_group=None) -> torch.Tensor:
    """2-norm of the whole model's gradients, already averaged over the ranks that hold the same parameters.

    Args:
        tensor_group: ranks among which matrices are split; None: none are.
        pipe_group: ranks among which layers are split; None: none are.
    """
    from deepspeed.module_inject.layers import DS_TENSOR_MODEL_PARALLEL
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    shares: dict = {}  # group whose ranks hold different parts, None: all ranks hold the same
    for parameter in parameters:
        # A tied parameter is on two stages, with the same gradient: DeepSpeed marks the second.
        if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
            continue
        group = None
        if is_moe_param(parameter):
            group = groups._get_expert_parallel_group(parameter.group_name)
        elif getattr(parameter, DS_TENSOR_MODEL_PARALLEL, False):
            group = tensor_group
        shares.setdefault(group, []).append(parameter.grad)
    squares = []
    for group, gradients in shares.items():
        square = torch.nn.utils.get_total_norm(gradients) ** 2
        if group is not None:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if pipe_group is not None:
        dist.all_reduce(total, group=pipe_group)
    return total.sqrt()


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
        sums = forward(engine, replace(batch, labels=labels[None]), 0, sizes)
        totals += torch.stack([sums["cross_entropy"].double(), totals.new_tensor(int((labels != IGNORED_LABEL).sum()))])
    engine.train()
    dist.all_reduce(totals)
    # Tensor ranks each have the whole loss, sequence ranks their part; both count the tokens of whole rows.
    loss_sum, tokens = totals[0].item() / sizes.tensor, totals[1].item() / (sizes.tensor * sizes.sequence)
    return loss_sum / max(tokens, 1), int(tokens)
