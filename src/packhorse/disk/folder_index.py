"""The index of a sharded model, and its packed form (docs/format.md, section 8).

`*.safetensors.index.json` maps every tensor's name to the file that holds it. The packed form names
the packed files instead and keeps everything else. Under the key `packhorse` it records the
original text byte for byte, because JSON can be laid out in many ways.

It also records which of the named files were missing when the folder was packed, and which held
other tensors than the index says. So readers notice a file that is lost or replaced later.

This module does not look at the folder itself. Callers pass two functions: `has` says whether there
is a file of a name beside the index, and `tensors` returns the names of the tensors in such a file,
or None if there is no such file.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

from packhorse.disk.packed_header import min_text_nbytes, read_record, write_record
from packhorse.errors import CorruptionError
from packhorse.layout import FILE_METADATA_KEY, FILE_SUFFIX
from packhorse.storage.locations import Place
from packhorse.storage.strict_json import json_kind, parse_json, shown

__all__ = [
    "INDEX_SUFFIX",
    "PLAIN_SUFFIX",
    "file_faults",
    "is_packed_index",
    "pack_index",
    "packed_name",
    "packed_place_name",
    "plain_name",
    "plain_place_name",
    "unpack_index",
    "weight_map",
]

PLAIN_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_FOLDER_SUFFIX = ".ph"
_RECORD_KEY = "index"
_ABSENT_KEY = "absent"
_INEXACT_KEY = "inexact"
_MAP_KEY = "weight_map"

_Has: TypeAlias = Callable[[str], bool]
_Tensors: TypeAlias = Callable[[str], Collection[str] | None]


def packed_name(name: str) -> str:
    """The packed form's name of a safetensors file: `X.safetensors` gives `X.ph.safetensors`."""
    return name.removesuffix(PLAIN_SUFFIX) + FILE_SUFFIX


def plain_name(name: str) -> str:
    """The inverse of `packed_name`."""
    return name.removesuffix(FILE_SUFFIX) + PLAIN_SUFFIX


def packed_place_name(place: Place, is_folder: bool) -> str:
    """The name of what a file or a folder is packed to."""
    return place.name + _FOLDER_SUFFIX if is_folder else packed_name(place.name)


def plain_place_name(place: Place, is_folder: bool) -> str:
    """The inverse of `packed_place_name`.

    Raises:
        ValueError: it does not have the name of a packed file or folder.
    """
    suffix = _FOLDER_SUFFIX if is_folder else FILE_SUFFIX
    if not place.name.endswith(suffix) or place.name == suffix:
        raise ValueError(f"{place}: does not end in {suffix}; name the output with -o")
    return place.name.removesuffix(suffix) if is_folder else plain_name(place.name)


def pack_index(
    text: bytes, *, label: str, has: _Has | None = None, tensors: _Tensors | None = None
) -> bytes:
    """The packed form of an index.

    Args:
        text: the original file.
        label: the name of the file in messages.
        has: says whether an original file exists; None to record no missing files.
        tensors: reads the headers of original files; None to record no other tensors.

    Returns:
        The text of the packed form.

    Raises:
        CorruptionError: the text is not an index.
        ValueError: it is the index of a packed folder: it has the key `packhorse`.
    """
    original = parse_json(text, label=label)
    document = _rename(original, label)
    if FILE_METADATA_KEY in document:
        raise ValueError(f"{label}: this is the index of a packed folder; unpack that folder first")
    record = document[FILE_METADATA_KEY] = write_record(_RECORD_KEY, text)
    if has is not None:
        names = sorted(set(original[_MAP_KEY].values()))
        record[_ABSENT_KEY] = [_renamed(name) for name in names if not has(name)]
    inexact = _inexact(original[_MAP_KEY], tensors) if tensors is not None else []
    if inexact:
        record[_INEXACT_KEY] = inexact
    packed = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    return packed.ljust(min_text_nbytes(len(text)), b" ")


def unpack_index(
    text: bytes, *, label: str, has: _Has | None = None, tensors: _Tensors | None = None
) -> bytes:
    """The original of a packed index.

    Args:
        text: the packed form.
        label: the name of the file in messages.
        has: says whether a packed file exists; None to skip the check for missing files.
        tensors: reads the headers of packed files; None to skip the check of their tensors.

    Returns:
        The original file, byte for byte.

    Raises:
        CorruptionError: the record is damaged or disagrees with the rest of the packed form; or a
            file that was right when the folder was packed is missing or holds other tensors.
        CompatibilityError: it was packed by a newer version.
    """
    document = parse_json(text, label=label)
    record = document.pop(FILE_METADATA_KEY, None)
    where = f"{label}: {FILE_METADATA_KEY!r}"
    original = read_record(record, _RECORD_KEY, text_nbytes=len(text), label=where)
    if _rename(parse_json(original, label=f"{label}: recorded index"), label) != document:
        raise CorruptionError(f"{label}: the index and the original that it records disagree")
    fault = next(_faults(document, record, where, has, tensors), None)
    # The first releases did not record the faults of the original folder. In their folders, a
    # fault may be one of those, so `verify` reports it, but unpacking does not fail.
    if fault is not None and record.get(_ABSENT_KEY) is not None:
        raise CorruptionError(f"{label}: {fault}")
    return original


