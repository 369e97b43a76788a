import dataclasses
import inspect
import itertools
import json
import re
from pathlib import Path

import deepspeed
import pytest

from data_prep.errors import InputError
from recipes.training.ds_config import engine_config, load_ds_config, parallel_sizes, precision, selects_own_engine
from recipes.training.ds_config_keys import KNOWN_KEYS, OPTIMIZER_PARAMS
from recipes.training.ds_config_kinds import is_kind
from recipes.training.ds_config_rules import check_ds_config, check_layout
from recipes.training.recipe_file import load_recipe
from recipes.training.settings import REPOSITORY, PipelineSettings
from recipes.training.sizes import resolve_sizes
from tests.conftest import TINY_DS_CONFIG


def refused(changes: dict, message: str, accelerator=None):
    with pytest.raises(InputError, match=re.escape(message)):
        check_ds_config({**TINY_DS_CONFIG, **changes}, "c.json", accelerator)


PYTHON = {"type": "python", "data_parallel": "replica"}


def writer(**changes) -> dict:
    return {"checkpoint": {"writer": {**PYTHON, **changes}}}


def partition(config: dict) -> dict:
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": config}}


def test_good_config_and_notes_pass():
    check_ds_config({**TINY_DS_CONFIG, "_hardware": {"devices": 2, "note": "auto"}}, "c.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_clipp1ng": 1.0}, "c.json: gradient_clipp1ng: unknown key"),
        ({"gradient_clipp1ng": 1.0}, "did you mean gradient_clipping?"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization?"),
        ({"zero_optimization": {"stage": 2, "ovrlap_comm": True}}, "zero_optimization.ovrlap_comm: unknown key"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "did you mean device?"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "weigth_decay": 0.1}}}, "did you mean weight_decay?"),
        ({"scheduler": {"type": "WarmupLR"}}, "the learning rate schedule is the recipe's `schedule` section"),
        ({"elasticity": {}}, "DeepSpeed 0.19 has removed it"),
        ({"tensor_parallel": {"autotp_sizes": 2}}, "did you mean autotp_size?"),
        ({"expert_parallel": {"autoep_sizes": 2}}, "did you mean autoep_size?"),
        (
            {"gradient_clipping": "auto"},
            'gradient_clipping: "auto" means something only inside the Hugging Face trainer',
        ),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size"),
        *(
            ({"bf16": {"enabled": value}}, f"bf16.enabled: {value!r} must be true or false, without quotes")
            for value in ("false", "no", "off", "0", "yes", 1, None)
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"gradient_clipping": None}, "gradient_clipping: state it"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 must be 0, 1, 2 or 3"),
        ({"zero_optimization": True}, "zero_optimization: True must be a section"),
        ({"optimizer": {"type": "AdamW", "params": {}}}, "optimizer.params.lr: state the peak learning rate"),
        ({"optimizer": {"type": "AdamW", "params": 5}}, "optimizer.params: 5 must be a section"),
        ({"optimizer": {"type": 5, "params": {"lr": 1}}}, "optimizer.type: 5 is no optimizer's name"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": True}}}, "optimizer.params.lr: state the peak learning rate"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": 5}}},
            "optimizer.params.betas: 5 must be two numbers",
        ),
        ({"gradient_clipping": True}, "gradient_clipping: state it"),
        ({"bfloat16": True}, "bfloat16: True must be a section"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean grad_accum_dtype?"),
        ({"data_efficiency": {}}, "recipes/pretrain.py does not offer it"),
        ({"torch_autocast": {"enabled": True}}, "recipes/pretrain.py does not offer it"),
        ({"compile": {"deepcompile": True}}, "compile: not here: the recipe's compute.compile does it"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: 'sum' changes the scale of the gradient"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation: False changes the scale"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1, "fused": True}}},
            "optimizer.params.fused: is torch's; state torch_adam true",
        ),
        ({"checkpoint": {"writer": {"tpye": "fast"}}}, "did you mean type?"),
        ({"checkpoint": {"writer": "fast"}}, "checkpoint.writer: 'fast' must be a section"),
        ({"checkpoint": None}, "checkpoint: None must be a section"),
        ({"datastates_ckpt": True}, "datastates_ckpt: True must be a section"),
        ({"optimizer": None}, "optimizer: None must be a section"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "needs DeepSpeed's CPU Adam"),
        ({"bf16": {"enabled": "Auto"}}, 'bf16.enabled: "Auto" means something only inside the Hugging Face trainer'),
        ({"gradient_clipping": "AUTO"}, 'gradient_clipping: "AUTO" means something only inside'),
        ({"train_micro_batch_size_per_gpu": "2"}, "train_micro_batch_size_per_gpu: '2' must be a positive integer"),
        ({"steps_per_print": "ten"}, "steps_per_print: 'ten' must be a positive integer"),
        ({"steps_per_print": 0}, "steps_per_print: 0 must be a positive integer"),
        ({"communication_data_type": "float31"}, "communication_data_type: 'float31' must be fp32, fp16 or bf16"),
        ({"data_types": {"buffer_dtype": "float31"}}, "data_types.buffer_dtype: 'float31' must be fp32, fp16 or bf16"),
        ({"log_level": "loud"}, "log_level: 'loud' must be debug, info, warning, error or critical"),
        ({"autotuning": {"enabled": True}}, "autotuning: recipes/pretrain.py does not offer it"),
        ({"weight_quantization": {}}, "weight_quantization: recipes/pretrain.py does not offer it"),
        ({"bf16": {"_note": "x"}}, "bf16._note: a note stands at the top level alone"),
        (writer(decoupled=1), "checkpoint.writer.decoupled: 1 must be true or false"),
        ({"tensor_parallel": {"autotp_size": "2"}}, "autotp_size: '2' must be an integer of at least 0"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size: 0 must be a positive integer"),
        ({"sequence_parallel_size": None}, "sequence_parallel_size: None must be a positive integer"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 0}}, "autoep_size: 0 must be a positive integer"),
        ({"tensor_parallel": {"tp": {"tp_sizes": 2}}}, "tensor_parallel.tp.tp_sizes: unknown key"),
        ({"tensor_parallel": {"dtype": "bf16"}}, "tensor_parallel.dtype: 'bf16' must be left out"),
        (partition({"layer_spec": []}), "partition_config.layer_spec: unknown key"),
        (partition({"layer_specs": [{"patterns": ["a"]}, {"pattern": ["b"]}]}), "layer_specs[1].pattern: unknown key"),
        (
            partition({"layer_specs": [{"partition_type": "both"}]}),
            "partition_type: 'both' must be column, row or skip",
        ),
        *(
            ({"zero_optimization": {"stage": 3, key: value}}, f"zero_optimization.{key}: {message}")
            for key, value, message in (
                ("reduce_bucket_size", "abc", "'abc' must be a positive integer"),
                ("reduce_bucket_size", -1, "-1 must be a positive integer"),
                ("reduce_bucket_size", 5.5, "5.5 must be a positive integer"),
                ("allgather_bucket_size", -1, "-1 must be an integer of at least 0"),
                ("stage3_prefetch_bucket_size", True, "True must be an integer of at least 0"),
                ("sub_group_size", "1e9", "'1e9' must be an integer of at least 0"),
                ("cpu_offload", True, 'is an old name; write offload_optimizer: {"device": "cpu"}'),
                ("cpu_offload_param", True, 'is an old name; write offload_param: {"device": "cpu"}'),
                ("cpu_offload_use_pin_memory", True, "is an old name; write pin_memory in offload_optimizer"),
                ("compute_grad_norm", False, "false needs ZeRO stage 1 or 2, not 3"),
            )
        ),
        ({"zero_optimization": {"leaf_module": {"class": ["A"]}}}, "leaf_module.class: unknown key"),
        ({"zero_optimization": {"leaf_module": {"names": 5}}}, "leaf_module.names: 5 must be text or a list of text"),
        ({"zero_optimization": {"zenflow": {"topk_ration": 0.1}}}, "did you mean topk_ratio?"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 10}}}, "topk_ratio: 10 must be a number between 0 and 1"),
    ],
)
def test_refusals(changes, message):
    refused(changes, message)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Lion", {"bets": [0.9, 0.99]}, "optimizer.params.bets: FusedLion does not take it; did you mean betas?"),
        ("Lion", {"eps": 1e-8}, "FusedLion does not take it; it takes lr, betas, weight_decay"),
        ("Muon", {"momentom": 0.95}, "MuonWithAuxAdam does not take it; did you mean momentum?"),
        ("Muon", {"ns_method": "fast"}, "ns_method: 'fast' must be gram or standard"),
        ("Lamb", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm: FusedLamb does not take it"),
        ("SGD", {"nestrov": True}, "torch.optim.SGD does not take it; did you mean nesterov?"),
        ("SGD", {"nesterov": "no"}, "optimizer.params.nesterov: 'no' must be true or false"),
        ("SGD", {"momentum": -1}, "optimizer.params.momentum: -1 must be a number of at least 0"),
        ("Adagrad", {"betas": [0.9, 0.99]}, "optimizer.params.betas: torch.optim.Adagrad does not take it"),
        ("MuAdam", {"decoupled": True}, "mup.MuAdam does not take it; did you mean decoupled_wd?"),
        ("AdamW", {"torch_adam": True, "bias_correction": True}, "torch.optim.AdamW does not take it"),
        ("AdamW", {"torch_adam": True, "decoupled_weight_decay": True}, "torch.optim.AdamW does not take it"),
        ("AdamW", {"foreach": True}, "optimizer.params.foreach: is torch's; state torch_adam true"),
        ("AdamW", {"eps": "auto"}, 'optimizer.params.eps: "auto" means something only inside'),
        ("Adam", {"amsgrad": True}, "optimizer.params.amsgrad: FusedAdam has no AMSGrad"),
        ("AdamW", {"torch_adam": "false"}, "optimizer.params.torch_adam: 'false' must be true or false"),
    ],
)
def test_params_that_an_optimizer_does_not_take(kind, params, message):
    refused({"optimizer": {"type": kind, "params": {"lr": 0.01, **params}}, "zero_optimization": {}}, message)


