"""Check a run, then start it with the deepspeed launcher, pass signals to its ranks, and report the first cause.

    python -m launch.run [deepspeed options] recipes/pretrain.py --recipe R.yaml ...

The deepspeed launcher alone checks nothing, forwards no signal on one node (SIGTERM to it orphans the ranks), takes
port 29500 whether it is free or not, and buries a rank's error under its own lines.
"""

from __future__ import annotations

import difflib
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from data_prep.errors import InputError, run_command
from data_prep.files import read_json
from launch.hosts import devices_per_node, read_host_file
from recipes.training import faults
from recipes.training.distributed import free_port
from recipes.training.prepare import prepare
from recipes.training.remarks import remarks
from recipes.training.run_directory import check_unlocked
from recipes.training.settings import REPOSITORY, Recipe

# The launcher's options; tests compare them with deepspeed's parser.
FLAGS = """
    --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --bind_cores_to_rank --quiet -q
    """.split()
WITH_VALUE = """
    -H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators --master_port --master_addr
    --node_rank --launcher --launcher_args --enable_each_rank_log --autotuning --bind_core_list --ssh_port --venv_script
    --log_level
    """.split()
# Device files of accelerators that DeepSpeed knows: NVIDIA (under WSL too), AMD, Intel, Habana, Ascend.
DEVICE_FILES = (
    "/dev/nvidia[0-9]* /dev/dxg /dev/kfd /dev/dri/renderD* /dev/accel/* /dev/hl[0-9]* /dev/davinci[0-9]*".split()
)
SCRIPTS = ("pretrain", "pretrain_pipeline")  # of recipes/
PORT_TRIES = 3  # between choosing a free port and using it, somebody else can
GRACE_S = 10  # for what outlives the launcher and its ranks


def split_command(argv: list[str]) -> tuple[dict[str, str], list[str], str, list[str]]:
    """(launcher options by name, launcher arguments as given, script, script arguments). Raises InputError without a script."""
    options: dict[str, str] = {}
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        name, separator, value = argv[position].partition("=")
        if name not in FLAGS and name not in WITH_VALUE:
            close = difflib.get_close_matches(name, [*FLAGS, *WITH_VALUE], n=1)
            hint = f"did you mean {close[0]}?" if close else "options of the script come after it"
            raise InputError(f"{name} is no option of the deepspeed launcher; {hint}")
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


def hosts_of(options: dict[str, str]) -> dict[str, int] | None:
    """{host: slots} where the launcher takes all of a host file; None without one, or with a filter on it."""
    path = options.get("-H", options.get("--hostfile"))
    filters = ("-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators")
    return None if path is None or any(name in options for name in filters) else read_host_file(path)


def world_size_of(options: dict[str, str]) -> int | None:
    """Ranks that the launcher will start; None where that takes a filter on hosts."""
    if (hosts := hosts_of(options)) is not None:
        return sum(hosts.values())
    if any(name in options for name in ("-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes")):
        return None
    count = options.get("--num_accelerators", options.get("--num_gpus"))
    if count is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or None
        return len(visible.split(",")) if visible else None
    if not count.isdecimal() or int(count) == 0:
        raise InputError(f"--num_accelerators {count} is not a positive number")
    return int(count)


def check_launcher(options: dict[str, str]) -> int:
    """Refuse what would fail after the launch; returns the port to use, a free one where none is asked for."""
    for name in ("-H", "--hostfile"):
        # deepspeed falls back to this machine alone, with a warning, where there is no file
        if name in options:
            read_host_file(options[name])
    port = options.get("--master_port")
    if port is None:
        return free_port()
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--master_port {port} is not a port number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise InputError(
                f"--master_port {port} can't be used: {error.strerror}; leave it out to have a free one chosen"
            ) from None
    return int(port)


