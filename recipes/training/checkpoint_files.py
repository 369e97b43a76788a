"""Checkpoints on disk: which are complete, which is newest, what they hold. Needs no torch.

    checkpoints/global_stepN/    DeepSpeed's files, random states, and manifest.json, written last
    checkpoints/latest           the newest one's name, replaced after its manifest

A directory appears under its final name by a rename once its manifest is in it, so an incomplete one is either an
`.incomplete_global_stepN`, or was damaged later: its files no longer have the sizes in the manifest. A symbolic link of
such a name is somebody else's: it is no checkpoint, and is left alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from data_prep.errors import InputError
from data_prep.files import fsync_directory, write_text
from recipes.training.ds_config import optimizer_states, precision, zero_stage

TAG = re.compile(r"global_step(0|[1-9][0-9]*)")
MANIFEST = "manifest.json"
FORMAT = 2
BLOCK = 16 * 2**20  # bytes read at once
NUMBER, NONE = (int, float), type(None)
FIELDS = {  # of the manifest, with their types
    **dict.fromkeys(("step", "consumed_samples", "consumed_tokens", "applied_updates", "skipped_steps"), int),
    **dict.fromkeys(("global_batch_size", "total_steps", "seed", "optimizer_steps", "order_samples"), int),
    **{"left_out": list, "parent": (str, NONE), "loss_scale": (*NUMBER, NONE)},
    **dict.fromkeys(("model", "layout", "data", "files"), dict),
}


@dataclass
class Found:
    """What a search found: the chosen checkpoint, None when there are none at all, and those passed over with why."""

    chosen: Path | None
    passed_over: list[tuple[Path, str]] = field(default_factory=list)


def tag(step: int) -> str:
    return f"global_step{step}"


def incomplete_tag(step: int) -> str:
    return f".incomplete_{tag(step)}"


def unfinished(directory: Path) -> list[Path]:
    """Directories of checkpoints that were never published."""
    return [path for path in _named_unfinished(directory) if _is_directory(path)]


def remove_unfinished(directory: Path) -> list[tuple[Path, Path]]:
    """Remove what a run left that ended while saving; what else has such a name is set aside: [(name, new name)]."""
    for path in unfinished(directory):
        shutil.rmtree(path)
    return [(path, set_aside(path)) for path in _named_unfinished(directory)]


def _named_unfinished(directory: Path) -> list[Path]:
    return [p for p in directory.glob(".incomplete_*") if TAG.fullmatch(p.name.removeprefix(".incomplete_"))]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def step_of(path: Path) -> int:
    return int(TAG.fullmatch(path.name).group(1))


def checkpoints(directory: Path) -> list[Path]:
    """Checkpoint directories by step, oldest first, complete or not."""
    return [path for path in _named(directory) if _is_directory(path)]


def _named(directory: Path) -> list[Path]:
    """Checkpoint directories, and links to some, by step."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if TAG.fullmatch(p.name) and p.is_dir()), key=step_of)


def find(directory: Path, resume: str, damaged: dict[Path, str] | None = None) -> Found:
    """The checkpoint to resume from: the newest complete one, or step `resume`.

    Args:
        damaged: checkpoints already known to be unusable, and why.

    Raises InputError when checkpoints are there but none is complete, or the step asked for is not.
    """
    candidates, damaged = _named(directory), damaged or {}
    if resume == "latest":
        found = Found(None)
        for path in reversed(candidates):
            fault = damaged.get(path) or incomplete_because(path)
            if fault is None:
                found.chosen = path
                return found
            found.passed_over.append((path, fault))
        if found.passed_over:
            raise InputError(
                f"no complete checkpoint in {directory}: {_faults(found.passed_over)}; restore one, or start anew with "
                "another name=... or --resume none"
            )
        return found
    path = directory / tag(int(resume))
    if path not in candidates:
        steps = ", ".join(str(step_of(p)) for p in candidates) or "none"
        raise InputError(f"no checkpoint of step {resume} in {directory}; steps there: {steps}")
    if (fault := damaged.get(path) or incomplete_because(path)) is not None:
        raise InputError(f"{directory}: {_faults([(path, fault)])}; choose another step")
    return Found(path)


def incomplete_because(path: Path) -> str | None:
    """Why a checkpoint can't be used, by its manifest's file sizes; None when it can."""
    if path.is_symlink():
        return "it is a symbolic link; put the directory itself there"
    try:
        manifest = read_manifest(path)
    except InputError as error:
        return str(error)
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
    return None


