"""What watches a run at work: a watchdog for steps that never end, a check of replicas, a detector of loss spikes."""

from __future__ import annotations

import collections
import faulthandler
import logging
import math
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

from data_prep.files import write_json
from recipes.training import faults

logger = logging.getLogger("recipes")
GRACE_S = 5.0  # for the other ranks to notice too
C_GRACE_S = 60.0  # then the interpreter's own watchdog ends a process that holds the interpreter's lock
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")


class Watchdog:
    """Ends a run in which no step ends: stacks of all threads of all ranks in the logs, the suspected rank named.

    Every rank notices by itself, since a step ends on all of them or on none. Each leaves logs/stalled_rank_N.json with
    where it stands: the rank that is in no collective while others are is suspected, or one that reports nothing.
    """

    def __init__(self, seconds: float | None, watch: faults.FaultWatch, world: int):
        self.seconds, self.watch, self.world = seconds, watch, world
        self._main = threading.get_ident()
        self._beaten, self._step = time.monotonic(), 0
        self._closed = threading.Event()
        if seconds is not None:
            self._log = open(watch.logs / f"rank_{watch.rank}.log", "a", encoding="utf-8")
            if watch.rank == 0:
                for left in watch.logs.glob("stalled_rank_*.json"):  # of an earlier start
                    left.unlink(missing_ok=True)
            self.beat(0)
            threading.Thread(target=self._wait, name="watchdog", daemon=True).start()

    def beat(self, step: int) -> None:
        """The run goes on."""
        self._beaten, self._step = time.monotonic(), step
        if self.seconds is not None:
            # Needs no interpreter lock: for a rank that is stuck in C code with the lock held.
            faulthandler.dump_traceback_later(self.seconds + C_GRACE_S, exit=True, file=self._log)

    def close(self) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        while (left := self._beaten + self.seconds - time.monotonic()) > 0:
            if self._closed.wait(left):
                return
        faulthandler.dump_traceback(file=self._log, all_threads=True)
        self._log.flush()
        write_json(_stall_file(self.watch.logs, self.watch.rank), self._stall())
        time.sleep(GRACE_S)
        stalls = {rank: faults.read_report(_stall_file(self.watch.logs, rank)) for rank in range(self.world)}
        here = [rank for rank, stall in stalls.items() if stall is not None]
        if self.watch.rank != min(here):
            time.sleep(GRACE_S)  # the first one that is here reports for all, and the fault watch ends the others
        suspicion = suspect(stalls)
        self.watch.fail(
            TimeoutError(
                f"no step ended for {self.seconds:g} s after step {self._step} (guards.watchdog_s): {suspicion}; stacks of all "
                f"threads are in {self.watch.logs}/rank_N.log"
            )
        )

    def _stall(self) -> dict:
        frames = sys._current_frames()
        mine = threading.get_ident()
        main = _frames(frames[self._main])
        # The innermost frame that is neither Python's nor torch's tells what the rank does.
        ours = next(
            (f for f in reversed(main) if "/site-packages/" not in f[0] and "/lib/python" not in f[0]), main[-1]
        )
        others = [_frames(frame) for thread, frame in frames.items() if thread != mine]
        collective = next((c for c in map(_collective, [main, *others]) if c is not None), None)
        host, place = socket.gethostname(), f"{ours[2]} ({Path(ours[0]).name}:{ours[1]})"
        return {"rank": self.watch.rank, "host": host, "step": self._step, "at": place, "collective": collective}


def _stall_file(logs: Path, rank: int) -> Path:
    return logs / f"stalled_rank_{rank}.json"


