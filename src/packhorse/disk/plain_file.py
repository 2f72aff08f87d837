"""Reading a plain safetensors file, so that callers need not know whether a file is packed.

The header is checked as for any file that Packhorse reads. Whole tensors then come from the
safetensors library: for PyTorch it maps the file and copies nothing, and it has fast ways to
devices. Parts of tensors are copied from the mapped file, so every index works and a part does not
keep the whole in memory. So are tensors of dtypes that the library does not make for a framework,
and tensors of a file that is in memory.

If a file is cut short while PyTorch uses the mapped tensors of the library, the process ends, as
with the library itself. The backend "pread" copies tensors instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from packhorse import _core
from packhorse.disk.safetensors_header import FileHeader, TensorEntry
from packhorse.disk.tensor_table import TensorTable, identity_of
from packhorse.errors import CompatibilityError, CorruptionError, MissingBackendError
from packhorse.frame import Frame
from packhorse.framework import Framework
from packhorse.late_import import import_late
from packhorse.layout import FRAME_MAGIC
from packhorse.storage.strict_json import shown

__all__ = ["BACKENDS", "PlainTable", "check_backend"]

BACKENDS = ("mmap", "pread")  # how the library can read a file
# NumPy has no floats of 8 bits or fewer of its own, and the library makes no others.
_OF_LIBRARY = {
    "np": ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"),
    "pt": (
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32"),
        *("F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    ),
}


def check_backend(backend: str) -> None:
    """Refuse a backend that the safetensors library does not have.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}"
        )


class PlainTable(TensorTable):
    """The tensors of a plain safetensors file that is mapped or in memory."""

    def __init__(
        self,
        header: FileHeader,
        data: memoryview,
        label: str,
        framework: Framework,
        device: Any,
        max_nbytes: int | None,
        *,
        path: str | None = None,
        backend: str = BACKENDS[0],
        mapper: _core.FileMapper | None = None,
    ) -> None:
        """Args:
        header: the checked header of the file.
        data: the bytes of the file.
        label: the name of the file in messages.
        framework: makes the tensors.
        device: where tensors are placed (PyTorch only); None for host memory.
        max_nbytes: the most bytes that one call may make; None for no limit.
        path: the file; None if it is not a local file.
        backend: how the library reads the file, "mmap" or "pread".
        mapper: has mapped `data`; None if `data` is memory of the caller.
        """
        super().__init__(header, label, framework, device, max_nbytes, mapper)
        self._data = data
        _refuse_frames(header, data, label)
        self._library = None if path is None else _open(path, self, backend)

    def identity(self) -> tuple[int, str]:
        """An identity of this file."""
        return identity_of(self.original, self._data)

    def frame(self, name: str) -> Frame:
        """A plain file has no frames.

        Raises:
            ValueError: always.
        """
        self.entry(name)
        raise ValueError(
            f"{self.label}: not a packed file, but a plain safetensors file, which has no frames: "
            "pack it first, or read the tensor with get_tensor"
        )

    def decode(self, name: str, shape: Sequence[int], start: int, stop: int) -> Any:
        """Copy bytes `start` to `stop` of a tensor to a new tensor of this shape, in host
        memory."""
        entry = self.entry(name)
        self.check_limit(name, stop - start)
        first = self.original.data_offset + entry.start
        tensor = self.new_tensor(entry, shape)
        with self.blaming():
            source = np.frombuffer(self._data[first + start : first + stop], np.uint8)
            self.framework.fill(tensor, lambda memory: np.copyto(memory, source))
        return tensor

    def tensor(self, name: str) -> Any:
        """A whole tensor, on its device."""
        entry = self.entry(name)
        self.check_limit(name, entry.nbytes)
        if self._library is None or entry.dtype not in _OF_LIBRARY[self.framework.name]:
            return self.place(self.decode(name, entry.shape, 0, entry.nbytes))
        try:
            return self.place(self._library.get_tensor(name))
        except import_late("safetensors").SafetensorError as error:
            raise CompatibilityError(
                f"{self.label}: the safetensors library refuses tensor {shown(name)}: {error}"
            ) from error

    def tensors(self) -> dict[str, Any]:
        """All tensors on their device, in the order of their data."""
        self.original.check_limit(self.max_nbytes, self.label)
        return {entry.name: self.tensor(entry.name) for entry in self.original.entries}


def _refuse_frames(header: FileHeader, data: memoryview, label: str) -> None:
    """A packed file that has lost its record would be read as tensors of bytes, without an error.

    Raises:
        CorruptionError: all tensors of the file are frames.
    """
    if header.entries and all(_is_frame(entry, header, data) for entry in header.entries):
        raise CorruptionError(
            f"{label}: its tensors are frames, but the file does not record what was packed: it is "
            "a damaged packed file, which must be fetched or packed again, or a pack of a store, "
            "which is read through the store"
        )


def _is_frame(entry: TensorEntry, header: FileHeader, data: memoryview) -> bool:
    if entry.dtype != "U8" or len(entry.shape) != 1:
        return False
    start = header.data_offset + entry.start
    return bytes(data[start : start + len(FRAME_MAGIC)]) == FRAME_MAGIC


def _open(path: str, table: TensorTable, backend: str) -> Any:
    """The file, opened by the safetensors library."""
    try:
        library = import_late("safetensors")
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            f"{table.label}: a plain safetensors file, which the safetensors library reads; "
            "install it with: pip install 'packhorse[safetensors]'"
        ) from error
    options: dict[str, Any] = {}
    if backend != BACKENDS[0]:
        if "backend" not in inspect.signature(library.safe_open).parameters:
            raise MissingBackendError(
                f"{table.label}: backend {backend!r} needs safetensors 0.8 or later; install that, "
                "or leave the argument out"
            )
        options["backend"] = backend
    try:
        return library.safe_open(path, table.framework.name, _device(table.device), **options)
    except library.SafetensorError as error:
        raise CompatibilityError(
            f"{table.label}: the safetensors library refuses the file: {error}"
        ) from error


def _device(device: Any) -> str | int:
    """The device as the library takes it; PyTorch moves tensors to other devices later."""
    if device is None or str(device).partition(":")[0] in ("cpu", "meta"):
        return "cpu"
    return device if isinstance(device, int) else str(device)
