import hashlib
import struct

import numpy as np
import pytest

from data_prep.errors import InputError
from data_prep.token_file import TokenFile, TokenFileWriter, file_of, token_dtype, token_prefix
from tests.conftest import write_tokens

DOCUMENTS = [[1, 2, 3], [4, 5], [], [65499, 7, 8, 9]]
# Megatron-LM's, gpt-neox's and an independent writer gave these bytes for DOCUMENTS.
GOLDEN = {
    65500: {
        ".idx": "882cb102de88cb9225acff4135689d2cc2944eadeff9016761deea6d83456201",
        ".bin": "a2c99cbaf6fb3fc4c62ce8678fe8c0edbc54f80faaa1a92783e835d9e90aaa94",
    },
    70000: {
        ".idx": "9cb2b3ce8d81872a14b5ef1b1ee0d536f31095f28ad91ca96f38162533b7ac89",
        ".bin": "96119a7f67acc4bcf6d5df69e0256beac3b234b564f06c7d7644e5aa5a6381c6",
    },
}


@pytest.mark.parametrize("vocab_size", GOLDEN)
def test_golden_bytes(tmp_path, vocab_size):
    write_tokens(tmp_path / "golden", DOCUMENTS, vocab_size)
    for suffix, expected in GOLDEN[vocab_size].items():
        assert hashlib.sha256(file_of(tmp_path / "golden", suffix).read_bytes()).hexdigest() == expected
    tokens = TokenFile(tmp_path / "golden")
    assert [tokens.document(n).tolist() for n in range(len(tokens))] == DOCUMENTS


def test_reads_documents_without_a_sequence_and_modes(tmp_path):
    # Another writer stores an empty document as a document index with no sequence; multimodal files append N modes.
    lengths, offsets = struct.pack("<2i", 3, 2), struct.pack("<2q", 0, 6)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 4) + lengths + offsets + struct.pack("<4q", 0, 1, 1, 2)
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 3, 4, 5], "<u2").tobytes())
    for modes in (b"", b"\0\0"):
        (tmp_path / "a.idx").write_bytes(index + modes)
        tokens = TokenFile(tmp_path / "a")
        assert [tokens.document(n).tolist() for n in range(len(tokens))] == [[1, 2, 3], [4, 5]]


def test_truncated_files_are_refused_with_both_sizes(tmp_path):
    prefix = write_tokens(tmp_path / "a", DOCUMENTS[:2])
    data = file_of(prefix, ".bin").read_bytes()
    file_of(prefix, ".bin").write_bytes(data[:-2])
    with pytest.raises(InputError, match=r"a\.bin has 8 bytes, .* = 10"):
        TokenFile(prefix)
    file_of(prefix, ".bin").write_bytes(data)
    index = file_of(prefix, ".idx").read_bytes()
    file_of(prefix, ".idx").write_bytes(index[:-4])
    with pytest.raises(InputError, match=rf"{len(index) - 4} bytes, its header says {len(index)}"):
        TokenFile(prefix)


def test_wrong_offsets_are_refused(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5], [6]])
    index = bytearray(file_of(prefix, ".idx").read_bytes())
    index[34 + 12 + 8] ^= 2  # the second offset
    file_of(prefix, ".idx").write_bytes(index)
    with pytest.raises(InputError, match="its offsets are not the running sum of its lengths"):
        TokenFile(prefix)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a MMIDIDX index"),
        (b"TNTIDX\0\0" + b"\0" * 60, "legacy TNTIDX"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 0, 1), "version 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 6, 0, 1), "dtype code 6"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "a.bin").touch()
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.idx.*{message}"):
        TokenFile(tmp_path / "a")


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"a\.idx does not exist"):
        TokenFile(tmp_path / "a")


def test_type_follows_the_vocabulary_and_large_ids_round_trip(tmp_path):
    assert [token_dtype(size) for size in (65536, 65537)] == [np.uint16, np.int32]
    assert TokenFile(write_tokens(tmp_path / "a", [[0, 65535]], 65536)).document(0).tolist() == [0, 65535]
    assert TokenFile(write_tokens(tmp_path / "b", [[65536, 69999]], 70000)).document(0).tolist() == [65536, 69999]


def test_id_outside_the_vocabulary_names_id_and_document(tmp_path):
    with pytest.raises(InputError, match="document 1 holds token id 64, outside the vocabulary of 64"):
        write_tokens(tmp_path / "a", [[1], [2, 64]], 64)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_nothing_or_half_was_written(tmp_path):
    with pytest.raises(InputError, match="0 documents written"):
        write_tokens(tmp_path / "a", [])
    with pytest.raises(KeyError), TokenFileWriter(tmp_path / "b", 64) as writer:
        writer.add([1, 2])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_offsets_pass_two_gib(tmp_path, monkeypatch):
    # Lengths alone: the data file is never written at this size.
    with TokenFileWriter(tmp_path / "a", 70000) as writer:
        writer.add([1])
        writer._lengths = [np.array([2**30] * 3, dtype=np.int32)]
    raw = file_of(tmp_path / "a", ".idx").read_bytes()
    assert struct.unpack_from("<3q", raw, 34 + 12) == (0, 4294967296, 8589934592)


def test_long_document_keeps_its_length(tmp_path):
    tokens = TokenFile(write_tokens(tmp_path / "a", [np.ones(65537, dtype=np.int64)]))
    assert tokens.lengths.tolist() == [65537]


def test_prefix_with_dots(tmp_path):
    assert token_prefix("x/v1.2_text_document.bin").name == "v1.2_text_document"
    prefix = write_tokens(tmp_path / "v1.2_text_document", [[1]])
    assert file_of(prefix, ".bin").name == "v1.2_text_document.bin" and len(TokenFile(prefix)) == 1
