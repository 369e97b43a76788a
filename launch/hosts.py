"""The host file of the deepspeed launcher: one line a host, `NAME slots=N`.

DeepSpeed's own reader needs its import, which takes seconds and torch, and names neither file nor line of a mistake; the
tests hold both to the same answer.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from data_prep.errors import InputError


def read_host_file(path: str | Path) -> dict[str, int]:
    """{host: slots}, of the lines that DeepSpeed 0.19.8 reads; what it refuses, or takes by mistake, is an InputError."""
    if not Path(path).is_file():
        raise InputError(f"--hostfile {path} does not exist; one line a host: NAME slots=8")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if text.startswith("\ufeff"):
        raise InputError(f"{path}:1: begins with a byte order mark, which would be part of the first host's name")
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = re.match(r"(\S+)\s+slots=(\d+)", line)
        if found is None:
            raise InputError(f"{path}:{number}: {line!r} is not NAME slots=N")
        host, count = found[1], int(found[2])
        if host in slots:
            raise InputError(f"{path}:{number}: host {host} stands twice; keep one line for it")
        if count == 0:
            raise InputError(f"{path}:{number}: host {host} has slots=0; leave the line out")
        slots[host] = count
    if not slots:
        raise InputError(f"{path} names no host; one line each: NAME slots=8")
    return slots


def devices_per_node(slots: dict[str, int]) -> int:
    """The largest number of neighbouring ranks that stay on one host wherever a group of them begins."""
    return math.gcd(*slots.values())
