import gzip
import json

import numpy as np
import pytest

from data_prep.corpora import mc4
from data_prep.errors import InputError

pytest.importorskip("spacy", reason="datatrove counts and compares words with it")

GERMAN = mc4.LANGUAGES["de"].stop_words + " auch nach wird an bei einer eine ein nicht ist sich"
SPANISH = mc4.LANGUAGES["es"].stop_words + " para como más este son entre cuando muy sin sobre"


@pytest.fixture
def corpus(tmp_path, pages):
    """(options, pages that stay): a German and a Spanish file with junk, copies, and a Spanish page among the German."""
    german, spanish = pages(12, GERMAN), pages(8, SPANISH)
    (foreign,) = pages(1, SPANISH + " der die und")
    (junk_page,) = pages(1, GERMAN)
    junk = [
        "Zu kurz, der die und.",
        "\n".join(["Hier klicken und der Seite folgen, die alles hat."] * 30),
        "\n".join(["2 + 3 = 5 ; 7 * 8 der und"] * 3) + " " + " ".join(str(n) for n in range(200)),
        "\n".join(junk_page.replace(".", "").split()),
        pages(1, "lorem ipsum dolor")[0],
    ]
    files = {"de": [*german, *junk, german[2], f"Neu {german[5]}", foreign], "es": spanish}
    (tmp_path / "source").mkdir()
    for code, texts in files.items():
        path = tmp_path / "source" / f"c4-{code}.tfrecord-00003-of-02048.json.gz"
        with gzip.open(path, "wt") as file:
            for number, text in enumerate(texts):
                url = f"https://example.org/{code}/{number}"
                file.write(json.dumps({"text": text, "timestamp": "2020-01-01T00:00:00Z", "url": url}) + "\n")
    (tmp_path / "source" / "c4-de.tfrecord-00010-of-02048.json.gz").write_bytes(b"an eleventh file is not read")
    return german, spanish, foreign


@pytest.fixture
def command(tmp_path, tokenizer):
    command = ["--output", str(tmp_path / "out"), "--source", str(tmp_path / "source"), "--workers", "1"]
    return [*command, "--tokenizer", str(tokenizer), "--validation_fraction", "0.3", "--languages"]


def test_junk_and_copies_go_in_each_language(tmp_path, corpus, command, documents, capsys):
    german, spanish, foreign = corpus
    mc4.main([*command, "de", "es", "--language_filter", "off"])
    assert sorted(documents(tmp_path / "out" / "de")) == sorted([*german, foreign])
    assert sorted(documents(tmp_path / "out" / "es")) == sorted(spanish)
    printed = capsys.readouterr().out
    assert "language filter: off, the source's own labels are believed" in printed
    for step in ("Gopher Repetition: 17 of 20", "Gopher Quality: 16 of 17", "FineWeb Quality: 15 of 16"):
        assert f"cleaned: {step} documents stay" in printed
    assert f"    - {{path: {tmp_path / 'out' / 'es'}/train_text_document, weight: 0.3}}" in printed


class WordCounter:
    """In place of fastText's downloaded model: the language whose words a text has more of."""

    def predict(self, text, k):
        shares = np.array([sum(word in words.split() for word in text.split()) for words in (GERMAN, SPANISH)])
        return ["__label__de", "__label__es"], shares / max(shares.sum(), 1)


def test_pages_in_another_language_go(tmp_path, corpus, command, documents, monkeypatch, capsys):
    pytest.importorskip("fasttext", reason="the language filter needs fasttext-numpy2-wheel")
    from datatrove.utils.lid import FT176LID

    monkeypatch.setattr(FT176LID, "model", WordCounter())
    mc4.main([*command, "de"])
    assert sorted(documents(tmp_path / "out" / "de")) == sorted(corpus[0])
    assert "cleaned: Language ID: 18 of 20 documents stay" in capsys.readouterr().out


def test_a_missing_package_is_named(command, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fasttext" else "found")
    with pytest.raises(InputError, match="^fasttext-numpy2-wheel not installed; pip install fasttext-numpy2-wheel$"):
        mc4.main([*command, "de"])


def test_a_language_model_that_cannot_be_had_is_one_line(command, corpus, monkeypatch):
    pytest.importorskip("fasttext", reason="the language filter needs fasttext-numpy2-wheel")
    from datatrove.utils import lid

    def offline(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(lid, "cached_asset_path_or_download", offline)
    with pytest.raises(InputError, match="^fastText's lid.176 can't be had: Name or .*; with --language_filter off"):
        mc4.main([*command, "de"])
