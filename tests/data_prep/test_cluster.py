import json
import os
import signal
import subprocess
import sys

import pytest

from data_prep import cluster, tokenize_files, train_tokenizer
from data_prep.errors import InputError

SHARDS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Options of the job, and the bytes of each file that one machine makes of it."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"document {n}: " + "one two three " * (n % 40)}) for n in range(400)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    train_tokenizer.main(
        ["--input", str(folder / "text.jsonl"), "--vocab_size", "300", "--output", str(folder / "tokenizer")]
    )
    options = ["--input", str(folder / "text.jsonl"), "--tokenizer", str(folder / "tokenizer")]
    options += ["--num_shards", str(SHARDS)]
    tokenize_files.main([*options, "--output_prefix", str(folder / "single")])
    return options, token_bytes(folder, "single")


def token_bytes(folder, name):
    """{"00000_of_00005.bin": bytes, ...} of the token files that the prefix `name` stands for."""
    files = [path for suffix in ("bin", "idx") for path in folder.glob(f"{name}_text_document_*.{suffix}")]
    return {path.name.removeprefix(f"{name}_text_document_"): path.read_bytes() for path in files}


def local(tmp_path, options, *more):
    command = ["--executor", "local", "--output_prefix", str(tmp_path / "out"), "--workers", "1", *options, *more]
    return cluster.main(command)


def completed(tmp_path):
    return sorted(path.name for path in (tmp_path / "out_text_document.logs" / "completions").glob("*"))


@pytest.mark.parametrize("split", [["--workers", "2"], ["--tasks", "2"]])
def test_the_local_executor_makes_what_one_machine_makes(tmp_path, corpus, capsys, split):
    options, expected = corpus
    local(tmp_path, options, *split)
    assert len(expected) == 2 * SHARDS and token_bytes(tmp_path, "out") == expected
    record = json.loads((tmp_path / "out_text_document.json").read_text())
    assert record["documents"] == 400 and len(record["shards"]) == SHARDS
    assert "out_text_document: docs=400 " in capsys.readouterr().out
    local(tmp_path, options)
    assert capsys.readouterr().out.endswith("all of it was there\n")


def test_a_killed_task_is_run_again_and_finished_shards_are_kept(tmp_path, corpus):
    options, expected = corpus
    killed = f"""
import os, signal
from data_prep import cluster
whole = cluster.tokenize_shard
def killed(job, shard, processes):
    middle = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if shard == 3 else None
    return whole(job, shard, processes, middle)
cluster.tokenize_shard = killed
cluster.main({["--executor", "local", "--output_prefix", str(tmp_path / "out"), "--workers", "1", "--tasks", "2", *options]!r})
"""
    process = subprocess.Popen([sys.executable, "-c", killed], start_new_session=True)
    assert process.wait() == -signal.SIGKILL
    os.killpg(process.pid, signal.SIGKILL)  # datatrove's helper process outlives it
    # Task 0 made shards 0, 2 and 4; task 1 made shard 1 and was killed in shard 3.
    made = [path for path in tmp_path.glob("out_*.bin")]
    assert len(made) == 4 and completed(tmp_path) == ["00000"]
    before = {path: path.stat().st_mtime_ns for path in made}
    local(tmp_path, options, "--tasks", "2")
    assert token_bytes(tmp_path, "out") == expected and completed(tmp_path) == ["00000", "00001"]
    assert {path: path.stat().st_mtime_ns for path in made} == before
    assert not list(tmp_path.glob(".*"))


def test_a_completed_task_whose_shard_is_gone_is_run_again(tmp_path, corpus):
    options, expected = corpus
    local(tmp_path, options)
    (tmp_path / "out_text_document_00002_of_00005.bin").unlink()
    local(tmp_path, options)
    assert token_bytes(tmp_path, "out") == expected


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_record_in_a_task_is_one_line(tmp_path, corpus, workers):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": null}\n')
    with pytest.raises(
        InputError, match=r"^.*bad\.jsonl:2: 'text' is null; mend the record or pass --on_bad_record skip$"
    ):
        local(
            tmp_path,
            [*corpus[0][2:4], "--num_shards", "2", "--input", str(tmp_path / "bad.jsonl")],
            "--workers",
            workers,
        )
    assert completed(tmp_path) in (["00000"], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deduplicate"], "--deduplicate makes shards in order, not as tasks"),
        (["--tasks", "0"], "--tasks, --workers and --cpus_per_task must be positive"),
        (["--executor", "slurm", "--partition", "cpu"], "--executor slurm needs --partition and --time"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, corpus, options, message):
    with pytest.raises(InputError, match=message):
        local(tmp_path, corpus[0], *options)


# Stand-ins for Slurm's commands: sbatch runs the array at once, and notes the options it was given.
SLURM = {
    "sbatch": """
echo "$@" >> $NOTES; grep '^#SBATCH' "${@: -1}" >> $NOTES
for option in "$@"; do case $option in --export=ALL,*) export "${option#--export=ALL,}" ;; esac; done
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "${@: -1}")
for index in $(seq 0 $last); do SLURM_ARRAY_TASK_ID=$index SLURM_NODELIST=here bash "${@: -1}" >&2 || true; done
echo Submitted batch job 7""",
    "srun": 'while [ "$1" != launch_pickled_pipeline ]; do shift; done; exec "$@"',
    "scontrol": "echo here",
    "merge_stats": "true",
}


@pytest.mark.slow
def test_slurm_runs_the_tasks_that_are_missing_and_then_the_finish(tmp_path, corpus, monkeypatch, capsys):
    options, expected = corpus
    (tmp_path / "bin").mkdir()
    for name, script in SLURM.items():
        (tmp_path / "bin" / name).write_text("#!/bin/bash\n" + script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    local(tmp_path, options)
    for path in (*tmp_path.glob("out_*_00003_of_00005.*"), tmp_path / "out_text_document.json"):
        path.unlink()
    slurm = ["--executor", "slurm", "--partition", "cpu", "--time", "1:00:00", "--sbatch_args", "account=me"]
    local(tmp_path, options, *slurm)
    assert token_bytes(tmp_path, "out") == expected
    assert json.loads((tmp_path / "out_text_document.json").read_text())["documents"] == 400
    notes = (tmp_path / "notes").read_text().splitlines()
    assert "#SBATCH --array=0-0%1" in notes and "#SBATCH --account=me" in notes and "#SBATCH --partition=cpu" in notes
    assert any("--dependency=afterok:7" in line for line in notes)
    assert "submitted; " in capsys.readouterr().out
