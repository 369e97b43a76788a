"""What a step costs beyond DeepSpeed: our loop against the plainest loop over the same engine, and against transformers.Trainer.

    DS_ACCELERATOR=cpu python benchmarks/overhead.py [--steps 90] [KEY=VALUE ...]

One process; the model and ds_config of recipes/demo.yaml on synthetic tokens, which the overrides change. Our loop and the plain one
take turns step by step on one engine, so that a noisy machine disturbs both alike; so do our loop and Trainer, which has an engine of
its own from the same ds_config, model and batches, and needs `pip install accelerate`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from data_prep.loader import StepLoader
from monitoring.metrics import MetricsWriter, StepClock
from recipes import models
from recipes.training import distributed
from recipes.training.loop import parse_arguments
from recipes.training.prepare import prepare, training_stream


def ours(engine, loader, sizes, clock, metrics, progress) -> None:
    from recipes.training.run_directory import memory_gib
    from recipes.training.step import train_step

    clock.start()
    batch = loader.next()
    result = train_step(engine, batch, sizes)
    progress.advance(sizes.global_batch, result.tokens, result.applied)
    values = {**progress.counters(), **result.metrics(), "data_wait_s": loader.wait_s, **clock.stop(result.tokens)}
    metrics.write(progress.step, {**values, "memory_gib": memory_gib()})


def plain(engine, batch) -> None:
    for inputs, labels in zip(batch.inputs, batch.labels, strict=True):
        logits = engine(input_ids=torch.from_numpy(inputs).to(engine.device), use_cache=False).logits
        labels = torch.from_numpy(labels).to(engine.device)
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        engine.step()


def trainer_of(prepared, folder: Path, steps: int, step: Callable[[], None]):
    """A Trainer over the same model, ds_config and batches that takes turns with `step`; the list of (its, our) seconds."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from recipes.models.build import build_model

    recipe, sizes = prepared.recipe, prepared.sizes
    stream = training_stream(recipe)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, number):
            ids = torch.from_numpy(stream.sample(number))
            return {"input_ids": ids[:-1], "labels": ids[:-1]}

    pairs: list[tuple[float, float]] = []

    class Turns(TrainerCallback):
        """After each of Trainer's steps, with its data and its log, one of ours."""

        end: float | None = None  # of our last step

        def on_step_end(self, *_, **__):
            middle, begin = time.perf_counter(), self.end
            step()
            self.end = time.perf_counter()
            if begin is not None:
                pairs.append((middle - begin, self.end - middle))

    config = copy.deepcopy(prepared.ds_config)
    config["gradient_accumulation_steps"] = sizes.accumulation
    config["train_batch_size"] = sizes.global_batch
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        max_steps=steps,
        per_device_train_batch_size=sizes.micro_batch,
        gradient_accumulation_steps=sizes.accumulation,
        learning_rate=config["optimizer"]["params"]["lr"],
        weight_decay=config["optimizer"]["params"].get("weight_decay", 0.0),
        adam_beta1=0.9,
        adam_beta2=config["optimizer"]["params"].get("betas", [0.9, 0.999])[1],
        adam_epsilon=config["optimizer"]["params"].get("eps", 1e-8),
        max_grad_norm=config["gradient_clipping"],
        logging_steps=1,
        save_strategy="no",
        report_to=["tensorboard"],
        disable_tqdm=True,
        use_cpu=distributed.choose_accelerator() == "cpu",
    )
    model = build_model(recipe.model, recipe.data.seq_length, recipe.seed)
    return Trainer(model=model, args=arguments, train_dataset=Samples(), callbacks=[Turns()]), pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [
            f"output_dir={folder}",
            "data.files=synthetic",
            "data.validation_files=null",
            "data.tokenizer=null",
        ]
        overrides += ["global_batch_size=8", "ds.train_micro_batch_size_per_gpu=4", "schedule.steps=100000"]
        arguments = parse_arguments("", ["--recipe", "demo", *overrides, *options.overrides])
        place = distributed.find_place()
        prepared = prepare(arguments, place.world_size, distributed.choose_accelerator())
        distributed.start_process_group(place)
        from recipes.training.checkpoint import Progress
        from recipes.training.engine import build_engine

        recipe, sizes = prepared.recipe, prepared.sizes
        recipe.run_directory.mkdir(parents=True)
        engine = build_engine(prepared)
        loader = StepLoader(training_stream(recipe), sizes, 0)
        flops = models.family(recipe.model.family).flops_per_token(recipe.model, recipe.data.seq_length)
        clock, progress = StepClock(flops, sizes.world, None), Progress()
        metrics = MetricsWriter(recipe.run_directory, 1, 1, True)
        times: dict[str, list[float]] = {"ours": [], "plain": []}

        def run_ours() -> None:
            ours(engine, loader, sizes, clock, metrics, progress)

        def run_plain() -> None:
            plain(engine, loader.next())

        for step in range(options.steps + 3):
            for which, run in (("ours", run_ours), ("plain", run_plain)):
                begin = time.perf_counter()
                run()
                if step >= 3:
                    times[which].append(time.perf_counter() - begin)
        median = {which: statistics.median(values) for which, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["plain"], strict=True))
        print(f"ours   {median['ours'] * 1e3:8.1f} ms a step")
        print(f"plain  {median['plain'] * 1e3:8.1f} ms a step; ours takes {100 * (ratio - 1):+.1f} % (median of pairs)")
        try:
            import accelerate  # noqa: F401
        except ImportError:
            print("Trainer not compared: pip install accelerate")
            return
        trainer, pairs = trainer_of(prepared, folder / "trainer", options.steps + 4, run_ours)
        trainer.train()
        theirs, mine = (statistics.median(times) for times in zip(*pairs[3:], strict=True))
        ratio = statistics.median(a / b for a, b in pairs[3:])
        print(f"Trainer {theirs * 1e3:7.1f} ms a step, ours in turns with it {mine * 1e3:.1f} ms")
        print(f"Trainer takes {ratio:.3f} times ours (median of {len(pairs) - 3} pairs)")


if __name__ == "__main__":
    main()
