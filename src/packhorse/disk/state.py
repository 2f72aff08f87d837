"""A training state as JSON: nested dicts and lists, with a number instead of each tensor.

Values that JSON cannot express become an object with one key: {"dict": [[key, value], ...]}, which
keeps the order and the types of keys; {"tuple": [...]}; {"float": "7ff0000000000000"}, with the
bits of an infinity or a NaN; and {"tensor": 3}. All other values stay as they are. Nothing is ever
pickled: an object of another type is refused before anything is written, and the error gives its
path, such as `optimizer.state[3].foo`.

Subclasses come back as the plain type: an OrderedDict as a dict, a torch.Size as a tuple.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from packhorse.errors import CorruptionError, blaming
from packhorse.framework import Framework, framework_of
from packhorse.storage.strict_json import check_text, shortened, shown

__all__ = [
    "MAX_DEPTH",
    "Keys",
    "Leaf",
    "Selection",
    "check_depth",
    "decode_state",
    "encode_state",
    "find_tensors",
    "list_state",
    "path_below",
]

# Which parts of a state a caller wants: top-level names, dotted paths, or a predicate on paths.
Keys: TypeAlias = Iterable[str] | Callable[[str], bool]

MAX_DEPTH = 64  # of nested containers; it also stops a state that contains itself
_MAX_INT_BITS = 8192
_MAX_PATH_LENGTH = 1 << 15  # otherwise a long key above many short ones would take hours to walk
_FLOAT = struct.Struct(">d")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor found in a state.

    Attributes:
        path: its path, such as `model.layers.0.weight` or `optimizer.state[3].exp_avg`.
        tensor: the tensor itself.
        framework: the framework that it belongs to.
        dtype: safetensors' name of the dtype.
        shape: the dimensions.
    """

    path: str
    tensor: Any
    framework: Framework
    dtype: str
    shape: tuple[int, ...]


def encode_state(state: object) -> tuple[Any, list[Leaf]]:
    """Turn a state into JSON values.

    Args:
        state: a dict, a list or a tuple.

    Returns:
        The document, in which the tensors are numbered in order, and the tensors.

    Raises:
        TypeError: an object in it cannot be stored; the message gives its path.
        ValueError: it is nested too deeply, or a string or number cannot be written.
    """
    if not isinstance(state, dict | list | tuple):
        raise TypeError(f"a state is a dict, a list or a tuple, not {type(state).__name__}")
    leaves: list[Leaf] = []
    return _encode(state, "", 0, leaves), leaves


def find_tensors(state: object) -> dict[str, Leaf]:
    """The tensors of a state by their paths; other values are ignored.

    Raises:
        TypeError: `state` is not a container, or has a tensor that cannot be stored.
        ValueError: it is nested too deeply, or two tensors have the same path.
    """
    if not isinstance(state, dict | list | tuple):
        raise TypeError(f"a state is a dict, a list or a tuple, not {type(state).__name__}")
    leaves: list[Leaf] = []
    _find(state, "", 0, leaves)
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        if found.setdefault(leaf.path, leaf) is not leaf:
            raise ValueError(f"two tensors have the path {shortened(leaf.path)!r}")
    return found


def _find(value: object, path: str, depth: int, leaves: list[Leaf]) -> None:
    if isinstance(value, dict | list | tuple):
        _check_depth(path, depth)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            _find(item, path_below(path, _plain(key)), depth + 1, leaves)
    elif (framework := framework_of(value)) is not None:
        leaves.append(_leaf(value, path, framework))


def _leaf(tensor: object, path: str, framework: Framework) -> Leaf:
    with blaming(shortened(path), (TypeError, ValueError)):
        dtype, shape = framework.describe(tensor)
    return Leaf(path, tensor, framework, dtype, shape)


