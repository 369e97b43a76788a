"""Run by test_engine.py on two ranks, once: every ZeRO stage, batch split and family over the same steps; writes results.json.

One launch for all of it, since a launch costs more than the checks.
"""

import hashlib
import json
import sys
from pathlib import Path
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[2])

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from data_prep.loader import IGNORED_LABEL, StepBatch, rank_samples
from recipes.training import checkpoint, checkpoint_files, distributed, losses, step
from recipes.training.ds_config import load_ds_config
from recipes.training.ds_config_rules import check_ds_config
from recipes.training.engine import build_engine, forget_empty_step
from recipes.training.losses import token_loss_sum
from recipes.training.prepare import Prepared
from recipes.training.recipe_file import effective_yaml, load_recipe
from recipes.training.sizes import Sizes, resolve_sizes
from tests.recipes.families import SMALL

FOLDER = Path(sys.argv[1])
STEPS, BATCH, LENGTH, VOCABULARY = 4, 8, 16, 64
TOKENS = {"one parameter": (1, 4), "a rank without labels": (0, 4), "no labels at all": (0, 0)}
CLIP = 0.5  # below every gradient norm here


def global_batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) [BATCH, LENGTH] of a step, with very uneven numbers of labels a row."""
    random = np.random.RandomState(number)
    rows = random.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    labels = rows[:, 1:].copy()
    for row in range(BATCH):
        labels[row, random.randint(1, LENGTH) if row % 2 else LENGTH :] = IGNORED_LABEL
    return rows[:, :-1], labels


def my_batch(number: int, sizes, rank: int) -> StepBatch:
    inputs, labels = global_batch(number)
    mine = rank_samples(0, sizes.micro_batch, sizes.accumulation, sizes.data, rank)
    return StepBatch(inputs[mine], labels[mine], mine, int((labels[mine] != IGNORED_LABEL).sum()))


def prepared(
    name: str,
    stage: int,
    micro: int,
    tied: bool,
    *ds_overrides: str,
    family: str = "tiny",
    init_from=None,
    rows=64,
    dropout: float = 0.0,
) -> Prepared:
    overrides = [f"name={name}", f"model.attention_dropout={dropout}", f"model.tie_word_embeddings={tied}"]
    if family == "qwen3_moe":  # its balance loss is test_parity.py's
        overrides.append("model.router_aux_loss_coef=0")
    overrides += [f"model.init_from={init_from or 'null'}", f"model.vocab_size={rows}"]
    recipe, _ = load_recipe(FOLDER / f"{family}.yaml", overrides)
    keys = [
        f"gradient_clipping={CLIP}",
        f"zero_optimization.stage={stage}",
        f"train_micro_batch_size_per_gpu={micro}",
        *ds_overrides,
    ]
    config = load_ds_config(recipe.deepspeed_config, keys)
    check_ds_config(config, "test")
    return Prepared(recipe, config, resolve_sizes(recipe.global_batch_size, config, dist.get_world_size()))


def gathered(engine) -> dict[str, torch.Tensor]:
    values = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            values[name] = parameter.detach().float().clone()
    return values


def digest(values: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(values):
        sha.update(values[name].numpy().tobytes())
    return sha.hexdigest()


def nan_loss(logits, labels):
    return token_loss_sum(logits, labels) * float("nan")


def save(engine, case: Prepared, progress, data: dict) -> Path:
    saver = checkpoint.Saver(engine, case.recipe, case.sizes, data, 0)
    saver.save(progress)
    saver.finish()
    return saver.directory / checkpoint_files.tag(progress.step)


def steps(engine, case: Prepared, progress, until: int, poison: bool = False) -> tuple[list, list]:
    """(results, digests of the weights after each step) of the steps after `progress`, which moves on with them."""
    results, hashes = [], []
    for number in range(progress.step, until):
        loss = nan_loss if poison and number == 1 and dist.get_rank() == 1 else token_loss_sum
        with mock.patch.object(losses, "token_loss_sum", loss):
            batch = my_batch(number, case.sizes, dist.get_rank())
            result = step.train_step(engine, batch, case.sizes)
        progress.advance(case.sizes.global_batch, result.tokens, result.applied)
        results.append(result)
        hashes.append(distributed.gather(digest(gathered(engine))))
    return results, hashes


def run_case(
    name: str, stage: int, micro: int, tied: bool, *ds_overrides: str, poison: bool = False, **options
) -> dict:
    """STEPS steps, a checkpoint half way and at the end, the logits of one input; then the second half again, resumed.

    With `poison`, rank 1's loss is NaN in step 2. `options` as of prepared.
    """
    case = prepared(name, stage, micro, tied, *ds_overrides, **options)
    engine, progress = build_engine(case), checkpoint.Progress()
    initial = distributed.gather(digest(gathered(engine)))
    data = {"files": name}
    first, first_hashes = steps(engine, case, progress, STEPS // 2, poison)
    half_way = save(engine, case, progress, data)
    second, second_hashes = steps(engine, case, progress, STEPS)
    drawn = distributed.gather(float(torch.rand(())))
    finite = all(bool(value.isfinite().all()) for value in gathered(engine).values())
    save(engine, case, progress, data)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.arange(LENGTH)[None], use_cache=False).logits
    if dist.get_rank() == 0:
        np.save(FOLDER / f"{name}.npy", logits.float().numpy())
        (case.recipe.run_directory / "recipe.yaml").write_text(effective_yaml(case.recipe))
    engine.destroy()

    engine = build_engine(case)
    again = checkpoint.resume(engine, case.recipe, case.sizes, half_way, data)
    resumed, resumed_hashes = steps(engine, case, again, STEPS)
    drawn_again = distributed.gather(float(torch.rand(())))
    engine.destroy()
    results = first + second
    return {
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "lr": [r.lr for r in results],
        "applied": [r.applied for r in results],
        "tokens": [r.tokens for r in results],
        "hashes": [initial, *first_hashes, *second_hashes],
        "finite": finite,
        "drawn": drawn,
        "drawn_again": drawn_again,
        "progress": progress.__dict__,
        "resumed": [[r.loss, r.grad_norm, r.lr] for r in resumed],
        "resumed_hashes": resumed_hashes,
        "resumed_progress": again.__dict__,
    }


def reference(tied: bool, family: str = "tiny") -> dict:
    """The same steps in plain torch: one process, one batch, no engine."""
    from recipes.models.build import build_model, parameter_groups
    from recipes.training.schedule import recipe_factor

    recipe = prepared("reference", 0, 4, tied, family=family).recipe
    model = build_model(recipe.model, LENGTH, recipe.seed)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.01)
    factor, results = recipe_factor(recipe), {"loss": [], "grad_norm": [], "lr": []}
    for number in range(STEPS):
        inputs, labels = (torch.from_numpy(array) for array in global_batch(number))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        lr = 0.01 * factor(number)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for key, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", lr)):
            results[key].append(value)
    return results


def buffers_in_bf16(family: str) -> dict:
    """{stage: whether every rank's buffers are those of the plain model, in fp32}."""
    from recipes.models.build import build_model

    results = {}
    for stage in (0, 1, 3):
        case = prepared("buffers", stage, 4, False, "bf16.enabled=true", family=family)
        expected = dict(build_model(case.recipe.model, LENGTH, case.recipe.seed).named_buffers())
        engine = build_engine(case)
        found = dict(engine.module.named_buffers())
        same = found.keys() == expected.keys() and all(
            buffer.dtype == torch.float32 and torch.equal(buffer.cpu(), expected[name])
            for name, buffer in found.items()
        )
        results[f"stage {stage}"] = distributed.gather(bool(found) and same)
        engine.destroy()
    return results


def started_from(family: str) -> dict:
    """Largest difference of an engine's first logits from those of the model it is started from, at ZeRO 0 and 3."""
    from recipes.models.build import build_model, persistent_buffers

    source, tokens = FOLDER / f"source_{family}", torch.arange(LENGTH)[None]
    recipe = prepared("source", 0, 4, False, family=family).recipe
    model = build_model(recipe.model, LENGTH, seed=99).eval()
    for buffer in persistent_buffers(model).values():  # DeepSeek-V3's routing bias, which no training here moves
        buffer += torch.arange(len(buffer)) / len(buffer)
    if dist.get_rank() == 0:
        model.save_pretrained(source)
    distributed.barrier()
    with torch.no_grad():
        expected, results = model(tokens, use_cache=False).logits, {}
        for stage in (0, 3):
            case = prepared("biased", stage, 4, False, family=family, init_from=source)
            engine = build_engine(case)
            engine.eval()
            logits = engine(input_ids=tokens, use_cache=False).logits
            results[f"stage {stage}"] = distributed.gather((logits - expected).abs().max().item())
            if family == "deepseek_v3" and stage == 3:  # for an export of a bias that is not zero
                save(engine, case, checkpoint.Progress(step=1), {"files": "none"})
                if dist.get_rank() == 0:
                    (case.recipe.run_directory / "recipe.yaml").write_text(effective_yaml(case.recipe))
            engine.destroy()
            engine = build_engine(prepared("from", stage, 4, False, family=family, init_from=source, rows=70))
            results[f"stage {stage} padded"] = distributed.gather(digest(gathered(engine)))
            engine.destroy()
    return results


def moves_in_bf16() -> dict:
    """100 bf16 steps of Adam at 6e-4, a sixth of bf16's step at 1, with the same gradient: w that the optimizer holds."""
    results = {}
    for stage in (0, 1, 2, 3):
        adam = {"type": "AdamW", "params": {"lr": 6e-4, "weight_decay": 0.0, "torch_adam": True}}
        engine = one_parameter_engine(stage, adam, bf16={"enabled": True}, accumulation=1)
        for _ in range(100):
            take_one_step(engine, np.ones((1, 1, 4)), np.zeros((1, 1, 4), int))
        adam = engine.optimizer.optimizer
        masters = [parameter.detach() for group in adam.param_groups for parameter in group["params"]]
        if stage == 3:  # DeepSpeed hands its partitions to the optimizer for the time of a step
            masters = [deepspeed.utils.safe_get_full_fp32_param(engine.module.w)]
        tensors = masters + [value for state in adam.state.values() for value in state.values() if value.dim()]
        # A rank whose share of the one number is padding has zeros.
        largest = max(distributed.gather(max([float(master.max()) for master in masters if len(master)], default=0.0)))
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        results[f"stage {stage}"] = {"master": largest, "dtypes": dtypes}
        engine.destroy()
    return results


def many_micro_batches() -> dict:
    """The gradient norm of 256 equal micro batches in bf16, whose sum in bf16 would end far too small."""
    results = {}
    for stage in (1, 2, 3):  # DeepSpeed refuses fp32 sums at 0
        sgd = {"type": "SGD", "params": {"lr": 0.0}}
        engine = one_parameter_engine(
            stage, sgd, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, accumulation=256
        )
        result = take_one_step(engine, np.full((256, 1, 4), 1.5), np.zeros((256, 1, 4), int))
        results[f"stage {stage}"] = result.grad_norm
        engine.destroy()
    return results


class OneParameter(torch.nn.Module):
    """ "Logits" are w · input, and the loss is their sum, so that each token's gradient is its input."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels):
        loss = (self.w * input_ids.float() * (labels != IGNORED_LABEL)).sum()
        return {"trained": loss, "cross_entropy": loss.detach()}


def one_parameter_engine(stage: int, optimizer: dict, accumulation: int, **keys):
    """An engine over OneParameter, w = 1, with a constant rate."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **keys,
    }
    model = OneParameter()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"name": "all", "params": [model.w]}],
        config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1.0),
        dist_init_required=False,
    )
    if stage == 0 and "bf16" in keys:
        forget_empty_step(engine)
    elif stage == 0:
        step.guard_stage_0(engine)
    return engine


