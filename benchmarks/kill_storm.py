"""A run that is killed again and again at random moments, against one that is left alone.

    python benchmarks/kill_storm.py [--kills 50] [--seed 1] [--synchronous] [--directory DIR]

Two ranks on this machine under launch.supervise, a checkpoint every 5 steps. Each kill is SIGKILL to one rank, to both, to
deepspeed's launcher, or to launch.run; half of them come at a random moment, half while a checkpoint is being written
(made to take 0.3 s). After each, the run must go on from the newest checkpoint that was published. At the end every
step's loss, whichever start took it, and the final weights must be those of the undisturbed run, bit for bit. Prints what
happened as JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import yaml

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.training import checkpoint_files
from recipes.training.settings import REPOSITORY

INTERVAL = 5
LIMIT_S = 120  # for one start to take its first step
MODEL = {
    "family": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}


def write_recipe(folder: Path, asynchronous: bool) -> Path:
    recipe = {
        "name": "storm",
        "output_dir": "runs",
        "model": MODEL,
        "global_batch_size": 8,
        "data": {"files": "synthetic", "seq_length": 16},
        "schedule": {"steps": 10**6, "warmup_steps": 2, "decay": "constant"},
        "checkpoint": {"every_steps": INTERVAL, "keep_last": 3, "asynchronous": asynchronous},
        "monitor": {"tensorboard": False},
        "deepspeed_config": "ds.json",
    }
    optimizer = {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "gradient_clipping": 1.0}
    (folder / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 1}}))
    (folder / "storm.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "storm.yaml"


def start(recipe: Path, log: Path, *options: str, module: str = "launch.supervise", slow: bool = True):
    own = ["--pause_s", "0.1", "--max_restarts", "20"] if module == "launch.supervise" else []
    command = [sys.executable, "-m", module, *own, "--num_accelerators", "2", "recipes/pretrain.py"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if slow:  # so that many kills fall into steps and writes
        faults = str(REPOSITORY / "tests" / "faults")
        environment |= {"PYTHONPATH": faults, "SLOW_STEP_S": "0.1", "SLOW_WRITE_S": "0.1"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*command, "--recipe", str(recipe), *options],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )


def lines_of(run: Path) -> list[dict]:
    """Lines of metrics.jsonl, but for a last one that was cut by a kill."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def processes(supervisor: subprocess.Popen) -> dict[str, list[psutil.Process]]:
    """What is under the supervisor: launch.run, deepspeed's launcher, ranks."""
    found: dict[str, list[psutil.Process]] = collections.defaultdict(list)
    for process in psutil.Process(supervisor.pid).children(recursive=True):
        try:
            words, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if "RANK" in environment:
            found["rank"].append(process)
        elif "launch.run" in words:
            found["launch.run"].append(process)
        elif "deepspeed.launcher.launch" in words:
            found["launcher"].append(process)
    return found


def wait_for(condition, supervisor: subprocess.Popen, log: Path, limit_s: float = LIMIT_S) -> None:
    begin = time.monotonic()
    while not condition():
        if supervisor.poll() is not None or time.monotonic() - begin > limit_s:
            raise RuntimeError(f"the run does not go on; the end of its output:\n{log.read_text()[-3000:]}")
        time.sleep(0.01)


