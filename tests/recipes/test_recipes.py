"""The shipped recipes and their ds_configs: counts to the digit, published shapes, agreement, alignment."""

import json
import re

import pytest
import yaml

from recipes import models
from recipes.training.recipe_file import load_recipe
from recipes.training.settings import REPOSITORY

# name: (parameters, parameters that a token uses)
COUNTS = {
    "demo": (3_148_224, 3_148_224),
    "125m": (122_702_592, 122_702_592),
    "350m": (358_663_168, 358_663_168),
    "1b3": (1_315_014_656, 1_315_014_656),
    "1b3_tp2_pp2": (1_315_014_656, 1_315_014_656),
    "3b": (3_212_749_824, 3_212_749_824),
    "8b": (8_030_261_248, 8_030_261_248),
    "13b": (14_001_525_760, 14_001_525_760),
    "34b": (35_321_028_608, 35_321_028_608),
    "70b": (70_553_706_496, 70_553_706_496),
    "405b": (405_853_388_800, 405_853_388_800),
    "demo_moe": (6_696_768, 2_715_456),
    "30b_a3b": (30_532_122_624, 3_353_032_704),
    "235b_a22b": (235_093_634_560, 22_190_763_520),
    "671b_a37b": (671_026_404_352, 37_552_282_624),
    "qwen3_moe_535b": (535_026_158_080, 23_058_926_080),
}
LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
QWEN_3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "mlp_only_layers": [],
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def shape(hidden_size, num_hidden_layers, num_attention_heads, **more):
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        **more,
    }