def take_one_step(engine, inputs: np.ndarray, labels: np.ndarray):
    """inputs, labels: this rank's [accumulation, 1, tokens]."""
    accumulation = len(inputs)
    sizes = Sizes(2, 2, 1, 1, 1, 1, 1, accumulation, 2 * accumulation)
    batch = StepBatch(inputs, labels, np.zeros((accumulation, 1)), int((labels == 0).sum()))
    return step.train_step(engine, batch, sizes, flags=lambda: [False, dist.get_rank() == 1])


def one_parameter(stage: int, counts: tuple[int, int]) -> dict:
    """One step of SGD with rate 1 on w = 1.

    Args:
        counts: tokens of each of two micro batches: on rank 0, of loss 1; on rank 1, of loss 3.
    """
    rank = dist.get_rank()
    engine = one_parameter_engine(stage, {"type": "SGD", "params": {"lr": 1.0}}, accumulation=2)
    labels = np.full((2, 1, 4), IGNORED_LABEL)
    labels[:, :, : counts[rank]] = 0
    result = take_one_step(engine, np.full((2, 1, 4), 3 if rank else 1), labels)
    with deepspeed.zero.GatheredParameters([engine.module.w], enabled=stage == 3):
        weight = float(engine.module.w.detach())
    engine.destroy()
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "w": weight,
        "flags": result.flags,
        "applied": result.applied,
    }


