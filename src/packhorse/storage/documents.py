"""Manifests of stores: JSON documents with a checksum, read as if an attacker had written them.

A document lists what its store holds. A fault in it raises a `CorruptionError` that names the
document, the place in it, what was found and what is allowed. A dtype or a version that this
release does not know raises a `CompatibilityError`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from packhorse.codecs.content import crc32c
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.layout import DTYPE_BY_NAME, MAX_BITS, MAX_DIMS
from packhorse.storage.strict_json import json_kind, parse_json, shown

__all__ = ["CRC_END", "Document", "compact_json", "read_checksum", "sign"]

_CRC = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')
_CRC_AT = len('{"crc32c":"')
CRC_END = _CRC_AT + 8
_INTEGERS = frozenset({int})
_HASH = re.compile(r"[0-9a-f]{32}")


def compact_json(value: object) -> bytes:
    """JSON without spaces, in UTF-8.

    Raises:
        ValueError: a number is NaN or infinite, or a string is not Unicode text.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def sign(document: dict[str, Any]) -> bytes:
    """A document as JSON. Its first key is the CRC-32C of the whole text, which is computed with
    zeros in place of the checksum."""
    text = compact_json({"crc32c": "0" * 8, **document})
    return text[:_CRC_AT] + f"{_crc_of(text):08x}".encode() + text[CRC_END:]


def _crc_of(text: bytes) -> int:
    blank = bytearray(text)
    blank[_CRC_AT:CRC_END] = b"0" * 8
    return crc32c(blank)


def read_checksum(text: bytes, label: str) -> int:
    """The checksum of a document that `sign` made, after comparing it with the text.

    Args:
        text: all bytes of the document.
        label: what messages call it.

    Raises:
        CorruptionError: the checksum is missing or does not match.
    """
    match = _CRC.match(text)
    if match is None:
        raise CorruptionError(
            f"{label}: does not begin with a checksum; it is damaged, or not from packhorse"
        )
    found = int(match[1], 16)
    if _crc_of(text) != found:
        raise CorruptionError(f"{label}: the checksum does not match: damaged or cut short")
    return found


class Document:
    """A parsed document, with the checks that all manifests share."""

    def __init__(self, text: bytes, label: str, offset: int = 0) -> None:
        """
        Args:
            text: the JSON; the caller has verified its checksum.
            label: what messages call the document.
            offset: where the text begins in the file, for messages.

        Raises:
            CorruptionError: it is not a JSON object.
        """
        self._fields = parse_json(text, label=label, offset=offset)
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # those that are right
        self.label = label

    def check_kind(self, key: str, kind: str, version: int) -> None:
        """Check the kind and the version of the document.

        Args:
            key: the key of the kind.
            kind: the kind that is expected.
            version: the newest version that this release reads.

        Raises:
            CorruptionError: the document is of another kind, or has no version.
            CompatibilityError: the document has a newer version.
        """
        if self.get(key) != kind:
            raise self.fail(f"{key} is {shown(self.get(key))}, not {kind!r}")
        found = self.get("version")
        if type(found) is not int or found < 1:
            raise self.fail(f"version is {shown(found)}, not a positive integer")
        if found > version:
            needed = self.get("reader")
            release = f"packhorse {shown(needed)} or later" if needed else "a later packhorse"
            raise CompatibilityError(
                f"{self.label}: version {found}; this release reads versions up to {version}; "
                f"upgrade to {release}"
            )

    def fail(self, words: str) -> CorruptionError:
        """An error with the name of the document and these words."""
        return CorruptionError(f"{self.label}: {words}")

    def get(self, key: str) -> Any:
        """A field, not checked; None if it is missing."""
        return self._fields.get(key)

    def require(self, key: str) -> Any:
        """A field that must be there. Its value is not checked."""
        if key not in self._fields:
            raise self.fail(f"{key} is missing")
        return self._fields[key]

    def field(self, key: str, kind: type) -> Any:
        """A field that must be of this type."""
        value = self.get(key)
        if type(value) is not kind:
            raise self.fail(f"{key} must be of type {kind.__name__}, but is {json_kind(value)}")
        return value

    def count(self, key: str) -> int:
        """A field that must be a count: an integer that is not negative."""
        return self.integer(self.field(key, int), 0, MAX_BITS - 1, key)

    def integer(self, value: object, low: int, high: int, where: str) -> int:
        """A value that must be an integer from `low` to `high`."""
        if type(value) is not int or not low <= value <= high:
            raise self.fail(f"{where} is {shown(value)}, but must be from {low} to {high}")
        return value

    def shape(self, value: object, where: str) -> tuple[int, ...]:
        """A value that must be the shape of a tensor. Most tensors of a document share a few."""
        if type(value) is list and _INTEGERS.issuperset(map(type, value)):  # True is equal to 1
            known = self._shapes.get(tuple(value))
            if known is not None:
                return known
        if not isinstance(value, list) or len(value) > MAX_DIMS:
            raise self.fail(f"{where}: shape must be a list of at most {MAX_DIMS} sizes")
        sizes = tuple(self.integer(size, 0, MAX_BITS - 1, f"{where}: a size") for size in value)
        if math.prod(max(size, 1) for size in sizes) >= MAX_BITS:
            raise self.fail(f"{where}: shape {shown(value)} has more elements than any memory")
        self._shapes[sizes] = sizes
        return sizes

    def dtype(self, value: object, where: str) -> str:
        """A value that must be the name of a dtype that frames can have."""
        if not isinstance(value, str):
            raise self.fail(f"{where}: dtype must be a string, but is {json_kind(value)}")
        if value not in DTYPE_BY_NAME:
            raise CompatibilityError(
                f"{self.label}: {where}: unknown dtype {shown(value)}; a newer release may know it"
            )
        return value

    def digest(self, value: object, where: str) -> bytes:
        """A value that must be a content hash in hex."""
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            raise self.fail(f"{where}: {shown(value)} is not a content hash")
        return bytes.fromhex(value)
