"""The protocol through which the hops use NumPy or PyTorch, and the registry of both.

The package registers, for each framework and for the decoder of frames on a GPU, a function that
imports it. The function runs at first use, so a user of one framework does not need the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from packhorse.errors import blaming

if TYPE_CHECKING:
    from packhorse._core import Views
    from packhorse.codecs.base import ByteArray
    from packhorse.frame import Frame

__all__ = [
    "FrameDecoder",
    "Framework",
    "frame_decoder",
    "framework_of",
    "new_tensors",
    "register_decoder",
    "register_framework",
    "resolve_framework",
    "to_array",
]

# Takes frames, a device and `threads=`; returns a tensor or None for each frame, like
# `Framework.decode_on`.
FrameDecoder: TypeAlias = Callable[..., list[Any]]

_TENSOR_TYPES = {("numpy", "ndarray"): "np", ("torch", "Tensor"): "pt"}
_loaders: dict[str, Callable[[], Framework]] = {}
_load_decoder: Callable[[], FrameDecoder] | None = None


class Framework(Protocol):
    """The operations that hops need on tensors of NumPy or PyTorch. numpy.py and torch_framework.py
    each have one object that implements them."""

    name: str

    def check_form(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Check that the framework has tensors of a dtype and shape of safetensors.

        Raises:
            CompatibilityError: it has none.
        """

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor in host memory, of undefined content.

        Raises:
            CompatibilityError: as for `check_form`.
        """

    def fill(self, tensor: Any, write: Callable[[ByteArray], object]) -> None:
        """Let `write` write the bytes of a tensor.

        Args:
            tensor: a C-contiguous tensor in host memory.
            write: called once, with a one-dimensional array for the bytes as safetensors stores
                them.
        """

    def check_out(self, out: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor of this dtype and shape can be decoded into `out`.

        Raises:
            TypeError: `out` is not a C-contiguous, writable tensor in host memory.
            ValueError: `out` has another dtype or shape.
        """

    def readable(self, tensor: Any) -> tuple[ByteArray, str, tuple[int, ...]]:
        """A tensor's bytes in C order, its dtype name and its shape. The bytes are copied only if
        the tensor is not C-contiguous or not in host memory."""

    def is_readable_in_place(self, tensor: Any) -> bool:
        """Whether `readable` returns a tensor's own memory, and not a copy. True for an object that
        `readable` does not accept."""

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """The dtype name and shape of a tensor that `readable` accepts; its bytes are not read.

        Raises:
            TypeError: `readable` does not accept it.
        """

    def head(self, tensor: Any, n: int) -> ByteArray:
        """The bytes of the first `n` elements in C order, or of all elements if there are
        fewer. The tensor must be one that `readable` accepts."""

    def identity(self, tensor: Any) -> object:
        """A key that is equal for two tensors if they are the same elements of the same memory.
        The key is valid as long as the tensors live."""

    def assign(self, target: Any, source: Any) -> None:
        """Copy the elements of `source` to `target`, which has the same dtype and shape, and any
        strides and device.

        Raises:
            ValueError: the target may not be written to.
        """

    def views(self, tensors: Sequence[Any]) -> Views:
        """Where tensors lie, for the core. A tensor of whose memory `readable` would make a copy,
        or that it does not accept, is unknown, and so may be others."""

    def empty_all(
        self, forms: Sequence[tuple[str, tuple[int, ...]]], numbers: Sequence[int]
    ) -> list[Any]:
        """New tensors of undefined content in host memory, each with memory of its own.

        Args:
            forms: dtypes and shapes that `check_form` accepts.
            numbers: which of these each tensor has.
        """

    def mark_all_written(self, tensors: Sequence[Any]) -> None:
        """`mark_written` for many tensors."""

    def memory(self, tensor: Any) -> ByteArray | None:
        """A tensor's bytes, for writing, if they lie in host memory in C order. Otherwise None, and
        the caller must use `assign`."""

    def mark_written(self, tensor: Any) -> None:
        """Tell the framework that a tensor's bytes, from `memory`, were written."""

    def write_count(self, tensor: Any) -> int | None:
        """A number that grows with each write to a tensor; None if the framework does not
        count."""

    def span(self, tensor: Any) -> tuple[int, int] | None:
        """The address of a tensor's first byte, and the address after its last byte. None for an
        empty tensor, one outside host memory, and one of another framework."""

    def check_device(self, device: Any) -> None:
        """Refuse a device that tensors cannot be placed on; None is host memory.

        Raises:
            TypeError: it is not a device.
            ValueError: there is no such device.
        """

    def decodes_on(self, device: Any) -> bool:
        """Whether `decode_on` may decode frames on a device."""

    def decode_on(self, frames: Sequence[Frame], device: Any, threads: int) -> list[Any]:
        """Copy frames to a device and decode them there.

        Args:
            frames: the frames; their bytes are only read.
            device: where the tensors are created.
            threads: the number of threads of the host.

        Returns:
            A tensor for each frame; None for a frame that the device has no kernels for. The
            caller decodes that one in host memory and copies the tensor.

        Raises:
            CorruptionError: a frame is damaged, as for `Frame.decompress_into`.
        """


