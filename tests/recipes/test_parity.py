"""Every layout against plain torch: three launches, of 2, 4 and 8 ranks, each of many layouts one after another.

Proven here: fp32, gloo, tiny shapes, torch.compile on a CPU where there is a compiler. Not proven here: NCCL, bf16, flash
attention, torch.compile on a GPU.
"""

import json
import math
import shutil
import sys

import pytest
import torch
import yaml

from recipes.models.build import build_model, persistent_buffers
from recipes.training.recipe_file import load_recipe
from tests.conftest import REPOSITORY, launch, make_tiny
from tests.recipes.families import EXAMPLE, SMALL

pytestmark = pytest.mark.slow
STEPS = 5
GOLDEN = REPOSITORY / "tests" / "recipes" / "golden_losses.json"
# Clipping is active (every norm is above 0.5), the micro batch is 1, dropout is off, warm-up is two steps.
BASE = [
    "model.attention_dropout=0",
    "ds.gradient_clipping=0.5",
    "ds.train_micro_batch_size_per_gpu=1",
    "schedule.steps=50",
    "validation.every_steps=null",
]
EP = [
    "ds.expert_parallel.enabled=true",
    "ds.expert_parallel.use_grouped_mm=false",
    "ds.expert_parallel.autoep_size=2",
]
TP, SP, PP = "ds.tensor_parallel.autotp_size=2", "ds.sequence_parallel_size=2", "pipeline.stages=2"
PP_TP = [PP, "pipeline.tensor_parallel_size=2"]
UNTIED, MASK, NO_BALANCE = (
    "model.tie_word_embeddings=false",
    "data.document_mask=attention",
    "model.router_aux_loss_coef=0",
)
# SOURCE is a Hugging Face checkpoint of the recipe's family, which plain torch reads by transformers' own from_pretrained.
FROM = "model.init_from=SOURCE"
SOURCES = ("tiny", "qwen3_moe", "deepseek_v3")
WIDE = [UNTIED, "model.vocab_size=2048", "model.num_hidden_layers=4"]
# Adam hides a wrong scale of the gradient; SGD without clipping does not.
SGD = [
    "ds.optimizer={type: SGD, params: {lr: 0.5}}",
    "ds.zero_allow_untested_optimizer=true",
    "ds.gradient_clipping=0",
]


def stage(number: int) -> str:
    return f"ds.zero_optimization.stage={number}"


COMPILED = {f"compiled, ZeRO-{n}": ("llama", [stage(n), "compute.compile=true"]) for n in (1, 3) if shutil.which("g++")}

