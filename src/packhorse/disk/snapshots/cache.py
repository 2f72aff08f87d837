"""The tensors of the newest snapshot, kept in memory as bases for the next one.

Without them a base is decoded along its whole chain. The memory is bounded, and that of a tensor
which is not needed any more serves for the next of its size.
"""

from __future__ import annotations

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.codecs.content import copy_with_hash
from packhorse.disk.snapshots.manifest import Content

__all__ = ["BaseCache"]


class BaseCache:
    """Copies of tensors by content; the oldest go first. One thread puts, several may get."""

    def __init__(self, max_nbytes: int) -> None:
        """Args:
        max_nbytes: of all copies together; 0 keeps none.
        """
        self._max_nbytes = max_nbytes
        self._kept: dict[Content, ByteArray] = {}
        self._nbytes = 0

    def get(self, content: Content) -> ByteArray | None:
        """The bytes of a tensor, not to be written to; None if they are not kept."""
        return self._kept.get(content)

    def put(self, content: Content, data: ByteArray) -> None:
        """Keep a copy of a tensor's bytes as the newest, unless they are no longer what the content
        says: another thread may write to them."""
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
        """Let all memory go."""
        self._kept.clear()
        self._nbytes = 0
