"""Recipe YAMLs: read with OmegaConf, overridden from the command line, written again.

Every mistake is an InputError that names file and line (or the override), the reason, and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep.errors import InputError, OneLineParser, of_file
from data_prep.token_file import is_url
from recipes import models
from recipes.training.recipe_rules import check_recipe
from recipes.training.settings import REPOSITORY, STEPS_OR_TOKENS, SYNTHETIC, Recipe

DS_CONFIG_SECTIONS = {
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "gradient_clipping",
    "train_micro_batch_size_per_gpu",
}


def recipe_parser(description: str, **options) -> OneLineParser:
    """The options that pretraining and its checker share."""
    parser = OneLineParser(description=description, **options)
    parser.add_argument("--deepspeed_config", help="ds_config JSON, in place of the recipe's")
    parser.add_argument("--resume", help="latest | none | STEP; short for checkpoint.resume=...")
    parser.add_argument("--start_from", metavar="RUN@STEP", help="short for checkpoint.start_from=...")
    parser.add_argument("--branch_from", metavar="RUN@STEP", help="short for checkpoint.branch_from=...")
    parser.add_argument(
        "--allow_cross_node", action="store_true", help="take tensor and sequence groups that reach over several nodes"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="schedule.steps=50; ds.zero_optimization.stage=2 for the JSON"
    )
    return parser


def load_recipe(
    path: str | Path, overrides: list[str] = (), deepspeed_config: str | None = None, resume: str | None = None
) -> tuple[Recipe, list[str]]:
    """Read a recipe YAML (a path, or the name of one in recipes/) and apply overrides.

    Returns the recipe, all its paths absolute, and the overrides of the ds_config (the "ds." prefix taken off).
    Paths in the YAML are relative to it, paths in overrides to the working directory.
    """
    path = _find_recipe(path)
    pairs = [_split_override(override) for override in overrides]
    ds_overrides = [f"{key[3:]}={value}" for key, value in pairs if key.startswith("ds.")]
    pairs = [(key, value) for key, value in pairs if not key.startswith("ds.")]
    if deepspeed_config is not None:
        pairs.append(("deepspeed_config", deepspeed_config))
    if (chosen := dict(pairs).get("deepspeed_config")) is not None:
        pairs = [*map(_split_override, _overrides_in(chosen)), *pairs]
    if resume is not None:
        pairs.append(("checkpoint.resume", resume))

    raw, lines = _read_yaml(path)
    at = functools.partial(_at, path, lines)
    family = next((value for key, value in reversed(pairs) if key == "model.family"), None)
    family_at = f"override model.family={family}" if family else at("model.family")
    if family is None:
        if not isinstance(raw.get("model"), dict):
            raise InputError(f"{at('model')}: model is a section with keys of its own, not {raw.get('model')!r}")
        family = raw["model"].get("family")
    known = models.family(family, family_at).Settings
    overrides_by_key = [(key, _typed(key, value, known), f"override {key}={value}") for key, value in pairs]
    schema = OmegaConf.structured(Recipe)
    OmegaConf.update(schema, "model", OmegaConf.structured(known))

    _check_keys(raw, Recipe, known, "", at)
    schedule = raw.get("schedule", {})
    both = [pair for pair in STEPS_OR_TOKENS if all(schedule.get(key) is not None for key in pair)]
    if both:
        steps_key, tokens_key = (f"schedule.{key}" for key in both[0])
        raise InputError(f"{at(tokens_key)}: {steps_key} and {tokens_key} are both given; keep one")
    resolve_paths(raw, path.parent)
    merged = _merge(schema, raw, at)
    for key, value, where in overrides_by_key:
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        place = functools.partial(lambda where, _key: where, where)
        _check_keys(nested, Recipe, known, "", place)
        resolve_paths(nested, Path.cwd())
        for here, other in [*STEPS_OR_TOKENS, *(pair[::-1] for pair in STEPS_OR_TOKENS)]:
            if nested.get("schedule", {}).get(here) is not None:  # given later, it replaces its counterpart
                nested["schedule"].setdefault(other, None)
        merged = _merge(merged, nested, place)

    def where(key: str) -> str:
        return next((place for k, _, place in reversed(overrides_by_key) if k == key), at(key))

    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise InputError(f"{at(missing[0])}: {missing[0]} is missing")
    try:
        recipe: Recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {_first_line(error)}") from None
    recipe.output_dir = str(Path(recipe.output_dir).resolve())
    recipe.data.files = normalize_files(recipe.data.files, where("data.files"), "data.files")
    if recipe.data.validation_files is not None:
        key = "data.validation_files"
        recipe.data.validation_files = normalize_files(recipe.data.validation_files, where(key), key)
    recipe.data.phases = normalize_phases(recipe.data.phases, where("data.phases"))
    check_recipe(recipe, where)
    return recipe, ds_overrides


def _read_yaml(path: Path) -> tuple[dict, dict[str, int]]:
    """(settings, {dotted key: line}) of a YAML file. Raises InputError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text)
        raw = (
            OmegaConf.to_container(OmegaConf.create(text), resolve=False)
            if isinstance(node, yaml.MappingNode)
            else None
        )
    except OSError as error:
        raise of_file(error) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or _first_line(error)}") from None
    if not raw:
        raise InputError(f"{path}: the file holds no settings")
    return {key: value for key, value in raw.items() if value is not None}, _key_lines(node)