# Plain torch: {name: (recipe, overrides)}. Every other case names the one that it must equal.
POISONED = "NaN in step 2: "
PLAIN = {
    "llama": ("tiny", []),
    "untied": ("tiny", [UNTIED]),
    "mask": ("tiny", [MASK]),
    "wide": ("tiny", WIDE),
    "z-loss": ("tiny", ["loss.z_loss=0.01"]),
    "sgd": ("tiny", SGD),
    **{family: (family, []) for family in SMALL if family != "llama"},
    "qwen3_moe, no balance": ("qwen3_moe", [NO_BALANCE]),
    **{f"from {name}": (name, [FROM, *([NO_BALANCE] if name == "qwen3_moe" else [])]) for name in SOURCES},
    f"{POISONED}llama": ("tiny", []),
    f"{POISONED}qwen3_moe": ("qwen3_moe", []),
}
CASES = {
    2: {
        **{f"ZeRO-{n}": ("llama", [stage(n)]) for n in range(4)},
        **{f"micro batch {n}": ("llama", [f"ds.train_micro_batch_size_per_gpu={n}"]) for n in (2, 4)},
        **{
            f"ZeRO-{n} with torch's Adam offloaded": (
                "llama",
                [stage(n), "ds.zero_optimization.offload_optimizer.device=cpu", "ds.zero_force_ds_cpu_optimizer=false"],
            )
            for n in (1, 2, 3)
        },
        "ZeRO-3 with parameters offloaded": (
            "llama",
            [
                stage(3),
                "ds.zero_optimization.offload_param.device=cpu",
                "ds.zero_optimization.offload_optimizer.device=cpu",
                "ds.zero_force_ds_cpu_optimizer=false",
            ],
        ),
        **{f"loss in chunks, ZeRO-{n}": ("llama", [stage(n), "loss.chunk_tokens=5"]) for n in (1, 3)},
        "z-loss in chunks": ("z-loss", ["loss.z_loss=0.01", "loss.chunk_tokens=7"]),
        "all blocks recomputed": ("llama", ["compute.activation_checkpoint_interval=1"]),
        "every second block recomputed, ZeRO-3": ("llama", [stage(3), "compute.activation_checkpoint_interval=2"]),
        **COMPILED,
        "document mask": ("mask", [MASK]),
        "document mask, eager": ("mask", [MASK, "compute.attention=eager"]),
        **{f"SGD, ZeRO-{n}": ("sgd", [*SGD, stage(n)]) for n in range(4)},
        "SGD, tensor 2": ("sgd", [*SGD, TP]),
        "SGD, sequence 2": ("sgd", [*SGD, SP]),
        "SGD, pipeline 2": ("sgd", [*SGD, PP]),
        **{f"tensor 2, ZeRO-{n}": ("llama", [TP, stage(n)]) for n in range(3)},
        "tensor 2, untied": ("untied", [TP, UNTIED]),
        "tensor 2, document mask, recomputed": ("mask", [TP, MASK, "compute.activation_checkpoint_interval=1"]),
        **{f"tensor 2, {family}": (family, [TP]) for family in SMALL if family != "llama"},
        **{f"sequence 2, ZeRO-{n}": ("llama", [SP, stage(n)]) for n in (1, 2, 3)},
        **{f"experts 2, ZeRO-{n}": ("qwen3_moe", [*EP, stage(n)]) for n in range(4)},
        "experts whole, ZeRO-3": ("qwen3_moe", [stage(3)]),
        **{f"experts 2, deepseek_v3, ZeRO-{n}": ("deepseek_v3", [*EP, stage(n)]) for n in (1, 3)},
        **{f"pipeline 2, ZeRO-{n}": ("llama", [PP, stage(n)]) for n in (0, 1)},
        "pipeline 2, untied": ("untied", [PP, UNTIED]),
        "pipeline 2, document mask": ("mask", [PP, MASK]),
        "pipeline 2, z-loss": ("z-loss", [PP, "loss.z_loss=0.01"]),
        "pipeline 2, recomputed": ("llama", [PP, "compute.activation_checkpoint_interval=1"]),
        "pipeline 2, by cost": ("llama", [PP, "pipeline.partition=cost"]),
        "pipeline 2, by type": ("llama", [PP, "pipeline.partition=type:Block"]),
        "pipeline 2, in equal parts": ("llama", [PP, "pipeline.partition=uniform"]),
        "pipeline 2, eager": ("llama", [PP, "compute.attention=eager"]),
        "pipeline 2, qwen3_moe": ("qwen3_moe, no balance", [PP, NO_BALANCE]),
        **{f"pipeline 2, {family}": (family, [PP]) for family in ("qwen3", "deepseek_v3", EXAMPLE)},
        **{f"tensor 2, from {name}": (f"from {name}", [TP, *PLAIN[f"from {name}"][1]]) for name in SOURCES},
        **{f"pipeline 2, from {name}": (f"from {name}", [PP, *PLAIN[f"from {name}"][1]]) for name in SOURCES},
        **{
            f"experts 2, ZeRO-{n}, from {name}": (f"from {name}", [*EP, stage(n), *PLAIN[f"from {name}"][1]])
            for name in SOURCES[1:]
            for n in (1, 3)
        },
        **{f"sequence 2, ZeRO-{n}, from tiny": ("from tiny", [SP, stage(n), FROM]) for n in (1, 3)},
        **{f"{POISONED}tensor 2, ZeRO-{n}": (f"{POISONED}llama", [TP, stage(n)]) for n in range(3)},
        **{f"{POISONED}sequence 2, ZeRO-{n}": (f"{POISONED}llama", [SP, stage(n)]) for n in (1, 3)},
        **{f"{POISONED}experts 2, ZeRO-{n}": (f"{POISONED}qwen3_moe", [*EP, stage(n)]) for n in range(4)},
        **{f"{POISONED}pipeline 2, ZeRO-{n}": (f"{POISONED}llama", [PP, stage(n)]) for n in (0, 1)},
    },
    4: {
        "tensor 2 x data 2": ("llama", [TP]),
        "sequence 2 x data 2, ZeRO-1": ("llama", [SP]),
        "sequence 2 x data 2, ZeRO-3": ("llama", [SP, stage(3)]),
        **{f"experts 2 of 4 ranks, ZeRO-{n}": ("qwen3_moe", [*EP, stage(n)]) for n in range(4)},
        "pipeline 2 x data 2": ("llama", [PP]),
        **{f"pipeline 2 x tensor 2, ZeRO-{n}": ("llama", [*PP_TP, stage(n)]) for n in (0, 1)},
        "pipeline 2 x tensor 2, qwen3": ("qwen3", PP_TP),
        # The first stage is the embedding, which makes one parameter group where the others have two.
        **{f"pipeline 4, ZeRO-{n}": ("wide", [*WIDE, "pipeline.stages=4", stage(n)]) for n in (0, 1)},
        "pipeline 2 x tensor 2, SGD": ("sgd", [*SGD, *PP_TP]),
    },
    8: {
        "pipeline 2 x tensor 2 x data 2": ("llama", PP_TP),
        "pipeline 2 x tensor 2 x data 2, untied, document mask": ("mask", [*PP_TP, MASK]),
    },
}


