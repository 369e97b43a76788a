"""Reading text records from JSONL files, with every kind of bad record told apart.

One record is one line holding a JSON object; its text is the value of one key. CRLF equals LF, and a UTF-8 byte order
mark at the start of a line (files joined with `cat` have one in the middle) is not part of the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from data_prep.errors import InputError
from data_prep.sources import line_chunks

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Reasons that are counted but never stop a run: nothing is lost by leaving such records out.
HARMLESS = ("blank", "skipped_empty")


@dataclass(frozen=True)
class BadRecord:
    """Why a record gives no document. `reason` is a counter name, `detail` is for the message."""

    reason: str
    detail: str


def parse_record(line: bytes, key: str) -> str | BadRecord:
    """The text of one JSONL line, or why there is none. Values are never coerced: null is not the word "None"."""
    # Nearly all records are good, and orjson reads those several times faster. It refuses bad UTF-8 and lone surrogates;
    # whatever it refuses, or finds no text in, is looked at again below for the reason.
    try:
        text = orjson.loads(line)[key]
        if isinstance(text, str) and text and not text.isspace():
            return text
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    line = line.removeprefix(BYTE_ORDER_MARK).strip()
    if not line:
        return BadRecord("blank", "blank line")
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord("bad_utf8", f"not UTF-8 at byte {error.start} of the line")
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return BadRecord("bad_json", f"not valid JSON: {error}")
    if not isinstance(record, dict):
        return BadRecord("wrong_type", f"the line is a JSON {_json_type(record)}, not an object")
    if key not in record:
        return BadRecord(
            "missing_key", f"no key {key!r} (keys here: {', '.join(sorted(record)) or 'none'}); see --json_key"
        )
    text = record[key]
    if text is None:
        return BadRecord("null", f"{key!r} is null")
    if not isinstance(text, str):
        return BadRecord("wrong_type", f"{key!r} is a JSON {_json_type(text)}, not a string")
    if not text.strip():
        return BadRecord("skipped_empty", f"{key!r} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return BadRecord("bad_unicode", f"{key!r} holds a lone surrogate, which no UTF-8 text can hold")
    return text


def _json_type(value) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def iterate_texts(paths: list[Path], key: str) -> Iterator[str]:
    """Texts of all records of `paths`; raises InputError at the first bad one, as `tokenize_files` does by default."""
    for path in paths:
        for first, lines in line_chunks(path):
            for number, line in enumerate(lines, first):
                text = parse_record(line, key)
                if isinstance(text, str):
                    yield text
                elif text.reason not in HARMLESS:
                    raise InputError(f"{path}:{number}: {text.detail}")