def normalize_files(files, where: str, key: str):
    """ "synthetic", or a list of {path, weight}, whatever of the accepted forms was given."""
    if files == SYNTHETIC:
        return SYNTHETIC
    entries = [files] if isinstance(files, (str, dict)) else files
    if not isinstance(entries, list) or not entries:
        raise InputError(
            f"{where}: {key} must be a token file, a list of them, a list of {{path, weight}}, or {SYNTHETIC}"
        )
    normal = []
    for entry in entries:
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - {"path", "weight"}:
            raise InputError(f"{where}: {key}: {entry!r} must be a path or {{path: ..., weight: ...}}")
        normal.append({"path": entry["path"], "weight": entry.get("weight", 1.0)})
    return normal


def normalize_phases(phases, where: str) -> list[dict]:
    """A list of {from_tokens, files}, each files a list of {path, weight}; [] for none."""
    if phases is None:
        return []
    form = "data.phases must be a list of {from_tokens: N, files: ...}"
    if not isinstance(phases, list):
        raise InputError(f"{where}: {form}")
    normal = []
    for phase in phases:
        if not isinstance(phase, dict) or set(phase) != {"from_tokens", "files"}:
            raise InputError(f"{where}: {form}, not {phase!r}")
        tokens = phase["from_tokens"]
        before = normal[-1]["from_tokens"] if normal else 0
        if (
            isinstance(tokens, bool)
            or not isinstance(tokens, (int, float))
            or tokens != int(tokens)
            or tokens <= before
        ):
            raise InputError(f"{where}: data.phases: from_tokens {tokens} must be a whole number above {before}")
        files = normalize_files(phase["files"], where, "data.phases")
        if files == SYNTHETIC:
            raise InputError(f"{where}: data.phases: files can't be {SYNTHETIC}")
        normal.append({"from_tokens": int(tokens), "files": files})
    return normal


def resolve_paths(values: dict, base: Path) -> None:
    """Make the path-valued settings in `values` absolute, relative ones being relative to `base`. In place."""

    def absolute(value):
        if not isinstance(value, str) or is_url(value):
            return value
        return str((base / Path(value).expanduser()).resolve())

    def absolute_files(files):
        if files is None or files == SYNTHETIC:
            return files
        entries = files if isinstance(files, list) else [files]
        return [{**e, "path": absolute(e.get("path"))} if isinstance(e, dict) else absolute(e) for e in entries]

    for key in ("output_dir", "deepspeed_config"):
        if key in values:
            values[key] = absolute(values[key])
    saving = values.get("checkpoint")
    if isinstance(saving, dict):
        for key in ("start_from", "branch_from"):
            if isinstance(reference := saving.get(key), str):
                run, _, step = reference.rpartition("@")
                saving[key] = f"{absolute(run)}@{step}" if run else reference  # refused later, as it was given
    model = values.get("model")
    if isinstance(model, dict) and isinstance(source := model.get("init_from"), str):
        directory = Path(absolute(source))
        model["init_from"] = str(directory) if directory.is_dir() else source  # else a name on the Hugging Face hub
    data = values.get("data")
    if isinstance(data, dict):
        for key in ("tokenizer", "cache_dir"):
            if key in data and not (key == "tokenizer" and _is_hub_name(data[key], base)):
                data[key] = absolute(data[key])
        for key in ("files", "validation_files"):
            if key in data:
                data[key] = absolute_files(data[key])
        if isinstance(phases := data.get("phases"), list):
            data["phases"] = [
                {**phase, "files": absolute_files(phase.get("files"))} if isinstance(phase, dict) else phase
                for phase in phases
            ]