def _encode(value: object, path: str, depth: int, leaves: list[Leaf]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int):
        return _integer(value, path)
    if isinstance(value, float):
        return _real(value)
    if isinstance(value, dict | list | tuple):
        _check_depth(path, depth)
    if isinstance(value, dict):
        _check_keys(value, path)
        return {"dict": [_pair(item, path, depth, leaves) for item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(v, path_below(path, i), depth + 1, leaves) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    framework = framework_of(value)
    if framework is None:
        raise TypeError(
            f"{shortened(path)}: {type(value).__name__} cannot be stored; a state consists of "
            "tensors, dicts, lists, tuples, strings, numbers, booleans and None"
            + ("; store its item() instead" if hasattr(value, "item") else "")
        )
    leaves.append(_leaf(value, path, framework))
    return {"tensor": len(leaves) - 1}


def _check_keys(value: dict[Any, Any], path: str) -> None:
    for key in value:
        if not (key is None or isinstance(key, str | int | float)):
            raise TypeError(
                f"{shortened(path) or 'the state'}: a key of type {type(key).__name__}; keys are "
                "strings, numbers, booleans or None"
            )
        if isinstance(key, int):
            _integer(key, path)
    if len({_plain(key) for key in value}) != len(value):
        raise ValueError(f"{shortened(path) or 'the state'}: two keys are equal as plain values")


def _plain(key: object) -> object:
    """A key as the plain type that it comes back as. A member of an enumeration, for example,
    becomes its plain value, because its `repr` differs."""
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool) or not isinstance(key, int | float):
        return key
    return int(key) if isinstance(key, int) else float(key)


def _pair(item: tuple[object, object], path: str, depth: int, leaves: list[Leaf]) -> list[Any]:
    key, value = _plain(item[0]), item[1]
    below = path_below(path, key)
    if len(below) > _MAX_PATH_LENGTH:
        raise ValueError(f"{shortened(below)}: a path of more than {_MAX_PATH_LENGTH} characters")
    return [_encode(key, below, depth, leaves), _encode(value, below, depth + 1, leaves)]


def _text(value: str, path: str) -> str:
    with blaming(shortened(path), (ValueError,)):
        check_text(value)
    return str.__str__(value)


def _integer(value: int, path: str) -> int:
    if value.bit_length() > _MAX_INT_BITS:
        raise ValueError(f"{shortened(path)}: an integer of more than {_MAX_INT_BITS} bits")
    return int(value)


def _real(value: float) -> Any:
    return float(value) if math.isfinite(value) else {"float": _FLOAT.pack(value).hex()}


def check_depth(value: object, depth: int) -> None:
    """Refuse JSON values that are nested more than `depth` deep, which a reader may not be able to
    parse.

    Raises:
        ValueError: they are nested deeper.
    """
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, depth - 1)


