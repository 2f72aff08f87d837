"""Packhorse for numcodecs: the codec `packhorse`, for zarr's format 2, for references to chunks in
other files, and for whoever keeps an array as bytes (docs/arrays.md).

What it encodes is one frame, which has no room for a foreign byte order, nor for dimensions in
Fortran's order. As all compressors of numcodecs do, it gives back the bytes of memory alone, and
the caller knows what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import Frame, compress_buffer
from packhorse.integrations.elements import bytes_of, dtype_text, elements_of, level_text
from packhorse.layout import Level
from packhorse.numpy import FRAMEWORK

if TYPE_CHECKING:
    from typing_extensions import Buffer

try:
    from numcodecs.abc import Codec
    from numcodecs.compat import ensure_contiguous_ndarray
    from numcodecs.registry import register_codec
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "numcodecs":
        raise
    raise MissingBackendError(
        "packhorse.numcodecs needs numcodecs; install it with: pip install 'packhorse[numcodecs]'"
    ) from None

__all__ = ["Packhorse"]


class Packhorse(Codec):  # type: ignore[misc]
    """Packs an array or a buffer without loss.

    Example:
        >>> import numcodecs, numpy as np
        >>> from packhorse.numcodecs import Packhorse
        >>> codec = Packhorse(level="max")
        >>> data = codec.encode(np.linspace(0, 1, 4096, dtype=np.float32))
        >>> codec.decode(data)[-1]
        np.float32(1.0)
        >>> numcodecs.get_codec({"id": "packhorse", "level": "max"}) == codec
        True
    """

    codec_id = "packhorse"

    def __init__(self, level: Level | str | int = "default", *, dtype: Any = None) -> None:
        """The arguments are kept as text, so that they can be written as JSON.

        Args:
            level: "fast", "default" or "max".
            dtype: the dtype of the elements, if the caller hands over bytes, or elements that only
                stand for others ("bfloat16" in an array of uint16). Elements of foreign byte order
                (">f4") are packed well only if it is given. None for the dtype of what is
                handed over.

        Raises:
            ValueError: there is no such level.
            TypeError: there is no such dtype, or it is not a number.
        """
        self.level = level_text(level)
        self.dtype = dtype_text(dtype)

    def encode(self, buf: Buffer) -> bytes:
        """Packs a buffer.

        Args:
            buf: an array in C or Fortran order, or any other contiguous buffer; only read.

        Returns:
            A frame.

        Raises:
            TypeError: the elements are Python objects or have no fixed size.
            ValueError: the array is not contiguous, or is not a whole number of elements of the
                codec's dtype.
        """
        array = ensure_contiguous_ndarray(buf, flatten=False)
        if not array.flags.c_contiguous:
            array = array.T  # the same memory, in C order
        if self.dtype is not None:
            array = _viewed(array, np.dtype(self.dtype))
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
        elements = elements_of(array.dtype)
        shape = (*array.shape, *elements.shape)
        frame = compress_buffer(bytes_of(array), elements.dtype, shape, level=self.level)
        return frame.to_bytes()

    def decode(self, buf: Buffer, out: Any = None) -> Any:
        """Unpacks a frame.

        Args:
            buf: the bytes of a frame.
            out: a contiguous, writable buffer of exactly the bytes of the result; None for a new
                array.

        Returns:
            `out`, or a one-dimensional array of the codec's dtype, or of the frame's. (An array
            that was packed as bytes comes back as bytes.)

        Raises:
            CorruptionError, TruncationError, CompatibilityError: the frame is bad or too new, or
                does not hold the codec's dtype.
            TypeError: `out` is read-only or holds Python objects.
            ValueError: `out` has another size.
        """
        frame = Frame.from_buffer(bytes_of(ensure_contiguous_ndarray(buf)))
        if out is None:
            target = np.empty(frame.logical_nbytes, np.uint8)
        else:
            target = bytes_of(ensure_contiguous_ndarray(out))
        if target.size != frame.logical_nbytes:
            found = f"out has {target.size} bytes; the frame holds {frame.logical_nbytes}"
            raise ValueError(found)
        dtype = self._dtype_of(frame)
        frame.decompress_into(target)
        if not dtype.isnative:
            target.view(dtype).byteswap(inplace=True)
        return target.view(dtype) if out is None else out

    def _dtype_of(self, frame: Frame) -> np.dtype[Any]:
        """The dtype of the elements that a frame holds, in the byte order of the caller.

        Raises:
            CompatibilityError: NumPy has no such dtype.
            CorruptionError: the codec has another dtype.
        """
        if self.dtype is None:
            found: np.dtype[Any] = FRAMEWORK.empty(frame.dtype, (0,)).dtype
            return found
        dtype = np.dtype(self.dtype)
        elements = elements_of(dtype.newbyteorder("="))
        n_dims = len(elements.shape)
        if (frame.dtype, frame.shape[len(frame.shape) - n_dims :]) != elements:
            raise CorruptionError(
                f"the frame holds {frame.dtype}, and this codec decodes {elements.dtype} "
                f"(dtype={self.dtype!r}); use a codec with the dtype that the data was encoded with"
            )
        return dtype


def _viewed(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The same bytes as elements of another dtype, in the same shape if they are of equal size."""
    if array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    if array.nbytes % dtype.itemsize:
        raise ValueError(f"{array.nbytes} bytes are not a whole number of elements of {dtype}")
    return bytes_of(array).view(dtype)


register_codec(Packhorse)  # for those who import this module; others find it by its entry point
