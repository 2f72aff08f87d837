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
from packhorse.codecs.content import empty_leaves, hash_leaves, hash_root
from packhorse.disk.header import TensorEntry
from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.strict_json import shortened, shown
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.frame import Frame

__all__ = ["WindowDecoder", "blaming", "check_frame", "map_region", "open_frame"]

# Decoded at once by whole-file work: many chunks for every thread, whole chunks and hash leaves.
_WINDOW_NBYTES = 1 << 25


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
        self._scratch = np.empty(0, np.uint8)

    def pieces(self, frame: Frame, name: str, offset: int) -> Iterator[memoryview]:
        """Decode a frame and, at its end, compare the content hash (docs/format.md, section 7).

        Args:
            frame: what to decode.
            name: of the tensor, for messages.
            offset: where the frame lies in its file, for messages.

        Yields:
            The next bytes of the tensor, each valid until the next is asked for.

        Raises:
            CorruptionError: the frame is bad; told after all pieces if only the hash is.
        """
        if self._scratch.size < min(frame.logical_nbytes, _WINDOW_NBYTES):
            self._scratch = np.empty(min(frame.logical_nbytes, _WINDOW_NBYTES), np.uint8)
        leaves: list[ByteArray] = [empty_leaves(0)]
        for start in range(0, frame.logical_nbytes, _WINDOW_NBYTES):
            stop = min(start + _WINDOW_NBYTES, frame.logical_nbytes)
            piece = self._scratch[: stop - start]
            frame.decompress_into(piece, start=start, stop=stop, threads=self._threads)
            leaves.append(hash_leaves(piece, self._threads))
            yield memoryview(piece)
        digest = hash_root(np.concatenate(leaves))
        if digest != frame.content_hash:
            raise CorruptionError(
                f"tensor {shown(name)} at byte {offset}: the content hash of the decoded bytes is "
                f"{digest.hex()}, and the frame says {frame.content_hash.hex()}"
            )
