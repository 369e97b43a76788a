"""The hardware that a ds_config was made for (its `_hardware` note), the kinds of devices, and which ranks are near each other."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from data_prep.errors import InputError
from recipes.training.ds_config_kinds import is_kind, wanted

KINDS_FILE = Path(__file__).with_name("gpu_kinds.yaml")
TIMES = ': "HH:MM:SS", "D-HH:MM:SS", or minutes'  # of sbatch --time


@dataclass(frozen=True)
class Kind:
    """A kind of device; the units are in gpu_kinds.yaml."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_s: float
    fast_gb_s: float
    network_gb_s: float
    host_gb_s: float
    devices_per_node: int
    fast_domain: int
    calibration: str

    @property
    def accelerator(self) -> str:
        """As DeepSpeed calls it."""
        return "cpu" if self.name == "cpu" else "cuda"


@dataclass(frozen=True)
class Hardware:
    """The `_hardware` note of a ds_config.

    Attributes:
        device: a kind in gpu_kinds.yaml.
        devices: ranks in all; devices_per_node of them share a host.
        fast_domain: devices that reach each other by the fast link: those of a node, or of a rack (GB200 NVL72).
        host_memory_gib: of a node, for what is offloaded; None: not judged.
        time_limit, signal_before_s: of one Slurm job, and how long before its end the ranks are told to save.
    """

    device: str = "cpu"
    devices: int = 1
    devices_per_node: int = 8
    fast_domain: int | None = None
    host_memory_gib: int | None = None
    time_limit: str = "24:00:00"
    signal_before_s: int = 600
    note: str = ""

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    @property
    def per_node(self) -> int:
        """Ranks on one host."""
        return min(self.devices, self.devices_per_node)

    @property
    def accelerator(self) -> str:
        """DeepSpeed's name of it. Raises InputError for a device that is no kind."""
        return kind_of(self.device).accelerator

    @property
    def near(self) -> int:
        return self.fast_domain or self.devices_per_node


def hardware_of(config: dict, where: str) -> Hardware:
    """The ds_config's `_hardware`. Raises InputError for a key or value that it can't have."""
    stated = config.get("_hardware", {})
    known = {field.name: field for field in fields(Hardware)}
    if not isinstance(stated, dict):
        raise InputError(f"{where}: _hardware: must be a section, not {stated!r}")
    for key, value in stated.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
            raise InputError(f"{where}: _hardware.{key}: unknown key; {hint}")
        if known[key].type == "str" and not isinstance(value, str):
            raise InputError(
                f"{where}: _hardware.{key}: {value!r} must be text in quotes{TIMES if key == 'time_limit' else ''}"
            )
        if known[key].type != "str" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{where}: _hardware.{key}: {value!r} must be a positive integer")
        if key == "time_limit" and not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", value, re.ASCII):
            raise InputError(f"{where}: _hardware.time_limit: {value!r} is no time that sbatch takes{TIMES}")
        if key == "device":
            try:
                kind_of(value)
            except InputError as error:
                raise InputError(f"{where}: _hardware.device: {error}") from None
    return Hardware(**stated)


@functools.cache
def kinds() -> dict[str, Kind]:
    """The devices of gpu_kinds.yaml by name. Raises InputError for a key or value that one can't have."""
    try:
        stated = yaml.safe_load(KINDS_FILE.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputError(f"{KINDS_FILE}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(stated, dict):
        raise InputError(f"{KINDS_FILE}: the file must be NAME: {{KEY: VALUE, ...}} lines")
    return {name: _kind(name, values) for name, values in stated.items()}


def _kind(name: str, values) -> Kind:
    known = {field.name: field.type for field in fields(Kind) if field.name != "name"}
    if not isinstance(name, str) or not isinstance(values, dict):
        raise InputError(f"{KINDS_FILE}: {name}: must be a name and a section, not {values!r}")
    for key in [*known, *values]:
        if key not in values:
            raise InputError(f"{KINDS_FILE}: {name}: {key} is missing; see the top of the file")
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
            raise InputError(f"{KINDS_FILE}: {name}: {key}: unknown key; {hint}")
        kind = {"str": "text", "int": "positive", "float": "factor"}[known[key]]
        if not is_kind(values[key], kind):
            raise InputError(f"{KINDS_FILE}: {name}: {key}: {values[key]!r} must be {wanted(kind)}")
    return Kind(name, **values)


def kind_of(name: str) -> Kind:
    """The kind that `name` is, or alone begins with it."""
    found = [kind for known, kind in kinds().items() if known == name] or [
        kind for known, kind in kinds().items() if known.startswith(name)
    ]
    if len(found) != 1:
        close = [kind.name for kind in found] or difflib.get_close_matches(name, kinds(), n=1)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"known: {', '.join(kinds())}; add yours to {KINDS_FILE}"
        )
        raise InputError(f"GPU kind {name!r} is {'not unique' if found else 'unknown'}; {hint}")
    return found[0]
