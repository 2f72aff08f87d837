"""What a shelf's exports and imports share: which tensors, which blocks of them, and the commit.

Tensors travel block by block, so memory does not depend on their size: a block has 8 MiB, or one
chunk of the other format if that is larger. An export reads one committed state, and its output is
complete or absent. An import is one transaction over all its tensors; or, to be resumed, one for
each tensor, and tensors that the shelf already has are compared and kept.

The functions here take anything that reads like a shelf: a `Shelf`, or what `Shelf.at` returns.
`exchange_zarr`, `exchange_npy` and `exchange_safetensors` know the formats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.strict_json import shown

__all__ = [
    "BLOCK_NBYTES",
    "Block",
    "Incoming",
    "Meter",
    "Outgoing",
    "Planned",
    "ReadsLikeShelf",
    "ShelfProgress",
    "bits_of",
    "check_segments",
    "dtype_of",
    "name_below",
    "native_dtype",
    "outgoing",
    "store",
    "sync_files",
    "tile_shape",
    "tiles",
]

BLOCK_NBYTES = 1 << 23

_Box: TypeAlias = tuple[slice, ...]
# A box of a tensor, and its elements.
Block: TypeAlias = tuple[_Box, np.ndarray[Any, Any]]
# Called with the bytes done so far, and the bytes that there are to do.
ShelfProgress: TypeAlias = Callable[[int, int], object]


class ReadsLikeShelf(Protocol):
    """What exports need of a shelf, or of its state at a tag."""

    path: Path

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A tensor that is imported.

    Attributes:
        name: its name in the shelf.
        dtype: safetensors' name of its dtype.
        shape: its shape.
        where: the file and the tensor in it, for messages.
        blocks: begins to read it; yields boxes of it with their elements.
        check: raises an exception if the file has changed since it was opened.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: str
    blocks: Callable[[], Iterator[Block]]
    check: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, those of 4 and 6 bits without gaps."""
        return math.prod(self.shape) * DTYPE_BY_NAME[self.dtype].bits // 8


class Planned:
    """What imports would write to a shelf.

    Attributes:
        tensors: what would be written.
    """

    def __init__(self) -> None:
        self.tensors: list[Incoming] = []