def find_script(script: str, options: dict[str, str]) -> str:
    """The script's path; one of this repository's can be named from any directory. Raises InputError."""
    if "--module" in options:
        return script
    if not script.endswith(".py") and "--no_python" not in options:
        raise InputError(f"{script} is no Python script; the script comes first, its --recipe after it")
    found = next((path for path in (Path(script), REPOSITORY / script) if path.is_file()), None)
    if found is None:
        raise InputError(f"script {script} does not exist")
    return str(found)


def find_accelerator() -> str | None:
    """DeepSpeed's name of the accelerator where that takes no look at the devices: as set, or "cpu" on a Linux without any."""
    if "DS_ACCELERATOR" in os.environ:
        return os.environ["DS_ACCELERATOR"]
    if sys.platform.startswith("linux") and not any(glob.glob(pattern) for pattern in DEVICE_FILES):
        return "cpu"
    return None


def check_script(
    script: str,
    arguments: list[str],
    options: dict[str, str],
    accelerator: str | None,
    tell: bool = False,
    content: bool = True,
) -> Recipe | None:
    """Check what the entry script would check; returns its recipe, None for a script that is not ours.

    Args:
        tell: print the warnings and notes.
        content: as in `prepare`.
    """
    if "--module" in options:
        name = next((name for name in SCRIPTS if script == f"recipes.{name}"), None)
    else:
        path = Path(script).resolve()
        name = next((name for name in SCRIPTS if path == REPOSITORY / "recipes" / f"{name}.py"), None)
    if name is None:
        return None
    from recipes.training.loop import parse_arguments

    parsed, hosts = parse_arguments("", arguments), hosts_of(options)
    node = None if hosts is None else devices_per_node(hosts)
    world_size, script = world_size_of(options), f"recipes/{name}.py"
    prepared = prepare(parsed, world_size, accelerator, content=content, script=script, devices_per_node=node)
    check_unlocked(prepared.recipe.run_directory)
    if tell:
        print("".join(f"{line}\n" for line in remarks(prepared.recipe, prepared.ds_config, prepared.sizes)), end="")
    return prepared.recipe


