"""Run by launch.prove and by the tests on N ranks: the first steps of several recipes, one after another.

    ... launch/prove_ranks.py CASES.json RESULTS.json

CASES.json is a list of {name, recipe, overrides, steps, [plain], [moved], [poison]}; RESULTS.json, written by rank 0, is {name: result} with
the loss, gradient norm, learning rate and tokens of each step, a hash of each initial parameter, and, where a case failed,
its error; with `moved`, also how far each parameter has moved from its initial values after each step (2-norm). `plain` cases are run without DeepSpeed, in plain torch, by rank 0 alone. In step `poison` the last rank's loss is NaN, and plain torch
leaves the update out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.distributed as dist

from data_prep.loader import IGNORED_LABEL, collate, rank_samples
from recipes.training import distributed
from recipes.training.ds_config import precision
from recipes.training.loop import parse_arguments
from recipes.training.prepare import prepare, training_stream
from recipes.training.schedule import recipe_factor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepared_case(case: dict, world: int):
    arguments = parse_arguments("", ["--recipe", case["recipe"], "--resume", "none", *case["overrides"]])
    return prepare(arguments, world, distributed.choose_accelerator(), content=False)


@contextlib.contextmanager
def fresh_deepspeed():
    """DeepSpeed keeps its process groups, and more, in module globals: put them back, so that layouts can follow each other."""
    from deepspeed.module_inject import layers
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kept = {module: dict(vars(module)) for module in (groups, parallel_state_sp)}
    tables = {id(value): (value, dict(value)) for value in vars(groups).values() if isinstance(value, dict)}
    attention, mode = dict(ALL_ATTENTION_FUNCTIONS.items()), layers.DEEPSPEED_AUTOTP_MODE
    try:
        yield
    finally:
        for module, values in kept.items():
            vars(module).clear()
            vars(module).update(values)
        for table, values in tables.values():
            table.clear()
            table.update(values)
        for name, function in attention.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
        layers.DEEPSPEED_AUTOTP_MODE = mode


def run_case(case: dict) -> dict:
    prepared = prepared_case(case, dist.get_world_size())
    recipe, sizes = prepared.recipe, prepared.sizes
    if recipe.pipeline.stages is None:
        from recipes.training.engine import build_engine
        from recipes.training.step import train_step
    else:
        from recipes.training.pipeline import build_engine, train_step
    stream = training_stream(recipe)
    keys = ("loss", "grad_norm", "lr", "tokens", "applied", "bad_ranks", "other_losses")
    result: dict = {key: [] for key in keys}
    with fresh_deepspeed():
        engine = build_engine(prepared)
        initial = whole_weights(engine, prepared)
        initial_hashes, moved = agreed(hashes(initial)), []
        rank = sizes.data_rank(dist.get_rank())
        for step in range(case["steps"]):
            place = (sizes.micro_batch, sizes.accumulation, sizes.data, rank)
            batch = collate(stream, rank_samples(step * sizes.global_batch, *place))
            with poisoned(step + 1 == case.get("poison") and dist.get_rank() == dist.get_world_size() - 1):
                values = train_step(engine, batch, sizes)
            for key in keys:
                result[key].append(getattr(values, key))
            if case.get("moved"):
                parts = distributed.gather(distances(whole_weights(engine, prepared), initial))
                moved.append({name: value for part in parts for name, value in part.items()})
            if values.expert_load is not None:
                result["expert_load"] = values.expert_load
        _, apart = together(hashes(whole_weights(engine, prepared)))
        engine.destroy()
    return {**result, "initial_weights": initial_hashes, "moved": moved, "apart": apart}


@contextlib.contextmanager
def poisoned(active: bool):
    """While `active`, this rank's loss is NaN."""
    from recipes.training import losses, pipeline

    def nan_loss(logits, labels):
        return logits.float().sum() * float("nan")

    with contextlib.ExitStack() as stack:
        for module in (losses, pipeline) if active else ():
            stack.enter_context(mock.patch.object(module, "token_loss_sum", nan_loss))
        yield


