"""Section 8.1 of docs/format.md: from the index of a packed model folder to the original index."""

from collections.abc import Collection, Mapping
from typing import Any

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.reference.file import parse_json, recorded_text

__all__ = ["decode_index"]

_PLAIN, _PACKED = ".safetensors", ".ph.safetensors"


def decode_index(
    text: bytes, files: Collection[str], tensors: Mapping[str, Collection[str]] | None = None
) -> bytes:
    """Decodes the index of a folder that has packed files in it or below it.

    Args:
        text: the index, packed or not.
        files: the names of the files beside it.
        tensors: the names of the tensors in each packed file among them; None if they are not to be
            checked.

    Returns:
        The original index, byte for byte. An index that is not packed is returned as it is.

    Raises:
        PackhorseError: a rule of the section is broken.
    """
    document = parse_json(text, "the index")
    names = _weight_map(document)
    if layout.FILE_METADATA_KEY not in document:
        plain = {name for name in names.values() if name != _packed(name) and not _is_packed(name)}
        if not any(name in files or _packed(name) in files for name in plain):
            raise CorruptionError("the index has no key 'packhorse', and names no plain file")
        return text
    record = document.pop(layout.FILE_METADATA_KEY)
    if type(record) is not dict:
        raise CorruptionError("the key 'packhorse' of the index is not an object")
    original = recorded_text(record, "index", len(text), "the key 'packhorse' of the index")
    recorded = parse_json(original, "the recorded index")
    renamed = {key: _packed(name) for key, name in _weight_map(recorded).items()}
    if {**recorded, "weight_map": renamed} != document:
        raise CorruptionError("the index and the one that it records disagree")
    absent, inexact = _list(record, "absent"), _list(record, "inexact")
    if absent is None:
        return original
    gone = {*names.values()} - {*absent} - {*files}
    if gone:
        raise CorruptionError(f"{sorted(gone)[:5]} were in the folder, and are gone")
    for file in {*names.values()} - {*absent} - {*(inexact or [])}:
        wanted = {name for name, place in names.items() if place == file}
        if _is_packed(file) and wanted != {*(tensors or {}).get(file, wanted)}:
            raise CorruptionError(f"{file!r} has other tensors than the index puts there")
    return original


def _list(record: dict[str, Any], key: str) -> list[str] | None:
    value = record.get(key)
    if value is not None and (
        type(value) is not list or any(type(name) is not str for name in value)
    ):
        raise CorruptionError(f"the key {key!r} of the index's record is not a list of strings")
    return value


def _weight_map(document: dict[str, Any]) -> dict[str, str]:
    names = document.get("weight_map")
    if type(names) is not dict or any(type(name) is not str for name in names.values()):
        raise CorruptionError("weight_map of the index is not a map of strings")
    return names


def _is_packed(name: str) -> bool:
    return name.endswith(_PACKED)


def _packed(name: str) -> str:
    return name[: -len(_PLAIN)] + _PACKED if name.endswith(_PLAIN) else name
