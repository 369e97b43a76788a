import json

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep import tokenizer as module
from data_prep.errors import InputError
from data_prep.tokenizer import TextTokenizer, choose_encoder

# The pattern of Llama 3 and, but for its numbers, of GPT-4.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = "don't  we'll I'M naïve 你好。 12345 67.89 tabs\tand\r\n\nlines   and    spaces, \U0001f600 (x)[y] Ünïcödé <em>".split(
    " "
)


def make(folder, pre_tokenizer, normalizer=None, added=()):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS) * 5], trainer)
    inner.add_tokens([AddedToken(token, normalized=False) for token in added])
    inner.pre_tokenizer = pre_tokenizer
    if normalizer:
        inner.normalizer = normalizer
    inner.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder / "tokenizer.json")


def odd_text(size, seed=0):
    random = np.random.RandomState(seed)
    parts = []
    while sum(map(len, parts)) < size:
        parts.append(WORDS[random.randint(len(WORDS))] + " " * random.randint(0, 4) + "\n" * (random.randint(9) == 0))
    return "".join(parts)


def split(pattern):
    isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


TOKENIZERS = {
    "gpt2": lambda: (pre_tokenizers.ByteLevel(add_prefix_space=False), None, ()),
    "prefix space": lambda: (pre_tokenizers.ByteLevel(add_prefix_space=True), None, ()),
    "llama3": lambda: (split(LLAMA3), None, ()),
    "nfc": lambda: (split(LLAMA3), normalizers.NFC(), ()),
    "added tokens": lambda: (split(LLAMA3), None, ("  ", "    ", "and    spaces", ", \U0001f600")),
    "metaspace": lambda: (pre_tokenizers.Metaspace(prepend_scheme="always"), None, ()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_segments_give_the_same_ids(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "SEGMENT", 400)
    tokenizer = make(tmp_path, *TOKENIZERS[name]())
    for seed in range(5):
        text = odd_text(3000, seed)
        segments = tokenizer.segments(text)
        assert len(segments) > 5 and "".join(segments) == text
        assert tokenizer.encode(segments)[0].tolist() == tokenizer.encode([text])[0].tolist()


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer", "text"),
    [
        (None, None, "plain words " * 1000),  # the model sees the whole text
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("_"), "plain words " * 1000),
        (pre_tokenizers.Metaspace(prepend_scheme="never", split=False), None, "plain words " * 1000),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None, "x" * 5000),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None, "\U0001f600" * 5000),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None, "words and " * 99 + "x" * 5000),
    ],
)
def test_what_cannot_be_cut_is_refused_above_a_size(tmp_path, monkeypatch, pre_tokenizer, normalizer, text):
    monkeypatch.setattr(module, "SEGMENT", 400)
    monkeypatch.setattr(module, "LONGEST_SEGMENT", 4000)
    tokenizer = make(tmp_path, pre_tokenizer, normalizer)
    assert tokenizer.segments(text) is None
    assert tokenizer.segments(text[:900]) is not None


def test_a_text_is_cut_by_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT", 400)
    tokenizer = make(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    whole = "plain words " * 33 + "\U0001f600"
    assert len(whole.encode()) == 400 and tokenizer.segments(whole) == [whole]
    longer = whole + "x"
    assert len(longer) < 400 and len(tokenizer.segments(longer)) > 1


def test_no_added_token_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT", 40)
    tokenizer = make(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False), added=("lines and",))
    segments = tokenizer.segments("lines and " * 30)
    assert len(segments) > 5 and all(segment.strip().startswith("lines and") for segment in segments)


def test_long_batches_are_encoded_in_parts(tmp_path, monkeypatch):
    tokenizer = make(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    texts = [odd_text(200, seed) for seed in range(20)] + [""]
    ids, lengths = tokenizer.encode(texts)
    monkeypatch.setattr(module, "SEGMENT", 500)
    for again, whole in zip(tokenizer.encode(texts), (ids, lengths), strict=True):
        assert again.tolist() == whole.tolist()
    assert lengths[-1] == 0 and ids[: lengths[0]].tolist() == tokenizer.encode(texts[:1])[0].tolist()


def test_eod_token_for_a_lone_file(tmp_path):
    make(tmp_path, None)
    assert TextTokenizer(tmp_path / "tokenizer.json").end_id is None
    assert TextTokenizer(tmp_path / "tokenizer.json", "<eos>").end_id == 0
    with pytest.raises(InputError, match="--eod_token <nope> is not in the vocabulary of .*tokenizer.json"):
        TextTokenizer(tmp_path, "<nope>")


def test_a_hub_name_is_had_from_the_cache_or_refused_in_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    make(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    asked = []

    def download(name, allow_patterns):
        if name == "no/network":
            raise OSError("no network\nat all")
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    tokenizer = TextTokenizer("some/model")
    assert asked == [("some/model", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])]
    assert (tokenizer.name, tokenizer.path, tokenizer.end_id) == ("some/model", tmp_path, 0)
    with pytest.raises(InputError, match=r"^tokenizer no/network does not exist here, and the .* name: no network$"):
        TextTokenizer("no/network")


def test_special_tokens_are_found(tmp_path):
    tokenizer = make(tmp_path, None)
    inner = Tokenizer.from_str(tokenizer.definition.decode())
    inner.add_special_tokens(["<eot>", "<end of all>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    found = [tokenizer.mentions_special(text) for text in ("a <eos> b", "<eot>", "< eos >", "<e", "<end of all>")]
    assert found == [True, True, False, False, True]


def test_engine_on_no_sample(tmp_path):
    tokenizer = make(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    encoder, note = choose_encoder(tokenizer, "auto", [])
    assert note is None and encoder.encode(["a b"])[0].tolist() == tokenizer.encode(["a b"])[0].tolist()
