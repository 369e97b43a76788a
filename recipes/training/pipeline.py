"""Pipeline stages, with tensor-parallel blocks inside them: engine, step and validation over deepspeed.pipe."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import time
from functools import partial

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from data_prep.loader import IGNORED_LABEL, StepBatch, collate, rank_samples
from data_prep.samples import SampleStream
from recipes import models
from recipes.models.build import initialize_weights, parameter_groups, persistent_buffers
from recipes.models.pipeline import Block, pipeline_layers, pipeline_parameter_names
from recipes.training import distributed
from recipes.training.ds_config import engine_config, precision, zero_stage
from recipes.training.engine import forget_empty_step, recompute_activations
from recipes.training.losses import token_loss_sum, z_loss_sum
from recipes.training.schedule import recipe_factor
from recipes.training.step import StepResult, guard_stage_0, ranks_not_finite

logger = logging.getLogger("recipes")


class Pipeline(PipelineModule):
    """A PipelineModule whose stages can be balanced by measured costs.

    DeepSpeed balances stages by parameters, by type, or by number of layers; costs take the place of parameters.
    """

    def __init__(self, layers, costs: list[int] | None, **options):
        self._costs = costs
        super().__init__(layers, **options)

    def _count_layer_params(self):
        return self._costs or super()._count_layer_params()


class PipelineLoss:
    """The last stage's loss of one micro batch; adds up cross-entropy and z-loss for the report.

    Labels come as (labels [micro_batch, sequence], factor []): the loss is (sum over tokens) · factor.
    """

    def __init__(self, z_loss: float):
        self.z_loss = z_loss
        self.sums = torch.zeros(2)

    def __call__(self, logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        labels, factor = labels
        cross_entropy = token_loss_sum(logits, labels)
        z = z_loss_sum(logits, labels) if self.z_loss else torch.zeros_like(cross_entropy)
        self.sums = self.sums.to(logits.device) + torch.stack([cross_entropy, z]).detach()
        return (cross_entropy + self.z_loss * z) * factor

    def take(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        """[cross-entropy, z-loss] added up since the last call: this rank's own, and those of all ranks together."""
        own, self.sums = self.sums.to(device), torch.zeros(2)
        total = own.clone()
        dist.all_reduce(total)
        return own, total


def build_engine(prepared):
    """Returns the engine, its weights drawn from the recipe's seed or loaded from model.init_from."""
    recipe, sizes = prepared.recipe, prepared.sizes
    config = engine_config(prepared.ds_config, sizes)
    layers = pipeline_layers(recipe.model, recipe.data.seq_length, recipe.compute.attention)
    names = pipeline_parameter_names(layers)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision(config)]
    costs = layer_costs(layers, recipe, sizes, dtype) if recipe.pipeline.partition == "cost" else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module = Pipeline(
            layers,
            costs,
            topology=PipeModelDataParallelTopology(sizes.pipeline, sizes.tensor, sizes.data),
            loss_fn=PipelineLoss(recipe.loss.z_loss),
            partition_method="parameters" if costs else recipe.pipeline.partition,
        )
    logger.info("%s", printed.getvalue().strip())
    blocks = [function.layer for function in module.forward_funcs if isinstance(function, Block)]
    recompute_activations(blocks, recipe.compute.activation_checkpoint_interval)
    tensors = {
        names[name]: tensor for name, tensor in [*module.named_parameters(), *persistent_buffers(module).items()]
    }
    _set_weights(tensors, recipe)
    if sizes.tensor > 1:
        _split_tensors(module, recipe.model, module._grid.get_slice_parallel_group())
    weight_decay = config["optimizer"].get("params", {}).get("weight_decay", 0.0)
    factor = recipe_factor(recipe)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=parameter_groups(module, weight_decay),
        config=copy.deepcopy(config),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        dist_init_required=False,
    )
    if zero_stage(config) == 0 and precision(config) == "fp32":
        guard_stage_0(engine, engine.grid.get_slice_parallel_group(), engine.grid.get_pipe_parallel_group())
    elif zero_stage(config) == 0:
        forget_empty_step(engine)
    else:
        agree_on_norm(engine)
    if recipe.compute.compile:
        for block in blocks:
            block.compile()
    return engine


