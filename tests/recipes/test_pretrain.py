"""Whole runs with real ranks: interrupted and resumed, started every way, failing, refused."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import check
from recipes.training import checkpoint_files
from recipes.training.distributed import free_port
from tests.conftest import REPOSITORY, TINY_RECIPE, last_step, launch, launch_run, make_tiny, metrics, write_tokens

pytestmark = pytest.mark.slow
FAULTS = Path(__file__).resolve().parents[1] / "faults"
OWN_ENGINE = ("ds.checkpoint.writer.type=python", "ds.checkpoint.writer.data_parallel=replica")
SLOW = {"PYTHONPATH": str(FAULTS), "SLOW_STEP_S": "0.4"}


def ranks_of(process) -> list[psutil.Process]:
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if "RANK" in p.environ()]
    return sorted(found, key=lambda p: int(p.environ()["RANK"]))


def interrupt(folder, how, at_step, number=signal.SIGTERM, *overrides):
    """Start the run and, once it has logged `at_step`, send a signal `how`: starter, rank, group."""
    run = folder / "runs" / "tiny"
    before = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0

    def reached():
        lines = metrics(run)[before:] if (run / "metrics.jsonl").exists() else []
        return any(line["step"] >= at_step for line in lines)

    def send(process):
        if how == "starter":
            process.send_signal(number)
        elif how == "rank":
            ranks_of(process)[1].send_signal(number)
        else:  # every process of the launcher's group: ranks, and the launcher's own
            os.killpg(os.getpgid(ranks_of(process)[0].pid), number)

    return launch_run(folder / "tiny.yaml", *overrides, env=SLOW, when=reached, then=send)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run twice: uninterrupted, and stopped by SIGUSR1 to a rank, SIGKILL to all, SIGTERM to starter and group.

    The last two attempts save with DeepSpeed's own engine: one loads what ours has saved, the other what it has itself.
    """
    folder = tmp_path_factory.mktemp("runs")
    whole, broken = folder / "whole", folder / "broken"
    # A phase that begins in the middle of step 8, and documents that do not see each other.
    later = {"from_tokens": 59 * 16 - 3, "files": [{"path": "validation"}, {"path": "train", "weight": 2}]}
    changes = {
        "schedule": {"steps": 14, "warmup_steps": 2, "decay": "cosine"},
        "checkpoint": {**TINY_RECIPE["checkpoint"], "light_every_steps": 1},
        "data": {**TINY_RECIPE["data"], "document_mask": "attention", "phases": [later]},
    }
    make_tiny(whole, **changes)
    make_tiny(broken, **changes)
    outputs = [launch_run(whole / "tiny.yaml")]
    outputs.append(interrupt(broken, "rank", 2, signal.SIGUSR1))
    outputs.append(interrupt(broken, "group", 7, signal.SIGKILL))
    outputs.append(interrupt(broken, "starter", 10, signal.SIGTERM, "checkpoint.on_signal=false"))
    outputs.append(interrupt(broken, "group", 11, signal.SIGTERM, *OWN_ENGINE))
    outputs.append(launch_run(broken / "tiny.yaml", *OWN_ENGINE))
    return whole, broken, outputs


def by_step(run, key):
    """{step: value}; of a step that two attempts wrote, the values of both must agree."""
    values = {}
    for line in metrics(run):
        if key in line:
            assert values.setdefault(line["step"], line[key]) == line[key], (key, line["step"])
    return values


def test_codes_and_closing_lines(runs):
    _, broken, (whole, usr1, kill, term, group, last) = runs
    run = broken / "runs" / "tiny"
    good = (whole, usr1, term, group, last)
    assert [r.code for r in good] == [0] * 5, [r.output for r in good]
    assert "stopped at step" in group.output
    assert kill.code == 1 and "SIGKILL" in kill.last_line
    assert "the same command goes on from here" in usr1.output and "resumed from" in term.output
    # On a loaded machine a signal can come a step or two late.
    steps = {number: [line["step"] for line in metrics(run) if line["attempt"] == number] for number in range(1, 6)}
    for attempt, output in ((3, term.output), (4, group.output)):
        begun, got = steps[attempt][0], steps[attempt - 1][-1]
        told = [
            int(step) for step in re.findall(rf"the run had got to step (\d+): steps {begun} to \1 are taken", output)
        ]
        # The light state comes after the line in metrics.jsonl.
        assert told in ([[got], [got - 1]] if got > begun else [[got], []] if got == begun else [[]]), (begun, got)
    stop, saved = steps[3][-1], steps[4][0] - 1
    where = "here" if saved == stop else f"step {saved}"
    assert f"stopped at step {stop} of 14 by SIGTERM; the same command goes on from {where}" in term.output
    assert not any("did not come out as before" in r.output for r in (usr1, kill, term, group, last))
    assert "finished at step 14" in last.output
    assert all("written by DeepSpeed's FastCheckpointEngine" in r.output for r in (group, last))