def damaged_because(path: Path, names: list[str]) -> str | None:
    """Why files do not have the content that the manifest records; None when all of `names` do."""
    files = read_manifest(path)["files"]
    for name in names:
        if entry_of(path / name) != files[name]:
            return f"the content of {name} does not match its checksum"
    return None


def read_manifest(path: Path) -> dict:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("it has no manifest.json: it was never finished") from None
    except (ValueError, OSError):
        raise InputError("its manifest.json can't be read") from None
    check_manifest(manifest, step_of(path))
    return manifest


def check_manifest(manifest, step: int) -> None:
    """Raises InputError when a checkpoint's manifest lacks something or holds what it can't hold."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or not manifest["files"]:
        raise InputError("its manifest.json lists no files")
    if manifest.get("format") != FORMAT:
        raise InputError(f"its manifest has format {manifest.get('format')!r}; this version reads {FORMAT}")
    for key, kind in FIELDS.items():
        if key not in manifest or isinstance(manifest[key], bool) or not isinstance(manifest[key], kind):
            raise InputError(f"its manifest has {key} {manifest.get(key)!r}")
    if manifest["step"] != step:
        raise InputError(f"its manifest is of step {manifest['step']}")
    layout, files = manifest["layout"], manifest["data"].get("files")
    if not isinstance(layout.get("precision"), str) or type(layout.get("zero_stage")) is not int:
        raise InputError("its manifest has a layout without precision or zero_stage")
    if not isinstance(files, str) and not (isinstance(files, list) and all(isinstance(one, dict) for one in files)):
        raise InputError(f"its manifest has data of files {files!r}")
    for name, entry in manifest["files"].items():
        kinds = {key: type(value) for key, value in entry.items()} if isinstance(entry, dict) else None
        if kinds != {"bytes": int, "xxh3_128": str}:
            raise InputError(f"its manifest has for {name} {entry!r}")


def entry_of(path: Path) -> dict:
    """A file's entry in the manifest, the file made durable."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
        os.fsync(handle.fileno())
        return {"bytes": handle.tell(), "xxh3_128": digest.hexdigest()}


def files_of(path: Path) -> list[str]:
    """Names of a checkpoint's files, relative to it, the manifest left out."""
    names = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return sorted(name for name in names if name != MANIFEST)


def publish(directory: Path, step: int, manifest: dict) -> Path:
    """Make a checkpoint, its files durable already, visible: manifest, rename to its final name, then `latest`."""
    path, final = directory / incomplete_tag(step), directory / tag(step)
    write_text(path / MANIFEST, json.dumps({"format": FORMAT, "step": step, **manifest}, indent=1) + "\n")
    set_aside(final)
    os.rename(path, final)
    fsync_directory(directory)
    write_text(directory / "latest", final.name)
    return final


def remote_directory(recipe) -> str:
    """Where a run's checkpoints are uploaded to."""
    return f"{recipe.checkpoint.upload.rstrip('/')}/{recipe.name}"


def remote_steps(url: str) -> list[int]:
    """Steps of the whole checkpoints in a remote directory, newest first.

    Raises InputError for a URL that is none, ConnectionError when it can't be listed now.
    """
    system, root = open_remote(url)
    try:
        found = {path.rsplit("/", 2)[-2] for path in system.glob(f"{root}/global_step*/{MANIFEST}")}
    except Exception as error:  # whatever the storage's client raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        malformed = isinstance(error, ValueError) or type(error).__name__ == "ParamValidationError"  # botocore's
        raise (InputError if malformed else ConnectionError)(
            f"checkpoint.upload: {url} can't be listed: {why}"
        ) from None
    return sorted((int(TAG.fullmatch(name).group(1)) for name in found if TAG.fullmatch(name)), reverse=True)


def remote_candidates(recipe, fault: str | None) -> list[int]:
    """Steps of the remote checkpoints that the run can go on from, newest first.

    Args:
        fault: why no local one will do; None where there are none.

    Raises InputError where there is a fault and no remote one; else as `remote_steps`.
    """
    url, resume = remote_directory(recipe), recipe.checkpoint.resume
    there = remote_steps(url)
    wanted = there if resume == "latest" else [step for step in there if step == int(resume)]
    if fault is not None and not wanted:
        raise InputError(f"{fault}; steps in {url}: {', '.join(map(str, reversed(there))) or 'none'}")
    return wanted


