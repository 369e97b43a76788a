import json
import re

import numpy as np
import pytest
import torch
import yaml

from data_prep.errors import InputError
from data_prep.loader import collate
from data_prep.samples import DataSpec, SampleStream
from recipes import models
from recipes.models import decoder, deepseek_v3, llama, qwen3_moe
from recipes.models.build import build_model, initial_values, parameter_groups, persistent_buffers
from recipes.training.engine import recompute_activations
from recipes.training.losses import token_loss_sum
from recipes.training.recipe_file import load_recipe
from tests.conftest import REPOSITORY, write_tokens
from tests.recipes.families import EXAMPLE, SMALL, checked, meta_model, residual_std, small

LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def settings(**changes):
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return llama.Settings(**{**shape, **changes})


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_that_of_the_model(tied):
    chosen = settings(tie_word_embeddings=tied)
    model = build_model(chosen, 16, seed=1)
    assert sum(p.numel() for p in model.parameters()) == llama.parameter_count(chosen)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
QWEN_3 = {"vocab_size": 151936, "num_key_value_heads": 8}
QWEN_3_MOE = {"vocab_size": 151936, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = {
    # name: (family, settings, total, active)
    "Llama-3.1-8B": (
        "llama",
        {
            **LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        8_030_261_248,
        8_030_261_248,
    ),
    "Llama-3.1-70B": (
        "llama",
        {
            **LLAMA_3,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        70_553_706_496,
        70_553_706_496,
    ),
    "Llama-3.1-405B": (
        "llama",
        {
            **LLAMA_3,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
        405_853_388_800,
        405_853_388_800,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            **QWEN_3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        596_049_920,
        596_049_920,
    ),
    "Qwen3-8B": (
        "qwen3",
        {**QWEN_3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        8_190_735_360,
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            **QWEN_3_MOE,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
        },
        30_532_122_624,
        3_353_032_704,
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {
            **QWEN_3_MOE,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
        235_093_634_560,
        22_190_763_520,
    ),
    # Often quoted as 671,026,419,200: with the routing bias, a buffer of 256 for each of 58 layers.
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        671_026_404_352,
        37_552_282_624,
    ),
    "535B-A23B": (
        "qwen3_moe",
        {
            "vocab_size": 128256,
            "hidden_size": 5120,
            "moe_intermediate_size": 1920,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 70,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
        },
        535_026_158_080,
        23_058_926_080,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    family, shape, total, active = PUBLISHED[name]
    module = models.family(family)
    chosen = module.Settings(**shape)
    checked(chosen, 4096)
    assert module.parameter_count(chosen) == total
    assert module.active_parameter_count(chosen) == active
    assert sum(p.numel() for p in meta_model(chosen, 4096).parameters()) == total


ODD_SHAPES = [
    ("llama", {"num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": True, "vocab_size": 61}),
    ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1, "intermediate_size": 7}),
    ("qwen3", {"hidden_size": 30, "head_dim": 14, "num_key_value_heads": 1}),
    ("qwen3", {"hidden_size": 50, "tie_word_embeddings": True, "num_attention_heads": 6}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5, "hidden_size": 30, "num_key_value_heads": 4}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2], "intermediate_size": 21, "num_hidden_layers": 4}),
    ("qwen3_moe", {"tie_word_embeddings": True, "num_experts_per_tok": 1, "moe_intermediate_size": 3}),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"n_shared_experts": 3, "v_head_dim": 5, "num_hidden_layers": 5, "first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 2, "tie_word_embeddings": True, "qk_rope_head_dim": 2}),
    (EXAMPLE, {"tie_word_embeddings": True, "intermediate_size": 33}),
]
# The part of each parameter, by the first of these that its name contains.
PART_OF_NAME = {
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention",
    "shared_experts": "shared_experts",
    "experts": "experts",
    "gate.weight": "router",
    "mlp": "dense_mlp",
}


@pytest.mark.parametrize(("family", "changes"), [*((name, {}) for name in SMALL), *ODD_SHAPES])
def test_every_part_of_the_count_is_that_of_the_model(family, changes):
    chosen = small(family, **changes)
    checked(chosen)
    counted = dict.fromkeys(decoder.PARTS, 0)
    for name, parameter in meta_model(chosen).named_parameters():
        counted[next(part for piece, part in PART_OF_NAME.items() if piece in name)] += parameter.numel()
    assert models.family(family).parameters_by_part(chosen) == counted
    assert models.family(family).parameter_count(chosen) == sum(counted.values())


def test_flops_by_hand():
    # h 8, 4 heads of 2, 2 kv heads: attention 8*2*(4+4+2+2)=192; feed-forward 3*8*16=384; 2 layers, head 32*8=256.
    chosen = settings(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    expected = 6 * (2 * (192 + 384) + 256) + 12 * 2 * 8 * 16
    assert llama.flops_per_token(chosen, 16) == expected
    chosen.tie_word_embeddings = True
    assert llama.flops_per_token(chosen, 16) == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SMALL)
def test_flops_are_those_of_the_models_matrices(family, tied):
    chosen = small(family, tie_word_embeddings=tied)
    model = meta_model(chosen)
    matrices = model.lm_head.weight.numel()
    for parameter in model.model.layers.parameters():
        if parameter.dim() == 3:  # stacked experts
            matrices += parameter[0].numel() * chosen.num_experts_per_tok
        elif parameter.dim() == 2:
            matrices += parameter.numel()
    attention = model.model.layers[0].self_attn
    queries = getattr(attention, "q_b_proj", None) or attention.q_proj
    width = queries.out_features + attention.o_proj.in_features
    assert models.family(family).flops_per_token(chosen, 16) == 6 * matrices + 6 * 2 * width * 16


def test_flops_of_experts_by_hand():
    # h 8, 4 heads of 2, 2 kv heads: attention 192. Layer 0 dense: 3*8*16=384; layer 1: 2 of 4 experts of 3*8*5=120, router 32.
    chosen = qwen3_moe.Settings(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        mlp_only_layers=[0],
        moe_intermediate_size=5,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
    )
    expected = 6 * (2 * 192 + 384 + 2 * 120 + 32 + 256) + 12 * 2 * 8 * 16
    assert qwen3_moe.flops_per_token(chosen, 16) == expected
    chosen.tie_word_embeddings = True
    assert qwen3_moe.flops_per_token(chosen, 16) == expected


def test_flops_of_latent_attention_by_hand():
    # h 8, 2 heads, query 3+2 through rank 4: 8*4 + 4*10; key and value through rank 6: 8*(6+2) + 6*2*(3+5); output 2*5*8.
    chosen = deepseek_v3.Settings(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        moe_intermediate_size=5,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=3,
        num_attention_heads=2,
        q_lora_rank=4,
        kv_lora_rank=6,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=5,
    )
    attention = 8 * 4 + 4 * 10 + 8 * 8 + 6 * 16 + 80
    experts = 2 * (3 * 120 + 32)  # two layers: one routed, two shared, the router
    attended = 6 * 3 * 2 * (5 + 5) * 16
    expected = 6 * (3 * attention + 384 + experts + 256) + attended
    assert deepseek_v3.flops_per_token(chosen, 16) == expected


@pytest.mark.parametrize("family", SMALL)
def test_initial_weights_follow_seed_and_name(family):
    one, same, other = (build_model(small(family), 16, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", SMALL)
def test_no_two_layers_or_experts_start_alike(family):
    seen = {}
    for name, value in build_model(small(family, num_hidden_layers=4), 16, seed=1).named_parameters():
        for number, part in enumerate(value if value.dim() == 3 else [value]):
            if value.dim() > 1:
                assert (
                    seen.setdefault(part.detach().flatten()[:8].numpy().tobytes(), f"{name} {number}")
                    == f"{name} {number}"
                )


@pytest.mark.parametrize("family", SMALL)
def test_initial_standard_deviations(family):
    wide = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 3}
    wide.update(
        {key: 8 * value for key, value in SMALL[family].items() if key.endswith(("intermediate_size", "_rank"))}
    )
    chosen = small(family, **wide)
    model, scaled = build_model(chosen, 16, seed=1), set()
    for name, value in model.named_parameters():
        if value.dim() == 1:
            assert (value == 1).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            scaled |= {name} if residual else set()
            for part in value if value.dim() == 3 else [value]:
                std = residual_std(chosen) if residual else 0.02
                assert part.std().item() == pytest.approx(std, rel=0.08), name
    assert len(scaled) == 3 * 2 + (2 if family == "deepseek_v3" else 0)  # the shared experts' of two layers too
    assert all((buffer == 0).all() for buffer in persistent_buffers(model).values())
    assert len(persistent_buffers(model)) == (2 if family == "deepseek_v3" else 0)


def test_an_expert_is_drawn_the_same_without_the_others():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    chosen = small("qwen3_moe")
    all_of_them = initial_values(name, torch.Size([4, 32, 32]), chosen, seed=1)
    assert torch.equal(initial_values(name, torch.Size([2, 32, 32]), chosen, seed=1), all_of_them[:2])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_size": 34, "head_dim": 8}, "model.hidden_size 34 is not divisible by num_attention_heads 4"),
        ("qwen3", {"head_dim": 7}, "model.head_dim 7 must be positive and even"),
        ("qwen3", {"num_key_value_heads": 3}, "model.num_key_value_heads 3 must be positive and divide"),
        ("qwen3", {"init_from": ""}, "model.init_from must be a directory or a name"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "model.num_experts_per_tok 5 must lie in 1 .. 4"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "model.num_experts_per_tok 0 must lie in 1 .. 4"),
        ("qwen3_moe", {"num_experts": 0}, "model.num_experts 0 must be positive"),
        ("qwen3_moe", {"router_aux_loss_coef": -1.0}, "model.router_aux_loss_coef -1 must not be negative"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [2], "intermediate_size": 8},
            "model.mlp_only_layers [2] must hold different",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            "model.intermediate_size None must be positive: the width of the dense",
        ),
        ("deepseek_v3", {"n_group": 3}, "model.n_group 3 must divide n_routed_experts 8"),
        ("deepseek_v3", {"n_group": 8}, "model.n_group 8 must divide n_routed_experts 8 into groups of at least 2"),
        ("deepseek_v3", {"topk_group": 5}, "model.topk_group 5 must lie in 1 .. 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "model.num_experts_per_tok 5 must lie in 1 .. 4"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "model.first_k_dense_replace 3 must lie in 0 .. 2"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "model.qk_rope_head_dim 3 must be even"),
        ("deepseek_v3", {"q_lora_rank": 0}, "model.q_lora_rank 0 must be positive or null"),
        ("llama", {"rope_scaling": {"factor": 8.0}}, "needs a rope_type, one of linear, llama3, yarn"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "of type llama3 needs low_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "linear has no beta_fast"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "model.rope_scaling.factor '2' must be a"),
        ("llama", {"rope_scaling": {**LLAMA_3_SCALING, "low_freq_factor": 9.0}}, "low_freq_factor 9 must be below"),
    ],
)
def test_rules(family, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked(small(family, **changes))


def test_llama_3_1_positions_are_those_of_its_public_config(tmp_path):
    """config.json as Llama-3.1 publishes it gives the same rotary frequencies as the recipe's settings."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    public = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA_3_SCALING, "hidden_size": 512}
    public |= {"num_attention_heads": 4, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(public))
    chosen = small("llama", hidden_size=512, rope_theta=500000.0, rope_scaling=LLAMA_3_SCALING)
    checked(chosen)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    ours = LlamaRotaryEmbedding(llama.hf_config(chosen, 8192)).inv_freq
    plain = LlamaRotaryEmbedding(llama.hf_config(small("llama", hidden_size=512, rope_theta=500000.0), 8192)).inv_freq
    assert torch.equal(ours, theirs) and not torch.equal(ours, plain)


def test_tensor_plan_is_autotps_own_choice():
    """For the families whose transformers plan DeepSpeed can convert: each linear layer and head norm as AutoTP takes it."""
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    for family in ("llama", "qwen3", EXAMPLE):
        model = meta_model(small(family))
        autotp = AutoTPConfig(tp_size=2, layer_specs=TPPlanConverter.convert(_get_hf_tp_plan(model)))
        ours, theirs = {}, {}
        for name, module in model.named_modules():
            if (kind := planned(models.family(family).TENSOR_PLAN, name)) is not None:
                ours[name] = kind
            spec = autotp.find_matching_spec(f"{name}.weight", model.config.model_type)
            if spec is None or isinstance(module, torch.nn.Embedding):
                continue
            if spec.partition_type == PartitionType.SKIP:
                theirs[name] = "summed" if spec.grad_allreduce else "skipped"
            elif spec.partition_type == PartitionType.ROW:
                theirs[name] = "row"
            else:
                theirs[name] = "gathered" if spec.gather_output else "column"
        assert ours == theirs
        assert {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)} <= set(ours)


def test_tensor_plan_of_experts_is_transformers_plan_without_them():
    """DeepSpeed refuses the whole transformers plan of these families, for its experts; ours is the rest of it."""
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    styles = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}
    for family in ("qwen3_moe", "deepseek_v3"):
        dense = {"mlp_only_layers": [0], "intermediate_size": 8} if family == "qwen3_moe" else {}
        model = meta_model(small(family, **dense))
        with pytest.raises(ValueError, match="unsupported partition style.*moe_tp_experts"):
            TPPlanConverter.convert(_get_hf_tp_plan(model))
        theirs = {
            pattern.removeprefix("layers.*."): styles[style]
            for pattern, style in model.config.base_model_tp_plan.items()
            if ".experts" not in pattern
        }
        plan = models.family(family).TENSOR_PLAN
        assert {ending: kind for kind, endings in plan.items() for ending in endings if kind != "gathered"} == theirs
        modules = [name for name, _ in model.named_modules()]
        assert all(any(name.endswith(ending) for name in modules) for ending in theirs)


@pytest.mark.parametrize(("interval", "forwards"), [(0, [1, 1, 1]), (1, [2, 2, 2]), (2, [2, 1, 2])])
def test_recomputed_blocks_run_twice_a_micro_batch_and_give_the_same(interval, forwards):
    model, tokens = build_model(settings(num_hidden_layers=3), 16, seed=1).train(), torch.arange(16)[None] % 64
    expected = torch.autograd.grad(model(tokens, use_cache=False).logits.square().sum(), list(model.parameters()))
    recompute_activations(model.model.layers, interval)
    counts = [0] * 3
    for number, block in enumerate(model.model.layers):

        def counted(*arguments, forward=block.forward, number=number, **options):
            counts[number] += 1
            return forward(*arguments, **options)

        block.forward = counted
    found = torch.autograd.grad(model(tokens, use_cache=False).logits.square().sum(), list(model.parameters()))
    assert counts == forwards
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def planned(plan: dict, name: str) -> str | None:
    return next((kind for kind, endings in plan.items() if name.endswith(endings)), None)


def test_parameter_groups():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))

    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(6, 4)
            self.linear = torch.nn.Linear(4, 4)
            self.norm = Norm()
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)

    toy = Toy()
    groups = {group["name"]: group for group in parameter_groups(toy, 0.1)}
    names = {id(p): name for name, p in toy.named_parameters()}
    assert [names[id(p)] for p in groups["decay"]["params"]] == ["linear.weight"]
    assert [names[id(p)] for p in groups["no_decay"]["params"]] == ["embedding.weight", "linear.bias", "norm.gain"]
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)
    optimizer = torch.optim.AdamW(list(groups.values()), lr=0.1)
    before = {name: p.detach().clone() for name, p in toy.named_parameters()}
    for parameter in toy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(toy.linear.weight, before["linear.weight"] * (1 - 0.1 * 0.1))
    assert torch.equal(toy.norm.gain, before["norm.gain"]) and torch.equal(toy.head.weight, before["embedding.weight"])


def test_untied_head_decays_and_embedding_does_not():
    model = build_model(settings(tie_word_embeddings=False), 16, seed=1)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: [names[id(p)] for p in g["params"]] for g in parameter_groups(model, 0.1)}
    assert "lm_head.weight" in groups["decay"] and "model.embed_tokens.weight" in groups["no_decay"]
    assert len(groups["decay"]) + len(groups["no_decay"]) == len(names)


@pytest.mark.parametrize(("shift", "low"), [(1, True), (2, False), (0, False)])
def test_labels_are_shifted_exactly_once(tmp_path, shift, low):
    """A model that predicts token t+1 from token t has no loss; one that predicts t or t+2 has."""
    prefix = write_tokens(tmp_path / "a", [np.arange(91) % 9], 9)
    stream = SampleStream(DataSpec(((str(prefix), 1.0),), 9, "epoch", 0, 10, 9))
    batch = collate(stream, np.arange(4).reshape(1, 4))
    inputs, labels = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.labels[0])
    logits = 20.0 * torch.nn.functional.one_hot((inputs + shift) % 9, 9)
    loss = token_loss_sum(logits, labels).item() / batch.tokens
    assert loss < 1e-3 if low else loss > 5


def test_ignored_labels_count_nowhere_and_real_end_tokens_do():
    # Row 5 6 0 7 0 | 0 0: the end token 0 is also the padding. Ignoring goes by position, not by value.
    labels = torch.tensor([[6, 0, 7, 0, -100, -100]])
    logits = torch.zeros(1, 6, 8)
    assert int((labels != -100).sum()) == 4
    assert token_loss_sum(logits, labels).item() == pytest.approx(4 * np.log(8))


def test_every_family_has_the_whole_interface():
    for name in SMALL:
        module = models.family(name)
        assert all(hasattr(module, part) for part in models.INTERFACE)
        assert module.Settings().family == name
    assert set(models.FAMILIES) | {EXAMPLE} == set(SMALL)


def test_a_family_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models" / "half.py").write_text("Settings = check = hf_config = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = "model.family 'my_models.half' lacks parameters_by_part, .*; see docs/add_a_model.md"
    with pytest.raises(InputError, match=message):
        models.family("my_models.half")
    with pytest.raises(InputError, match="'my_models.other' can't be imported: No module named 'my_models.other'"):
        models.family("my_models.other")
    with pytest.raises(InputError, match="'qwen3-moe' is unknown; did you mean qwen3_moe?"):
        models.family("qwen3-moe")


def test_the_documentations_example_is_as_described(tiny):
    text = (REPOSITORY / "docs" / "add_a_model.md").read_text()
    lines = sum(len((REPOSITORY / "docs" / link).read_text().splitlines()) for link in re.findall(r"\]\((.*?)\)", text))
    assert lines <= 80 and f"{lines} lines together" in text
    section = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    tiny.write_text(yaml.safe_dump({**yaml.safe_load(tiny.read_text()), **section}))
    model = build_model(load_recipe(tiny)[0].model, 16, seed=1)
    assert "Relu2MLP" in str(model) and "gate_proj" not in str(model)


def test_position_scaling_in_a_recipe(tiny):
    text = yaml.safe_load(tiny.read_text())
    text["model"]["rope_scaling"] = dict(LLAMA_3_SCALING)
    tiny.write_text(yaml.safe_dump(text, sort_keys=False))
    recipe, _ = load_recipe(tiny)
    assert recipe.model.rope_scaling == LLAMA_3_SCALING
    assert llama.hf_config(recipe.model, 16).rope_parameters == {**LLAMA_3_SCALING, "rope_theta": 10000.0}
    tiny.write_text(tiny.read_text().replace("factor: 8.0", "factor: -8.0"))
    line = next(n for n, text in enumerate(tiny.read_text().splitlines(), 1) if " factor:" in text)
    with pytest.raises(InputError, match=f"tiny.yaml:{line}: model.rope_scaling.factor -8.0 must be a positive number"):
        load_recipe(tiny)
