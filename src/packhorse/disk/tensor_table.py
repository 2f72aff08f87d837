"""What tables of tensors share: a table finds the tensors of one file by name and makes them.

`packed_file.py` has the table of a packed file, whose tensors are decoded, and `plain_file.py` that
of a plain safetensors file. `PackedFile` reads from either, so it does not need to know which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from packhorse import _core
from packhorse.codecs.content import content_hash
from packhorse.disk.safetensors_header import FileHeader, TensorEntry
from packhorse.errors import CorruptionError, TruncationError, blaming
from packhorse.framework import Framework
from packhorse.layout import FIXED_HEADER_NBYTES
from packhorse.storage.opening import LOST
from packhorse.storage.strict_json import shown

__all__ = ["TensorTable", "identity_of"]

_N_TOLD = 256  # tensors that the file's identity covers: reading a million would take too long


class TensorTable:
    """The tensors of a file that is mapped or in memory.

    Attributes:
        original: the header that describes the tensors as callers see them.
        label: the name of the file in messages.
        framework: makes the tensors.
        device: where tensors are placed (PyTorch only); None for host memory.
        max_nbytes: the most bytes that one call may make; None for no limit.
    """

    base_name: str | None = None

    def __init__(
        self,
        original: FileHeader,
        label: str,
        framework: Framework,
        device: Any,
        max_nbytes: int | None,
        mapper: _core.FileMapper | None,
    ) -> None:
        self.original = original
        self.label = label
        self.framework = framework
        self.device = device
        self.max_nbytes = max_nbytes
        self._mapper = mapper
        self.entries = {entry.name: entry for entry in original.entries}

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Makes errors name the file. If a part of the file is lost, everything that was read is
        worthless, so the error reports the loss."""
        try:
            with blaming(self.label):
                yield
        finally:
            if self._mapper is not None and self._mapper.has_lost:
                raise TruncationError(f"{self.label}: {LOST}; open it again when it is whole")

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

    def place(self, tensor: Any) -> Any:
        """Move a tensor that was made in host memory to the device."""
        is_torch = self.framework.name == "pt"
        return tensor.to(self.device) if is_torch and self.device is not None else tensor


def identity_of(header: FileHeader, data: memoryview) -> tuple[int, str]:
    """An identity of a file: its size, and a hash of its header and of the first bytes of up to
    `_N_TOLD` tensors. In a packed file, these are the headers of frames, which name their content.

    Args:
        header: the header of the file itself.
        data: the bytes of the file.
    """
    hashed = b"".join([header.prefix(), *_starts(header, data)])
    return header.file_nbytes, content_hash(np.frombuffer(hashed, np.uint8), threads=1).hex()


def _starts(header: FileHeader, data: memoryview) -> Iterable[memoryview]:
    n = len(header.entries)
    chosen = {i * (n - 1) // (_N_TOLD - 1) for i in range(_N_TOLD)} if n else set()
    for entry in (header.entries[i] for i in sorted(chosen)):
        start = header.data_offset + entry.start
        yield data[start : start + min(FIXED_HEADER_NBYTES, entry.nbytes)]
