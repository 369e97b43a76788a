import sys

import pytest

from data_prep.errors import InputError
from launch import prove
from tests.conftest import REPOSITORY, launch, make_tiny
from tests.recipes.families import SMALL


def test_layouts_are_walked_from_one_process_to_all_kinds():
    assert prove.walk([]) == [(), ("data",)]
    walked = prove.walk(["tensor", "pipeline"])
    assert walked[0] == () and walked[-1] == ("data", "tensor", "pipeline")
    assert set(walked[1:4]) == {("data",), ("tensor",), ("pipeline",)} and len(walked) == 8
    assert [prove.ranks_of(layout) for layout in walked] == [1, 2, 2, 2, 4, 4, 4, 8]
    assert prove.ranks_of(("expert",)) == 2 and prove.ranks_of(("data", "expert")) == 2


def test_a_difference_names_step_and_parameters():
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    plain = {
        "initial_weights": dict.fromkeys(names, "x"),
        "loss": [4.0, 3.0, 2.0, 1.0],
        "grad_norm": [1.0] * 4,
        "moved": [dict.fromkeys(names, 0.5)] * 4,
    }
    same = {**plain, "apart": []}
    assert prove.first_difference(same, plain, 1e-4) is None
    drifted = {**plain, "apart": names[1:]}
    assert prove.first_difference(drifted, plain, 1e-4, bitwise=False) is None
    assert prove.first_difference(drifted, plain, 1e-4) == (
        "after step 4: ranks hold other values of the same weights in norms (model.norm.weight)"
    )
    other = {
        **plain,
        "loss": [4.0, 3.0, 2.1, 1.0],
        "moved": [*plain["moved"][:2], {**plain["moved"][2], names[0]: 0.6}] * 2,
    }
    assert prove.first_difference(other, plain, 1e-4) == (
        "step 3: loss 2.1 instead of 2; weights moved otherwise in attention (model.layers.0.self_attn.q_proj.weight)"
    )
    drawn = {**plain, "initial_weights": {**plain["initial_weights"], names[1]: "y"}}
    assert (
        prove.first_difference(drawn, plain, 1e-4)
        == "before step 1: other initial weights in norms (model.norm.weight)"
    )
    assert prove.first_difference({"error": "KeyError: x"}, plain, 1e-4) == "KeyError: x"


# Qwen3 without the plan's note that each tensor rank sees a part of the heads only.
WRONG_PLAN = """
from recipes.models.qwen3 import *
from recipes.models import qwen3
from recipes.models.qwen3 import RESIDUAL_PROJECTIONS
TENSOR_PLAN = {**qwen3.TENSOR_PLAN, "summed": ()}
"""


def test_an_optimizer_that_plain_torch_does_not_have_here_is_refused():
    with pytest.raises(InputError, match="optimizer.type Lion: plain torch here knows Adam, AdamW and SGD"):
        prove.main(["demo", "ds.optimizer.type=Lion"])


@pytest.mark.slow
def test_a_right_layout_passes_and_a_wrong_one_is_stopped_and_named(tmp_path):
    module = tmp_path / "broken"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "wrong_plan.py").write_text(WRONG_PLAN)
    for family, folder in (("qwen3", "right"), ("broken.wrong_plan", "wrong")):
        make_tiny(tmp_path / folder, model={"family": family, **SMALL["qwen3"]})
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    command = [
        sys.executable,
        "-m",
        "launch.prove",
        tmp_path / "right" / "tiny.yaml",
        "ds.tensor_parallel.autotp_size=2",
    ]
    good = launch(command, env=environment, limit_s=400)
    assert good.code == 0, good.output
    lines = [line.split() for line in good.output.splitlines() if "rank" in line]
    assert [line[0] for line in lines] == ["1", "2", "2", "4"] and all(line[-1] == "equal" for line in lines)
    low = launch([*command[:4], "--dtype", "bf16"], env=environment, limit_s=400)
    assert low.code == 0 and [line.split()[-1] for line in low.output.splitlines() if " rank" in line] == ["equal"] * 2
    command[3] = tmp_path / "wrong" / "tiny.yaml"
    bad = launch(command, env=environment, limit_s=400)
    assert bad.code == 1, bad.output
    assert "tensor" in bad.last_line and "does not train what one process would" in bad.last_line
    assert "weights moved otherwise in norms (model.layers.0.self_attn." in bad.output
