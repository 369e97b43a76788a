"""Join token files into one: `python -m data_prep.merge_tokens P... --output_prefix Q`. Documents keep their order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import write_json
from data_prep.token_file import TokenFileWriter, Tokens, file_of, open_tokens, token_prefix

BLOCK_TOKENS = 1 << 24


def document_blocks(tokens: Tokens, block_tokens: int = BLOCK_TOKENS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, lengths) of runs of whole documents of about `block_tokens` tokens, at least one document each."""
    for pair in tokens.pairs:
        first = 0
        while first < len(pair):
            begin = int(pair.offsets[first])
            last = int(np.searchsorted(pair.offsets, begin + block_tokens, side="right"))
            last = min(max(last - 1, first + 1), len(pair)) if last < len(pair) else len(pair)
            lengths = pair.lengths[first:last]
            yield pair.tokens[begin : begin + int(lengths.sum(dtype=np.int64))], lengths
            first = last


def merge(sources: list[Path], output: Path) -> dict:
    """Write `output` from `sources`; returns the report in its .json. Raises InputError when tokenizers differ."""
    files = [open_tokens(source) for source in sources]
    if token_prefix(output).resolve() in {file.prefix.resolve() for file in files}:
        raise InputError(f"--output_prefix {output} is one of the files to be merged")
    records = [file.read_record() for file in files]
    made_by = {
        record["tokenizer"]["sha256"]: file.prefix for record, file in zip(records, files, strict=True) if record
    }
    if len(made_by) > 1:
        one, other = list(made_by.values())[:2]
        raise InputError(f"{one} and {other} were made with different tokenizers: their ids mean different things")
    # Without a record of the tokenizer, the stored type bounds the ids.
    bounds = [2**16 if file.dtype.itemsize <= 2 else 2**31 for file in files]
    vocab_size = max(record.get("vocab_size", bound) for record, bound in zip(records, bounds, strict=True))
    report = dict(records[0] if all(records) else {})
    for key in ("sources", "left_out", "special_in_text", "text_bytes", "seconds", "split", "job", "shard", "shards"):
        report.pop(key, None)  # of the first file alone

    def write_record(writer: TokenFileWriter) -> None:
        report.update(
            documents=writer.documents,
            tokens=writer.total_tokens,
            max_token_id=writer.max_token_id,
            vocab_size=vocab_size,
            checksums=writer.checksums,
            merged_from=[str(file.prefix.resolve()) for file in files],
        )
        write_json(file_of(writer.prefix, ".json"), report)

    with TokenFileWriter(output, vocab_size, write_record) as writer:
        for file in files:
            for ids, lengths in document_blocks(file):
                writer.add(ids, lengths)
    return report


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.merge_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("prefixes", nargs="+", type=Path, help="token files, without .bin/.idx")
    parser.add_argument("--output_prefix", type=Path, required=True, help="token file to write, without .bin/.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing token file")
    arguments = parser.parse_args(argv)
    index = file_of(token_prefix(arguments.output_prefix), ".idx")
    if index.exists() and not arguments.overwrite:
        raise InputError(f"{index} exists; choose another --output_prefix or pass --overwrite")
    report = merge(arguments.prefixes, arguments.output_prefix)
    print(f"{arguments.output_prefix}: docs={report['documents']} tokens={report['tokens']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
