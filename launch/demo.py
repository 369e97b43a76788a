"""The whole way once, on a CPU: text, tokenizer, token files, training with an interruption, resume, export, a sample.

Called by launch/demo.sh. Every command it runs is printed, and can be run by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import make_directory
from monitoring.metrics import duration
from monitoring.report import plot_loss, summarize
from recipes.training import checkpoint_files
from recipes.training.recipe_file import load_recipe
from recipes.training.settings import REPOSITORY

VOCAB_SIZE = 4096
VALIDATION_FRACTION = 0.02
PROMPT = "def test_"


class Demo:
    """The steps of the demo; each is skipped, and says so, when its result is there.

    Args:
        out: holds everything that the demo makes.
        steps: optimizer steps; None: the recipe's.
    """

    def __init__(self, out: Path, steps: int | None):
        self.out, self.data = out, out / "data"
        self.corpus, self.tokenizer = self.data / "corpus.jsonl", self.data / "tokenizer"
        self.tokens, self.train, self.validation = (
            self.data / f"{name}_text_document" for name in ("all", "train", "validation")
        )
        self.overrides = [
            f"output_dir={out / 'runs'}",
            f"data.files={self.train}",
            f"data.validation_files={self.validation}",
            f"data.tokenizer={self.tokenizer}",
            *([f"schedule.steps={steps}", f"schedule.warmup_steps={min(10, steps // 2)}"] if steps else []),
        ]
        recipe, _ = load_recipe(REPOSITORY / "recipes" / "demo.yaml", self.overrides)
        self.run, self.steps = recipe.run_directory, recipe.total_steps
        self.export = out / "export"
        self.times: dict[str, float] = {}

    def phase(self, name: str, made: Path, *commands: list[str]) -> None:
        """Run `commands` unless `made` is there."""
        if made.exists():
            print(f"\n== {name}: {_short(made)} is there, used again", flush=True)
            return
        with self._timed(name):
            for command in commands:
                _run(command)

    @contextlib.contextmanager
    def _timed(self, name: str):
        print(f"\n== {name}", flush=True)
        begin = time.perf_counter()
        yield
        self.times[name] = time.perf_counter() - begin

    def make_data(self) -> None:
        def record(prefix: Path) -> Path:
            return Path(f"{prefix}.json")  # written last

        module = [sys.executable, "-m"]
        self.phase("corpus", self.corpus, [*module, "data_prep.corpus", "stdlib", str(self.corpus)])
        command = [*module, "data_prep.train_tokenizer", "--input", str(self.corpus)]
        command += ["--vocab_size", str(VOCAB_SIZE), "--output", str(self.tokenizer)]
        self.phase("tokenizer", self.tokenizer, command)
        command = [*module, "data_prep.tokenize_files", "--input", str(self.corpus)]
        command += ["--output_prefix", str(self.data / "all"), "--tokenizer", str(self.tokenizer), "--overwrite"]
        self.phase("token files", record(self.tokens), command)
        command = [*module, "data_prep.split_tokens", str(self.tokens), "--train_prefix", str(self.train)]
        command += ["--validation_prefix", str(self.validation), "--validation_fraction", str(VALIDATION_FRACTION)]
        self.phase("validation split", record(self.validation), [*command, "--overwrite"])

    def pretrain(self) -> None:
        """Train to the end, interrupted half way by a SIGTERM as a pre-emption would."""
        command = [sys.executable, "-m", "launch.run", "--num_accelerators", "2"]
        command += [str(REPOSITORY / "recipes" / "pretrain.py"), "--recipe", str(REPOSITORY / "recipes" / "demo.yaml")]
        command += self.overrides
        newest = self._newest_checkpoint()
        if newest >= self.steps:
            print(f"\n== training: {_short(self.run)} is at step {newest} of {self.steps}, used again", flush=True)
            return
        middle = self.steps // 2
        if newest < middle:
            before = self._metrics_size()  # of an earlier start that was killed
            with self._timed(f"training to step {middle}, then SIGTERM"):
                _run(command, stop_when=lambda: self._metrics_size() > before and self._last_step() >= middle)
        with self._timed("resume and training to the end"):
            _run(command)

    def _newest_checkpoint(self) -> int:
        found = checkpoint_files.find(self.run / "checkpoints", "latest").chosen
        return checkpoint_files.step_of(found) if found else 0

    def _metrics_size(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    def _last_step(self) -> int:
        metrics = self.run / "metrics.jsonl"
        if not metrics.exists():
            return 0
        whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0]
        return json.loads(whole.splitlines()[-1])["step"] if whole else 0

    def export_and_sample(self) -> None:
        record = self.export / "export.json"
        newest = self._newest_checkpoint()
        if record.exists() and json.loads(record.read_text(encoding="utf-8"))["step"] == newest:
            print(f"\n== export: {_short(self.export)} is there, used again", flush=True)
        else:
            with self._timed("export to Hugging Face format"):
                command = [sys.executable, "-m", "recipes.export_hf", str(self.run), "--output", str(self.export)]
                _run([*command, "--overwrite"])
        with self._timed("sample"):
            _run([sys.executable, "-m", "recipes.generate_text", str(self.export), "--prompt", PROMPT])

    def summary(self) -> None:
        picture = self.run / "loss.png"
        plot_loss(self.run, picture)
        print(f"\n== summary\n{summarize(self.run)}")
        for name, path in (
            ("loss curve", picture),
            ("run directory", self.run),
            ("TensorBoard", self.run / "tensorboard"),
            ("exported model", self.export),
        ):
            print(f"{name:<16} {_short(path)}")
        if self.times:
            parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.times.items())
            print(f"time             {duration(sum(self.times.values()))}: {parts}")


def _run(command: list[str], stop_when=None) -> None:
    """Run a command, its line printed first; with `stop_when`, send it SIGTERM once that holds. Ends the demo if it fails."""
    words = [_short(word) for word in command]
    print("$", shlex.join(["python" if words[0] == _short(sys.executable) else words[0], *words[1:]]), flush=True)
    # Progress bars are for long waits; here every wait is short.
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "TQDM_DISABLE": "1"})
    try:
        while stop_when is not None and process.poll() is None:
            time.sleep(0.1)
            if stop_when():
                process.send_signal(signal.SIGTERM)
                break
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code < 0:
        raise SystemExit(f"error: that command was ended by {signal.Signals(-code).name}; call the demo again to go on")
    if code:
        raise SystemExit(code)  # the command has said why


def _leave(number, _frame) -> None:
    raise SystemExit(128 + number)  # by way of _run, which ends what it started


def _short(word) -> str:
    """Paths in the working directory without it, and KEY=PATH likewise."""
    return str(word).replace(f"{Path.cwd()}{os.sep}", "")


@contextlib.contextmanager
def _alone(out: Path):
    """Hold a lock on `out`: a second demo there waits, then finds everything done."""
    with open(make_directory(out, "--out") / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"another demo is at work in {_short(out)}; waiting for it (--out DIR makes one of its own)", flush=True
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="bash launch/demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "demo", help="directory of everything it makes (default: demo)"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps (default: the recipe's); below 2 there is no half way"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps} must be positive")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    signal.signal(signal.SIGTERM, _leave)
    demo = Demo(arguments.out.resolve(), arguments.steps)
    with _alone(demo.out):
        demo.make_data()
        demo.pretrain()
        demo.export_and_sample()
        demo.summary()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
