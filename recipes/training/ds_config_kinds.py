"""Kinds of values of the ds_config, as ds_config_keys.py names them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable

# What a value may be: a test, and what a refusal says; "KIND?" takes null too, "a|b|c" is one of these words. "auto" is no text.
KINDS: dict[str, tuple[Callable, str]] = {
    "any": (lambda value: not _is_auto(value), "stated"),
    "flag": (lambda value: isinstance(value, bool), "true or false, without quotes"),
    "integer": (lambda value: _integer(value), "an integer"),
    "count": (lambda value: _integer(value, 0), "an integer of at least 0"),
    "positive": (lambda value: _integer(value, 1), "a positive integer"),
    # Written as 5e8 too, which JSON reads as a float.
    "elements": (lambda value: _integer(_whole(value), 0), "an integer of at least 0"),
    "bucket": (lambda value: _integer(_whole(value), 1), "a positive integer"),
    "number": (lambda value: is_number(value) and value >= 0, "a number of at least 0"),
    "factor": (lambda value: is_number(value) and value > 0, "a positive number"),
    "share": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "part": (lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1"),
    "text": (lambda value: isinstance(value, str) and not _is_auto(value), "text"),
    "names": (lambda value: _is_names(value), "a list of text"),
    "some": (
        lambda value: _is_names(value) or isinstance(value, str) and not _is_auto(value),
        "text or a list of text",
    ),
    "patterns": (lambda value: value == "auto" or _is_names(value), 'a list of text or "auto"'),
    "interval": (lambda value: value == "auto" or _integer(value, 1), 'a positive integer or "auto"'),
    "never": (lambda value: False, "left out: JSON can't say it"),
    "section": (lambda value: isinstance(value, dict), "a section"),
    "sections": (
        lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value),
        "a list of sections",
    ),
}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_kind(value, kind: str) -> bool:
    """Whether `value` is of a kind of KINDS, or one of the words of "a|b|c"."""
    if kind.endswith("?"):
        return value is None or is_kind(value, kind[:-1])
    return KINDS[kind][0](value) if kind in KINDS else isinstance(value, str) and value in kind.split("|")


def wanted(kind: str) -> str:
    """What a value of that kind must be, in words."""
    kind = kind.removesuffix("?")
    *words, last = kind.split("|")
    return KINDS[kind][1] if kind in KINDS else f"{', '.join(words)} or {last}"


def _is_auto(value) -> bool:
    return isinstance(value, str) and value.lower() == "auto"


def _integer(value, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _whole(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_names(value) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
