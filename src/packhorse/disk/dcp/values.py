"""Values that are not tensors: what a checkpoint keeps of them, and how they come back.

PyTorch's planners turn such a value into bytes with `torch.save`, a pickle, and load it with
`torch.load(..., weights_only=False)`, which runs whatever a pickle tells it to. So a checkpoint
holds only what `weights_only=True` loads, too. The writer and the reader ask the same question, so
what cannot be loaded is already refused when it is saved.

NumPy's arrays and scalars and `io.BytesIO` are plain data, but `weights_only=True` refuses them.
The writer stores each as a *stand-in*, an `OrderedDict` with a tensor of the bytes. The reader
checks the bytes with the stand-ins, and hands the planner new bytes with the original types. Both
replace objects while they are pickled, so containers and shared references stay as they are.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.strict_json import shortened, shown

__all__ = ["check_value", "storable_value"]

_MARK = "packhorse.stand_in"
_ML_DTYPE = "ml_dtypes."
# Booleans, integers, floats, complex numbers, times and texts; never objects or records.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:[248]|1[26])|c(?:8|16|24|32)|[SU]\d{1,9})")
_TIME = re.compile(r"[<>=]?[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
# What pickles of the objects that get stand-ins name, besides what PyTorch allows.
_REPLACED = re.compile(
    r"_io\.BytesIO|builtins\.bytes|ml_dtypes\.\w+|numpy\.(ndarray|dtype|dtypes\.\w+)"
    r"|numpy\._?core\.(multiarray|numeric)\.(scalar|_reconstruct|_frombuffer)"
)
_COMMON = ("builtins.", "copyreg.", "numpy._core.", "numpy.core.", "numpy.dtype", "numpy.ndarray")
_N_SHOWN = 3  # classes that a message names


def storable_value(fqn: str, data: bytes, *, trusted: bool) -> bytes:
    """The bytes that a checkpoint stores for a value that a planner has serialized.

    Args:
        fqn: the name of the value, for messages.
        data: what the planner gave, usually from `torch.save`.
        trusted: store the value even if loading it may run code.

    Raises:
        TypeError: loading the value might run code.
    """
    if _is_harmless(fqn, data):
        return data
    plain = _with_stand_ins(data)
    if plain is not None and _is_harmless(fqn, plain):
        return plain
    if trusted:
        return data
    raise TypeError(
        f"{shown(fqn)} {_what(data)}, which PyTorch does not load with weights_only=True, so "
        "PackhorseReader would refuse it; convert the value to plain numbers, strings, dicts, "
        "lists or tensors, allow its class while saving and loading "
        "(torch.serialization.safe_globals), or pass trusted=True to PackhorseWriter and "
        "PackhorseReader"
    )


def check_value(fqn: str, data: bytes, *, trusted: bool) -> bytes:
    """The bytes for the planner of a load, with the original types of the value.

    Args:
        fqn: the name of the value, for messages.
        data: the stored bytes.
        trusted: do not ask whether loading the value may run code.

    Raises:
        CompatibilityError: loading the value might run code.
        CorruptionError: a stand-in is damaged.
        MemoryError: there is not enough memory for the value.
    """
    if not trusted and not _is_harmless(fqn, data):
        raise CompatibilityError(
            f"{shown(fqn)} {_what(data)}, which PyTorch does not load with weights_only=True, so "
            "loading it may run code; if you trust the source of the checkpoint, allow the class "
            "(torch.serialization.safe_globals), or pass trusted=True to PackhorseReader"
        )
    if _MARK.encode() not in data:  # torch.save does not compress
        return data
    value = torch.load(io.BytesIO(data), weights_only=not trusted)  # on the devices of the save
    try:
        return _pickled(value, _original_of)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise CorruptionError(
            f"{shown(fqn)}: a damaged stand-in: {shortened(str(error))}"
        ) from error


def _is_harmless(fqn: str, data: bytes) -> bool:
    """Whether PyTorch loads bytes without running code that they name."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # PyTorch may raise anything for hostile bytes
        if "DefaultCPUAllocator" in str(error):  # PyTorch's only sign that memory ran out
            raise MemoryError(f"not enough memory for the value of {shown(fqn)}") from error
        return False
    return True