def _check_depth(path: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise ValueError(f"{shortened(path)}: nested more than {MAX_DEPTH} deep")


def path_below(path: str, key: object) -> str:
    """The path of the value at a key of the container at `path`."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


class Selection:
    """Which parts of a state are wanted."""

    def __init__(self, keys: Keys | None) -> None:
        """Args:
        keys: paths, each of which includes all paths below it; or a predicate on the path of each
            tensor or value; None for everything.
        """
        self._predicate = keys if callable(keys) else None
        self._prefixes: dict[str, bool] | None = None
        if keys is not None and not callable(keys):
            listed = [keys] if isinstance(keys, str) else list(keys)
            for key in listed:
                if not isinstance(key, str):
                    raise TypeError(f"keys must be paths, but {key!r} is not a string")
            self._prefixes = dict.fromkeys(listed, False)

    def wants(self, path: str) -> bool:
        """Whether the tensor or value at a path is wanted."""
        if self._predicate is not None:
            return bool(self._predicate(path))
        if self._prefixes is None:
            return True
        # Each prefix of the path that ends with a name, and the path itself.
        ends = [i for i, char in enumerate(path) if char in ".["]
        found = [part for end in (*ends, len(path)) if (part := path[:end]) in self._prefixes]
        for part in found:
            self._prefixes[part] = True
        return bool(found)

    def check_found(self) -> None:
        """Refuse keys without any tensor or value, once `wants` has been called for all paths.

        Raises:
            ValueError: there is such a key.
        """
        for key, found in (self._prefixes or {}).items():
            if not found:
                raise ValueError(f"the snapshot has nothing at {shortened(key)!r}")


class _Decoder:
    def __init__(self, tensor: Callable[[int, str], Any], selection: Selection) -> None:
        self._tensor = tensor
        self._selection = selection
        self.n_tensors = 0

    def decode(self, value: object, path: str, depth: int) -> Any:
        """A value of the state, or `_ABSENT` if nothing in it is wanted."""
        if depth > MAX_DEPTH:
            raise CorruptionError(f"{shortened(path)}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return self._items(value, path, depth)
        if not isinstance(value, dict):
            return value if self._selection.wants(path) else _ABSENT
        if len(value) != 1:
            raise CorruptionError(f"{shortened(path)}: an object has {len(value)} keys, not 1")
        kind, inner = next(iter(value.items()))
        if kind == "dict" and isinstance(inner, list):
            return self._pairs(inner, path, depth)
        if kind == "tuple" and isinstance(inner, list):
            items = self._items(inner, path, depth)
            return items if items is _ABSENT else tuple(items)
        if kind == "float":
            return _special(inner, path) if self._selection.wants(path) else _ABSENT
        if kind == "tensor" and type(inner) is int:
            return self._numbered(inner, path)
        raise CorruptionError(f"{shortened(path)}: unknown object {shown(value)}")

    def _numbered(self, index: int, path: str) -> Any:
        if index != self.n_tensors:
            raise CorruptionError(
                f"{shortened(path)}: found tensor {shown(index)}, but tensor {self.n_tensors} must "
                "come next"
            )
        self.n_tensors += 1
        return self._tensor(index, path) if self._selection.wants(path) else _ABSENT

    def _items(self, values: list[Any], path: str, depth: int) -> Any:
        items = [self.decode(v, path_below(path, i), depth + 1) for i, v in enumerate(values)]
        wanted = any(item is not _ABSENT for item in items)
        if not wanted and not (self._selection.wants(path) and not values):
            return _ABSENT
        return [None if item is _ABSENT else item for item in items]

    def _pairs(self, pairs: list[Any], path: str, depth: int) -> Any:
        result: dict[Any, Any] = {}
        seen = set()
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise CorruptionError(f"{shortened(path)}: {shown(pair)} is not a pair")
            key = _key(pair[0], path)
            if key in seen:
                raise CorruptionError(f"{shortened(path)}: the key {shown(key)} occurs twice")
            seen.add(key)
            below = path_below(path, key)
            if len(below) > _MAX_PATH_LENGTH:
                raise CorruptionError(
                    f"{shortened(below)}: a path of more than {_MAX_PATH_LENGTH} characters"
                )
            item = self.decode(pair[1], below, depth + 1)
            if item is not _ABSENT:
                result[key] = item
        if not result and not (self._selection.wants(path) and not pairs):
            return _ABSENT
        return result


def _key(value: object, path: str) -> Any:
    if isinstance(value, dict):
        special = value.get("float") if len(value) == 1 else None
        return _special(special, path)
    if isinstance(value, list):
        raise CorruptionError(f"{shortened(path)}: a list cannot be a key")
    return value


def _special(value: object, path: str) -> float:
    """An infinity or a NaN from its bits."""
    if isinstance(value, str) and len(value) == 16 and not set(value) - set("0123456789abcdef"):
        number: float = _FLOAT.unpack(bytes.fromhex(value))[0]
        if not math.isfinite(number):
            return number
    raise CorruptionError(f"{shortened(path)}: {shown(value)} is not an infinity or NaN in hex")


def decode_state(
    document: object, tensor: Callable[[int, str], Any], keys: Keys | None = None
) -> tuple[Any, int]:
    """Build a state from JSON values.

    Args:
        document: the document of `encode_state`; every rule of docs/snapshots.md is checked.
        tensor: takes the number and the path of a tensor and returns the tensor.
        keys: which parts are wanted; None for all. Unwanted items of lists become None.

    Returns:
        The state, and how many tensors the document has.

    Raises:
        CorruptionError: the document breaks a rule.
        ValueError: there is nothing at a key.
    """
    selection = Selection(keys)
    decoder = _Decoder(tensor, selection)
    if not isinstance(document, list | dict):
        raise CorruptionError(f"the state is {shown(document)}, not a container")
    state = decoder.decode(document, "", 0)
    if not isinstance(state, dict | list | tuple) and state is not _ABSENT:
        raise CorruptionError("the state is not a container")
    selection.check_found()
    return ({} if state is _ABSENT else state), decoder.n_tensors


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A placeholder for a tensor."""

    index: int


def list_state(document: object, keys: Keys | None = None) -> tuple[list[int], dict[str, Any]]:
    """A state without its nesting.

    Args:
        document: as for `decode_state`.
        keys: which parts are wanted; None for all.

    Returns:
        The numbers of the tensors, and all other values by their paths: JSON values as in a
        document, except that empty containers are `{}` and `[]`.

    Raises:
        CorruptionError, ValueError: as for `decode_state`.
    """
    selection = Selection(keys)
    state, _ = decode_state(document, lambda index, path: _Numbered(index))
    indices: list[int] = []
    values: dict[str, Any] = {}
    for path, value in _leaves(state, ""):
        if not selection.wants(path):
            continue
        if isinstance(value, _Numbered):
            indices.append(value.index)
        else:
            values[path] = _real(value) if isinstance(value, float) else value
    selection.check_found()
    return indices, values


def _leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        pairs: list[tuple[object, object]] = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        yield path, value
        return
    if not pairs:
        yield path, {} if isinstance(value, dict) else []
    for key, item in pairs:
        yield from _leaves(item, path_below(path, key))
