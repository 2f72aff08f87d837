"""Opens the frames of a packed file, and checks each against the file's header.

`unpack.py` uses this for whole files, frame by frame, and decodes to memory that it reuses;
`packed_file.py` uses it for lazy reading, where the file is mapped once or read in ranges. Frames
get the tensors' names for their messages, shortened (`strict_json.py`).

The outline of a frame is a frame whose payload may be zeros: of a file at a URL, only the headers
of frames are read, those of many frames at once.
"""

from collections.abc import Sequence
from typing import Protocol

from packhorse.codecs.base import ByteArray
from packhorse.disk.packed_header import PackedHeader
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.frame.plan import max_header_nbytes
from packhorse.layout import CRITICAL_FLAGS_OFFSET, FIXED_HEADER, FIXED_HEADER_NBYTES, FLAG_BASE
from packhorse.storage.safetensors_header import TensorEntry
from packhorse.storage.source_file import Source
from packhorse.storage.strict_json import shortened, shown

__all__ = ["Sketches", "based_entries", "check_frame", "open_frame", "peek_nbytes", "sketch_frames"]

_PEEK_NBYTES = 1 << 16  # a shorter frame is read as a whole


class Sketches(Protocol):
    """A file whose bytes are requested part by part; see `storage.interface.Object`."""

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Memory for some bytes of the file."""

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read the bytes of parts of sketches."""


def sketch_frames(
    file: Sketches, packed: PackedHeader, entries: Sequence[TensorEntry]
) -> list[ByteArray]:
    """Memory for frames, with the bytes of their headers.

    Args:
        file: the file.
        packed: its header.
        entries: the tensors, as the recorded header describes them.
    """
    places = [(packed.frame_offset(e.name), packed.frames[e.name].nbytes) for e in entries]
    sketches = [file.sketch(offset, nbytes) for offset, nbytes in places]
    peeked = [peek_nbytes(entry) for entry in entries]
    frames = list(zip(sketches, places, peeked, strict=True))
    file.fill([(sketch[:nbytes], place[0]) for sketch, place, nbytes in frames])
    file.fill([  # other encoders may make longer headers
        (sketch[nbytes : _declared(sketch)], place[0] + nbytes)
        for sketch, place, nbytes in frames
        if nbytes < _declared(sketch) <= sketch.size
    ])  # fmt: skip
    return sketches


def peek_nbytes(entry: TensorEntry) -> int:
    """How many bytes of a frame are read first: a small frame, or the header of a large one."""
    return max(_PEEK_NBYTES, max_header_nbytes(entry.dtype, entry.shape))


def _declared(frame: ByteArray) -> int:
    """How long the header of a frame claims to be; 0 if the frame is too short to say so."""
    if frame.size < FIXED_HEADER_NBYTES:
        return 0
    nbytes: int = FIXED_HEADER.unpack(frame[:FIXED_HEADER_NBYTES].tobytes())[8]
    return nbytes


def based_entries(file: Source, packed: PackedHeader) -> list[TensorEntry]:
    """The tensors whose frames need a base, according to one byte of each frame."""
    at = packed.packed.data_offset + CRITICAL_FLAGS_OFFSET
    entries, offsets = [], []
    for entry in packed.original.entries:
        frame = packed.frames[entry.name]
        if frame.nbytes > CRITICAL_FLAGS_OFFSET:
            entries.append(entry)
            offsets.append(at + frame.start)
    flags = file.bytes_at(offsets)
    return [entry for entry, flag in zip(entries, flags, strict=True) if flag & FLAG_BASE]


def open_frame(data: memoryview | ByteArray, packed: PackedHeader, original: TensorEntry) -> Frame:
    """Read a frame's header and check it against the recorded one.

    Args:
        data: the bytes of the frame.
        packed: the header of its file.
        original: the tensor as the recorded header describes it.

    Returns:
        The frame; it refers to `data` without a copy.

    Raises:
        CorruptionError, CompatibilityError: the frame is bad or belongs to another tensor.
    """
    offset = packed.frame_offset(original.name)
    frame = Frame.from_buffer(data, name=shortened(original.name), offset=offset)
    check_frame(frame, original, offset)
    return frame


def check_frame(frame: Frame, original: TensorEntry, offset: int) -> None:
    """Check that a frame holds the tensor that the recorded header describes.

    Raises:
        CorruptionError: the frame has another dtype or shape.
    """
    if (frame.dtype, frame.shape) != (original.dtype, original.shape):
        raise CorruptionError(
            f"tensor {shown(original.name)} at byte {offset}: the frame holds {frame.dtype} of "
            f"shape {list(frame.shape)}, but the recorded header says {original.dtype} of shape "
            f"{list(original.shape)}"
        )