def results_of(folder, ranks: int, cases: dict, plain: bool = False) -> dict:
    listed = [
        {
            "name": name,
            "recipe": str(folder / recipe / "tiny.yaml"),
            "overrides": [*BASE, *(text.replace("SOURCE", str(folder / recipe / "source")) for text in overrides)],
            "steps": STEPS,
            "plain": plain,
            "poison": 2 if name.startswith(POISONED) else None,
        }
        for name, (recipe, overrides) in cases.items()
    ]
    cases_file, output = folder / f"cases_{ranks}_{plain}.json", folder / f"results_{ranks}_{plain}.json"
    cases_file.write_text(json.dumps(listed))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", ranks, "--standalone"]
    finished = launch([*command, "launch/prove_ranks.py", cases_file, output], limit_s=600)
    assert output.exists(), finished.output
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    make_tiny(folder / "tiny")
    for family, shape in SMALL.items():
        recipe = make_tiny(folder / family, model={"family": family, **shape})
        if family == "qwen3_moe":  # large enough to be seen in the norm
            settings = yaml.safe_load(recipe.read_text())
            settings["model"]["router_aux_loss_coef"] = 0.05
            recipe.write_text(yaml.safe_dump(settings))
    for name in SOURCES:
        save_source(folder / name)
    return folder


def save_source(folder) -> None:
    """Other weights than a run would draw, DeepSeek-V3's routing bias included, as a Hugging Face checkpoint."""
    recipe, _ = load_recipe(folder / "tiny.yaml", BASE[:1])
    model = build_model(recipe.model, recipe.data.seq_length, seed=99)
    for buffer in persistent_buffers(model).values():
        buffer += torch.arange(len(buffer)) / len(buffer)
    model.save_pretrained(folder / "source")


@pytest.fixture(scope="module")
def plain(folder):
    return results_of(folder, 1, PLAIN, plain=True)


@pytest.fixture(scope="module")
def results(folder):
    found = {}
    for ranks, cases in CASES.items():
        recipes = {name: (PLAIN[equal][0], overrides) for name, (equal, overrides) in cases.items()}
        found[ranks] = results_of(folder, ranks, recipes)
    return found


ALL = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_every_layout_equals_plain_torch(plain, results, ranks, name):
    ours, theirs = results[ranks][name], plain[CASES[ranks][name][0]]
    assert "error" not in ours, ours["error"]
    poison = 1 if name.startswith(POISONED) else None
    for key in ("loss", "grad_norm", "lr", "tokens"):
        pairs = [pair for step, pair in enumerate(zip(ours[key], theirs[key], strict=True)) if step != poison]
        assert [here for here, _ in pairs] == pytest.approx([there for _, there in pairs], rel=1e-4), key
    for here, there in zip(ours["other_losses"], theirs["other_losses"], strict=True):
        assert here == pytest.approx(there, rel=1e-4)
    assert ours["apart"] == []  # replicas and tied copies are bitwise equal after the last step
    # The poisoned step alone is left out, on every rank: the steps after it equal those of plain torch without it.
    assert ours["applied"] == [step != poison for step in range(STEPS)]
    if poison is not None:
        assert not math.isfinite(ours["loss"][poison])
        # Tensor ranks share their loss, but only the last one's was made NaN.
        assert ours["bad_ranks"] == [[ranks - 1] if step == poison else [] for step in range(STEPS)]


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_one_seed_gives_the_same_initial_weights_in_every_layout(plain, results, ranks, name):
    assert results[ranks][name]["initial_weights"] == plain[CASES[ranks][name][0]]["initial_weights"]


def test_the_cases_are_sharp(plain):
    """Clipping acts, tokens differ from step to step under the mask, and what should change the loss does."""
    assert min(plain["llama"]["grad_norm"]) > 0.5 and len(set(plain["mask"]["tokens"])) > 1
    assert plain["z-loss"]["grad_norm"] != pytest.approx(plain["llama"]["grad_norm"], rel=1e-3)
    balance = plain["qwen3_moe, no balance"]["grad_norm"]
    assert plain["qwen3_moe"]["grad_norm"] != pytest.approx(balance, rel=1e-4)


def test_z_loss_and_balance_loss_are_told_apart_from_the_loss(plain):
    """The loss is the cross-entropy alone, whatever is trained beside it."""
    assert plain["z-loss"]["loss"][0] == plain["llama"]["loss"][0]
    assert plain["qwen3_moe"]["loss"][0] == plain["qwen3_moe, no balance"]["loss"][0]
    assert [list(plain[name]["other_losses"][0]) for name in ("llama", "z-loss", "qwen3_moe")] == [
        [],
        ["z_loss"],
        ["balance_loss"],
    ]


def test_golden_losses(plain):
    """Plain torch gives what it gave when these numbers were written: a change of model, data or seed shows here."""
    golden = json.loads(GOLDEN.read_text())
    assert sorted(golden) == sorted(name for name in PLAIN if not name.startswith((POISONED, "from ")))
    for name, values in golden.items():
        for key in ("loss", "grad_norm"):
            assert plain[name][key] == pytest.approx(values[key], rel=1e-3), (name, key)


def test_expert_load_is_reported_by_layer(results):
    load = results[2]["experts 2, ZeRO-1"]["expert_load"]
    assert len(load) == SMALL["qwen3_moe"]["num_hidden_layers"] and all(1 <= value <= 4 for value in load)