def storm(folder: Path, kills: int, seed: int, asynchronous: bool = True) -> dict:
    """Returns counts of what was killed, the most steps that one kill cost, and what came out wrong (nothing)."""
    chance, recipe = random.Random(seed), write_recipe(folder, asynchronous)
    run, log = folder / "runs" / "storm", folder / "storm.log"
    killed, lost, wrong, begin = collections.Counter(), [], [], time.monotonic()
    supervisor = start(recipe, log)
    attempt, reached, published = 1, 0, 0
    try:
        for number in range(kills + 1):
            wait_for(partial(steps_of, run, attempt), supervisor, log)
            first = steps_of(run, attempt)[0]
            if number:
                lost.append(reached - (first - 1))
                if first - 1 != published:
                    wrong.append(
                        f"start {attempt} went on from step {first - 1}, the newest checkpoint was of {published}"
                    )
            if number == kills:
                break
            # At least one more checkpoint, so that the storm gets on; then the kill.
            wait_for(partial(has_passed, run, attempt, first + INTERVAL), supervisor, log)
            saving = chance.random() < 0.5
            if saving:
                wait_for(partial(checkpoint_files.unfinished, run / "checkpoints"), supervisor, log)
            time.sleep(chance.uniform(0, 0.3 if saving else 1.5))
            whom = chance.choice(["rank 0", "rank 1", "both ranks", "launcher", "launch.run"])
            for process in pick(processes(supervisor), whom):
                process.kill()
            killed[f"{whom}{', saving' if saving else ''}"] += 1
            # Until the next start is there, what was not killed can take steps, and save.
            wait_for(partial(is_started_again, run, attempt), supervisor, log)
            reached, attempt = steps_of(run, attempt)[-1], attempts(run)
            published = max(map(checkpoint_files.step_of, checkpoint_files.checkpoints(run / "checkpoints")), default=0)
    finally:
        supervisor.terminate()
        code = supervisor.wait(120)
    if code != 0:
        wrong.append(f"the last start ended with code {code}")
    steps = compare(folder, recipe, run, wrong)
    return {
        "kills": kills,
        "killed": dict(sorted(killed.items())),
        "starts": attempt,
        "steps": steps,
        "steps_repeated": len(lines_of(run)) - steps,
        "most_steps_lost_to_one_kill": max(lost),
        "kills_that_cost_more_than_an_interval": sum(steps > INTERVAL for steps in lost),
        "interval": INTERVAL,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin),
    }


def pick(found: dict[str, list[psutil.Process]], whom: str) -> list[psutil.Process]:
    ranks = sorted(found["rank"], key=lambda p: int(p.environ()["RANK"]))
    return {
        "rank 0": ranks[:1],
        "rank 1": ranks[1:2],
        "both ranks": ranks,
        "launcher": found["launcher"],
        "launch.run": found["launch.run"],
    }[whom]


def steps_of(run: Path, attempt: int) -> list[int]:
    return [line["step"] for line in lines_of(run) if line["attempt"] == attempt]


def has_passed(run: Path, attempt: int, step: int) -> bool:
    return steps_of(run, attempt)[-1] >= step


def attempts(run: Path) -> int:
    return len(json.loads((run / "environment.json").read_text())["attempts"])


def is_started_again(run: Path, attempt: int) -> bool:
    return attempts(run) > attempt


def compare(folder: Path, recipe: Path, run: Path, wrong: list[str]) -> int:
    """Adds to `wrong` what differs from a run that nothing happens to; returns the number of its steps."""
    import torch

    # A start that was killed can have come further than the last one, whose newest checkpoint has the final weights.
    steps = max(line["step"] for line in lines_of(run))
    saved = checkpoint_files.checkpoints(run / "checkpoints")[-1]
    log = folder / "whole.log"
    options = [f"schedule.steps={steps}", f"checkpoint.every_steps={checkpoint_files.step_of(saved)}"]
    whole = start(recipe, log, "name=whole", *options, module="launch.run", slow=False)
    if whole.wait(600) != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{log.read_text()[-3000:]}")
    expected = {line["step"]: line["loss"] for line in lines_of(folder / "runs" / "whole")}
    for line in lines_of(run):
        if line["loss"] != expected[line["step"]]:
            wrong.append(
                f"step {line['step']} of start {line['attempt']}: loss {line['loss']}, not {expected[line['step']]}"
            )
    files = [saved, folder / "runs" / "whole" / "checkpoints" / saved.name]
    weights = [torch.load(f / "mp_rank_00_model_states.pt", weights_only=False)["module"] for f in files]
    if not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]):
        wrong.append(f"the weights of {saved.name} differ")
    return len(expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--synchronous", action="store_true", help="checkpoint.asynchronous: false")
    parser.add_argument("--directory", type=Path, help="kept; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.directory or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = storm(folder, arguments.kills, arguments.seed, not arguments.synchronous)
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
