"""Shards, interruptions, repetition of commands, and duplicates, over all inputs."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from data_prep import chunks, formats, merge_tokens, tokenize_files, train_tokenizer
from data_prep.chunks import Seen
from data_prep.errors import InputError, OneLineParser
from data_prep.token_file import TokenFile, open_tokens
from data_prep.tokenizer import TextTokenizer
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a tokenizer, and 300 documents in every format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.RandomState(0)
    words = "one two three four five six seven eight nine ten".split()
    texts = [f"{n} " + " ".join(random.choice(words, random.randint(1, 60))) for n in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "in.jsonl").write_text(lines)
    twice = (text for n in range(300) for text in (texts[n], texts[max(n - 150, n % 7)])[: 1 + (n % 3 == 0)])
    (folder / "twice.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in twice))
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet", row_group_size=50)
    with pa.ipc.new_stream(folder / "in.arrow", pa.schema([("text", pa.string())])) as out:
        out.write_table(pa.table({"text": texts}), max_chunksize=70)
    (folder / "in.txt").write_text("\n--\n".join(texts))
    (folder / "parts").mkdir()
    for n in range(4):
        part = "".join(lines.splitlines(keepends=True)[n * 75 : n * 75 + 75])
        (folder / "parts" / f"part{n + 8}.jsonl.gz").write_bytes(gzip.compress(part.encode()))
    train_tokenizer.main(
        ["--input", str(folder / "in.jsonl"), "--vocab_size", "300", "--output", str(folder / "tokenizer")]
    )
    return folder


def command(corpus, output, *options, source="in.jsonl"):
    words = ["--input", corpus / source, "--tokenizer", corpus / "tokenizer", "--output_prefix", output]
    return [*map(str, words), "--workers", "1", *map(str, options)]


def job(*arguments):
    parser = OneLineParser()
    tokenize_files.add_arguments(parser)
    parser.add_argument("--workers")
    return tokenize_files.job_of(parser.parse_args(command(*arguments)))


def contents(folder):
    """Name -> bytes of all files, times left out of the records."""
    found = {}
    for path in sorted(folder.iterdir()):
        found[path.name] = path.read_bytes()
        if path.suffix == ".json":
            found[path.name] = {k: v for k, v in json.loads(found[path.name]).items() if k != "seconds"}
    return found


def pair(prefix):
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]


@pytest.fixture(scope="module")
def single(corpus):
    """The bytes of the single output, which every input and every number of shards must give."""
    (corpus / "single").mkdir()
    tokenize_files.main(command(corpus, corpus / "single" / "p"))
    return pair(corpus / "single" / "p_text_document")


@pytest.mark.parametrize(
    ("source", "shards", "options"),
    [
        ("in.jsonl", 1, []),
        ("in.jsonl", 2, []),
        ("in.jsonl", 7, []),
        ("in.jsonl", 40, []),
        ("in.jsonl", 3, ["--engine", "tokenizers", "--workers", "2"]),
        ("in.jsonl.gz", 1, []),
        ("in.parquet", 6, []),
        ("in.arrow", 1, []),
        ("in.txt", 1, ["--text_separator", r"\n--\n"]),
        ("parts", 3, []),
    ],
)
def test_shards_joined_are_the_single_output(corpus, single, tmp_path, source, shards, options):
    output = tmp_path / "p"
    tokenize_files.main(command(corpus, output, "--num_shards", shards, *options, source=source))
    prefixes = [tmp_path / f"p_text_document_{n:05d}_of_{shards:05d}" for n in range(shards)]
    if shards > 1:
        report = json.loads((tmp_path / "p_text_document.json").read_text())
        assert [part["prefix"] for part in report["shards"]] == [prefix.name for prefix in prefixes]
        assert report["documents"] == 300 == sum(part["documents"] for part in report["shards"])
        assert report["tokens"] == sum(TokenFile(prefix).total_tokens for prefix in prefixes)
        merge_tokens.main([*map(str, prefixes), "--output_prefix", str(tmp_path / "p_text_document")])
    assert pair(tmp_path / "p_text_document") == single


def test_checksums_and_sources_are_recorded(corpus, single, tmp_path):
    import xxhash

    tokenize_files.main(command(corpus, tmp_path / "p"))
    report = json.loads((tmp_path / "p_text_document.json").read_text())
    made = dict(zip((".bin", ".idx"), single, strict=True))
    assert report["checksums"] == {s: f"xxh3_128:{xxhash.xxh3_128_hexdigest(b)}" for s, b in made.items()}
    stat = (corpus / "in.jsonl").stat()
    path = str(corpus / "in.jsonl")
    assert report["sources"] == [{"path": path, "bytes": stat.st_size, "modified": stat.st_mtime_ns}]
    merge_tokens.main([str(tmp_path / "p_text_document"), "--output_prefix", str(tmp_path / "q")])
    assert json.loads((tmp_path / "q.json").read_text())["checksums"] == report["checksums"]


def test_bad_records_are_named_by_their_line_in_the_file(corpus, tmp_path):
    good, bad = '{"text":"good"}\n', '{"text":null}\n'
    (tmp_path / "in.jsonl").write_text(good * 30 + bad + good * 30 + bad)
    arguments = command(corpus, tmp_path / "p", "--num_shards", 4)
    arguments[1] = str(tmp_path / "in.jsonl")
    with pytest.raises(InputError, match=r"in.jsonl:31: 'text' is null; mend the record"):
        tokenize_files.main(arguments)
    tokenize_files.main([*arguments, "--on_bad_record", "skip", "--overwrite"])
    rejects = [path.read_text() for path in sorted(tmp_path.glob("*.rejects.txt"))]
    assert [text.split(": ")[0] for text in rejects] == [f"{tmp_path}/in.jsonl:{n}" for n in (31, 62)]
    assert json.loads((tmp_path / "p_text_document.json").read_text())["left_out"] == {"null": 2}


KILLED = """
import os, signal, sys
from data_prep import formats, tokenize_files
from data_prep.token_file import TokenFileWriter
where, count = sys.argv[1], int(sys.argv[2])
formats.CHUNK_BYTES = 4000
def dying(function, after=False):
    calls = 0
    def called(*arguments, **options):
        nonlocal calls
        calls += 1
        if after:
            result = function(*arguments, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else function(*arguments, **options)
    return called
if where == "border":
    tokenize_files.tokenize_shard = dying(tokenize_files.tokenize_shard, after=True)
elif where == "middle":
    TokenFileWriter.add = dying(TokenFileWriter.add)
else:
    os.replace = dying(os.replace, after=True)
tokenize_files.main(sys.argv[3:])
"""


@pytest.mark.parametrize("options", [[], ["--deduplicate"]])
@pytest.mark.parametrize(
    ("where", "count"), [("border", 2), ("middle", 9), ("rename", 6), ("rename", 7), ("rename", 8)]
)
def test_killed_the_same_command_goes_on(corpus, tmp_path, monkeypatch, where, count, options):
    for folder in ("killed", "whole"):
        (tmp_path / folder).mkdir()
    options, source = [*options, "--num_shards", 4], "twice.jsonl" if options else "in.jsonl"
    arguments = command(corpus, tmp_path / "killed" / "p", *options, source=source)
    driver = [sys.executable, "-c", KILLED, where, str(count), *arguments]
    assert subprocess.run(driver, cwd=REPOSITORY).returncode == -signal.SIGKILL
    index_files = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*.idx")}
    assert 1 <= len(index_files) <= 3 and not (tmp_path / "killed" / "p_text_document.json").exists()
    if where == "middle":
        assert list((tmp_path / "killed").glob("*.tmp"))
    tokenize_files.main(arguments)
    assert all(path.stat().st_mtime_ns == moment for path, moment in index_files.items())
    tokenize_files.main(command(corpus, tmp_path / "whole" / "p", *options, source=source))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_worker_processes_end_with_a_killed_command(corpus, tmp_path):
    killed = """
import os, signal, sys
from data_prep import tokenize_files
from data_prep.token_file import TokenFileWriter
TokenFileWriter.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tokenize_files.main(sys.argv[1:])
"""
    arguments = command(corpus, tmp_path / "p", "--engine", "tokenizers", "--workers", 2)
    process = subprocess.Popen([sys.executable, "-c", killed, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE)
    # The workers hold the other end of stdout: it ends when they do.
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_shards_of_an_overwriting_that_was_killed_are_not_read_as_one(corpus, tmp_path):
    options = ["--num_shards", 3]
    tokenize_files.main(command(corpus, tmp_path / "p", *options))
    other = job(corpus, tmp_path / "p", *options, "--append_eod", "false", "--overwrite")
    tokenize_files.tokenize_shard(other, 0, 1)
    with pytest.raises(InputError, match="the shards of .*p_text_document are of several jobs"):
        open_tokens(tmp_path / "p_text_document")
    tokenize_files.tokenize(other, 1)
    assert open_tokens(tmp_path / "p_text_document").total_tokens > 0


def test_a_finished_command_does_nothing_again(corpus, tmp_path, capsys):
    for shards in (1, 3):
        folder = tmp_path / str(shards)
        folder.mkdir()
        arguments = command(corpus, folder / "p", "--num_shards", shards)
        tokenize_files.main(arguments)
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.idx")}
        capsys.readouterr()
        assert tokenize_files.main([*arguments, "--overwrite"]) == 0
        assert "all of it was there" in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in folder.glob("*.idx")} == before
        next(folder.glob("*.bin")).unlink()
        tokenize_files.main(arguments)
        assert "all of it was there" not in capsys.readouterr().out and len(list(folder.glob("*.bin"))) == shards


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--append_eod", "false"], "eod_token was <|endoftext|>, is None"),
        (["--deduplicate"], "deduplicate was False, is True"),
        (["--num_shards", "2"], "num_shards was 3, is 2"),
        (["--on_bad_record", "skip"], "on_bad_record was stop, is skip"),
        (["--max_record_mb", "1"], "max_record_mb was 128.0, is 1.0"),
    ],
)
def test_an_output_of_another_job_is_kept(corpus, tmp_path, options, difference):
    tokenize_files.main(command(corpus, tmp_path / "p", "--num_shards", 3))
    before = contents(tmp_path)
    arguments = command(corpus, tmp_path / "p", "--num_shards", 3, *options)
    with pytest.raises(InputError, match="made by another job") as raised:
        tokenize_files.main(arguments)
    assert difference in str(raised.value) and contents(tmp_path) == before
    tokenize_files.main([*arguments, "--overwrite"])
    shards = 2 if "--num_shards" in options else 3
    assert len(list(tmp_path.glob("*.idx"))) == shards == len(list(tmp_path.glob("*.bin")))


def test_shards_of_another_number_and_files_of_others_are_kept(corpus, tmp_path):
    tokenize_files.main(command(corpus, tmp_path / "p", "--num_shards", 3))
    (tmp_path / "p_text_document.json").unlink()  # as after an interruption
    with pytest.raises(InputError, match="p_text_document_00000_of_00003.bin exists, of another --num_shards"):
        tokenize_files.main(command(corpus, tmp_path / "p", "--num_shards", 2))
    (tmp_path / "q_text_document.idx").touch()
    with pytest.raises(InputError, match="q_text_document.idx exists, and nothing says what made it"):
        tokenize_files.main(command(corpus, tmp_path / "q"))


def test_a_changed_source_is_told(corpus, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text":"a"}\n{"text":"b"}\n')
    arguments = command(corpus, tmp_path / "p", "--num_shards", 2)
    arguments[1] = str(tmp_path / "in.jsonl")
    tokenize_files.main(arguments)
    os.utime(tmp_path / "in.jsonl", (1, 1))
    with pytest.raises(InputError, match=r"source 1: modified was \d+, is 1000000000"):
        tokenize_files.main(arguments)


def test_too_many_shards_are_refused(corpus, tmp_path):
    with pytest.raises(InputError, match="--num_shards 7: the input can be split into 6 at most"):
        tokenize_files.main(command(corpus, tmp_path / "p", "--num_shards", 7, source="in.parquet"))


def test_shards_can_be_made_one_by_one(corpus, single, tmp_path):
    made = pickle.loads(pickle.dumps(job(corpus, tmp_path / "p", "--num_shards", 3)))
    done = []
    for shard in (2, 0):
        tokenize_files.tokenize_shard(made, shard, 1, lambda *figures: done.append(figures))
    with pytest.raises(InputError, match="1 of 3 shards are missing: 1"):
        tokenize_files.finish(made)
    report = tokenize_files.tokenize_shard(made, 1, 1, lambda *figures: done.append(figures))
    stored, text_bytes, tokens = np.sum(done, axis=0)
    assert report["shard"] == 1 and tokenize_files.finish(made)["tokens"] == tokens
    assert stored == (corpus / "in.jsonl").stat().st_size == text_bytes + 300
    assert tokenize_files.tokenize_shard(made, 1, 1) == report
    with pytest.raises(InputError, match="--deduplicate makes shards in order, and the hashes of shard 0 of"):
        tokenize_files.tokenize_shard(job(corpus, tmp_path / "d", "--num_shards", 3, "--deduplicate"), 1, 1)


@pytest.mark.parametrize(("shards", "options"), [(1, []), (4, []), (2, ["--engine", "tokenizers", "--workers", "2"])])
def test_the_first_of_duplicates_stays(corpus, tmp_path, shards, options, monkeypatch):
    monkeypatch.setattr("data_prep.formats.CHUNK_BYTES", 100)
    numbers = [0, 1, 2, 1, 0, 3, 3, 4, 5, 0, 6, 2, 7, 8, 7, 9]
    lines = [json.dumps({"n": place, "text": f"text number {n}"}) for place, n in enumerate(numbers)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = command(corpus, tmp_path / "p", "--deduplicate", "--num_shards", shards, *options)
    arguments[1] = str(tmp_path / "in.jsonl")
    tokenize_files.main(arguments)
    report = json.loads((tmp_path / "p_text_document.json").read_text())
    assert report["left_out"] == {"duplicate": 6} and report["documents"] == 10
    decoder = TextTokenizer(corpus / "tokenizer")
    texts = []
    for index in sorted(tmp_path.glob("*.idx")):
        tokens = TokenFile(index)
        texts += [decoder.decode(tokens.document(n)[:-1].tolist()) for n in range(len(tokens))]
    assert texts == [f"text number {n}" for n in range(10)]
    assert not list(tmp_path.glob(".*"))


def test_what_is_in_work_is_bounded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.formats.CHUNK_BYTES", 500)
    monkeypatch.setattr(chunks, "IN_WORK_BYTES", 400)
    made = job(corpus, tmp_path / "p", "--engine", "tokenizers")
    read, tokenizer = [], TextTokenizer(corpus / "tokenizer")
    original = formats.JsonLines.chunks

    def counted(*arguments):
        for chunk in original(*arguments):
            read.append(chunk.size)
            yield chunk
            assert sum(read[done:]) <= 400

    monkeypatch.setattr(formats.JsonLines, "chunks", counted)
    done = 0
    for _ in chunks.tokenized_chunks(made, 0, 1, tokenizer, tokenizer.path):
        done += 1
    assert done == len(read) > 20


def test_seen_hashes_stay_few_sorted_arrays():
    random = np.random.RandomState(0)
    seen, before = Seen(), set()
    for _ in range(200):
        hashes = random.randint(0, 5000, random.randint(0, 100)).astype(np.uint64)
        expected = []
        for value in hashes.tolist():
            expected.append(value not in before)
            before.add(value)
        assert seen.add_new(hashes).tolist() == expected
    assert len(seen._arrays) <= 12 and sum(map(len, seen._arrays)) == len(before)


def test_a_shard_of_which_no_document_stays_is_empty_and_the_others_are_read(corpus, tmp_path):
    lines = [json.dumps({"text": f"document {n}"}) for n in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines + lines + lines[:5]) + "\n")
    words = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(corpus / "tokenizer"), "--deduplicate"]
    tokenize_files.main([*words, "--output_prefix", str(tmp_path / "one")])
    tokenize_files.main([*words, "--output_prefix", str(tmp_path / "cut"), "--num_shards", "5"])
    counts = [
        json.loads((tmp_path / f"cut_text_document_0000{n}_of_00005.json").read_text())["documents"] for n in range(5)
    ]
    assert sum(counts) == 20 and counts[3:] == [0, 0]
    one, cut = (open_tokens(tmp_path / f"{name}_text_document") for name in ("one", "cut"))
    assert len(cut) == 20 and [cut.document(n).tolist() for n in range(20)] == [
        one.document(n).tolist() for n in range(20)
    ]
    assert cut.lengths_hash == one.lengths_hash


def test_nothing_left_in_any_shard_is_an_error_and_leaves_no_output(corpus, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n' * 10)
    words = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(corpus / "tokenizer")]
    with pytest.raises(InputError, match="0 documents written to .*cut_text_document: every record of every shard"):
        tokenize_files.main([*words, "--output_prefix", str(tmp_path / "cut"), "--num_shards", "3"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
