import json
import re

import pytest

from data_prep.errors import InputError
from launch import plan
from launch.hardware import Hardware, kind_of
from launch.planning.memory import GIB
from launch.planning.search import search
from launch.planning.shape import shape_of
from recipes.training.ds_config import load_ds_config
from recipes.training.recipe_file import load_recipe
from recipes.training.sizes import MICRO
from tests.conftest import REPOSITORY


def planned(capsys, *arguments) -> dict:
    assert plan.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(message: str, *arguments) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        plan.main([*map(str, arguments)])


def test_a_plan_of_8b(capsys):
    values = planned(capsys, "8b")
    assert (values["parameters"], values["active_parameters"]) == (8_030_261_248, 8_030_261_248)
    assert sum(values["parameters_by_part"].values()) == values["parameters"]
    assert (values["gpu"], values["gpus"], values["layout"]["data"], values["zero_stage"]) == ("h100-80gb", 8, 8, 3)
    memory = values["memory_bytes"]
    parts = [value for key, value in memory.items() if key not in ("device", "host")]
    assert memory["device"] == sum(parts)
    assert memory["weights"] == 2 * 8_030_261_248 // 8
    assert memory["master"] + memory["optimizer"] == 12 * 8_030_261_248 // 8
    assert values["fits"] and memory["device"] < values["memory_available_bytes"]
    assert values["checkpoint_bytes"] == 14 * 8_030_261_248
    step = values["step_s"]
    assert step["total"] == pytest.approx(sum(value for key, value in step.items() if key != "total"))
    assert values["tokens_per_s"] == pytest.approx(512 * 8192 / step["total"])
    assert values["days"] == pytest.approx(values["steps"] * step["total"] / 86400)
    assert values["gpu_hours"] == pytest.approx(values["days"] * 24 * 8)
    flops = 6 * (8_030_261_248 - 525_336_576 - 266_240) + 6 * 32 * 2 * 4096 * 8192
    assert values["flops_per_token"] == flops
    assert values["mfu"] == pytest.approx(values["tokens_per_s"] * flops / (8 * 989e12))
    assert values["calibration"].startswith("calibrated on h100: 16 of 31 published bf16 runs")


def test_the_top(capsys):
    values = planned(capsys, "qwen3_moe_535b")
    assert (values["parameters"], values["active_parameters"]) == (535_026_158_080, 23_058_926_080)
    assert values["layout"]["expert"] == 64 and values["steps"] * 11264 * 4096 >= 18_000_000_000_000
    assert values["bytes_sent_per_step"]["experts"] > 0


def test_another_kind_and_number(capsys):
    first, more = planned(capsys, "8b"), planned(capsys, "8b", "--gpus", 16, "--gpu", "b200")
    assert more["gpu"] == "b200-180gb" and more["layout"]["data"] == 16
    assert more["memory_bytes"]["optimizer"] * 2 == first["memory_bytes"]["optimizer"]
    assert more["tokens_per_s"] > 2 * first["tokens_per_s"]


def test_a_table_for_the_screen(capsys):
    assert plan.main(["405b"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "405b (405b.json) on 8192 x h100-80gb, 1024 nodes: data 64, tensor 8, pipeline 16, ZeRO stage 1, bf16",
        "parameters       405,853,388,800, of which a token uses 405,853,388,800",
        "the fullest stage being 0 of 16",
        "idle pipeline stages",
        "framework (2 GiB taken for context and communicators)",
        "fragmentation (5% of what changes)",
        "calibrated on h100",
        "checkpoint       5,681.9 GB",
        "fits: ",
        "note: pipeline.stages: 16 stages and 32 micro batches leave each device idle 32% of a step",
    ):
        assert line in printed, line


def test_a_misfit_says_what_would_fit(capsys):
    arguments = ["8b", "--gpus", "8", "compute.activation_checkpoint_interval=0", "ds.train_micro_batch_size_per_gpu=8"]
    assert plan.main([*arguments, "--require_fit"]) == plan.MISFIT
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"does not fit: [\d.]+ GiB of 79.1 GiB; what would: (.*)", last)
    changes = found.group(1).split()
    assert changes[0] == "compute.activation_checkpoint_interval=1"
    assert planned(capsys, *arguments[:3], arguments[4], *changes)["fits"]
    assert plan.main(arguments) == 0


