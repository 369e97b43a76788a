"""The text of one record, with every kind of bad record told apart.

A record is the bytes of a line that holds a JSON object, whose text is the value of one key, or the bytes of a text
itself. For JSON, CRLF equals LF, and a UTF-8 byte order mark at the start of a line (files joined with `cat` have one in
the middle) is not part of the record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Reasons that are counted but never stop a run: nothing is lost by leaving such records out.
HARMLESS = ("blank", "skipped_empty", "duplicate")


@dataclass(frozen=True)
class BadRecord:
    """Why a record gives no document. `reason` is a counter name, `detail` is for the message."""

    reason: str
    detail: str


def too_long(most_bytes: int) -> BadRecord:
    return BadRecord("too_long", f"longer than {most_bytes / 1e6:g} MB; see --max_record_mb")


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
        keys = " ".join(", ".join(sorted(record)).split())[:1000] or "none"  # one line, whatever they hold
        return BadRecord("missing_key", f"no key {key!r} (keys here: {keys}); see --json_key")
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


def parse_text(raw: bytes | None) -> str | BadRecord:
    """The text of one row of a table or of one text file; None is a null."""
    if raw is None:
        return BadRecord("null", "the text is null")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord("bad_utf8", f"not UTF-8 at byte {error.start} of the text")
    return text if text.strip() else BadRecord("skipped_empty", "the text is empty")


def _json_type(value) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
