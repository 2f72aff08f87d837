"""The index of a sharded model, and its packed form (docs/format.md, section 8).

`*.safetensors.index.json` maps every tensor's name to the file that holds it. Its packed form names
the packed files instead, keeps everything else, and records the original text byte for byte under
the key `packhorse`, because JSON can be laid out in many ways.
"""

import json
from typing import Any

from packhorse.disk.packed_header import min_text_nbytes, read_record, write_record
from packhorse.disk.strict_json import json_kind, parse_json, shown
from packhorse.errors import CorruptionError
from packhorse.layout import FILE_METADATA_KEY, FILE_SUFFIX

__all__ = [
    "INDEX_SUFFIX",
    "PLAIN_SUFFIX",
    "is_packed_index",
    "pack_index",
    "packed_name",
    "plain_name",
    "unpack_index",
    "weight_map",
]

PLAIN_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_RECORD_KEY = "index"
_MAP_KEY = "weight_map"


def packed_name(name: str) -> str:
    """The packed form's name of a safetensors file: `X.safetensors` gives `X.ph.safetensors`."""
    return name.removesuffix(PLAIN_SUFFIX) + FILE_SUFFIX


def plain_name(name: str) -> str:
    """The inverse of `packed_name`."""
    return name.removesuffix(FILE_SUFFIX) + PLAIN_SUFFIX


def pack_index(text: bytes, *, label: str) -> bytes:
    """The packed form of an index.

    Args:
        text: the original file.
        label: what messages call it.

    Returns:
        The text of the packed form.

    Raises:
        CorruptionError: it is no index.
        ValueError: it is the index of a packed folder, by its key `packhorse`.
    """
    document = _rename(parse_json(text, label=label), label)
    if FILE_METADATA_KEY in document:
        raise ValueError(f"{label}: the index of a packed folder; unpack that one first")
    document[FILE_METADATA_KEY] = write_record(_RECORD_KEY, text)
    packed = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    return packed.ljust(min_text_nbytes(len(text)), b" ")


def unpack_index(text: bytes, *, label: str) -> bytes:
    """The original of a packed index.

    Args:
        text: the packed form.
        label: what messages call it.

    Returns:
        The original file, byte for byte.

    Raises:
        CorruptionError: the record is damaged, or disagrees with the rest of the packed form.
        CompatibilityError: packed by a newer version.
    """
    document = parse_json(text, label=label)
    record = document.pop(FILE_METADATA_KEY, None)
    where = f"{label}: {FILE_METADATA_KEY!r}"
    original = read_record(record, _RECORD_KEY, text_nbytes=len(text), label=where)
    if _rename(parse_json(original, label=f"{label}: recorded index"), label) != document:
        raise CorruptionError(f"{label}: the index and the original that it records disagree")
    return original


def is_packed_index(text: bytes) -> bool:
    """Whether an index declares itself packed, rightly or not."""
    try:
        return FILE_METADATA_KEY in parse_json(text, label="")
    except CorruptionError:
        return False


def weight_map(document: dict[str, Any], label: str) -> dict[str, str]:
    """Which file holds which tensor.

    Raises:
        CorruptionError: the index does not say, or not in this form.
    """
    files = document.get(_MAP_KEY)
    if not isinstance(files, dict):
        raise CorruptionError(f"{label}: {_MAP_KEY!r} must be an object, and is {json_kind(files)}")
    for name, file in files.items():
        if not isinstance(file, str):
            found = f"{shown(name)} is {json_kind(file)}"
            raise CorruptionError(f"{label}: {_MAP_KEY!r} must hold file names, and {found}")
    return files


def _rename(document: dict[str, Any], label: str) -> dict[str, Any]:
    files = weight_map(document, label)
    renamed = {name: _renamed(file) for name, file in files.items()}
    return {**document, _MAP_KEY: renamed}


def _renamed(file: str) -> str:
    return packed_name(file) if file.endswith(PLAIN_SUFFIX) else file