def run_plain(case: dict) -> dict:
    """The same steps in plain torch: one process, one batch, no engine; cross-entropy, clipping, and an optimizer of torch."""
    from transformers import AutoModelForCausalLM

    from recipes import models
    from recipes.models.balance import sequence_balance
    from recipes.models.build import build_model, parameter_groups

    prepared = prepared_case(case, 1)
    recipe, config = prepared.recipe, prepared.ds_config
    settings, length = recipe.model, recipe.data.seq_length
    if settings.init_from is None:
        model = build_model(settings, length, recipe.seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(settings.init_from, attn_implementation="sdpa")
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moved = []
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    # DeepSpeed's Adam is AdamW unless told otherwise.
    adam = torch.optim.AdamW if params.pop("adam_w_mode", True) else torch.optim.Adam
    kind = {"adamw": adam, "adam": adam, "sgd": torch.optim.SGD}
    groups = parameter_groups(model, params.get("weight_decay", 0.0))
    optimizer = kind[config["optimizer"]["type"].lower()](groups, **params)
    balance = getattr(settings, "router_aux_loss_coef", 0.0)
    factor, stream, updates = recipe_factor(recipe), training_stream(recipe), 0
    result: dict = {"loss": [], "grad_norm": [], "lr": [], "tokens": [], "other_losses": []}
    assert models.family(settings.family).parameter_count(settings) == sum(p.numel() for p in model.parameters())
    for step in range(case["steps"]):
        samples = np.arange(step * recipe.global_batch_size, (step + 1) * recipe.global_batch_size)
        batch = collate(stream, samples[None])
        inputs, labels = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.labels[0])
        arguments = {} if batch.positions is None else {"position_ids": torch.from_numpy(batch.positions[0])}
        if balance:
            arguments["output_router_logits"] = True
        output = model(input_ids=inputs, use_cache=False, **arguments)
        logits = output.logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL)
        kept = labels.flatten() != IGNORED_LABEL
        total, others = loss, {}
        if recipe.loss.z_loss:
            others["z_loss"] = (logits.logsumexp(-1) ** 2)[kept].mean()
            total = total + recipe.loss.z_loss * others["z_loss"]
        if balance:
            sums, _ = sequence_balance(output.router_logits, labels, settings.num_experts_per_tok)
            others["balance_loss"] = sums / kept.sum()
            total = total + balance * others["balance_loss"]
        optimizer.zero_grad()
        total.backward()
        clip = config["gradient_clipping"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        lr = params["lr"] * factor(updates)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step + 1 != case.get("poison"):
            optimizer.step()
            updates += 1
        others = {key: value.item() for key, value in others.items()}
        for key, value in zip(result, (loss.item(), norm.item(), lr, int(kept.sum()), others), strict=True):
            result[key].append(value)
        moved.append(distances({name: parameter.detach() for name, parameter in model.named_parameters()}, initial))
    rounded = {name: value.to(DTYPES[precision(config)]).float() for name, value in initial.items()}
    return {**result, "initial_weights": hashes(rounded), "moved": moved}


def whole_weights(engine, prepared) -> dict[str, torch.Tensor]:
    """{name in the transformers model: values} of the parameters that this rank takes part in, put together."""
    import deepspeed
    from deepspeed.utils import groups

    from recipes import models
    from recipes.training import universal

    recipe, sizes = prepared.recipe, prepared.sizes
    plan = models.family(recipe.model.family).TENSOR_PLAN
    tensor_group = None
    if sizes.tensor > 1:
        pipeline = recipe.pipeline.stages is not None
        tensor_group = engine.grid.get_slice_parallel_group() if pipeline else groups.get_tensor_model_parallel_group()
    names = None
    if recipe.pipeline.stages is not None:
        from recipes.models.pipeline import pipeline_layers, pipeline_parameter_names

        names = pipeline_parameter_names(pipeline_layers(recipe.model, recipe.data.seq_length))
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            value = parameter.detach().float().clone()
        name = name if names is None else names[name]
        module = name.removesuffix(".weight")
        if sizes.expert > 1 and name.endswith((universal.GATE, universal.UP, universal.DOWN)):
            value = _gathered(value, groups._get_expert_parallel_group(parameter.group_name), 0)
        elif tensor_group is not None and module.endswith((*plan["column"], *plan["row"])):
            value = _gathered(value, tensor_group, 0 if module.endswith(plan["column"]) else 1)
        whole[name] = value.cpu()
    for name in [name for name in whole if name.endswith(universal.GATE)]:
        layer = name.removesuffix(universal.GATE)
        both = [whole.pop(layer + ending) for ending in (universal.GATE, universal.UP)]
        whole[layer + universal.FUSED] = torch.cat(both, dim=1)
        whole[layer + universal.FUSED_DOWN] = whole.pop(layer + universal.DOWN)
    return {universal.whole_name(name): value for name, value in whole.items()}


def together(values: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(all ranks' {name: value} in one, names of which two ranks hold other values)."""
    whole: dict[str, str] = {}
    apart: dict[str, None] = {}
    for part in distributed.gather(values):
        for name, value in part.items():
            if whole.setdefault(name, value) != value:
                apart[name] = None
    return whole, list(apart)


def agreed(values: dict[str, str]) -> dict[str, str]:
    """All ranks' {name: value} in one. Raises ValueError when two ranks hold other values of one name."""
    whole, apart = together(values)
    if apart:
        raise ValueError(f"two ranks hold other values of {', '.join(apart)}")
    return whole


def hashes(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: _hash(value) for name, value in weights.items()}


def distances(weights: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((value - initial[name]).norm()) for name, value in weights.items()}


def _gathered(value: torch.Tensor, group, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _hash(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    distributed.choose_accelerator()
    distributed.start_process_group(distributed.find_place())
    results = {}
    for case in cases:
        try:
            if case.get("plain"):
                results[case["name"]] = run_plain(case) if dist.get_rank() == 0 else None
            else:
                results[case["name"]] = run_case(case)
        except Exception as error:
            import traceback

            traceback.print_exc()
            results[case["name"]] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
        if dist.get_rank() == 0:
            output.write_text(json.dumps(results))
    distributed.stop_process_group()


if __name__ == "__main__":
    main()
