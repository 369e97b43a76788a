import json

import numpy as np
import pytest

from data_prep import inspect_tokens, merge_tokens
from data_prep.errors import InputError
from data_prep.token_file import TokenFile, file_of
from tests.conftest import random_documents, write_tokens


def documents_of(prefix):
    tokens = TokenFile(prefix)
    return [tokens.document(n).tolist() for n in range(len(tokens))]


@pytest.mark.parametrize("block", [1, 40, 1 << 24])
def test_merging_keeps_documents_and_order(tmp_path, monkeypatch, block):
    monkeypatch.setattr(merge_tokens.document_blocks, "__defaults__", (block,))
    parts = [random_documents(20, seed=1), [[], [5]], random_documents(7, seed=2)]
    prefixes = [write_tokens(tmp_path / f"part{n}", part) for n, part in enumerate(parts)]
    assert merge_tokens.main([*map(str, prefixes), "--output_prefix", str(tmp_path / "all")]) == 0
    assert documents_of(tmp_path / "all") == [list(d) for part in parts for d in part]
    whole = write_tokens(tmp_path / "whole", [d for part in parts for d in part])
    for suffix in (".bin", ".idx"):
        assert file_of(whole, suffix).read_bytes() == file_of(tmp_path / "all", suffix).read_bytes()


def test_stored_types_may_differ(tmp_path):
    small, large = write_tokens(tmp_path / "a", [[1, 2]], 64), write_tokens(tmp_path / "b", [[69999]], 70000)
    merge_tokens.merge([small, large], tmp_path / "all")
    assert documents_of(tmp_path / "all") == [[1, 2], [69999]] and TokenFile(tmp_path / "all").dtype == np.int32


def test_other_tokenizers_and_merging_onto_a_source_are_refused(tmp_path):
    a, b = write_tokens(tmp_path / "a", [[1]]), write_tokens(tmp_path / "b", [[2]])
    with pytest.raises(InputError, match="is one of the files to be merged"):
        merge_tokens.main([str(a), str(b), "--output_prefix", str(b), "--overwrite"])
    for prefix, sha in ((a, "1"), (b, "2")):
        file_of(prefix, ".json").write_text(json.dumps({"tokenizer": {"sha256": sha}, "vocab_size": 64}))
    with pytest.raises(InputError, match="were made with different tokenizers"):
        merge_tokens.merge([a, b], tmp_path / "all")
    assert documents_of(b) == [[2]] and not file_of(tmp_path / "all", ".bin").exists()


def test_record_of_the_merged_file(tmp_path):
    a, b = write_tokens(tmp_path / "a", [[1]]), write_tokens(tmp_path / "b", [[2, 9]])
    for prefix in (a, b):
        record = {"tokenizer": {"sha256": "1"}, "vocab_size": 64, "sources": ["x"], "seconds": 3}
        file_of(prefix, ".json").write_text(json.dumps(record))
    merge_tokens.merge([a, b], tmp_path / "all")
    record = json.loads(file_of(tmp_path / "all", ".json").read_text())
    assert record["merged_from"] == [str(a), str(b)] and "sources" not in record
    assert (record["documents"], record["tokens"], record["max_token_id"], record["vocab_size"]) == (2, 3, 9, 64)


def test_compare_and_verify(tmp_path, capsys):
    a = write_tokens(tmp_path / "a", [[1, 2], [3], [4, 5, 6]])
    same = write_tokens(tmp_path / "same", [[1, 2], [3], [4, 5, 6]], 70000)
    for other, message in (
        ([[1, 2], [9], [4, 5, 6]], "document 1 differs"),
        ([[1, 2], [3], [4, 5]], "document 2 has 3 and 2 tokens"),
        ([[1, 2], [3]], "3 and 2 documents"),
    ):
        assert inspect_tokens.main([str(a), "--compare", str(write_tokens(tmp_path / "b", other))]) == 1
        assert message in capsys.readouterr().out
    assert inspect_tokens.main([str(a), "--compare", str(same), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "verified: the highest id is 6" in shown and "the same documents" in shown
    file_of(a, ".json").write_text('{"vocab_size": 5}')
    with pytest.raises(InputError, match="document 2: id 5 is outside the vocabulary of 5"):
        inspect_tokens.main([str(a), "--verify"])


def test_length_histogram():
    assert inspect_tokens.length_histogram(np.array([1, 2, 3, 4, 9])) == [(1, 2, 1), (2, 4, 2), (4, 8, 1), (8, 16, 1)]
    assert inspect_tokens.length_histogram(np.array([0, 1])) == [(0, 1, 1), (1, 2, 1)]
