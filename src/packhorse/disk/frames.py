"""Finding the frames of a packed file, and checking that each is what the file says it is.

Shared by whole-file work (`container.py`), which maps one frame at a time, and by lazy reading
(`packed_file.py`), which maps the file once.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np

from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.content import empty_leaves, hash_leaves, hash_root
from packhorse.disk.header import TensorEntry
from packhorse.disk.packed_header import PackedHeader
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.frame import Frame

__all__ = ["ContentHasher", "blaming", "check_frame", "map_region", "open_frame"]


@contextmanager
def map_region(file: BinaryIO, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Map a part of a file for reading, and drop it again.

    Args:
        file: an open file with a descriptor.
        offset: first byte.
        nbytes: how many; the file must have them.

    Yields:
        The bytes, read-only.
    """
    if nbytes == 0:  # the system maps no empty region
        yield memoryview(b"")
        return
    skip = offset % mmap.ALLOCATIONGRANULARITY
    region = mmap.mmap(file.fileno(), skip + nbytes, access=mmap.ACCESS_READ, offset=offset - skip)
    view = memoryview(region)[skip:]
    try:
        yield view
    finally:
        # Whoever still looks at the bytes keeps the mapping alive, and its last view ends it.
        with suppress(BufferError):
            view.release()
            region.close()


@contextmanager
def blaming(label: str) -> Iterator[None]:
    """Put the file's name before the messages of errors about its data."""
    try:
        yield
    except (CorruptionError, CompatibilityError) as error:
        raise type(error)(f"{label}: {error}") from error


def open_frame(data: memoryview, packed: PackedHeader, original: TensorEntry) -> Frame:
    """Read a frame's header and check it against the recorded one.

    Args:
        data: the bytes of the frame.
        packed: the header of the file it lies in.
        original: the tensor as recorded.

    Returns:
        The frame; it looks at `data` and holds no copy.

    Raises:
        CorruptionError, CompatibilityError: the frame is bad or belongs to another tensor.
    """
    offset = packed.frame_offset(original.name)
    frame = Frame.from_buffer(data, name=original.name, offset=offset)
    check_frame(frame, original, offset)
    return frame


def check_frame(frame: Frame, original: TensorEntry, offset: int) -> None:
    """Check that a frame holds the tensor that was recorded.

    Raises:
        CorruptionError: it has another dtype or shape.
    """
    if (frame.dtype, frame.shape) != (original.dtype, original.shape):
        raise CorruptionError(
            f"tensor {original.name!r} at byte {offset}: the frame holds {frame.dtype} of shape "
            f"{list(frame.shape)}, and the recorded header says {original.dtype} of shape "
            f"{list(original.shape)}"
        )


class ContentHasher:
    """The content hash (docs/format.md, section 7) of a tensor that comes in pieces."""

    def __init__(self) -> None:
        self._leaves: list[ByteArray] = []

    def update(self, piece: memoryview, threads: int = 1) -> None:
        """Take the next bytes: whole leaves, but for the last piece."""
        self._leaves.append(hash_leaves(as_bytes(piece), threads))

    def check(self, frame: Frame, name: str, offset: int) -> None:
        """Compare with the hash in the frame.

        Raises:
            CorruptionError: they differ.
        """
        digest = hash_root(np.concatenate([empty_leaves(0), *self._leaves]))
        if digest != frame.content_hash:
            raise CorruptionError(
                f"tensor {name!r} at byte {offset}: the content hash of the decoded bytes is "
                f"{digest.hex()}, and the frame says {frame.content_hash.hex()}"
            )
