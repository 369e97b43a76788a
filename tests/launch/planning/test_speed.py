from dataclasses import replace

import pytest

from benchmarks import plan_accuracy
from launch.hardware import Hardware, kind_of
from launch.planning.shape import shape_of
from launch.planning.speed import Links, Work, calibration, compute_time, step_time
from recipes.training.sizes import Sizes
from tests.recipes.families import small

H100, NODES = kind_of("h100"), Hardware("h100", 64, 8)
MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
DENSE = shape_of(small("llama", **MODEL, num_hidden_layers=8, vocab_size=32000), "bf16")
MOE = shape_of(small("qwen3_moe", hidden_size=1024, moe_intermediate_size=512, num_experts=64), "bf16")
# Nothing but products, at the peak.
IDEAL = replace(
    calibration(),
    efficiency={"h100": 1.0},
    half_width=0.0,
    expert_efficiency=1.0,
    passes=0.0,
    recompute_cost=1.0,
    link_efficiency=1.0,
    overlap=0.0,
)


def work(shape=DENSE, data=64, micro=1, accumulation=1, **options) -> Work:
    layout = {key: options.pop(key, 1) for key in ("tensor", "pipeline", "sequence", "expert")}
    world = data * layout["tensor"] * layout["pipeline"] * layout["sequence"]
    sizes = Sizes(
        world, data, **layout, micro_batch=micro, accumulation=accumulation, global_batch=micro * accumulation * data
    )
    return Work(shape, sizes, 2048, **options)


def time(one: Work, constants=IDEAL):
    return step_time(one, H100, NODES, constants)


def test_computation_at_the_peak_is_flops_over_flops():
    family_flops = 6 * (8 * (4 * 1024**2 + 3 * 1024 * 4096) + 32000 * 1024)
    attention = 6 * 8 * 2 * 1024 * 2048 / 2  # causal: half of the square
    seconds = 2048 * (family_flops + attention) / 989e12
    assert time(work()).compute == pytest.approx(seconds)
    assert time(work(accumulation=4)).compute == pytest.approx(4 * seconds)


def test_recomputation_is_a_forward_of_the_blocks_more():
    head = 6 * 32000 * 1024 * 2048 / 989e12
    plain, again = time(work()).compute - head, time(work(recomputed=1.0)).compute - head
    assert again / plain == pytest.approx(4 / 3)


def test_experts_count_those_that_a_token_uses():
    a, b = (compute_time(work(shape), list(shape.layers), 2048, H100, IDEAL) for shape in (MOE, DENSE))
    used = 2 * 2 * 3 * 1024 * 512  # layers, top k, matrices
    assert sum(layer.expert_matrices for layer in MOE.layers) == used
    assert a < b


def test_each_kind_of_traffic():
    hidden = 2048 * 1024 * 2
    matrices = sum(layer.parameters for layer in DENSE.layers)
    assert time(work(tensor=8, data=8)).bytes_sent["tensor"] == 2 * 2 * 8 * hidden
    assert time(work(sequence=2, data=32)).bytes_sent["sequence"] == 4 * 2 * 8 * hidden // 2
    assert time(work(MOE, expert=8)).bytes_sent["experts"] == 2 * 2 * 2 * hidden * 2
    assert time(work(pipeline=2, data=32)).bytes_sent["pipeline"] == 2 * hidden
    for zero, size in ((0, 2 * 2), (1, 2 * 4 + 2), (2, 2 + 2), (3, 3 * 2)):
        assert time(work(zero=zero)).bytes_sent["data"] == size * matrices
    assert time(work(zero=3, accumulation=4)).bytes_sent["data"] == 4 * 6 * matrices
    assert time(work(zero=2, accumulation=4)).bytes_sent["data"] == (4 * 2 + 2) * matrices


def test_groups_within_and_across_the_fast_domain():
    links = Links(H100, NODES, 1.0)
    assert links.all_gather(8e9, 8, 1) == pytest.approx(7e9 / 450e9)
    assert links.all_gather(64e9, 64, 1) == pytest.approx(63e9 / 400e9)  # eight network cards of 50 GB/s
    assert links.all_reduce(8e9, 8, 8) == pytest.approx(2 * 7e9 / 50e9)  # one rank a node
    assert links.all_to_all(64e9, 64, 1) == pytest.approx(56e9 / 50e9)
    assert links.all_to_all(8e9, 8, 1) == pytest.approx(7e9 / 450e9)
    assert links.all_gather(1e9, 1, 1) == links.all_to_all(1e9, 1, 1) == 0.0


def test_hidden_communication_costs_nothing():
    exposed = time(work(zero=3)).data
    hidden = time(work(zero=3, micro=64), replace(IDEAL, overlap=1.0)).data
    assert exposed > 0 and hidden == 0


def test_idle_stages():
    one = time(work(pipeline=4, data=16, accumulation=12))
    each = (one.compute + one.pipeline) / 12
    assert one.idle == pytest.approx(3 * each)
    assert time(work(pipeline=4, data=16, accumulation=12, interleaved=3)).idle == pytest.approx(each)


def test_the_whole_head_makes_the_last_stage_of_a_tensor_parallel_pipeline_slow():
    whole, split = (time(work(pipeline=2, tensor=8, data=4, split_head=split)) for split in (False, True))
    assert whole.compute > split.compute


def test_offload_makes_the_update_slow():
    assert time(work(zero=2, offload=True)).update > 20 * time(work(zero=2)).update


def test_predictions_of_published_runs():
    rows = plan_accuracy.ROWS
    assert len(rows) >= 24 and {row.kind.split("-")[0] for row in rows} == {"a100", "h100", "b200", "gb200"}
    assert any(row.expert > 1 for row in rows[::2]) and any(row.expert > 1 for row in rows[1::2])
    constants = calibration()
    left_out = sorted(abs(error) for error in plan_accuracy.errors(rows[1::2], constants))
    stated = [constants.median_error, constants.largest_error]
    assert [left_out[len(left_out) // 2], left_out[-1]] == pytest.approx(stated, abs=0.001)
    assert stated[0] < 0.15 and stated[1] < 0.35


def test_the_fit_finds_constants_again():
    rows = plan_accuracy.ROWS[2:4]
    truth = calibration()
    away = replace(truth, efficiency={**truth.efficiency, "a100": 0.3})
    before = max(abs(error) for error in plan_accuracy.errors(rows, away))
    after = max(abs(error) for error in plan_accuracy.errors(rows, plan_accuracy.fit(rows, away)))
    assert before > 0.4 and after < 0.1