def test_optimizers_that_a_cpu_lacks():
    for kind in ("Lion", "Lamb"):
        optimizer = {"type": kind, "params": {"lr": 0.01}}
        refused(
            {"optimizer": optimizer, "zero_optimization": {}}, f"optimizer.type: {kind} runs on the CPU only", "cpu"
        )


def test_offload_builds_other_optimizers():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "Lion", "params": {"lr": 0.01, "set_grad_none": True}}
    refused({"optimizer": optimizer, "zero_optimization": zero}, "DeepSpeedCPULion does not take it")
    check_ds_config({**TINY_DS_CONFIG, "optimizer": optimizer, "zero_optimization": {"stage": 2}}, "c.json")


def test_sizes_and_autos_that_deepspeed_takes_pass():
    for changes in (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": None}},
        {"zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "auto", "update_interval": "auto"}}},
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {"expert_parallel": {"enabled": True, "combine_impl": "auto"}},
        {"zero_optimization": {"leaf_module": {"names": "mlp"}}, "steps_per_print": None},
        partition({"layer_specs": [{"patterns": ["a"], "partition_type": "row", "shape": [2, -1]}]}),
        {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01, "eps": [None, 1e-3]}}, "zero_optimization": {}},
    ):
        check_ds_config({**TINY_DS_CONFIG, **changes}, "c.json")


