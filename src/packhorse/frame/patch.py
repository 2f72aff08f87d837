"""A patch: what is written to a base to make it a tensor, checked and decoded beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packhorse._core import TensorPatch
from packhorse.codecs.base import ByteArray, as_writable_bytes
from packhorse.frame.header import FrameHeader, label

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Patch", "check_target"]


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


def check_target(
    header: FrameHeader, frame: ByteArray, target: ByteArray, name: str | None
) -> None:
    """Checks that a target of `Frame.patch_into` can hold the tensor.

    Args:
        header: the frame's header.
        frame: the bytes of the frame.
        target: the target.
        name: the tensor's name, for messages.

    Raises:
        ValueError: it cannot, or it shares memory with the frame.
    """
    if header.base is not None and header.base.dtype != header.dtype:
        raise ValueError(
            f"{label(name)}a frame of {header.dtype.name} whose base is {header.base.dtype.name} "
            "cannot be patched in place; use decompress_into"
        )
    if target.size != header.nbytes:
        raise ValueError(f"{label(name)}target has {target.size} bytes, the tensor {header.nbytes}")
    if np.may_share_memory(target, frame):
        raise ValueError(f"{label(name)}target and the frame share memory; copy the frame")
