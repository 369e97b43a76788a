import re

import pytest

from data_prep.errors import InputError
from recipes.training.sizes import resolve_sizes


def resolve(world, pipeline, batch, micro, accumulation, **parallel):
    config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    config = {key: value for key, value in config.items() if value is not None}
    return resolve_sizes(batch, config, world, pipeline=pipeline, **parallel)


@pytest.mark.parametrize(
    ("world", "pipeline", "batch", "micro", "accumulation", "expected"),
    [(2, 1, 8, 2, None, (2, 8)), (2, 2, 8, 2, None, (4, 8)), (2, 1, None, 2, 4, (4, 16)), (2, 1, 8, 2, 2, (2, 8))],
)
def test_batch_triangle(world, pipeline, batch, micro, accumulation, expected):
    sizes = resolve(world, pipeline, batch, micro, accumulation)
    assert (sizes.accumulation, sizes.global_batch) == expected
    assert sizes.data == world // pipeline


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (2, 1, 8, 3, None),
            "global_batch_size 8 is not divisible by train_micro_batch_size_per_gpu 3 x data-parallel size 2",
        ),
        ((2, 1, 8, 2, 3), "8 != 2*3*2"),
        ((2, 1, None, None, 4), "states no train_micro_batch_size_per_gpu"),
        ((2, 1, None, 2, None), "state global_batch_size"),
        ((2, 1, 8, 2, 0), "gradient_accumulation_steps must be a positive integer, not 0"),
        ((2, 1, 8, -1, None), "train_micro_batch_size_per_gpu must be a positive integer, not -1"),
        ((2, 1, 8.0, 2, None), "global_batch_size must be a positive integer, not 8.0"),
        ((2, 1, "8", 2, None), "global_batch_size must be a positive integer, not '8'"),
        ((2, 1, 8, True, None), "train_micro_batch_size_per_gpu must be a positive integer, not True"),
        ((3, 2, 8, 2, None), "world size 3 is not divisible by 2"),
    ],
)
def test_refusals_name_the_key_and_the_numbers(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(*arguments)


def test_train_batch_size_must_agree():
    config = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}
    with pytest.raises(InputError, match="train_batch_size 16 in the ds_config is not global_batch_size 8"):
        resolve_sizes(8, config, 2)
    assert resolve_sizes(None, config, 2).accumulation == 4


def test_parallel_sizes_divide_the_world():
    sizes = resolve_sizes(16, {"train_micro_batch_size_per_gpu": 2}, 16, tensor=2, pipeline=2, sequence=2, expert=2)
    assert (sizes.data, sizes.accumulation) == (2, 4)
    with pytest.raises(InputError, match="expert parallel size 4 does not divide the data-parallel size 2"):
        resolve_sizes(16, {"train_micro_batch_size_per_gpu": 2}, 16, tensor=8, expert=4)
