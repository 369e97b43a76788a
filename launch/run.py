"""Check a run, then start it with the deepspeed launcher, pass signals to its ranks, and report the first cause.

    python -m launch.run [deepspeed options] recipes/pretrain.py --recipe R.yaml ...

The deepspeed launcher alone checks nothing, forwards no signal on one node (SIGTERM to it orphans the ranks), takes
port 29500 whether it is free or not, and buries a rank's error under its own lines.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from data_prep.errors import InputError, run_command
from recipes.training import faults
from recipes.training.distributed import free_port
from recipes.training.prepare import prepare
from recipes.training.settings import REPOSITORY

# Launcher options that take no value; tests compare them with deepspeed's parser.
FLAGS = {
    "--module",
    "--no_python",
    "--no_local_rank",
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--bind_cores_to_rank",
    "--quiet",
    "-q",
}
GRACE_S = 10  # for processes that outlive the launcher


def split_command(argv: list[str]) -> tuple[dict[str, str], list[str], str, list[str]]:
    """(launcher options by name, launcher arguments as given, script, script arguments). Raises InputError without a script."""
    options: dict[str, str] = {}
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        name, separator, value = argv[position].partition("=")
        if name in FLAGS:
            options[name] = ""
        elif separator:
            options[name] = value
        elif position + 1 < len(argv):
            position += 1
            options[name] = argv[position]
        else:
            raise InputError(f"launcher option {name} has no value")
        position += 1
    if position >= len(argv):
        raise InputError(
            "no script given: python -m launch.run [deepspeed options] recipes/pretrain.py --recipe R.yaml"
        )
    return options, argv[:position], argv[position], argv[position + 1 :]


def world_size_of(options: dict[str, str]) -> int | None:
    """Ranks that the launcher options ask for; None where that takes a host file or a look at the devices."""
    count = options.get("--num_accelerators", options.get("--num_gpus"))
    if count is None or any(name in options for name in ("-H", "--hostfile")):
        return None
    if not count.isdigit() or count == "0":
        raise InputError(f"--num_accelerators {count} is not a positive number")
    return int(count)


def check_launcher(options: dict[str, str]) -> list[str]:
    """Refuse what would fail after the launch; returns the options to add (a free port)."""
    for name in ("-H", "--hostfile"):
        # deepspeed falls back to this machine alone, with a warning
        if name in options and not Path(options[name]).is_file():
            raise InputError(f"{name} {options[name]} does not exist")
    port = options.get("--master_port")
    if port is None:
        return ["--master_port", str(free_port())]
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--master_port {port} is not a port number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise InputError(
                f"--master_port {port} can't be used: {error.strerror}; leave it out to have a free one chosen"
            ) from None
    return []


def check_script(script: str, arguments: list[str], options: dict[str, str]) -> Path | None:
    """Check what the entry script would check; returns its run directory, None for a script that is not ours."""
    ours = REPOSITORY / "recipes" / "pretrain.py"
    if "--module" in options:
        if script != "recipes.pretrain":
            return None
    elif not Path(script).is_file():
        raise InputError(f"script {script} does not exist")
    elif Path(script).resolve() != ours:
        return None
    from recipes import pretrain

    return prepare(
        pretrain.parse_arguments(arguments), world_size_of(options), os.environ.get("DS_ACCELERATOR")
    ).recipe.run_directory


class Launch:
    """A deepspeed launcher in a process group of its own, and this process's signals passed on to its ranks."""

    def __init__(self, command: list[str]):
        self.signals = 0
        self._process = subprocess.Popen(command, start_new_session=True)
        for number in faults.StopSignals.NUMBERS:
            signal.signal(number, self._pass_on)

    def ranks(self) -> list[psutil.Process]:
        """Processes with a RANK whose parent has none."""
        found = []
        try:
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        for process in descendants:
            try:
                if "RANK" in process.environ() and "RANK" not in process.parent().environ():
                    found.append(process)
            except (psutil.Error, AttributeError):
                continue
        return found

    def _pass_on(self, number, _frame) -> None:
        self.signals += 1
        if number == signal.SIGINT and self.signals > 1:
            print("interrupted again: ending all ranks without saving", file=sys.stderr)
            self._signal_group(signal.SIGKILL)
            return
        ranks = self.ranks()
        for rank in ranks:
            try:
                rank.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        if ranks:
            print(
                f"{signal.Signals(number).name} passed to {len(ranks)} ranks, which save and leave",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._signal_group(signal.SIGTERM)

    def wait(self) -> int:
        """The launcher's exit code, once nothing it started is left."""
        code = self._process.wait()
        deadline = time.monotonic() + GRACE_S
        while self._signal_group(0) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._signal_group(signal.SIGKILL)
        return code

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self._process.pid, number)
            return True
        except (ProcessLookupError, PermissionError):
            return False


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    options, launcher_arguments, script, arguments = split_command(argv)
    run_directory = check_script(script, arguments, options)
    added = check_launcher(options)
    if "--log_level" not in options:
        added += ["--log_level", "error"]  # its one warning says that there is no host file
    logs = run_directory / "logs" if run_directory else None
    if logs:
        faults.clear_failures(logs)
    port = added[1] if added[0] == "--master_port" else options["--master_port"]
    print(f"checks passed; starting on port {port}", flush=True)
    launch = Launch(
        [sys.executable, "-m", "deepspeed.launcher.runner", *added, *launcher_arguments, script, *arguments]
    )
    code = launch.wait()
    if code == 0:
        return 0
    failure = faults.first_failure(logs) if logs else None
    if failure is not None:
        print(faults.describe(failure), file=sys.stderr)
        return failure["exit_code"]
    if launch.signals:
        cause = "stopped by a signal before training had begun; nothing was lost"
    else:
        # A rank that is killed leaves no report; launchers turn signal N into 256 - N or -N.
        number = -code if code < 0 else 256 - code
        killed = number in {s.value for s in signal.Signals} and code not in (1, 2)
        what = f"was ended by {signal.Signals(number).name}" if killed else f"ended with exit code {code}"
        cause = f"a rank {what} without a report; its last words are above" + (
            " (SIGKILL is often the kernel, out of memory)" if killed and number == signal.SIGKILL else ""
        )
        if run_directory and (run_directory / "state.json").exists():
            faults.write_state(run_directory, "failed", None, cause)
    print(f"error: {cause}", file=sys.stderr)
    return code if code == faults.USER_MISTAKE else faults.FAULT


if __name__ == "__main__":
    sys.exit(run_command(main))