def agree_on_norm(engine) -> None:
    """Let all stages take part in the same all-reduces of the gradient norm, whatever parameters they hold.

    DeepSpeed 0.19.8's ZeRO optimizer makes one over the stages for each of a stage's parameter groups: where one holds
    an embedding or a head alone, which make one group, the others wait for ever. Its bf16 optimizer fails on a rank
    with nothing of its own, such as a stage that holds a tied head alone.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        own, groups = optimizer.scaled_global_norm, len(optimizer.bit16_groups)
        missing = max(distributed.gather(groups)) - groups

        def with_the_others(norm_type=2):
            norms = [own(norm_type)]
            for _ in range(missing):
                if optimizer.cpu_offload:
                    norms.append(optimizer.complete_grad_norm_calculation_for_cpu_offload([]))
                else:
                    norms.append(optimizer.get_grad_norm_direct([], []))
            return combine_grad_norm_groups(norms, norm_type)

        optimizer.scaled_global_norm = with_the_others
    else:
        gradients = optimizer.get_grads_for_norm

        def never_empty(for_clipping=False):
            found = gradients(for_clipping)
            if for_clipping or found[0]:
                return found
            return [torch.zeros(1, device=engine.device)], found[1]

        optimizer.get_grads_for_norm = never_empty


def _set_weights(tensors: dict[str, torch.Tensor], recipe) -> None:
    settings, length = recipe.model, recipe.data.seq_length
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter)}
    if settings.init_from is None:
        initialize_weights(parameters, settings, recipe.seed)
        return
    from transformers import AutoModelForCausalLM

    from recipes.models.hf_weights import SourceWeights

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(models.family(settings.family).hf_config(settings, length))
    source = SourceWeights.open(settings, length)
    shapes = {name: tensor.shape for name, tensor in [*whole.named_parameters(), *persistent_buffers(whole).items()]}
    padded = source.check(shapes, whole)
    initialize_weights({name: parameters[name] for name in padded if name in parameters}, settings, recipe.seed)
    source.load(tensors)


def _split_tensors(module: PipelineModule, settings, group) -> None:
    """Replace the stage's linear layers by DeepSpeed's tensor-parallel ones, by the family's TENSOR_PLAN.

    Embedding and head stay whole on each rank: DeepSpeed's vocabulary-parallel ones return a part of the logits.
    """
    set_autotp_mode(training=True)
    plan = models.family(settings.family).TENSOR_PLAN
    column, row = (rf".*\.({'|'.join(map(re.escape, plan[kind]))})\.weight$" for kind in ("column", "row"))
    module.universal_checkpoint_info = {  # read by ds_to_universal, which without it would put norms together as matrices
        UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [row],
        TP_REPLICATED_PARAMETER_PATTERNS: [f"(?!{column})(?!{row})"],
    }
    for name, child in list(module.named_modules()):
        parent, _, child_name = name.rpartition(".")
        for kind, layer in (("column", LinearLayer), ("row", LinearAllreduce)):
            if name.endswith(plan[kind]):
                setattr(module.get_submodule(parent), child_name, layer(child, group, name=name))
        if plan["summed"] and name.endswith(plan["summed"]):
            for parameter in child.parameters():  # each rank sees its own heads only
                parameter.register_hook(partial(_summed, group=group))


def _summed(gradient: torch.Tensor, group) -> torch.Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def layer_costs(layers, recipe, sizes, dtype: torch.dtype, repeats: int = 3) -> list[int]:
    """Microseconds of forward and backward of each layer on a micro batch, the best of `repeats`, measured on rank 0.

    Layers of one class with parameters of the same shapes cost the same: one of each kind is measured.
    """
    costs: list[int] | None = None
    if dist.get_rank() == 0:
        measured: dict = {}
        costs = []
        for layer in layers:
            with torch.device("meta"):
                shapes = tuple(parameter.shape for parameter in layer.build().parameters())
            function = getattr(layer, "forward_fn", None)
            kind = (layer.typename, function, shapes)
            if kind not in measured:
                measured[kind] = _measure(layer.build(), function, recipe, sizes, dtype, repeats)
            costs.append(measured[kind])
    return distributed.broadcast(costs)


def _measure(module, function, recipe, sizes, dtype: torch.dtype, repeats: int) -> int:
    accelerator = get_accelerator()
    device, shape = accelerator.current_device_name(), (sizes.micro_batch, recipe.data.seq_length)
    module = module.to(device, dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        if isinstance(module, torch.nn.Embedding) and function is None:
            inputs = torch.zeros(shape, dtype=torch.int64, device=device)
        else:
            inputs = torch.randn(*shape, recipe.model.hidden_size, dtype=dtype, device=device, requires_grad=True)
        accelerator.synchronize()
        begin = time.perf_counter()
        output = module(inputs) if function is None else function(module, inputs)
        output.sum().backward()
        accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return max(int(best * 1e6), 1)


def _micro_batches(engine, batch: StepBatch, factor: torch.Tensor):
    """(inputs, (labels, factor)) of each micro batch, as PipelineEngine takes them."""
    for micro in range(len(batch.inputs)):
        inputs = torch.from_numpy(batch.inputs[micro]).to(engine.device)
        if batch.positions is not None:
            inputs = (inputs, torch.from_numpy(batch.positions[micro]).to(engine.device))
        yield inputs, (torch.from_numpy(batch.labels[micro]).to(engine.device), factor)


def train_step(engine, batch: StepBatch, sizes, flags=list) -> StepResult:
    """One schedule of forwards, backwards and the update over one global batch; as step.train_step."""
    copies = sizes.tensor * sizes.pipeline  # ranks that hold the same rows
    counts = torch.tensor([batch.tokens, *flags()], dtype=torch.int64, device=engine.device)
    dist.all_reduce(counts)
    tokens, *raised = counts.tolist()
    tokens //= copies
    factor = torch.tensor(sizes.accumulation * sizes.data / max(tokens, 1), device=engine.device)
    lr = engine.lr_scheduler.get_last_lr()[0]
    engine.train_batch(_micro_batches(engine, batch, factor))
    own, total = engine.module.loss_fn.take(engine.device)  # the last stage's ranks alone have one
    loss, z = (value / (sizes.tensor * max(tokens, 1)) for value in total.tolist())
    grad_norm, applied = engine.get_global_grad_norm(), engine.was_step_applied()
    return StepResult(
        loss=loss,
        grad_norm=None if grad_norm is None else float(grad_norm),
        lr=lr,
        tokens=tokens,
        applied=applied,
        flags=tuple(count > 0 for count in raised),
        loss_scale=engine._get_optimizer_loss_scale() if engine.fp16_enabled() else None,
        bad_ranks=() if applied else ranks_not_finite(own[0]),
        other_losses={"z_loss": z} if engine.module.loss_fn.z_loss else {},
    )


@torch.no_grad()
def validate(engine, stream: SampleStream, samples: int, sizes, rank: int) -> tuple[float, int]:
    """Loss over the first `samples` samples of `stream`, token-weighted over all ranks: (nats a token, tokens)."""
    one = torch.ones((), device=engine.device)
    total, block = 0, sizes.micro_batch * sizes.data
    for begin in range(0, samples, block):
        mine = rank_samples(begin, sizes.micro_batch, 1, sizes.data, rank)
        batch = collate(stream, np.minimum(mine, samples - 1))
        labels = np.where((mine < samples)[..., None], batch.labels, IGNORED_LABEL)
        batch = StepBatch(batch.inputs, labels, mine, 0, batch.positions)
        total += int((labels != IGNORED_LABEL).sum())
        engine.eval_batch(_micro_batches(engine, batch, one), compute_loss=True, num_micro_batches=1)
    tokens = torch.tensor(total, dtype=torch.int64, device=engine.device)
    dist.all_reduce(tokens)
    tokens = int(tokens) // (sizes.tensor * sizes.pipeline)
    loss = engine.module.loss_fn.take(engine.device)[1][0].item() / sizes.tensor
    return loss / max(tokens, 1), tokens
