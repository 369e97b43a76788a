"""From any layout to any other: one launch of four ranks, one of two, and whole runs that go on with another number of ranks."""

import json
import sys

import numpy as np
import pytest
import torch
import yaml

from data_prep.errors import InputError
from data_prep.loader import IGNORED_LABEL, collate
from recipes import convert, export_hf
from recipes.models.build import persistent_buffers
from recipes.training import checkpoint_files
from recipes.training.recipe_file import load_recipe
from tests.conftest import launch, launch_run, make_tiny, metrics, publish_checkpoint
from tests.recipes.families import SMALL, meta_model

TENSOR = "ds.tensor_parallel.autotp_size=2"
SEQUENCE = "ds.sequence_parallel_size=2"
PIPELINE = "pipeline.stages=2"
EXPERT = ["ds.expert_parallel." + key for key in ("enabled=true", "autoep_size=2", "use_grouped_mm=false")]
TORCH = "ds.checkpoint.writer=null"  # DeepSpeed's own engines
PYTHON = ["ds.checkpoint.writer.type=python", "ds.checkpoint.writer.data_parallel=replica"]
BF16 = "ds.bf16.enabled=true"


def stage(number: int, *overrides: str) -> list[str]:
    return [f"ds.zero_optimization.stage={number}", *overrides]


# name: (family, overrides); "4 ...": on four ranks.
LAYOUTS = {
    **{f"zero {n}": ("llama", stage(n)) for n in range(4)},
    **{f"tensor {n}": ("llama", stage(n, TENSOR)) for n in (0, 2)},
    **{f"pipeline {n}": ("llama", stage(n, PIPELINE)) for n in (0, 1)},
    "sequence": ("llama", stage(3, SEQUENCE)),
    "tensor own": ("llama", stage(2, TENSOR, TORCH)),
    "sequence own": ("llama", stage(3, SEQUENCE, TORCH)),
    "python own": ("llama", stage(1, *PYTHON)),
    **{f"bf16 {n}": ("llama", stage(n, BF16)) for n in (0, 1, 3)},
    "bf16 pipeline": ("llama", stage(1, BF16, PIPELINE, "ds.data_types.grad_accum_dtype=fp32")),
    "moe": ("qwen3_moe", stage(1)),
    **{f"expert {n}": ("qwen3_moe", stage(n, *EXPERT)) for n in range(4)},
    "deepseek": ("deepseek_v3", stage(1)),
    "deepseek expert": ("deepseek_v3", stage(2, *EXPERT)),
    "deepseek pipeline": ("deepseek_v3", stage(0, PIPELINE)),
    "4 zero": ("llama", stage(2)),
    **{f"4 pipeline tensor {n}": ("llama", stage(n, PIPELINE, "pipeline.tensor_parallel_size=2")) for n in (0, 1)},
    **{f"4 expert {n}": ("qwen3_moe", stage(n, *EXPERT)) for n in (0, 3)},
}
# (saved by, resumed by)
PAIRS = [(f"zero {a}", f"zero {b}") for a in range(4) for b in range(4) if a != b] + [
    ("4 zero", "zero 1"),
    ("4 zero", "4 pipeline tensor 1"),
    ("4 pipeline tensor 1", "4 pipeline tensor 0"),
    ("4 pipeline tensor 0", "4 zero"),
    ("4 pipeline tensor 1", "tensor 2"),
    ("4 pipeline tensor 0", "pipeline 1"),
    ("tensor 2", "pipeline 0"),
    ("tensor 0", "zero 1"),
    ("pipeline 1", "tensor 2"),
    ("pipeline 0", "tensor 0"),
    ("zero 0", "sequence"),
    ("tensor own", "tensor own"),
    ("tensor 2", "tensor own"),
    ("sequence own", "sequence own"),
    ("python own", "zero 3"),
    ("zero 2", "python own"),
    ("sequence", "pipeline 1"),
    ("bf16 1", "bf16 3"),
    ("bf16 3", "bf16 pipeline"),
    ("bf16 pipeline", "bf16 1"),
    ("bf16 0", "bf16 1"),
    ("bf16 1", "bf16 0"),
    ("4 expert 0", "4 expert 3"),
    ("4 expert 3", "expert 0"),
    ("expert 0", "expert 2"),
    ("expert 1", "moe"),
    ("expert 2", "expert 3"),
    ("moe", "expert 1"),
    ("expert 3", "moe"),
    ("deepseek", "deepseek expert"),
    ("deepseek expert", "deepseek pipeline"),
    ("deepseek pipeline", "deepseek"),
]


def ranks_of(name: str) -> int:
    return 4 if name.startswith("4") else 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    recipe = yaml.safe_load(make_tiny(folder).read_text())
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        shape = {**SMALL[family], "tie_word_embeddings": True} if family == "llama" else SMALL[family]
        (folder / f"{family}.yaml").write_text(yaml.safe_dump({**recipe, "model": {"family": family, **shape}}))
    return folder


