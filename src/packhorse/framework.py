"""What the hops need to know of NumPy or PyTorch, and which of them a tensor belongs to.

Their objects, and what decodes frames on a GPU, are registered here, each with a function that
imports it when it is asked for: whoever uses one framework does not need the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from packhorse.codecs.base import ByteArray
    from packhorse.frame import Frame

__all__ = [
    "FrameDecoder",
    "Framework",
    "frame_decoder",
    "framework_of",
    "register_decoder",
    "register_framework",
    "resolve_framework",
    "to_array",
]

# What `Framework.decode_on` calls: frames, device and `threads=` to a tensor or None for each.
FrameDecoder: TypeAlias = Callable[..., list[Any]]

_TENSOR_TYPES = {("numpy", "ndarray"): "np", ("torch", "Tensor"): "pt"}
_loaders: dict[str, Callable[[], Framework]] = {}
_load_decoder: Callable[[], FrameDecoder] | None = None


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

    def check_out(self, out: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """See that a tensor of this dtype and shape can be decoded into another.

        Raises:
            TypeError: that is no C-contiguous, writable tensor in host memory.
            ValueError: it has another dtype or shape.
        """

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


def register_framework(*names: str, load: Callable[[], Framework]) -> None:
    """Say how to come by a framework.

    Args:
        names: what callers may call it.
        load: imports it. It is called each time, so it remembers what it found.
    """
    _loaders.update(dict.fromkeys(names, load))


def register_decoder(load: Callable[[], FrameDecoder]) -> None:
    """Say how to come by what decodes frames on a GPU.

    Args:
        load: imports it; see `Framework.decode_on` for what it takes.
    """
    global _load_decoder
    _load_decoder = load


def frame_decoder() -> FrameDecoder:
    """What decodes frames on a GPU.

    Raises:
        ImportError: what it needs is not installed.
    """
    assert _load_decoder is not None  # the package registers one
    return _load_decoder()


def resolve_framework(name: str) -> Framework:
    """The framework of a name: "np" (or "numpy") or "pt" (or "torch", "pytorch").

    Raises:
        ValueError: no such framework.
        MissingBackendError: it is not installed.
    """
    if name not in _loaders:
        known = ", ".join(repr(name) for name in _loaders)
        raise ValueError(f"framework is {name!r}; it must be one of {known}")
    return _loaders[name]()


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
