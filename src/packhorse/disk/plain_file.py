"""Reading a plain safetensors file, so that callers need not know whether a file is packed.

The header is checked as for any file that Packhorse reads. Whole tensors then come from the
safetensors library: for PyTorch it maps the file and copies nothing, and it has fast ways to
devices. Parts of tensors are copied from the mapped file, so every index works and a part does not
keep the whole in memory. So are tensors of dtypes that the library does not make for a framework,
and tensors of a file that is in memory or at a URL.

If a file is cut short while PyTorch uses the mapped tensors of the library, the process ends, as
with the library itself. The backend "pread" copies tensors instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.lazy_bytes import LazyBytes
from packhorse.disk.tensor_table import TensorTable
from packhorse.errors import CompatibilityError, CorruptionError, MissingBackendError
from packhorse.frame import Frame
from packhorse.framework import Framework
from packhorse.late_import import import_late
from packhorse.layout import FRAME_MAGIC
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.strict_json import shown
from packhorse.threads import batches

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
    """The tensors of a plain safetensors file."""

    def __init__(
        self,
        header: FileHeader,
        content: LazyBytes,
        label: str,
        framework: Framework,
        device: Any,
        max_nbytes: int | None,
        *,
        path: str | None = None,
        backend: str = BACKENDS[0],
    ) -> None:
        """Args:
        header: the checked header of the file.
        content: the bytes of the file.
        label: the name of the file in messages.
        framework: makes the tensors.
        device: where tensors are placed (PyTorch only); None for host memory.
        max_nbytes: the most bytes that one call may make; None for no limit.
        path: the file; None if it is not a local file.
        backend: how the library reads the file, "mmap" or "pread".
        """
        super().__init__(content, header, label, framework, device, max_nbytes)
        with self.blaming():
            has_frames = _has_frames(header, content)
        if has_frames:
            raise CorruptionError(
                f"{label}: its tensors are frames, but the file does not record what was packed: "
                "it is a damaged packed file, which must be fetched or packed again, or a pack of "
                "a store, which is read through the store"
            )
        self._library = None if path is None else _open(path, self, backend)

    def identity(self) -> tuple[int, str]:
        """An identity of this file."""
        return self.content.identity(self.original)

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

    def outlines(self) -> Iterator[tuple[str, Frame]]:
        """A plain file has no frames.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.label}: not a packed file, but a plain safetensors file")

    def decode(self, name: str, shape: Sequence[int], start: int, stop: int) -> Any:
        """Copy bytes `start` to `stop` of a tensor to a new tensor of this shape, in host
        memory."""
        entry = self.entry(name)
        self.check_limit(name, stop - start)
        first = self.original.data_offset + entry.start
        tensor = self.new_tensor(entry, shape)
        with self.blaming():
            self.framework.fill(tensor, lambda memory: self.content.fill([(memory, first + start)]))
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
        entries, tensors = self.original.entries, {}
        for run in batches([entry.nbytes for entry in entries]):
            tensors.update(self._tensors(entries[run.start : run.stop]))
        return tensors

    def _tensors(self, entries: Sequence[TensorEntry]) -> dict[str, Any]:
        """Some tensors. Those that the library does not read are read together."""
        if self._library is not None or len(entries) == 1:
            return {entry.name: self.tensor(entry.name) for entry in entries}
        parts = [np.empty(entry.nbytes, np.uint8) for entry in entries]
        starts = [self.original.data_offset + entry.start for entry in entries]
        with self.blaming():
            self.content.fill(list(zip(parts, starts, strict=True)))
        return {e.name: self._made(e, part) for e, part in zip(entries, parts, strict=True)}

    def _made(self, entry: TensorEntry, data: ByteArray) -> Any:
        tensor = self.new_tensor(entry, entry.shape)
        self.framework.fill(tensor, lambda memory: np.copyto(memory, data))
        return self.place(tensor)


def _has_frames(header: FileHeader, content: LazyBytes) -> bool:
    """Whether all tensors of a file are frames. A packed file that has lost its record would be
    read as tensors of bytes, without an error."""
    entries = header.entries
    if not entries or not all(_may_be_frame(entry) for entry in entries):
        return False
    starts = [np.empty(len(FRAME_MAGIC), np.uint8) for _ in entries]
    places = [header.data_offset + entry.start for entry in entries]
    content.fill(list(zip(starts, places, strict=True)))
    return all(start.tobytes() == FRAME_MAGIC for start in starts)


def _may_be_frame(entry: TensorEntry) -> bool:
    is_bytes = entry.dtype == "U8" and len(entry.shape) == 1
    return is_bytes and entry.nbytes >= len(FRAME_MAGIC)


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
