"""Train a byte-level BPE tokenizer on text and save it as a directory that AutoTokenizer loads."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, run_command
from data_prep.files import make_directory, replace_directory
from data_prep.formats import Source
from data_prep.sources import MAX_RECORD_BYTES, add_input_arguments, inputs_of, iterate_texts

END_TOKEN = "<|endoftext|>"
BYTES = 256


def train(
    sources: list[Source],
    vocab_size: int,
    output: Path,
    key: str = "text",
    most_bytes: int = MAX_RECORD_BYTES,
    special_tokens: Sequence[str] = (),
) -> int:
    """Train on the records of `sources`, none longer than `most_bytes`; returns the vocabulary size reached (small inputs can give less).

    `special_tokens` come after END_TOKEN, which has id 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys([END_TOKEN, *special_tokens]))
    if vocab_size <= BYTES + len(special):
        raise InputError(f"--vocab_size {vocab_size} is too small: {BYTES} bytes and {', '.join(special)} come first")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    texts = iterate_texts(sources, key, most_bytes)
    first = next(texts, None)
    if first is None:
        raise InputError(
            f"0 documents in {', '.join(source.name for source in sources)}: nothing to train a tokenizer on"
        )
    tokenizer.train_from_iterator((text for part in ([first], texts) for text in part), trainer)

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    make_directory(temporary, "output directory")
    try:
        tokenizer.save(str(temporary / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_TOKEN,
            "eos_token": END_TOKEN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**9,
        }
        (temporary / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        replace_directory(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tokenizer.get_vocab_size()


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m data_prep.train_tokenizer", description=__doc__)
    add_input_arguments(parser)
    parser.add_argument("--vocab_size", type=int, required=True, help="entries, the end-of-document token included")
    parser.add_argument("--special_tokens", nargs="+", default=[], help=f"after {END_TOKEN}, such as '<|user|>'")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")
    arguments = parser.parse_args(argv)
    if arguments.output.exists() and not (arguments.output / "tokenizer.json").is_file():
        raise InputError(f"{arguments.output} exists and is no tokenizer directory; choose another --output")
    if arguments.output.exists() and not arguments.overwrite:
        raise InputError(f"{arguments.output} exists; choose another --output or pass --overwrite")
    begin = time.perf_counter()
    size = train(
        inputs_of(arguments),
        arguments.vocab_size,
        arguments.output,
        arguments.json_key,
        int(arguments.max_record_mb * 1e6),
        arguments.special_tokens,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{arguments.output}: {size} tokens, {time.perf_counter() - begin:.1f} s, peak {peak:.0f} MiB")
    if size < arguments.vocab_size:
        print(
            f"note: the text gave only {size} of the {arguments.vocab_size} tokens asked for; set model.vocab_size to it"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
