"""A serde for LMCache's storage (its L2 adapters): chunks of keys and values as frames.

A chunk is tensors of a few layouts, so it becomes one frame for each, one after the other. LMCache
asks how large a serialized chunk is before there is one, and its files of 0.5.6 are read back only
if they have just as many bytes: shorter ones are stored and never found. So all chunks of a layout
take the same bytes here, a share of the plain ones, with zeros after the frames. A chunk that does
not fit is refused; LMCache then counts a failed store, and the chunk is computed again when it is
needed.

LMCache calls any objects with these methods, so nothing of it is imported here before `register`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse.arguments import resolve_level
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes
from packhorse.layout import FIXED_HEADER, FIXED_HEADER_NBYTES
from packhorse.torch_dtypes import NAMES

__all__ = ["PackhorseDeserializer", "PackhorseSerializer", "register"]

_Bytes = NDArray[np.uint8]
# Of the plain bytes, what a serialized chunk takes. Keys and values of BF16 take .67 as frames of
# the default level, and .71 of the level "fast" (docs/decisions.md).
_SHARES = {"BF16": 0.72, "F16": 0.88, "F32": 0.86}
_FRAME_ALIGNMENT = 64
_LENGTH_FIELD = 9  # of the fixed header: the bytes of the frame


class PackhorseSerializer:
    """Packs chunks; LMCache's `Serializer`.

    Args:
        level: "fast", "default" or "max".
        share: of the plain bytes, what every serialized chunk takes, 0 to 1. None for .72 of BF16,
            .88 of F16, .86 of F32, and all of others.

    Raises:
        ValueError: there is no such level or share.
    """

    def __init__(self, *, level: str = "default", share: float | None = None) -> None:
        self._level = resolve_level(level)
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be above 0 and at most 1")
        self._share = share
        self._scratch = threading.local()  # LMCache calls from several threads

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The bytes of every serialized chunk of a layout.

        Args:
            layout_desc: LMCache's `MemoryLayoutDesc`: shapes and dtypes.
        """
        return sum(
            self._capacity(dtype, shape)
            for dtype, shape in zip(layout_desc.dtypes, layout_desc.shapes, strict=True)
        )

    def _capacity(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        name, framed = _framed(dtype, shape)
        share = _SHARES.get(name, 1.0) if self._share is None else self._share
        saved = int(nbytes * (1 - share)) // _FRAME_ALIGNMENT * _FRAME_ALIGNMENT
        return max_frame_nbytes(name, framed) - saved

    def serialize(self, src: Any, dst: Any, key: object) -> int:
        """Packs a chunk.

        Args:
            src: LMCache's `MemoryObj` with the chunk; only read.
            dst: its `MemoryObj` of `estimate_serialized_size` bytes.
            key: ignored.

        Returns:
            The bytes of `dst`, all of which were written.

        Raises:
            ValueError: the chunk does not fit in its share.
        """
        out = _bytes_of(dst)
        at = 0
        for data, dtype, shape in _tensors_of(src):
            nbytes = max_frame_nbytes(dtype, shape)
            frame = compress_buffer(
                data, dtype, shape, level=self._level, threads=1, out=self._memory(nbytes)
            )
            if at + frame.nbytes > out.size:
                raise ValueError(
                    f"a chunk takes {at + frame.nbytes} bytes or more, and its share is {out.size}:"
                    " it is not stored; give the serde a larger share if that happens often"
                )
            out[at : at + frame.nbytes] = np.frombuffer(frame.buffer(), np.uint8)
            at += frame.nbytes
        out[at:] = 0
        return out.size

    def _memory(self, nbytes: int) -> _Bytes:
        held: _Bytes | None = getattr(self._scratch, "memory", None)
        if held is None or held.size < nbytes:
            held = self._scratch.memory = np.empty(nbytes, np.uint8)
        return held[:nbytes]


class PackhorseDeserializer:
    """Unpacks chunks bit for bit; LMCache's `Deserializer`."""

    def deserialize(self, src: Any, dst: Any, key: object) -> None:
        """Unpacks a chunk.

        Args:
            src: LMCache's `MemoryObj` with a serialized chunk.
            dst: its `MemoryObj` for the chunk.
            key: ignored.

        Raises:
            BaseMismatchError: it is a difference from a base, which no serializer here writes.
            CompatibilityError: a later release has packed it.
            CorruptionError: it is damaged, or a chunk of another layout. `dst` has any content.
        """
        data = _bytes_of(src)
        at = 0
        for out, dtype, shape in _tensors_of(dst):
            frame = _frame_at(data, at, out.size)
            if (frame.dtype, frame.shape) != (dtype, shape):
                raise CorruptionError(
                    f"byte {at}: a chunk of {frame.dtype} with shape {frame.shape} was stored;"
                    f" {dtype} with shape {shape} is wanted"
                )
            frame.decompress_into(out, threads=1)
            at += frame.nbytes


def _frame_at(data: _Bytes, at: int, max_nbytes: int) -> Frame:
    """The frame that begins at a byte. Its header says where it ends, and is checked then."""
    end = data.size
    if end - at >= FIXED_HEADER_NBYTES:
        end = min(end, at + FIXED_HEADER.unpack_from(data, at)[_LENGTH_FIELD])
    return Frame.from_buffer(data[at:end], max_nbytes=max_nbytes, offset=at)


def _bytes_of(memory: Any) -> _Bytes:
    return np.frombuffer(memory.byte_array, np.uint8)


def _tensors_of(memory: Any) -> Iterator[tuple[_Bytes, str, tuple[int, ...]]]:
    """The tensors of a chunk: their bytes, and dtype and shape of their frames. They lie one after
    the other."""
    data, start = _bytes_of(memory), 0
    for dtype, shape in zip(memory.get_dtypes(), memory.get_shapes(), strict=True):
        stop = start + dtype.itemsize * shape.numel()
        yield data[start:stop], *_framed(dtype, shape)
        start = stop


def _framed(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a frame for a tensor: of its bytes if frames do not know the dtype,
    such as PyTorch's pairs of floats of 4 bits."""
    if dtype in NAMES:
        return NAMES[dtype], tuple(shape)
    return "U8", (dtype.itemsize * torch.Size(shape).numel(),)


def register(name: str = "packhorse") -> None:
    """Makes LMCache know the serde, so that a configuration can name it:
    `"serde": {"type": "packhorse", "level": "default", "share": 0.72, "max_workers": 2}`.

    Args:
        name: by which configurations name it.

    Raises:
        MissingBackendError: LMCache is not installed.
        ValueError: LMCache knows a serde of that name.
    """
    try:
        from lmcache.v1.distributed.serde import AsyncSerdeProcessor, register_serde_factory
    except ModuleNotFoundError as error:
        raise MissingBackendError(
            f"packhorse.lmcache needs {error.name}; install it with:"
            " pip install 'packhorse[lmcache]'"
        ) from error

    def create(options: Mapping[str, Any]) -> Any:
        left = dict(options)
        n_workers = left.pop("max_workers", 1)
        serializer = PackhorseSerializer(**left)
        return AsyncSerdeProcessor(serializer, PackhorseDeserializer(), max_workers=n_workers)

    register_serde_factory(name, create)
