import random

import pytest

from data_prep import train_tokenizer
from data_prep.token_file import TokenFile
from data_prep.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n')
    train_tokenizer.main(
        ["--input", str(folder / "text.jsonl"), "--vocab_size", "300", "--output", str(folder / "trained")]
    )
    return folder / "trained"


@pytest.fixture(scope="session")
def documents(tokenizer):
    """A function: the texts of a script's output directory, training then validation."""

    def read(folder):
        decoder = TextTokenizer(tokenizer)
        files = [TokenFile(folder / f"{side}_text_document") for side in ("train", "validation")]
        return [decoder.decode(file.document(n)[:-1].tolist()) for file in files for n in range(len(file))]

    return read


@pytest.fixture
def pages():
    """A function: `count` different pages of about `length` random words each, drawn from `words` and made-up ones."""
    random_ = random.Random(0)

    def page(words, length):
        made_up = ["".join(random_.choices("abdefghiklmnoprstu", k=random_.randint(4, 9))) for _ in range(length)]
        chosen = [random_.choice(words) if n % 3 == 0 else word for n, word in enumerate(made_up)]
        return "\n".join(" ".join(chosen[at : at + 20]) + "." for at in range(0, length, 20))

    return lambda count, words, length=120: [page(words.split(), length) for _ in range(count)]
