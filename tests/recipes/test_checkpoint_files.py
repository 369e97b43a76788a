import json
import re
import shutil

import pytest

from data_prep.errors import InputError
from recipes.training import checkpoint_files as files
from tests.conftest import publish_checkpoint


@pytest.fixture
def directory(tmp_path):
    """Checkpoints 2 and 4."""
    for step in (2, 4):
        publish_checkpoint(tmp_path, step, model=b"m" * 100, shard_1=b"s" * 50)
    return tmp_path


def damage(directory, how):
    four = directory / "global_step4"
    if how == "latest deleted":
        (directory / "latest").unlink()
    elif how == "latest empty":
        (directory / "latest").write_text("")
    elif how == "latest names nothing":
        (directory / "latest").write_text("global_step99")
    elif how == "shard deleted":
        (four / "shard_1.pt").unlink()
    elif how == "shard truncated":
        (four / "shard_1.pt").write_bytes(b"s" * 10)
    elif how == "directory empty":
        shutil.rmtree(four)
        four.mkdir()
    elif how == "manifest cut":
        (four / "manifest.json").write_text('{"format": 2, "fil')


@pytest.mark.parametrize(
    ("how", "step", "reason"),
    [
        ("nothing", 4, None),
        ("latest deleted", 4, None),
        ("latest empty", 4, None),
        ("latest names nothing", 4, None),
        ("shard deleted", 2, "shard_1.pt is missing"),
        ("shard truncated", 2, "shard_1.pt has 10 bytes instead of 50"),
        ("directory empty", 2, "no manifest.json"),
        ("manifest cut", 2, "manifest.json can't be read"),
    ],
)
def test_newest_complete_checkpoint(directory, how, step, reason):
    damage(directory, how)
    found = files.find(directory, "latest")
    assert files.step_of(found.chosen) == step
    assert [path.name for path, _ in found.passed_over] == (["global_step4"] if reason else [])
    if reason:
        assert reason in found.passed_over[0][1]


def test_none_complete_is_an_error_never_a_fresh_start(directory):
    for step in (2, 4):
        (directory / f"global_step{step}" / "model.pt").write_bytes(b"")
    with pytest.raises(InputError, match="no complete checkpoint in .*global_step4: .*global_step2: "):
        files.find(directory, "latest")


def test_explicit_step(directory):
    assert files.step_of(files.find(directory, "2").chosen) == 2
    with pytest.raises(InputError, match="no checkpoint of step 3 in .*; steps there: 2, 4"):
        files.find(directory, "3")
    damage(directory, "shard truncated")
    with pytest.raises(InputError, match="global_step4: shard_1.pt has 10 bytes"):
        files.find(directory, "4")


def test_unfinished_and_foreign_directories_are_no_checkpoints(directory):
    (directory / files.incomplete_tag(6)).mkdir()
    (directory / "global_step8.replaced_1").mkdir()
    assert [files.step_of(p) for p in files.checkpoints(directory)] == [2, 4]
    assert files.find(directory / "nowhere", "latest").chosen is None


def test_changed_content_of_the_same_size_is_found(directory):
    four = directory / "global_step4"
    (four / "shard_1.pt").write_bytes(b"S" * 50)
    assert files.incomplete_because(four) is None
    assert "shard_1.pt does not match its checksum" in files.damaged_because(four, ["model.pt", "shard_1.pt"])
    found = files.find(directory, "latest", {four: "damaged"})
    assert files.step_of(found.chosen) == 2 and found.passed_over == [(four, "damaged")]


def test_publishing_again_keeps_the_old_one(directory):
    publish_checkpoint(directory, 4, new=b"n")
    assert files.files_of(directory / "global_step4") == ["new.pt"]
    assert "model.pt" in files.files_of(directory / "global_step4.replaced_1")
    assert (directory / "latest").read_text() == "global_step4"


@pytest.mark.parametrize("content", ["[1]", "{}", "5", '{"format": 2}'])
def test_manifest_that_is_none(directory, content):
    (directory / "global_step4" / "manifest.json").write_text(content)
    assert files.step_of(files.find(directory, "latest").chosen) == 2


def test_manifest_of_another_format(directory):
    manifest = directory / "global_step4" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert re.search("format 99", files.incomplete_because(directory / "global_step4"))


WRONG = [
    *({key: True} for key in files.FIELDS),
    *({"step": value} for value in ("4", 2, None)),
    *(
        {"layout": value}
        for value in ({}, {"precision": "fp32", "zero_stage": "1"}, {"precision": 32, "zero_stage": 1})
    ),
    *({"data": value} for value in (None, {}, {"files": None}, {"files": [1]})),
    *({"files": {"model.pt": entry}} for entry in ({}, 100, None, {"bytes": 100}, {"bytes": "100", "xxh3_128": "0"})),
    {"files": {}},
]