# From the config.json of each model on the Hugging Face hub. Left out are the settings of later stages of training (longer
# positions, Llama 3.1's and 3.2's rope_scaling) and, of Llama 2's generation, the vocabulary of 32,000.
PUBLISHED = {
    "3b": shape(3072, 28, 24, intermediate_size=8192, tie_word_embeddings=True, **LLAMA_3),  # Llama-3.2-3B
    "8b": shape(4096, 32, 32, intermediate_size=14336, tie_word_embeddings=False, **LLAMA_3),  # Llama-3.1-8B
    "70b": shape(8192, 80, 64, intermediate_size=28672, tie_word_embeddings=False, **LLAMA_3),  # Llama-3.1-70B
    "405b": shape(16384, 126, 128, intermediate_size=53248, tie_word_embeddings=False, **LLAMA_3),  # Llama-3.1-405B
    "13b": shape(5120, 40, 40, intermediate_size=13824, num_key_value_heads=40, rms_norm_eps=1e-5),  # Llama-2-13b-hf
    "34b": shape(8192, 48, 64, intermediate_size=22016, num_key_value_heads=8, rms_norm_eps=1e-5),  # CodeLlama-34b-hf
    "30b_a3b": shape(2048, 48, 32, moe_intermediate_size=768, **QWEN_3),  # Qwen3-30B-A3B
    "235b_a22b": shape(4096, 94, 64, moe_intermediate_size=1536, **QWEN_3),  # Qwen3-235B-A22B
    "671b_a37b": shape(  # DeepSeek-V3-Base
        7168,
        61,
        128,
        vocab_size=129280,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
}
# Parameters of the public checkpoints, each with its own vocabulary.
PUBLISHED_COUNTS = {
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
    "13b": 13_015_864_320,
    "34b": 33_743_970_304,
    "30b_a3b": 30_532_122_624,
    "235b_a22b": 235_093_634_560,
    # Without layer 61, which predicts further tokens, and without the routing biases, which are buffers.
    "671b_a37b": 671_026_419_200 - 58 * 256,
}
# Ids of each tokenizer on the hub.
TOKENIZERS = {
    "HuggingFaceTB/SmolLM2-1.7B": 49152,
    "marin-community/marin-tokenizer": 128256,
    "Qwen/Qwen3-8B-Base": 151669,
    "deepseek-ai/DeepSeek-V3-Base": 128815,
}


def text(name: str) -> str:
    return (REPOSITORY / "recipes" / f"{name}.yaml").read_text()


@pytest.fixture(scope="module")
def recipes():
    return {name: load_recipe(name)[0] for name in COUNTS}


def test_every_recipe_is_here():
    assert {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")} == set(COUNTS)
    stems = {path.name.split(".")[0] for path in (REPOSITORY / "ds_configs").glob("*.json")}
    assert stems == set(COUNTS)


def test_counts(recipes):
    counted = {}
    for name, recipe in recipes.items():
        family = models.family(recipe.model.family)
        counted[name] = (family.parameter_count(recipe.model), family.active_parameter_count(recipe.model))
    assert counted == COUNTS


def test_names(recipes):
    assert {name: recipe.name for name, recipe in recipes.items()} == {name: name for name in COUNTS}


def test_published_shapes(recipes):
    for name, published in PUBLISHED.items():
        settings = recipes[name].model
        assert {key: getattr(settings, key) for key in published} == published, name


def test_published_counts(recipes):
    vocabularies = {"13b": 32000, "34b": 32000}
    for name, published in PUBLISHED_COUNTS.items():
        settings = recipes[name].model
        overrides = [f"model.vocab_size={vocabularies.get(name, settings.vocab_size)}"]
        settings = load_recipe(name, overrides)[0].model
        assert models.family(settings.family).parameter_count(settings) == published, name


def test_counts_are_those_of_the_models_that_are_built(recipes):
    from tests.recipes.families import meta_model

    for name, recipe in recipes.items():
        parameters = meta_model(recipe.model, recipe.data.seq_length).parameters()
        assert sum(parameter.numel() for parameter in parameters) == COUNTS[name][0], name


def test_all_configs_of_a_size_agree_on_the_optimizer():
    agreed = {}
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        config = json.loads(path.read_text())
        params = {key: config["optimizer"]["params"][key] for key in ("lr", "betas", "eps", "weight_decay")}
        size = path.name.split(".")[0].removesuffix("_tp2_pp2")
        stated = (config["optimizer"]["type"], params, config["gradient_clipping"])
        assert agreed.setdefault(size, stated) == stated, path.name
    assert len(agreed) == len(COUNTS) - 1


def test_the_layout_experiment_trains_what_1b3_does(recipes):
    for key in ("model", "data", "schedule", "global_batch_size", "seed", "validation"):
        assert getattr(recipes["1b3_tp2_pp2"], key) == getattr(recipes["1b3"], key)


def test_recipes_are_aligned():
    """Two recipes differ in values alone: the same keys, in the same order, with the same comments."""
    keys, comments = {}, {}
    for name in COUNTS:
        recipe = yaml.safe_load(text(name))
        order = [(key, list(value) if isinstance(value, dict) else None) for key, value in recipe.items()]
        order = [(key, None if key in ("model", "schedule") else inside) for key, inside in order]
        assert keys.setdefault("all", order) == order, name
        inside = list(recipe["model"])
        assert keys.setdefault(recipe["model"]["family"], inside) == inside, name
        for key, comment in re.findall(r"^ *(\w+):[^#\n]*(#.*)$", text(name), re.MULTILINE):
            if (key, comment) not in comments.setdefault(key, [(key, comment)]):
                comments[key].append((key, comment))
    # `files` and `every_steps` stand in two sections each, `tokenizer` names the demo's directory.
    assert {key for key, found in comments.items() if len(found) > 1} == {"every_steps", "samples", "tokenizer"}


def test_each_recipe_names_its_corpus_and_a_tokenizer_that_fits(recipes):
    for name, recipe in recipes.items():
        if name.startswith("demo"):
            assert "bash launch/demo.sh" in text(name)
            continue
        head = " ".join(line.lstrip("# ") for line in text(name).splitlines() if line.startswith("#"))
        command = re.search(r"python -m data_prep\.corpora\.\w+ --output (\S+)(?: --tokenizer (\S+))?", head)
        folder, tokenizer = command.groups()
        written = {str(REPOSITORY / folder / f"{side}_text_document") for side in ("train", "validation")}
        assert {recipe.data.files[0]["path"], recipe.data.validation_files[0]["path"]} == written, name
        assert recipe.data.tokenizer == (tokenizer or "marin-community/marin-tokenizer"), name
        assert TOKENIZERS[recipe.data.tokenizer] <= recipe.model.vocab_size, name
