"""What callers give and get: arrays and tensors of both frameworks, and names of dtypes."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np
from numpy.ma import MaskedArray

from packhorse.disk.shelf.arrays import Array, dtype_of
from packhorse.framework import Framework, framework_of, resolve_framework, to_array
from packhorse.layout import DTYPE_BY_NAME

__all__ = [
    "as_array",
    "as_operand",
    "check_kind",
    "check_size",
    "dtype_name",
    "form_of",
    "run_nbytes",
    "to_framework",
    "whole_number",
]

_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}  # of kinds; V are ml_dtypes' floats
_MAX_NDIM, _MAX_NBYTES = 64, (1 << 63) - 1  # of an array of NumPy


def dtype_name(dtype: Any) -> str:
    """safetensors' name of a dtype.

    Args:
        dtype: a dtype of NumPy or PyTorch, or a name of one of these or of safetensors.

    Raises:
        TypeError: it is no dtype, or safetensors has none like it.
    """
    if isinstance(dtype, str) and dtype in DTYPE_BY_NAME:
        return dtype
    arrays = resolve_framework("np")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return resolve_framework("pt").describe(torch.empty(0, dtype=dtype, device="cpu"))[0]
    found = np.dtype(dtype)
    if found.shape:
        raise TypeError(f"{dtype!r} has several elements; put them into the shape")
    return arrays.describe(np.empty(0, found))[0]


def check_size(dtype: str, shape: Any) -> tuple[int, ...]:
    """Check a shape that a caller gives for a tensor.

    Args:
        dtype: the name of the dtype.
        shape: the shape, or the size of the only axis.

    Returns:
        The shape.

    Raises:
        TypeError: a size is no integer.
        ValueError: NumPy could have no array of this shape.
    """
    try:
        given = tuple(shape) if np.iterable(shape) else (shape,)
        sizes = tuple(int(operator.index(size)) for size in given)
    except TypeError:
        raise TypeError(f"the shape is {shape!r}; it must have integers only") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"the shape {sizes} has a negative size")
    if len(sizes) > _MAX_NDIM:
        raise ValueError(f"the shape has {len(sizes)} axes; it may have {_MAX_NDIM}")
    if math.prod(max(1, size) for size in sizes) * dtype_of(dtype).itemsize > _MAX_NBYTES:
        raise ValueError(f"a tensor of shape {sizes} has more than 2**63 bytes")
    return sizes


def whole_number(value: Any, what: str) -> int:
    """Check a number that a caller gives.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{what} is {value!r}; it must be an integer") from None


def run_nbytes(nbytes: Any, otherwise: int) -> int:
    """How many bytes a run of rows may have.

    Args:
        nbytes: what a caller asks for; None or 0 for `otherwise`.
        otherwise: the default.

    Raises:
        TypeError: it is no integer.
    """
    return otherwise if nbytes is None else whole_number(nbytes, "nbytes") or otherwise


def form_of(value: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype name and the shape that a tensor for a value has.

    Raises:
        TypeError: it is not an array of numbers that can be stored.
    """
    framework = framework_of(value)
    if framework is not None and framework.name != "np":
        return framework.describe(value)
    _check_unmasked(value)
    array = np.asarray(value)
    return dtype_name(array.dtype), array.shape


def check_kind(value: Any, dtype: str, name: str) -> None:
    """Make sure that a value can become elements of a dtype and stay what it is: floats do not
    become integers, nor integers booleans.

    Args:
        value: an array, a tensor, or nested lists.
        dtype: the name of the dtype.
        name: of the tensor, for messages.

    Raises:
        TypeError: it cannot.
        ValueError: nested lists have several lengths.
    """
    _check_unmasked(value)
    target, framework = dtype_of(dtype), framework_of(value)
    given: Any = getattr(value, "dtype", None)
    if framework is not None and framework.name != "np":
        given = dtype_of(framework.describe(value)[0])
    is_array = isinstance(given, np.dtype)
    given = given if is_array else np.asarray(value).dtype
    if is_array and "V" not in (given.kind, target.kind):
        fits = np.can_cast(given, target, "same_kind")
    else:  # NumPy knows no kinds of ml_dtypes, and numbers of Python have no width
        fits = _RANKS.get(given.kind, 9) <= _RANKS[target.kind]
    if not fits:
        raise TypeError(
            f"{name!r} is {target}, and rows of {given} would change their kind; convert them first"
        )


def _check_unmasked(value: Any) -> None:
    if isinstance(value, MaskedArray) and value.mask.any():
        raise TypeError("a masked array has elements that are missing; fill them first")


def as_array(value: Any, dtype: str) -> Array:
    """A value as an array of a dtype; its own memory if that is possible.

    Args:
        value: an array, a tensor, a number, or nested lists of numbers.
        dtype: the name of the dtype. Numbers are converted as NumPy does when it assigns them.

    Raises:
        TypeError, ValueError, OverflowError: NumPy's own, if the value cannot be converted.
    """
    target = dtype_of(dtype)
    framework = framework_of(value)
    if framework is not None and framework.name != "np":
        value = _array_of(value, framework)
    elif not isinstance(value, np.ndarray) and not hasattr(value, "__array__"):
        found = np.empty(np.shape(value), target)
        found[...] = value
        return found
    array = np.asarray(value)
    if array.dtype == target:
        return array if array.dtype.isnative else array.astype(target)
    found = np.empty(array.shape, target)
    found[...] = array
    return found


def _array_of(tensor: Any, framework: Framework) -> Array:
    """The elements of a tensor of another framework, in its own memory if that is possible."""
    name, shape = framework.describe(tensor)
    if DTYPE_BY_NAME[name].bits < 8:
        found: Array = to_array(tensor, framework)
        return found
    return framework.readable(tensor)[0].view(dtype_of(name)).reshape(shape)


def to_framework(array: Any, dtype: str, framework: Framework) -> Any:
    """An array as a new tensor of a framework.

    Args:
        array: of NumPy.
        dtype: the name of its dtype.
        framework: of the tensor.

    Raises:
        CompatibilityError: it has no tensor of this dtype and shape.
    """
    if framework.name == "np":
        return array
    array = np.asarray(array)
    tensor = framework.empty(dtype, array.shape)
    data = resolve_framework("np").readable(array)[0]

    def write(memory: Any) -> None:
        memory[:] = data

    framework.fill(tensor, write)
    return tensor


def as_operand(value: Any, framework: Framework) -> Any:
    """A value that a tensor of a framework can be added to, or multiplied by.

    Args:
        value: an array, a tensor or a number.
        framework: of the other operand.
    """
    found = framework_of(value)
    if found is None or found.name == framework.name:
        return value
    if framework.name == "np":
        return _array_of(value, found)
    return to_framework(value, dtype_name(value.dtype), framework)
