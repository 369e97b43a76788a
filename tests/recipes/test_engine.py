"""ZeRO 0-3 and every batch split against plain torch, non-finite steps, checkpoints and exports: one launch of two ranks."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from recipes import evaluate_model, export_hf, generate_text
from recipes.training import checkpoint_files
from recipes.training.recipe_file import load_recipe
from tests.conftest import launch, make_tiny
from tests.recipes.families import EXAMPLE, SMALL

pytestmark = pytest.mark.slow
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    recipe = yaml.safe_load(make_tiny(folder).read_text())
    for family, shape in SMALL.items():
        (folder / f"{family}.yaml").write_text(yaml.safe_dump({**recipe, "model": {"family": family, **shape}}))
    program = os.path.join(os.path.dirname(__file__), "engine_checks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", program]
    finished = launch([*command, folder], limit_s=300)
    assert finished.code == 0, finished.output
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_equals_plain_torch(results, stage, tied):
    ours, plain = results[f"stage {stage} {tied}"], results[f"reference {tied}"]
    for key in ("loss", "grad_norm", "lr"):
        assert ours[key] == pytest.approx(plain[key], rel=1e-4), key
    assert min(plain["grad_norm"]) > 0.5  # clipping is active, so a wrong gradient scale shows
    assert len(set(ours["tokens"])) > 1  # the batches differ in tokens, so a mean of means shows


@pytest.mark.parametrize("family", SMALL)
def test_rotary_tables_and_other_buffers_stay_in_fp32(results, family):
    assert results[f"buffers {family}"] == {f"stage {stage}": [True, True] for stage in (0, 1, 3)}


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("stage", STAGES)
def test_every_family_equals_plain_torch_at_every_stage(results, stage, family):
    ours, plain = results[f"stage {stage} {family}"], results[f"reference {family}"]
    for key in ("loss", "grad_norm", "lr"):
        assert ours[key] == pytest.approx(plain[key], rel=1e-4), key
    assert min(plain["grad_norm"]) > 0.5  # clipping is active


@pytest.mark.parametrize("family", SMALL)
def test_a_run_starts_from_hugging_face_weights_at_any_stage(results, family):
    started = results[f"started from {family}"]
    assert max(started["stage 0"] + started["stage 3"]) < 1e-5
    # With more vocabulary rows than the source: the same drawn rows on every rank and stage.
    assert len({*started["stage 0 padded"], *started["stage 3 padded"]}) == 1


@pytest.mark.parametrize("micro", [1, 4])
def test_every_micro_batch_and_accumulation_gives_the_same_steps(results, micro):
    for key in ("loss", "grad_norm", "lr"):
        assert results[f"micro {micro}"][key] == pytest.approx(results["reference tied"][key], rel=1e-5), key


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_stays_near(results, stage):
    assert results[f"stage {stage} bf16"]["loss"] == pytest.approx(results["reference tied"]["loss"], rel=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_counts_the_steps_of_the_run_alone(folder, stage):
    for kind in ("tied", "bf16"):
        manifest = checkpoint_files.read_manifest(folder / "runs" / f"s{stage}_{kind}" / "checkpoints" / "global_step4")
        assert manifest["optimizer_steps"] == 4, kind


@pytest.mark.parametrize("stage", STAGES)
def test_loss_and_gradient_are_weighted_by_tokens(results, stage):
    # 2 tokens of loss 1 and 8 of loss 3: 2.6, not 2.0; w = 1 - 2.6.
    one = results[f"one parameter, stage {stage}"]
    assert (one["loss"], one["grad_norm"], one["w"]) == pytest.approx((2.6, 2.6, -1.6), rel=1e-6)
    assert one["flags"] == [False, True]  # rank 1 alone raised its second; rank 0 knows


@pytest.mark.parametrize("stage", STAGES)
def test_masked_micro_batches_are_no_alarm(results, stage):
    part, nothing = results[f"a rank without labels, stage {stage}"], results[f"no labels at all, stage {stage}"]
    assert (part["loss"], part["grad_norm"], part["w"], part["applied"]) == (3.0, 3.0, -2.0, True)
    assert (nothing["loss"], nothing["grad_norm"], nothing["w"], nothing["applied"]) == (0.0, 0.0, 1.0, True)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_keeps_what_is_smaller_than_its_step(results, stage):
    moved = results["moves in bf16"][f"stage {stage}"]
    assert moved["master"] == pytest.approx(1 - 100 * 6e-4, rel=1e-3) and moved["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_many_micro_batches_in_bf16_add_up(results, stage):
    assert results["many micro batches"][f"stage {stage}"] == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_draw_other_random_numbers_and_go_on_with_theirs_on_resume(results, stage):
    ours = results[f"stage {stage} dropout"]
    assert len(set(ours["drawn"])) == 2 and ours["drawn"] == ours["drawn_again"]
    assert ours["loss"] != results[f"stage {stage} tied"]["loss"]  # dropout acts


def test_initial_weights_do_not_depend_on_the_stage(results):
    for case in ("tied", "untied", *SMALL):
        assert len({h for stage in STAGES for h in results[f"stage {stage} {case}"]["hashes"][0]}) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_stay_equal_and_change(results, stage):
    hashes = results[f"stage {stage} tied"]["hashes"]
    assert all(a == b for a, b in hashes) and len({a for a, _ in hashes}) == len(hashes)


@pytest.mark.parametrize("kind", ["tied", "untied", "dropout", "bf16", "poisoned", "poisoned bf16", *SMALL])
@pytest.mark.parametrize("stage", STAGES)
def test_resuming_half_way_is_bitwise_the_same_at_every_stage(results, stage, kind):
    ours = results[f"stage {stage} {kind}"]
    straight = [list(values) for values in zip(ours["loss"], ours["grad_norm"], ours["lr"], strict=True)]
    assert ours["resumed"] == straight[2:]
    assert ours["resumed_hashes"] == ours["hashes"][3:]
    assert ours["resumed_progress"] == ours["progress"]


@pytest.mark.parametrize("kind", ["poisoned", "poisoned bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_on_one_rank_skips_the_update_everywhere(results, stage, kind):
    ours = results[f"stage {stage} {kind}"]
    assert ours["applied"] == [True, False, True, True] and ours["finite"]
    assert ours["hashes"][2] == ours["hashes"][1] != ours["hashes"][3]
    assert not np.isfinite(ours["loss"][1])
    # The rate follows updates: the skipped step's rate is used again.
    clean = results["reference tied"]["lr"]
    assert ours["lr"] == pytest.approx([clean[0], clean[1], clean[1], clean[2]])
    assert (ours["progress"]["step"], ours["progress"]["applied_updates"], ours["progress"]["skipped_steps"]) == (
        4,
        3,
        1,
    )


@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("stage", STAGES)
def test_export_gives_the_logits_of_training(folder, tmp_path, stage, tied):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    run, output = folder / "runs" / f"s{stage}_{tied}", tmp_path / "export"
    export_hf.main([str(run), "--output", str(output)])
    model = AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits.numpy()
    assert np.abs(logits - np.load(folder / f"s{stage}_{tied}.npy")).max() < 1e-5
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == (tied == "tied")
    with safe_open(output / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert all(0 not in file.get_slice(name).get_shape() for name in names)
    assert ("lm_head.weight" in names) == (tied == "untied") and len(names) == len(set(names))


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("stage", STAGES)
def test_every_familys_export_gives_the_logits_of_training(folder, tmp_path, stage, family):
    from transformers import AutoModelForCausalLM

    output = tmp_path / "export"
    export_hf.main([str(folder / "runs" / f"s{stage}_{family}"), "--output", str(output)])
    model, loading = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits.numpy()
    assert np.abs(logits - np.load(folder / f"s{stage}_{family}.npy")).max() < 1e-5


def test_the_routing_bias_is_kept_from_source_to_export(folder, tmp_path):
    from safetensors.torch import load_file

    export_hf.main([str(folder / "runs" / "biased"), "--output", str(tmp_path / "export"), "--dtype", "bf16"])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(tmp_path / "export" / "model.safetensors")[name]
    assert bias.dtype == torch.float32 and torch.equal(bias, torch.arange(8) / 8)


def test_the_examples_export_is_loaded_without_this_repository(folder, tmp_path):
    """Its modeling file goes along, and a process that can't import docs.examples or recipes gives the same logits."""
    export_hf.main([str(folder / "runs" / f"s1_{EXAMPLE}"), "--output", str(tmp_path / "export")])
    program = (
        "import sys, numpy, torch, transformers; model = transformers.AutoModelForCausalLM.from_pretrained("
        "'export', trust_remote_code=True); numpy.save('logits.npy', model(torch.arange(16)[None]).logits.detach());"
        "assert not any(name.startswith(('recipes', 'docs')) for name in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    logits = np.load(tmp_path / "logits.npy")
    assert np.abs(logits - np.load(folder / f"s1_{EXAMPLE}.npy")).max() < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_export_can_keep_the_fp32_master_weights(folder, tmp_path, stage):
    from safetensors.torch import load_file

    run = folder / "runs" / f"s{stage}_bf16"
    export_hf.main([str(run), "--output", str(tmp_path / "bf16")])
    export_hf.main([str(run), "--output", str(tmp_path / "fp32"), "--dtype", "fp32"])
    low, full = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "fp32"))
    assert all(value.dtype == torch.bfloat16 for value in low.values())
    assert all(torch.equal(full[name].bfloat16(), low[name]) for name in full)
    assert any(not torch.equal(full[name].bfloat16().float(), full[name]) for name in full)


