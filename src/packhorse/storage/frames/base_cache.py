"""The tensors that were packed most recently, kept in memory as bases for the next ones.

Without this cache, every base is decoded along its whole chain. The cache takes a bounded amount of
memory, and reuses the memory of a dropped tensor for the next one of the same size.
"""

from __future__ import annotations

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import copy_with_hash
from packhorse.storage.frames.refs import Content

__all__ = ["BaseCache"]


class BaseCache:
    """Copies of tensors, found by content. The oldest are dropped first. One thread may call `put`
    while several call `get`."""

    def __init__(self, max_nbytes: int) -> None:
        """Args:
        max_nbytes: how many bytes all copies together may take; 0 keeps none.
        """
        self._max_nbytes = max_nbytes
        self._kept: dict[Content, ByteArray] = {}
        self._nbytes = 0

    def get(self, content: Content) -> ByteArray | None:
        """The bytes of a tensor, which must not be written to; None if they are not kept."""
        return self._kept.get(content)

    def put(self, content: Content, data: ByteArray) -> None:
        """Keep a copy of a tensor's bytes as the newest. Bytes that another thread has changed, so
        that they no longer match the content, are not kept."""
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
