import datetime
import gzip
import lzma
import os
import pickle

import pytest
from backports import zstd

from data_prep.errors import InputError
from data_prep.sources import find_inputs, iterate_texts, split_sources

PARTS = [b'{"text":"a"}\n', b'{"text":"b"}\n']
COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def texts(*names, key="text", **options):
    return list(iterate_texts(find_inputs([str(name) for name in names], **options), key))


def write_parquet(path, texts, rows=2, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=rows)
    return path


def test_directories_and_globs_in_natural_order(tmp_path):
    names = ["part10.jsonl", "part2.jsonl.zst", "part1.json.gz", "deep/part3.ndjson", "notes.txt", "README"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("not read here")

    def found(*given, **options):
        inputs = find_inputs([str(tmp_path / name) for name in given], **options)
        return [os.path.relpath(source.name, tmp_path) for source in inputs]

    assert found(".") == ["deep/part3.ndjson", "part1.json.gz", "part2.jsonl.zst", "part10.jsonl"]
    assert found(".", form="text") == ["notes.txt"]
    assert found("part10.jsonl", "part[12].*") == ["part10.jsonl", "part1.json.gz", "part2.jsonl.zst"]
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.parquet").touch()
    (tmp_path / "both" / "a.jsonl").touch()
    (tmp_path / "empty").mkdir()
    for given, message in (
        (["nothing*"], "matches no file"),
        (["nothing"], "does not exist"),
        (["part10.jsonl", "deep/../part10.jsonl"], "twice"),
        (["both"], r"several formats \(jsonl, parquet\); pass --format"),
        (["empty"], "holds no .jsonl"),
    ):
        with pytest.raises(InputError, match=message):
            found(*given)


def fill(system, root):
    for name, content in (
        ("part10.jsonl", PARTS[0]),
        ("part2.jsonl.zst", zstd.compress(PARTS[1])),
        ("deep/c.jsonl.gz", gzip.compress(b'{"text":"c"}\n')),
    ):
        with system.open(f"{root}/{name}", "wb") as handle:
            handle.write(content)


def check_remote(url):
    assert texts(f"{url}/part10.jsonl") == ["a"]
    assert texts(f"{url}/part*") == ["b", "a"]
    assert texts(url) == ["c", "b", "a"]
    [source] = find_inputs([f"{url}/part10.jsonl"])
    assert (
        source.name.endswith("corpus/part10.jsonl")
        and "://" in source.name
        and source.size == len(PARTS[0])
        and source.modified
    )
    for name, message in (("none", "does not exist"), ("none*", "matches no file")):
        with pytest.raises(InputError, match=f"--input {url}/{name}".replace("*", r"\*") + f" {message}"):
            texts(f"{url}/{name}")


def test_urls():
    import fsspec

    fill(fsspec.filesystem("memory"), "/corpus")
    check_remote("memory://corpus")
    with pytest.raises(InputError, match="nosuch://x can't be read as a URL: Protocol not known: nosuch"):
        texts("nosuch://x")


def test_s3(s3):
    s3.mkdir("corpus")
    fill(s3, "corpus")
    check_remote("s3://corpus")


def test_shards_are_contiguous_lines(tmp_path):
    """Every cut: the shards joined are the lines in order, each whole, and the numbers of the lines are right."""
    lines = [b"x" * (n % 7 * 10) for n in range(50)]
    for number, name in enumerate(("a.jsonl", "b.jsonl")):
        (tmp_path / name).write_bytes(b"\n".join(lines[number * 25 : number * 25 + 25]) + b"\n")
    found = find_inputs([str(tmp_path)])
    for parts in range(1, 51):
        shards = split_sources(found, parts)
        assert len(shards) == parts and all(shards)
        read, places = [], []
        for piece in (piece for shard in shards for piece in shard):
            for chunk in piece.chunks("text", 1000):
                read += chunk.records
                places += [piece.place(number) for number in range(chunk.first, chunk.first + len(chunk.records))]
        assert read == lines
        assert places == [f"{source.name}:{n}" for source in found for n in range(1, 26)]
    with pytest.raises(InputError, match="--num_shards 51: the input can be split into 50 at most"):
        split_sources(found, 51)
    assert pickle.loads(pickle.dumps(shards)) == shards


def test_shards_are_of_about_equal_size(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"x" * 9 * 1000 + b"\n" + (b"y" * 99 + b"\n") * 1000)
    sizes = [sum(p.stop - p.start for p in shard) for shard in split_sources(find_inputs([str(tmp_path)]), 10)]
    assert sum(sizes) == 109001 and max(sizes) - min(sizes) <= 200


def test_what_cannot_be_cut(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text":"x"}\n' * 1000))
    (tmp_path / "b.jsonl").write_bytes(b"one\ntwo\n")
    (tmp_path / "c.jsonl").touch()
    names = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.jsonl", "c.jsonl")]
    shards = split_sources(find_inputs(names), 3)
    assert [[os.path.basename(p.source.name) for p in shard] for shard in shards] == [
        ["a.jsonl.gz"],
        ["b.jsonl"],
        ["b.jsonl"],
    ]
    with pytest.raises(InputError, match="can be split into 3 at most"):
        split_sources(find_inputs(names), 4)
    write_parquet(tmp_path / "t.parquet", ["a", "b", "c", "d", "e"])
    [source] = find_inputs([str(tmp_path / "t.parquet")])
    shards = split_sources([source], 3)
    rows = [[r for p in shard for c in p.chunks("text", 9) for r in c.records] for shard in shards]
    assert rows == [[b"a", b"b"], [b"c", b"d"], [b"e"]] and shards[2][0].place(0).endswith("t.parquet:5")
    with pytest.raises(InputError, match="can be split into 3 at most"):
        split_sources([source], 4)


def test_modified_tells_a_changed_file(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(PARTS[0])
    before = find_inputs([str(tmp_path / "in.jsonl")])
    moment = datetime.datetime(2020, 1, 1).timestamp()
    os.utime(tmp_path / "in.jsonl", (moment, moment))
    assert find_inputs([str(tmp_path / "in.jsonl")]) != before
