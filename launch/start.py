"""What launch/local.sh, launch/slurm.sh and launch/hostfile.sh do: check a run by name, then start it. Needs no torch.

    bash launch/local.sh 8b          on this machine
    bash launch/slurm.sh 70b         as a Slurm job; nodes, GPUs, time and signal from the ds_config's _hardware
    bash launch/hostfile.sh 70b      over ssh, on the hosts of a file

NAME.HARDWARE takes ds_configs/NAME.HARDWARE.json. --dry_run prints the command, with the data left out of the check.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from data_prep.errors import InputError, run_command
from launch.check import all_remarks, check, check_parser, describe, hardware_for, take_recipe
from launch.hardware import Hardware
from launch.hosts import read_host_file
from recipes.training.prepare import Prepared
from recipes.training.settings import REPOSITORY

PLACES = ("local", "slurm", "hostfile")


def training_command(arguments, prepared: Prepared) -> list[str]:
    """The entry script and its arguments."""
    script = str(REPOSITORY / prepared.recipe.entry_script)
    recipe = ["--recipe", str(arguments.recipe)]
    if arguments.deepspeed_config is not None:  # the recipe's own JSON stays its own: _recipe counts in others alone
        recipe += ["--deepspeed_config", prepared.recipe.deepspeed_config]
    given = ((f"--{key}", getattr(arguments, key)) for key in ("resume", "start_from", "branch_from"))
    begin = [word for key, value in given if value is not None for word in (key, value)]
    crossing = ["--allow_cross_node"] if arguments.allow_cross_node else []
    return [script, *recipe, *begin, *crossing, *arguments.overrides]


def local(hardware: Hardware, training: list[str]) -> list[str]:
    if hardware.nodes > 1:
        raise InputError(
            f"this ds_config is for {hardware.devices} devices on {hardware.nodes} nodes: use launch/slurm.sh or "
            "launch/hostfile.sh, or --devices for the number that this machine has"
        )
    launcher = [sys.executable, "-P", "-m", "launch.run", "--num_accelerators", str(hardware.devices)]
    return [*launcher, *training]


def slurm(hardware: Hardware, training: list[str], name: str) -> list[str]:
    """An sbatch command whose job runs one task a device; Slurm sends USR1 to the tasks before the time is up."""
    per_node = hardware.per_node
    options = {
        "job-name": name,
        "nodes": hardware.nodes,
        "ntasks-per-node": per_node,
        **({} if hardware.accelerator == "cpu" else {"gpus-per-node": per_node}),
        "time": hardware.time_limit,
        "signal": f"USR1@{hardware.signal_before_s}",
        "output": f"{name}-%j.log",
    }
    step = shlex.join(["srun", "--kill-on-bad-exit=1", sys.executable, *training])
    first = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    script = f"export {first} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)); exec {step}"
    return ["sbatch", *(f"--{key}={value}" for key, value in options.items()), "--wrap", script]


def hostfile(hardware: Hardware, training: list[str], file: Path, dry_run: bool) -> list[str]:
    if file.exists() or not dry_run:
        slots = read_host_file(file)
        total = sum(slots.values())
        if total != hardware.devices:
            raise InputError(
                f"--hostfile {file} has {total} slots on {len(slots)} hosts, this run is for {hardware.devices} devices: "
                f"{'add' if total < hardware.devices else 'take out'} hosts, or pass --devices {total}"
            )
    return [sys.executable, "-P", "-m", "launch.run", "--hostfile", str(file), *training]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    place = argv[0] if argv else None
    if place not in PLACES:
        raise InputError(f"{place} is no place to start a run; one of {', '.join(PLACES)}")
    usage = f"bash launch/{place}.sh NAME [options] [KEY=VALUE ...]"
    parser = check_parser(__doc__.splitlines()[0], prog=f"launch/{place}.sh", usage=usage)
    parser.add_argument("--devices", type=int, help="in place of the ds_config's _hardware.devices")
    parser.add_argument("--dry_run", action="store_true", help="print the command; the data need not be there")
    if place == "hostfile":
        parser.add_argument("--hostfile", type=Path, default=Path("hostfile"), help="default: %(default)s")
    arguments = parser.parse_intermixed_args(argv[1:])
    take_recipe(arguments, usage)
    hardware = hardware_for(arguments, check(arguments, None, files=False))
    accelerator = "cpu" if hardware.device == "cpu" else "cuda"
    prepared = check(arguments, hardware.devices, accelerator, files=not arguments.dry_run)
    training = training_command(arguments, prepared)
    if place == "local":
        command = local(hardware, training)
    elif place == "slurm":
        command = slurm(hardware, training, prepared.recipe.name)
    else:
        command = hostfile(hardware, training, arguments.hostfile, arguments.dry_run)
    print("\n".join([describe(prepared), *all_remarks(prepared, hardware)]))
    print(f"$ {shlex.join(command)}", flush=True)
    if arguments.dry_run:
        return 0
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(run_command(main))