def main() -> None:
    distributed.start_process_group(distributed.find_place())
    results = {"reference tied": reference(True), "reference untied": reference(False)}
    for stage in (0, 1, 2, 3):
        results[f"stage {stage} tied"] = run_case(f"s{stage}_tied", stage, 2, True)
        results[f"stage {stage} untied"] = run_case(f"s{stage}_untied", stage, 2, False)
        results[f"stage {stage} poisoned"] = run_case(f"s{stage}_poisoned", stage, 2, True, poison=True)
    for micro in (1, 4):
        results[f"micro {micro}"] = run_case(f"micro_{micro}", 1, micro, True)
    for stage in (0, 1, 2, 3):
        bf16 = "bf16.enabled=true"
        results[f"stage {stage} bf16"] = run_case(f"s{stage}_bf16", stage, 4, True, bf16)
        poisoned = run_case(f"s{stage}_poisoned_bf16", stage, 4, True, bf16, poison=True)
        results[f"stage {stage} poisoned bf16"] = poisoned
        results[f"stage {stage} dropout"] = run_case(f"s{stage}_dropout", stage, 2, True, dropout=0.1)
    for family in SMALL:
        results[f"reference {family}"] = reference(False, family)
        results[f"started from {family}"] = started_from(family)
        results[f"buffers {family}"] = buffers_in_bf16(family)
        for stage in (0, 1, 2, 3):
            results[f"stage {stage} {family}"] = run_case(f"s{stage}_{family}", stage, 2, False, family=family)
    for stage in (0, 1, 2, 3):
        for name, counts in TOKENS.items():
            results[f"{name}, stage {stage}"] = one_parameter(stage, counts)
    results["moves in bf16"] = moves_in_bf16()
    results["many micro batches"] = many_micro_batches()
    if dist.get_rank() == 0:
        (FOLDER / "results.json").write_text(json.dumps(results))
    distributed.stop_process_group()


if __name__ == "__main__":
    main()
