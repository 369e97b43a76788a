import re

import pytest
import yaml

from data_prep.errors import InputError
from recipes.training.settings import REPOSITORY, effective_yaml, load_recipe
from tests.conftest import make_tiny


def test_loads_with_absolute_paths(tiny):
    recipe, ds_overrides = load_recipe(tiny, ["schedule.steps=5", "ds.zero_optimization.stage=2"])
    assert recipe.total_steps == 5 and ds_overrides == ["zero_optimization.stage=2"]
    assert recipe.data.files == [{"path": str(tiny.parent / "train"), "weight": 1.0}]
    assert recipe.run_directory == tiny.parent / "runs" / "tiny"
    assert recipe.tokens_per_step == 8 * 16


def test_paths_in_overrides_are_relative_to_the_working_directory(tiny, tmp_path, monkeypatch):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    recipe, _ = load_recipe(tiny, ["data.files=other", "output_dir=out"])
    assert recipe.data.files[0]["path"] == str(elsewhere / "other") and recipe.output_dir == str(elsewhere / "out")


def test_effective_recipe_is_a_recipe(tiny, tmp_path):
    recipe, _ = load_recipe(tiny, ["model.hidden_size=64", "data.files=[{path: a, weight: 2}, {path: b, weight: 1}]"])
    (other := tmp_path / "x" / "effective.yaml").parent.mkdir()
    other.write_text(effective_yaml(recipe))
    assert load_recipe(other)[0] == recipe


@pytest.mark.parametrize(
    ("section", "key", "line_of", "message"),
    [
        ("schedule", "step", "step:", "unknown key schedule.step; did you mean schedule.steps?"),
        (None, "global_batch", "global_batch:", "unknown key global_batch; did you mean global_batch_size?"),
        ("model", "hidden_dim", "hidden_dim:", "unknown key model.hidden_dim; did you mean model.hidden_size?"),
    ],
)
def test_unknown_key_names_file_line_and_nearest_key(tiny, section, key, line_of, message):
    settings = yaml.safe_load(tiny.read_text())
    (settings[section] if section else settings)[key] = 3
    tiny.write_text(yaml.safe_dump(settings))
    line = next(n for n, text in enumerate(tiny.read_text().splitlines(), 1) if text.strip().startswith(line_of))
    with pytest.raises(InputError, match=re.escape(f"{tiny}:{line}: {message}")):
        load_recipe(tiny)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.stesp=3", "override schedule.stesp=3: unknown key schedule.stesp; did you mean schedule.steps?"),
        ("schedule.steps=many", "override schedule.steps=many: schedule.steps: Value 'many'"),
        ("schedule", "override 'schedule' is not KEY=VALUE"),
        ("schedule.decay=cosin", "schedule.decay 'cosin' must be one of"),
        ("schedule.warmup_steps=9", "schedule.warmup_steps is 9 steps, the whole run 8"),
        ("model.hidden_size=34", "model.hidden_size 34 is not divisible by num_attention_heads 4"),
        (
            "model.num_key_value_heads=3",
            "model.num_key_value_heads 3 must be positive and divide num_attention_heads 4",
        ),
        ("model.num_key_value_heads=0", "model.num_key_value_heads 0 must be positive"),
        ("model.vocab_size=0", "model.vocab_size 0 must be positive"),
        ("model.family=lama", "model.family 'lama' is unknown; did you mean llama?"),
        ("checkpoint.resume=newest", "checkpoint.resume 'newest' must be latest, none or a step number"),
        ("global_batch_size=0", "global_batch_size 0 must be positive"),
        ("data.files=[]", "data.files must be a token file, a list"),
        ("name=a/b", "name 'a/b' must be a plain directory name"),
    ],
)
def test_bad_overrides(tiny, override, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe(tiny, [override])


def test_steps_or_tokens(tiny):
    recipe, _ = load_recipe(tiny, ["schedule.tokens=1000", "schedule.warmup_tokens=129"])
    assert recipe.schedule.steps is None and recipe.total_steps == 8  # 128 tokens a step, rounded up
    assert recipe.steps_of("warmup") == 2
    settings = yaml.safe_load(tiny.read_text())
    settings["schedule"]["tokens"] = 1000
    tiny.write_text(yaml.safe_dump(settings))
    with pytest.raises(InputError, match=r"tiny\.yaml:\d+: schedule.steps and schedule.tokens are both given"):
        load_recipe(tiny)


def test_missing_setting_and_file(tmp_path):
    recipe = make_tiny(tmp_path)
    settings = yaml.safe_load(recipe.read_text())
    del settings["global_batch_size"]
    recipe.write_text(yaml.safe_dump(settings))
    with pytest.raises(InputError, match=r"tiny\.yaml.*global_batch_size"):
        load_recipe(recipe)
    with pytest.raises(InputError, match="recipe nothing does not exist; .*: demo"):
        load_recipe("nothing")


def test_broken_yaml_names_the_line(tiny):
    tiny.write_text("name: tiny\nmodel: [1, 2\nseed: 3\n")
    with pytest.raises(InputError, match=r"tiny\.yaml:3: not valid YAML"):
        load_recipe(tiny)


def test_shipped_recipes_load_by_name_and_comment_every_setting():
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        assert load_recipe(path.stem)[0].name == path.stem
        assert (REPOSITORY / "ds_configs" / f"{path.stem}.json").is_file()
