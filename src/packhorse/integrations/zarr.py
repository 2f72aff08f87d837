"""Packhorse for zarr: the codec `packhorse` of format 3, from arrays to bytes (docs/arrays.md).

A chunk of the array becomes one frame. The frame has chunks of its own, so a slice of a large chunk
of the array reads and decodes only a part of it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packhorse.disk.slices import Box, cut_index
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.integrations.elements import (
    bytes_of,
    dtype_text,
    elements_of,
    level_text,
)
from packhorse.layout import FIXED_HEADER, Level

try:
    from zarr.abc.codec import ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin
    from zarr.abc.store import RangeByteRequest
    from zarr.registry import register_codec
    from zarr.storage import StorePath

    import packhorse.zarr_dtypes  # noqa: F401 - teaches zarr the dtypes of ml_dtypes
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "zarr":
        raise
    raise MissingBackendError(
        "packhorse.zarr needs zarr; install it with: pip install 'packhorse[zarr]'"
    ) from None

if TYPE_CHECKING:
    from zarr.abc.store import ByteGetter
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer

__all__ = ["PackhorseCodec"]

_NAME = "packhorse"
# A smaller chunk is read whole: a second request would take longer than the bytes it saves.
_MIN_PARTIAL_NBYTES = 1 << 22
_HEAD_NBYTES = 1 << 16  # holds the headers of nearly all frames


class _Layout(NamedTuple):
    """How a chunk of an array lies in its frame.

    Attributes:
        array: the dtype that zarr works with.
        stored: the same dtype, in the byte order of frames.
        name: the dtype of the frame.
        shape: the dimensions of the frame.
        nbytes: bytes of the chunk.
    """

    array: np.dtype[Any]
    stored: np.dtype[Any]
    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PackhorseCodec(ArrayBytesCodec, ArrayBytesCodecPartialDecodeMixin):
    """Packs the chunks of an array without loss. It takes the place of the serializer and of the
    compressors.

    Attributes:
        level: "fast", "default" or "max".
        dtype: what the elements stand for; None for the dtype of the array.

    Example:
        >>> import numpy as np, zarr
        >>> from packhorse.zarr import PackhorseCodec
        >>> array = zarr.create_array(
        ...     "weights.zarr", shape=(512, 64), chunks=(256, 64), dtype="float32",
        ...     serializer=PackhorseCodec(), compressors=None,
        ... )
        >>> array[:] = np.ones((512, 64), np.float32)
        >>> zarr.open_array("weights.zarr")[300:302, 5]
        array([1., 1.], dtype=float32)
    """

    is_fixed_size = False

    level: str
    dtype: str | None

    def __init__(self, *, level: Level | str | int = "default", dtype: Any = None) -> None:
        """The arguments are kept as text, because zarr writes them to the array's metadata.

        Args:
            level: "fast", "default" or "max".
            dtype: what the elements stand for, if zarr has no such dtype: "bfloat16" for an array
                of uint16, for example, or "float8_e4m3fn" for one of uint8. The array keeps its
                dtype. None for the dtype of the array.

        Raises:
            ValueError: there is no such level.
            TypeError: there is no such dtype, or it is not a number.
        """
        object.__setattr__(self, "level", level_text(level))
        object.__setattr__(self, "dtype", dtype_text(dtype))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PackhorseCodec:
        """Makes the codec that an array's metadata describes."""
        return cls(**data.get("configuration", {}))

    def to_dict(self) -> dict[str, Any]:
        """The codec as an entry of an array's metadata."""
        dtype = {} if self.dtype is None else {"dtype": self.dtype}
        return {"name": _NAME, "configuration": {"level": self.level, **dtype}}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """The size is not known before the data is packed.

        Raises:
            NotImplementedError: always; zarr asks only codecs of a fixed size.
        """
        raise NotImplementedError("the size of a packed chunk depends on its data")

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    def _encode_sync(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        layout = self._layout_of(chunk_spec)
        array = chunk_data.as_numpy_array()
        # Not the array's dtype: filters such as numcodecs' BitRound hand over the bits as integers.
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        frame = compress_buffer(bytes_of(data), layout.name, layout.shape, level=self.level)
        return chunk_spec.prototype.buffer.from_bytes(frame.to_bytes())

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        layout = self._layout_of(chunk_spec)
        frame = _open(chunk_data.as_numpy_array(), layout)
        array = _decode_box(frame, cut_index(..., chunk_spec.shape), layout)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(array)

    async def _decode_partial_single(
        self, byte_getter: ByteGetter, selection: Any, chunk_spec: ArraySpec
    ) -> NDBuffer | None:
        layout, box = self._layout_of(chunk_spec), cut_index(selection, chunk_spec.shape)
        frame = None
        is_small = 2 * math.prod(box.shape) < math.prod(chunk_spec.shape)
        # Only a store reads ranges faster than all; a chunk of a shard is in memory already.
        if is_small and layout.nbytes >= _MIN_PARTIAL_NBYTES and isinstance(byte_getter, StorePath):
            frame = await _fetch_part(byte_getter, box, layout, chunk_spec)
        if frame is None:
            data = await byte_getter.get(prototype=chunk_spec.prototype)
            if data is None:
                return None
            frame = _open(data.as_numpy_array(), layout)
        array = await asyncio.to_thread(_decode_box, frame, box, layout)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(array[box.inner])

    def _layout_of(self, chunk_spec: ArraySpec) -> _Layout:
        array = chunk_spec.dtype.to_native_dtype()
        meant = array if self.dtype is None else np.dtype(self.dtype)
        if meant.itemsize != array.itemsize:
            raise ValueError(
                f"dtype={self.dtype!r} of the codec has {meant.itemsize} bytes; the elements of "
                f"the array have {array.itemsize} ({array})"
            )
        elements = elements_of(meant.newbyteorder("<"))
        shape = (*chunk_spec.shape, *elements.shape)
        nbytes = math.prod(chunk_spec.shape) * array.itemsize
        return _Layout(array, array.newbyteorder("<"), elements.dtype, shape, nbytes)


def _open(data: np.ndarray[Any, Any], layout: _Layout) -> Frame:
    """Reads the header of a frame, and checks that it holds the chunk."""
    frame = Frame.from_buffer(data)
    if (frame.dtype, frame.shape) != (layout.name, layout.shape):
        raise CorruptionError(
            f"the frame holds {frame.dtype} of shape {list(frame.shape)}, but the array's metadata "
            f"say {layout.name} of shape {list(layout.shape)}"
        )
    return frame


def _decode_box(frame: Frame, box: Box, layout: _Layout) -> np.ndarray[Any, Any]:
    """Decodes consecutive elements of a chunk."""
    array = np.empty(box.shape, layout.stored)
    start = box.start * layout.stored.itemsize
    frame.decompress_into(bytes_of(array), start=start, stop=start + array.nbytes)
    return array.astype(layout.array, copy=False)


async def _fetch_part(
    store: StorePath, box: Box, layout: _Layout, chunk_spec: ArraySpec
) -> Frame | None:
    """Reads the header of a frame and the bytes that a box needs. All others are zeros, which take
    no memory until they are touched.

    Returns:
        The frame; None if it is missing, cut off or odd. Reading all of it then says so.
    """
    head = await _read(store, chunk_spec, 0, _HEAD_NBYTES)
    if head.size < _HEAD_NBYTES:
        return None
    header_nbytes, frame_nbytes = FIXED_HEADER.unpack_from(head)[8:10]
    if not header_nbytes <= frame_nbytes <= max_frame_nbytes(layout.name, layout.shape):
        return None
    whole = np.zeros(max(frame_nbytes, head.size), np.uint8)
    whole[: head.size] = head

    async def fill(start: int, stop: int) -> bool:
        """Reads what is still missing up to a byte."""
        start = max(start, head.size)
        if start >= stop:
            return True
        data = await _read(store, chunk_spec, start, stop)
        whole[start : start + data.size] = data
        return data.size == stop - start

    if not await fill(0, header_nbytes):
        return None
    frame = _open(whole, layout)
    at = box.start * layout.array.itemsize
    nbytes = math.prod(box.shape) * layout.array.itemsize
    return frame if await fill(*frame.payload_range(at, at + nbytes)) else None


async def _read(
    store: StorePath, chunk_spec: ArraySpec, start: int, stop: int
) -> np.ndarray[Any, Any]:
    """Reads a range of the bytes of a chunk; fewer if the chunk ends earlier or is missing."""
    data = await store.get(chunk_spec.prototype, RangeByteRequest(start, stop))
    return np.empty(0, np.uint8) if data is None else data.as_numpy_array()


register_codec(_NAME, PackhorseCodec)  # for those who import this module
