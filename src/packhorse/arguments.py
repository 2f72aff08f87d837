"""What callers say about any operation: the level, the number of threads, the framework."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from packhorse.late_import import import_late
from packhorse.layout import Level

if TYPE_CHECKING:
    from packhorse.codecs.base import ByteArray
    from packhorse.frame import Frame

__all__ = [
    "Framework",
    "framework_of",
    "resolve_framework",
    "resolve_level",
    "resolve_threads",
    "to_array",
]

_MAX_DEFAULT_THREADS = 8
_MAX_THREADS = 1024  # more help nobody, and room for them is made before it is known how many start
_LEVELS = dict(Level.__members__)  # by name
# Where the object of each framework is; imported when it is asked for, so that none is needed.
_FRAMEWORKS = {
    "np": "packhorse.numpy",
    "numpy": "packhorse.numpy",
    "pt": "packhorse.torch",
    "torch": "packhorse.torch",
    "pytorch": "packhorse.torch",
}
_TENSOR_TYPES = {("numpy", "ndarray"): "np", ("torch", "Tensor"): "pt"}


class Framework(Protocol):
    """What a hop needs to know of NumPy or PyTorch; one object for each, in numpy.py and
    torch.py."""

    name: str

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A fresh tensor of undefined content.

        Raises:
            CompatibilityError: the framework has no such dtype.
        """

    def writable(self, tensor: Any) -> ByteArray:
        """The bytes of a C-contiguous tensor, one-dimensional, to write to."""

    def readable(self, tensor: Any) -> tuple[ByteArray, str, tuple[int, ...]]:
        """The bytes in C order, dtype name and shape; a copy only if the tensor is not
        C-contiguous."""

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype name and shape of a tensor that `readable` takes; no byte of it is looked at.

        Raises:
            TypeError: it takes no such tensor.
        """

    def head(self, tensor: Any, n: int) -> ByteArray:
        """The bytes of the first `n` elements in C order of a tensor that `readable` takes, or of
        all if there are fewer."""

    def identity(self, tensor: Any) -> object:
        """What is equal for tensors that are the same elements of the same memory, as long as they
        live."""

    def assign(self, target: Any, source: Any) -> None:
        """Write a tensor's elements over those of another of the same dtype and shape, whatever
        strides and device that has.

        Raises:
            ValueError: the target may not be written to.
        """

    def memory(self, tensor: Any) -> ByteArray | None:
        """The bytes of a tensor to write to, if they lie in host memory in C order; otherwise
        `assign` is needed."""

    def mark_written(self, tensor: Any) -> None:
        """Say that the bytes of a tensor, from `writable` or `memory`, were written to."""

    def span(self, tensor: Any) -> tuple[int, int] | None:
        """The addresses of the first byte of a tensor in host memory and of what is behind its last
        one; None for an empty one, and for what is none of this framework's."""

    def decodes_on(self, device: Any) -> bool:
        """Whether `decode_on` may give tensors for a device."""

    def decode_on(self, frames: Sequence[Frame], device: Any, threads: int) -> list[Any]:
        """Tensors of frames that a device decodes itself, and gets packed.

        Args:
            frames: their bytes are only read.
            device: where the tensors are to be.
            threads: of the host, to use.

        Returns:
            A tensor for each frame; None for one that is to be decoded in host memory and copied:
            where the device has no kernels, or none for such a frame.

        Raises:
            CorruptionError: a frame is damaged, as `Frame.decompress_into`.
        """


def resolve_framework(name: str) -> Framework:
    """The framework of a name: "np" (or "numpy") or "pt" (or "torch", "pytorch").

    Raises:
        ValueError: no such framework.
        MissingBackendError: it is not installed.
    """
    if name not in _FRAMEWORKS:
        known = ", ".join(repr(name) for name in _FRAMEWORKS)
        raise ValueError(f"framework is {name!r}; it must be one of {known}")
    framework: Framework = import_late(_FRAMEWORKS[name]).FRAMEWORK
    return framework


def framework_of(value: object) -> Framework | None:
    """The framework that a tensor belongs to; None for what is no tensor. Imports nothing that the
    tensor's own framework has not imported already."""
    for kind in type(value).__mro__:
        name = _TENSOR_TYPES.get((kind.__module__, kind.__qualname__))
        if name is not None:
            return resolve_framework(name)
    return None


def to_array(tensor: Any, framework: Framework) -> Any:
    """A NumPy array of a tensor's elements, of whatever dtype."""
    data, dtype, shape = framework.readable(tensor)
    arrays = resolve_framework("np")
    array = arrays.empty(dtype, shape)
    arrays.writable(array)[:] = data
    return array


def resolve_level(level: Level | str | int) -> Level:
    """A `Level` from itself, its name in any case, or its number.

    Raises:
        ValueError: no such level.
    """
    if isinstance(level, Level):
        return level
    if isinstance(level, str) and level.upper() in _LEVELS:
        return _LEVELS[level.upper()]
    if type(level) is int and level in Level.__members__.values():
        return Level(level)
    names = ", ".join(repr(known.name.lower()) for known in Level)
    raise ValueError(f"level is {level!r}; it must be one of {names}")


def resolve_threads(threads: int | None) -> int:
    """The number of threads to use: as asked, but at most 1024; or the cores that this process may
    use, at most 8.

    Raises:
        ValueError: below 1.
        TypeError: not an integer.
    """
    if threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an integer or None, not {type(threads).__name__}")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    return min(threads, _MAX_THREADS)
