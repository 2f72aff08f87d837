"""Tensors that were packed last, kept in memory as bases for the next ones.

Without the cache a base is decoded along its whole chain. Its memory is bounded, and the memory of
a tensor that is dropped serves for the next one of the same size.
"""

from __future__ import annotations

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import copy_with_hash
from packhorse.storage.frames.refs import Content

__all__ = ["BaseCache"]


class BaseCache:
    """Copies of tensors by content. The oldest are dropped first. One thread may put while several
    get."""

    def __init__(self, max_nbytes: int) -> None:
        """Args:
        max_nbytes: of all copies together; 0 keeps none.
        """
        self._max_nbytes = max_nbytes
        self._kept: dict[Content, ByteArray] = {}
        self._nbytes = 0

    def get(self, content: Content) -> ByteArray | None:
        """The bytes of a tensor, which must not be written to; None if they are not kept."""
        return self._kept.get(content)

    def put(self, content: Content, data: ByteArray) -> None:
        """Keep a copy of a tensor's bytes as the newest, unless another thread has changed them, so
        that they no longer match the content."""
        known = self._kept.pop(content, None)
        if known is not None:
            self._kept[content] = known
            return
        if data.size > self._max_nbytes:
            return
        memory: ByteArray | None = None
        while self._nbytes + data.size > self._max_nbytes:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._nbytes -= oldest.size
            memory = oldest if oldest.size == data.size else memory
        memory = np.empty(data.size, np.uint8) if memory is None else memory
        if copy_with_hash(data, memory) != content[0]:
            return
        self._kept[content] = memory
        self._nbytes += data.size

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()
        self._nbytes = 0
