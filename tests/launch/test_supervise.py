import os
import signal
import subprocess
import sys

import psutil
import pytest

from data_prep.errors import InputError
from launch import supervise
from recipes.training.settings import CheckpointSettings, Recipe
from tests.conftest import REPOSITORY, launch

COMMAND = ["--num_accelerators", "8", "--log_level=info", "recipes/pretrain.py", "--recipe", "r.yaml"]


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """`launch.run` and its checks replaced: each start runs the next of the shell commands given; returns the starts."""
    starts, popen = [], subprocess.Popen

    def use(*scripts):
        remaining = list(scripts)

        def start(command, **options):
            starts.append(command[3:])
            return popen(["sh", "-c", remaining.pop(0)], **options)

        monkeypatch.setattr(subprocess, "Popen", start)
        return starts

    use.checkpoints = tmp_path / "checkpoints"
    use.checkpoints.mkdir()

    def save(step):
        folder = use.checkpoints / f"global_step{step}"
        return f"mkdir {folder}; echo {{}} > {folder}/manifest.json; exit 1"

    def resume(asked):
        use.recipe = Recipe(tmp_path.name, output_dir=str(tmp_path.parent), checkpoint=CheckpointSettings(resume=asked))

    use.save, use.resume = save, resume
    resume("latest")
    monkeypatch.setattr(supervise.run, "check_script", lambda *_, **__: use.recipe)
    monkeypatch.setattr(supervise.run, "find_script", lambda script, _: script)
    before = {number: signal.getsignal(number) for number in supervise.faults.StopSignals.NUMBERS}
    yield use
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_fault_is_started_again_and_a_mistake_is_not(stub, capfd):
    starts = stub("echo 'error: rank 1 failed' >&2; exit 1", "exit 0")
    assert supervise.main(["--pause_s", "0", *COMMAND]) == 0
    assert starts == [COMMAND, COMMAND]
    assert "starting again in 0 s (1 of 5): rank 1 failed" in capfd.readouterr().err
    assert stub("echo 'error: unknown key' >&2; exit 2") is starts
    assert supervise.main(COMMAND) == 2


def test_a_run_that_others_stopped_goes_on(stub, capfd):
    state = """echo '{{"state": "{}"}}' > {}/state.json"""
    folder = stub.checkpoints.parent
    starts = stub(state.format("stopped", folder), state.format("finished", folder))
    assert supervise.main(["--pause_s", "0", *COMMAND]) == 0 and len(starts) == 2
    assert "stopped by a signal that did not come through this command" in capfd.readouterr().err


def test_it_gives_up_with_the_first_cause(stub, capfd):
    starts = stub("echo 'error: first' >&2; exit 1", "echo 'error: second' >&2; exit 1", "exit 1")
    assert supervise.main(["--max_restarts", "2", "--pause_s", "0.01", *COMMAND]) == 1
    output = capfd.readouterr().err
    assert "starting again in 0.02 s (2 of 2)" in output and len(starts) == 3
    assert output.splitlines()[-1] == "error: 3 starts in a row without a new checkpoint; the first ended so: first"


def test_a_new_checkpoint_counts_as_progress(stub, capfd):
    starts = stub(*(stub.save(step) for step in (5, 10, 15)), "exit 1", "exit 0")
    assert supervise.main(["--max_restarts", "2", "--pause_s", "0", *COMMAND]) == 0
    assert starts == [COMMAND] * 5


def test_a_run_that_has_saved_is_not_begun_again(stub):
    """--resume none, and STEP, hold until the first checkpoint of this run; one that was fetched is none."""
    go_on = [*COMMAND, "--resume", "latest"]
    stub.resume("none")
    starts = stub("exit 1", stub.save(5), "exit 1", "exit 0")
    assert supervise.main(["--pause_s", "0", *COMMAND]) == 0
    assert starts == [COMMAND, COMMAND, go_on, go_on]
    starts.clear()
    stub.resume("3")  # 5 belongs to the branch that is left: it is saved anew
    stub(stub.save(3), f"rm -r {stub.checkpoints}/global_step5; {stub.save(5)}", "exit 1", "exit 0")
    assert supervise.main(["--max_restarts", "2", "--pause_s", "0", *COMMAND]) == 0
    assert starts == [COMMAND, COMMAND, go_on, go_on]


@pytest.mark.parametrize(
    "option", ["--pause_s=nan", "--pause_s=-3", "--pause_s=inf", "--max_restarts=-1", "--pause_s=x"]
)
def test_bad_numbers(option):
    with pytest.raises(InputError, match=r"argument --\w+: \S+ is no number from 0 on"):
        supervise.main([option, *COMMAND])


@pytest.mark.parametrize("content", ["{}", "[]", "5", "", '{"state": "running"}'])
def test_a_state_that_says_nothing(stub, content):
    (stub.checkpoints.parent / "state.json").write_text(content)
    assert not supervise.was_stopped(stub.recipe)


def test_fewer_devices(stub, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "devices_present", lambda: 7)
    tried = []

    def check(_script, _arguments, options, _accelerator, **_):
        tried.append(int(options["--num_accelerators"]))
        if 8 % tried[-1]:
            raise InputError(f"8 is not divisible by {tried[-1]}")

    monkeypatch.setattr(supervise.run, "check_script", check)
    fewer = ["--log_level=info", "--num_accelerators", "4", "recipes/pretrain.py", "--recipe", "r.yaml"]
    assert supervise.fitting(COMMAND, None) == fewer and tried == [7, 6, 5, 4]
    assert "7 of 8 devices are left: going on with 4 ranks" in capfd.readouterr().err
    monkeypatch.setattr(supervise, "devices_present", lambda: 8)
    assert supervise.fitting(COMMAND, None) == COMMAND

    def refuse(*_, **__):
        raise InputError("it was saved by 8 ranks")

    monkeypatch.setattr(supervise, "devices_present", lambda: 7)
    monkeypatch.setattr(supervise.run, "check_script", refuse)
    with pytest.raises(
        InputError, match="7 of 8 devices are left, and the run can't go on .*: it was saved by 8 ranks"
    ):
        supervise.fitting(COMMAND, None)


def test_what_a_killed_launcher_left_is_ended():
    sleeper = subprocess.Popen(["sleep", "100"], env={**os.environ, supervise.MARK: "one"})
    other = subprocess.Popen(["sleep", "100"], env={**os.environ, supervise.MARK: "other"})
    supervise.end_left_over("one")
    assert not psutil.pid_exists(sleeper.pid) and other.poll() is None
    other.kill()
    other.wait()


def test_a_mistake_is_told_before_the_first_start(tiny):
    command = [sys.executable, "-m", "launch.supervise", "recipes/pretrain.py", "--recipe", tiny, "schedule.step=3"]
    finished = launch(command)
    assert finished.code == 2 and finished.output.startswith("error: ") and "schedule.steps" in finished.output
    assert len(finished.output.splitlines()) == 1


def test_help():
    text = subprocess.run(
        [sys.executable, "-m", "launch.supervise", "--help"], capture_output=True, text=True, cwd=REPOSITORY, check=True
    ).stdout
    assert "--max_restarts" in text and "--pause_s" in text