class Launch:
    """A deepspeed launcher in a process group of its own, and this process's signals passed on to its ranks.

    Attributes:
        signalled: whether a signal came.
        killed: whether the ranks were ended without saving.
    """

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.signalled = self.killed = False
        self._process: subprocess.Popen | None = None
        for number in faults.StopSignals.NUMBERS:
            signal.signal(number, self._pass_on)
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        if self.signalled:
            self._signal_group(signal.SIGTERM)

    def ranks(self) -> list[psutil.Process]:
        """The group's processes with a RANK whose parent has none."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self._process.pid and "RANK" in process.environ():
                    parent = process.parent()
                    if parent is None or parent.pid == 1 or "RANK" not in parent.environ():
                        found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _pass_on(self, number, _frame) -> None:
        again, self.signalled = self.signalled, True
        if self._process is None:
            return
        if number == signal.SIGINT and again:
            print("interrupted again: ending all ranks without saving", file=sys.stderr)
            self.killed = True
            self._signal_group(signal.SIGKILL)
            return
        ranks = self.ranks()
        for rank in ranks:
            try:
                # Until a rank can save, SIGINT would show a traceback; SIGTERM just ends it.
                rank.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
            except psutil.NoSuchProcess:
                continue
        name = signal.Signals(number).name
        if ranks:
            print(f"{name} passed to {len(ranks)} ranks, which save and leave", file=sys.stderr, flush=True)
        else:
            self._signal_group(signal.SIGTERM)

    def wait(self) -> int:
        """The launcher's exit code, once nothing it started is left.

        The launcher can end before its ranks: a signal to the whole group ends it at once, while they save.
        """
        code = self._process.wait()
        told = self.signalled
        while ranks := self.ranks():
            if not told:  # nobody is left to restart or end them: they save and leave
                self._pass_on(signal.SIGTERM, None)
                told = True
            psutil.wait_procs(ranks, timeout=1)
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


def port_was_taken(run_directory: Path | None, port: int, begin: float) -> bool:
    """Whether the start at `begin` failed because its port, free when it was chosen, no longer was."""
    reported = faults.failures(run_directory / "logs") if run_directory else []
    return any(f"port {port} is in use" in failure["error"] for failure in reported if failure["time"] >= begin)


def report(launch: Launch, code: int, run_directory: Path | None, refused: str, begin: float) -> int:
    """Print the first cause of a launch that ended with `code`; returns this command's exit code.

    Args:
        refused: what a rank refused before the run had begun, if any.
        begin: when the launch began; what ranks reported before is of an earlier start.
    """
    if refused:
        print(refused, file=sys.stderr)
        return faults.USER_MISTAKE
    state_file = run_directory / "state.json" if run_directory else None
    state = read_json(state_file) if state_file and state_file.exists() else {"state": None, "time": 0}
    if state["state"] in ("stopped", "finished") and state["time"] >= begin:
        return 0  # the launcher was ended by a signal, the ranks saved and left
    reported = faults.failures(run_directory / "logs") if run_directory else []
    for failure in reported:
        if failure["time"] >= begin:
            print(faults.describe(failure), file=sys.stderr)
            return failure["exit_code"]
    if launch.signalled and not launch.killed and state["state"] != "running":
        print("error: stopped by a signal before training had begun; nothing was lost", file=sys.stderr)
        return faults.FAULT
    # A rank that is killed leaves no report; launchers turn signal N into 256 - N or -N.
    number = -code if code < 0 else 256 - code
    if launch.signalled:
        cause = "ended by a signal, without saving"
    elif number in {s.value for s in signal.Signals} and code not in (1, 2):
        cause = f"a rank was ended by {signal.Signals(number).name} without a report" + (
            " (often the kernel, out of memory)" if number == signal.SIGKILL else ""
        )
    else:
        cause = f"a rank ended with exit code {code} without a report; its last words are above"
    if state["state"] == "running":
        faults.write_state(run_directory, "failed", None, cause)
        cause += f"; the same command goes on from the newest checkpoint in {run_directory / 'checkpoints'}"
    print(f"error: {cause}", file=sys.stderr)
    return code if code == faults.USER_MISTAKE else faults.FAULT


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print(f"deepspeed options: {' '.join(sorted([*FLAGS, *WITH_VALUE]))}\n")
        print("options of the script: python recipes/pretrain.py --help")
        return 0
    options, launcher_arguments, script, arguments = split_command(argv)
    script = find_script(script, options)
    accelerator = find_accelerator()
    recipe = check_script(script, arguments, options, accelerator, tell=True)
    run_directory = recipe.run_directory if recipe is not None else None
    port = check_launcher(options)
    # deepspeed's one warning says that there is no host file
    quiet = [] if "--log_level" in options else ["--log_level", "error"]
    print(f"checks passed; starting on port {port}", flush=True)
    # A rank is known by its RANK: one in our own environment (a pod of a job operator) must not reach the launcher.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if accelerator == "cpu" and "DS_ACCELERATOR" not in os.environ:
        print("no accelerator on this machine: training on the CPU (DS_ACCELERATOR=cpu)", flush=True)
        environment["DS_ACCELERATOR"] = accelerator  # else DeepSpeed warns of the same, twice
    with tempfile.TemporaryDirectory() as folder:
        refusal = Path(folder) / "refused"
        environment[faults.REPORT_VARIABLE] = str(refusal)
        for _ in range(PORT_TRIES):
            begin = time.time()
            added = quiet if "--master_port" in options else ["--master_port", str(port), *quiet]
            command = [
                sys.executable,
                "-m",
                "deepspeed.launcher.runner",
                *added,
                *launcher_arguments,
                script,
                *arguments,
            ]
            launch = Launch(command, environment)
            code = launch.wait()
            if "--master_port" in options or not port_was_taken(run_directory, port, begin):
                break
            port = free_port()
            print(f"somebody took that port meanwhile; starting on port {port}", flush=True)
        refused = refusal.read_text(encoding="utf-8") if refusal.exists() else ""
    return 0 if code == 0 else report(launch, code, run_directory, refused, begin)


if __name__ == "__main__":
    sys.exit(run_command(main))
