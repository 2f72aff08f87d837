"""Opens the frames of a packed file, and checks each against the file's header.

`container.py` uses this for whole files, frame by frame, and decodes to memory that it reuses;
`packed_file.py` uses it for lazy reading, where the file is mapped once. Frames get the tensors'
names for their messages, shortened (`strict_json.py`).
"""

from packhorse.disk.packed_header import PackedHeader
from packhorse.disk.safetensors_header import TensorEntry
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.storage.strict_json import shortened, shown

__all__ = ["check_frame", "open_frame"]


def open_frame(data: memoryview, packed: PackedHeader, original: TensorEntry) -> Frame:
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
