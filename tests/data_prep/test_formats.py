import gzip
import io
import json
import lzma

import pytest
from backports import zstd

from data_prep import formats
from data_prep.errors import InputError
from data_prep.formats import Piece, split_records
from data_prep.records import BadRecord
from data_prep.sources import find_dataset, find_inputs, iterate_texts, split_sources

PARTS = [b'{"text":"a"}\n', b'{"text":"b"}\n']
COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def texts(*names, key="text", **options):
    return list(iterate_texts(find_inputs([str(name) for name in names], **options), key))


def chunks(source, key="text", most_bytes=1000):
    return list(source.chunks(0, source.extent, key, most_bytes))


def write_parquet(path, texts, rows=2, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=rows)
    return path


def invalid_utf8():
    import pyarrow as pa

    return pa.array([b"good", b"caf\xe9", None, b""], pa.binary()).view(pa.string())


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_members_and_frames_are_read(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], PARTS)))
    assert texts(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_file_is_an_error(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], PARTS))[:-4])
    with pytest.raises(InputError, match=rf"in.jsonl{suffix} is truncated"):
        texts(path)


@pytest.mark.parametrize(("suffix", "name"), [(".gz", "gzip"), (".xz", "xz"), (".zst", "zstd")])
def test_a_wrong_suffix_and_flipped_bytes_are_told(tmp_path, suffix, name):
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(PARTS[0])
    with pytest.raises(InputError, match=f"is not {name}, or damaged"):
        texts(path)
    options = {"options": {zstd.CompressionParameter.checksum_flag: 1}} if suffix == ".zst" else {}
    content = bytearray(COMPRESS[suffix](b"".join(b'{"text":"%d"}\n' % n for n in range(1000)), **options))
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"in.jsonl{suffix}"):
        texts(path)


def test_numbers_go_on_over_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 64)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 90 + b"\n" + b"y\n" * 200 + b"end")
    found = chunks(find_inputs([str(path)])[0])
    assert len(found) > 5 and found[0].records[0] == b"x" * 90
    for one, following in zip(found, found[1:], strict=False):
        assert following.first == one.first + len(one.records)
    assert [record for chunk in found for record in chunk.records] == [b"x" * 90, *[b"y"] * 200, b"end"]
    assert sum(chunk.stored for chunk in found) == path.stat().st_size


@pytest.mark.parametrize("delimiter", [b"\n", b"--", b"aab"])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_records_do_not_depend_on_how_they_are_read(monkeypatch, delimiter, block):
    content = b"one\n\ntwo--three---four\naaabaab--\n--"
    monkeypatch.setattr(formats, "CHUNK_BYTES", block)
    found = [part for parts in split_records(io.BytesIO(content).read, delimiter, 100) for part in parts]
    expected = content.split(delimiter)
    assert found == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize("block", [10, 1000])
def test_a_record_that_is_too_long_is_not_held(monkeypatch, block):
    monkeypatch.setattr(formats, "CHUNK_BYTES", block)
    content = b"short\n" + b"x" * 50 + b"\nlast"
    parts = [part for parts in split_records(io.BytesIO(content).read, b"\n", 20) for part in parts]
    assert [part if isinstance(part, bytes) and len(part) <= 20 else "long" for part in parts] == [
        b"short",
        "long",
        b"last",
    ]
    [[end]] = split_records(io.BytesIO(b"x" * 50).read, b"\n", 20) if block == 10 else [[BadRecord("too_long", "")]]
    assert end.reason == "too_long"


@pytest.mark.parametrize("block", range(1, 9))
def test_the_begin_of_a_delimiter_does_not_make_a_record_too_long(monkeypatch, block):
    monkeypatch.setattr(formats, "CHUNK_BYTES", block)
    parts = split_records(io.BytesIO(b"four<end>fiver<end>six").read, b"<end>", 4)
    assert [getattr(part, "reason", part) for found in parts for part in found][::2] == [b"four", b"six"]


@pytest.mark.parametrize("damage", [b"garbage", COMPRESS[".xz"](PARTS[1])[2:]])
def test_damage_after_the_first_stream_is_no_end(tmp_path, damage):
    path = tmp_path / "in.jsonl.xz"
    path.write_bytes(COMPRESS[".xz"](PARTS[0]) + damage)
    with pytest.raises(InputError, match="in.jsonl.xz is not xz, or damaged"):
        texts(path)
    path.write_bytes(bytes(8).join([*map(COMPRESS[".xz"], PARTS), b""]))  # padding, which the format allows
    assert texts(path) == ["a", "b"]


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.txt.xz", "in.jsonl.zst", "in.parquet", "in.arrow"])
def test_a_file_of_no_bytes_is_an_error_where_its_format_has_some(tmp_path, name):
    (tmp_path / name).touch()
    (tmp_path / "full.jsonl").write_bytes(PARTS[0])
    with pytest.raises(InputError, match=f"{name} is empty"):
        texts(tmp_path / "full.jsonl", tmp_path / name)
    (tmp_path / "empty.jsonl").touch()
    assert texts(tmp_path / "empty.jsonl", tmp_path / "full.jsonl") == ["a"]


