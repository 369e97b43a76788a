"""launch.check through its command: what it refuses, what it warns of, and that everything shipped passes."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest

from data_prep.errors import InputError
from launch import check, hardware
from launch.hardware import hardware_of, kind_of, kinds
from recipes.training.settings import REPOSITORY
from tests.conftest import TINY_DS_CONFIG


def refused(tiny, message: str, *arguments: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check.main([str(tiny), *map(str, arguments)])


def lines(tiny, capsys, *arguments: str) -> list[str]:
    assert check.main([str(tiny), *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def change_json(tiny, **changes) -> None:
    (tiny.parent / "ds.json").write_text(json.dumps({**TINY_DS_CONFIG, **changes}))


BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def test_everything_shipped_passes_at_its_own_world_size(capsys):
    assert check.main(["--all"]) == 0
    printed = capsys.readouterr().out
    blocks = printed.strip().split("\n\n")
    assert len(blocks) == len(list((REPOSITORY / "ds_configs").glob("*.json")))
    assert "405b.json, 8192 x h100-80gb" in printed and "x data parallel 64 on 8192 ranks" in printed
    assert "405b.h200-1024.json, 1024 x h200-141gb" in printed and "x data parallel 1024 on 1024 ranks" in printed
    warned = {block.partition(",")[0] for block in blocks if "warning" in block}
    assert warned == {"235b_a22b.json", "671b_a37b.json"}  # whose experts are on more devices than a node has
    assert (
        "32 ranks are more than the 8 that the fast link joins: experts' tokens cross the network, predicted" in printed
    )


def test_a_config_is_checked_for_the_hardware_that_it_states(tiny, capsys, monkeypatch):
    monkeypatch.setattr(check, "find_accelerator", lambda: "cpu")
    flash = "compute.attention=flash_attention_2"
    refused(tiny, "compute.attention flash_attention_2 needs a GPU", flash)
    change_json(tiny, _hardware={"device": "h100-80gb", "devices": 2})
    assert any("on 2 ranks" in line for line in lines(tiny, capsys, flash))
    assert any("on 4 ranks" in line for line in lines(tiny, capsys, flash, "--world_size", 4))
    change_json(tiny, _hardware={"device": "h100-80gb", "devices": 3})
    refused(tiny, "8 is not divisible by", flash)
    change_json(tiny, _hardware={"device": "h1000"})
    refused(tiny, "ds.json: _hardware.device: GPU kind 'h1000' is unknown; did you mean h100-80gb?", flash)


def test_all_takes_every_config_as_it_stands():
    for option, value in (("--world_size", "4"), ("--deepspeed_config", "ds.json")):
        with pytest.raises(InputError, match=f"{option} does not go with --all"):
            check.main(["--all", option, value])


def test_a_variant_is_named_as_for_the_launch_scripts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"ds_configs has no 8b.h300.json; for 8b there are 8b, 8b.h200, 8b.rtx4090"):
        check.main(["8b.h300"])
    taken = {}
    for name in ("8b.h200", "8b", "8b.yaml", "folder/8b.h200"):
        arguments = SimpleNamespace(overrides=[name, "seed=1"], deepspeed_config=None)
        check.take_recipe(arguments, "")
        assert arguments.overrides == ["seed=1"]
        taken[name] = (arguments.recipe, arguments.deepspeed_config)
    assert taken.pop("8b.h200") == ("8b", str(REPOSITORY / "ds_configs" / "8b.h200.json"))
    assert taken == {name: (name, None) for name in taken}


def test_variants_name_their_hardware():
    for path in (REPOSITORY / "ds_configs").glob("*.*.json"):
        name = path.name.split(".")[1].split("-")[0]
        assert kind_of(hardware_of(json.loads(path.read_text()), path.name).device).name.startswith(name), path.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world_size", 3, "pipeline.stages=2"], "world size 3 is not divisible by 2 = tensor 1 x pipeline 2"),
        (["--world_size", 2, "ds.train_micro_batch_size_per_gpu=3"], "8 is not divisible by train_micro_batch"),
        (["--world_size", 2, "ds.gradient_accumulation_steps=3"], "8 != 2*3*2"),
        (["--world_size", 2, "ds.gradient_accumulation_steps=0"], "gradient_accumulation_steps: 0 must be a positive"),
        (
            ["--world_size", 2, "ds.train_micro_batch_size_per_gpu=8.0"],
            "train_micro_batch_size_per_gpu: 8.0 must be a positive integer",
        ),
        (["pipeline.stages=2", "ds.zero_optimization.stage=2"], "2 does not go with pipeline.stages 2"),
        (["--world_size", 2, "pipeline.stages=2", "data.max_epochs=0.5"], "more than data.max_epochs 0.5"),
        (["pipeline.stages=3"], "3 stages are more than the model's 2 layers"),
        (["ds.bf16.enabled=auto"], 'bf16.enabled: "auto" means something only inside the Hugging Face trainer'),
        (["ds.scheduler.params.warmup_steps=2"], "the learning rate schedule is the recipe's `schedule` section"),
        (["ds.optimizer.params.weigth_decay=0.1"], "did you mean weight_decay?"),
        (["ds.comms_logger.enable=true"], "did you mean enabled?"),
        (["model.vocab_size=0"], "model.vocab_size 0 must be positive"),
        (["schedule.tokens=100"], "schedule.tokens 100 are fewer than one batch, 128"),
        (["model.hidden_size=100", "model.num_attention_heads=12"], "100 is not divisible by num_attention_heads 12"),
        (["model.num_key_value_heads=3"], "3 must be positive and divide num_attention_heads 4"),
        (["model.num_key_value_heads=0"], "0 must be positive and divide num_attention_heads 4"),
        (["schedule.warmup_steps=9"], "is 9 steps, the whole run 8"),
    ],
)
def test_refusals_by_override(tiny, arguments, message):
    refused(tiny, message, *arguments)


def zero(stage: int, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


def optimizer(name: str) -> dict:
    return {"optimizer": {"type": name, "params": {"lr": 0.01}}}


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**zero(0), **BF16, **FP32_SUMS}, "fp32 does not go with weights in bf16 at ZeRO stage 0"),
        ({"activation_checkpointing": {}}, "the recipe's compute.activation_checkpoint_interval does it"),
        ({**FP32_SUMS, "data_types": {"grad_accum_dtype": "float32"}}, "'float32' must be fp32, fp16 or bf16"),
        (zero(2, compute_grad_norm=False), "false does not go with gradient_clipping"),
        (
            {**zero(1, compute_grad_norm=False), **BF16, **FP32_SUMS, "gradient_clipping": 0},
            "false does not go with stage 1 in bf16 accumulating in fp32",
        ),
        ({**zero(0, offload_optimizer=CPU), **optimizer("AdamW")}, "has no effect at ZeRO stage 0; it needs 1 or more"),
        (zero(2, offload_param=CPU), "has no effect at ZeRO stage 2; it needs 3 or more"),
        (zero(3, offload_param={"device": "disk"}), "offload_param.device: 'disk' must be none, cpu or nvme"),
        (zero(3, offload_param={"device": "nvme"}), "offload to nvme needs ZeRO stage 3 and a path"),
        ({**zero(2, offload_optimizer=CPU), **optimizer("Muon")}, "optimizer offload has no Muon on the CPU"),
        (zero(2, offload_optimizer=CPU), "optimizer offload needs DeepSpeed's CPU Adam"),
        (optimizer("AdamWW"), "'AdamWW' is no optimizer of DeepSpeed 0.19 or torch; did you mean AdamW?"),
        (optimizer("OneBitAdam"), "'OneBitAdam' is no optimizer of DeepSpeed 0.19 or torch"),
        ({**zero(1), **optimizer("SGD")}, "SGD at ZeRO stage 1 needs zero_allow_untested_optimizer: true"),
        ({"_hardware": {"time_limt": 8}}, "_hardware.time_limt: unknown key; did you mean time_limit?"),
        ({"_hardware": {"devices": "8"}}, "_hardware.devices: '8' must be a positive integer"),
        ({"_hardware": {"device": 8}}, "_hardware.device: 8 must be text in quotes"),
        (
            {"_hardware": {"time_limit": 24}},
            '_hardware.time_limit: 24 must be text in quotes: "HH:MM:SS", "D-HH:MM:SS"',
        ),
        ({"_hardware": {"time_limit": "24h"}}, "_hardware.time_limit: '24h' is no time that sbatch takes"),
        ({"_hardware": {"time_limit": "1:2:3:4"}}, "_hardware.time_limit: '1:2:3:4' is no time that sbatch takes"),
    ],
)
def test_refusals_by_json(tiny, changes, message):
    change_json(tiny, **changes)
    refused(tiny, message)


def test_one_file_is_read_alike_by_all(tiny):
    for text, message in (
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "key 'stage' stands twice in one section"),
        ("", "holds no JSON object"),
        ('{"zero_optimization": {', "not valid JSON"),
    ):
        (tiny.parent / "ds.json").write_text(text)
        refused(tiny, f"{tiny.parent / 'ds.json'}: ")
        refused(tiny, message)


def test_optimizers_are_those_of_the_installed_packages():
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    from recipes.training.ds_config_keys import OPTIMIZERS, TORCH_OPTIMIZERS

    assert {name.lower() for name in OPTIMIZERS} == set(DEEPSPEED_OPTIMIZERS)
    assert all(issubclass(getattr(torch.optim, name), torch.optim.Optimizer) for name in TORCH_OPTIMIZERS)


def test_groups_across_nodes(tiny):
    tensor = ["ds.tensor_parallel.autotp_size=2", "global_batch_size=24"]
    message = "tensor parallel size 2 does not divide the 3 devices of a node: groups would cross nodes"
    refused(tiny, message, *tensor, "--world_size", 6, "--devices_per_node", 3)
    assert check.main([str(tiny), *tensor, "--world_size", "6", "--devices_per_node", "3", "--allow_cross_node"]) == 0
    assert check.main([str(tiny), *tensor, "--world_size", "4", "--devices_per_node", "2", "global_batch_size=8"]) == 0
    sequence = ["ds.sequence_parallel_size=2", "--world_size", 4, "--devices_per_node", 1]
    refused(tiny, "sequence parallel size 2 does not divide the 1 devices of a node", *sequence)


def test_warnings_and_notes(tiny, capsys, monkeypatch):
    assert [
        line for line in lines(tiny, capsys, "--world_size", 2) if ": " in line and line.startswith(("w", "n"))
    ] == []
    change_json(tiny, **BF16)
    said = "warning: data_types.grad_accum_dtype: gradients of 2 micro batches are added up in bf16"
    assert said in "\n".join(lines(tiny, capsys, "--world_size", 2))
    assert "warning" not in "\n".join(lines(tiny, capsys, "--world_size", 4))  # one micro batch: nothing is added up
    change_json(tiny, **BF16, **FP32_SUMS)
    assert "warning" not in "\n".join(lines(tiny, capsys, "--world_size", 2))
    change_json(tiny, **zero(2, offload_optimizer=CPU), **optimizer("AdamW"))
    assert "compiler" not in "\n".join(lines(tiny, capsys))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "this machine has no C++ compiler; install g++ where the run starts" in "\n".join(lines(tiny, capsys))
    change_json(tiny, **zero(1, stage3_prefetch_bucket_size=5), gradient_clipping=0)
    printed = lines(tiny, capsys, "schedule.warmup_steps=5", "model.vocab_size=130")
    assert [line.split(":")[:2] for line in printed[2:-1]] == [
        ["warning", " schedule"],
        ["note", " zero_optimization.stage3_prefetch_bucket_size"],
        ["note", " gradient_clipping"],
        ["note", " model.vocab_size"],
    ]


def test_space_for_checkpoints(tiny, capsys, monkeypatch):
    # 20,640 parameters in fp32 with master weights and two moments: 330,240 bytes
    for free, message in ((700_000, None), (400_000, "warning: output_dir: one checkpoint takes 0.0 GB")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        printed = lines(tiny, capsys)
        assert [line for line in printed if line.startswith("warning")] == ([] if message is None else printed[2:3])
        assert message is None or printed[2].startswith(message)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=330_239))
    refused(tiny, f"{tiny.parent} has 0.0 GB free; free some, or choose another output_dir")


def test_idle_pipeline_stages(tiny, capsys):
    def remarks(*arguments):
        printed = lines(tiny, capsys, "pipeline.stages=2", "--world_size", 2, *arguments)
        return [line for line in printed if line.startswith(("warning", "note"))]

    assert remarks("model.num_hidden_layers=3") == [
        "note: pipeline.stages: 3 layers on 2 stages are 1 stages of 2 and 1 of 1, less what embedding and head weigh",
        "note: pipeline.stages: 2 stages and 4 micro batches leave each device idle 20% of a step",
    ]
    assert remarks("global_batch_size=32") == []
    (line,) = remarks("global_batch_size=2")
    assert line.startswith(
        "warning: pipeline.stages: 2 stages and 1 micro batches leave each device idle 50% of a step"
    )


GOOD_KIND = (
    "{memory_gib: 1, bf16_tflops: 1, fp32_tflops: 1, memory_gb_s: 1, fast_gb_s: 1, network_gb_s: 1, host_gb_s: 1, "
    "devices_per_node: 8, fast_domain: 8, calibration: none}"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"mine: {GOOD_KIND.replace('host_gb_s: 1, ', '')}", "mine: host_gb_s is missing"),
        (
            f"mine: {GOOD_KIND.replace('host_gb_s: 1', 'host_gb_s: 25 GB')}",
            "mine: host_gb_s: '25 GB' must be a positive",
        ),
        (f"mine: {GOOD_KIND.replace('fast_gb_s: 1', 'fast_gb_s: 0')}", "mine: fast_gb_s: 0 must be a positive number"),
        (f"mine: {GOOD_KIND.replace('n: 8', 'n: 8.5')}", "mine: fast_domain: 8.5 must be a positive integer"),
        (f"mine: {GOOD_KIND.replace('none', '5')}", "mine: calibration: 5 must be text"),
        (
            f"mine: {GOOD_KIND.replace('{', '{memory_gb: 1, ')}",
            "mine: memory_gb: unknown key; did you mean memory_gib?",
        ),
        ("mine: 80", "mine: must be a name and a section, not 80"),
        ("mine", "the file must be NAME: {KEY: VALUE, ...} lines"),
        ("mine: {", "not valid YAML"),
    ],
)
def test_a_bad_kind_is_named(tmp_path, monkeypatch, content, message):
    file = tmp_path / "gpu_kinds.yaml"
    file.write_text(f"{content}\n")
    monkeypatch.setattr(hardware, "KINDS_FILE", file)
    with pytest.raises(InputError, match=re.escape(f"{file}: {message}")):
        kinds.__wrapped__()


def test_kinds():
    assert kind_of("h100").name == "h100-80gb" and kind_of("cpu").name == "cpu"
    for name, message in (
        ("a100", "GPU kind 'a100' is not unique; did you mean a100-40gb or a100-80gb?"),
        ("h1000-80gb", "GPU kind 'h1000-80gb' is unknown; did you mean h100-80gb?"),
        ("zzz", "GPU kind 'zzz' is unknown; known: rtx4090-24gb"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            kind_of(name)
    assert list(kinds()) == [
        "rtx4090-24gb",
        "a100-40gb",
        "a100-80gb",
        "h100-80gb",
        "h200-141gb",
        "b200-180gb",
        "gb200-186gb",
        "mi300x-192gb",
        "cpu",
    ]
