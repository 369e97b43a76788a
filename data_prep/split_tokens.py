"""Split a token file by document into training and validation files.

A document's side depends on its own tokens alone: adding data later moves nothing, and copies of one document always
land on the same side.
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

import numpy as np

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import write_json
from data_prep.merge_tokens import document_blocks
from data_prep.token_file import TokenFileWriter, file_of, open_tokens, token_prefix


def is_validation(document: np.ndarray, fraction: float) -> bool:
    """Whether a document (its ids as they are stored) belongs to the validation side: its hash lies below `fraction`."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little") < fraction * 2**64


def split(source: Path, train: Path, validation: Path, fraction: float) -> dict[str, tuple[int, int]]:
    """Write the two files; returns {"train": (documents, tokens), "validation": ...}. Raises InputError if one is empty."""
    tokens = open_tokens(source)
    made_by = tokens.read_record()
    # Without a record of the tokenizer, the stored type bounds the ids.
    vocab_size = made_by.get("vocab_size", 2**16 if tokens.dtype.itemsize <= 2 else 2**31)
    for key in ("job", "shard", "shards"):  # of the file as tokenize_files made it
        made_by.pop(key, None)

    def write_record(name: str, writer: TokenFileWriter) -> None:
        report = {
            "documents": writer.documents,
            "tokens": writer.total_tokens,
            "max_token_id": writer.max_token_id,
            "checksums": writer.checksums,
            "split": {"of": str(tokens.prefix.resolve()), "side": name, "validation_fraction": fraction},
        }
        write_json(file_of(writer.prefix, ".json"), {**made_by, **report})

    with (
        TokenFileWriter(train, vocab_size, partial(write_record, "train")) as train_writer,
        TokenFileWriter(validation, vocab_size, partial(write_record, "validation")) as validation_writer,
    ):
        for ids, lengths in document_blocks(tokens):
            ends = np.cumsum(lengths, dtype=np.int64)
            documents = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
            side = np.array([is_validation(ids[start:end], fraction) for start, end in documents])
            for writer, chosen in ((train_writer, ~side), (validation_writer, side)):
                writer.add(ids[np.repeat(chosen, lengths)], lengths[chosen])
        for name, writer in (("training", train_writer), ("validation", validation_writer)):
            if not writer.documents:
                raise InputError(
                    f"no document of {source} fell to the {name} side; change --validation_fraction {fraction:g}"
                )
    return {
        name: (writer.documents, writer.total_tokens)
        for name, writer in (("train", train_writer), ("validation", validation_writer))
    }


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.split_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="token file, without .bin/.idx")
    parser.add_argument("--train_prefix", type=Path, required=True, help="training file to write")
    parser.add_argument("--validation_prefix", type=Path, required=True, help="validation file to write")
    parser.add_argument(
        "--validation_fraction", type=float, default=0.01, help="share of the documents (default: 0.01)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing token files")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.validation_fraction < 1:
        raise InputError(f"--validation_fraction {arguments.validation_fraction:g} must lie between 0 and 1")
    paths = [token_prefix(p).resolve() for p in (arguments.prefix, arguments.train_prefix, arguments.validation_prefix)]
    if len(set(paths)) < 3:
        raise InputError("the source, --train_prefix and --validation_prefix must be three different files")
    for prefix in (arguments.train_prefix, arguments.validation_prefix):
        index = file_of(token_prefix(prefix), ".idx")
        if index.exists() and not arguments.overwrite:
            raise InputError(f"{index} exists; choose another prefix or pass --overwrite")
    sizes = split(arguments.prefix, arguments.train_prefix, arguments.validation_prefix, arguments.validation_fraction)
    for (name, (documents, tokens)), prefix in zip(
        sizes.items(), (arguments.train_prefix, arguments.validation_prefix), strict=True
    ):
        print(f"{prefix}: {name}, docs={documents} tokens={tokens}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
