import dataclasses
import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.errors import InputError
from recipes import models
from recipes.models.build import build_model
from recipes.models.hf_weights import check_config
from recipes.training.recipe_file import load_recipe
from tests.recipes.families import SMALL, small


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{family: (directory, model)}: checkpoints as save_pretrained writes them, with weights of seed 5."""
    folder, sources = tmp_path_factory.mktemp("sources"), {}
    for family in SMALL:
        model = build_model(small(family, rope_theta=5000.0), 32, seed=5)
        if family == "deepseek_v3":
            model.model.layers[1].mlp.gate.e_score_correction_bias += torch.arange(8) / 8
        model.save_pretrained(folder / family, max_shard_size="20kB")
        sources[family] = (folder / family, model)
    return sources


def started_from(directory, family, **changes):
    return build_model(small(family, rope_theta=5000.0, init_from=str(directory), **changes), 16, seed=1)


@pytest.mark.parametrize("family", SMALL)
def test_weights_are_the_sources(sources, family):
    directory, source = sources[family]
    assert (directory / "model.safetensors.index.json").is_file()
    model = started_from(directory, family)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_larger_vocabulary_keeps_drawn_rows_and_says_so(sources, caplog):
    directory, source = sources["llama"]
    with caplog.at_level(logging.INFO, logger="recipes"):
        model = started_from(directory, "llama", vocab_size=70)
    drawn = build_model(small("llama", vocab_size=70), 16, seed=1)
    for ours, theirs, fresh in zip(*(embeddings(m) for m in (model, source, drawn)), strict=True):
        assert torch.equal(ours[:64], theirs) and torch.equal(ours[64:], fresh[64:])
    assert "lm_head.weight: the last 6 rows are not in model.init_from and stay as drawn" in caplog.text


def embeddings(model):
    return model.model.embed_tokens.weight, model.lm_head.weight


def test_tied_weights_and_old_buffers_are_passed_over(tmp_path):
    source = build_model(small("llama", tie_word_embeddings=True), 32, seed=5)
    source.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(small("llama", tie_word_embeddings=True, init_from=str(tmp_path)), 16, seed=1)
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


DOWN = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model.norm.weight": None}, "1 missing: model.norm.weight"),
        ("llama", {"model.layers.2.mlp.up_proj.weight": (3, 4)}, "1 unexpected: model.layers.2.mlp.up_proj.weight"),
        ("llama", {"model.norm.weight": (31,)}, "1 of another shape: model.norm.weight (31,) instead of (32,)"),
        ("llama", {"lm_head.weight": (65, 32)}, "lm_head.weight (65, 32) instead of (64, 32)"),
        ("qwen3_moe", {DOWN.format(2): None}, "1 missing: model.layers.1.mlp.experts.down_proj"),
        ("qwen3_moe", {DOWN.format(2): (32, 9)}, "experts.down_proj (4, 32, 9) instead of (4, 32, 16)"),
        ("qwen3_moe", {DOWN.format(4): (32, 16)}, f"1 unexpected: {DOWN.format(4)}"),
        ("deepseek_v3", {"model.layers.1.mlp.gate.e_score_correction_bias": None}, "e_score_correction_bias"),
    ],
)
def test_every_tensor_is_checked(tmp_path, family, change, message):
    build_model(small(family), 16, seed=5).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    where = re.escape(f"model.init_from {tmp_path} does not hold this model's weights: ")
    with pytest.raises(InputError, match=where + ".*" + re.escape(message)):
        build_model(small(family, init_from=str(tmp_path)), 16, seed=1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rms_norm_eps": 1e-3, "num_key_value_heads": 4}, "num_key_value_heads 2 (recipe: 4), "),
        ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps 1e-05 (recipe: 0.001)"),
        ("llama", {"rope_theta": 7.0}, "rope_parameters {'rope_theta': 5000.0, 'rope_type': 'default'} (recipe: {"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 2 (recipe: 1)"),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, "routed_scaling_factor 2.5 (recipe: 1.0)"),
    ],
)
def test_settings_that_contradict_the_sources_config_are_refused(sources, family, changes, message):
    directory = sources[family][0]
    with pytest.raises(
        InputError, match=re.escape(f"{directory} contradicts the recipe: ") + ".*" + re.escape(message)
    ):
        build_model(small(family, **{"rope_theta": 5000.0, "init_from": str(directory), **changes}), 16, seed=1)


def test_a_width_that_no_layer_has_does_not_contradict(sources, tmp_path):
    """Qwen3-MoE's public configs give a dense width, though they have no dense layer."""
    for file in sources["qwen3_moe"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 6144}))
    assert started_from(tmp_path, "qwen3_moe").config.num_experts == 4


LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_1["original_max_position_embeddings"] = 8192
YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN["original_max_position_embeddings"] = 4096


@pytest.mark.parametrize(
    ("family", "shape", "published"),
    [
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA_3_1}, {"rope_theta": 5e5, "rope_scaling": LLAMA_3_1}),
        ("qwen3", {}, {"rope_theta": 1000000, "rope_scaling": None, "max_window_layers": 36, "sliding_window": None}),
        ("qwen3_moe", {}, {"rope_theta": 1000000.0, "intermediate_size": 6144, "decoder_sparse_step": 1}),
        (
            "deepseek_v3",
            {"rope_scaling": {"rope_type": "yarn", **YARN}},
            {
                "rope_theta": 10000,
                "rope_scaling": {"type": "yarn", **YARN},
                "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
                "num_key_value_heads": 4,
                "num_nextn_predict_layers": 1,
                "topk_method": "noaux_tc",
            },
        ),
    ],
)
def test_public_configs_are_read_in_their_older_form(tmp_path, family, shape, published):
    """config.json as the models' publishers wrote it, before transformers 5 gathered the rotary settings in one key."""
    chosen = small(family, **shape)
    older = models.family(family).hf_config(chosen, 16).to_dict()
    del older["rope_parameters"], older["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**older, **published}))
    check_config(chosen, 4096, tmp_path)
    with pytest.raises(InputError, match="contradicts the recipe: rope_parameters"):
        check_config(dataclasses.replace(chosen, rope_theta=7.0), 4096, tmp_path)


def test_sources_that_are_none(sources, tmp_path):
    with pytest.raises(InputError, match="is a qwen3 model, model.family llama builds a llama one"):
        started_from(sources["qwen3"][0], "llama")
    with pytest.raises(InputError, match="its config.json can't be read"):
        started_from(tmp_path, "llama")
    (tmp_path / "config.json").write_text((sources["llama"][0] / "config.json").read_text())
    with pytest.raises(InputError, match="has neither model.safetensors nor model.safetensors.index.json"):
        started_from(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}})
    )
    with pytest.raises(InputError, match="lacks a.safetensors, which its model.safetensors.index.json names"):
        started_from(tmp_path, "llama")
    with pytest.raises(InputError, match="/nowhere is neither a directory nor a hub name"):
        started_from("/nowhere", "llama")


def test_a_name_that_the_hub_does_not_give_is_told(monkeypatch):
    import huggingface_hub

    def refuse(name, **patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"no connection for {name}\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        InputError, match="Qwen/Qwen3-0.6B is no directory here and can't be downloaded: no connection for Q"
    ):
        started_from("Qwen/Qwen3-0.6B", "qwen3")


def test_a_hub_name_is_loaded_from_its_download(sources, monkeypatch):
    import huggingface_hub

    directory, source = sources["qwen3"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **patterns: str(directory))
    model = started_from("Qwen/Qwen3-0.6B", "qwen3")
    assert torch.equal(model.model.norm.weight, source.model.norm.weight)


def test_init_from_is_relative_to_the_recipe_where_it_is_a_directory(tiny):
    (tiny.parent / "source").mkdir()
    text = tiny.read_text().replace("model:\n", "model:\n  init_from: source\n")
    tiny.write_text(text)
    assert load_recipe(tiny)[0].model.init_from == str(tiny.parent / "source")
    assert load_recipe(tiny, ["model.init_from=Qwen/Qwen3-0.6B"])[0].model.init_from == "Qwen/Qwen3-0.6B"
    assert load_recipe(tiny, ["model.init_from=null"])[0].model.init_from is None