def _what(data: bytes) -> str:
    """What PyTorch refuses in bytes, for a message. PyTorch's own message has escape codes."""
    names = sorted(_refused(data), key=lambda name: (name.startswith(_COMMON), name))
    if not names:
        return "is a Python object"
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return f"has {', '.join(shortened(name) for name in names[:_N_SHOWN])}{more}"


def _refused(data: bytes) -> list[str]:
    """The classes and functions that bytes name and PyTorch refuses; none if nobody can tell."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # PyTorch may raise anything for hostile bytes
        return []


def _with_stand_ins(data: bytes) -> bytes | None:
    """A value with stand-ins, as bytes; None if stand-ins alone do not make the value plain. Then
    the value is not even loaded, which might run the code of a class."""
    names = _refused(data)
    if not names or not all(map(_REPLACED.fullmatch, names)):
        return None
    return _pickled(torch.load(io.BytesIO(data), weights_only=False), _stand_in_of)


def _pickled(value: Any, reduce: Callable[[Any], Any]) -> bytes:
    """A value as `torch.save` writes it, with other objects in place of some.

    Args:
        value: the value.
        reduce: what replaces an object, as `pickle` wants it; `NotImplemented` to keep the object.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return reduce(obj)

    module = ModuleType("packhorse_pickle")  # torch.save takes the pickler from a module
    module.__dict__["Pickler"] = Pickler
    output = io.BytesIO()
    torch.save(value, output, pickle_module=module)
    return output.getvalue()


def _stand_in_of(obj: Any) -> Any:
    if isinstance(obj, io.BytesIO) and type(obj) is io.BytesIO:
        data = _tensor_of(np.frombuffer(obj.getbuffer(), np.uint8))
        return _stand_in("BytesIO", data=data, position=obj.tell())
    is_scalar = isinstance(obj, np.generic)
    if not is_scalar and type(obj) is not np.ndarray:
        return NotImplemented
    array = np.asarray(obj)
    name = _name_of(array.dtype)
    if name is None:
        return NotImplemented
    data = _tensor_of(np.frombuffer(array.tobytes(), np.uint8))
    kind = "scalar" if is_scalar else "ndarray"
    return _stand_in(kind, dtype=name, shape=array.shape, data=data)


def _stand_in(kind: str, **fields: Any) -> tuple[Any, ...]:
    return OrderedDict, ([(_MARK, kind), *fields.items()],)


def _tensor_of(data: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(data.copy())


def _original_of(obj: Any) -> Any:
    if type(obj) is not OrderedDict or _MARK not in obj:
        return NotImplemented
    kind, data = obj[_MARK], obj["data"].contiguous().view(torch.uint8).numpy().tobytes()
    if kind == "BytesIO":
        position = obj["position"]
        if type(position) is not int or position < 0:
            raise ValueError(f"position {shown(position)}")
        return io.BytesIO, (), (data, position, None)
    if kind not in ("scalar", "ndarray"):
        raise ValueError(f"kind {shown(kind)}")
    array = _array(obj["dtype"], tuple(obj["shape"]), data)
    return (array if kind == "ndarray" else array[()]).__reduce_ex__(2)


def _array(name: Any, shape: tuple[Any, ...], data: bytes) -> np.ndarray[Any, Any]:
    dtype = _dtype_of(name)
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shown(shape)}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for dtype {dtype} and shape {shown(shape)}")
    return np.ndarray(shape, dtype, data)


def _name_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype in a stand-in; None if arrays of the dtype cannot be kept."""
    if isinstance(getattr(ml_dtypes, dtype.name, None), type):
        return _ML_DTYPE + dtype.name
    return dtype.str if _DTYPE.fullmatch(dtype.str) or _TIME.fullmatch(dtype.str) else None


def _dtype_of(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise TypeError(f"dtype {shown(name)}")
    if name.startswith(_ML_DTYPE):
        found = getattr(ml_dtypes, name.removeprefix(_ML_DTYPE), None)
        if isinstance(found, type) and issubclass(found, np.generic):
            return np.dtype(found)
    elif _DTYPE.fullmatch(name) or _TIME.fullmatch(name):
        return np.dtype(name)
    raise ValueError(f"dtype {shown(name)}")
