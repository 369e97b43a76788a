"""What a run did, in a few lines and a picture: `python -m monitoring.report RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import read_json
from monitoring.metrics import read_metrics


def plot_loss(run_directory: Path, output: Path) -> None:
    """Draw training and validation loss against steps, each resume marked, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    training, validation = read_metrics(run_directory)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    points = [(line["step"], line["loss"]) for line in training if line["loss"] is not None]
    axes.plot(*zip(*points, strict=True), linewidth=1, label="training loss")
    if validation:
        axes.plot(
            [line["step"] for line in validation],
            [line["validation_loss"] for line in validation],
            "o-",
            label="validation loss",
        )
    for number, step in enumerate(resumes(training)):
        axes.axvline(step - 0.5, color="gray", linestyle="--", label=None if number else "resumed")
    axes.set(title=run_directory.name, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)
    plt.close(figure)


def resumes(training: list[dict]) -> list[int]:
    """First step of each attempt but the first."""
    pairs = zip(training, training[1:], strict=False)
    return [after["step"] for before, after in pairs if after["attempt"] != before["attempt"]]


def summarize(run_directory: Path) -> str:
    training, validation = read_metrics(run_directory)
    if not training:
        raise InputError(f"{run_directory} has no step in its metrics.jsonl yet")
    state = read_json(run_directory / "state.json")
    speeds = sorted(line["tokens_per_s"] for line in training)

    def change(lines: list[dict], key: str) -> str:
        first, last = lines[0], lines[-1]
        before, after = ("n/a" if line[key] is None else f"{line[key]:.4f}" for line in (first, last))
        return f"{before} (step {first['step']}) -> {after} (step {last['step']})"

    lines = [
        f"state            {state['state']} at step {state['step']}"
        + (f", {state['cause']}" if state["cause"] else ""),
        f"training loss    {change(training, 'loss')}",
    ]
    if validation:
        lines.append(f"validation loss  {change(validation, 'validation_loss')}")
    lines.append(f"speed            {speeds[len(speeds) // 2]:,.0f} tokens/s (median step)")
    if training[-1]["skipped_steps"]:
        lines.append(f"skipped steps    {training[-1]['skipped_steps']} (non-finite gradients)")
    if resumes(training):
        lines.append(f"resumed          at step {', '.join(map(str, resumes(training)))}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m monitoring.report", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--plot", type=Path, help="where the loss curve goes (default: RUN/loss.png)")
    arguments = parser.parse_args(argv)
    if not (arguments.run / "metrics.jsonl").is_file():
        raise InputError(f"{arguments.run} is no run directory with metrics: it has no metrics.jsonl")
    plot = arguments.plot or arguments.run / "loss.png"
    if plot.suffix != ".png":
        raise InputError(f"--plot {plot} must end in .png")
    print(summarize(arguments.run))
    plot_loss(arguments.run, plot)
    print(f"loss curve       {plot}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
