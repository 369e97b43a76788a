"""Tokenization speed against the classic way and against gigatoken alone, on the same bytes, in one run.

    python benchmarks/tokenization.py [--megabytes 275]

The text is the Python source of the installed packages, as JSONL; the tokenizer a byte-level BPE of 4,096 tokens.

- ours: `python -m data_prep.tokenize_files`, the whole process, cold start included, and by its own clock
- classic: tokenizers in a multiprocessing pool of 2, one document at a time, as Megatron-LM's preprocess_data.py does
  it, on a tenth of the text; written by our writer
- ceiling: gigatoken's own file encoder, by its own clock (imports and start of Python left out), nothing written; and
  once more in the same process, which has its memory then

Ours and the ceiling take turns, each in a process of its own, five times; the classic way runs once at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

CEILING = """
import sys, time, gigatoken
for _ in range(2):
    begin = time.perf_counter()
    gigatoken.Tokenizer(sys.argv[1]).encode_files(gigatoken.JsonlFileSource([sys.argv[2]], field="text"))
    print(time.perf_counter() - begin)
"""


def write_text(path: Path, megabytes: int) -> int:
    """Write JSONL of about `megabytes`; sources are repeated, each copy marked, when there are too few."""
    sources = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    written = copy = 0
    with open(path, "w", encoding="utf-8") as out:
        while written < megabytes * 1e6:
            for source in sources:
                try:
                    text = source.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                if text.strip():
                    written += out.write(json.dumps({"text": f"# {copy}\n{text}" if copy else text}) + "\n")
                if written >= megabytes * 1e6:
                    return written
            copy += 1
    return written


def start_classic(tokenizer: str) -> None:
    global _tokenizer
    from tokenizers import Tokenizer

    _tokenizer = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")


def classic(line: str) -> list[int]:
    return [*_tokenizer.encode(json.loads(line)["text"]).ids, 0]


def run_classic(text: Path, tokenizer: Path, output: Path, megabytes: float) -> float:
    """MB/s of the classic way over the first `megabytes` of `text`, start of the pool left out."""
    from data_prep.token_file import TokenFileWriter

    lines, size = [], 0
    with open(text, encoding="utf-8") as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= megabytes * 1e6:
                break
    with multiprocessing.Pool(2, start_classic, (str(tokenizer),)) as pool:
        pool.map(classic, lines[:2])
        begin = time.perf_counter()
        with TokenFileWriter(output, 4096) as writer:
            for ids in pool.imap(classic, lines, 25):
                writer.add(ids)
        return size / 1e6 / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=275)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder) / "text.jsonl", Path(folder) / "tokenizer"
        size = write_text(text, arguments.megabytes) / 1e6
        small = Path(folder) / "small.jsonl"
        write_text(small, min(arguments.megabytes, 30))
        module = [sys.executable, "-m"]
        train = ["data_prep.train_tokenizer", "--input", small, "--vocab_size", "4096", "--output", tokenizer]
        subprocess.run([*module, *map(str, train)], check=True, stdout=subprocess.DEVNULL)

        command = [
            "data_prep.tokenize_files",
            "--input",
            text,
            "--output_prefix",
            Path(folder) / "ours",
            "--tokenizer",
            tokenizer,
        ]
        wholes, seconds, ceiling, again = [], [], [], []
        for _ in range(5):
            for made in Path(folder).glob("ours_*"):  # the same command would find it all there
                made.unlink()
            begin = time.perf_counter()
            subprocess.run([*module, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
            wholes.append(time.perf_counter() - begin)
            report = json.loads((Path(folder) / "ours_text_document.json").read_text())
            seconds.append(report["seconds"])
            alone = [sys.executable, "-c", CEILING, str(tokenizer), str(text)]
            first, second = subprocess.run(alone, check=True, capture_output=True, text=True).stdout.split()
            ceiling.append(float(first))
            again.append(float(second))
        slow = run_classic(text, tokenizer, Path(folder) / "classic", size / 10)
    whole, ours, alone, second = (size / median(times) for times in (wholes, seconds, ceiling, again))
    print(f"{size:.0f} MB of JSONL, {report['documents']} documents, {report['tokens']:,} tokens; medians of 5 runs")
    print(f"ours, whole process      {whole:8.1f} MB/s  {median(wholes):.1f} s")
    print(f"ours, processing         {ours:8.1f} MB/s")
    print(f"classic, 2 processes     {slow:8.1f} MB/s")
    print(f"gigatoken's file encoder {alone:8.1f} MB/s")
    print(f"  a second time in one process {second:6.1f} MB/s")
    print(f"ours / classic {ours / slow:.1f}   ours / ceiling {ours / alone:.2f}, a second time {ours / second:.2f}")


if __name__ == "__main__":
    main()