def test_fp16_on_a_cpu_is_refused_before_launch():
    refused({"fp16": {"enabled": True}}, "a CPU can't train in fp16: use bf16 or fp32", accelerator="cpu")


def test_missing_clipping_and_optimizer():
    for key in ("gradient_clipping", "optimizer"):
        with pytest.raises(InputError, match=f"c.json: {key}: state"):
            check_ds_config({k: v for k, v in TINY_DS_CONFIG.items() if k != key}, "c.json")


def test_read_as_deepspeed_reads_it(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{ # a comment\n "zero_optimization": {"stage": 1,}, // another\n}')
    assert load_ds_config(file, ["zero_optimization.stage=3", "bf16.enabled=true"]) == {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    for content, message in (
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "key 'stage' stands twice"),
        ("", "holds no JSON object"),
        ('{"a": {', "not valid JSON"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=re.escape(str(file)) + ".*" + message):
            load_ds_config(file)
    with pytest.raises(InputError, match="does not exist"):
        load_ds_config(tmp_path / "no.json")


def test_engine_gets_the_users_dict_with_the_batch_keys_rewritten():
    config = {**TINY_DS_CONFIG, "train_batch_size": 16, "_note": "kept"}
    given = engine_config(config, resolve_sizes(16, config, 2))
    assert given == {**TINY_DS_CONFIG, "gradient_accumulation_steps": 4, "_note": "kept"}
    assert "gradient_accumulation_steps" not in config


def test_precision():
    assert [precision(c) for c in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})] == [
        "fp32",
        "bf16",
        "fp16",
    ]


PROBES = [True, False, None, "no", "fp32", "auto", "cpu", "qwen2", -1, 0, 1, 2.5, 0.5, 5e8, [], ["a"], {}]


def test_what_passes_here_passes_the_installed_deepspeed():
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitors
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    for section, model in (
        ("zero_optimization", zero.DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", offload.DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", offload.DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.leaf_module", DeepSpeedZeroLeafModuleConfig),
        ("zero_optimization.zenflow", ZenFlowConfig),
        ("bf16", precision_config.DeepSpeedBF16Config),
        ("fp16", precision_config.DeepSpeedFP16Config),
        ("tensor_parallel", TPTrainingConfig),
        ("tensor_parallel.tp", TPConfig),
        ("timers.throughput", DeepSpeedThroughputTimerConfig),
        ("comms_logger", CommsLoggerConfig),
        ("csv_monitor", monitors.CSVConfig),
        ("wandb", monitors.WandbConfig),
        ("comet", monitors.CometConfig),
    ):
        names = {name for key, field in model.model_fields.items() for name in (key, field.alias or key)}
        assert set(KNOWN_KEYS[section]) == names, section
        flags = {
            name
            for key, field in model.model_fields.items()
            for name in (key, field.alias or key)
            if field.annotation in (bool, bool | None) and KNOWN_KEYS[section][name] != "any"
        }
        assert flags == {key for key, kind in KNOWN_KEYS[section].items() if kind.startswith("flag")}, section
        others = {"stage": 1} if section == "zero_optimization" else {}
        for (key, kind), value in itertools.product(KNOWN_KEYS[section].items(), PROBES):
            if kind != "any" and is_kind(value, kind):
                model(**{**others, key: value})


def test_other_known_keys_are_those_of_the_installed_deepspeed():
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.module_inject.autotp_config import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec
    from deepspeed.runtime.constants import (
        CHECKPOINT_PARALLEL_WRITE,
        LOAD_UNIVERSAL_CHECKPOINT,
        USE_NODE_LOCAL_STORAGE_CHECKPOINT,
    )
    from deepspeed.runtime.model_checkpointing.config import CHECKPOINT_DEFAULT_DICT, get_checkpoint_writer_config
    from deepspeed.utils.logging import log_levels

    fields = {field.name: field for field in dataclasses.fields(AutoEPConfig) if not field.name.startswith("_")}
    known = KNOWN_KEYS["expert_parallel"]
    assert set(known) == set(fields)
    for key, field in fields.items():
        if field.type.startswith("Literal"):
            assert known[key] == "|".join(re.findall(r"['\"](\w+)", field.type))
        assert known[key].startswith("flag") == field.type.startswith("bool")
    config = KNOWN_KEYS["tensor_parallel.partition_config"]
    assert set(config) == {field.name for field in dataclasses.fields(AutoTPConfig)}
    layers = KNOWN_KEYS["tensor_parallel.partition_config.layer_specs"]
    assert set(layers) == {field.name for field in dataclasses.fields(TPLayerSpec)}
    assert set(layers["partition_type"].split("|")) == {kind.value for kind in PartitionType}
    presets = KNOWN_KEYS["tensor_parallel"]["preset_model"].removesuffix("?").split("|")
    assert all(AutoTPPresets.get_preset(name) for name in presets)
    assert set(KNOWN_KEYS[""]["log_level"].removesuffix("?").split("|")) == set(log_levels)
    writer = get_checkpoint_writer_config({"writer": {"type": "python"}})
    assert set(KNOWN_KEYS["checkpoint.writer"]) == set(writer)
    read = {LOAD_UNIVERSAL_CHECKPOINT, USE_NODE_LOCAL_STORAGE_CHECKPOINT, CHECKPOINT_PARALLEL_WRITE}
    assert set(KNOWN_KEYS["checkpoint"]) == set(CHECKPOINT_DEFAULT_DICT) | read


def test_optimizer_params_are_those_of_the_installed_packages():
    import torch
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}  # taken out by DeepSpeed before it builds Adam
    for built, known in OPTIMIZER_PARAMS.items():
        module, _, name = built.rpartition(".")
        if built == "MuonWithAuxAdam":
            halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
            assert set(known) == {*halves, "muon_lr", "adam_lr", *own}
        elif module != "mup":  # not installed
            place = next(
                p for p in (torch.optim, adam, adagrad, lamb, lion) if hasattr(p, name) and (module or p != torch.optim)
            )
            taken = set(list(inspect.signature(getattr(place, name)).parameters)[1:])
            unstated = {"max_grad_norm", "adamw_mode"}  # refused, and given, by DeepSpeed
            assert set(known) - own == taken - own - unstated, built


def test_deepspeed_reads_every_known_top_level_key():
    package = Path(next(iter(deepspeed.__path__)))
    source = "\n".join(path.read_text(errors="replace") for path in package.rglob("*.py"))
    keys = [key for section in ("", "data_types", "aio", "timers", "flops_profiler") for key in KNOWN_KEYS[section]]
    assert [key for key in keys if f'"{key}"' not in source and f"'{key}'" not in source] == []


def test_shipped_configs_are_plain_json_and_pass():
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        config = json.loads(path.read_text())
        check_ds_config(config, path.name)
        assert {"device", "devices", "devices_per_node"} <= set(config["_hardware"])
        assert "gradient_accumulation_steps" not in config


TP, EP = {"tensor_parallel": {"autotp_size": 2}}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}
MOE = [
    "model.family=qwen3_moe",
    *(f"model.{key}={value}" for key, value in {"moe_intermediate_size": 16, "num_experts": 4}.items()),
    "model.num_experts_per_tok=2",
]


