"""Finding the frames of a packed file, and checking that each is what the file says it is.

Shared by whole-file work (`container.py`), which maps one frame at a time and decodes it window by
window, and by lazy reading (`packed_file.py`), which maps the file once. Messages give names cut
to a length for people (`strict_json.py`), so frames are told the short ones.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.header import TensorEntry
from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.strict_json import shortened, shown
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.frame import Frame

__all__ = ["WindowDecoder", "blaming", "check_frame", "map_region", "open_frame"]


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
    frame = Frame.from_buffer(data, name=shortened(original.name), offset=offset)
    check_frame(frame, original, offset)
    return frame


def check_frame(frame: Frame, original: TensorEntry, offset: int) -> None:
    """Check that a frame holds the tensor that was recorded.

    Raises:
        CorruptionError: it has another dtype or shape.
    """
    if (frame.dtype, frame.shape) != (original.dtype, original.shape):
        raise CorruptionError(
            f"tensor {shown(original.name)} at byte {offset}: the frame holds {frame.dtype} of "
            f"shape {list(frame.shape)}, and the recorded header says {original.dtype} of shape "
            f"{list(original.shape)}"
        )


class WindowDecoder:
    """Decodes frames window by window, so that a tensor of any size takes the same memory."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._window = np.empty(0, np.uint8)

    def pieces(self, frame: Frame) -> Iterator[ByteArray]:
        """As `Frame.pieces`, in memory that serves the next frame again.

        Raises:
            CorruptionError: the frame is bad; told after all pieces if only the hash is.
        """
        if self._window.size < frame.window_nbytes:
            self._window = np.empty(frame.window_nbytes, np.uint8)
        return frame.pieces(threads=self._threads, window=self._window)
