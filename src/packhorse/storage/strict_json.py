"""Parses JSON from files more strictly than `json.loads`.

Headers and indexes must be one object. No key may occur twice, because readers differ in which one
they use. NaN and Infinity are not JSON, and no number may be so large that it becomes infinite.
Strings must be Unicode text, so escaped lone surrogates are refused. Every fault is a
`CorruptionError`, with the byte offset if there is one. Messages shorten what they quote from a
file, because a name there may have a hundred million characters.
"""

import json
import math
import re
import reprlib
from typing import Any

from packhorse.errors import CorruptionError

__all__ = ["check_text", "has_capital_escape", "json_kind", "parse_json", "shortened", "shown"]

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}
_SHOWN_NCHARS = 200
_SHOWN_TAIL_NCHARS = 40
_ESCAPE = re.compile(rb"\\(?:u(....)|.)", re.DOTALL)
_REPR = reprlib.Repr()
_REPR.maxother = 40


def has_capital_escape(text: bytes) -> bool:
    """Whether the text has an escape with an upper-case hex digit, such as \\u001F. It means the
    same as \\u001f, but JSON libraries write lower case, so a bit of it has probably flipped."""
    return any(match[1] and match[1] != match[1].lower() for match in _ESCAPE.finditer(text))


def parse_json(text: bytes, *, label: str, offset: int = 0) -> dict[str, Any]:
    """Parse UTF-8 JSON that must be one object.

    Args:
        text: the JSON.
        label: its name in messages.
        offset: byte offset of `text` in the file, for messages.

    Returns:
        The object.

    Raises:
        CorruptionError: the text is not such JSON.
    """
    try:
        string = text.decode("utf-8")
        document = json.loads(
            string,
            # UTF-8 has no lone surrogates, so only escapes can make them.
            object_pairs_hook=_unique_text if b"\\u" in text else _unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        place = offset + error.start
        found = f"byte {text[error.start]:#04x} at byte {place}"
        raise CorruptionError(f"{label} is not UTF-8: {found}") from error
    except json.JSONDecodeError as error:
        place = offset + len(string[: error.pos].encode())
        raise CorruptionError(
            f"{label} is not JSON: {error.msg.lower()} at byte {place}"
        ) from error
    except ValueError as error:
        raise CorruptionError(f"{label} is not allowed: {error}") from error
    except RecursionError as error:
        raise CorruptionError(f"{label} is not allowed: nested too deeply") from error
    if not isinstance(document, dict):
        raise CorruptionError(f"{label} must be a JSON object, but is {json_kind(document)}")
    return document


def check_text(value: str) -> None:
    """Refuse a string with a lone surrogate, which UTF-8 cannot encode.

    Raises:
        ValueError: the string has one.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{shortened(value)!a} is not Unicode text") from error


def json_kind(value: object) -> str:
    """The JSON type of a value, with its article."""
    return _KINDS.get(type(value), "a number")


def shortened(text: str) -> str:
    """A string for a message: the whole string, or its two ends if it is long."""
    if len(text) <= _SHOWN_NCHARS:
        return text
    head = text[: _SHOWN_NCHARS - _SHOWN_TAIL_NCHARS]
    return f"{head}...{text[-_SHOWN_TAIL_NCHARS:]}"


def shown(value: object) -> str:
    """A JSON value for a message: its `repr`, shortened if it is long."""
    return repr(shortened(value)) if isinstance(value, str) else _REPR.repr(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} occurs twice in one object")
            seen.add(key)
    return result


def _unique_text(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, value in pairs:
        check_text(key)
        _check_strings(value)
    return _unique(pairs)


def _check_strings(value: object) -> None:
    """Check a string, or the strings in a list; objects were checked when they were parsed."""
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # it would be written as Infinity
        raise ValueError(f"the number {shortened(text)} is larger than the largest float")
    return number