@pytest.mark.parametrize("wrong", [*WRONG, *files.FIELDS], ids=str)
def test_a_manifest_with_a_wrong_or_missing_field_is_passed_over(directory, wrong):
    manifest = files.read_manifest(directory / "global_step4")
    manifest = {**manifest, **wrong} if isinstance(wrong, dict) else {k: v for k, v in manifest.items() if k != wrong}
    (directory / "global_step4" / "manifest.json").write_text(json.dumps(manifest))
    found = files.find(directory, "latest")
    assert files.step_of(found.chosen) == 2 and "manifest" in found.passed_over[0][1]


def test_data_of_another_kind_is_told(directory):
    was = {"files": [{"documents": 3, "content": "a"}]}
    path = publish_checkpoint(directory, 6, model=b"m")
    manifest = files.read_manifest(path)
    (path / "manifest.json").write_text(json.dumps({**manifest, "data": was}))
    with pytest.raises(InputError, match=r"file 1: documents 3 \(now None\)"):
        files.check_same_data(path, {"files": [{"content": "a"}]})


def add(directory, step):
    return publish_checkpoint(directory, step, model=b"m")


def steps_in(directory):
    return [files.step_of(path) for path in files.checkpoints(directory)]


def test_old_checkpoints_are_deleted_by_step_number(directory):
    newest = [add(directory, step) for step in (6, 8, 10, 12)][-1]
    assert files.retire(newest, 2, 4) == [directory / "global_step2", directory / "global_step6"]
    assert steps_in(directory) == [4, 8, 10, 12]  # the last two, and every fourth step
    assert files.retire(newest, 1, None, needed=[directory / "global_step8"]) == [
        directory / "global_step4",
        directory / "global_step10",
    ]
    assert steps_in(directory) == [8, 12]
    assert files.retire(newest, 5, None) == [] and files.unfinished(directory) == []


def test_what_is_not_ours_is_never_deleted(directory):
    (directory / "global_step2" / "notes.txt").write_text("mine")
    (directory / "global_step4" / "manifest.json").unlink()
    (directory / "global_step1000").mkdir()  # later than the newest: of an abandoned branch, or somebody's
    for name in ("global_step3.replaced_1", "global_step", "other"):
        (directory / name).mkdir()
    before = sorted(path.name for path in directory.iterdir())
    assert files.retire(add(directory, 6), 1, None) == []
    assert sorted(path.name for path in directory.iterdir()) == sorted([*before, "global_step6"])


def test_damaged_ones_do_not_count_as_kept(directory):
    newest = [add(directory, step) for step in (6, 8, 10)][-1]
    (directory / "global_step8" / "model.pt").write_bytes(b"")
    assert files.retire(newest, 4, None) == [] and steps_in(directory) == [2, 4, 6, 8, 10]
    assert files.retire(newest, 2, None) == [directory / "global_step2", directory / "global_step4"]
    assert steps_in(directory) == [6, 8, 10]
    (newest / "manifest.json").write_text("")
    assert files.retire(newest, 1, None) == [] and steps_in(directory) == [6, 8, 10]


def test_a_linked_checkpoint_is_somebody_else_s(directory, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for step in (2, 4):
        shutil.move(directory / f"global_step{step}", elsewhere)
        (directory / f"global_step{step}").symlink_to(elsewhere / f"global_step{step}")
    assert steps_in(directory) == []
    with pytest.raises(InputError, match="no complete checkpoint in .*: global_step4: it is a symbolic link"):
        files.find(directory, "latest")  # never a fresh start
    newest = [add(directory, step) for step in (6, 8)][-1]
    assert files.retire(newest, 2, None) == [] and files.retire(newest, 1, None) == [directory / "global_step6"]
    assert steps_in(directory) == [8] and steps_in(elsewhere) == [2, 4]
    assert all((directory / f"global_step{step}").is_symlink() for step in (2, 4))
    add(directory, 4)  # in the way of one that is saved, it gives way as anything does
    assert steps_in(directory) == [4, 8] and (directory / "global_step4.replaced_1").is_symlink()
    assert steps_in(elsewhere) == [2, 4]


def test_what_is_in_the_way_of_a_checkpoint_is_moved(directory):
    (directory / ".incomplete_global_step6").mkdir()
    (directory / ".incomplete_global_step8").write_text("mine")
    (directory / ".incomplete_global_step10").symlink_to(directory / "nowhere")
    assert [path.name for path in files.unfinished(directory)] == [".incomplete_global_step6"]
    moved = sorted(aside.name for _, aside in files.remove_unfinished(directory))
    assert moved == [".incomplete_global_step10.replaced_1", ".incomplete_global_step8.replaced_1"]
    assert (directory / moved[1]).read_text() == "mine" and (directory / moved[0]).is_symlink()
    assert not (directory / ".incomplete_global_step6").exists() and files.remove_unfinished(directory) == []
    assert steps_in(directory) == [2, 4]


def test_unfinished_ones_are_known_by_name(directory):
    for name in (".incomplete_global_step6", ".incomplete_notes", "incomplete_global_step7"):
        (directory / name).mkdir()
    assert [path.name for path in files.unfinished(directory)] == [".incomplete_global_step6"]
