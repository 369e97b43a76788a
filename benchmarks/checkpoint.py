"""How long training stands still for a checkpoint, and what the steps after it pay, on this machine.

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py [--million_parameters 100] [--saves 5] [--directory DIR]

One engine (ZeRO-1, Adam, fp32 on a CPU, bf16 elsewhere) saves the same state several ways in one run: DeepSpeed's own
engine, which neither makes files durable nor hashes them, this repository's with checkpoint.asynchronous false and true,
and where they are there, dlrover's flash checkpoint and DataStates. The first save of each, which allocates memory, is
not counted. Rank 0 prints the results as JSON, with why for what was not compared.

dlrover: pip install --target DIR --no-deps dlrover pynvml nvidia-ml-py deprecated wrapt, then PYTHONPATH=DIR. DataStates
is not on PyPI (https://github.com/DataStates/datastates-llm) and needs an NVIDIA GPU; it was never tried here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.training import distributed

WORDS, WIDTH, LENGTH = 8192, 768, 32
STEPS_BETWEEN = 3  # timed without a save under way
DATASTATES_CACHE_GIB = 8  # of host memory on each rank


def build_engine(layers: int, device: str, **sections):
    """`sections`: of the ds_config, beside the usual ones."""
    import deepspeed
    import torch

    from recipes.models.build import build_model
    from recipes.models.llama import Settings

    settings = Settings(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    model = build_model(settings, LENGTH, seed=1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": device != "cpu"},
        **sections,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"name": "all", "params": list(model.parameters())}],
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        dist_init_required=False,
    )
    return settings, engine


def train_step(engine) -> float:
    """Seconds of one step, from a common start to the slowest rank's end."""
    import torch
    import torch.distributed as dist

    tokens = torch.randint(0, WORDS, (4, LENGTH), device=engine.device)
    dist.barrier()
    begin = time.perf_counter()
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()
    dist.barrier()
    return time.perf_counter() - begin


def plain_saves(engine, directory: Path, saves: int) -> list[float]:
    """DeepSpeed's own engine: seconds of each save."""
    import torch.distributed as dist

    seconds = []
    for number in range(saves):
        train_step(engine)
        dist.barrier()
        begin = time.perf_counter()
        engine.save_checkpoint(str(directory), tag=f"plain_{number}")
        seconds.append(time.perf_counter() - begin)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory / f"plain_{number}")
    return seconds


def our_saves(engine, recipe, sizes, saves: int) -> dict:
    """Seconds of each save; of steps without a save under way, right after a save, and while one is written."""
    import torch.distributed as dist

    from recipes.training import async_checkpoint, checkpoint

    saver, progress = checkpoint.Saver(engine, recipe, sizes, {"files": "synthetic"}, 0), checkpoint.Progress()
    write_state, writer_cpu = async_checkpoint.write_state, []

    def timed(path, state):
        begin = time.thread_time()
        entry = write_state(path, state)
        writer_cpu.append(time.thread_time() - begin)
        return entry

    async_checkpoint.write_state = timed
    stands, idle, first, during, written = [], [], [], [], []
    for _ in range(saves):
        idle += [train_step(engine) for _ in range(STEPS_BETWEEN)]
        progress.step += 1
        dist.barrier()
        begin = time.perf_counter()
        saver.save(progress)
        dist.barrier()
        stands.append(time.perf_counter() - begin)
        steps = []
        while saver._stage is not None:
            steps.append(train_step(engine))
            writing = any(distributed.gather(saver.flags()[0]))
            saver.advance(writing, False, False)
        written.append(time.perf_counter() - begin - stands[-1])
        first, during = first + steps[:1], during + steps
        if dist.get_rank() == 0:
            shutil.rmtree(saver.directory / f"global_step{progress.step}")
    async_checkpoint.write_state = write_state
    return {
        "stand_still_s": stands,
        "step_s": statistics.median(idle),
        "step_after_save_s": statistics.median(first) if first else None,
        "step_while_writing_s": statistics.mean(during) if during else None,
        "writing_s": written,
        "writer_cpu_s": sum(distributed.gather(sum(writer_cpu))) / saves,
        "host_memory_gib": saver.writer.host_memory / 2**30,
    }


def dlrover_saves(engine, directory: Path, saves: int) -> dict | str:
    """dlrover's flash checkpoint: seconds of each save, and what is wrong with it as shipped; or why it is not compared.

    Each save waits until the one before is on the disk: dlrover leaves out one that comes earlier.
    """
    os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")
    try:
        from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer
    except ImportError as error:
        return f"not compared: {error}; benchmarks/checkpoint.py says how to install it"
    import torch
    import torch.distributed as dist

    checkpointer, torch_save = DeepSpeedCheckpointer(engine, str(directory)), torch.save
    tracker, seconds, wrong = directory / "dlrover_latest.txt", [], None
    for step in range(1, saves + 1):
        train_step(engine)
        dist.barrier()
        begin = time.perf_counter()
        try:
            checkpointer.save_checkpoint(str(directory), step)
        except TypeError as error:
            if wrong is not None:
                raise
            # What it puts in the place of torch.save lacks an argument that DeepSpeed gives. It is a method of a
            # CheckpointEngine, which DeepSpeed takes as well.
            torch.save, versions = torch_save, [f"{name} {version(name)}" for name in ("dlrover", "deepspeed")]
            wrong = (
                f"as shipped, {' with '.join(versions)} fails: {error}; measured with its agent as checkpoint_engine"
            )
            engine.checkpoint_engine = checkpointer._ckpt_agent
            checkpointer.save_checkpoint(str(directory), step)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        while not tracker.exists() or tracker.read_text().strip() != str(step):
            time.sleep(0.1)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory / str(step))
    checkpointer._async_save_engine._shm_handler.unlink()  # else the copy outlives the run
    return {"stand_still_s": seconds, "as_shipped": wrong}


