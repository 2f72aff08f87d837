"""A patch: what is written to a base to make it a tensor, checked and decoded beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from packhorse._core import TensorPatch
from packhorse.codecs.base import as_writable_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Patch"]


class Patch(NamedTuple):
    """What `Frame.prepare_patch` returns.

    Attributes:
        changes: the core's form of it.
        content_sum: of the tensor that the base becomes: the base's, as the frame names it, changed
            by what is written: 16 bytes.

    Example:
        >>> import numpy as np
        >>> from packhorse.frame.follow import Follower
        >>> from packhorse.layout import Level
        >>> old, new = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        >>> follower = Follower("F32", (1024,), np.empty_like(old), Level.DEFAULT)
        >>> follower.keep(old)
        >>> new[-1] = 1
        >>> patch = follower.follow(new).prepare_patch(old)
        >>> patch.write(old)
        >>> bool((old == new).all()), patch.nbytes
        (True, 8)
    """

    changes: TensorPatch
    content_sum: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.changes.nbytes

    def write(self, target: Buffer, threads: int = 1) -> None:
        """Makes the base the tensor. It can be done again, with the same result.

        Args:
            target: the base's memory, or a copy of it.
            threads: how many to use.

        Raises:
            TypeError: `target` is not a writable C-contiguous buffer.
            ValueError: it is not as long as the tensor.
        """
        self.changes.write(as_writable_bytes(target, "target"), threads)