def test_parquet_and_arrow(tmp_path):
    import pyarrow as pa

    words = ["a", "b", "naïve \U0001f600", "d", "e"]
    write_parquet(tmp_path / "t.parquet", words, n=list(range(5)))
    table = pa.table({"text": words})
    for path, writer in (("t.arrow", pa.ipc.new_stream), ("u.feather", pa.ipc.new_file)):
        with writer(tmp_path / path, table.schema) as out:
            out.write_table(table, max_chunksize=2)
    for name in ("t.parquet", "t.arrow", "u.feather"):
        assert texts(tmp_path / name) == words
        source = find_inputs([str(tmp_path / name)])[0]
        assert 0 < sum(chunk.stored for chunk in chunks(source)) <= source.size
    for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        with pa.ipc.new_stream(tmp_path / "k.arrow", pa.schema([("text", kind)])) as out:
            out.write_table(pa.table({"text": pa.array(words).cast(kind)}))
        assert texts(tmp_path / "k.arrow") == words
    for name, key, message in (
        ("t.parquet", "body", r"t.parquet has no column 'body' \(columns: text, n\)"),
        ("t.parquet", "n", r"column 'n' is int64, not text \(columns: text, n\)"),
        ("t.arrow", "body", r"t.arrow has no column 'body' \(columns: text\)"),
    ):
        with pytest.raises(InputError, match=message):
            texts(tmp_path / name, key=key)
    for name in ("broken.parquet", "broken.arrow"):
        (tmp_path / name).write_bytes(b"no such thing, whatever its name says")
        with pytest.raises(InputError, match=f"{name} can't be read as {name.split('.')[1]}: "):
            texts(tmp_path / name)


def test_nulls_and_bad_utf8_are_told_row_by_row(tmp_path):
    source = find_inputs([str(write_parquet(tmp_path / "t.parquet", invalid_utf8()))])[0]
    piece = Piece(source, 0, source.extent)
    parsed = [
        (piece.place(number), getattr(text := piece.parse(record, "text", 1000), "reason", text))
        for chunk in piece.chunks("text", 1000)
        for number, record in enumerate(chunk.records, chunk.first)
    ]
    path = tmp_path / "t.parquet"
    assert parsed == [
        (f"{path}:1", "good"),
        (f"{path}:2", "bad_utf8"),
        (f"{path}:3", "null"),
        (f"{path}:4", "skipped_empty"),
    ]
    with pytest.raises(InputError, match="t.parquet:2: not UTF-8 at byte 3 of the text"):
        texts(path)


def test_a_row_group_is_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1000)
    path = write_parquet(tmp_path / "t.parquet", [f"{n:0100d}" for n in range(200)], rows=200)
    batches = []
    original = formats.column_texts
    monkeypatch.setattr(
        formats, "column_texts", lambda column, most: batches.append(len(column)) or original(column, most)
    )
    found = chunks(find_inputs([str(path)])[0])
    assert max(chunk.size for chunk in found) <= 1000 and sum(len(chunk.records) for chunk in found) == 200
    assert max(batches) <= 10


def test_a_long_row_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1000)
    path = write_parquet(tmp_path / "t.parquet", ["a", "x" * 3000, "y" * 2000, "b"])
    records = [record for chunk in chunks(find_inputs([str(path)])[0], most_bytes=2500) for record in chunk.records]
    assert [getattr(record, "reason", record) for record in records] == [b"a", "too_long", b"y" * 2000, b"b"]


def test_text_files(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"three\n\nfour\r\n\r\n\xef\xbb\xbffive\n"))
    assert texts(tmp_path / "a.txt", tmp_path / "b.md.gz") == ["one\ntwo\n", "three\n\nfour\n\n\ufefffive\n"]
    for block in (1, 5, 1000):
        monkeypatch.setattr(formats, "CHUNK_BYTES", max(block, 3))
        assert texts(tmp_path / "b.md.gz", separator="\n\n") == ["three", "four", "\ufefffive\n"]
    (tmp_path / "code.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"code.py: its suffix tells no format; pass --format"):
        texts(tmp_path / "code.py")
    assert texts(tmp_path / "code.py", form="text") == ["x = 1\n"]
    with pytest.raises(InputError, match="a.txt:1: longer than 5e-06 MB; see --max_record_mb"):
        list(iterate_texts(find_inputs([str(tmp_path / "a.txt")]), "text", 5))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("dataset")
    (folder / "jsonl").mkdir()
    for part in range(3):
        lines = (json.dumps({"text": f"{part}-{n}", "n": n}) + "\n" for n in range(4))
        (folder / "jsonl" / f"part{part}.jsonl").write_text("".join(lines))
    whole = datasets.Dataset.from_list([{"text": f"{part}-{n}", "n": n} for part in range(3) for n in range(4)])
    whole.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(folder / "dict")
    return folder


@pytest.mark.parametrize(("name", "streaming"), [("jsonl", False), ("jsonl", True), ("saved", False), ("dict", False)])
def test_datasets(dataset, name, streaming, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    expected = [f"{part}-{n}" for part in range(3) for n in range(4)]
    source = find_dataset(str(dataset / name), None, "train", streaming)
    assert list(iterate_texts([source], "text")) == expected
    pieces = [piece for shard in split_sources([source], 3) for piece in shard]
    read = [[r.decode() for c in piece.chunks("text", 99) for r in c.records] for piece in pieces]
    assert read == [expected[:4], expected[4:8], expected[8:]]
    assert find_dataset(str(dataset / name), None, "train", streaming) == source
    place = "row 2 from shard 1 on" if streaming else ":6"
    assert pieces[1].place(1).endswith(place)
    with pytest.raises(InputError, match="column 'n' is int64, not text"):
        list(iterate_texts([source], "n"))
    if name != "saved":  # which holds one split, of no name
        with pytest.raises(InputError, match="no split 'nope'|Unknown split|Bad split"):
            find_dataset(str(dataset / name), None, "nope", streaming)
