"""Show what a token file holds: counts, lengths, provenance; verify it, compare it, or print one document."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.merge_tokens import document_blocks
from data_prep.remote import checksum
from data_prep.token_file import Tokens, open_tokens
from data_prep.tokenizer import TextTokenizer


def length_histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(from, to, documents) by powers of two, `to` exclusive, empty ends left out."""
    bounds = 2 ** np.arange(0, 33)
    counts, _ = np.histogram(lengths, np.concatenate([[0], bounds]))
    filled = np.flatnonzero(counts)
    return [
        (0 if n == 0 else int(bounds[n - 1]), int(bounds[n]), int(counts[n])) for n in range(filled[0], filled[-1] + 1)
    ]


def verify(tokens: Tokens, vocab_size: int) -> int:
    """Read every id; returns the highest.

    Raises InputError naming the document of the first one outside the vocabulary, or a file that does not have the
    checksum in its record.
    """
    for pair in tokens.pairs:
        for suffix, expected in pair.read_record().get("checksums", {}).items():
            if checksum(pair.local(suffix)) != expected:
                raise InputError(
                    f"{pair.local(suffix)} does not have the checksum in the record beside it, {expected}: it is damaged "
                    "or of another job"
                )
    highest, first = -1, 0
    for ids, lengths in document_blocks(tokens):
        if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
            position = int(np.argmax((ids >= vocab_size) | (ids < 0)))
            document = first + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            raise InputError(
                f"{tokens.prefix}, document {document}: id {ids[position]} is outside the vocabulary of {vocab_size}"
            )
        highest, first = max(highest, int(ids.max()) if len(ids) else -1), first + len(lengths)
    return highest


def first_difference(one: Tokens, other: Tokens) -> str | None:
    """Where two files part, None when they hold the same documents (the stored type may differ)."""
    common = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one.lengths[:common]) != np.asarray(other.lengths[:common]))
    same_until = int(different[0]) if len(different) else common
    for number in range(same_until):
        if not np.array_equal(one.document(number), other.document(number)):
            return f"document {number} differs"
    if same_until < common:
        return f"document {same_until} has {one.lengths[same_until]} and {other.lengths[same_until]} tokens"
    return None if len(one) == len(other) else f"{len(one)} and {len(other)} documents"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.inspect_tokens", description=__doc__)
    parser.add_argument("prefix", type=Path, help="token file, without .bin/.idx")
    parser.add_argument("--document", type=int, help="print this document")
    parser.add_argument("--tokenizer", help="decode with this tokenizer (default: the one recorded beside the file)")
    parser.add_argument("--verify", action="store_true", help="compare checksums, and every id with the vocabulary")
    parser.add_argument("--compare", type=Path, help="another token file; exit code 1 when they differ")
    arguments = parser.parse_args(argv)
    tokens = open_tokens(arguments.prefix)
    made_by = tokens.read_record()
    print(f"{tokens.prefix}: {len(tokens)} documents, {tokens.total_tokens} tokens, {tokens.dtype.name}")
    for low, high, count in length_histogram(np.asarray(tokens.lengths)):
        print(f"  {count:>10} documents of {low} to {high - 1} tokens")
    for name in ("vocab_size", "max_token_id", "left_out", "tokenizer"):
        if name in made_by:
            print(f"{name}: {made_by[name]}")
    if arguments.verify:
        vocab_size = made_by.get("vocab_size", 2**31)
        print(f"verified: the highest id is {verify(tokens, vocab_size)}")
    if arguments.document is not None:
        if not 0 <= arguments.document < len(tokens):
            raise InputError(f"--document {arguments.document}: the file has documents 0 to {len(tokens) - 1}")
        ids = tokens.document(arguments.document)
        tokenizer = arguments.tokenizer or made_by.get("tokenizer", {}).get("path")
        print(TextTokenizer(tokenizer).decode(ids.tolist()) if tokenizer else ids.tolist())
    if arguments.compare is not None:
        difference = first_difference(tokens, open_tokens(arguments.compare))
        print(f"compared with {arguments.compare}: {difference or 'the same documents'}")
        return 1 if difference else 0
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
