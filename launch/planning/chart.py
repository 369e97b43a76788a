"""Pipeline schedules as lists of passes, when each pass runs, and the picture of it.

1F1B and DualPipeV are DeepSpeed's own schedule classes, which it trains with; GPipe and interleaved 1F1B, which it does not
have, are written from their papers (arXiv:1811.06965, arXiv:2104.04473) to compare with.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from data_prep.errors import InputError

CHUNKS = 2  # pieces of the model on each rank in interleaved 1F1B; DualPipeV has two by nature
MOST_BOXES = 100_000  # of a picture: some seconds to draw
BOXES = 12  # a stage and micro batch in all schedules together


class Pass(NamedTuple):
    """One forward or backward of one micro batch through one stage."""

    forward: bool
    stage: int
    micro_batch: int


def gpipe(stages: int, micro_batches: int) -> list[list[Pass]]:
    """Passes of each rank, in its order; likewise below."""
    numbers = range(micro_batches)
    return [
        [*(Pass(True, rank, n) for n in numbers), *(Pass(False, rank, n) for n in numbers)] for rank in range(stages)
    ]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Pass]]:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    ranks = []
    for rank in range(stages):
        schedule, passes = TrainSchedule(micro_batches, stages, rank), []
        for step in range(2 * (micro_batches + stages - 1)):
            number, forward = schedule._step_to_micro_batch(step)
            if 0 <= number < micro_batches:
                passes.append(Pass(forward, rank, number))
        ranks.append(passes)
    return ranks


def interleaved(stages: int, micro_batches: int) -> list[list[Pass]]:
    total, cycle, ranks = micro_batches * CHUNKS, stages * CHUNKS, []

    def nth(number: int, rank: int, forward: bool) -> Pass:
        chunk = number % cycle // stages
        chunk = chunk if forward else CHUNKS - 1 - chunk
        return Pass(forward, chunk * stages + rank, number // cycle * stages + number % stages)

    for rank in range(stages):
        ahead = min((stages - rank - 1) * 2 + (CHUNKS - 1) * stages, total)
        passes = [nth(number, rank, True) for number in range(ahead)]
        for number in range(total - ahead):
            passes += [nth(ahead + number, rank, True), nth(number, rank, False)]
        ranks.append(passes + [nth(number, rank, False) for number in range(total - ahead, total)])
    return ranks


def dual_pipe_v(stages: int, micro_batches: int) -> list[list[Pass]]:
    from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass

    ranks = []
    for rank in range(stages):
        passes = []
        for commands in DualPipeVSchedule(micro_batches, stages, rank).steps():
            for command in commands:
                if isinstance(command, (ForwardPass, BackwardPass)):
                    stage = rank if command.phase == 0 else 2 * stages - 1 - rank
                    passes.append(Pass(isinstance(command, ForwardPass), stage, command.buffer_id % micro_batches))
        ranks.append(passes)
    return ranks


def times(ranks: list[list[Pass]], pieces: int) -> list[list[tuple[Pass, float]]]:
    """Each rank's passes with the times at which they begin, in units of one forward of a rank's whole part.

    A backward takes twice as long as a forward; sending takes no time.

    Args:
        pieces: stages on each rank.
    """
    last = len(ranks) * pieces - 1
    ends: dict[Pass, float] = {}
    free, position = [0.0] * len(ranks), [0] * len(ranks)
    begun: list[list[tuple[Pass, float]]] = [[] for _ in ranks]
    while any(at < len(passes) for at, passes in zip(position, ranks, strict=True)):
        moved = False
        for rank, passes in enumerate(ranks):
            while position[rank] < len(passes):
                one = passes[position[rank]]
                needed = []
                if one.forward and one.stage > 0:
                    needed = [Pass(True, one.stage - 1, one.micro_batch)]
                elif not one.forward:
                    before = Pass(True, last, one.micro_batch) if one.stage == last else None
                    needed = [before or Pass(False, one.stage + 1, one.micro_batch)]
                if any(other not in ends for other in needed):
                    break
                begin = max([free[rank], *(ends[other] for other in needed)])
                ends[one] = free[rank] = begin + (1 if one.forward else 2) / pieces
                begun[rank].append((one, begin))
                position[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return begun


def idle_share(begun: list[list[tuple[Pass, float]]], pieces: int) -> float:
    """Share of the step that ranks wait, on average."""
    length = {True: 1 / pieces, False: 2 / pieces}
    end = max(begin + length[one.forward] for passes in begun for one, begin in passes)
    busy = sum(length[one.forward] for passes in begun for one, _ in passes)
    return 1 - busy / (end * len(begun))


def schedules(stages: int, micro_batches: int) -> dict[str, tuple[list[list[tuple[Pass, float]]], int]]:
    """{name: (passes with their times, pieces)} of the schedules that this many micro batches allow."""
    made = {"GPipe": (gpipe, 1), "1F1B": (one_forward_one_backward, 1)}
    if micro_batches % stages == 0:
        made[f"interleaved 1F1B, {CHUNKS} pieces"] = (interleaved, CHUNKS)
    if micro_batches >= 2 * stages:
        made["DualPipeV"] = (dual_pipe_v, 2)
    return {name: (times(make(stages, micro_batches), pieces), pieces) for name, (make, pieces) in made.items()}


def draw(stages: int, micro_batches: int, path: Path) -> dict[str, float]:
    """Draw the schedules to `path`; returns each one's idle share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"--pipeline_chart {path}: the picture is a .png, .svg or .pdf file")
    most = MOST_BOXES // (BOXES * stages)
    if micro_batches > most:
        raise InputError(
            f"--pipeline_chart: {micro_batches} micro batches in {stages} stages are {BOXES * stages * micro_batches:,} boxes, too "
            f"many to see or draw; at most {most} micro batches: a smaller global_batch_size, or more data-parallel GPUs"
        )
    made = schedules(stages, micro_batches)
    end = max(begin for begun, _ in made.values() for passes in begun for _, begin in passes)
    size = (min(4 + end / 4, 40), len(made) * (0.6 + 0.35 * stages))
    figure, axes = pyplot.subplots(len(made), 1, figsize=size, sharex=True, layout="constrained", squeeze=False)
    shares = {}
    for (name, (begun, pieces)), axis in zip(made.items(), axes[:, 0], strict=True):
        shares[name] = idle_share(begun, pieces)
        for rank, passes in enumerate(begun):
            for forward, later in itertools.product((True, False), repeat=2):
                length = (1 if forward else 2) / pieces
                boxes = [
                    (begin, length) for one, begin in passes if (one.forward, one.stage >= stages) == (forward, later)
                ]
                color = pyplot.cm.tab10(0 if forward else 1, alpha=0.6 if later else 1)
                axis.broken_barh(boxes, (rank - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3)
        axis.set_title(f"{name}: {shares[name]:.1%} idle", loc="left", fontsize=9)
        axis.set_ylabel("stage")
        axis.set_yticks(range(stages))
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("time, in forwards of one micro batch (blue forward, orange backward; pale: later pieces)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return shares
