"""The index of a sharded model, and its packed form (docs/format.md, section 8).

`*.safetensors.index.json` maps every tensor's name to the file that holds it. Its packed form names
the packed files instead, keeps everything else, and records the original text byte for byte under
the key `packhorse`, because JSON can be laid out in many ways. It also records which of the files
that it names were not there, so that any other that is gone later is missed.

What looks at the folder is given as `has`: whether a file of a name is beside the index.
"""

import json
from collections.abc import Callable
from typing import Any

from packhorse.disk.packed_header import min_text_nbytes, read_record, write_record
from packhorse.disk.strict_json import json_kind, parse_json, shortened, shown
from packhorse.errors import CorruptionError
from packhorse.layout import FILE_METADATA_KEY, FILE_SUFFIX

__all__ = [
    "INDEX_SUFFIX",
    "PLAIN_SUFFIX",
    "is_packed_index",
    "missing_files",
    "pack_index",
    "packed_name",
    "plain_name",
    "unpack_index",
    "weight_map",
]

PLAIN_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_RECORD_KEY = "index"
_ABSENT_KEY = "absent"
_MAP_KEY = "weight_map"


def packed_name(name: str) -> str:
    """The packed form's name of a safetensors file: `X.safetensors` gives `X.ph.safetensors`."""
    return name.removesuffix(PLAIN_SUFFIX) + FILE_SUFFIX


def plain_name(name: str) -> str:
    """The inverse of `packed_name`."""
    return name.removesuffix(FILE_SUFFIX) + PLAIN_SUFFIX


def pack_index(text: bytes, *, label: str, has: Callable[[str], bool] | None = None) -> bytes:
    """The packed form of an index.

    Args:
        text: the original file.
        label: what messages call it.
        has: looks for original files; None records nothing of that.

    Returns:
        The text of the packed form.

    Raises:
        CorruptionError: it is no index.
        ValueError: it is the index of a packed folder, by its key `packhorse`.
    """
    original = parse_json(text, label=label)
    document = _rename(original, label)
    if FILE_METADATA_KEY in document:
        raise ValueError(f"{label}: the index of a packed folder; unpack that one first")
    record = document[FILE_METADATA_KEY] = write_record(_RECORD_KEY, text)
    if has is not None:
        names = sorted(set(original[_MAP_KEY].values()))
        record[_ABSENT_KEY] = [_renamed(name) for name in names if not has(name)]
    packed = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    return packed.ljust(min_text_nbytes(len(text)), b" ")


def unpack_index(text: bytes, *, label: str, has: Callable[[str], bool] | None = None) -> bytes:
    """The original of a packed index.

    Args:
        text: the packed form.
        label: what messages call it.
        has: looks for packed files; None looks for none.

    Returns:
        The original file, byte for byte.

    Raises:
        CorruptionError: the record is damaged, or disagrees with the rest of the packed form, or a
            file is gone that was there when the folder was packed.
        CompatibilityError: packed by a newer version.
    """
    document = parse_json(text, label=label)
    record = document.pop(FILE_METADATA_KEY, None)
    where = f"{label}: {FILE_METADATA_KEY!r}"
    original = read_record(record, _RECORD_KEY, text_nbytes=len(text), label=where)
    if _rename(parse_json(original, label=f"{label}: recorded index"), label) != document:
        raise CorruptionError(f"{label}: the index and the original that it records disagree")
    absent = _absent(record, where)
    if has is not None and absent is not None:
        for name in _missing(document, absent, has):
            raise CorruptionError(f"{label}: names {shown(name)}, {_GONE}")
    return original


def missing_files(text: bytes, *, label: str, has: Callable[[str], bool]) -> list[str]:
    """What is wrong with a packed index that is good itself: a line for each file that it names,
    that is not there, and not known to have been missing before."""
    document = parse_json(text, label=label)
    absent = _absent(document[FILE_METADATA_KEY], label)
    missing = _missing(document, absent or [], has)
    return [f"{label}: names {shortened(name)}, {_GONE}" for name in missing]


_GONE = "which is not in the folder; get the folder again"


def _missing(document: dict[str, Any], absent: list[str], has: Callable[[str], bool]) -> list[str]:
    return [name for name in sorted({*document[_MAP_KEY].values()} - {*absent}) if not has(name)]


def _absent(record: Any, label: str) -> list[str] | None:
    """The files that were missing when the folder was packed; None if nothing was recorded."""
    absent = record.get(_ABSENT_KEY)
    if absent is None:
        return None
    if not isinstance(absent, list) or not all(isinstance(name, str) for name in absent):
        raise CorruptionError(
            f"{label}: {_ABSENT_KEY!r} must be a list of file names, and is {shown(absent)}"
        )
    return absent


def is_packed_index(text: bytes, *, label: str, has: Callable[[str], bool]) -> bool:
    """Whether an index in a folder with packed files is packed itself.

    It need not be where files were packed one by one, or only those of other folders. Then it names
    files by the names that they have when they are not packed. A packed one does not, whatever
    happened to its key.

    Args:
        text: the index.
        label: what messages call it.
        has: looks for files.

    Raises:
        CorruptionError: it is neither, so it must be damaged.
    """
    document = parse_json(text, label=label)
    if FILE_METADATA_KEY in document:
        return True
    for name in set(weight_map(document, label).values()):
        is_plain = name.endswith(PLAIN_SUFFIX) and not name.endswith(FILE_SUFFIX)
        if is_plain and (has(name) or has(packed_name(name))):
            return False
    raise CorruptionError(
        f"{label}: must have the key {FILE_METADATA_KEY!r} of a packed index, or name files of its "
        "folder as they are called unpacked; it is damaged: get the folder again"
    )


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
