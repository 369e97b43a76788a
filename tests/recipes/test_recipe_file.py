import json
import re

import pytest
import yaml

from data_prep.errors import InputError
from recipes.training.recipe_file import effective_yaml, load_recipe, parse_value
from recipes.training.settings import REPOSITORY
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
        ("guards.spike=skip", "guards.spike 'skip' must be warn, skip_step, rollback or null"),
        ("checkpoint.keep_every=4", "checkpoint.keep_every 4 must be a multiple of checkpoint.every_steps 3"),
        ("checkpoint.upload=/mnt/copies", "checkpoint.upload '/mnt/copies' must be a URL"),
        ("checkpoint.upload=s3://", "checkpoint.upload 's3://' must be a URL"),
        ("checkpoint.every_minutes=0", "checkpoint.every_minutes 0.0 must be positive"),
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
        ("model=null", "model is a section with keys of its own, not None"),
        ("model=3", "model is a section with keys of its own, not 3"),
        ("optimizer.lr=1", "keys of the ds_config take the prefix ds., as in ds.optimizer=..."),
        ("steps=5", "did you mean schedule.steps?"),
        ("seed=-1", "seed -1 must lie in 0 .. 2^32 - 1"),
        ("model.head_dim=0", "model.head_dim 0 must be positive and even"),
        ("data.max_epochs=.nan", "data.max_epochs nan must be positive"),
        ("checkpoint.resume=²", "checkpoint.resume '²' must be"),
        ("data.files=[{path: 5}]", "must be a path or {path: ..., weight: ...}"),
        ("name=${", "name"),
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


def test_the_later_of_steps_and_tokens_on_the_command_line_counts(tiny):
    assert load_recipe(tiny, ["schedule.steps=50", "schedule.tokens=1000"])[0].total_steps == 8
    assert load_recipe(tiny, ["schedule.tokens=1000", "schedule.steps=50"])[0].total_steps == 50
    assert load_recipe(tiny, ["schedule={tokens: 256}"])[0].total_steps == 2


def test_numbers_on_the_command_line(tiny):
    recipe, _ = load_recipe(tiny, ["model.rms_norm_eps=1e-6", "model.init.std=5e-2", "validation.samples=null"])
    assert (recipe.model.rms_norm_eps, recipe.model.init.std, recipe.validation.samples) == (1e-6, 0.05, None)
    assert [parse_value(text) for text in ("1e-3", "3", "true", "[1, 2]", "x", "2024-01-01")] == [
        0.001,
        3,
        True,
        [1, 2],
        "x",
        "2024-01-01",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["pipeline.stages=2", "pipeline.partition=type:Foo"],
            "type:REGEX that finds Embedding, Block, FinalNorm, Head",
        ),
        (
            ["pipeline.stages=2", "pipeline.partition=type:("],
            "'type:(' must be parameters, uniform, cost, or type:REGEX",
        ),
        (["guards.spike=skip_step", "pipeline.stages=2"], "guards.spike skip_step needs a step whose loss is known"),
        (["guards.spike=rollback", "data.order=megatron"], "guards.spike rollback needs data.order=epoch"),
        (
            ["checkpoint.start_from=a@1", "checkpoint.branch_from=a@1"],
            "checkpoint.start_from and checkpoint.branch_from are both given",
        ),
        (["checkpoint.start_from=a@1", "model.init_from=b"], "both say where the weights come from"),
    ],
)
def test_settings_that_exclude_each_other(tiny, overrides, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe(tiny, overrides)


def test_parents_are_relative_to_where_they_are_given(tiny, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    recipe, _ = load_recipe(tiny, ["checkpoint.start_from=runs/other@4"])
    assert recipe.checkpoint.start_from == f"{tiny.parent}/runs/other@4"


@pytest.mark.parametrize("name", ["010", "on", "1_0", "2024-01-01", "a #b", "null"])
def test_text_settings_are_taken_as_they_stand(tiny, name):
    recipe, _ = load_recipe(tiny, [f"name={name}", "data.tokenizer=null"])
    assert recipe.name == name and recipe.data.tokenizer is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no settings"),
        ("5", "holds no settings"),
        ("# nothing\n", "holds no settings"),
        ("model: 3\n", ":1: model is a section with keys of its own, not 3"),
        ("model: {family: llama}\nschedule: [1]\n", ":2: schedule is a section with keys of its own, not [1]"),
    ],
)
def test_files_that_are_no_recipe(tiny, content, message):
    tiny.write_text(content)
    with pytest.raises(InputError, match=re.escape(str(tiny)) + ".*" + re.escape(message)):
        load_recipe(tiny)
    tiny.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InputError, match="not UTF-8 at byte 9"):
        load_recipe(tiny)


def test_missing_setting_and_file(tmp_path):
    recipe = make_tiny(tmp_path)
    settings = yaml.safe_load(recipe.read_text())
    del settings["global_batch_size"]
    recipe.write_text(yaml.safe_dump(settings))
    with pytest.raises(InputError, match=r"tiny\.yaml: global_batch_size is missing"):
        load_recipe(recipe)
    with pytest.raises(InputError, match="recipe nothing does not exist; .* demo,"):
        load_recipe("nothing")


def test_broken_yaml_names_the_line(tiny):
    tiny.write_text("name: tiny\nmodel: [1, 2\nseed: 3\n")
    with pytest.raises(InputError, match=r"tiny\.yaml:3: not valid YAML"):
        load_recipe(tiny)


def test_shipped_recipes_load_by_name_and_comment_every_setting():
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        assert load_recipe(path.stem)[0].name == path.stem
        assert (REPOSITORY / "ds_configs" / f"{path.stem}.json").is_file()
        settings = [line for line in path.read_text().splitlines() if ":" in line and not line.startswith("#")]
        assert [line for line in settings if "#" not in line and not line.rstrip().endswith(":")] == []


def test_a_tokenizer_is_a_directory_or_a_name_on_the_hub(tiny, tmp_path, monkeypatch):
    (tmp_path / "mine" / "tokenizer").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, read in (
        ("owner/some-tokenizer.v1", "owner/some-tokenizer.v1"),
        ("mine/tokenizer", str(tmp_path / "mine/tokenizer")),
        ("nowhere", str(tmp_path / "nowhere")),
        ("./a/b", str(tmp_path / "a/b")),
    ):
        assert load_recipe(tiny, [f"data.tokenizer={given}"])[0].data.tokenizer == read


def test_a_chosen_ds_config_says_what_the_recipe_says_otherwise(tiny):
    own, other = tiny.parent / "ds.json", tiny.parent / "other.json"
    other.write_text(
        json.dumps({"_recipe": ["schedule.steps=5", "global_batch_size=4"], **json.loads(own.read_text())})
    )
    recipe, _ = load_recipe(tiny, ["schedule.steps=6"], str(other))
    assert (recipe.total_steps, recipe.global_batch_size) == (6, 4)  # the command line comes first
    assert load_recipe(tiny, [f"deepspeed_config={other}"])[0].total_steps == 5
    own.write_text(other.read_text())  # named by the recipe, it goes with what the recipe says
    assert load_recipe(tiny)[0].global_batch_size == 8
    other.write_text('{"_recipe": {"schedule.steps": 5}}')
    with pytest.raises(InputError, match=r"other.json: _recipe: {'schedule.steps': 5} must be a list such as"):
        load_recipe(tiny, [], str(other))