def register_framework(*names: str, load: Callable[[], Framework]) -> None:
    """Register a framework.

    Args:
        names: the names that callers may use for it.
        load: imports and returns it. It runs each time a framework is asked for, so it is fast
            once the import is done.
    """
    _loaders.update(dict.fromkeys(names, load))


def register_decoder(load: Callable[[], FrameDecoder]) -> None:
    """Register the decoder of frames on a GPU.

    Args:
        load: imports and returns it.
    """
    global _load_decoder
    _load_decoder = load


def frame_decoder() -> FrameDecoder:
    """The decoder of frames on a GPU.

    Raises:
        ImportError: a package that it needs is not installed.
    """
    assert _load_decoder is not None  # the package registers one
    return _load_decoder()


def resolve_framework(name: str) -> Framework:
    """The framework of a name: "np" (or "numpy") or "pt" (or "torch", "pytorch").

    Raises:
        ValueError: there is no framework of this name.
        MissingBackendError: the framework is not installed.
    """
    if name not in _loaders:
        known = ", ".join(repr(name) for name in _loaders)
        raise ValueError(f"framework is {name!r}; it must be one of {known}")
    return _loaders[name]()


def framework_of(value: object) -> Framework | None:
    """The framework that a tensor belongs to; None for any other object. This imports
    only the tensor's own framework, which the caller has already imported."""
    for kind in type(value).__mro__:
        name = _TENSOR_TYPES.get((kind.__module__, kind.__qualname__))
        if name is not None:
            return resolve_framework(name)
    return None


def new_tensors(
    framework: Framework,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    name_of: Callable[[int], str],
) -> list[Any]:
    """New tensors of undefined content in host memory, each with memory of its own.

    Args:
        framework: of the tensors.
        tensors: the dtype and shape of each.
        name_of: what an error calls the tensor of a number.

    Raises:
        CompatibilityError: the framework has no tensor of some dtype and shape.
    """
    forms: dict[tuple[str, tuple[int, ...]], int] = {}
    numbers = []
    for i, form in enumerate(tensors):
        number = forms.get(form)
        if number is None:
            with blaming(name_of(i)):
                framework.check_form(*form)
            number = forms[form] = len(forms)
        numbers.append(number)
    return framework.empty_all(list(forms), numbers)


def to_array(tensor: Any, framework: Framework) -> Any:
    """A new NumPy array with the elements of a tensor of any dtype."""
    data, dtype, shape = framework.readable(tensor)
    arrays = resolve_framework("np")
    array = arrays.empty(dtype, shape)

    def write(memory: ByteArray) -> None:
        memory[:] = data

    arrays.fill(array, write)
    return array
