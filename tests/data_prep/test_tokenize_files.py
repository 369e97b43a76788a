import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from data_prep import corpus, formats, inspect_tokens, split_tokens, tokenize_files, train_tokenizer
from data_prep.errors import InputError, run_command
from data_prep.records import BadRecord, parse_record
from data_prep.sources import find_inputs
from data_prep.token_file import TokenFile, file_of
from data_prep.tokenizer import TextTokenizer
from tests.conftest import REPOSITORY

BAD_LINES = (
    '{"text":"ok"}\n{"content":"no key"}\n{"text":null}\n{"text":123}\n"bare string"\n{"text":["a"]}\n\n{"text":"ok2"'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    words = "hello world, None of this is null: the quick brown fox jumps over it. "
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": words * n}) + "\n" for n in range(1, 20)))
    train_tokenizer.main(
        ["--input", str(folder / "corpus.jsonl"), "--vocab_size", "300", "--output", str(folder / "tokenizer")]
    )
    return folder / "tokenizer"


def run(tmp_path, tokenizer, content, *options, name="in"):
    source = tmp_path / f"{name}.jsonl"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    command = ["--input", str(source), "--output_prefix", str(tmp_path / name), "--tokenizer", str(tokenizer)]
    tokenize_files.main([*command, "--workers", "1", *options])
    return TokenFile(tmp_path / f"{name}_text_document")


def texts(tokens, tokenizer):
    decoder = TextTokenizer(tokenizer)
    return [decoder.decode(tokens.document(n)[:-1].tolist()) for n in range(len(tokens))]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (1, 3, 0, 2), (0, 2, 1, 3)])
def test_empty_documents_are_skipped_and_counted(tmp_path, tokenizer, capsys, order):
    lines = ['{"text": ""}\n', '{"text": "hello world"}\n', '{"text": "   "}\n', '{"text": "x"}\n']
    tokens = run(tmp_path, tokenizer, "".join(lines[i] for i in order))
    assert "docs=2" in (printed := capsys.readouterr().out) and "skipped_empty=2" in printed
    end = TextTokenizer(tokenizer).end_id
    assert (tokens.lengths >= 2).all()
    assert all(tokens.document(n)[-1] == end and (tokens.document(n) == end).sum() == 1 for n in range(2))


def test_an_empty_document_alone_in_a_chunk(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1)
    content = '{"text": ""}\n{"text": "x"}\n{"text": " "}\n'
    for workers in ("1", "2"):
        options = ("--engine", "tokenizers", "--workers", workers)
        assert texts(run(tmp_path, tokenizer, content, *options, name=workers), tokenizer) == ["x"]


def test_nothing_left_is_an_error_and_leaves_no_file(tmp_path, tokenizer, capsys):
    with pytest.raises(InputError, match="0 documents written"):
        run(tmp_path, tokenizer, '{"text": ""}\n')
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_strict_mode_stops_at_the_first_bad_line(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"in\.jsonl:2: no key 'text' \(keys here: content\)"):
        run(tmp_path, tokenizer, BAD_LINES)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_skip_mode_counts_by_reason(tmp_path, tokenizer, capsys, workers):
    tokens = run(tmp_path, tokenizer, BAD_LINES, "--on_bad_record", "skip", "--workers", workers)
    assert "docs=1 " in capsys.readouterr().out
    report = json.loads(file_of(tokens.prefix, ".json").read_text())
    assert report["left_out"] == {"bad_json": 1, "blank": 1, "missing_key": 1, "null": 1, "wrong_type": 3}
    assert texts(tokens, tokenizer) == ["ok"]
    rejects = file_of(tokens.prefix, ".rejects.txt").read_text().splitlines()
    assert [line.split(": ")[:2] for line in rejects] == [
        [f"{tmp_path / 'in.jsonl'}:{number}", reason]
        for number, reason in (
            (2, "missing_key"),
            (3, "null"),
            (4, "wrong_type"),
            (5, "wrong_type"),
            (6, "wrong_type"),
            (8, "bad_json"),
        )
    ]
    run(tmp_path, tokenizer, '{"text":"all good"}\n', "--overwrite")
    assert not file_of(tokens.prefix, ".rejects.txt").exists()


