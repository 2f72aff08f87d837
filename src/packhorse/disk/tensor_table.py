"""What tables of tensors share: a table finds the tensors of one file by name and makes them.

`frame_table.py` has the table of a packed file, whose tensors are decoded, and `plain_file.py` that
of a plain safetensors file. `PackedFile` reads from either, so it does not need to know which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from packhorse.disk.lazy_bytes import LazyBytes
from packhorse.errors import CorruptionError, blaming
from packhorse.framework import Framework, new_tensors
from packhorse.storage.safetensors_header import FileHeader, TensorEntry
from packhorse.storage.strict_json import shown

__all__ = ["TensorTable"]


class TensorTable:
    """The tensors of a file that is mapped, in memory or at a URL.

    Attributes:
        content: the bytes of the file.
        original: the header that describes the tensors as callers see them.
        label: the name of the file in messages.
        framework: makes the tensors.
        device: where tensors are placed (PyTorch only); None for host memory.
        is_on_host: whether that is host memory.
        max_nbytes: the most bytes that one call may make; None for no limit.
    """

    base_name: str | None = None

    def __init__(
        self,
        content: LazyBytes,
        original: FileHeader,
        label: str,
        framework: Framework,
        device: Any,
        max_nbytes: int | None,
    ) -> None:
        self.content = content
        self.original = original
        self.label = label
        self.framework = framework
        self.device = device
        self.is_on_host = device is None or str(device) == "cpu"
        self.max_nbytes = max_nbytes
        self.entries = {entry.name: entry for entry in original.entries}

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Makes errors name the file. If a part of the file is lost, or the file was replaced, what
        was read is worthless, so the error reports that."""
        has_failed = True
        try:
            with blaming(self.label):
                yield
            has_failed = False
        finally:
            self.content.settle(has_failed=has_failed)

    def entry(self, name: str) -> TensorEntry:
        """The tensor's entry in the header."""
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a string, not {name!r}")
        if name not in self.entries:
            raise ValueError(
                f"{self.label}: no tensor is named {name!r}; keys() lists all "
                f"{len(self.entries)} names"
            )
        return self.entries[name]

    def check_limit(self, name: str, nbytes: int) -> None:
        """Refuse to make more bytes of a tensor than the caller allows.

        Raises:
            CorruptionError: it would be more.
        """
        if self.max_nbytes is not None and nbytes > self.max_nbytes:
            raise CorruptionError(
                f"{self.label}: tensor {shown(name)}: {nbytes} bytes would be decoded, more than "
                f"max_nbytes = {self.max_nbytes}; read slices, or allow more"
            )

    def new_tensor(self, entry: TensorEntry, shape: Sequence[int]) -> Any:
        """A tensor of this shape for elements of another tensor, in host memory.

        Raises:
            CompatibilityError: the framework has no such tensor.
        """
        with blaming(self.label), blaming(f"tensor {shown(entry.name)}"):
            return self.framework.empty(entry.dtype, tuple(shape))

    def new_tensors(self, entries: Sequence[TensorEntry]) -> list[Any]:
        """A tensor for each of these tensors, in host memory.

        Raises:
            CompatibilityError: the framework has no such tensor.
        """
        return new_tensors(
            self.framework,
            [(entry.dtype, entry.shape) for entry in entries],
            lambda i: f"{self.label}: tensor {shown(entries[i].name)}",
        )

    def place(self, tensor: Any) -> Any:
        """Move a tensor that was made in host memory to the device."""
        return tensor if self.is_on_host else tensor.to(self.device)
