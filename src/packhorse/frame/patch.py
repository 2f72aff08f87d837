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
        content_hash: of the tensor that the base becomes, as computed from what is written and from
            the rest of the base: 16 bytes.

    Example:
        >>> from packhorse.frame import compress_buffer
        >>> old, new = bytes(4096), bytes(4095) + b"\\1"
        >>> patch = compress_buffer(new, "F32", (1024,), base=old).prepare_patch(old)
        >>> target = bytearray(old)
        >>> patch.write(target)
        >>> target == new, patch.nbytes
        (True, 8)
    """

    changes: TensorPatch
    content_hash: bytes

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
