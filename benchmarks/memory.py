"""Memory that `python -m data_prep.tokenize_files` takes on inputs made to be hard, with both engines.

    python benchmarks/memory.py [--scale 1.0] [INPUT ...]

Prints the peak of the process tree, sampled (resident bytes summed over the processes, so that what they share counts
more than once), and the peak of its largest process (ru_maxrss).

- ascii: one line of 100 MB of English words
- emoji: one line of 100 MB of emoji, which no tokenizer lets be cut: it is left out as too_long
- mixed: one line of 100 MB of words and a few emoji, which Python holds in 4 bytes a character
- many: three lines of 100 MB
- parquet: one row group of 1 GB of text in rows of 4 kB
- zst: 1 GB of JSONL in rows of 4 kB, as .zst
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORDS = "the quick brown fox jumps over it, and the 12 lazy dogs don't mind. "


NAMES = {
    **{name: f"{name}.jsonl" for name in ("ascii", "emoji", "mixed", "many")},
    "parquet": "rows.parquet",
    "zst": "rows.jsonl.zst",
}


def words(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def write_input(name: str, path: Path, scale: float) -> None:
    line, total = int(100e6 * scale), int(1e9 * scale)
    if name == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pa.array((f"{n} {WORDS * 60}" for n in range(total // (60 * len(WORDS)))), pa.large_string())
        pq.write_table(pa.table({"text": rows}), path, row_group_size=len(rows), use_dictionary=False)
    elif name == "zst":
        from backports import zstd

        with zstd.open(path, "wb") as out:
            for n in range(total // (60 * len(WORDS))):
                out.write(b'{"text": "%d %s"}\n' % (n, WORDS.encode() * 60))
    else:
        emoji = {"emoji": line // 4, "mixed": 1000}.get(name, 0)
        text = words(line - 4 * emoji) + "\U0001f600" * emoji
        with open(path, "w", encoding="utf-8") as out:
            for _ in range(3 if name == "many" else 1):
                out.write(f'{{"text": "{text}"}}\n')
            out.write('{"text": "a short one"}\n')


def peaks_of(command: list[str]) -> tuple[float, float, str]:
    """(peak of the tree in MiB, peak of its largest process in MiB, output)."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        root = psutil.Process(process.pid)
        peak = 0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            resident = 0
            for one in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident += one.memory_info().rss
            peak = max(peak, resident)
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        printed = output.read()
    if process.returncode:
        raise SystemExit(f"{command} failed: {printed}")
    return peak / 2**20, ended[2].ru_maxrss / 2**10, printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", nargs="*", default=list(NAMES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the inputs' sizes")
    parser.add_argument("--engines", nargs="+", default=["gigatoken", "tokenizers"])
    arguments = parser.parse_args()
    module = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, tokenizer = folder / "small.jsonl", folder / "tokenizer"
        subprocess.run([*module, "data_prep.corpus", "stdlib", small], check=True, stdout=subprocess.DEVNULL)
        train = ["data_prep.train_tokenizer", "--input", small, "--vocab_size", "4096", "--output", tokenizer]
        subprocess.run([*module, *train], check=True, stdout=subprocess.DEVNULL)
        print("input     engine       tree, MiB  largest process, MiB")
        for kind in arguments.inputs:
            path = folder / NAMES[kind]
            # In a process of its own: a process starts with the peak of the one that starts it.
            writing = multiprocessing.get_context("spawn").Process(
                target=write_input, args=(kind, path, arguments.scale)
            )
            writing.start()
            writing.join()
            for engine in arguments.engines:
                command = [*module, "data_prep.tokenize_files", "--input", str(path), "--tokenizer", str(tokenizer)]
                command += ["--output_prefix", str(folder / engine), "--engine", engine, "--on_bad_record", "skip"]
                tree, largest, printed = peaks_of([*command, "--overwrite"])
                print(
                    f"{kind:9} {engine:10} {tree:11.0f} {largest:21.0f}   {printed.strip().split(': ', 1)[1]}",
                    flush=True,
                )
            path.unlink()


if __name__ == "__main__":
    main()
