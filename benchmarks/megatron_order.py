"""Our "megatron" order against megatron-core's own datasets: sample by sample, plain and blended.

    pip install --no-deps megatron-core==0.16.1      (in an environment of its own: nothing else here needs it)
    python benchmarks/megatron_order.py

Prints the hashes that tests/data_prep/test_samples.py holds; exits 1 when any sample differs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from data_prep.samples import DataSpec, SampleStream
from data_prep.token_file import TokenFileWriter
from recipes.training.distributed import free_port

SEQ_LENGTH, SEED, VOCABULARY = 8, 11, 64
# (weights of the files a and b, samples wanted); with one file: 1, 2, 2 and 11 epochs, the last one apart or not.
CASES = [((1.0,), 5), ((1.0,), 70), ((1.0,), 90), ((1.0,), 500), ((2.0, 1.0), 20), ((2.0, 1.0), 400)]


def write_files(folder: Path) -> list[str]:
    """Token files a (13 documents) and b (30), from fixed seeds."""
    prefixes = []
    for name, count, seed in (("a", 12, 0), ("b", 30, 3)):
        random = np.random.RandomState(seed)
        documents = [random.randint(0, VOCABULARY, random.randint(5, 60)) for _ in range(count)]
        with TokenFileWriter(folder / name, VOCABULARY) as writer:
            for document in [*documents, np.array([7])] if name == "a" else documents:
                writer.add(document)
        prefixes.append(str(folder / name))
    return prefixes


def our_samples(prefixes: list[str], weights: tuple[float, ...], wanted: int) -> np.ndarray:
    """[wanted, SEQ_LENGTH + 1]."""
    files = tuple(zip(prefixes, weights, strict=False))
    stream = SampleStream(DataSpec(files, SEQ_LENGTH, "megatron", SEED, wanted, VOCABULARY))
    return np.stack([stream.sample(number) for number in range(wanted)]).astype("<i8")


def megatron_samples(folder: Path, prefixes: list[str], weights: tuple[float, ...], wanted: int) -> np.ndarray:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, VOCABULARY, {}

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=(prefixes[: len(weights)], list(weights) if len(weights) > 1 else None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [wanted, 0, 0], lambda: True, config).build()[0]
    rows = (dataset[number] for number in range(wanted))
    return np.stack([np.append(row["tokens"].numpy(), row["labels"].numpy()[-1]) for row in rows]).astype("<i8")


def main() -> int:
    warnings.filterwarnings("ignore")
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.distributed.init_process_group("gloo")
    import megatron.core

    print(f"megatron-core {megatron.core.__version__}")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefixes = write_files(folder)
        for weights, wanted in CASES:
            ours, theirs = our_samples(prefixes, weights, wanted), megatron_samples(folder, prefixes, weights, wanted)
            same = np.array_equal(ours, theirs)
            wrong += not same
            digest = hashlib.sha256(theirs.tobytes()).hexdigest()
            print(f"{weights}, {wanted} samples: {'equal' if same else 'DIFFERENT'}  {digest}")
    torch.distributed.destroy_process_group()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
