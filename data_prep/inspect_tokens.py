"""Show what a token file holds: counts, lengths, provenance, and on request one document as text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import read_json
from data_prep.token_file import TokenFile, file_of
from data_prep.tokenizer import TextTokenizer


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.inspect_tokens", description=__doc__)
    parser.add_argument("prefix", type=Path, help="token file, without .bin/.idx")
    parser.add_argument("--document", type=int, help="print this document")
    parser.add_argument("--tokenizer", help="decode with this tokenizer (default: the one recorded beside the file)")
    arguments = parser.parse_args(argv)
    tokens = TokenFile(arguments.prefix)
    sidecar = file_of(tokens.prefix, ".json")
    made_by = read_json(sidecar) if sidecar.exists() else {}
    lengths = np.asarray(tokens.lengths)
    print(f"{tokens.prefix}: {len(tokens)} documents, {tokens.total_tokens} tokens, {tokens.dtype.name}")
    quantiles = np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]).astype(int)
    print(
        f"document length in tokens: min {quantiles[0]}, quartiles {quantiles[1]} {quantiles[2]} {quantiles[3]}, max {quantiles[4]}"
    )
    for name in ("vocab_size", "max_token_id", "left_out", "tokenizer"):
        if name in made_by:
            print(f"{name}: {made_by[name]}")
    if arguments.document is not None:
        if not 0 <= arguments.document < len(tokens):
            raise InputError(f"--document {arguments.document}: the file has documents 0 to {len(tokens) - 1}")
        ids = tokens.document(arguments.document)
        tokenizer = arguments.tokenizer or made_by.get("tokenizer", {}).get("path")
        print(TextTokenizer(tokenizer).decode(ids.tolist()) if tokenizer else ids.tolist())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