def test_export_refuses_to_overwrite_and_another_model(folder, tmp_path):
    from data_prep.errors import InputError

    run, output = folder / "runs" / "s1_tied", tmp_path / "export"
    export_hf.main([str(run), "--output", str(output)])
    with pytest.raises(InputError, match="an export of step 4"):
        export_hf.main([str(run), "--output", str(output)])
    recipe, _ = load_recipe(run / "recipe.yaml", ["model.hidden_size=64"])
    with pytest.raises(InputError, match="does not hold this recipe's model"):
        export_hf.export(recipe, run / "checkpoints" / "global_step4", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(InputError, match="has no tokenizer.json"):
        generate_text.load_export(output)


def test_master_weights_of_a_fused_optimizer_are_read(folder, tmp_path):
    """Fused Adam, which needs a GPU, keeps each group flat; the same checkpoint rewritten that way exports the same."""
    run = folder / "runs" / "s0_bf16"
    recipe, _ = load_recipe(run / "recipe.yaml")
    shutil.copytree(run / "checkpoints" / "global_step4", tmp_path / "flat" / "global_step4")
    listed = export_hf.full_weights(recipe, run / "checkpoints" / "global_step4", tmp_path)
    file = tmp_path / "flat" / "global_step4" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    optimizer = state["optimizer"]
    optimizer["fp32_groups_flat"] = [torch.cat([t.flatten() for t in g]) for g in optimizer.pop("fp32_groups")]
    moments, groups = optimizer["optimizer_state_dict"]["state"], optimizer["optimizer_state_dict"]["param_groups"]
    optimizer["optimizer_state_dict"]["state"] = {
        number: {
            key: torch.cat([moments[index][key].flatten() for index in group["params"]])
            for key in ("exp_avg", "exp_avg_sq")
        }
        for number, group in enumerate(groups)
    }
    for number, group in enumerate(groups):
        group["params"] = [number]
    torch.save(state, file)
    flat = export_hf.full_weights(recipe, tmp_path / "flat" / "global_step4", tmp_path)
    assert all(torch.equal(flat[key], listed[key]) for key in listed)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_weights_by_tokens(tmp_path, batch_size):
    """Three tokens of loss 1.0 and one of loss 3.0: 1.5, not 2.0; the short last sample counts by its tokens."""
    from types import SimpleNamespace

    from data_prep.token_file import TokenFile
    from tests.conftest import write_tokens

    tokens = TokenFile(write_tokens(tmp_path / "a", [[0, 1, 1, 1, 2]]))

    def model(input_ids, use_cache):
        # Probability of the true next token: e^-1 for token 1, e^-3 for token 2.
        chosen = torch.tensor([-30.0, -1.0, -3.0])
        rest = torch.log(1 - chosen[1:].exp().sum())
        return SimpleNamespace(logits=torch.stack([rest, *chosen[1:]]).expand(*input_ids.shape, 3))

    model.device = torch.device("cpu")
    loss, count = evaluate_model.evaluate(model, tokens, 3, batch_size)
    assert count == 4 and loss == pytest.approx(1.5, rel=1e-5)


def test_manifest_tells_what_the_checkpoint_is(folder):
    manifest = checkpoint_files.read_manifest(folder / "runs" / "s2_tied" / "checkpoints" / "global_step4")
    assert (manifest["step"], manifest["consumed_samples"], manifest["applied_updates"]) == (4, 32, 4)
    assert manifest["layout"]["zero_stage"] == 2 and manifest["layout"]["world"] == 2
    assert {"random_state_rank_0.pt", "random_state_rank_1.pt", "mp_rank_00_model_states.pt"} <= set(manifest["files"])
