import gzip
import lzma

import pytest
from backports import zstd

from data_prep.errors import InputError
from data_prep.sources import find_inputs, line_chunks

PARTS = [b'{"text":"a"}\n', b'{"text":"b"}\n']
COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def lines(path, **options):
    return [line for _, chunk in line_chunks(path, **options) for line in chunk]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_members_and_frames_are_read(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], PARTS)))
    assert lines(path) == PARTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_file_is_an_error(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], PARTS))[:-4])
    with pytest.raises(InputError, match=rf"in.jsonl{suffix} is truncated"):
        lines(path)


@pytest.mark.parametrize(("suffix", "name"), [(".gz", "gzip"), (".xz", "xz"), (".zst", "zstd")])
def test_a_wrong_suffix_and_flipped_bytes_are_told(tmp_path, suffix, name):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(PARTS[0])
    with pytest.raises(InputError, match=f"is not {name}, or damaged"):
        lines(path)
    options = {"options": {zstd.CompressionParameter.checksum_flag: 1}} if suffix == ".zst" else {}
    content = bytearray(COMPRESS[suffix](b"".join(b'{"text":"%d"}\n' % n for n in range(1000)), **options))
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"in.jsonl{suffix}"):
        lines(path)


def test_line_numbers_go_on_over_chunks(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 90 + b"\n" + b"y\n" * 200)
    chunks = list(line_chunks(path, chunk_bytes=64))
    assert len(chunks) > 5 and chunks[0] == (1, [b"x" * 90 + b"\n"])
    for (first, part), (following, _) in zip(chunks, chunks[1:], strict=False):
        assert following == first + len(part)
    assert sum(len(part) for _, part in chunks) == 201


def test_directories_and_globs_in_natural_order(tmp_path):
    names = ["part10.jsonl", "part2.jsonl.zst", "part1.json.gz", "deep/part3.ndjson", "notes.txt", "README"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(*given):
        return [path.relative_to(tmp_path).as_posix() for path in find_inputs([str(tmp_path / name) for name in given])]

    assert found(".") == ["deep/part3.ndjson", "part1.json.gz", "part2.jsonl.zst", "part10.jsonl"]
    assert found("part10.jsonl", "part[12].*") == ["part10.jsonl", "part1.json.gz", "part2.jsonl.zst"]
    for given, message in (
        (["nothing*"], "matches no file"),
        (["nothing"], "does not exist"),
        (["part10.jsonl", "."], "twice"),
    ):
        with pytest.raises(InputError, match=message):
            found(*given)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no .jsonl"):
        found("empty")