def test_nothing_of_ours_makes_405b_fit_on_two_gpus(capsys):
    values = planned(capsys, "405b", "--gpus", 2, "pipeline.stages=2", "pipeline.tensor_parallel_size=1")
    assert not values["fits"] and "more GPUs, more stages" in values["verdict"]


def test_a_number_of_gpus_that_the_layout_cannot_use_is_a_misfit(capsys):
    values = planned(capsys, "405b", "--gpus", 1000)
    assert not values["fits"] and values["verdict"].endswith("it can use 512 or 1024, a multiple of 128")
    assert plan.main(["405b", "--gpus", "1000", "--require_fit"]) == plan.MISFIT
    capsys.readouterr()
    assert planned(capsys, "70b", "--gpus", 100)["verdict"].endswith("it can use 64 or 128")


def test_batch_sizes_that_no_number_of_gpus_can_use_are_bad_input():
    micro = "ds.train_micro_batch_size_per_gpu"
    refused("train_micro_batch_size_per_gpu: 0 must be a positive integer", "demo", f"{micro}=0")
    refused("8 is not divisible by train_micro_batch_size_per_gpu 3", "demo", "global_batch_size=8", f"{micro}=3")
    refused("train_batch_size 7 in the ds_config is not global_batch_size 16", "demo", "ds.train_batch_size=7")


def test_usable_numbers_of_gpus_are_found_by_arithmetic(capsys):
    values = planned(capsys, "demo", "--gpus", 100_000_007)
    assert not values["fits"] and values["verdict"].endswith("it can use 2")
    values = planned(capsys, "30b_a3b", "--gpus", 20, "ds.gradient_accumulation_steps=4")
    assert values["verdict"].endswith("it can use 288, a multiple of 8")


def test_another_kind_has_its_own_nodes(capsys):
    def places(*arguments):
        values = planned(capsys, *arguments)
        return values["gpus_per_node"], values["fast_domain"]

    assert places("8b", "--gpu", "gb200") == (4, 72)
    assert places("70b", "--deepspeed_config", "ds_configs/70b.gb200.json", "--gpu", "h100") == (8, 8)
    own = ["qwen3_moe_535b", "--deepspeed_config", "ds_configs/qwen3_moe_535b.json"]
    assert places(*own) == places(*own, "--gpu", "gb200") == (4, 64)
    assert places("8b", "--gpu", "gb200", "--devices_per_node", 2, "--fast_domain", 8) == (2, 8)
    assert places("8b", "--gpu", "h200", "--devices_per_node", 4) == (4, 4)  # the fast link ends with the node


OFFLOADED = ["8b", "--deepspeed_config", "ds_configs/8b.rtx4090.json"]


def test_host_memory_of_what_is_offloaded(capsys):
    values = planned(capsys, *OFFLOADED)
    host, parameters = values["host_bytes_per_node"], 8_030_261_248
    assert 2 * host["master"] == host["gradients"] == host["optimizer"] == pytest.approx(8 * parameters, rel=1e-6)
    assert host["weights"] == pytest.approx(2 * parameters, rel=1e-6)
    assert host["offloaded"] == sum(host[part] for part in ("master", "gradients", "optimizer", "weights"))
    assert host["checkpoint_copies"] == 8 * (2**34 + 2**31)  # a rank's 12 and 2 GB, pinned
    assert values["fits"] and values["host_memory_available_bytes"] == 512 * GIB
    assert values["verdict"].endswith("164.5 of 512 GiB of a node's host")
    written = planned(capsys, *OFFLOADED, "checkpoint.asynchronous=false")["host_bytes_per_node"]
    assert written["checkpoint_copies"] == 0
    assert plan.main([*OFFLOADED, "--gpu", "a100-40gb"]) == 0
    assert "not judged: the ds_config states no _hardware.host_memory_gib" in capsys.readouterr().out


def test_a_host_too_small_is_a_misfit_by_name(capsys, tmp_path):
    small = tmp_path / "small.json"
    text = (REPOSITORY / "ds_configs" / "8b.rtx4090.json").read_text()
    small.write_text(text.replace('"host_memory_gib": 512', '"host_memory_gib": 128'))
    assert plan.main(["8b", "--deepspeed_config", str(small), "--require_fit"]) == plan.MISFIT
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "does not fit: 164.5 GiB of host memory a node for what is offloaded, of 128 GiB; what would"
    )
    small.write_text(text.replace('"host_memory_gib": 512', '"host_memory_gib": 256'))
    assert plan.main(["8b", "--deepspeed_config", str(small)]) == 0
    printed = capsys.readouterr().out
    assert "more than half of what is left: training waits for a save" in printed and "\nfits: " in printed