@pytest.fixture(scope="module")
def results(folder):
    results = {}
    for ranks in (4, 2):  # four first: two resume some of their checkpoints
        cases = [{"name": n, "family": f, "overrides": o} for n, (f, o) in LAYOUTS.items() if ranks_of(n) == ranks]
        for a, b in PAIRS:
            if ranks_of(b) == ranks:
                cases.append({"name": f"{a} to {b}", "family": LAYOUTS[b][0], "overrides": LAYOUTS[b][1], "resume": a})
        # First: zero.Init, once left, has taken from transformers' class of its experts what pipeline stages need.
        cases.sort(key=lambda case: case["family"] != "deepseek_v3")
        (folder / "cases.json").write_text(json.dumps(cases))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks, "--standalone"]
        program = [*torchrun, "-m", "tests.recipes.convert_checks", folder, folder / "cases.json"]
        finished = launch(program, limit_s=300)
        assert finished.code == 0, finished.output
        results |= json.loads((folder / f"results_{ranks}.json").read_text())
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=" to ".join)
def test_the_next_steps_equal_those_of_the_run_that_went_on(results, before, after):
    there, here = results[before], results[f"{before} to {after}"]
    assert "error" not in here, here["error"]
    # In bf16 the layouts differ by themselves, in what they round and when.
    of_loss, of_norm = (5e-4, 1e-2) if "bf16" in before else (1e-4, 1e-4)
    for (loss, norm, lr), (its_loss, its_norm, its_lr) in zip(here["steps"], there["steps"][2:], strict=True):
        assert loss == pytest.approx(its_loss, rel=of_loss)
        assert norm == pytest.approx(its_norm, rel=of_norm)
        assert lr == pytest.approx(its_lr)
    assert here["progress"] == there["progress"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_exports_what_it_trained(results, folder, tmp_path, name):
    """The export of step 2 has the loss that the layout itself had in step 3, before that step's update."""
    from transformers import AutoModelForCausalLM

    from recipes.training.prepare import training_stream

    run = folder / "runs" / name.replace(" ", "_")
    export_hf.main([str(run), "--output", str(tmp_path / "export"), "--dtype", "fp32"])
    recipe, _ = load_recipe(run / "recipe.yaml")
    batch = collate(training_stream(recipe), np.arange(16, 24)[None])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(batch.inputs[0]), use_cache=False).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(batch.labels[0]).flatten(), ignore_index=IGNORED_LABEL
    )
    assert loss.item() == pytest.approx(results[name]["steps"][2][0], rel=1e-3 if "bf16" in name else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero 0", "4 pipeline tensor 1", "expert 0", "deepseek expert"])
def test_the_command_writes_whole_tensors_by_their_transformers_names(results, folder, tmp_path, name):
    run, output = folder / "runs" / name.replace(" ", "_"), tmp_path / "whole"
    assert convert.main([str(run), "--step", "2", "--output", str(output)]) == 0
    recipe, _ = load_recipe(run / "recipe.yaml")
    model = meta_model(recipe.model)
    assert {path.name for path in (output / "zero").iterdir()} == {
        name for name, _ in [*model.named_parameters(), *persistent_buffers(model).items()]
    }
    for name, parameter in model.named_parameters():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            tensor = torch.load(output / "zero" / name / f"{key}.pt")["param"]
            assert tensor.shape == parameter.shape and tensor.dtype == torch.float32
            assert tensor.count_nonzero() > 0
    with pytest.raises(InputError, match="exists; choose another --output"):
        convert.main([str(run), "--output", str(output)])


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """Two ranks, then one from step 3 on, then two from its step 6 on, with pipeline stages: as if nothing had happened."""
    recipe, run = make_tiny(tmp_path), tmp_path / "runs" / "tiny"
    fixed = "model.attention_dropout=0"
    outputs = [launch_run(recipe, fixed), launch_run(recipe, fixed, "--resume", "3", ranks=1)]
    pipeline = [sys.executable, "-m", "launch.run", "--num_accelerators", 2, "recipes/pretrain_pipeline.py"]
    outputs.append(launch([*pipeline, "--recipe", recipe, fixed, "--resume", "6", "pipeline.stages=2"]))
    assert [finished.code for finished in outputs] == [0, 0, 0], outputs[-1].output
    assert "micro batch 2 x accumulation 4 x data parallel 1 on 1 rank" in outputs[1].output
    attempts = [[], [], []]
    for line in metrics(run):
        if "loss" in line:
            attempts[line["attempt"] - 1].append(line)
    assert [[line["step"] for line in lines] for lines in attempts] == [list(range(n, 9)) for n in (1, 4, 7)]
    for lines in attempts[1:]:
        for line, first in zip(lines, attempts[0][-len(lines) :], strict=True):
            for key in ("loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens", "applied_updates"):
                assert line[key] == pytest.approx(first[key], rel=1e-4), key
    drawn: dict[int, list[list[int]]] = {}
    for rank in (0, 1):
        for text in (run / "logs" / f"samples_rank_{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            drawn.setdefault(line["step"], []).append(line["samples"])
    assert sorted(sum(drawn[1], [])) == list(range(8))  # two ranks share a step
    whole = [sample for sample in drawn[4] if len(sample) == 8]
    assert [sorted(samples) for samples in whole] == [list(range(24, 32))]  # one rank draws all of it
    assert not list((run / "checkpoints").glob("*converted*"))


@pytest.mark.parametrize(
    ("now", "files", "message"),
    [
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}},
            [],
            "optimizer.type SGD: DeepSpeed converts",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            [],
            "zero_optimization.offload_optimizer.device nvme can't take a checkpoint of another layout",
        ),
        ({"zero_optimization": {"stage": 1}}, ["zero_stage_3/a.swp"], "holds optimizer states copied from NVMe"),
    ],
)
def test_what_can_not_be_converted_is_refused_by_name(tiny, now, files, message):
    recipe, _ = load_recipe(tiny)
    path = publish_checkpoint(tiny.parent, 3, model=b"m")
    manifest = checkpoint_files.read_manifest(path)
    manifest |= {"layout": {"zero_stage": 2, "precision": "fp32"}, **checkpoint_files.compatibility(recipe)}
    manifest["files"] |= dict.fromkeys(files, manifest["files"]["model.pt"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message):
        checkpoint_files.check_compatible(path, recipe, {"optimizer": {"type": "AdamW"}, **now}, None)
    # The same stage needs no conversion.
    same = {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 2}}
    checkpoint_files.check_compatible(path, recipe, same, None)
