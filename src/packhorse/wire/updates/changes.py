"""The elements that an update changes, for engines that patch their own weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.base import ByteArray
from packhorse.errors import CompatibilityError
from packhorse.frame import Frame
from packhorse.layout import DTYPE_BY_NAME
from packhorse.wire.updates.tensors import Binding

__all__ = ["Changes", "changes_by_frame", "changes_of"]

# A tensor's name, the indices of elements in C order, and their new values.
Changes: TypeAlias = tuple[str, Any, Any]

_WORDS: dict[int, np.dtype[Any]] = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}
_MAX_I32 = (1 << 31) - 1


def changes_of(binding: Binding, i: int, new: ByteArray) -> Iterator[Changes]:
    """The changes of a unit, tensor by tensor.

    Args:
        binding: the live tensors.
        i: the unit.
        new: its new bytes.

    Yields:
        A name, indices of elements of the whole tensor in C order, and their new values. Tensors
        without a change are left out.

    Raises:
        CompatibilityError: several elements share a byte.
    """
    word = _word_of(binding, i)
    return _by_tensor(binding, i, word, *_changed(new.view(word), binding.read(i).view(word)))


def changes_by_frame(
    binding: Binding, i: int, frame: Frame, base_hash: bytes, threads: int
) -> Iterator[Changes] | None:
    """The changes of a unit from its frame, which need not be decoded as a whole.

    Args:
        binding: the live tensors.
        i: the unit.
        frame: its frame, against the live tensors.
        base_hash: the content hash that they are known to have.
        threads: how many to use.

    Returns:
        As `changes_of`; None if the frame's units are not the tensor's elements.

    Raises:
        CorruptionError: the frame is damaged.
    """
    row = DTYPE_BY_NAME[frame.dtype]
    if row.bits != 8 * row.unit_nbytes:
        return None
    found, values = frame.changes(binding.read(i), base_hash=base_hash, threads=threads)
    return _by_tensor(binding, i, _word_of(binding, i), found.astype(np.int64), values)


def _word_of(binding: Binding, i: int) -> np.dtype[Any]:
    """The word of an element.

    Raises:
        CompatibilityError: several elements share a byte.
    """
    unit = binding.unit(i)
    bits = DTYPE_BY_NAME[unit.dtype].bits
    if bits < 8:
        raise CompatibilityError(
            f"{unit.label}: elements of {unit.dtype} share bytes, so single ones cannot be named; "
            "commit the update instead"
        )
    return _WORDS[bits // 8]


def _by_tensor(
    binding: Binding, i: int, word: np.dtype[Any], found: NDArray[np.int64], values: NDArray[Any]
) -> Iterator[Changes]:
    """The changes of a unit, divided between its tensors."""
    unit = binding.unit(i)
    framework = binding.framework
    for part in unit.parts:
        first = part.offset // word.itemsize
        start, stop = np.searchsorted(found, [first, first + part.nbytes // word.itemsize])
        if start == stop:
            continue
        indices = found[start:stop] - first + part.form.start
        narrow = np.int32 if part.form.stop <= _MAX_I32 else np.int64
        yield (
            part.name,
            _tensor(framework, "I32" if narrow is np.int32 else "I64", indices.astype(narrow)),
            _tensor(framework, unit.dtype, values[start:stop]),
        )


def _changed(new: NDArray[Any], old: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The places where two arrays differ, and what the first has there."""
    found = np.flatnonzero(new != old)
    return found, new[found]


def _tensor(framework: Any, dtype: str, values: NDArray[Any]) -> Any:
    tensor = framework.empty(dtype, values.shape)

    def fill(memory: ByteArray) -> None:
        memory[:] = values.view(np.uint8)

    framework.fill(tensor, fill)
    return tensor
