"""Run by test_memory.py on N ranks: bytes of the tensors that each layout keeps for the model, against the plan; writes results.json.

    ... states_ranks.py CASES.json RESULTS.json

CASES.json is a list of {name, recipe, overrides}. A layout's bytes are those of the storages that have come since before
its engine was built: the most over the moments between two micro batches and before the update, when activations are gone;
of three steps the least, since a bucket whose reduction gloo's thread has just ended can still lie there.
"""

import gc
import json
import sys
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
import torch.distributed as dist

from data_prep.loader import collate, rank_samples
from launch.planning.memory import model_states
from launch.planning.shape import on_rank, shape_of, stages_of
from launch.prove_ranks import fresh_deepspeed, prepared_case
from recipes.training import distributed
from recipes.training.ds_config import precision
from recipes.training.prepare import training_stream


def storages() -> dict[int, int]:
    """{address: bytes} of every tensor's storage, gradients included."""
    gc.collect()
    found = {}
    for tensor in [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]:
        for one in (tensor, tensor.grad):
            if one is not None and one.device.type == "cpu":
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return found


def allocated(prepared) -> int:
    recipe, sizes = prepared.recipe, prepared.sizes
    if recipe.pipeline.stages is None:
        from recipes.training.engine import build_engine
        from recipes.training.step import train_step
    else:
        from recipes.training.pipeline import build_engine, train_step
    before, most = storages(), 0
    engine = build_engine(prepared)
    stream, rank = training_stream(recipe), sizes.data_rank(dist.get_rank())
    place = (sizes.micro_batch, sizes.accumulation, sizes.data, rank)

    def measured(function):
        def run(*arguments, **options):
            nonlocal most
            most = max(most, sum(size for address, size in storages().items() if address not in before))
            return function(*arguments, **options)

        return run

    def train(step: int) -> None:
        batch = collate(stream, rank_samples(step * sizes.global_batch, *place))
        train_step(engine, batch, sizes)

    train(0)  # the optimizer's states come with it
    steps = []
    with (
        mock.patch.object(engine, "step", measured(engine.step)),
        mock.patch.object(engine, "_take_model_step", measured(engine._take_model_step)),
    ):
        for step in range(1, 4):
            most = 0
            train(step)
            steps.append(most)
    engine.destroy()
    return min(steps)


def planned(prepared) -> int:
    recipe, sizes = prepared.recipe, prepared.sizes
    shape = shape_of(recipe.model, precision(prepared.ds_config))
    stage = dist.get_rank() // (dist.get_world_size() // sizes.pipeline)
    mine = [on_rank(layer, sizes) for layer in stages_of(shape, sizes.pipeline, recipe.pipeline.partition)[stage]]
    states = model_states(prepared.ds_config, sizes, mine)
    return sum(states[key] for key in ("weights", "gradients", "master", "optimizer", "host"))


def main() -> None:
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    distributed.choose_accelerator()
    distributed.start_process_group(distributed.find_place())
    results = {}
    for case in cases:
        prepared = prepared_case(case, dist.get_world_size())
        with fresh_deepspeed():
            pair = {"allocated": allocated(prepared), "planned": planned(prepared)}
        results[case["name"]] = distributed.gather(pair)
        gc.collect()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    distributed.stop_process_group()


if __name__ == "__main__":
    main()
