"""The planner's bytes against bytes that exist: model states on ranks, activations by saved-tensor hooks."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from launch.planning.memory import GIB, activations, fullest_rank, model_states
from launch.planning.shape import on_rank, shape_of, stages_of
from recipes.training.checkpoint_files import expected_bytes
from recipes.training.settings import ComputeSettings, LossSettings, PipelineSettings
from recipes.training.sizes import Sizes
from tests.conftest import launch
from tests.recipes.families import EXAMPLE, small

# Wide enough that states outweigh rounding; few tokens, so that what is left of a batch does not count.
DENSE = {
    "family": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {
    **{key: value for key, value in DENSE.items() if key != "intermediate_size"},
    "family": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "gradient_clipping": 1.0,
    # Buckets and gathered weights are not model states: small ones, and none that stay gathered.
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0},
}
BF16 = ["ds.bf16.enabled=true", "ds.data_types.grad_accum_dtype=fp32"]
TENSOR = ["ds.tensor_parallel.autotp_size=2"]
EXPERT = [
    "ds.expert_parallel.enabled=true",
    "ds.expert_parallel.autoep_size=2",
    "ds.expert_parallel.use_grouped_mm=false",
]
PIPELINE = ["pipeline.stages=2"]
DEEP = ["model.num_hidden_layers=24", "model.vocab_size=128"]
OFFLOAD = [
    "ds.zero_force_ds_cpu_optimizer=false",
    "ds.zero_optimization.offload_optimizer.device=cpu",
    "ds.zero_optimization.offload_param.device=cpu",
]


def stage(number: int) -> str:
    return f"ds.zero_optimization.stage={number}"


ON_TWO = {
    **{f"fp32, stage {n}": ("dense", stage(n)) for n in (0, 1, 3)},
    # In fp32 the gradient that lies across two ranks' parts stays whole on both; in a deep model it does not count.
    "fp32, stage 2": ("dense", stage(2), *DEEP),
    "bf16, stage 0": ("dense", stage(0), BF16[0]),
    "bf16 summed in bf16, stage 1": ("dense", stage(1), BF16[0]),
    **{f"bf16, stage {n}": ("dense", stage(n), *BF16) for n in (1, 2, 3)},
    "tensor 2, bf16, stage 1": ("dense", *TENSOR, *BF16),
    "pipeline 2, bf16, stage 1": ("dense", *PIPELINE, *BF16),
    "tied pipeline 2, bf16, stage 1": ("dense", *PIPELINE, *BF16, "model.tie_word_embeddings=true"),
    **{f"expert 2, bf16, stage {n}": ("moe", *EXPERT, stage(n), *BF16) for n in (1, 2, 3)},
    # Buffers of the largest parameter's size do not count in a deep model.
    **{f"offload, bf16, stage {n}": ("dense", stage(n), *BF16, *DEEP, *OFFLOAD[:2]) for n in (1, 2, 3)},
    "offload, bf16 summed in bf16, stage 2": ("dense", stage(2), BF16[0], *DEEP, *OFFLOAD[:2]),
    "offload of weights too, bf16, stage 3": ("dense", stage(3), *BF16, *DEEP, *OFFLOAD),
}
ON_FOUR = {
    "tensor 2 x data 2, bf16, stage 2": ("dense", *TENSOR, stage(2), *BF16),
    "pipeline 2 x tensor 2, bf16, stage 1": ("dense", *PIPELINE, "pipeline.tensor_parallel_size=2", *BF16),
    "expert 2 x data 2, bf16, stage 2": ("moe", *EXPERT, stage(2), *BF16),
    "expert 2 x data 2, bf16, stage 3": ("moe", *EXPERT, stage(3), *BF16),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts"), [(2, ON_TWO), (4, ON_FOUR)])
def test_model_states_are_those_that_ranks_allocate(tmp_path, ranks, layouts):
    common = {
        "output_dir": "runs",
        "global_batch_size": 4,
        "data": {"files": "synthetic", "seq_length": 8},
        "schedule": {"steps": 4},
        "deepspeed_config": "ds.json",
    }
    for name, model in (("dense", DENSE), ("moe", MOE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "model": model, **common}))
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    cases = [
        {"name": name, "recipe": str(tmp_path / f"{recipe}.yaml"), "overrides": overrides}
        for name, (recipe, *overrides) in layouts.items()
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    script = ["tests/launch/planning/states_ranks.py", tmp_path / "cases.json", tmp_path / "results.json"]
    finished = launch([*command, *script], env={"OMP_NUM_THREADS": "1"}, limit_s=400)
    assert finished.code == 0, finished.output
    results = json.loads((tmp_path / "results.json").read_text())
    errors = {
        f"{name}, rank {rank}": one["planned"] / one["allocated"] - 1
        for name, pairs in results.items()
        for rank, one in enumerate(pairs)
    }
    assert len(errors) == ranks * len(layouts)
    assert {name: error for name, error in errors.items() if abs(error) > 0.01} == {}


def saved_bytes(settings, batch: int, length: int, dtype: torch.dtype, interval: int, chunk: int | None) -> int:
    """Bytes of the storages that backward keeps, weights aside, after one forward of the training model."""
    from transformers import AutoModelForCausalLM

    from recipes import models
    from recipes.training.engine import recompute_activations
    from recipes.training.losses import attach_loss

    config = models.family(settings.family).hf_config(settings, length)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    attach_loss(model, settings, LossSettings(chunk_tokens=chunk))
    recompute_activations(model.model.layers, interval)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            kept.setdefault(address, tensor)  # held, so that no other storage takes the address
        return tensor

    tokens = torch.randint(0, settings.vocab_size, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


GROUPED = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
SHAPES = {
    "llama": small("llama", **GROUPED, intermediate_size=172),
    "llama, wide": small("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=384),
    "qwen3": small("qwen3", **GROUPED, intermediate_size=172, head_dim=32),
    "qwen3_moe": small("qwen3_moe", **GROUPED, moe_intermediate_size=48, num_experts=8, head_dim=16),
    # torch has a fused kernel on the CPU only for values as wide as keys.
    "deepseek_v3": small("deepseek_v3", hidden_size=64, num_hidden_layers=4, v_head_dim=10, moe_intermediate_size=48),
}


@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("low", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_what_backward_keeps(name, low, interval):
    settings, batch, length = SHAPES[name], 1, 48
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[low]
    sizes = Sizes(1, 1, 1, 1, 1, 1, batch, 1, batch)
    recipe = SimpleNamespace(
        data=SimpleNamespace(seq_length=length),
        compute=ComputeSettings(activation_checkpoint_interval=interval),
        loss=LossSettings(chunk_tokens=16),
    )
    shape = shape_of(settings, low)
    kept, recomputed, logits = activations(recipe, sizes, shape, list(shape.layers), low)
    assert kept == pytest.approx(saved_bytes(settings, batch, length, dtype, interval, chunk=16), rel=0.1)
    if interval:
        whole, _, _ = activations(
            SimpleNamespace(**{**vars(recipe), "compute": ComputeSettings()}), sizes, shape, list(shape.layers), low
        )
        assert 0 < recomputed < whole
    assert logits == 16 * settings.vocab_size * {"fp32": 8, "bf16": 10}[low]


def rank(**sizes) -> Sizes:
    given = {"data": 1, "tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1, **sizes}
    world = given["data"] * given["tensor"] * given["pipeline"] * given["sequence"]
    return Sizes(world, **given, micro_batch=1, accumulation=1, global_batch=given["data"])


def states(config: dict, sizes: Sizes, settings) -> dict:
    shape = shape_of(settings, "bf16")
    return model_states(config, sizes, [on_rank(layer, sizes) for layer in shape.layers])


LOW = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "optimizer": {"type": "AdamW"}}


def test_model_states_by_hand():
    settings = small("llama", tie_word_embeddings=False)
    count = 64 * 32 * 2 + 2 * (32 * 8 * 12 + 3 * 32 * 48) + 5 * 32
    for number, weights, gradients, kept in ((1, 2, 6, 12 / 4), (2, 2, 4 / 4, 12 / 4), (3, 2 / 4, 4 / 4, 12 / 4)):
        found = states({**LOW, "zero_optimization": {"stage": number}}, rank(data=4), settings)
        assert (found["weights"], found["gradients"]) == (weights * count, gradients * count)
        assert found["master"] + found["optimizer"] == kept * count


def test_offload_moves_states_to_the_host():
    settings, cpu = small("llama"), {"device": "cpu"}
    plain = states({**LOW, "zero_optimization": {"stage": 3}}, rank(data=4), settings)
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    moved = states({**LOW, "zero_optimization": zero}, rank(data=4), settings)
    assert (moved["weights"], moved["master"], moved["optimizer"], plain["host"]) == (0, 0, 0, 0)
    assert moved["host"] == plain["weights"] + plain["master"] + plain["optimizer"] + 2 * plain["gradients"]


def test_experts_are_spread_over_the_ranks_that_hold_the_same_ones():
    settings = small("qwen3_moe")
    experts = 2 * 4 * 3 * 32 * 16
    config = {**LOW, "zero_optimization": {"stage": 2}}
    one, two = states(config, rank(data=4), settings), states(config, rank(data=4, expert=2), settings)
    assert one["weights"] - two["weights"] == 2 * experts // 2
    assert one["optimizer"] == two["optimizer"]  # a quarter of all, or half of a half


def test_stages_are_deepspeeds():
    shape = shape_of(small("llama", num_hidden_layers=6, tie_word_embeddings=True), "bf16")
    cut = stages_of(shape, 2, "parameters")
    assert [layer.kind for part in cut for layer in part] == ["embedding", *["block"] * 6, "norm", "head"]
    assert cut[1][-1].whole == cut[0][0].whole  # the last stage has a copy of the tied embedding
    assert [len(part) for part in stages_of(shape, 3, "uniform")] == [3, 3, 3]
    assert [sum(layer.kind == "block" for layer in part) for part in stages_of(shape, 3, "type:Block")] == [2, 2, 2]


def test_the_first_stage_keeps_more_micro_batches():
    settings = small("llama", num_hidden_layers=4)
    recipe = SimpleNamespace(
        data=SimpleNamespace(seq_length=64),
        compute=ComputeSettings(),
        loss=LossSettings(),
        pipeline=PipelineSettings(stages=4, partition="type:Block"),
    )
    config = {**LOW, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    sizes = Sizes(4, 1, 1, 4, 1, 1, 1, 8, 8)
    memory, number = fullest_rank(recipe, config, sizes, shape_of(settings, "bf16"))
    block = shape_of(settings, "bf16").blocks[0]
    assert number == 0
    sent_on = 64 * 32 * 2  # what the pipeline keeps of each micro batch besides
    assert memory.activations == (int((block.saved_whole + block.saved_split) * 64) + sent_on) * 4


def test_checkpoints():
    adam = {"optimizer": {"type": "AdamW"}}
    assert expected_bytes(1000, {**LOW}) == 14000
    assert expected_bytes(1000, {**adam, "zero_optimization": {"stage": 1}}) == 16000
    assert expected_bytes(1000, adam) == 12000
    assert round(expected_bytes(535_026_158_080, LOW) / GIB) == 6976


def test_a_family_of_ones_own_is_planned_too():
    shape = shape_of(small(EXAMPLE), "bf16")
    assert sum(layer.parameters for layer in shape.layers) == 64 * 32 * 2 + 2 * (32 * 8 * 12 + 2 * 32 * 48) + 5 * 32
