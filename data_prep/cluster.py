"""Tokenize beyond one machine: the shards of `tokenize_files --num_shards N` as tasks of a datatrove pipeline.

    python -m data_prep.cluster --executor local|slurm|ray [--tasks N] + the options of data_prep.tokenize_files

Task r of N makes the shards r, r + N, r + 2N, ...; what they hold is byte for byte what tokenize_files writes. The same
command again does what is missing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.tokenize_files import add_arguments, finish, is_all_there, job_of, summary, tokenize_shard
from data_prep.tokenize_job import TokenizeJob, finished_shard


class TokenizeShards(PipelineStep):
    """Makes a task's shards, with `processes` of its own where gigatoken can't be used, as many threads where it can."""

    name, type = "Tokenize shards", "TOKENIZER"

    def __init__(self, job: TokenizeJob, processes: int):
        super().__init__()
        self.job = job
        self.processes = processes

    def run(self, data=None, rank: int = 0, world_size: int = 1) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(self.processes)  # gigatoken takes all cores otherwise
        for shard in range(rank, self.job.num_shards, world_size):
            with self.track_time("shard"):
                report = tokenize_shard(self.job, shard, self.processes)
            self.stat_update("documents", value=report["documents"], unit="shard")
            self.stat_update("tokens", value=report["tokens"], unit="shard")


class FinishShards(PipelineStep):
    """Checks that all shards are there and writes the record over them."""

    name, type = "Finish", "TOKENIZER"

    def __init__(self, job: TokenizeJob):
        super().__init__()
        self.job = job

    def run(self, data=None, rank: int = 0, world_size: int = 1) -> None:
        print(summary(finish(self.job)))


def forget_unfinished(executor, job: TokenizeJob) -> None:
    """Take back datatrove's record of each completed task of which a shard is missing, or is another job's."""
    for rank in range(executor.world_size):
        whole = all(finished_shard(job, shard) for shard in range(rank, job.num_shards, executor.world_size))
        if not whole and executor.is_rank_completed(rank):
            executor.logging_dir.rm_file(f"completions/{rank:05d}")


def run_local(job: TokenizeJob, tasks: int, workers: int | None, processes: int | None, logging_dir: str) -> dict:
    """All tasks on this machine, `workers` at a time; returns the report over all shards."""
    from datatrove.executor import LocalPipelineExecutor

    cores = os.cpu_count() or 1
    workers = min(workers or cores, tasks)
    step = TokenizeShards(job, processes or max(1, cores // workers))
    executor = LocalPipelineExecutor([step], tasks=tasks, workers=workers, logging_dir=logging_dir)
    forget_unfinished(executor, job)
    executor.run()
    return finish(job)


def run_ray(job: TokenizeJob, tasks: int, workers: int | None, resources: dict, logging_dir: str) -> dict:
    """All tasks on the Ray cluster that this machine belongs to, or RAY_ADDRESS names; returns the report."""
    from datatrove.executor import RayPipelineExecutor

    step = TokenizeShards(job, resources["cpus_per_task"])
    executor = RayPipelineExecutor([step], tasks=tasks, workers=workers or -1, logging_dir=logging_dir, **resources)
    forget_unfinished(executor, job)
    executor.run()
    return finish(job)


def submit_slurm(job: TokenizeJob, tasks: int, workers: int | None, resources: dict, logging_dir: str) -> None:
    """Submit a job array with the tasks that are missing, and a job that depends on it to finish; returns at once."""
    from datatrove.executor import SlurmPipelineExecutor

    step = TokenizeShards(job, resources["cpus_per_task"])
    executor = SlurmPipelineExecutor(
        [step], tasks=tasks, workers=workers or -1, logging_dir=logging_dir, job_name="tokenize", **resources
    )
    forget_unfinished(executor, job)
    SlurmPipelineExecutor(
        [FinishShards(job)],
        tasks=1,
        logging_dir=f"{logging_dir}/finish",
        job_name="tokenize_finish",
        depends=executor,
        skip_completed=False,
        **{**resources, "cpus_per_task": 1},
    ).run()


def slurm_options(arguments) -> dict:
    """What SlurmPipelineExecutor is given beyond pipeline and tasks."""
    if not (arguments.partition and arguments.time):
        raise InputError("--executor slurm needs --partition and --time")
    pairs = [option.partition("=") for option in arguments.sbatch_args]
    activate = Path(sys.prefix, "bin", "activate")
    environment = arguments.env_command or (f"source {activate}" if activate.exists() else ":")
    repository = Path(__file__).resolve().parents[1]
    return {
        "partition": arguments.partition,
        "time": arguments.time,
        "qos": arguments.qos,
        "sbatch_args": {name: value for name, _, value in pairs},
        "env_command": f"{environment}\nexport PYTHONPATH={repository}${{PYTHONPATH:+:$PYTHONPATH}}",
    }


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--executor", choices=["local", "slurm", "ray"], required=True, help="of datatrove")
    parser.add_argument("--tasks", type=int, help="pieces of the work, at most one a shard (default: one a shard)")
    parser.add_argument("--workers", type=int, help="tasks at a time (default: local one a core, else no limit)")
    parser.add_argument(
        "--cpus_per_task", type=int, help="cores of a task (default: local those there are for each worker, else 1)"
    )
    parser.add_argument("--mem_per_cpu_gb", type=int, default=2, help="slurm and ray: GiB a core (default: 2)")
    parser.add_argument("--partition", help="slurm: where to run")
    parser.add_argument("--time", help="slurm: time limit of a task, as sbatch takes it")
    parser.add_argument("--qos", help="slurm: quality of service")
    parser.add_argument("--sbatch_args", nargs="+", default=[], metavar="NAME=VALUE", help="slurm: for sbatch")
    parser.add_argument("--env_command", help="slurm: before a task starts (default: activate this environment)")
    parser.add_argument("--logging_dir", help="datatrove's logs and records, shared (default: PREFIX.logs)")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.deduplicate:
        raise InputError("--deduplicate makes shards in order, not as tasks; use data_prep.tokenize_files")
    if any(
        number is not None and number < 1 for number in (arguments.tasks, arguments.workers, arguments.cpus_per_task)
    ):
        raise InputError("--tasks, --workers and --cpus_per_task must be positive")
    job = job_of(arguments)
    if is_all_there(job):
        print(f"{summary(finish(job))}; all of it was there")
        return 0
    tasks = min(arguments.tasks or job.num_shards, job.num_shards)
    logging_dir = arguments.logging_dir or f"{job.prefix}.logs"
    if arguments.executor == "local":
        print(summary(run_local(job, tasks, arguments.workers, arguments.cpus_per_task, logging_dir)))
        return 0
    resources = {"cpus_per_task": arguments.cpus_per_task or 1, "mem_per_cpu_gb": arguments.mem_per_cpu_gb}
    if arguments.executor == "ray":
        print(summary(run_ray(job, tasks, arguments.workers, resources, logging_dir)))
        return 0
    submit_slurm(job, tasks, arguments.workers, resources | slurm_options(arguments), logging_dir)
    print(f"submitted; {job.prefix}.json is there when all of it is. The same command again does what is missing.")
    return 0


if __name__ == "__main__":
    from data_prep import cluster  # not __main__: the steps are pickled by the name of their module

    sys.exit(run_command(cluster.main))