class Meter:
    """Adds up the bytes that are done, those of elements of 4 and 6 bits without gaps, and tells
    the caller."""

    def __init__(self, progress: ShelfProgress | None, total: int) -> None:
        self._progress, self._total, self._bits = progress, total, 0

    def add(self, numel: int, dtype: str) -> None:
        """Count elements of a dtype as done."""
        self._bits += numel * DTYPE_BY_NAME[dtype].bits
        if self._progress is not None:
            self._progress(self._bits // 8, self._total)


class Outgoing:
    """A tensor that is exported.

    Attributes:
        tensor: reads as arrays of NumPy.
        dtype: safetensors' name of its dtype.
        native: its dtype of NumPy.
        shape: its shape.
        chunks: the shape of its chunks.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.as_framework("np")
        self.native: np.dtype[Any] = self.tensor.dtype
        self.dtype = dtype_of(self.native, repr(tensor))
        self.shape = tuple(self.tensor.shape)
        self.chunks = tuple(self.tensor.chunks)

    def read(self, tile: Sequence[int], meter: Meter) -> Iterator[Block]:
        """Its blocks of a shape, each a contiguous array, which are counted when they are used."""
        for box in tiles(self.shape, tile):
            block = np.ascontiguousarray(self.tensor[box]).reshape([s.stop - s.start for s in box])
            yield box, block
            meter.add(block.size, self.dtype)

    def tile(self, nbytes: int) -> tuple[int, ...]:
        """The shape of blocks of about so many bytes in memory."""
        return tile_shape(self.shape, self.chunks, nbytes // self.native.itemsize)


@contextmanager
def outgoing(
    shelf: ReadsLikeShelf, names: str | Iterable[str] | None, progress: ShelfProgress | None
) -> Iterator[tuple[dict[str, Outgoing], Meter]]:
    """The tensors to export, those named or all, and what counts their bytes. All reads of the
    block see one state.

    Raises:
        KeyError: the shelf has no tensor of a name.
        TypeError: a name is that of a nested state.
        ValueError: a name occurs twice.
    """
    with _held(shelf):
        tensors = _chosen(shelf, names)
        nbytes = (
            math.prod(tensor.shape) * DTYPE_BY_NAME[tensor.dtype].bits // 8
            for tensor in tensors.values()
        )
        yield tensors, Meter(progress, sum(nbytes))


def _held(shelf: ReadsLikeShelf) -> AbstractContextManager[object]:
    """A block whose reads see one state; the state of a tag stays what it is."""
    reading = getattr(shelf, "reading", None)
    return nullcontext() if reading is None else reading()


# Names and dtypes.


def _chosen(shelf: ReadsLikeShelf, names: str | Iterable[str] | None) -> dict[str, Outgoing]:
    if names is None:
        return {name: Outgoing(shelf[name]) for name in shelf if _is_tensor(shelf, name)}
    asked = [names] if isinstance(names, str) else list(names)
    if len({*asked}) < len(asked):
        twice = next(name for name in asked if asked.count(name) > 1)
        raise ValueError(f"{shown(twice)} is named twice; name it once")
    return {name: Outgoing(shelf[name]) for name in asked}


def _is_tensor(shelf: ReadsLikeShelf, name: str) -> bool:
    """Whether a name is that of a tensor, and not of a nested state."""
    try:
        shelf[name]
    except TypeError:
        return False
    return True


def check_segments(names: Iterable[str], what: str, reserved: tuple[str, ...] = ()) -> None:
    """Refuse names that cannot be paths of files below a folder.

    Args:
        names: names of tensors; "/" separates folders.
        what: what the paths are of, for the message.
        reserved: how no part of a path may begin.

    Raises:
        ValueError: a name cannot be such a path, or one is a folder of another.
    """
    taken = {*names}
    for name in taken:
        parts = name.split("/")
        bad = [part for part in parts if part in ("", ".", "..") or part.startswith(reserved)]
        if bad or "\0" in name:
            raise ValueError(
                f"tensor {shown(name)}: {what} cannot have this name, because of its part "
                f"{shown(bad[0] if bad else name)}; rename it first, or leave it out by names="
            )
        for n in range(1, len(parts)):
            if "/".join(parts[:n]) in taken:
                raise ValueError(
                    f"tensor {shown(name)} would be inside tensor {shown('/'.join(parts[:n]))}, "
                    f"which {what} cannot have; rename one first, or leave it out by names="
                )


def name_below(prefix: str, name: str) -> str:
    """The name of an imported tensor: below a prefix, if there is one."""
    return f"{prefix.rstrip('/')}/{name}".strip("/") if prefix else name


def dtype_of(dtype: np.dtype[Any], where: str) -> str:
    """safetensors' name of a dtype of NumPy, whatever its byte order.

    Args:
        dtype: the dtype.
        where: the tensor, for the message.

    Raises:
        TypeError: a shelf has no such dtype.
    """
    try:
        name, _ = resolve_framework("np").describe(np.empty(0, dtype))
    except TypeError:
        raise TypeError(
            f"{where}: a shelf has no dtype for {dtype}; convert it first, or import others only"
        ) from None
    return name


def native_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of NumPy that a name of safetensors stands for."""
    found: np.dtype[Any] = resolve_framework("np").empty(dtype, (0,)).dtype
    return found


# Blocks.


def bits_of(array: Any) -> ByteArray:
    """The bytes of an array, in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tile_shape(shape: Sequence[int], unit: Sequence[int], max_numel: int) -> tuple[int, ...]:
    """The shape of the blocks in which a tensor is read.

    Args:
        shape: the shape of the tensor.
        unit: the shape of its chunks; a block has whole chunks, or ends where the tensor does.
        max_numel: the elements of a block, unless a chunk has more.

    Returns:
        A shape that grows along the last axis first, so that blocks have whole rows if these fit.
    """
    tile = [max(1, size) for size in unit]
    for axis in reversed(range(len(tile))):
        tile[axis] *= max(1, max_numel // math.prod(tile))
        if tile[axis] < shape[axis]:
            break
        tile[axis] = max(1, shape[axis])
    return tuple(tile)


def tiles(shape: Sequence[int], tile: Sequence[int]) -> Iterator[_Box]:
    """Cut a tensor into blocks of a shape, in C order; those at its ends are smaller."""
    starts = (range(0, size, step) for size, step in zip(shape, tile, strict=True))
    for corner in product(*starts):
        yield tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(corner, tile, shape, strict=True)
        )


# Imports.


def store(
    shelf: Any,
    tensors: Sequence[Incoming],
    *,
    replace: bool,
    resume: bool,
    progress: ShelfProgress | None,
) -> list[str]:
    """Write tensors to a shelf.

    Args:
        shelf: the shelf, open for writing, or the plan of an import.
        tensors: what to write.
        replace: whether tensors of these names may be replaced.
        resume: whether each tensor is a transaction of its own, and tensors that are there already
            are compared and kept.
        progress: called with the bytes done, and the bytes of all tensors.

    Returns:
        The names of the tensors.

    Raises:
        ValueError: the shelf has such a tensor, and may not replace it; or two tensors would have
            the same name.
        OSError: a source has changed.
    """
    _refuse_twins(tensors)
    if isinstance(shelf, Planned):
        shelf.tensors += tensors
        return [tensor.name for tensor in tensors]
    if not replace and not resume:
        for tensor in tensors:
            if tensor.name in shelf:
                raise _exists(shelf, tensor, "the shelf has it already")
    meter = Meter(progress, sum(tensor.nbytes for tensor in tensors))
    if resume:
        for tensor in tensors:
            _resume(shelf, tensor, meter, replace=replace)
    else:
        with shelf.transaction():
            for tensor in tensors:
                _write(shelf, tensor, meter)
            for check in dict.fromkeys(tensor.check for tensor in tensors):
                check()
    return [tensor.name for tensor in tensors]


def _resume(shelf: Any, tensor: Incoming, meter: Meter, *, replace: bool) -> None:
    """Write a tensor in a transaction, unless the shelf has it."""
    if tensor.name in shelf:
        if _is_stored(shelf, tensor):
            meter.add(math.prod(tensor.shape), tensor.dtype)
            return
        if not replace:
            raise _exists(shelf, tensor, "the shelf has another one of this name")
    with shelf.transaction():
        _write(shelf, tensor, meter)
        tensor.check()


def _refuse_twins(tensors: Sequence[Incoming]) -> None:
    found: dict[str, Incoming] = {}
    for tensor in tensors:
        other = found.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise ValueError(
                f"{tensor.where} and {other.where} would both be {shown(tensor.name)}; import one "
                "of them under another prefix or name"
            )


def _exists(shelf: Any, tensor: Incoming, what: str) -> ValueError:
    return ValueError(
        f"{shelf.path}: tensor {shown(tensor.name)}: {what}; allow replacing it (replace=True), or "
        "give another name or prefix"
    )


def _write(shelf: Any, tensor: Incoming, meter: Meter) -> None:
    target = shelf.create(tensor.name, tensor.shape, tensor.dtype, replace=tensor.name in shelf)
    for box, block in tensor.blocks():
        target[box] = block
        meter.add(block.size, tensor.dtype)


def _is_stored(shelf: Any, tensor: Incoming) -> bool:
    """Whether a shelf has a tensor with these elements."""
    if not _is_tensor(shelf, tensor.name):
        return False
    found = Outgoing(shelf[tensor.name])
    if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
        return False
    return all(
        np.array_equal(bits_of(found.tensor[box]), bits_of(block)) for box, block in tensor.blocks()
    )


# Exports.


def sync_files(folder: Path) -> None:
    """Wait until the files below a folder are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
