"""Packhorse for HDF5: a filter for the chunks of datasets, registered with the HDF5 library that
h5py has loaded (docs/arrays.md).

The filter is Python code that HDF5 calls through ctypes, once for each chunk. When a dataset is
made, HDF5 tells the filter its dtype and the shape of its chunks, and the filter writes them to its
parameters in the file. What it encodes is one frame.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from packhorse.arguments import resolve_level
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.errors import CompatibilityError, MissingBackendError
from packhorse.frame import Frame, compress_buffer
from packhorse.integrations.elements import Elements, dtype_text, elements_of
from packhorse.layout import DTYPE_BY_CODE, DTYPE_BY_NAME, DType, Level

try:
    import h5py
except ModuleNotFoundError as error:
    if error.name != "h5py":
        raise
    raise MissingBackendError(
        "packhorse.h5py needs h5py; install it with: pip install 'packhorse[h5py]'"
    ) from None

__all__ = ["FILTER_ID", "Packhorse"]

# From the range for tests (256 to 511): the HDF Group has not given a number to the filter yet.
FILTER_ID = 480

_VERSION = 1  # of the parameters in a file: version, level, dtype, swap, and the shape of a frame
_REVERSE = 0x100  # of the flags of a call: decode
_FAILURE = -1
# h5py holds its lock while HDF5 calls the filter. If the filter waited for a thread of Python, and
# the garbage collector released an object of h5py there, that thread would wait for the lock.
_THREADS = 1

_hid = ctypes.c_int64
_Values = ctypes.POINTER(ctypes.c_uint)
_SetLocal = ctypes.CFUNCTYPE(ctypes.c_int, _hid, _hid, _hid)
_Filter = ctypes.CFUNCTYPE(
    ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, _Values, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


class _Class(ctypes.Structure):
    """H5Z_class2_t: what HDF5 knows of a filter."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", _SetLocal),
        ("filter", _Filter),
    )


class Packhorse(h5py.filters.FilterRefBase):  # type: ignore[misc]
    """Packs the chunks of a dataset without loss: an argument of h5py's `create_dataset`. A process
    that reads the dataset imports `packhorse.h5py` first.

    Example:
        >>> import h5py, numpy as np
        >>> from packhorse.h5py import Packhorse
        >>> with h5py.File("weights.h5", "w") as file:
        ...     data = np.ones((512, 64), np.float32)
        ...     weight = file.create_dataset("weight", data=data, compression=Packhorse())
        >>> with h5py.File("weights.h5") as file:
        ...     file["weight"][300:302, 5]
        array([1., 1.], dtype=float32)
    """

    filter_id = FILTER_ID

    def __init__(self, level: Level | str | int = "default", *, dtype: Any = None) -> None:
        """Nothing is packed yet.

        Args:
            level: "fast", "default" or "max".
            dtype: what the elements stand for, if HDF5 has no such dtype: "bfloat16" for a dataset
                of uint16, for example. The dataset keeps its dtype. None for its own.

        Raises:
            ValueError: there is no such level.
            TypeError: there is no such dtype, or it is not a number.
        """
        text = dtype_text(dtype)
        name = None if text is None else elements_of(np.dtype(text).newbyteorder("=")).dtype
        code = 0 if name is None else DTYPE_BY_NAME[name].code
        self.filter_options = (_VERSION, int(resolve_level(level)), code)


class _Layout(NamedTuple):
    """The parameters of a dataset's filter.

    Attributes:
        level: of frames.
        dtype: of frames.
        is_swapped: whether the elements have the other byte order outside of frames.
        shape: of frames.
    """

    level: Level
    dtype: DType
    is_swapped: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return math.prod(self.shape) * self.dtype.bits // 8

    def swapped(self, data: ByteArray) -> ByteArray:
        """The bytes of a chunk in the other byte order, if the dataset's is another one."""
        unit: np.dtype[Any] = np.dtype(f"u{self.dtype.unit_nbytes}")
        return data.view(unit).byteswap().view(np.uint8) if self.is_swapped else data


def _chosen(options: tuple[int, ...], dtype: np.dtype[Any], chunk: tuple[int, ...]) -> list[int]:
    """The parameters for a new dataset of a dtype and a shape of chunks."""
    level, code = (*options[1:], 0, 0)[:2]
    is_swapped = not dtype.isnative and dtype.kind in "iufc"
    elements = elements_of(dtype.newbyteorder("=") if is_swapped else dtype)
    if code:
        elements = Elements(DTYPE_BY_CODE[code].name, ())
        if DTYPE_BY_CODE[code].bits != 8 * dtype.itemsize:
            raise ValueError(f"elements of {dtype} cannot stand for {elements.dtype}")
    code = DTYPE_BY_NAME[elements.dtype].code
    return [_VERSION, level or int(Level.DEFAULT), code, is_swapped, *chunk, *elements.shape]


