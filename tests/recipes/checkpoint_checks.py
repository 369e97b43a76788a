"""Run by test_async_checkpoint.py on two ranks, once: saves under every kind of engine, by our writer and by DeepSpeed's
own where they work; writes results.json."""

import json
import multiprocessing
import random
import sys
import threading
from pathlib import Path
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule

from recipes.models.build import build_model
from recipes.training import async_checkpoint, checkpoint, checkpoint_files, distributed
from recipes.training.recipe_file import load_recipe
from recipes.training.sizes import Sizes
from tests.recipes.families import small

FOLDER = Path(sys.argv[1])
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
DATA = {"files": "synthetic"}  # its fingerprint
EXPERTS = {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe", "use_grouped_mm": False}
SIZES = Sizes(
    world=2, data=2, tensor=1, pipeline=1, sequence=1, expert=1, micro_batch=2, accumulation=1, global_batch=4
)


def initialize(model, config: dict, **options):
    engine, *_ = deepspeed.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "gradient_clipping": 1.0, **config},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        dist_init_required=False,
        **options,
    )
    return engine


def language_model(family: str, config: dict):
    def build():
        model = build_model(small(family), 16, seed=1)
        group = {"name": "all", "params": list(model.parameters())}
        return initialize(model, config, model_parameters=[group])

    def train(engine, number: int) -> None:
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        logits = engine(input_ids=tokens[:, :-1], use_cache=False).logits
        engine.backward(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()

    return build, train


def pipeline(stage: int, config: dict | None = None):
    def build():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(16, 16) for _ in range(4)]
        model = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss)
        return initialize(model, {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, **(config or {})})

    def train(engine, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(2, 16, generator=generator), torch.randn(2, 16, generator=generator)
        engine.train_batch(iter([batch]))

    return build, train


def state_of(engine) -> list[torch.Tensor]:
    """Copies of all tensors of the module (but for ZeRO-3, whose module holds none) and of the optimizer."""
    states = [dict(engine.module.named_parameters()), engine.optimizer.state_dict()]
    return [tensor.detach().clone() for tensor in async_checkpoint.tensors_of(states)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check(name: str, build, train) -> dict:
    recipe, _ = load_recipe(FOLDER / "tiny.yaml", [f"name={name.replace(' ', '_')}"])
    engine, progress = build(), checkpoint.Progress()
    saver = checkpoint.Saver(engine, recipe, SIZES, DATA, 0)
    held, write_state = threading.Event(), async_checkpoint.write_state

    def late(path, state):
        assert held.wait(60)
        return write_state(path, state)

    for _ in range(2):
        train(engine, progress.step)
        progress.advance(4, 32, True)
    before = state_of(engine)
    checkpoint.seed_ranks(11, progress.step, dist.get_rank())
    draw()  # no longer what seed_ranks gives
    with mock.patch.object(async_checkpoint, "write_state", late):
        saver.save(progress)
        result = {"busy": saver.flags()[0], "unpublished": not checkpoint_files.checkpoints(saver.directory)}
        drawn = draw()
        train(engine, progress.step)
        result["moved_on"] = not same(before, state_of(engine))
        dist.barrier()
        held.set()
        saver.finish()
    engine.destroy()
    engine = build()
    chosen = checkpoint.choose(recipe)
    result["step"] = checkpoint.resume(engine, recipe, SIZES, chosen, DATA).step
    result["same"] = same(before, state_of(engine))
    result["draws"] = draw() == drawn
    engine.destroy()
    return result


def draw() -> list:
    """From every source of randomness on this rank."""
    return [torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), [random.random() for _ in range(3)]]


def check_own_engine(name: str, build, train) -> dict:
    """As `check`, with the engine that the ds_config selects: nothing is published before a decoupled one's commit."""
    recipe, _ = load_recipe(FOLDER / "tiny.yaml", [f"name={name.replace(' ', '_').replace(',', '')}"])
    engine, progress = build(), checkpoint.Progress()
    saver = checkpoint.Saver(engine, recipe, SIZES, DATA, 0)
    for _ in range(2):
        train(engine, progress.step)
        progress.advance(4, 32, True)
    before = state_of(engine)
    saver.save(progress)
    uncommitted = engine.checkpoint_engine.get_commit_info() is not None
    result = {"decoupled": uncommitted, "engine": type(engine.checkpoint_engine.inner).__name__}
    assert not uncommitted or saver.flags()[0]
    train(engine, progress.step)
    assert not same(before, state_of(engine))
    saver.finish()
    progress.advance(4, 32, True)
    after = state_of(engine)
    saver.save(progress)  # of the last step: no other one commits it
    saver.close()
    result["left"] = len(multiprocessing.active_children())
    result["steps"] = [checkpoint_files.step_of(path) for path in checkpoint_files.checkpoints(saver.directory)]
    result["damage"] = [checkpoint.damage(path) for path in checkpoint_files.checkpoints(saver.directory)]
    engine.destroy()
    engine = build()
    for step, state in ((2, before), (3, after)):
        resumed = checkpoint.resume(engine, recipe, SIZES, saver.directory / f"global_step{step}", DATA)
        assert resumed.step == step
        result[f"same {step}"] = same(state, state_of(engine))
    engine.destroy()
    return result


def own_engines() -> dict:
    """{name: (build, train)} of what ds_config_rules.check_layout lets through on a CPU."""
    python = {"type": "python", "data_parallel": "replica"}
    cases = {}
    for kind, writer, stages in (
        ("torch", None, (0, 1, 2, 3)),
        ("python", python, (0, 1, 2, 3)),
        ("decoupled", {**python, "decoupled": True}, (0, 3)),
    ):
        own = {"checkpoint": {"writer": writer}}
        for stage in stages:
            config = {**own, "zero_optimization": {"stage": stage}}
            cases[f"{kind}, stage {stage}"] = language_model("llama", config)
            cases[f"{kind}, bf16 {stage}"] = language_model("llama", {**config, "bf16": {"enabled": True}})
            cases[f"{kind}, experts {stage}"] = language_model("qwen3_moe", {**config, "expert_parallel": EXPERTS})
        if kind != "decoupled":
            cases |= {f"{kind}, pipeline {stage}": pipeline(stage, own) for stage in (0, 1)}
    return cases


def second_save(build) -> dict:
    """Two saves at once: the second one waits until the first is published."""
    recipe, _ = load_recipe(FOLDER / "tiny.yaml", ["name=second"])
    engine = build()
    saver, result = checkpoint.Saver(engine, recipe, SIZES, DATA, 0), {}
    held, write_state = threading.Event(), async_checkpoint.write_state

    def late(path, state):
        assert held.wait(60)
        return write_state(path, state)

    def steps() -> list[int]:
        return [checkpoint_files.step_of(path) for path in checkpoint_files.checkpoints(saver.directory)]

    with mock.patch.object(async_checkpoint, "write_state", late):
        saver.save(checkpoint.Progress(step=1))
        result["first"] = steps()
        dist.barrier()
        threading.Timer(1, held.set).start()
        saver.save(checkpoint.Progress(step=2))
        result["held"] = held.is_set()
        result["second"] = [step for step in steps() if step != 2]  # the other rank may be on its way already
        saver.finish()
    result["both"] = steps()
    engine.destroy()
    return result


def by_the_clock(build) -> dict:
    """What a saver says before and after a checkpoint, with every_minutes passed and not."""
    options = ["name=clock", "checkpoint.every_steps=null", "checkpoint.every_minutes="]
    recipe, _ = load_recipe(FOLDER / "tiny.yaml", [*options[:2], options[2] + "1e-9"])
    patient, _ = load_recipe(FOLDER / "tiny.yaml", [*options[:2], options[2] + "60"])
    engine = build()
    saver, result = checkpoint.Saver(engine, recipe, SIZES, DATA, 0), {"not due": []}
    result["flags"] = saver.flags()
    result["not due"].append(saver.due(1))
    saver.advance(False, True, False)
    result["due"] = saver.due(1)
    saver.save(checkpoint.Progress(step=1))
    result["while writing"] = saver.flags()[1]
    result["not due"].append(saver.due(1))
    saver.uploader = mock.Mock(**{"busy.return_value": False})
    for _ in range(2):  # written, published
        saver.writer.result()
        saver.advance(False, False, False)
    result["uploader"] = [call[0] for call in saver.uploader.method_calls]
    result["patient"] = checkpoint.Saver(engine, patient, SIZES, DATA, 0).flags()
    engine.destroy()
    return result


def main() -> None:
    distributed.start_process_group(distributed.find_place())
    cases = {f"stage {n}": language_model("llama", {"zero_optimization": {"stage": n}}) for n in range(4)}
    cases["bf16"] = language_model("llama", {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage}, "expert_parallel": EXPERTS}
        cases[f"experts {stage}"] = language_model("qwen3_moe", config)
    cases |= {f"pipeline {stage}": pipeline(stage) for stage in (0, 1)}
    results = {"clock": distributed.gather(by_the_clock(cases["stage 1"][0]))}
    results["second save"] = distributed.gather(second_save(cases["stage 1"][0]))
    own = own_engines()
    # Pipelines last: DeepSpeed keeps their groups for every later engine.
    for name, case in sorted({**cases, **own}.items(), key=lambda item: "pipeline" in item[0]):
        results[name] = distributed.gather((check_own_engine if name in own else check)(name, *case))
    if dist.get_rank() == 0:
        (FOLDER / "results.json").write_text(json.dumps(results))
    distributed.stop_process_group()


if __name__ == "__main__":
    main()
