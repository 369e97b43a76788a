"""The recipe: dataclasses behind the YAML, read with OmegaConf, overridden from the command line.

Every mistake is an InputError that names file and line (or the override), the reason, and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep.errors import InputError, OneLineParser, of_file
from data_prep.token_file import is_url
from recipes import models

REPOSITORY = Path(__file__).resolve().parents[2]
SYNTHETIC = "synthetic"
DS_CONFIG_SECTIONS = {
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "gradient_clipping",
    "train_micro_batch_size_per_gpu",
}
# Lengths that can be given in optimizer steps or in tokens; stating both in one file is an error.
STEPS_OR_TOKENS = [("steps", "tokens"), ("warmup_steps", "warmup_tokens"), ("decay_steps", "decay_tokens")]


@dataclass
class DataSettings:
    files: Any = MISSING  # token file, list of them, list of {path, weight}, or "synthetic"
    validation_files: Any = None  # the same; null: no validation
    tokenizer: str | None = None  # directory; copied into exports, its size checked against model.vocab_size
    seq_length: int = MISSING  # tokens a sample
    order: str = "epoch"  # epoch | megatron
    document_mask: str = "none"  # none | attention: a token sees its own document only
    max_epochs: float | None = None  # most epochs of any file; null: no bound
    phases: Any = None  # list of {from_tokens, files}: other files or weights from a given token of the run on
    cache_dir: str | None = None  # for large indices and remote files, best node-local; null: output_dir/.cache
    cache_limit_gib: float | None = None  # most that remote files may take there; null: what the disk has
    prefetch_steps: int = 2  # optimizer steps read ahead


@dataclass
class LossSettings:
    z_loss: float = 0.0  # weight of the mean of log(sum(exp(logits)))^2, added to the loss that is trained on
    chunk_tokens: int | None = None  # tokens whose logits are held at once; null: all of a micro batch


@dataclass
class ComputeSettings:
    attention: str = "sdpa"  # sdpa | flash_attention_2 | flash_attention_3 | flex_attention | eager
    activation_checkpoint_interval: int = 0  # activations of every n-th block are recomputed; 1: of all; 0: of none
    compile: bool = False  # torch.compile of each block


@dataclass
class PipelineSettings:
    stages: int | None = None  # recipes/pretrain_pipeline.py trains it; null: recipes/pretrain.py does
    tensor_parallel_size: int = 1  # ranks that share each stage's matrices
    partition: str = "parameters"  # parameters | uniform | type:CLASS_REGEX | cost (measured)


@dataclass
class ValidationSettings:
    every_steps: int | None = None  # optimizer steps; null: only before step 1 and after the last
    samples: int | None = 256  # samples a validation; null: all


@dataclass
class ScheduleSettings:
    steps: int | None = None  # length of the run in optimizer steps, or:
    tokens: int | None = None  # length of the run in tokens
    warmup_steps: int | None = None  # linear warm-up, or:
    warmup_tokens: int | None = None
    decay: str = "cosine"  # constant | cosine | linear | warmup_stable_decay
    decay_steps: int | None = None  # length of the last part of warmup_stable_decay, or:
    decay_tokens: int | None = None
    final_ratio: float = 0.1  # last learning rate / peak learning rate


@dataclass
class CheckpointSettings:
    every_steps: int | None = None  # optimizer steps; null: only at the end and on a signal
    every_minutes: float | None = None  # and when this much time has passed since the last one
    keep_last: int | None = None  # older ones are deleted once the next is published; null: all are kept
    keep_every: int | None = None  # those of every n-th step are kept for ever
    upload: str | None = None  # URL (s3://, gs://, ...) that published ones are copied to; nothing is deleted there
    resume: str = "latest"  # latest | none | a step number
    start_from: str | None = None  # RUN@STEP: begin with the weights of another run, everything else fresh
    branch_from: str | None = None  # RUN@STEP: go on from another run's checkpoint, under this schedule and data
    asynchronous: bool = True  # training waits for a copy in host memory only, while a thread writes it
    host_memory_gib: float | None = None  # most that a rank's copy may take; null: its part of half of what is free


@dataclass
class MonitorSettings:
    log_every_steps: int = 1  # optimizer steps between lines
    tensorboard: bool = True  # event files in the run directory
    samples: bool = False  # log the sample numbers of every step to logs/samples_rank_N.jsonl
    peak_tflops: float | None = None  # of one device in the dtype used, for mfu; null: no mfu


@dataclass
class GuardSettings:
    max_skipped_in_a_row: int = 10  # optimizer steps without an update (non-finite gradients) before the run gives up
    watchdog_s: float | None = (
        1500  # seconds without the end of a step before the run ends, with all stacks; null: never
    )
    replica_check_every: int | None = None  # optimizer steps between comparisons of data-parallel ranks' parameters
    spike: str | None = None  # warn | skip_step | rollback when loss or gradient norm jumps; null: no detector
    spike_window: int = 100  # optimizer steps that a value is compared with
    spike_threshold: float = 10.0  # robust standard deviations above their median
    max_rollbacks: int = 10  # before the run gives up


@dataclass
class Recipe:
    name: str = MISSING  # the run directory is output_dir/name
    seed: int = 1234  # of initial weights, dropout and data order
    output_dir: str = "runs"
    model: Any = MISSING  # the settings class of model.family
    global_batch_size: int = MISSING  # sequences an optimizer step, whatever the number of devices
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    guards: GuardSettings = field(default_factory=GuardSettings)
    deepspeed_config: str = MISSING  # the ds_config JSON that goes with the recipe

    @property
    def run_directory(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def entry_script(self) -> str:
        return "recipes/pretrain.py" if self.pipeline.stages is None else "recipes/pretrain_pipeline.py"

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.data.seq_length

    def steps_of(self, name: str) -> int:
        """`steps`, `warmup` or `decay` of the schedule in optimizer steps (tokens rounded up to whole steps); 0: not set."""
        steps_key, tokens_key = next(pair for pair in STEPS_OR_TOKENS if pair[0].removesuffix("_steps") == name)
        steps, tokens = getattr(self.schedule, steps_key), getattr(self.schedule, tokens_key)
        return steps if steps is not None else -(-tokens // self.tokens_per_step) if tokens is not None else 0

    @property
    def total_steps(self) -> int:
        return self.steps_of("steps")


def recipe_parser(description: str, **options) -> OneLineParser:
    """The options that pretraining and its checker share."""
    parser = OneLineParser(description=description, **options)
    parser.add_argument("--deepspeed_config", help="ds_config JSON, in place of the recipe's")
    parser.add_argument("--resume", help="latest | none | STEP; short for checkpoint.resume=...")
    parser.add_argument("--start_from", metavar="RUN@STEP", help="short for checkpoint.start_from=...")
    parser.add_argument("--branch_from", metavar="RUN@STEP", help="short for checkpoint.branch_from=...")
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


def check_recipe(recipe: Recipe, where) -> None:
    """Rules that need nothing but the recipe. `where(key)` names the place of a key. Raises InputError."""

    def need(condition: bool, key: str, message: str) -> None:
        if not condition:
            raise InputError(f"{where(key)}: {key} {message}")

    need(
        "/" not in recipe.name and recipe.name not in ("", ".", ".."),
        "name",
        f"{recipe.name!r} must be a plain directory name",
    )
    need(0 <= recipe.seed < 2**32, "seed", f"{recipe.seed} must lie in 0 .. 2^32 - 1")
    need(recipe.global_batch_size > 0, "global_batch_size", f"{recipe.global_batch_size} must be positive")
    need(recipe.data.seq_length > 0, "data.seq_length", f"{recipe.data.seq_length} must be positive")
    need(recipe.data.order in ("epoch", "megatron"), "data.order", f"{recipe.data.order!r} must be epoch or megatron")
    need(
        recipe.data.document_mask in ("none", "attention"),
        "data.document_mask",
        f"{recipe.data.document_mask!r} must be none or attention",
    )
    attentions = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager")
    need(
        recipe.compute.attention in attentions,
        "compute.attention",
        f"{recipe.compute.attention!r} must be one of {', '.join(attentions)}",
    )
    interval = recipe.compute.activation_checkpoint_interval
    need(interval >= 0, "compute.activation_checkpoint_interval", f"{interval} must be 0 (off) or positive")
    need(recipe.loss.z_loss >= 0, "loss.z_loss", f"{recipe.loss.z_loss:g} must not be negative")
    check_pipeline(recipe, need)
    if recipe.data.phases:
        need(recipe.data.order == "epoch", "data.phases", "needs data.order=epoch: Megatron's order has no phases")
        need(recipe.data.files != SYNTHETIC, "data.phases", f"needs token files, not {SYNTHETIC}")
    need(recipe.data.prefetch_steps > 0, "data.prefetch_steps", f"{recipe.data.prefetch_steps} must be positive")
    shapes = ("constant", "cosine", "linear", "warmup_stable_decay")
    need(
        recipe.schedule.decay in shapes,
        "schedule.decay",
        f"{recipe.schedule.decay!r} must be one of {', '.join(shapes)}",
    )
    need(
        0 <= recipe.schedule.final_ratio <= 1,
        "schedule.final_ratio",
        f"{recipe.schedule.final_ratio:g} must lie in 0 .. 1",
    )
    total, warmup, decay = (recipe.steps_of(name) for name in ("steps", "warmup", "decay"))
    need(total > 0, "schedule.steps", "(or schedule.tokens) must be given and positive: how long is the run?")
    need(
        0 <= warmup <= total,
        "schedule.warmup_steps",
        f"is {warmup} steps, the whole run {total}: shorten the warm-up or lengthen the run",
    )
    if recipe.schedule.decay == "warmup_stable_decay":
        need(
            0 < decay <= total - warmup,
            "schedule.decay_steps",
            f"is {decay} steps; it must lie in 1 .. {total - warmup} (run {total} less warm-up {warmup})",
        )
    else:
        need(decay == 0, "schedule.decay_steps", "belongs to schedule.decay=warmup_stable_decay")
    for key, value in (
        ("data.max_epochs", recipe.data.max_epochs),
        ("data.cache_limit_gib", recipe.data.cache_limit_gib),
        ("loss.chunk_tokens", recipe.loss.chunk_tokens),
        ("schedule.warmup_tokens", recipe.schedule.warmup_tokens or None),
        ("monitor.peak_tflops", recipe.monitor.peak_tflops),
        ("validation.every_steps", recipe.validation.every_steps),
        ("validation.samples", recipe.validation.samples),
        ("checkpoint.every_steps", recipe.checkpoint.every_steps),
        ("checkpoint.every_minutes", recipe.checkpoint.every_minutes),
        ("checkpoint.keep_last", recipe.checkpoint.keep_last),
        ("checkpoint.keep_every", recipe.checkpoint.keep_every),
        ("checkpoint.host_memory_gib", recipe.checkpoint.host_memory_gib),
        ("monitor.log_every_steps", recipe.monitor.log_every_steps),
        ("guards.max_skipped_in_a_row", recipe.guards.max_skipped_in_a_row),
        ("guards.watchdog_s", recipe.guards.watchdog_s),
        ("guards.replica_check_every", recipe.guards.replica_check_every),
        ("guards.spike_window", recipe.guards.spike_window),
        ("guards.spike_threshold", recipe.guards.spike_threshold),
        ("guards.max_rollbacks", recipe.guards.max_rollbacks),
    ):
        need(value is None or value > 0, key, f"{value} must be positive")
    if recipe.data.validation_files == SYNTHETIC:
        need(recipe.validation.samples is not None, "validation.samples", "must be a number: synthetic data has no end")
    resume = recipe.checkpoint.resume
    need(
        resume in ("latest", "none") or (resume.isascii() and resume.isdecimal()),
        "checkpoint.resume",
        f"{resume!r} must be latest, none or a step number",
    )
    spike = recipe.guards.spike
    need(
        spike in (None, "warn", "skip_step", "rollback"),
        "guards.spike",
        f"{spike!r} must be warn, skip_step, rollback or null",
    )
    need(
        spike != "skip_step" or recipe.pipeline.stages is None,
        "guards.spike",
        "skip_step needs a step whose loss is known before its update, which a pipeline's is not: use rollback",
    )
    need(
        spike != "rollback" or recipe.data.order == "epoch",
        "guards.spike",
        "rollback needs data.order=epoch: Megatron's order has no samples in place of the skipped ones",
    )
    start, branch = recipe.checkpoint.start_from, recipe.checkpoint.branch_from
    need(
        start is None or branch is None, "checkpoint.start_from", "and checkpoint.branch_from are both given; keep one"
    )
    need(
        start is None or recipe.model.init_from is None,
        "checkpoint.start_from",
        "and model.init_from both say where the weights come from; keep one",
    )
    upload = recipe.checkpoint.upload
    need(upload is None or is_url(upload), "checkpoint.upload", f"{upload!r} must be a URL, such as s3://bucket/runs")
    keep_every, every = recipe.checkpoint.keep_every, recipe.checkpoint.every_steps
    need(
        keep_every is None or every is not None and keep_every % every == 0,
        "checkpoint.keep_every",
        f"{keep_every} must be a multiple of checkpoint.every_steps {every}: other steps are not saved",
    )
    models.family(recipe.model.family).check(recipe.model, recipe.data.seq_length, need)


def check_pipeline(recipe: Recipe, need) -> None:
    pipeline = recipe.pipeline
    if pipeline.stages is None:
        for key in ("tensor_parallel_size", "partition"):
            default = getattr(PipelineSettings, key)
            need(
                getattr(pipeline, key) == default,
                f"pipeline.{key}",
                "needs pipeline.stages; without stages the tensor size is tensor_parallel.autotp_size in the ds_config",
            )
        return
    need(pipeline.stages > 0, "pipeline.stages", f"{pipeline.stages} must be positive")
    layers = recipe.model.num_hidden_layers
    need(
        pipeline.stages <= layers,
        "pipeline.stages",
        f"{pipeline.stages} stages are more than the model's {layers} layers",
    )
    need(
        pipeline.tensor_parallel_size > 0,
        "pipeline.tensor_parallel_size",
        f"{pipeline.tensor_parallel_size} must be positive",
    )
    need(
        pipeline.partition in ("parameters", "uniform", "cost") or pipeline.partition.startswith("type:"),
        "pipeline.partition",
        f"{pipeline.partition!r} must be parameters, uniform, cost or type:CLASS_REGEX",
    )


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
                saving[key] = f"{absolute(run)}@{step}"
    model = values.get("model")
    if isinstance(model, dict) and isinstance(source := model.get("init_from"), str):
        directory = Path(absolute(source))
        model["init_from"] = str(directory) if directory.is_dir() else source  # else a name on the Hugging Face hub
    data = values.get("data")
    if isinstance(data, dict):
        for key in ("tokenizer", "cache_dir"):
            if key in data:
                data[key] = absolute(data[key])
        for key in ("files", "validation_files"):
            if key in data:
                data[key] = absolute_files(data[key])
        if isinstance(phases := data.get("phases"), list):
            data["phases"] = [
                {**phase, "files": absolute_files(phase.get("files"))} if isinstance(phase, dict) else phase
                for phase in phases
            ]


def effective_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that can be run again."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)


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