def stage(number: int) -> dict:
    return {"zero_optimization": {"stage": number}}


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], {**TP, **stage(3)}, "zero_optimization.stage: 3 does not go with tensor_parallel.autotp_size 2"),
        ([], {"tensor_parallel": {"autotp_size": 3}}, "3 does not divide model.num_attention_heads 4"),
        ([], {"tensor_parallel": {"autotp_size": 4}}, "4 does not divide model.num_key_value_heads 2"),
        ([], {**TP, "sequence_parallel_size": 2}, "sequence_parallel_size: 2 does not go with tensor_parallel"),
        (
            [],
            {"sequence_parallel_size": 2, **stage(0)},
            "sequence_parallel_size: 2 needs zero_optimization.stage 1, 2 or 3",
        ),
        ([], {"sequence_parallel_size": 3}, "sequence_parallel_size: 3 does not divide data.seq_length 16"),
        ([], {"sequence_parallel_size": 8}, "sequence_parallel_size: 8 does not divide num_attention_heads 4"),
        (["compute.attention=eager"], {"sequence_parallel_size": 2}, "needs compute.attention sdpa"),
        ([*MOE, "model.router_aux_loss_coef=0.01"], {"sequence_parallel_size": 2}, "model.router_aux_loss_coef 0.01"),
        (["compute.attention=flex_attention"], {}, "compute.attention flex_attention needs a GPU"),
        ([], {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}, "vocab_parallel_lm_head"),
        ([], EP, "expert_parallel: model.family llama has no experts"),
        (["pipeline.stages=2"], stage(2), "zero_optimization.stage: 2 does not go with pipeline.stages 2"),
        (["pipeline.stages=2"], stage(3), "use 0 or 1"),
        (
            ["pipeline.stages=2"],
            {**TP},
            "tensor_parallel: does not go with pipeline.stages 2; use the recipe's pipeline",
        ),
        (["pipeline.stages=2", "loss.chunk_tokens=4"], stage(1), "take loss.chunk_tokens out"),
        (["pipeline.stages=2"], {"bf16": {"enabled": True}}, "data_types.grad_accum_dtype: None lets a pipeline"),
        (["pipeline.stages=2", "pipeline.tensor_parallel_size=4"], {}, "4 does not divide model.num_key_value_heads 2"),
        (MOE, {**EP, **TP}, "what DeepSpeed calls folding"),
        (MOE, {"expert_parallel": {"enabled": True, "autoep_size": 3}}, "3 does not divide the model's 4 experts"),
        (MOE, EP, "expert_parallel.use_grouped_mm: a CPU has no grouped matrix product"),
        (MOE, {"expert_parallel": {"autoep_size": 2}}, "expert_parallel.enabled: is not true"),
        (
            MOE,
            {"expert_parallel": {**EP["expert_parallel"], "preset_model": "mixtral"}},
            "is not model.family qwen3_moe",
        ),
        (MOE, {"expert_parallel": {**EP["expert_parallel"], "load_balance_coeff": 0.1}}, "router_aux_loss_coef"),
        (
            MOE,
            {"expert_parallel": {**EP["expert_parallel"], "route_norm": False}},
            "expert_parallel.route_norm: the rec",
        ),
        *(
            (MOE, {**EP, "zero_optimization": {"stage": 3, key: value}}, f"{key}: does not go with expert_parallel")
            for key, value in (("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True))
        ),
    ],
)
def test_layouts_that_deepspeed_refuses_or_gets_wrong(tiny, overrides, changes, message):
    if "model.family=qwen3_moe" in overrides:
        text = tiny.read_text().replace("  intermediate_size: 64\n", "")
        tiny.write_text(text)
    recipe, _ = load_recipe(tiny, overrides)
    config = {**TINY_DS_CONFIG, **changes}
    check_ds_config(config, "c.json", "cpu")
    with pytest.raises(InputError, match=re.escape(message)):
        check_layout(recipe, config, "c.json", "cpu")