def file_faults(text: bytes, *, label: str, has: _Has, tensors: _Tensors) -> list[str]:
    """The faults of the files that a packed index names, for an index that is good itself: a line
    for each file that is missing or holds other tensors than it should."""
    document = parse_json(text, label=label)
    record = document[FILE_METADATA_KEY]
    return [f"{label}: {fault}" for fault in _faults(document, record, label, has, tensors)]


def _faults(
    document: dict[str, Any],
    record: Any,
    label: str,
    has: _Has | None,
    tensors: _Tensors | None,
) -> Iterator[str]:
    """The faults of the named files that are new since the folder was packed."""
    absent, inexact = (_names(record, key, label) or [] for key in (_ABSENT_KEY, _INEXACT_KEY))
    files = _by_file(document[_MAP_KEY])
    for file in files:
        if has is not None and file not in absent and not has(file):
            yield f"names {shown(file)}, which is not in the folder; get the folder again"
    for file, wanted in files.items():
        is_known = file in absent or file in inexact
        found = None if is_known or tensors is None else _packed_tensors(file, tensors)
        if found is not None and found != wanted:
            yield _misfit(file, wanted, found, document[_MAP_KEY])


def _packed_tensors(file: str, tensors: _Tensors) -> set[str] | None:
    found = tensors(file) if file.endswith(FILE_SUFFIX) else None
    return None if found is None else {*found}


def _misfit(file: str, wanted: set[str], found: set[str], places: Mapping[str, str]) -> str:
    faults = []
    if missing := sorted(wanted - found):
        faults.append(f"has no tensor {_first(missing)}, which the index puts there")
    if extra := sorted(found - wanted):
        place = places.get(extra[0])
        says = "does not name" if place is None else f"puts in {shown(place)}"
        faults.append(f"has tensor {_first(extra)}, which the index {says}")
    return (
        f"{shown(file)} holds other tensors than this index says: it "
        f"{', and '.join(faults)}; get that file again"
    )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{shown(names[0])}{more}"


def _inexact(places: Mapping[str, str], tensors: _Tensors) -> list[str]:
    """The packed names of the files that hold other tensors than the index says."""
    inexact = []
    for file, wanted in _by_file(places).items():
        found = tensors(file) if file.endswith(PLAIN_SUFFIX) else None
        if found is not None and {*found} != wanted:
            inexact.append(_renamed(file))
    return inexact


def _by_file(places: Mapping[str, str]) -> dict[str, set[str]]:
    """The tensors that an index puts in each file, by the files' names."""
    files: dict[str, set[str]] = {file: set() for file in sorted({*places.values()})}
    for name, file in places.items():
        files[file].add(name)
    return files


def _names(record: Any, key: str, label: str) -> list[str] | None:
    """A list of file names in a record; None if it is not there."""
    names = record.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptionError(
            f"{label}: {key!r} must be a list of file names, but is {shown(names)}"
        )
    return names


def is_packed_index(text: bytes, *, label: str, has: _Has) -> bool:
    """Whether an index in a folder with packed files is itself packed.

    It is plain if the files were packed one by one, or if only other folders were packed; then it
    names plain files. A packed index names packed files, even if its key `packhorse` is lost.

    Args:
        text: the index.
        label: the name of the file in messages.
        has: says whether a file exists.

    Raises:
        CorruptionError: the index is neither packed nor plain, so it is damaged.
    """
    document = parse_json(text, label=label)
    if FILE_METADATA_KEY in document:
        return True
    names = set(weight_map(document, label).values())
    for name in names:
        is_plain = name.endswith(PLAIN_SUFFIX) and not name.endswith(FILE_SUFFIX)
        if is_plain and (has(name) or has(packed_name(name))):
            return False
    is_packed = any(name.endswith(FILE_SUFFIX) and has(name) for name in names)
    raise CorruptionError(
        f"{label}: this index has no key {FILE_METADATA_KEY!r} and names "
        f"{'packed files' if is_packed else 'no file of its folder'}: it is damaged; get the "
        "folder again"
    )


def weight_map(document: dict[str, Any], label: str) -> dict[str, str]:
    """The map from tensors to files of an index.

    Raises:
        CorruptionError: the index has no such map, or the map is not from strings to strings.
    """
    files = document.get(_MAP_KEY)
    if not isinstance(files, dict):
        raise CorruptionError(f"{label}: {_MAP_KEY!r} must be an object, but is {json_kind(files)}")
    for name, file in files.items():
        if not isinstance(file, str):
            found = f"{shown(name)} is {json_kind(file)}"
            raise CorruptionError(f"{label}: {_MAP_KEY!r} must hold file names, but {found}")
    return files


def _rename(document: dict[str, Any], label: str) -> dict[str, Any]:
    files = weight_map(document, label)
    renamed = {name: _renamed(file) for name, file in files.items()}
    return {**document, _MAP_KEY: renamed}


def _renamed(file: str) -> str:
    return packed_name(file) if file.endswith(PLAIN_SUFFIX) else file