def datastates_saves(layers: int, device: str, recipe, sizes, saves: int) -> dict | str:
    """DataStates by the ds_config, with this repository's manifest; or why it is not compared."""
    if importlib.util.find_spec("datastates") is None:
        return "not compared: not installed, and not on PyPI (https://github.com/DataStates/datastates-llm)"
    if device != "cuda":
        return "not compared: it needs an NVIDIA GPU"
    section = {"host_cache_size": DATASTATES_CACHE_GIB, "parser_threads": 2}
    _, engine = build_engine(layers, device, datastates_ckpt=section)
    return our_saves(engine, recipe, sizes, saves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million_parameters", type=int, default=100)
    parser.add_argument("--saves", type=int, default=5, help="of each kind; the first is not counted")
    parser.add_argument("--directory", help="where to save; default: a temporary directory")
    arguments = parser.parse_args()
    place = distributed.find_place()
    device = distributed.choose_accelerator()
    distributed.start_process_group(place)
    import torch.distributed as dist

    from recipes.training.settings import CheckpointSettings
    from recipes.training.sizes import Sizes

    per_layer = WIDTH * WIDTH * (4 + 3 * 4)
    layers = max(-(-(arguments.million_parameters * 10**6 - 2 * WORDS * WIDTH) // per_layer), 1)
    settings, engine = build_engine(layers, device)
    deepspeed_engine = engine.checkpoint_engine
    parameters = sum(p.numel() for p in engine.module.parameters())
    world = place.world_size
    sizes = Sizes(world, world, 1, 1, 1, 1, 4, 1, 4 * world)
    name = distributed.broadcast(tempfile.mkdtemp(dir=arguments.directory) if place.rank == 0 else None)
    directory = Path(name)
    try:
        results = {"plain": plain_saves(engine, directory, arguments.saves)}
        for kind, asynchronous in (("synchronous", False), ("asynchronous", True)):
            recipe = SimpleNamespace(
                run_directory=directory,
                name="benchmark",
                checkpoint=CheckpointSettings(asynchronous=asynchronous),
                model=settings,
                global_batch_size=sizes.global_batch,
                total_steps=1,
                seed=1,
            )
            results[kind] = our_saves(engine, recipe, sizes, arguments.saves)
        engine.checkpoint_engine = deepspeed_engine
        results["dlrover"] = dlrover_saves(engine, directory, arguments.saves)
        results["datastates"] = datastates_saves(layers, device, recipe, sizes, arguments.saves)
    finally:
        dist.barrier()
        if place.rank == 0:
            shutil.rmtree(directory)
    if place.rank == 0:
        report(results, parameters, world)
    distributed.stop_process_group()


def report(results: dict, parameters: int, world: int) -> None:
    synchronous, asynchronous = results["synchronous"], results["asynchronous"]
    stands = {
        "plain": statistics.median(results["plain"][1:]),
        "synchronous": statistics.median(synchronous["stand_still_s"][1:]),
        "asynchronous": statistics.median(asynchronous["stand_still_s"][1:]),
    }
    notes = {}
    for kind in ("dlrover", "datastates"):
        if isinstance(results[kind], str):
            notes[kind] = results[kind]
        else:
            stands[kind] = statistics.median(results[kind]["stand_still_s"][1:])
            notes[kind] = results[kind].get("as_shipped")
    cores = len(os.sched_getaffinity(0))
    values = {
        "parameters": parameters,
        "ranks": world,
        "cores": cores,
        "stand_still_s": {kind: round(seconds, 3) for kind, seconds in stands.items()},
        "asynchronous_to_synchronous": round(stands["asynchronous"] / stands["synchronous"], 3),
        "asynchronous_to_plain": round(stands["asynchronous"] / stands["plain"], 3),
        "step_s": round(asynchronous["step_s"], 3),
        "step_right_after_a_save_s": round(asynchronous["step_after_save_s"], 3),
        "step_while_writing_s": round(asynchronous["step_while_writing_s"], 3),
        "step_rise_while_writing": round(asynchronous["step_while_writing_s"] / asynchronous["step_s"] - 1, 3),
        "writing_s": round(statistics.median(asynchronous["writing_s"][1:]), 2),
        "writers_share_of_cores": round(
            asynchronous["writer_cpu_s"] / statistics.mean(asynchronous["writing_s"]) / cores, 3
        ),
        "host_memory_gib_per_rank": round(asynchronous["host_memory_gib"], 2),
        **{kind: note for kind, note in notes.items() if note is not None},
    }
    print(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()