def test_flash_attention_takes_a_document_mask_for_one_row_alone(tiny):
    recipe, _ = load_recipe(tiny, ["compute.attention=flash_attention_2", "data.document_mask=attention"])
    with pytest.raises(InputError, match="train_micro_batch_size_per_gpu: 2 does not go with compute.attention flash"):
        check_layout(recipe, {**TINY_DS_CONFIG, "train_micro_batch_size_per_gpu": 2}, "c.json", "cuda")
    check_layout(recipe, {**TINY_DS_CONFIG, "train_micro_batch_size_per_gpu": 1}, "c.json", "cuda")


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], {"checkpoint": {"writer": None}}),
        (["pipeline.stages=2"], {"checkpoint": {"writer": None}}),
        ([], {"checkpoint": {"writer": None}, "sequence_parallel_size": 2}),
        *(([], {**writer(), **stage(n)}) for n in range(4)),
        ([], {**writer(type="PYTHON", data_parallel="REPLICA"), **stage(1)}),
        (["pipeline.stages=2"], writer()),
        (["pipeline.stages=2", "pipeline.tensor_parallel_size=2"], writer()),
        *(([], {**writer(decoupled=True), **stage(n)}) for n in (0, 3)),
    ],
)
def test_checkpoint_engines_that_work(tiny, overrides, changes):
    recipe, _ = load_recipe(tiny, overrides)
    config = {**TINY_DS_CONFIG, **changes}
    check_ds_config(config, "c.json", "cpu")
    check_layout(recipe, config, "c.json", "cpu")
    assert selects_own_engine(config) and not selects_own_engine(TINY_DS_CONFIG)


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], {"checkpoint": {}}, "checkpoint.writer: state null"),
        ([], {"checkpoint": {"writer": {}}}, "checkpoint.writer.type: None must be python or fast"),
        ([], writer(type="mock"), "checkpoint.writer.type: 'mock' must be python or fast"),
        ([], writer(type="fast"), "checkpoint.writer.type: fast needs an accelerator"),
        ([], {"checkpoint": {"writer": {"type": "python"}}}, "checkpoint.writer.data_parallel: None must be"),
        ([], writer(data_parallel="socket"), "checkpoint.writer.data_parallel: 'socket' must be"),
        ([], writer(decoupled=True), "decoupled: true does not go with zero_optimization.stage 1"),
        ([], {**writer(decoupled=True), **stage(2)}, "decoupled: true does not go with zero_optimization.stage 2"),
        (
            ["pipeline.stages=2"],
            {**writer(decoupled=True), **stage(0)},
            "decoupled: true does not go with pipeline.stages",
        ),
        ([], {**writer(), **TP}, "checkpoint.writer: does not go with tensor_parallel.autotp_size 2"),
        ([], {**writer(), "sequence_parallel_size": 2}, "does not go with sequence_parallel_size 2"),
        ([], writer(io_buffer_size=1), "checkpoint.writer.io_buffer_size: has no effect with type python"),
        ([], {**writer(), "datastates_ckpt": {}}, "datastates_ckpt: does not go with checkpoint.writer"),
        (["checkpoint.host_memory_gib=1"], writer(), "know no checkpoint.host_memory_gib"),
        ([], {"datastates_ckpt": {"enabled": False}}, "DeepSpeed takes any such section for true"),
        ([], {"datastates_ckpt": {"enabled": True}}, "datastates_ckpt: DataStates needs an NVIDIA GPU"),
        *(
            ([], {"checkpoint": {"writer": None, key: True}}, f"checkpoint.{key}: not here")
            for key in KNOWN_KEYS["checkpoint"]
            if key != "writer"
        ),
    ],
)
def test_checkpoint_engines_that_deepspeed_gets_wrong(tiny, overrides, changes, message):
    recipe, _ = load_recipe(tiny, overrides)
    config = {**TINY_DS_CONFIG, **changes}
    check_ds_config(config, "c.json", "cpu")
    with pytest.raises(InputError, match=re.escape(message)):
        check_layout(recipe, config, "c.json", "cpu")


