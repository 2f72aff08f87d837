"""What a frame says about itself and its tensor, without being decoded."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from packhorse._core import OpenFrame
from packhorse.codecs.base import STATUS_WORDS, ByteArray
from packhorse.codecs.content import content_hash, content_sum
from packhorse.codecs.plan import Plan
from packhorse.errors import CorruptionError
from packhorse.frame.header import (
    FrameHeader,
    PlaneSummary,
    header_of,
    label,
    plane_summaries,
)
from packhorse.layout import DTYPE_BY_CODE, Level, Split

__all__ = ["FrameFacts"]


class FrameFacts:
    """The facts of a `Frame`."""

    __slots__ = (
        "__weakref__",
        "_checked",
        "_memory",
        "_name",
        "_offset",
        "_opened",
        "_plan",
        "_side",
    )

    def __init__(
        self,
        memory: ByteArray | bytes | memoryview,
        opened: OpenFrame,
        name: str | None,
        offset: int,
        plan: Plan | Callable[[FrameHeader], Plan] | None = None,
    ) -> None:
        """Private: use `from_buffer`."""
        self._memory = memory
        self._opened = opened
        self._name = name
        self._offset = offset
        self._plan = plan
        self._checked: FrameHeader | None = None
        self._side: ByteArray | None = None

    @property
    def header(self) -> FrameHeader:
        """The checked header. Its fields are read at first use: most frames are only decoded."""
        if self._checked is None:
            self._checked = header_of(self._opened)
        return self._checked

    @property
    def nbytes(self) -> int:
        """Length of the frame in bytes, a multiple of 64."""
        return self._opened.frame_nbytes

    @property
    def dtype(self) -> str:
        """safetensors' name of the dtype."""
        return DTYPE_BY_CODE[self._opened.dtype_code].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._opened.shape

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def logical_nbytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self._opened.nbytes

    @property
    def content_hash(self) -> bytes:
        """16 bytes that name the tensor's content (docs/format.md, section 7)."""
        return self._opened.content_hash

    @property
    def has_sum(self) -> bool:
        """Whether content hashes, also the base's, are content sums."""
        return self.header.has_sum

    @property
    def base_hash(self) -> bytes | None:
        """Content hash of the base that the frame needs for unpacking; None if it needs none."""
        return self._opened.base_hash

    @property
    def base_dtype(self) -> str | None:
        """safetensors' name of the base's dtype; None if the frame needs no base."""
        if self._opened.base_hash is None or self.header.base is None:
            return None
        return self.header.base.dtype.name

    @property
    def split(self) -> Split:
        """How units were split into planes."""
        return self.header.split

    @property
    def level(self) -> Level | None:
        """The level that the frame was packed at; None if the frame names no known level."""
        level = self.header.level
        return Level(level) if level in Level.__members__.values() else None

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return len(self.header.table)

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of a full chunk."""
        return self._opened.geometry.chunk_nbytes

    @property
    def ratio(self) -> float:
        """Decoded bytes divided by the frame's bytes, header included."""
        return self.logical_nbytes / self.nbytes

    @property
    def plan(self) -> Plan | None:
        """The plan that the frame was packed by; None for a frame that was read."""
        if callable(self._plan):
            self._plan = self._plan(self.header)
        return self._plan

    def digest_of(self, data: ByteArray, threads: int = 1) -> bytes:
        """The content hash of some bytes, of the kind that the frame's content hashes have.

        Args:
            data: the bytes.
            threads: how many to use.

        Returns:
            The hash: 16 bytes.
        """
        return (content_sum if self.has_sum else content_hash)(data, threads=threads)

    def __repr__(self) -> str:
        return f"Frame({self.dtype}, {self.shape}, nbytes={self.nbytes}, ratio={self.ratio:.3f})"

    def to_bytes(self) -> bytes:
        """Copies the frame's bytes."""
        return self.data.tobytes()

    def buffer(self) -> memoryview:
        """Views the frame's bytes, read-only."""
        memory = self._memory if isinstance(self._memory, bytes) else self.data
        return memoryview(memory).toreadonly()

    def planes(self) -> tuple[PlaneSummary, ...]:
        """Sizes and modes of each plane."""
        return plane_summaries(self.header)

    def payload_range(self, start: int, stop: int) -> tuple[int, int]:
        """Finds the bytes of the frame that `decompress_into` reads besides the header, for bytes
        `start` to `stop` of the tensor. They are the bytes of the chunks that the range touches.

        Args:
            start: first byte.
            stop: one past the last byte.

        Returns:
            First byte in the frame, and one past the last.
        """
        if start >= stop:
            return self.header.header_nbytes, self.header.header_nbytes
        if start == 0 and stop == self.logical_nbytes:
            return self.header.header_nbytes, self.nbytes
        offsets = self.header.chunk_offsets()
        first, last = start // self.chunk_nbytes, (stop - 1) // self.chunk_nbytes
        return int(offsets[first]), int(offsets[last + 1])

    @property
    def data(self) -> ByteArray:
        """The frame's bytes, only to be read."""
        if not isinstance(self._memory, np.ndarray):
            self._memory = np.frombuffer(self._memory, np.uint8)
        return self._memory

    @property
    def opened(self) -> OpenFrame:
        """The frame in the form that the core takes."""
        return self._opened

    def chunk_error(self, chunk: int, status: int) -> CorruptionError:
        """The error for a fault that the core found in a chunk.

        Args:
            chunk: the number of the chunk.
            status: the fault, a `layout.Status`.

        Returns:
            The error, which names the tensor, the chunk and its place.
        """
        return self._chunk_error(chunk, STATUS_WORDS[status])

    def _chunk_error(self, chunk: int, words: str) -> CorruptionError:
        return self._error(
            f"chunk {chunk} of {self.n_chunks}: {words}", self.header.chunk_offset(chunk)
        )

    def _error(self, words: str, at: int) -> CorruptionError:
        return CorruptionError(f"{label(self._name)}byte {self._offset + at}: {words}")
