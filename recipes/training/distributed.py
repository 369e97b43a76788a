"""Ranks, devices and the process group, for every way of starting: deepspeed, torchrun, srun, mpirun, plain python."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from data_prep.errors import InputError

# Rank, local rank, world size, local world size: Open MPI's names, then those of MPICH and Intel MPI.
MPI_VARIABLES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class Place:
    """This process among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def find_place(local_rank_option: int | None = None) -> Place:
    """Where this process stands, by its environment; sets what init_distributed needs where a launcher left it out.

    RANK, LOCAL_RANK and WORLD_SIZE come first, then Slurm's, then MPI's; with none of them the run has one rank.
    Raises InputError when the environment is incomplete.
    """
    environ = os.environ
    if "RANK" not in environ and "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and "MASTER_ADDR" in environ:
        environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], environ["SLURM_NTASKS"]
        environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    for rank, local_rank, world_size, local_world_size in MPI_VARIABLES:
        # MASTER_ADDR and the rest are found by DeepSpeed's own MPI discovery, which needs mpi4py.
        if "RANK" not in environ and rank in environ:
            names = (rank, local_rank, world_size, local_world_size)
            return Place(*(_integer(name, default) for name, default in zip(names, (0, 0, 1, 1), strict=True)))
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", str(free_port()))
    environ.setdefault("LOCAL_RANK", str(local_rank_option if local_rank_option is not None else 0))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise InputError(
                f"{name} is not set, but other variables of a distributed launch are; export it, or start with `deepspeed`"
            )
    rank, world_size, local_rank = (_integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # torchrun's name, the deepspeed launcher's, Slurm's; all ranks on one machine where nobody says.
    local = next((n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE") if n in environ), "WORLD_SIZE")
    return Place(rank, local_rank, world_size, _integer(local))


def _integer(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}={value} in the environment is not a number") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def choose_accelerator() -> str:
    """DeepSpeed's accelerator name. Falls back to "cpu" without DeepSpeed's warning that it found no GPU."""
    import torch

    if "DS_ACCELERATOR" not in os.environ and not torch.accelerator.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name()


def start_process_group(place: Place):
    """Initialize torch.distributed through DeepSpeed; returns this rank's torch.device.

    Sets what DeepSpeed's checkpoint writers take from the environment and only its own launcher gives.

    Raises InputError when the rendezvous port is taken.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    os.environ.setdefault("CROSS_RANK", str(place.rank // place.local_world_size))
    os.environ.setdefault("CROSS_SIZE", str(-(-place.world_size // place.local_world_size)))
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed would compile its shared-memory all-reduce here: a minute or more, and a process killed meanwhile
        # leaves a lock on which every later run waits for ever, in silence. gloo does the work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // place.local_world_size))
    else:
        accelerator.set_device(place.local_rank)
    try:
        deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise InputError(
            f"port {port} is in use, probably by another run on this machine: pass --master_port, or start with "
            "`python -m launch.run`, which finds a free one"
        ) from None
    return torch.device(accelerator.current_device_name())


def broadcast(value):
    """Rank 0's `value` on every rank (any object that pickle takes)."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value) -> list:
    """Every rank's `value`, by rank, on every rank."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def stop_process_group() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
