"""The `Framework` of PyTorch: how hops read the bytes of its tensors and make new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packhorse import _core
from packhorse._core import Views
from packhorse.codecs.base import ByteArray
from packhorse.errors import CompatibilityError
from packhorse.frame import Frame
from packhorse.framework import frame_decoder
from packhorse.huge_pages import LEAST_NBYTES, HugePages
from packhorse.layout import DTYPE_BY_NAME
from packhorse.torch_dtypes import NAMES, PAIR_DTYPES, TORCH_DTYPES

__all__ = ["FRAMEWORK", "TorchFramework", "extent_of"]


# Types of tensors that do nothing that PyTorch's own tensors do not.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# What PyTorch offers for finding out where tensors lie, from 2.9 on.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_HOST = torch.device("cpu")
_IS_NEGATED = torch.Tensor.is_neg
_PAGES = HugePages()
# Without C64, because such a tensor may be conjugated.
_CODES = {dtype: DTYPE_BY_NAME[name].code for dtype, name in NAMES.items() if not dtype.is_complex}


class TorchFramework:
    """The `Framework` of PyTorch.

    Attributes:
        kernel_devices: types of devices on which kernels decode frames, if Triton is installed.
    """

    name = "pt"
    kernel_devices: tuple[str, ...] = ("cuda",)

    def dtype_name(self, dtype: torch.dtype) -> str | None:
        """The name that safetensors gives a dtype; None if it has none."""
        return NAMES.get(dtype)

    def check_form(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Check that PyTorch has tensors of a dtype and shape.

        Raises:
            CompatibilityError: it has none.
        """
        _form(dtype, shape)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor in host memory, of undefined content.

        Raises:
            CompatibilityError: PyTorch has no such dtype, or no tensors of this dtype and shape.
            MemoryError: there is not enough memory for it.
        """
        torch_dtype, torch_shape = _form(dtype, shape)
        try:
            # The device is named, because the caller may have made another one the default.
            tensor = torch.empty(torch_shape, dtype=torch_dtype, device=_HOST)
        except RuntimeError as error:  # PyTorch's allocator raises nothing more specific
            raise MemoryError(f"no memory for {dtype} of shape {list(shape)}: {error}") from error
        if tensor.nbytes >= LEAST_NBYTES:
            _PAGES.want(_bytes_of(tensor))
        return tensor

    def writable(self, tensor: torch.Tensor) -> ByteArray:
        """The bytes of a contiguous host tensor, to write to."""
        return _bytes_of(tensor)

    def fill(self, tensor: torch.Tensor, write: Callable[[ByteArray], object]) -> None:
        """Call `write` with the bytes of a contiguous host tensor, and count that as a write."""
        try:
            write(self.writable(tensor))
        finally:
            self.mark_written(tensor)

    def check_out(self, out: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """Check that a frame's tensor can be decoded into `out`.

        Raises:
            TypeError: `out` is not a contiguous tensor in host memory.
            ValueError: `out` has another dtype or shape.
        """
        if not isinstance(out, torch.Tensor) or not out.is_cpu or not out.is_contiguous():
            raise TypeError("out must be a contiguous PyTorch tensor in host memory")
        needed = _form(dtype, shape)
        if (out.dtype, tuple(out.shape)) != needed:
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}; it must be {needed[0]} {needed[1]}"
            )

    def readable(self, tensor: Any) -> tuple[ByteArray, str, tuple[int, ...]]:
        """The tensor's bytes in C order, its dtype name and its shape. The bytes are a copy if the
        tensor is on a device or not contiguous.

        Raises:
            TypeError, ValueError: as for `describe`.
        """
        dtype, shape = self.describe(tensor)
        if self.is_readable_in_place(tensor):
            return _bytes_of(tensor), dtype, shape
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _bytes_of(plain), dtype, shape

    def is_readable_in_place(self, tensor: Any) -> bool:
        """Whether `readable` returns the memory of a tensor, and not a copy."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return True
        if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.is_nested or tensor.is_contiguous()

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """The dtype name and shape of a tensor that `readable` accepts, as safetensors has them.
        (The last dimension of a tensor of pairs is twice as long.)

        Raises:
            TypeError: `readable` does not accept it.
            ValueError: it is a pair without a dimension.
        """
        words = self.why_unreadable(tensor)
        if words is not None:
            raise TypeError(words)
        shape = tuple(tensor.shape)
        dtype_name = NAMES.get(tensor.dtype)
        if dtype_name is not None:
            return dtype_name, shape
        for name, pair in PAIR_DTYPES.items():
            if tensor.dtype == pair and shape:
                return name, (*shape[:-1], 2 * shape[-1])
            if tensor.dtype == pair:
                raise ValueError(f"{pair} holds two elements and needs a dimension; use unsqueeze")
        raise TypeError(f"safetensors has no dtype for {tensor.dtype}; convert the tensor first")

    def why_unreadable(self, tensor: Any) -> str | None:
        """Why an object cannot be read as a tensor, whatever its dtype; None if it can."""
        is_own = type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided
        if is_own and not tensor.is_nested and not tensor.is_meta:
            return None
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or tensor.is_nested
        ):
            return f"a dense PyTorch tensor is needed, not {_describe(tensor)}"
        if type(tensor).__name__ == "DTensor":
            return (
                "a DTensor is spread over processes; pass tensor.full_tensor(), or only the part "
                "of this process: tensor.to_local()"
            )
        if torch.nn.parameter.is_lazy(tensor):
            return "a lazy parameter has no shape yet; run its module once, and pass it then"
        # A subclass that implements PyTorch's operators itself may have no memory, or more content
        # than its memory shows.
        is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not is_plain or hasattr(type(tensor), "__tensor_flatten__") or tensor.is_meta:
            return f"{_describe(tensor)} has no memory of its own to read"
        return None

    def head(self, tensor: torch.Tensor, n: int) -> ByteArray:
        """The bytes of the first elements in C order."""
        part = tensor.detach()
        n = -(-n // 2) if tensor.dtype in PAIR_DTYPES.values() else n
        while part.dim() > 1 and part.numel():  # copy no more rows than needed
            row = part[0].numel()
            part = part[: -(-n // row)] if row < n else part[0]
            if row < n:
                part = part.flatten()
        return self.readable(part.flatten()[:n])[0]

    def identity(self, tensor: torch.Tensor) -> object:
        """A key that is equal for tensors that are the same elements of the same memory."""
        if not tensor.numel():
            return id(tensor)
        view = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
        return *view, tensor.is_conj(), tensor.is_neg()

    def assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the elements of `source` to `target`, on any device.

        Raises:
            ValueError: the target cannot be written to, for example because it is expanded.
        """
        try:
            target.detach().copy_(source)
        except RuntimeError as error:
            raise ValueError(f"the tensor cannot be written to: {error}") from error

    def views(self, tensors: Sequence[Any]) -> Views:
        """Where tensors lie; unknown for those of subclasses, not contiguous or not in host memory,
        and for all where PyTorch does not tell (before 2.9)."""
        if _EXCHANGE is None:
            return self._views_one_by_one(tensors)
        return _core.views_of_tensors(list(tensors), _PLAIN_TYPES, _EXCHANGE, _CODES, _IS_NEGATED)

    def _views_one_by_one(self, tensors: Sequence[Any]) -> Views:
        buffers: list[ByteArray | None] = []
        codes, shapes = [], []
        for tensor in tensors:
            is_plain = type(tensor) in _PLAIN_TYPES and tensor.dtype in NAMES
            is_plain = is_plain and not tensor.is_meta and self.is_readable_in_place(tensor)
            is_plain = is_plain and self.why_unreadable(tensor) is None
            buffers.append(_bytes_of(tensor) if is_plain else None)
            codes.append(DTYPE_BY_NAME[NAMES[tensor.dtype]].code if is_plain else 0)
            shapes.append(tuple(tensor.shape) if is_plain else ())
        return _core.views_of_buffers(buffers, codes, shapes)

    def empty_all(
        self, forms: Sequence[tuple[str, tuple[int, ...]]], numbers: Sequence[int]
    ) -> list[torch.Tensor]:
        """New tensors in host memory, of undefined content.

        Raises:
            MemoryError: there is not enough memory for one.
        """
        firsts: list[torch.Tensor | None] = [None] * len(forms)
        large = [False] * len(forms)
        tensors = []
        try:
            for k in numbers:
                first = firsts[k]
                if first is None:
                    tensor = firsts[k] = self.empty(*forms[k])
                    large[k] = tensor.nbytes >= LEAST_NBYTES
                else:
                    tensor = torch.empty_like(first)  # half the time of `torch.empty`
                    if large[k]:
                        _PAGES.want(_bytes_of(tensor))
                tensors.append(tensor)
        except RuntimeError as error:  # as in `empty`
            raise MemoryError(f"no memory for the tensors: {error}") from error
        return tensors

    def memory(self, tensor: torch.Tensor) -> ByteArray | None:
        """The bytes of a tensor to write to, if it is contiguous in host memory; otherwise None."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
        return None if tensor.is_conj() or tensor.is_neg() else _bytes_of(tensor)

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Increment the tensor's version, so that autograd notices if it needed the old values."""
        torch.autograd.graph.increment_version(tensor)

    def mark_all_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """`mark_written` for many tensors."""
        torch.autograd.graph.increment_version(tensors)

    def write_count(self, tensor: torch.Tensor) -> int | None:
        """The tensor's version, which autograd counts; None for a tensor of inference mode."""
        return None if tensor.is_inference() else int(tensor._version)

    def span(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The addresses between which a tensor in host memory lies; None for any other object."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu:
            return None
        if self.why_unreadable(tensor) is not None or not tensor.numel():
            return None
        return extent_of(tensor)

    def check_device(self, device: Any) -> None:
        """Refuse a device that is not here.

        Raises:
            TypeError: it is not a device, its name or its number.
            ValueError: PyTorch does not know it, or it is not in this machine.
        """
        if device is None or str(device) == "cpu":
            return
        if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
            raise TypeError(f"device is {device!r}; it must be a device or the name of one")
        try:
            target = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r} is unknown to PyTorch: {_first(error)}") from error
        if target.type == "cuda":  # counted, because making a tensor would start CUDA
            found = torch.cuda.device_count()
            if (target.index or 0) >= found:
                raise ValueError(f"device {device!r} is not here: PyTorch finds {found} CUDA GPUs")
            return
        try:
            torch.empty(0, device=target)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"device {device!r} cannot be used: {_first(error)}") from error

    def decodes_on(self, device: str | int | torch.device | None) -> bool:
        """Whether the device is a GPU that is present. (Kernels also need Triton.)"""
        target = torch.device("cpu" if device is None else device)
        is_there = target.type != "cuda" or torch.cuda.is_available()
        return target.type in self.kernel_devices and is_there

    def decode_on(
        self, frames: Sequence[Frame], device: str | int | torch.device, threads: int
    ) -> list[torch.Tensor | None]:
        """Copy frames to a GPU and decode them there (docs/device.md).

        Args:
            frames: the frames; their bytes are only read.
            device: where the tensors are created.
            threads: the number of host threads that check frames and plan their decoding.

        Returns:
            A tensor for each frame; None for a frame that kernels do not decode because of its
            kind or its small size. None for all frames where there is no GPU or no Triton.

        Raises:
            CorruptionError: a frame is damaged, as for `Frame.decompress_into`.
        """
        if not frames or not self.decodes_on(device):
            return [None] * len(frames)
        try:
            decode = frame_decoder()
        except ImportError:  # Triton is not installed, or not for this system
            return [None] * len(frames)
        return list(decode(frames, torch.device(device), threads=threads))


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor with elements, and after its last byte."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _first(error: Exception) -> str:
    """The first line of a message; PyTorch's go on for pages."""
    return str(error).partition("\n")[0][:200]


def _form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor of PyTorch that holds one of safetensors.

    Raises:
        CompatibilityError: there is none.
    """
    if dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype], shape
    if dtype not in PAIR_DTYPES:
        raise CompatibilityError(
            f"PyTorch {torch.__version__} has no dtype for {dtype}; read the tensor with NumPy, or "
            "its bytes with Frame.decompress_into"
        )
    if not shape or shape[-1] % 2:
        raise CompatibilityError(
            f"{PAIR_DTYPES[dtype]} holds pairs of elements, so the last dimension of {list(shape)} "
            "must be even; read the tensor with NumPy"
        )
    return PAIR_DTYPES[dtype], (*shape[:-1], shape[-1] // 2)


def _bytes_of(tensor: torch.Tensor) -> ByteArray:
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.numel() <= 1:
        # PyTorch calls such a tensor contiguous, whatever its strides are, and view() keeps them.
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    elif tensor.dim() != 1:
        tensor = tensor.view(-1)
    return tensor.view(torch.uint8).numpy()


def _describe(tensor: Any) -> str:
    if isinstance(tensor, torch.Tensor):
        if tensor.layout != torch.strided:
            return f"one of layout {tensor.layout}"
        if tensor.is_nested:
            return "a nested one"
        return f"{type(tensor).__name__} on device {tensor.device}"
    return type(tensor).__name__


FRAMEWORK = TorchFramework()