def test_mistakes():
    refused("GPU kind '' is not unique", "8b", "--gpu", "")
    refused("--pipeline_chart draws one layout", "8b", "--search", "--pipeline_chart", "chart.png")
    refused("GPU kind 'h1000' is unknown; did you mean h100-80gb?", "8b", "--gpu", "h1000")
    refused("--gpus 0 must be positive", "8b", "--gpus", 0)
    refused("--fast_domain -1 must be positive", "8b", "--fast_domain", -1)
    refused("--devices_per_node 0 must be positive", "8b", "--devices_per_node", 0)
    refused("model.vocab_size 0 must be positive", "8b", "model.vocab_size=0")
    refused("33 stages are more than the model's 32 layers", "8b", "pipeline.stages=33")
    refused("schedule.tokens 1000 are fewer than one batch", "8b", "schedule.tokens=1000")
    refused("name a recipe first", "schedule.steps=5")
    refused("--write goes with --search", "8b", "--write", "C.json")
    refused("--pipeline_chart needs pipeline.stages of 2 or more", "8b", "--pipeline_chart", "chart.png")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("8b", []),
        ("1b3_tp2_pp2", []),  # whose own pipeline the best layout may not have
        ("8b", ["--gpu", "gb200", "--devices_per_node", "4", "--fast_domain", "16"]),
    ],
)
def test_search_writes_a_config_that_plans_as_it_said(capsys, tmp_path, name, options):
    written = tmp_path / "C.json"
    assert plan.main([name, "--search", "--gpus", "16", *options, "--write", str(written)]) == 0
    printed = capsys.readouterr().out.splitlines()
    speeds = [float(line.split()[0].replace(",", "")) for line in printed[1:-1]]
    assert 1 < len(speeds) <= plan.SHOWN and speeds == sorted(speeds, reverse=True)
    values = planned(capsys, name, *printed[-1].partition("take it with ")[2].split())
    assert values["fits"] and values["gpus"] == 16
    assert values["tokens_per_s"] == pytest.approx(speeds[0], abs=1)
    assert f"{values['memory_bytes']['device'] / GIB:.1f} GiB" in printed[1]


def test_search_of_a_mixture():
    recipe, _ = load_recipe("30b_a3b")
    config = load_ds_config(recipe.deepspeed_config)
    found = search(recipe, config, shape_of(recipe.model, "bf16"), kind_of("h100"), Hardware("h100", 16, 8))
    assert {candidate.sizes.expert for candidate in found} == {1, 2, 4, 8, 16}
    assert {candidate.sizes.pipeline for candidate in found} == {1}
    assert all(candidate.memory.device <= 79.1 * GIB for candidate in found)
    refused("no layout of 405b fits 8 x h100-80gb", "405b", "--search", "--gpus", 8)


def test_search_for_machines(capsys):
    assert plan.main(["405b", "--search", "--gpus", "8", "--require_fit", "--json"]) == plan.MISFIT
    assert json.loads(capsys.readouterr().out)["fits"] is False
    first, *others = planned(capsys, "8b", "--search")["layouts"]
    assert first["tokens_per_s"] == max(layout["tokens_per_s"] for layout in [first, *others])
    layout = f"ds.{MICRO}={first['layout']['micro_batch']}"
    values = planned(capsys, "8b", f"ds.zero_optimization.stage={first['zero_stage']}", layout, *first["overrides"])
    assert values["tokens_per_s"] == first["tokens_per_s"]
    assert values["memory_bytes"]["device"] == first["memory_bytes"]


@pytest.mark.parametrize("options", [[], ["--allow_cross_node"]])
def test_search_across_nodes(capsys, options):
    layouts = planned(capsys, "13b", "--search", "--gpus", 32, "--devices_per_node", 4, *options)["layouts"]
    assert {layout["layout"]["tensor"] for layout in layouts} == ({1, 2, 4, 8} if options else {1, 2, 4})


def test_chart(capsys, tmp_path):
    assert plan.main(["1b3_tp2_pp2", "--pipeline_chart", str(tmp_path / "chart.svg")]) == 0
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    assert "1F1B: 3.0% idle" in capsys.readouterr().err