def _set_local(properties: int, kind: int, _: int) -> int:
    """HDF5 calls this when a dataset is made."""
    try:
        return _choose(properties, kind)
    except Exception as problem:
        words = str(problem)
    # Now, because h5py's objects empty HDF5's list of errors when they are released.
    _tell(words)
    return _FAILURE


def _choose(properties: int, kind: int) -> int:
    """Writes the parameters for a dataset to its properties."""
    for number in (properties, kind):
        _hdf5.H5Iinc_ref(_hid(number))  # h5py's objects release it
    plist, type_id = h5py.h5p.PropDCID(properties), h5py.h5i.wrap_identifier(kind)
    flags, options, _ = plist.get_filter_by_id(FILTER_ID)
    dtype = type_id.dtype
    if dtype.hasobject or dtype.itemsize != type_id.get_size():
        dtype = np.dtype(f"V{type_id.get_size()}")
    values = _chosen(options, dtype, plist.get_chunk())
    array = (ctypes.c_uint * len(values))(*values)
    size = ctypes.c_size_t(len(values))
    return int(_hdf5.H5Pmodify_filter(_hid(properties), FILTER_ID, flags, size, array))


def _run(flags: int, n_values: int, values: Any, nbytes: int, capacity: Any, memory: Any) -> int:
    """HDF5 calls this for each chunk. The memory is replaced by memory with the result."""
    try:
        version, level, code, is_swapped, *shape = values[:n_values]
        if version != _VERSION:
            raise CompatibilityError(f"version {version} of the filter; upgrade packhorse")
        layout = _Layout(Level(level), DTYPE_BY_CODE[code], bool(is_swapped), tuple(shape))
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(memory[0]))
        result = _decoded(data, layout) if flags & _REVERSE else _encoded(data, layout)
        place = _hdf5.H5allocate_memory(max(result.size, 1), False)
        if not place:
            raise MemoryError(f"HDF5 has no {result.size} bytes")
        ctypes.memmove(place, result.ctypes.data, result.size)
        _hdf5.H5free_memory(memory[0])
        memory[0], capacity[0] = place, result.size
        return result.size
    except Exception as problem:
        # HDF5 drops what a filter says about a chunk; h5py's error is that the filter failed.
        with suppress(RuntimeWarning):
            warnings.warn(f"packhorse: {problem}", RuntimeWarning, stacklevel=2)
        return 0


def _encoded(data: ByteArray, layout: _Layout) -> ByteArray:
    if data.size != layout.nbytes:  # a filter before this one has changed the size
        frame = compress_buffer(data, "U8", (data.size,), level=layout.level, threads=_THREADS)
    else:
        data = layout.swapped(data)
        name, shape = layout.dtype.name, layout.shape
        frame = compress_buffer(data, name, shape, level=layout.level, threads=_THREADS)
    return as_bytes(frame.buffer())


def _decoded(data: ByteArray, layout: _Layout) -> ByteArray:
    frame = Frame.from_buffer(data)
    result = np.empty(frame.logical_nbytes, np.uint8)
    frame.decompress_into(result, threads=_THREADS)
    is_ours = (frame.dtype, frame.shape) == (layout.dtype.name, layout.shape)
    return layout.swapped(result) if is_ours else result


def _tell(words: str) -> None:
    """Puts an error on HDF5's list, from which h5py takes its message."""
    kinds = (_hid.in_dll(_hdf5, f"H5E_{name}_g") for name in ("ERR_CLS", "PLINE", "CANTFILTER"))
    text = f"packhorse: {words}".replace("%", "%%").encode()
    _hdf5.H5Epush2(_hid(0), b"", b"packhorse", 0, *kinds, text)


# The HDF5 that h5py has loaded: this module of h5py is linked to it.
_hdf5 = ctypes.CDLL(h5py.h5z.__file__)
_hdf5.H5allocate_memory.restype = ctypes.c_void_p
_hdf5.H5allocate_memory.argtypes = (ctypes.c_size_t, ctypes.c_bool)
_hdf5.H5free_memory.argtypes = (ctypes.c_void_p,)
_class = _Class(1, FILTER_ID, 1, 1, b"packhorse", None, _SetLocal(_set_local), _Filter(_run))
h5py.h5z.register_filter(ctypes.addressof(_class))
