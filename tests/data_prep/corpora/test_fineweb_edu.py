import json

import pytest

from data_prep.corpora import fineweb_edu
from data_prep.errors import InputError

pytest.importorskip("spacy", reason="MinHash compares words, which datatrove has from spaCy")

WORDS = "the of and to in that is for it with as on"


@pytest.fixture
def source(tmp_path, pages):
    """(folder, pages that stay): two Parquet files of the sample's columns, with a copy and a near-copy of a page."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pages(12, WORDS)
    folder = tmp_path / "source"
    folder.mkdir()
    for number, part in enumerate((texts[:6], [*texts[6:], texts[0], f"Changed {texts[3]}"])):
        columns = {
            "text": part,
            "id": [f"<urn:uuid:{number}-{row}>" for row in range(len(part))],
            "dump": ["CC-MAIN-2024-10"] * len(part),
            "url": ["https://example.org"] * len(part),
            "file_path": ["s3://commoncrawl/x.warc.gz"] * len(part),
            "language": ["en"] * len(part),
            "language_score": [0.9] * len(part),
            "token_count": [150] * len(part),
            "score": [3.2] * len(part),
            "int_score": [3] * len(part),
        }
        pq.write_table(pa.table(columns), folder / f"{number:03d}_00000.parquet")
    return folder, texts


@pytest.fixture
def command(tmp_path, source, tokenizer):
    options = {"--output": tmp_path / "out", "--source": source[0], "--tokenizer": tokenizer, "--workers": 1}
    return [*(str(part) for pair in options.items() for part in pair), "--validation_fraction", "0.3"]


def test_of_copies_one_stays_and_all_else_stays(tmp_path, source, command, documents, capsys):
    fineweb_edu.main(command)
    assert sorted(documents(tmp_path / "out")) == sorted(source[1])
    assert "unique: MinHash stage 4: 12 of 14 documents stay" in capsys.readouterr().out


def test_the_same_command_goes_on_where_it_was_killed(tmp_path, command, documents, capsys):
    fineweb_edu.main(command)
    out = tmp_path / "out"
    stayed = documents(out)
    written = {path: path.stat().st_mtime_ns for path in out.glob("*/*.gz")}
    # As if killed in the second task of the last of MinHash's stages.
    (out / "logs" / "unique" / "completions" / "00001").unlink()
    (out / "unique" / "00001.jsonl.gz").write_bytes(b"half of it")
    for path in out.glob("*_text_document.*"):
        path.unlink()
    fineweb_edu.main(command)
    assert documents(out) == stayed
    again = {path for path in written if path.stat().st_mtime_ns != written[path]}
    assert again == {out / "unique" / "00001.jsonl.gz"}
    fineweb_edu.main(command)
    assert "all of it was there" in capsys.readouterr().out and documents(out) == stayed


def test_other_settings_in_the_same_directory_are_refused(tmp_path, command):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text(json.dumps({"source": command[3], "limit": 5, "tasks": 2}))
    with pytest.raises(InputError, match="was begun with limit 5, not -1; choose another --output or remove it"):
        fineweb_edu.main(command)


def test_a_source_without_files_is_one_line(tmp_path, command):
    with pytest.raises(InputError, match=r"missing holds no file that matches \*.parquet$"):
        fineweb_edu.main([*command, "--source", str(tmp_path / "missing")])
    with pytest.raises(
        InputError, match="^--source nowhere://x can't be listed: .*; without network, give a local folder$"
    ):
        fineweb_edu.main([*command, "--source", "nowhere://x"])


def test_more_tasks_than_files_are_refused(command):
    with pytest.raises(InputError, match="--tasks 3 does not lie between 1 and the 2 source files"):
        fineweb_edu.main([*command, "--tasks", "3"])


def test_limit_counts_documents_a_task(tmp_path, command, documents, source):
    fineweb_edu.main([*command, "--limit", "3"])
    assert sorted(documents(tmp_path / "out")) == sorted([*source[1][:3], *source[1][6:9]])


def test_a_missing_tokenizer_is_told_before_any_work(tmp_path, command):
    with pytest.raises(InputError, match="nowhere"):
        fineweb_edu.main([*command, "--tokenizer", str(tmp_path / "nowhere")])
    assert not (tmp_path / "out").exists()