def open_remote(url: str):
    """(fsspec's file system, the path in it) of a URL. Raises InputError."""
    import fsspec

    # A local file system makes no directories of its own accord, as object storage does.
    local = {"auto_mkdir": True} if fsspec.utils.get_protocol(url) in ("file", "local") else {}
    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False, **local)
    except (ValueError, ImportError) as error:
        raise InputError(f"checkpoint.upload: {url}: {' '.join(str(error).split())}") from None


def expected_bytes(parameters: int, ds_config: dict) -> int:
    """Size of a checkpoint: weights, fp32 master weights where there are, and optimizer states."""
    low = precision(ds_config)
    master = 0 if zero_stage(ds_config) == 0 and low == "fp32" else 4
    return parameters * ((4 if low == "fp32" else 2) + master + 4 * optimizer_states(ds_config))


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files, by its manifest."""
    return sum(entry["bytes"] for entry in read_manifest(path)["files"].values())


def retire(newest: Path, keep_last: int, keep_every: int | None, needed: Iterable[Path] = ()) -> list[Path]:
    """Delete checkpoints older than `newest`, which is published, but for those to be kept; returns the deleted ones.

    Only whole ones, by their files' sizes, count as kept. One that holds a file which is not in its manifest, or has no
    manifest, is left alone.

    Args:
        keep_last: number to be kept, `newest` among them.
        keep_every: those of every n-th step are kept besides.
        needed: kept besides.
    """
    there = [path for path in checkpoints(newest.parent) if step_of(path) <= step_of(newest)]
    retired, whole = [], 0
    while there and whole < keep_last:  # from the newest on: each look costs a call a file
        whole += incomplete_because(there.pop()) is None
    for path in there:
        if path in needed or keep_every and step_of(path) % keep_every == 0:
            continue
        try:
            ours = set(read_manifest(path)["files"])
        except InputError:
            continue
        if set(files_of(path)) <= ours:
            doomed = path.with_name(
                incomplete_tag(step_of(path))
            )  # killed from here on, the next start removes the rest
            os.rename(path, doomed)
            shutil.rmtree(doomed)
            retired.append(path)
    return retired


def set_aside(path: Path) -> Path | None:
    """Rename a file or directory out of the way, losing nothing; returns the new name, None when nothing was there."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.replaced_{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def compatibility(recipe) -> dict:
    """What must be the same for a checkpoint to continue in a run: kept in the manifest."""
    model = dataclasses.asdict(recipe.model)
    for key in ("init", "init_from"):  # where the weights began has no say in how they go on
        model.pop(key)
    return {"model": model, "global_batch_size": recipe.global_batch_size}


def parent_checkpoint(reference: str) -> Path:
    """The checkpoint that RUN@STEP names. Raises InputError when it is not there or not whole."""
    run, _, step = reference.rpartition("@")
    if not run or not (step.isascii() and step.isdecimal()):
        raise InputError(f"{reference!r} is not RUN@STEP: a run directory and the step of one of its checkpoints")
    return find(Path(run) / "checkpoints", step).chosen


def parent_asked_for(recipe) -> str | None:
    """RUN@STEP of `start_from` or `branch_from`."""
    return recipe.checkpoint.start_from or recipe.checkpoint.branch_from


def check_same_parent(path: Path, recipe) -> None:
    """Raises InputError when the run that saved `path` did not begin where the recipe now says that it begins."""
    was, now = read_manifest(path).get("parent"), parent_asked_for(recipe)
    if now not in (None, was):
        begun = f"began from {was}" if was is not None else "has no parent"
        raise InputError(
            f"{path}: this run {begun}, not {now}; leave checkpoint.start_from and branch_from out to go on with it, or use "
            "another name=..."
        )


def check_same_model(path: Path, recipe) -> None:
    """Raises InputError when the checkpoint is of another model than the recipe's."""
    was_model, now_model = read_manifest(path)["model"], compatibility(recipe)["model"]
    changed = [key for key in {**was_model, **now_model} if was_model.get(key) != now_model.get(key)]
    if changed:
        pairs = ", ".join(f"{key} {was_model.get(key)} (now {now_model.get(key)})" for key in changed)
        raise InputError(f"{path} is of another model: {pairs}; use another name=... for this run")


