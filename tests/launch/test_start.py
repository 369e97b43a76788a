"""launch/local.sh, slurm.sh and hostfile.sh, without starting anything."""

import json
import os
import re
import shlex
import subprocess

import pytest

from data_prep.errors import InputError
from launch import start
from recipes.training.loop import parse_arguments
from recipes.training.recipe_file import load_recipe
from tests.conftest import REPOSITORY


def command(capsys, *arguments) -> list[str]:
    assert start.main([*arguments, "--dry_run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("$ ")
    return shlex.split(last[2:])


def refused(message: str, *arguments) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        start.main(list(arguments))


def test_on_this_machine(capsys):
    words = command(capsys, "local", "8b", "schedule.steps=9000", "ds.gradient_clipping=0.5")
    assert words[3:6] == ["launch.run", "--num_accelerators", "8"]
    assert words[6:8] == [str(REPOSITORY / "recipes" / "pretrain.py"), "--recipe"]
    assert words[-2:] == ["schedule.steps=9000", "ds.gradient_clipping=0.5"]
    assert command(capsys, "local", "demo", "--devices", "1")[5] == "1"


def test_a_pipeline_has_its_own_script(capsys):
    words = command(capsys, "local", "1b3_tp2_pp2")
    assert words[6] == str(REPOSITORY / "recipes" / "pretrain_pipeline.py")


def test_hardware_variants_by_name(capsys):
    words = command(capsys, "local", "8b.h200")
    assert words[words.index("--recipe") + 1] == "8b"
    assert words[words.index("--deepspeed_config") + 1] == str(REPOSITORY / "ds_configs" / "8b.h200.json")
    words = command(capsys, "slurm", "405b.h200-1024")[-1].split()
    assert str(REPOSITORY / "recipes" / "pretrain.py") in words  # not in stages, as its _recipe says
    refused("ds_configs has no 8b.tpu.json; for 8b there are 8b, 8b.h200, 8b.rtx4090", "local", "8b.tpu", "--dry_run")


def test_slurm_options_come_from_the_hardware_note(capsys):
    words = command(capsys, "slurm", "qwen3_moe_535b")
    options = dict(word[2:].split("=", 1) for word in words[1:8])
    assert words[0] == "sbatch" and options == {
        "job-name": "qwen3_moe_535b",
        "nodes": "176",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "time": "24:00:00",
        "signal": "USR1@600",
        "output": "qwen3_moe_535b-%j.log",
    }
    assert words[8] == "--wrap" and "MASTER_ADDR=$(scontrol show hostnames" in words[9]
    assert "exec srun --kill-on-bad-exit=1" in words[9] and "--recipe qwen3_moe_535b" in words[9]
    assert subprocess.run(["bash", "-n", "-c", words[9]]).returncode == 0


def test_a_job_without_gpus_asks_for_none(capsys):
    words = command(capsys, "slurm", "demo")
    assert "--ntasks-per-node=2" in words and not any("gpus" in word for word in words)


def test_what_a_run_begins_from_and_crossing_nodes_are_passed_on(capsys):
    words = command(capsys, "slurm", "70b", "--start_from", "a@5", "--allow_cross_node")[-1]
    assert " --start_from a@5 " in words and " --allow_cross_node" in words


def test_a_host_file_has_a_slot_for_every_device(capsys, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    said = f"--hostfile {hosts} has 4 slots on 2 hosts, this run is for"
    micro = "ds.train_micro_batch_size_per_gpu=2"
    arguments = ["hostfile", "demo", micro, "--dry_run", "--hostfile", str(hosts)]
    refused(f"{said} 2 devices: take out hosts, or pass --devices 4", *arguments)
    refused(f"{said} 8 devices: add hosts, or pass --devices 4", *arguments, "--devices", "8")
    assert command(capsys, *arguments, "--devices", "4")[3:6] == ["launch.run", "--hostfile", str(hosts)]


@pytest.mark.parametrize("place", start.PLACES)
def test_scripts_name_the_setup_where_there_is_no_environment(place, tmp_path):
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / f"{place}.sh"
    script.write_bytes((REPOSITORY / "launch" / script.name).read_bytes())
    done = subprocess.run(["bash", script, "demo", "--dry_run"], capture_output=True, text=True)
    assert done.returncode == 2 and f"bash {tmp_path}/launch/setup.sh makes it" in done.stderr


def test_hosts_of_a_file(capsys, tmp_path):
    words = command(capsys, "hostfile", "70b", "--hostfile", "hosts")
    assert words[3:6] == ["launch.run", "--hostfile", "hosts"]


def test_mistakes_are_told_before_anything_starts(tiny, monkeypatch):
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("started"))
    refused("128 devices on 16 nodes: use launch/slurm.sh or launch/hostfile.sh", "local", "70b", "--dry_run")
    refused(
        "nowhere.idx does not exist", "local", "8b", "data.files=nowhere"
    )  # without --dry_run the data must be there
    refused("name a recipe first; usage: bash launch/slurm.sh NAME", "slurm", "schedule.steps=5")
    refused("elsewhere is no place to start a run; one of local, slurm, hostfile", "elsewhere", "8b")
    refused("--devices 0 must be positive", "local", "8b", "--devices", "0", "--dry_run")
    refused("--hostfile hosts does not exist", "hostfile", str(tiny), "--devices", "1", "--hostfile", "hosts")


def test_the_command_takes_the_place_of_the_process(tiny, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execvp", lambda program, words: started.append((program, words)))
    start.main(["local", str(tiny), "--devices", "2"])
    ((program, words),) = started
    assert program == words[0] and words[-2:] == ["--recipe", str(tiny)]


@pytest.mark.parametrize("place", start.PLACES)
def test_scripts_from_another_directory(place, tmp_path):
    script = REPOSITORY / "launch" / f"{place}.sh"
    done = subprocess.run(["bash", script, "405b", "--dry_run"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "405b" in done.stdout) == ((2, False) if place == "local" else (0, True)), done.stderr


def test_what_is_checked_is_what_is_started(tiny, capsys):
    """`_recipe` in a recipe's own ds_config counts neither for the check nor for the ranks; in one that is chosen, for both."""
    other = tiny.parent / "other.json"
    other.write_text(
        json.dumps({**json.loads((tiny.parent / "ds.json").read_text()), "_recipe": ["model.vocab_size=128"]})
    )
    tiny.write_text(tiny.read_text().replace("ds.json", "other.json"))
    for options in ((), ("--deepspeed_config", str(other))):
        words = command(capsys, "local", str(tiny), "--devices", "1", *options)
        parsed = parse_arguments("", words[words.index("--recipe") :])
        recipe, _ = load_recipe(parsed.recipe, parsed.overrides, parsed.deepspeed_config)
        assert recipe.model.vocab_size == (128 if options else 64)
