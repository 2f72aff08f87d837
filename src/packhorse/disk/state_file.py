"""A nested state as one packed file (docs/format.md, section 8.2).

The names of the tensors in the file are their paths in the state. A metadata pair records the
structure of the state and all other values. Tensors that are the same memory, such as tied weights,
are stored once, and become the same tensor again when the state is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import BaseLike
from packhorse.disk.state import Leaf, decode_state, encode_state, find_tensors
from packhorse.errors import CompatibilityError, CorruptionError, blaming
from packhorse.framework import Framework, to_array
from packhorse.layout import METADATA_KEY
from packhorse.storage.safetensors_header import FileHeader, build_header
from packhorse.storage.strict_json import parse_json, shortened, shown

__all__ = ["STATE_KEY", "base_by_name", "lay_out_state", "rebuild_state"]

STATE_KEY = "packhorse.state"
_VERSION = 1


def lay_out_state(
    state: object, metadata: Mapping[str, str] | None, framework: Framework
) -> tuple[FileHeader, Iterator[ByteArray]]:
    """The header of a file with a nested state, and the tensors' bytes in the header's order.

    Args:
        state: a dict, a list or a tuple.
        metadata: further pairs for the file.
        framework: the framework of tensors by default; the record lists the tensors of others.

    Raises:
        TypeError: an object in the state cannot be stored; the message gives its path.
        ValueError: it is nested too deeply, or `metadata` has a reserved key.
    """
    if STATE_KEY in (metadata or {}):
        raise ValueError(
            f"metadata has the key {STATE_KEY!r}, which is reserved for the state's structure"
        )
    document, leaves = encode_state(state)
    for leaf in leaves:
        _check_readable(leaf, framework)
    names = _names(leaves)
    stored = dict(zip(names, leaves, strict=True))
    is_flat = isinstance(state, dict) and list(state) == names
    if not is_flat or any(leaf.framework.name != framework.name for leaf in leaves):
        metadata = {**(metadata or {}), STATE_KEY: _record(document, names, leaves)}
    header = build_header(
        {name: (leaf.dtype, leaf.shape) for name, leaf in stored.items()}, metadata
    )
    return header, (_bytes_of(stored[entry.name]) for entry in header.entries)


def _check_readable(leaf: Leaf, framework: Framework) -> None:
    """Refuse an array that could not be loaded again: all tensors of a file are loaded by one
    framework before arrays are made of some.

    Raises:
        TypeError: the framework has no such dtype.
    """
    try:
        framework.check_form(leaf.dtype, leaf.shape)
    except CompatibilityError as error:
        raise TypeError(f"{shortened(leaf.path)}: cannot be stored in a state: {error}") from error


def _record(document: Any, names: list[str], leaves: list[Leaf]) -> str:
    record = {"version": _VERSION, "state": document, "tensors": names}
    arrays = [i for i, leaf in enumerate(leaves) if leaf.framework.name == "np"]
    if arrays:
        record["numpy"] = arrays
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def base_by_name(base: BaseLike | None) -> BaseLike | None:
    """Turns a base that is a nested state into tensors by their paths; returns others unchanged.

    Raises:
        TypeError, ValueError: as for `find_tensors`.
    """
    if not isinstance(base, Mapping) or not any(map(_is_container, base.values())):
        return base
    return {path: leaf.tensor for path, leaf in find_tensors(dict(base)).items()}


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | tuple)


def _names(leaves: list[Leaf]) -> list[str]:
    """A name in the file for each tensor: its path, or that of an earlier tensor of the same
    memory."""
    taken = {METADATA_KEY}
    known: dict[object, str] = {}
    names = []
    for leaf in leaves:
        identity = leaf.framework.name, leaf.framework.identity(leaf.tensor)
        name = known.get(identity)
        if name is None:
            name = leaf.path
            while name in taken:  # {"a": {"b": ...}, "a.b": ...}
                name += "'"
            taken.add(name)
            known[identity] = name
        names.append(name)
    return names


def _bytes_of(leaf: Leaf) -> ByteArray:
    return leaf.framework.readable(leaf.tensor)[0]


def rebuild_state(
    tensors: dict[str, Any], metadata: Mapping[str, str] | None, framework: Framework, label: str
) -> Any:
    """Rebuilds the state of a file.

    Args:
        tensors: all tensors of the file, by name.
        metadata: the metadata of the file.
        framework: the framework that the tensors belong to.
        label: the name of the file in messages.

    Returns:
        The state; `tensors` itself, if the file records no structure.

    Raises:
        CorruptionError, CompatibilityError: the record of the structure is bad or too new.
    """
    if metadata is None or STATE_KEY not in metadata:
        return tensors
    label = f"{label}: {METADATA_KEY} {STATE_KEY!r}"
    record = parse_json(metadata[STATE_KEY].encode(), label=label)
    _check_version(record.get("version"), label)
    names, arrays = _checked(record, tensors, label)
    for name in {names[i] for i in arrays}:
        tensors[name] = to_array(tensors[name], framework)

    def get(index: int, path: str) -> Any:
        if index >= len(names):
            raise CorruptionError(f"tensor {index} has no name")
        return tensors[names[index]]

    with blaming(label):
        state, n_tensors = decode_state(record.get("state"), get)
    if n_tensors != len(names):
        raise CorruptionError(
            f"{label}: {len(names)} tensors have names, but {n_tensors} are in the state"
        )
    return state


def _check_version(version: object, label: str) -> None:
    if type(version) is not int or version < 1:
        raise CorruptionError(
            f"{label}: version must be an integer from 1, but is {shown(version)}"
        )
    if version > _VERSION:
        raise CompatibilityError(
            f"{label}: version {shown(version)}, but this release reads up to {_VERSION}; upgrade, "
            "or read only the tensors, with load_file"
        )


def _checked(
    record: dict[str, Any], tensors: Mapping[str, Any], label: str
) -> tuple[list[str], list[int]]:
    """The names of the tensors in the state, and the numbers of those that are NumPy arrays."""
    names, arrays = record.get("tensors"), record.get("numpy", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptionError(f"{label}: 'tensors' must be a list of names, but is {shown(names)}")
    for name in set(names) ^ tensors.keys():
        where = "in the state" if name in tensors else "in the file"
        raise CorruptionError(f"{label}: tensor {shown(name)} is not {where}")
    if not isinstance(arrays, list) or not all(
        type(i) is int and 0 <= i < len(names) for i in arrays
    ):
        raise CorruptionError(
            f"{label}: 'numpy' must be a list of tensors' numbers, but is {shown(arrays)}"
        )
    return names, arrays