def test_bad_utf8_and_lone_surrogates(tmp_path, tokenizer):
    content = b'{"text":"caf\xe9"}\n{"text":"\\ud83d"}\n{"text":"ok"}\n'
    with pytest.raises(InputError, match=r"in\.jsonl:1: not UTF-8 at byte 12"):
        run(tmp_path, tokenizer, content)
    report = json.loads(
        file_of(run(tmp_path, tokenizer, content, "--on_bad_record", "skip").prefix, ".json").read_text()
    )
    assert (report["documents"], report["left_out"]) == (1, {"bad_unicode": 1, "bad_utf8": 1})


def test_rows_of_a_table_are_told_apart_like_lines(tmp_path, tokenizer, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array([b"good", b"caf\xe9", None, b" ", b"x" * 1001, b"fine"], pa.binary()).view(pa.string())
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": column}), source)
    command = ["--input", str(source), "--output_prefix", str(tmp_path / "p"), "--tokenizer", str(tokenizer)]
    command += ["--max_record_mb", "0.001"]
    with pytest.raises(InputError, match=r"in\.parquet:2: not UTF-8 at byte 3 of the text; mend the record"):
        tokenize_files.main(command)
    tokenize_files.main([*command, "--on_bad_record", "skip"])
    assert "docs=2 tokens=" in (printed := capsys.readouterr().out)
    assert "bad_utf8=1 null=1 skipped_empty=1 too_long=1 (gigatoken: " in printed and " tokens/s)" in printed
    assert (tmp_path / "p_text_document.rejects.txt").read_text().splitlines() == [
        f"{source}:2: bad_utf8: not UTF-8 at byte 3 of the text",
        f"{source}:3: null: the text is null",
        f"{source}:5: too_long: longer than 0.001 MB; see --max_record_mb",
    ]


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_records_that_are_too_long_are_left_out(tmp_path, tokenizer, engine, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 300)
    monkeypatch.setattr("data_prep.tokenizer.SEGMENT", 100)
    monkeypatch.setattr("data_prep.tokenizer.LONGEST_SEGMENT", 500)
    lines = ["short", "y" * 2000, "hello world " * 75, "z" * 600, "end"]
    content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    tokens = run(
        tmp_path, tokenizer, content, "--max_record_mb", "0.001", "--on_bad_record", "skip", "--engine", engine
    )
    assert texts(tokens, tokenizer) == ["short", "hello world " * 75, "end"]
    rejects = file_of(tokens.prefix, ".rejects.txt").read_text().splitlines()
    assert [line.split(": ")[0].split(":")[1] for line in rejects] == ["2", "4"]
    assert "longer than 0.001 MB" in rejects[0] and "without a place where this tokenizer lets" in rejects[1]


def test_a_truncated_file_leaves_no_output(tmp_path, tokenizer):
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text":"a"}\n' * 10)[:-4])
    command = ["--input", str(source), "--output_prefix", str(tmp_path / "p"), "--tokenizer", str(tokenizer)]
    with pytest.raises(InputError, match="in.jsonl.gz is truncated"):
        tokenize_files.main(command)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl.gz"]


def test_datasets_and_several_formats_in_one_command(tmp_path, tokenizer):
    import datasets

    datasets.Dataset.from_dict({"body": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    command = ["--output_prefix", str(tmp_path / "p"), "--tokenizer", str(tokenizer), "--json_key", "body"]
    tokenize_files.main([*command, "--dataset", str(tmp_path / "saved")])
    assert texts(TokenFile(tmp_path / "p_body_document"), tokenizer) == ["one", "two"]
    (tmp_path / "a.jsonl").write_text('{"text": "three"}')
    (tmp_path / "b.txt").write_text("four")
    inputs = ["--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    tokenize_files.main([*command[:4], *inputs])
    assert texts(TokenFile(tmp_path / "p_text_document"), tokenizer) == ["three", "four"]
    for options in ([], [*inputs, "--dataset", "x"]):
        with pytest.raises(InputError, match="give either --input or --dataset"):
            tokenize_files.main([*command, *options])


def test_a_tokenizer_of_other_inputs(tmp_path):
    (tmp_path / "notes.txt").write_text("hello hello hello hello")
    command = ["--input", str(tmp_path / "notes.txt"), "--vocab_size", "261", "--output", str(tmp_path / "tokenizer")]
    train_tokenizer.main(command)
    assert len(TextTokenizer(tmp_path / "tokenizer").encode(["hello"])[0]) == 1


def test_the_command_starts_without_heavy_imports(tmp_path, tokenizer):
    program = (
        "import sys; from data_prep import tokenize_files; tokenize_files.main(sys.argv[1:]); "
        "print([m for m in ('datasets', 'pyarrow', 'fsspec', 'torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    (tmp_path / "in.jsonl").write_text('{"text": "hello"}')
    command = ["--input", tmp_path / "in.jsonl", "--output_prefix", tmp_path / "p", "--tokenizer", tokenizer]
    command += ["--engine", "tokenizers"]  # gigatoken loads awkward, and with it pyarrow and fsspec
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "[]"


def test_byte_order_marks_and_crlf(tmp_path, tokenizer):
    part = b'\xef\xbb\xbf{"text":"a"}\r\n{"text":"b"}\r\n'
    marked = run(tmp_path, tokenizer, part * 2, name="marked")
    plain = run(tmp_path, tokenizer, '{"text":"a"}\n{"text":"b"}\n' * 2, name="plain")
    assert texts(marked, tokenizer) == ["a", "b", "a", "b"]
    assert marked.tokens.tobytes() == plain.tokens.tobytes()


def test_other_key(tmp_path, tokenizer):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text":"WRONG","body":"right"}\n')
    command = ["--input", str(source), "--output_prefix", str(tmp_path / "o"), "--tokenizer", str(tokenizer)]
    tokenize_files.main([*command, "--json_key", "body"])
    assert texts(TokenFile(tmp_path / "o_body_document"), tokenizer) == ["right"]
    with pytest.raises(InputError, match=r"no key 'nope' \(keys here: body, text\)"):
        tokenize_files.main([*command, "--json_key", "nope"])


def test_special_token_in_the_text_is_text(tmp_path, tokenizer):
    tokens = run(tmp_path, tokenizer, '{"text":"A <|endoftext|> B"}\n')
    document, end = tokens.document(0), TextTokenizer(tokenizer).end_id
    assert (document[:-1] != end).all() and document[-1] == end
    assert json.loads(file_of(tokens.prefix, ".json").read_text())["special_in_text"] == 1


def test_a_template_adds_nothing_and_a_missing_end_token_is_refused(tmp_path, tokenizer):
    from tokenizers import Tokenizer, processors

    templated = tmp_path / "templated"
    templated.mkdir()
    inner = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(templated / "tokenizer.json"))
    with pytest.raises(InputError, match="names no eos_token"):
        run(tmp_path, templated, '{"text":"x"}\n')
    without = run(tmp_path, templated, '{"text":"hello"}\n', "--append_eod", "false", name="without")
    assert (without.document(0) != 0).all()
    (templated / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    document = run(tmp_path, templated, '{"text":"hello"}\n', name="with").document(0)
    assert (document == 0).sum() == 1 and document[-1] == 0


def test_bytes_do_not_depend_on_workers_or_chunks(tmp_path, tokenizer, monkeypatch):
    random = np.random.RandomState(0)
    lines = [
        json.dumps({"text": " ".join(map(str, random.randint(0, 999, random.randint(1, 200))))}) for _ in range(300)
    ]
    made = []
    for name, workers, chunk, engine in (
        ("a", "1", 1 << 20, "gigatoken"),
        ("b", "1", 500, "gigatoken"),
        ("c", "1", 500, "tokenizers"),
        ("d", "2", 5000, "tokenizers"),
    ):
        monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
        tokens = run(tmp_path, tokenizer, "\n".join(lines), "--workers", workers, "--engine", engine, name=name)
        made.append((tokens.tokens.tobytes(), tokens.lengths.tobytes()))
    assert len(set(made)) == 1


ODD_TEXTS = [
    "A <|endoftext|> B",
    "<|endoftext|><|endoftext|>",
    "naïve \U0001f600 \u00a0\u2028 text",
    "\x00\x01\x7f",
    "tabs\tand\r\nlines   and    spaces ",
    "don't we'll I'M",
    "12345 67.89",
    "a" * 5000,
]


def test_both_engines_give_the_same_bytes(tmp_path, tokenizer):
    random = np.random.RandomState(0)
    texts_ = [*ODD_TEXTS, *("".join(map(chr, random.randint(32, 0x2FFF, 40))) for _ in range(200))]
    content = "\n".join(json.dumps({"text": text}) for text in texts_)
    made = [
        run(tmp_path, tokenizer, content, "--engine", engine, name=engine) for engine in ("gigatoken", "tokenizers")
    ]
    assert made[0].tokens.tobytes() == made[1].tokens.tobytes() and (made[0].lengths == made[1].lengths).all()
    assert json.loads(file_of(made[0].prefix, ".json").read_text())["engine"] == "gigatoken"


def test_a_tokenizer_that_gigatoken_does_not_know_falls_back_with_a_note(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[EOS]": 0, "hello": 1, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    assert run(tmp_path, tmp_path, '{"text":"hello world"}\n').document(0).tolist() == [1, 2, 0]
    assert "note: tokenizers is used instead of the faster gigatoken: " in capsys.readouterr().out
    with pytest.raises(InputError, match="--engine gigatoken can't be used"):
        run(tmp_path, tmp_path, '{"text":"hello"}\n', "--engine", "gigatoken", name="other")


def test_an_engine_that_differs_on_the_sample_is_not_used(tmp_path, tokenizer, capsys, monkeypatch):
    from data_prep import tokenizer as module

    real = module.GigatokenEncoder.encode
    monkeypatch.setattr(
        module.GigatokenEncoder, "encode", lambda self, texts: (real(self, texts)[0] + 1, real(self, texts)[1])
    )
    assert texts(run(tmp_path, tokenizer, '{"text":"hello"}\n'), tokenizer) == ["hello"]
    assert "it gives other ids than tokenizers on the first records" in capsys.readouterr().out


def test_existing_output_is_kept(tmp_path, tokenizer):
    run(tmp_path, tokenizer, '{"text":"first"}\n')
    message = r"in_text_document.json exists, made by another job \(source 1: bytes was 17, is 18\); choose another"
    with pytest.raises(InputError, match=message):
        run(tmp_path, tokenizer, '{"text":"second"}\n')
    assert texts(TokenFile(tmp_path / "in_text_document"), tokenizer) == ["first"]


def test_missing_input_and_tokenizer(tmp_path, tokenizer, capsys):
    command = [
        "--input",
        str(tmp_path / "no.jsonl"),
        "--output_prefix",
        str(tmp_path / "o"),
        "--tokenizer",
        str(tokenizer),
    ]
    assert run_command(lambda: tokenize_files.main(command)) == 2
    assert capsys.readouterr().err == f"error: --input {tmp_path / 'no.jsonl'} does not exist\n"
    with pytest.raises(InputError, match="tokenizer.json does not exist"):
        run(tmp_path, tmp_path, '{"text":"x"}\n')


def test_split_is_by_document_and_stable_under_added_data(tmp_path, tokenizer):
    lines = [json.dumps({"text": f"document number {n}"}) for n in range(200)]
    sides = []
    for name, part in (("small", lines[:100]), ("large", lines)):
        run(tmp_path, tokenizer, "\n".join(part), name=name)
        command = [str(tmp_path / f"{name}_text_document"), "--validation_fraction", "0.2"]
        command += [
            "--train_prefix",
            str(tmp_path / f"{name}_train"),
            "--validation_prefix",
            str(tmp_path / f"{name}_val"),
        ]
        split_tokens.main(command)
        train, validation = (texts(TokenFile(tmp_path / f"{name}_{side}"), tokenizer) for side in ("train", "val"))
        assert sorted(train + validation) == sorted(json.loads(line)["text"] for line in part)
        sides.append(set(validation))
    assert sides[0] == {text for text in sides[1] if int(text.split()[-1]) < 100}
    assert 20 <= len(sides[1]) <= 60
    with pytest.raises(InputError, match="no document of .* fell to the validation side"):
        split_tokens.split(tmp_path / "small_text_document", tmp_path / "t", tmp_path / "v", 1e-9)
    assert not (tmp_path / "t.bin").exists()


def test_a_split_that_is_killed_leaves_no_old_record_beside_new_tokens(tmp_path, tokenizer, monkeypatch):
    source = run(tmp_path, tokenizer, "".join(f'{{"text":"document {n}"}}\n' for n in range(50))).prefix
    split_tokens.split(source, tmp_path / "t", tmp_path / "v", 0.2)

    def killed(*_):
        raise KeyboardInterrupt

    for fraction, name in ((0.5, "os.replace"), (0.3, "data_prep.split_tokens.write_json")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(name, killed)
            split_tokens.split(source, tmp_path / "t", tmp_path / "v", fraction)
        for side in "tv":
            index, record = tmp_path / f"{side}.idx", json.loads((tmp_path / f"{side}.json").read_text())
            assert not index.exists() or len(TokenFile(tmp_path / side)) == record["documents"]


def test_split_onto_itself_is_refused(tmp_path, tokenizer):
    source = str(run(tmp_path, tokenizer, '{"text":"hello"}\n{"text":"world"}\n').prefix)
    before = file_of(tmp_path / "in_text_document", ".bin").read_bytes()
    for train, validation in ((source, "v"), ("t", source), ("t", "t"), ("t.bin", "t")):
        names = [str(tmp_path / name) for name in (train, validation)]
        with pytest.raises(InputError, match="must be three different files"):
            split_tokens.main([source, "--train_prefix", names[0], "--validation_prefix", names[1], "--overwrite"])
    assert file_of(tmp_path / "in_text_document", ".bin").read_bytes() == before


def test_a_failed_overwrite_keeps_what_was_there(tmp_path, tokenizer):
    prefix = run(tmp_path, tokenizer, '{"text":"first"}\n').prefix
    before = {p.name: p.read_bytes() for p in tmp_path.glob("in_text*")}
    with pytest.raises(InputError, match="0 documents written"):
        run(tmp_path, tokenizer, '{"text":""}\n', "--overwrite")
    assert {p.name: p.read_bytes() for p in tmp_path.glob("in_text*")} == before and file_of(prefix, ".json").exists()


def test_a_tokenizer_never_replaces_another_folder(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    command = ["--input", str(tmp_path / "c.jsonl"), "--vocab_size", "300", "--output", str(tmp_path / "precious")]
    with pytest.raises(InputError, match="exists and is no tokenizer directory"):
        train_tokenizer.main([*command, "--overwrite"])
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_a_missing_directory_is_one_line(tmp_path, capsys):
    assert run_command(lambda: corpus.main(["stdlib", str(tmp_path)])) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} exists")


def test_inspect_decodes_a_document(tmp_path, tokenizer, capsys):
    run(tmp_path, tokenizer, '{"text":"hello"}\n{"text":"world"}\n')
    inspect_tokens.main([str(tmp_path / "in_text_document"), "--document", "1"])
    printed = capsys.readouterr().out
    assert "2 documents" in printed and "world<|endoftext|>" in printed


def test_verify_sees_a_damaged_file(tmp_path, tokenizer):
    prefix = run(tmp_path, tokenizer, '{"text":"hello"}\n').prefix
    assert inspect_tokens.main([str(prefix), "--verify"]) == 0
    data = file_of(prefix, ".bin")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(InputError, match=r"document.bin does not have the checksum"):
        inspect_tokens.main([str(prefix), "--verify"])


def test_tokenizer_directory_loads_in_transformers(tokenizer):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    text = "hello\tworld, naïve \U0001f600\n"
    assert loaded.eos_token == "<|endoftext|>" and loaded.decode(loaded(text).input_ids) == text
    assert loaded(text).input_ids == TextTokenizer(tokenizer).encode([text])[0].tolist()


def test_special_tokens_of_a_trained_tokenizer(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("one two three " * 20)
    command = [
        "--input",
        str(tmp_path / "in.txt"),
        "--output",
        str(tmp_path / "t"),
        "--special_tokens",
        "<|a|>",
        "<|b|>",
    ]
    train_tokenizer.main([*command, "--vocab_size", "265"])
    assert TextTokenizer(tmp_path / "t").special_tokens == ["<|endoftext|>", "<|a|>", "<|b|>"]
    assert " MiB" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--vocab_size 259 is too small: 256 bytes and .*<\|b\|> come first"):
        train_tokenizer.main([*command, "--vocab_size", "259", "--overwrite"])


def test_tokenizer_of_no_text(tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(InputError, match="0 documents in .*empty.jsonl"):
        train_tokenizer.train(find_inputs([str(tmp_path / "empty.jsonl")]), 300, tmp_path / "tokenizer")


def test_stdlib_corpus_is_the_standard_library(tmp_path):
    documents, size = corpus.write_stdlib(tmp_path / "corpus.jsonl")
    records = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert len(records) == documents > 300 and size > 5e6
    assert "json/decoder.py" in {record["source"] for record in records}
    assert not any("site-packages" in record["source"] for record in records)


@pytest.mark.parametrize(
    ("line", "reason"), [(b'{"text": true}', "wrong_type"), (b"null", "wrong_type"), (b"[" * 100000, "bad_json")]
)
def test_odd_records(line, reason):
    assert isinstance(bad := parse_record(line, "text"), BadRecord) and bad.reason == reason


def test_odd_keys_stay_one_line():
    line = json.dumps({"a\nb": 1, "c": 2, **{str(n): n for n in range(10_000)}}).encode()
    detail = parse_record(line, "text").detail
    assert "\n" not in detail and len(detail) < 1200
    assert "(keys here: a b, c)" in parse_record(b'{"c":1,"a\\nb":2}', "text").detail
