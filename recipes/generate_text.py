"""Continue a prompt with an exported model: `python -m recipes.generate_text DIR --prompt "..."`."""

from __future__ import annotations

import sys
from pathlib import Path

from data_prep.errors import InputError, OneLineParser, quiet_libraries, run_command


def load_export(directory: Path):
    """(model, tokenizer) of an export. Raises InputError when it is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise InputError(
            f"{directory} is no exported model: it has no config.json; `python -m recipes.export_hf` makes one"
        )
    if not (directory / "tokenizer.json").is_file():
        raise InputError(f"{directory} has no tokenizer.json; set data.tokenizer in the recipe and export again")
    return AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)


def generate(directory: Path, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The continuation of `prompt`, at most `tokens` tokens; temperature 0 takes the likeliest token each time."""
    import torch

    model, tokenizer = load_export(directory)
    torch.manual_seed(seed)
    inputs = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    if not inputs.numel():
        raise InputError("--prompt is empty; give at least one character")
    longest = model.config.max_position_embeddings
    if inputs.shape[1] + tokens > longest:
        raise InputError(
            f"{inputs.shape[1]} prompt tokens and {tokens} new ones pass the model's length of {longest}: lower "
            "--max_new_tokens"
        )
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    )
    output = model.eval().generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m recipes.generate_text", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="exported model")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="default: 100")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default: 0.7)")
    parser.add_argument("--top_k", type=int, default=50, help="sample among the k likeliest tokens (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        raise InputError(f"--max_new_tokens {arguments.max_new_tokens} must be positive")
    quiet_libraries()
    text = generate(
        arguments.directory,
        arguments.prompt,
        tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(arguments.prompt + text)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