def test_checkpoint_engines_on_a_gpu(tiny):
    recipe, _ = load_recipe(tiny)
    check_layout(recipe, {**TINY_DS_CONFIG, **writer(type="fast"), **stage(3)}, "c.json", "cuda")
    with pytest.raises(InputError, match="fast does not go with zero_optimization.stage 1: it names its files so"):
        check_layout(recipe, {**TINY_DS_CONFIG, **writer(type="fast")}, "c.json", "cuda")
    with pytest.raises(InputError, match="datastates_ckpt: DataStates is not installed"):
        check_layout(recipe, {**TINY_DS_CONFIG, "datastates_ckpt": {"host_cache_size": 1}}, "c.json", "cuda")


@pytest.mark.parametrize("stages", [0, 3, -1])
def test_stages_beyond_the_layers(tiny, stages):
    with pytest.raises(InputError, match="pipeline.stages"):
        load_recipe(tiny, [f"pipeline.stages={stages}"])


def test_parallel_sizes(tiny):
    plain = PipelineSettings()
    assert parallel_sizes({**TINY_DS_CONFIG, **TP}, plain)["tensor"] == 2
    assert parallel_sizes({**TINY_DS_CONFIG, "expert_parallel": {"autoep_size": 2}}, plain)["expert"] == 1
    recipe, _ = load_recipe(tiny, ["pipeline.stages=2", "pipeline.tensor_parallel_size=2"])
    check_layout(recipe, TINY_DS_CONFIG, "c.json", "cpu")
    sizes = resolve_sizes(8, TINY_DS_CONFIG, 8, **parallel_sizes(TINY_DS_CONFIG, recipe.pipeline))
    assert (sizes.pipeline, sizes.tensor, sizes.data, sizes.accumulation) == (2, 2, 2, 2)
