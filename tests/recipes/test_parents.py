"""Runs that begin where another one was: which parent they have, and whose weights they take."""

import shutil

import pytest

from data_prep.errors import InputError
from recipes.training import checkpoint_files, distributed, loop, parents
from recipes.training.prepare import prepare
from tests.conftest import add_checkpoint


@pytest.fixture
def prepared(tiny):
    """prepared(*arguments) -> Prepared of the tiny recipe on one rank."""
    return lambda *arguments: prepare(loop.parse_arguments("", ["--recipe", str(tiny), *arguments]), 1, "cpu")


def add(prepared, step, **changes):
    return add_checkpoint(prepared.recipe, prepared.ds_config, prepared.sizes, step, **changes)


@pytest.mark.parametrize("option", ["--start_from", "--branch_from"])
def test_another_parent_than_the_recorded_one_is_refused(prepared, tiny, option):
    parent = f"{tiny.parent}/runs/tiny"
    for step in (2, 3):
        add(prepared(), step)
    add(prepared("name=child"), 4, parent=f"{parent}@2")
    assert prepared("name=child", option, f"{parent}@2").recipe.name == "child"
    with pytest.raises(
        InputError, match=f"this run began from {parent}@2, not {parent}@3; leave checkpoint.start_from"
    ):
        prepared("name=child", option, f"{parent}@3")
    add(prepared("name=orphan"), 4)
    with pytest.raises(InputError, match=f"this run has no parent, not {parent}@3"):
        prepared("name=orphan", option, f"{parent}@3")
    shutil.rmtree(parent)  # a run goes on without its parent
    assert prepared("name=child", option, f"{parent}@2").recipe.name == "child"


@pytest.mark.parametrize("reference", ["@3", "tiny", "tiny@", "tiny@x", "@"])
def test_what_is_no_reference_is_told_as_given(prepared, reference):
    with pytest.raises(InputError, match=r"is not RUN@STEP"):
        prepared("name=child", "--branch_from", reference)


def test_weights_are_those_of_the_parent_asked_for(prepared, tiny, monkeypatch):
    """A start from 2 that died before its first checkpoint, then one from 3; and 2 again, saved anew meanwhile."""
    exported = []
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(parents, "verified", checkpoint_files.parent_checkpoint)

    def export(_recipe, path, directory, _dtype):
        directory.mkdir(parents=True)
        exported.append(path.name)

    monkeypatch.setattr("recipes.export_hf.export", export)
    monkeypatch.setattr(parents, "load_recipe", lambda _: (None, None))
    for step in (2, 3):
        add(prepared(), step)

    def start(step):
        child = prepared("name=child", "--start_from", f"{tiny.parent}/runs/tiny@{step}")
        return parents.with_parent_weights(child, 0).recipe.model.init_from

    first, other = start(2), start(3)
    assert first != other and exported == ["global_step2", "global_step3"]
    assert start(2) == first and len(exported) == 2  # not exported again
    add(prepared(), 2, seed=9)
    assert start(2) not in (first, other) and len(exported) == 3
