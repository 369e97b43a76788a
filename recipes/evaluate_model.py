"""Loss and perplexity of an exported model over a token file: `python -m recipes.evaluate_model DIR --data P`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, quiet_libraries, run_command
from data_prep.loader import IGNORED_LABEL
from data_prep.token_file import TokenFile


def evaluate(model, tokens: TokenFile, seq_length: int, batch_size: int, limit: int | None = None) -> tuple[float, int]:
    """Mean loss over every token of the file but the first, in file order: (nats a token, tokens).

    Samples of `seq_length` inputs are cut as in training; the last, shorter one counts by its tokens.

    Args:
        limit: most samples.
    """
    import torch

    from recipes.training.losses import token_loss_sum

    starts = list(range(0, tokens.total_tokens - 1, seq_length))[:limit]
    loss_sum, count = 0.0, 0
    for begin in range(0, len(starts), batch_size):
        rows = [
            torch.from_numpy(tokens.tokens[s : s + seq_length + 1].astype("int64"))
            for s in starts[begin : begin + batch_size]
        ]
        inputs = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(
            [row[1:] for row in rows], batch_first=True, padding_value=IGNORED_LABEL
        )
        with torch.no_grad():
            logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
        loss_sum += float(token_loss_sum(logits, labels.to(model.device)))
        count += int((labels != IGNORED_LABEL).sum())
    return loss_sum / count, count


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m recipes.evaluate_model", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="exported model")
    parser.add_argument("--data", required=True, help="token file, without .bin/.idx")
    parser.add_argument("--seq_length", type=int, help="tokens a sample (default: the model's)")
    parser.add_argument("--batch_size", type=int, default=8, help="samples at once (default: 8)")
    parser.add_argument("--samples", type=int, help="most samples (default: all)")
    arguments = parser.parse_args(argv)
    for name in ("seq_length", "batch_size", "samples"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise InputError(f"--{name} {value} must be positive")
    quiet_libraries()
    if not (arguments.directory / "config.json").is_file():
        raise InputError(f"{arguments.directory} is no exported model: it has no config.json")
    tokens = TokenFile(arguments.data)
    if tokens.total_tokens < 2:
        raise InputError(f"{arguments.data} holds one token: there is nothing to predict")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.directory).eval()
    highest = int(tokens.tokens.max())
    if highest >= model.config.vocab_size:
        raise InputError(
            f"{arguments.data} holds token id {highest}, the model's vocabulary is {model.config.vocab_size}: other tokenizer"
        )
    seq_length = arguments.seq_length or model.config.max_position_embeddings
    loss, count = evaluate(model, tokens, seq_length, arguments.batch_size, arguments.samples)
    print(f"loss {loss:.4f}  perplexity {math.exp(loss):.2f}  tokens {count:,}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