def check_compatible(path: Path, recipe, ds_config: dict, sizes) -> None:
    """Raises InputError when the checkpoint is of another model, batch, precision or layout than the run to be."""
    check_same_model(path, recipe)
    manifest = read_manifest(path)
    if manifest["global_batch_size"] != recipe.global_batch_size:
        raise InputError(
            f"{path} was trained with global_batch_size {manifest['global_batch_size']}, now {recipe.global_batch_size}: the "
            "order of samples and the schedule would change; keep it, or use another name=..."
        )
    if manifest["step"] > recipe.total_steps:
        raise InputError(
            f"{path} is at step {manifest['step']}, the schedule has only {recipe.total_steps} steps; lengthen it, or resume "
            "from an earlier step"
        )
    before, now = manifest["layout"], layout(ds_config, sizes)
    if before["precision"] != now["precision"]:
        raise InputError(
            f"{path} was saved in {before['precision']}, the run asks for {now['precision']}; resume with the same"
        )
    if not same_layout(before, now):
        check_convertible(path, ds_config)


def layout(ds_config: dict, sizes) -> dict:
    """What a checkpoint's files depend on, beside the batch; without sizes what is known without them."""
    stated = {"zero_stage": zero_stage(ds_config), "precision": precision(ds_config)}
    return stated if sizes is None else {**sizes.as_dict(), **stated}


def same_layout(before: dict, now: dict) -> bool:
    """Whether DeepSpeed can load files of `before` in `now` as they are."""
    batch = ("micro_batch", "accumulation", "global_batch")
    return all(before.get(key) == now[key] for key in now if key not in batch)


def check_convertible(path: Path, ds_config: dict) -> None:
    """Raises InputError, naming it, for what can't be converted from one layout to another."""
    kind, zero = ds_config["optimizer"]["type"], ds_config.get("zero_optimization", {})
    mend = "resume in the layout that saved it"
    if kind.lower() not in ("adam", "adamw"):
        raise InputError(f"{path}: optimizer.type {kind}: DeepSpeed converts the states of Adam and AdamW only; {mend}")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            raise InputError(
                f"{path}: zero_optimization.{key}.device nvme can't take a checkpoint of another layout; {mend}, or use cpu"
            )
    if any("/" in name for name in read_manifest(path)["files"]):
        raise InputError(f"{path} holds optimizer states copied from NVMe, which DeepSpeed can't convert; {mend}")


def order_samples(recipe, path: Path | None) -> int:
    """The number of samples that the order is made for: the schedule's, or under "megatron" the checkpoint's.

    Raises InputError when a schedule made longer would change the order of samples already drawn.
    """
    wanted = recipe.total_steps * recipe.global_batch_size
    if path is None or recipe.data.order != "megatron":
        return wanted
    made_for = read_manifest(path)["order_samples"]
    if wanted > made_for:
        raise InputError(
            f"{path} has an order made for {made_for} samples, the schedule now asks for {wanted}: data.order=megatron "
            "can't grow; keep the schedule's length, or train with data.order=epoch"
        )
    return made_for


def check_same_data(path: Path, now: dict) -> None:
    """Raises InputError when samples would come from other data or in another order than in the checkpoint's run.

    Args:
        now: fingerprint of the data (SampleStream.fingerprint).
    """
    before = read_manifest(path)["data"]
    changed = next((key for key in ("files", *before, *now) if before.get(key) != now.get(key)), None)
    if changed is None:
        return
    was, has = before.get(changed), now.get(changed)
    difference = f"{changed} {was} (now {has})"
    if changed == "files" and isinstance(was, list) and isinstance(has, list):
        difference = f"{len(was)} files (now {len(has)})"
        if len(was) == len(has):
            number, old, new = next((n, a, b) for n, (a, b) in enumerate(zip(was, has, strict=True), 1) if a != b)
            parts = [
                "other content" if key == "content" else f"{key} {old[key]} (now {new.get(key)})"
                for key in old
                if old[key] != new.get(key)
            ]
            difference = f"file {number}: {', '.join(parts)}"
    raise InputError(
        f"{path} drew its samples otherwise: {difference}; restore that, or use another name=... for this run"
    )


def _faults(faults: list[tuple[Path, str]]) -> str:
    return "; ".join(f"{path.name}: {fault}" for path, fault in faults)
