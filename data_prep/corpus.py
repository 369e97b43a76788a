"""Write an embedded corpus to a JSONL file: `python -m data_prep.corpus stdlib OUT.jsonl`.

"stdlib" is the source text of the running Python's own standard library, one `.py` file a document: real text of
about 10 to 30 MB that every machine already has.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import atomic_open, make_directory

EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}


def stdlib_files(root: Path) -> list[Path]:
    """The `.py` files of the standard library under `root`, in path order, installed packages left out."""
    return sorted(path for path in root.rglob("*.py") if not EXCLUDED.intersection(path.relative_to(root).parts))


def write_stdlib(output: Path) -> tuple[int, int]:
    """Write the corpus; returns (documents, bytes of text). Files that are not UTF-8 (test inputs) are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = size = 0
    make_directory(output.parent, "output directory")
    with atomic_open(output) as out:
        for path in stdlib_files(root):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not text.strip():
                continue
            out.write(json.dumps({"text": text, "source": path.relative_to(root).as_posix()}) + "\n")
            documents += 1
            size += len(text.encode())
        if not documents:
            raise InputError(f"no .py files under {root}: this Python has no readable standard library sources")
    return documents, size


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["stdlib"], help="which corpus")
    parser.add_argument("output", type=Path, help="the JSONL file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments = parser.parse_args(argv)
    if arguments.output.exists() and not arguments.overwrite:
        raise InputError(f"{arguments.output} exists; choose another file or pass --overwrite")
    documents, size = write_stdlib(arguments.output)
    print(f"{arguments.output}: {documents} documents, {size / 1e6:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