def _is_hub_name(value, base: Path) -> bool:
    """Whether it is OWNER/NAME and no directory."""
    hub_name = isinstance(value, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", value) is not None
    return hub_name and not (base / value).is_dir()


def effective_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that can be run again."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)


def _overrides_in(path: str) -> list[str]:
    """The ds_config's `_recipe`: what the recipe says otherwise where this JSON is chosen in place of its own."""
    from recipes.training.ds_config import load_ds_config

    overrides = load_ds_config(Path(path).expanduser()).get("_recipe", [])
    if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
        raise InputError(f'{path}: _recipe: {overrides!r} must be a list such as ["pipeline.stages=null"]')
    return overrides


def _find_recipe(path: str | Path) -> Path:
    path = Path(path)
    if path.is_file():
        return path.resolve()
    if len(path.parts) == 1 and path.suffix in ("", ".yaml"):
        named = REPOSITORY / "recipes" / f"{path.stem}.yaml"
        if named.is_file():
            return named
    names = sorted(p.stem for p in (REPOSITORY / "recipes").glob("*.yaml"))
    raise InputError(f"recipe {path} does not exist; give a YAML file or one of the shipped names: {', '.join(names)}")


def _split_override(override: str) -> tuple[str, str]:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r} is not KEY=VALUE, such as schedule.steps=50")
    return key, value


def parse_value(text: str):
    """An override's value: 50, 1e-3, true, null, [a, b] or {a: 1} as YAML reads them, with every float form; else text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for text
        except ValueError:
            return text
    return value if isinstance(value, (bool, int, float, list, dict, type(None))) else text


def _typed(key: str, text: str, model_class):
    """An override's value: of a text setting the text as it stands (name=010), else as `parse_value` reads it."""
    settings, (*sections, last) = Recipe, key.split(".")
    for section in sections:
        fields = {f.name: f.default_factory for f in dataclasses.fields(settings)}
        settings = model_class if settings is Recipe and section == "model" else fields.get(section)
        if not dataclasses.is_dataclass(settings):
            return parse_value(text)
    annotation = next((f.type for f in dataclasses.fields(settings) if f.name == last), None)
    return text if annotation == "str" or annotation == "str | None" and text != "null" else parse_value(text)


def _check_keys(values: dict, recipe_class, model_class, prefix: str, where) -> None:
    """Refuse keys that the dataclasses do not have, naming the nearest one, and values in place of sections."""
    known = {f.name: f for f in dataclasses.fields(recipe_class)}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in known:
            raise InputError(f"{where(full)}: unknown key {full}; {_hint(str(key), prefix, known, model_class)}")
        nested = model_class if full == "model" else known[key].default_factory
        if dataclasses.is_dataclass(nested):
            if not isinstance(value, dict):
                raise InputError(f"{where(full)}: {full} is a section with keys of its own, not {value!r}")
            _check_keys(value, nested, model_class, f"{full}.", where)


def _hint(key: str, prefix: str, known: dict, model_class) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    if not prefix and key in DS_CONFIG_SECTIONS:
        return f"keys of the ds_config take the prefix ds., as in ds.{key}=..."
    sections = {
        f.name: f.default_factory for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(f.default_factory)
    }
    for name, section in {**sections, "model": model_class}.items():
        if key in {f.name for f in dataclasses.fields(section)}:
            return f"did you mean {name}.{key}?"
    return f"known keys: {', '.join(known)}"


def _merge(schema, values: dict, where):
    try:
        return OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        key = error.full_key or next(iter(values))
        raise InputError(f"{where(key)}: {key}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _key_lines(node, prefix: str = "") -> dict[str, int]:
    """{dotted key: line} of a composed YAML document."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[prefix + key.value] = key.start_mark.line + 1
            lines.update(_key_lines(value, f"{prefix}{key.value}."))
    return lines


def _at(path: Path, lines: dict[str, int], key: str) -> str:
    """FILE:LINE of a key, or of the nearest section that is there."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{path}:{lines[key]}" if key else str(path)