def _frames(frame) -> list[tuple[str, int, str]]:
    """(file, line, function), outermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def _collective(frames: list[tuple[str, int, str]]) -> str | None:
    """The name of the collective that a thread is in."""
    return next((name for file, _, name in reversed(frames) if any(part in file for part in COLLECTIVES)), None)


def suspect(stalls: dict[int, dict | None]) -> str:
    """Whom to suspect.

    Args:
        stalls: by rank, where it stands; None for a rank that reported nothing.
    """
    silent = [rank for rank, stall in stalls.items() if stall is None]
    waiting = [stall for stall in stalls.values() if stall is not None and stall["collective"] is not None]
    elsewhere = [stall for stall in stalls.values() if stall is not None and stall["collective"] is None]
    if silent:
        return f"rank {silent[0]} is suspected: it reports nothing" + _wait_in(waiting)
    if waiting and elsewhere:
        first = elsewhere[0]
        return f"rank {first['rank']} on {first['host']} is suspected: it is in {first['at']}" + _wait_in(waiting)
    return f"no rank stands out; rank 0 is in {stalls[0]['at']}" + _wait_in(waiting)


def _wait_in(waiting: list[dict]) -> str:
    return f", while rank {waiting[0]['rank']} waits in {waiting[0]['collective']}" if waiting else ""


class ReplicaCheck:
    """Compares what all ranks of a data-parallel group hold alike: a flipped bit, or a collective that went wrong.

    Under ZeRO-3, which keeps one copy of everything, there is nothing to compare.
    """

    def __init__(self, engine):
        import torch

        groups = collections.defaultdict(list)
        for parameter in engine.module.parameters():
            if not hasattr(parameter, "ds_id"):
                expert = getattr(parameter, "group_name", None) if not getattr(parameter, "allreduce", True) else None
                groups[expert].append(parameter)
        self._groups = [
            (parameters, engine.seq_data_parallel_group if name is None else engine.expert_data_parallel_group[name])
            for name, parameters in sorted(groups.items(), key=lambda item: item[0] or "")
        ]
        self._integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def check(self, step: int) -> None:
        """Raises RuntimeError, on every rank of the group, when one of them differs."""
        import torch
        import torch.distributed as dist

        for parameters, group in self._groups:
            sums = [p.detach().contiguous().view(self._integers[p.element_size()]).sum() for p in parameters]
            sums = torch.stack(sums)
            # Odd factors, by place: no two parameters can be exchanged unnoticed.
            mine = (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
            hashes = mine.new_empty(dist.get_world_size(group))
            dist.all_gather_into_tensor(hashes, mine[None], group=group)
            hashes = hashes.tolist()
            if len(set(hashes)) > 1:
                hosts = [None] * len(hashes)
                dist.all_gather_object(hosts, socket.gethostname(), group=group)
                raise RuntimeError(
                    _odd_ones(hashes, [*zip(dist.get_process_group_ranks(group), hosts, strict=True)], step)
                )


def _odd_ones(hashes: list[int], places: list[tuple[int, str]], step: int) -> str:
    (common, count), *_ = collections.Counter(hashes).most_common()
    named = [place for value, place in zip(hashes, places, strict=True) if value != common or 2 * count <= len(hashes)]
    ranks = ", ".join(f"rank {rank} on {host}" for rank, host in named)
    return (
        f"replicas differ after step {step}: {ranks} of {len(hashes)} ranks that should hold the same parameters; step {step} is "
        "not saved, the checkpoints of this start before it were of equal replicas (guards.replica_check_every)"
    )


class SpikeDetector:
    """Tells a loss, or gradient norm, far above those of the last steps. The same on every rank: it sees reduced values.

    Far is `threshold` robust standard deviations (of the median distance from the median) above the median of the last
    `window` steps; a spike does not count among them.
    """

    def __init__(self, settings):
        """`settings`: the recipe's guards."""
        self.settings = settings
        self._seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    def see(self, step: int, result) -> str | None:
        """What is wrong with a step's loss or norm, None when nothing is; they count from now on."""
        if self.settings.spike is None:
            return None
        values = {"loss": result.loss, "grad_norm": result.grad_norm}
        faults = [fault for name, value in values.items() if (fault := self._far(name, value)) is not None]
        if not faults:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    self._seen[name] = [*self._seen[name], value][-self.settings.spike_window :]
            return None
        if self.settings.spike != "rollback":
            done = "; the update was left out" if not result.applied else ""
            logger.warning("step %d: %s%s", step, faults[0], done)
        return faults[0]

    def leaves_out(self, loss: float) -> bool:
        """Whether the update of a step with this loss is to be left out."""
        return self._far("loss", loss) is not None

    def _far(self, name: str, value: float | None) -> str | None:
        seen, window = self._seen[name], self.settings.spike_window
        if value is None or not math.isfinite(value) or len(seen) < window:
            return None  # an update that is not finite is left out by DeepSpeed
        middle = statistics.median(seen)
        deviation = 1.4826 * statistics.median(abs(earlier - middle) for earlier in seen)
        # A loss that hardly moves is no reason to take small steps for spikes.
        limit = middle + self.settings.spike_threshold * max(deviation, 0.01 * abs(middle))
        if value <= limit:
            return None
        return f"{name} {value:.4g} is above {limit:.4g} (median of {window} steps: {middle:.4g})"

    def state(self) -> dict:
        """For the checkpoint."""
        return {name: list(values) for name, values in self._seen.items()}

    def restore(self, state: dict) -> None:
        """`state`: of a checkpoint; empty where none was kept."""
        self._seen = {name: list(state.get(name, [])) for name in self._seen}
