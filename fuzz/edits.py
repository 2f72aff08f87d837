"""Change JSON in one place, for the targets of files and manifests, and for the soak.

Text under a checksum gets the right checksum for its new content.
"""

import json
import random
import re
from typing import Any

from packhorse.codecs.content import crc32c

__all__ = ["edit_json", "edit_pairs", "sealed", "sealed_checkpoint"]

_CHECKSUM = b'{"crc32c":"%08x",'
# New values: numbers at limits, names that have a meaning, wrong types, deep nesting.
_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 63, 64, 128, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400),
    *(0.5, -0.0, 1e308, True, False, None, "", "F32", "F16", "I64", "U8", "F4", "BF16", "C64"),
    *("float32", "int64", "bytes", "tensor", "\ud800", "\0", "a/../b", "7ff0000000000000"),
    *("x" * 300, "0001-02-03T04:05:06.5Z"),
    *([], {}, [[]], {"dict": []}, {"tuple": []}, {"tensor": 0}, {"float": "fff8000000000001"}),
)  # fmt: skip
# A string; then a pair of a key and a value, where the value may be an object without nested ones.
_STRING = rb'"(?:[^"\\]|\\.)*"'
_PAIRS = (
    re.compile(rb"(%s)\s*:\s*(\{[^{}]*\})" % _STRING),
    re.compile(rb"(%s)\s*:\s*(%s|\[[^][]*\]|[^\s,{}\"[\]]+)" % (_STRING, _STRING)),
)


def sealed(text: bytes) -> bytes:
    """A text file of a snapshot store."""
    crc = crc32c(_CHECKSUM % 0 + text[1:])
    return _CHECKSUM % crc + text[1:]


def sealed_checkpoint(text: bytes) -> bytes:
    """The manifest of a checkpoint."""
    return b'{"crc32c":"%08x","manifest":%s}\n' % (crc32c(text), text)


def edit_pairs(data: bytes, rng: random.Random) -> bytes:
    """Duplicates or drops one pair of the input's objects, or gives it the value of another pair.
    Corrects the length before the text."""
    width = 2 if data[:1] and data[0] & 3 else 8  # form 0 has a u64 and one text
    at = 1
    texts = []
    for _ in range(2 if data[:1] and data[0] & 3 == 2 else 1):
        nbytes = int.from_bytes(data[at : at + width], "little")
        texts.append((at, data[at + width : at + width + nbytes]))
        at += width + min(nbytes, len(data))
    at, text = rng.choice(texts)
    pairs = [pair for pattern in _PAIRS for pair in pattern.finditer(text)]
    if not pairs:
        return data
    pair, other = rng.choice(pairs), rng.choice(pairs)
    new = rng.choice((pair[0] + b"," + pair[0], b"", pair[1] + b":" + other[2]))
    edited = text[: pair.start()] + new + text[pair.end() :]
    edited = edited.replace(b",,", b",").replace(b",}", b"}").replace(b"{,", b"{")
    length = len(edited).to_bytes(8, "little")[:width]
    return data[:at] + length + edited + data[at + width + len(text) :]


def edit_json(document: Any, rng: random.Random) -> bytes:
    """Duplicates, drops, swaps or replaces one value of the document."""
    places: list[tuple[Any, Any]] = []
    _collect(document, places)
    for _ in range(rng.choice((1, 1, 2, 4)) if places else 0):
        (holder, key), (other, its_key) = rng.choice(places), rng.choice(places)
        try:
            value = other[its_key]
            choice = rng.randrange(6)
            if choice == 0:
                del holder[key]
            elif choice == 1 and isinstance(holder, list):
                holder.insert(key, value)
            elif choice == 2:
                holder[key] = [holder[key]] * rng.randrange(3)
            elif choice == 3 and type(holder[key]) is int:
                holder[key] += rng.choice((-64, -1, 1, 64))
            elif choice == 4:
                holder[key] = value
            else:
                holder[key] = rng.choice(_VALUES)
        except (KeyError, IndexError):  # an earlier edit has moved it
            continue
    return json.dumps(document, separators=(",", ":")).encode()


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    """All values inside a value, as containers and keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        places.append((value, key))
        _collect(value[key], places)