def test_interrupted_run_equals_the_uninterrupted_one_bitwise(runs):
    whole, broken, _ = runs
    for key in ("loss", "grad_norm", "lr", "validation_loss", "consumed_samples", "consumed_tokens"):
        one, other = (by_step(folder / "runs" / "tiny", key) for folder in (whole, broken))
        assert one == other, key
    losses = by_step(whole / "runs" / "tiny", "loss")
    assert sorted(losses) == list(range(1, 15))
    assert len(metrics(broken / "runs" / "tiny")) > len(metrics(whole / "runs" / "tiny"))  # steps were really redone


def test_both_ranks_draw_the_same_samples_again(runs):
    whole, broken, _ = runs
    for rank in (0, 1):
        logs = []
        for folder in (whole, broken):
            text = (folder / "runs" / "tiny" / "logs" / f"samples_rank_{rank}.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            by_number = {line["step"]: line for line in lines}
            assert all(by_number[line["step"]] == line for line in lines)
            logs.append(by_number)
        assert logs[0] == logs[1] and len(logs[0]) == 14
    drawn = [
        set(json.loads(line)["samples"])
        for rank in (0, 1)
        for line in (whole / "runs" / "tiny" / "logs" / f"samples_rank_{rank}.jsonl").read_text().splitlines()
    ]
    assert sum(map(len, drawn)) == len(set().union(*drawn)) == 14 * 8


def test_final_weights_are_bitwise_the_same(runs):
    import torch

    weights = []
    for folder in runs[:2]:
        file = folder / "runs" / "tiny" / "checkpoints" / "global_step14" / "mp_rank_00_model_states.pt"
        weights.append(torch.load(file, weights_only=False)["module"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_run_directory(runs):
    whole, broken, _ = runs
    run = broken / "runs" / "tiny"
    assert json.loads((run / "state.json").read_text())["state"] == "finished"
    attempts = json.loads((run / "environment.json").read_text())["attempts"]
    assert [a["attempt"] for a in attempts] == [1, 2, 3, 4, 5]
    assert attempts[0]["versions"]["deepspeed"] and attempts[0]["sizes"]["accumulation"] == 2
    assert len(list((run / "tensorboard").iterdir())) == 5
    assert (run / "checkpoints" / "latest").read_text() == "global_step14"
    for rank in (0, 1):
        assert "saved" in (run / "logs" / f"rank_{rank}.log").read_text()
    assert check.main([str(run / "recipe.yaml"), "--world_size", "2"]) == 0
    steps = [checkpoint_files.step_of(p) for p in checkpoint_files.checkpoints(whole / "runs" / "tiny" / "checkpoints")]
    assert steps == [3, 6, 9, 12, 14]


def test_each_rank_has_its_own_randomness(runs):
    import torch

    checkpoint = runs[0] / "runs" / "tiny" / "checkpoints" / "global_step6"
    states = [torch.load(checkpoint / f"random_state_rank_{rank}.pt", weights_only=True)["torch"] for rank in (0, 1)]
    assert not torch.equal(*states)


def test_no_rank_is_left(runs):
    left = [p for p in psutil.process_iter(["cmdline"]) if str(runs[1]) in " ".join(p.info["cmdline"] or [])]
    assert left == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.hidden_size=64"], "is of another model: hidden_size 32 (now 64)"),
        (["global_batch_size=16"], "was trained with global_batch_size 8, now 16"),
        (["ds.bf16.enabled=true"], "was saved in fp32, the run asks for bf16"),
        (["--resume", "5"], "no checkpoint of step 5 in "),
        (["schedule.steps=7"], "is at step 14, the schedule has only 7 steps"),
        (["seed=8"], "drew its samples otherwise: seed 7 (now 8)"),
    ],
)
def test_another_run_in_its_directory_is_refused(runs, overrides, message):
    recipe = runs[0] / "tiny.yaml"
    before = sorted(str(p) for p in (runs[0] / "runs").rglob("*"))
    finished = launch_run(recipe, *overrides)
    assert finished.code == 2 and message in finished.output
    assert len(finished.output.strip().splitlines()) == 1 and finished.output.startswith("error: ")
    assert sorted(str(p) for p in (runs[0] / "runs").rglob("*")) == before


def test_resuming_on_damaged_checkpoints_and_other_data(runs, tmp_path):
    """One launch finds a flipped byte by checksum and a cut file by size; the next finds other data."""
    folder = tmp_path / "copy"
    shutil.copytree(runs[0], folder)
    (folder / "runs" / "tiny" / "recipe.yaml").unlink()
    checkpoints = folder / "runs" / "tiny" / "checkpoints"
    shard = checkpoints / "global_step14" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shard.write_bytes(shard.read_bytes()[:10])
    model = checkpoints / "global_step12" / "mp_rank_00_model_states.pt"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    finished = launch_run(folder / "tiny.yaml")
    assert finished.code == 0, finished.output
    assert "passing over" in finished.output and "has 10 bytes instead of" in finished.output
    assert "the content of mp_rank_00_model_states.pt does not match its checksum" in finished.output
    assert "global_step9; the next step is 10" in finished.output
    whole, again = (by_step(f / "runs" / "tiny", "loss") for f in (runs[0], folder))
    assert whole == again

    write_tokens(folder / "train", [[5] * 40] * 60)
    finished = launch_run(folder / "tiny.yaml", "schedule.steps=16")
    assert finished.code == 2 and "drew its samples otherwise: file 1: other content" in finished.last_line
    assert "checks passed" not in finished.output  # told before a rank starts


def test_a_changed_ds_config_and_schedule_act_at_once(runs, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(runs[0], folder)
    changes = [
        "ds.optimizer.params.weight_decay=0.5",
        "ds.optimizer.params.betas=[0.8, 0.9]",
        "ds.optimizer.params.lr=0.02",
    ]
    finished = launch_run(folder / "tiny.yaml", "schedule.steps=16", *changes)
    assert finished.code == 0, finished.output
    for text in (
        "the schedule has changed: 14 steps in the checkpoint, 16 now",
        "the peak learning rate has changed: 0.01 in the checkpoint, 0.02 now",
        "group decay: weight_decay has changed: 0.1 in the checkpoint, 0.5 now",
        "betas has changed: (0.9, 0.999) in the checkpoint, (0.8, 0.9) now",
    ):
        assert text in finished.output, finished.output
    assert "group no_decay: weight_decay" not in finished.output
    factor = lambda k: 0.1 + 0.9 * (1 + math.cos(math.pi * (k - 2) / 14)) / 2  # noqa: E731
    rates = by_step(folder / "runs" / "tiny", "lr")
    assert [rates[15], rates[16]] == pytest.approx([0.02 * factor(15), 0.02 * factor(16)])


def test_a_second_start_leaves_the_first_alone(tmp_path):
    """A run at work, and a report of an earlier start: neither hurts, and the second start is told."""
    recipe = make_tiny(tmp_path)
    run = tmp_path / "runs" / "tiny"
    (run / "logs").mkdir(parents=True)
    old = {"rank": 1, "exit_code": 1, "time": 0, "start_id": "old", "error": "old", "host": "h", "log": "l"}
    (run / "logs" / "failed_rank_1.json").write_text(json.dumps(old))
    seconds = []

    def start_again(_process):
        seconds.append(launch_run(recipe))
        command = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", "2", "--master_port", "29733"]
        seconds.append(launch([*command, "recipes/pretrain.py", "--recipe", recipe]))

    slow = {**SLOW, "SLOW_STEP_S": "2"}
    first = launch_run(recipe, env=slow, when=lambda: last_step(run) >= 1, then=start_again)
    for second in seconds:
        assert second.code == 2 and "another run is at work in" in second.output, second.output
    assert first.code == 0 and "finished at step 8" in first.output, first.output
    assert not list((run / "logs").glob("failed_rank_*"))


def test_starting_anew_moves_the_old_run_aside(runs, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(runs[0], folder)
    finished = launch_run(
        folder / "tiny.yaml", "--resume", "none", "schedule.steps=2", "data.order=megatron", "data.phases=null", ranks=1
    )
    assert finished.code == 0 and "was moved to" in finished.output, finished.output
    assert (folder / "runs" / "tiny.replaced_1" / "checkpoints" / "global_step14").is_dir()
    assert [p.name for p in checkpoint_files.checkpoints(folder / "runs" / "tiny" / "checkpoints")] == ["global_step2"]
    # Megatron's order is made for a number of samples: a longer schedule would change it.
    finished = launch_run(folder / "tiny.yaml", "schedule.steps=4", "data.order=megatron", "data.phases=null", ranks=1)
    assert finished.code == 2 and "has an order made for 16 samples, the schedule now asks for 32" in finished.last_line


def test_plain_python_environment_variables_and_torchrun_start_the_same_run(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    losses = []
    for name in ("alone", "variables", "torchrun"):
        recipe = make_tiny(
            tmp_path / name, data={"files": "synthetic", "validation_files": "synthetic", "seq_length": 16}
        )
        command = ["recipes/pretrain.py", "--recipe", recipe, "schedule.steps=3", "model.attention_dropout=0"]
        command = [*(torchrun if name == "torchrun" else [sys.executable]), *command]
        other, environment = None, {}
        if name == "variables":
            environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            variables = {**os.environ, **environment, "RANK": "1", "LOCAL_RANK": "1"}
            other = subprocess.Popen(list(map(str, command)), env=variables, cwd=REPOSITORY)
            environment |= {"RANK": "0", "LOCAL_RANK": "0"}
        finished = launch(command, env=environment)
        assert finished.code == 0 and (other is None or other.wait(30) == 0), finished.output
        losses.append([line["loss"] for line in metrics(recipe.parent / "runs" / "tiny") if "loss" in line])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] == losses[2]


def test_bare_deepspeed_works_and_tells_mistakes_in_one_line(tmp_path):
    recipe = make_tiny(tmp_path)
    deepspeed = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", "2"]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = launch([*deepspeed, "--master_port", port, "recipes/pretrain.py", "--recipe", recipe])
        assert finished.code == 2 and f"error: port {port} is in use" in finished.output, finished.output
        finished = launch_run(recipe, ranks=2, limit_s=30)  # finds a port of its own
        assert finished.code == 0, finished.output
    finished = launch([*deepspeed, "--master_port", port, "recipes/pretrain.py", "--recipe", recipe, "schedule.step=3"])
    mistakes = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert finished.code == 2 and len(mistakes) == 1, finished.output
    assert "unknown key schedule.step; did you mean schedule.steps?" in mistakes[0]
    assert "Traceback" not in finished.output


def test_a_rank_that_raises_ends_all_four_with_its_error_last(tmp_path):
    recipe = make_tiny(tmp_path)
    fault = {"PYTHONPATH": str(FAULTS), "FAULT_RANK": "2", "FAULT_STEP": "3", "FAULT_KIND": "raise"}
    finished = launch_run(recipe, ranks=4, env=fault)
    assert finished.code == 1
    assert finished.last_line.startswith("error: rank 2 on ") and "RuntimeError: injected fault" in finished.last_line
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "state.json").read_text())["state"] == "failed"
    assert "injected fault" in json.loads((run / "logs" / "failed_rank_2.json").read_text())["traceback"]
    started = json.loads((run / "environment.json").read_text())["attempts"][0]
    assert started["sizes"]["world"] == 4


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    recipe = make_tiny(tmp_path)
    fault = {"PYTHONPATH": str(FAULTS), "FAULT_RANK": "1", "FAULT_STEP": "5", "FAULT_KIND": "kill"}
    finished = launch_run(recipe, env=fault)
    assert finished.code == 1, finished.output
    # What ends first is seen by rank 0 as a closed connection, or by the launcher as a signal.
    assert "SIGKILL" in finished.last_line or "rank 0" in finished.last_line
    assert launch_run(recipe).code == 0
    assert by_step(tmp_path / "runs" / "tiny", "loss")[8]


def test_an_id_beyond_the_vocabulary_met_on_the_way_is_told_in_one_line(tmp_path):
    recipe = make_tiny(tmp_path)
    write_tokens(tmp_path / "train", [[1] * 100] * 20 + [[70] * 10], 100)
    finished = launch_run(recipe)
    assert finished.code == 2 and "token id 70 is outside the model's vocabulary of 64" in finished.last_line
    assert "Traceback" not in finished.output


def test_stopping_before_training_has_begun(tmp_path):
    recipe = make_tiny(tmp_path)

    def stop(process):
        while not psutil.Process(process.pid).children():  # checks are over, the launcher is starting
            time.sleep(0.05)
        process.terminate()

    finished = launch_run(recipe, when=lambda: True, then=stop)
    assert finished.code == 1 and "stopped by a signal before training had begun" in finished.last_line, finished.output


def test_help_lists_the_options():
    output = subprocess.run(
        [sys.executable, "recipes/pretrain.py", "--help"], capture_output=True, text=True, cwd=REPOSITORY, check=True
    ).stdout
    assert all(option in output for option in ("--recipe", "--deepspeed_config", "--resume", "KEY=VALUE"))
