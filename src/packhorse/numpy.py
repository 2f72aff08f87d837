"""Packhorse for NumPy: the same verbs as `safetensors.numpy`.

`compress` and `decompress` take one array, `compress_all` and `decompress_all` many; `save`,
`load`, `save_file` and `load_file` take a dictionary of arrays. Arrays of bfloat16 and of floats
of 8, 6 and 4 bits have the dtypes of ml_dtypes. The input is only read. The arrays that come back
are equal bit for bit, including NaN payloads and signed zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.ma import MaskedArray  # now, because NumPy would import it late (late_import.py)

from packhorse import _core
from packhorse._core import Views
from packhorse.bits import pack_bits, unpack_bits_into
from packhorse.codecs.base import ByteArray
from packhorse.disk.base_files import BaseLike
from packhorse.disk.container import lay_out, pack_tensors, write_packed
from packhorse.disk.packed_file import PackedFile, load_tensors
from packhorse.frame import Frame
from packhorse.frame.verbs import (
    check_limit,
    compress_tensor,
    compress_tensors,
    decompress_tensor,
    decompress_tensors,
    read_frames,
)
from packhorse.layout import DTYPE_BY_NAME, Level

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FRAMEWORK",
    "NumpyFramework",
    "compress",
    "compress_all",
    "decompress",
    "decompress_all",
    "load",
    "load_file",
    "save",
    "save_file",
]

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Elements of which NumPy holds one in each byte, and safetensors several.
_SUB_BYTE = {
    dtype: DTYPE_BY_NAME[name].bits
    for name, dtype in _DTYPES.items()
    if DTYPE_BY_NAME[name].bits < 8
}
# Dtypes, in the byte order of this machine, whose elements have no gaps between them.
_PLAIN_NAMES = {dtype: name for dtype, name in _NAMES.items() if dtype not in _SUB_BYTE}
_PLAIN_CODES = {dtype: DTYPE_BY_NAME[name].code for dtype, name in _PLAIN_NAMES.items()}


class NumpyFramework:
    """The `Framework` of NumPy."""

    name = "np"

    def check_form(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Does nothing: there are arrays of every dtype and shape."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A new array of undefined content.

        Raises:
            MemoryError: there is not enough memory for it.
        """
        return np.empty(shape, _DTYPES[dtype])

    def fill(self, tensor: np.ndarray[Any, Any], write: Callable[[ByteArray], object]) -> None:
        """Call `write` with the memory for the bytes of a C-contiguous array. Elements of 4 and 6
        bits are written without gaps, to other memory, and get bytes of their own afterwards."""
        flat, bits = tensor.reshape(-1).view(np.uint8), _SUB_BYTE.get(tensor.dtype)
        if bits is None:
            write(flat)
            return
        packed = np.empty(flat.size * bits // 8, np.uint8)
        write(packed)
        unpack_bits_into(packed, bits, flat)

    def check_out(self, out: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """Check that a frame's array can be decoded into `out`.

        Raises:
            TypeError: `out` is not a writable C-contiguous array.
            ValueError: `out` has another dtype or shape.
        """
        if not isinstance(out, np.ndarray) or not out.flags.c_contiguous or not out.flags.writeable:
            raise TypeError("out must be a writable C-contiguous NumPy array")
        if _NAMES.get(out.dtype) != dtype or out.shape != shape:
            raise ValueError(f"out is {out.dtype} {out.shape}; it must be {_DTYPES[dtype]} {shape}")

    def readable(self, tensor: Any) -> tuple[ByteArray, str, tuple[int, ...]]:
        """The array's bytes in C order, without gaps between elements, its dtype name and its
        shape.

        Raises:
            TypeError, ValueError: as for `describe`.
        """
        plain = _PLAIN_NAMES.get(tensor.dtype) if type(tensor) is np.ndarray else None
        if plain is not None and tensor.flags.c_contiguous:
            return tensor.reshape(-1).view(np.uint8), plain, tensor.shape
        name, shape = self.describe(tensor)
        if self.is_readable_in_place(tensor):
            return tensor.reshape(-1).view(np.uint8), name, shape
        dtype = _DTYPES[name]
        data = np.ascontiguousarray(tensor, dtype=dtype).reshape(-1).view(np.uint8)
        bits = _SUB_BYTE.get(dtype)
        return data if bits is None else pack_bits(data, bits), name, shape

    def is_readable_in_place(self, tensor: Any) -> bool:
        """Whether `readable` returns the memory of an array, and not a copy."""
        if not isinstance(tensor, np.ndarray):
            return True
        if tensor.dtype in _PLAIN_NAMES:
            return bool(tensor.flags.c_contiguous)
        return tensor.flags.c_contiguous and tensor.dtype.isnative and tensor.dtype not in _SUB_BYTE

    def describe(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """The dtype name and shape of an array that `readable` accepts.

        Raises:
            TypeError: it is not an array, or safetensors does not have its dtype.
            ValueError: its elements do not take a whole number of bytes.
        """
        dtype = _native_dtype(tensor)
        bits = _SUB_BYTE.get(dtype, 8)
        if tensor.size * bits % 8:
            raise ValueError(
                f"{tensor.size} elements of {bits} bits do not end at a byte, which safetensors "
                "requires; add elements"
            )
        return _NAMES[dtype], tensor.shape

    def head(self, tensor: np.ndarray[Any, Any], n: int) -> ByteArray:
        """The bytes of the first elements in C order."""
        bits = _SUB_BYTE.get(tensor.dtype, 8)
        whole = n + -n % 8 if bits < 8 else n  # elements that end at a byte
        return self.readable(tensor.flat[:whole])[0][: -(-n * tensor.itemsize * bits // 8)]

    def identity(self, tensor: np.ndarray[Any, Any]) -> object:
        """A key that is equal for arrays that are the same elements of the same memory."""
        if not tensor.size:
            return id(tensor)
        return tensor.ctypes.data, tensor.dtype, tensor.shape, tensor.strides

    def assign(self, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        """Copy the elements of `source` to `target`.

        Raises:
            ValueError: `target` is read-only.
        """
        target[...] = source

    def views(self, tensors: Sequence[Any]) -> Views:
        """Where arrays lie; unknown for subclasses and for arrays that are not contiguous, not in
        native byte order or with gaps between elements."""
        return _core.views_of_arrays(list(tensors), np.ndarray, _PLAIN_CODES)

    def empty_all(
        self, forms: Sequence[tuple[str, tuple[int, ...]]], numbers: Sequence[int]
    ) -> list[np.ndarray[Any, Any]]:
        """New arrays of undefined content."""
        made = [(shape, _DTYPES[dtype]) for dtype, shape in forms]
        return [np.empty(*made[k]) for k in numbers]

    def memory(self, tensor: np.ndarray[Any, Any]) -> ByteArray | None:
        """The bytes of an array to write to, if it is contiguous, writable, in native byte order
        and without gaps between elements; otherwise None."""
        flags = tensor.flags
        is_plain = flags.c_contiguous and flags.writeable and tensor.dtype in _PLAIN_NAMES
        return tensor.reshape(-1).view(np.uint8) if is_plain else None

    def mark_written(self, tensor: np.ndarray[Any, Any]) -> None:
        """Does nothing: NumPy keeps no record of writes."""

    def mark_all_written(self, tensors: Sequence[np.ndarray[Any, Any]]) -> None:
        """Does nothing, as `mark_written`."""

    def write_count(self, tensor: np.ndarray[Any, Any]) -> int | None:
        """None: NumPy keeps no record of writes."""
        return None

    def span(self, tensor: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        """The addresses between which an array lies; None for an empty one or another object."""
        if not isinstance(tensor, np.ndarray) or not tensor.size:
            return None
        if tensor.flags.c_contiguous:
            start = tensor.ctypes.data
            return start, start + tensor.nbytes
        return np.lib.array_utils.byte_bounds(tensor)

    def check_device(self, device: Any) -> None:
        """Refuse all devices but the CPU.

        Raises:
            ValueError: it is another device.
        """
        if device is not None and str(device) != "cpu":
            raise ValueError(f"device {str(device)!r} needs framework 'pt'; 'np' has only 'cpu'")

    def decodes_on(self, device: Any) -> bool:
        """False: NumPy has arrays in host memory only."""
        return False

    def decode_on(self, frames: Sequence[Frame], device: Any, threads: int) -> list[None]:
        """None for each frame."""
        return [None] * len(frames)


def _native_dtype(array: Any) -> np.dtype[Any]:
    """The dtype of an array, in this machine's byte order.

    Raises:
        TypeError: it is not an array, or safetensors does not have its dtype.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a NumPy array is needed, not {type(array).__name__}")
    if isinstance(array, MaskedArray):
        raise TypeError("a masked array would lose its mask; pass its data and its mask instead")
    dtype: np.dtype[Any] = array.dtype
    dtype = dtype if dtype in _NAMES else dtype.newbyteorder("=")
    if dtype not in _NAMES:
        raise TypeError(
            f"safetensors has no dtype for {array.dtype}; convert the array first{_advice(dtype)}"
        )
    return dtype


def _advice(dtype: np.dtype[Any]) -> str:
    """How to store an array of a dtype that safetensors lacks, without loss."""
    if dtype.name.lstrip("u").startswith("int"):  # of fewer than 8 bits
        return f", with array.astype('{'u' * (dtype.name[0] == 'u')}int8')"
    return ", with array.view('uint8')" if dtype.kind == "V" and dtype.itemsize == 1 else ""


FRAMEWORK = NumpyFramework()


def compress(
    array: np.ndarray[Any, Any],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    out: Buffer | None = None,
    base: np.ndarray[Any, Any] | None = None,
) -> Frame:
    """Packs one array, without loss.

    Args:
        array: an array of any shape and memory order; only read.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        out: memory to build the frame in, at least `packhorse.frame.max_frame_nbytes` bytes.
        base: another array with the same number of elements, for example the same parameter some
            training steps earlier. It has the same dtype, or it is the float32 array that a
            bfloat16 or float16 one was rounded from. If differences from the base are shorter, the
            frame holds these; then `frame.base_hash` names the base, and `decompress` needs it.

    Returns:
        The frame; `bytes(frame.buffer())` or `frame.to_bytes()` are its bytes.

    Raises:
        TypeError: `array` is not an array, or safetensors does not have its dtype.
        ValueError: `level`, `threads`, `out` or `base` is wrong.
        ChangedError: the base was written to in the meantime. (If the array itself is written to,
            no error is raised: the frame holds the bytes that were read, old or new.)

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import compress, decompress
        >>> frame = compress(np.zeros((256, 256), np.float32))
        >>> decompress(frame).shape
        (256, 256)
        >>> frame.ratio > 100
        True
    """
    return compress_tensor(FRAMEWORK, array, level=level, threads=threads, out=out, base=base)


def decompress(
    frame: Frame | Buffer,
    *,
    out: np.ndarray[Any, Any] | None = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """Unpacks one array.

    Args:
        frame: a frame, or the bytes of one.
        out: a C-contiguous array of the same dtype and shape to decode into; it is returned.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse an array of more bytes, before memory is allocated.
        base: the array that the frame was packed against, if it has a base (`Frame.base_hash`).

    Returns:
        The array; `out`, if that is given.

    Raises:
        BaseMismatchError: the frame has a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the bytes are bad or too new.
        TypeError: `out` is not a writable C-contiguous array.
        ValueError: `out` has another dtype or shape.
        MemoryError: there is not enough memory for the array.

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import compress, decompress
        >>> old, new = np.zeros(4096, np.float32), np.ones(4096, np.float32)
        >>> data = compress(new, base=old).to_bytes()
        >>> np.array_equal(decompress(data, base=old), new)
        True
    """
    frame = check_limit(frame, max_nbytes)
    array: np.ndarray[Any, Any] = decompress_tensor(
        FRAMEWORK, frame, out=out, threads=threads, base=base
    )
    return array


def compress_all(
    arrays: Sequence[np.ndarray[Any, Any]],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    outs: Sequence[Buffer] | None = None,
    bases: Sequence[np.ndarray[Any, Any] | None] | None = None,
) -> list[Frame]:
    """Packs many arrays, each as `compress` does. Small arrays are packed side by side, one per
    thread.

    Args:
        arrays: arrays of any shapes and memory orders; only read.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        outs: memory to build each frame in, as `out` of `compress`.
        bases: an array or None for each array, as `base` of `compress`.

    Returns:
        A frame for each array, in the same order.

    Raises:
        TypeError, ValueError, ChangedError: as for `compress`; the message says which array.
        ValueError: one of `outs` shares memory with another one or with an array that is read;
            then nothing is written.

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import compress_all
        >>> frames = compress_all([np.zeros(4096, np.float32), np.arange(100)])
        >>> [frame.shape for frame in frames]
        [(4096,), (100,)]
    """
    return compress_tensors(
        FRAMEWORK, arrays, level=level, threads=threads, outs=outs, bases=bases, what="array"
    )


def decompress_all(
    frames: Sequence[Frame | Buffer],
    *,
    outs: Sequence[np.ndarray[Any, Any]] | None = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    bases: Sequence[np.ndarray[Any, Any] | None] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """Unpacks many arrays, each as `decompress` does. Small arrays are unpacked side by side, one
    per thread.

    Args:
        frames: frames, or the bytes of frames.
        outs: an array for each frame to decode into, as `out` of `decompress`.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse arrays of more bytes in total, before memory is allocated.
        bases: an array or None for each frame, as `base` of `decompress`.

    Returns:
        The arrays, in the order of the frames.

    Raises:
        BaseMismatchError, CorruptionError, TruncationError: as for `decompress`; the message says
            which frame.
        CompatibilityError, TypeError, MemoryError: likewise.
        ValueError: as for `decompress`; or one of `outs` shares memory with another one or with a
            frame or base that is read; then nothing is written.

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import compress_all, decompress_all
        >>> frames = compress_all([np.zeros(4096, np.float32), np.arange(100)])
        >>> [len(array) for array in decompress_all(frames)]
        [4096, 100]
    """
    return decompress_tensors(
        FRAMEWORK, read_frames(frames, max_nbytes), outs=outs, threads=threads, bases=bases
    )


def save(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
) -> bytes:
    """Packs arrays to a packed file in memory. Arguments and errors are those of `save_file`.

    Args:
        tensor_dict: arrays by name.
        metadata: strings to keep in the file.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: as for `save_file`.

    Returns:
        The bytes of the file.

    Raises:
        TypeError, ValueError: as for `save_file`.
        BaseMismatchError, CorruptionError, CompatibilityError: likewise.
        OSError: the base cannot be read.

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import load, save
        >>> data = save({"weight": np.zeros((256, 256), np.float32)}, {"step": "7"})
        >>> load(data)["weight"].shape
        (256, 256)
    """
    header, buffers = lay_out(tensor_dict, FRAMEWORK, metadata)
    return pack_tensors(header, buffers, level=level, threads=threads, base=base)


def load(
    data: Buffer,
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Unpacks all arrays of a packed or plain file that is in memory.

    Args:
        data: the bytes of the file.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a file whose arrays take more bytes in total, before any is decoded.
        base: what the file was packed against, if it has a base: a file, a folder, or arrays by
            name.

    Returns:
        The arrays by name, in the order of their data.

    Raises:
        BaseMismatchError: the file needs a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the bytes are bad or too new, or
            exceed the limit.
        MemoryError: there is not enough memory for an array.

    Example:
        >>> from pathlib import Path
        >>> from packhorse.numpy import load
        >>> arrays = load(Path("model.ph.safetensors").read_bytes(), max_nbytes=1 << 30)
        >>> arrays["weight"].dtype
        dtype(bfloat16)
    """
    return load_tensors(data, FRAMEWORK, threads=threads, max_nbytes=max_nbytes, base=base)


def save_file(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes a packed file. An existing file is replaced in one step, when the new one is complete.

    Args:
        tensor_dict: arrays by name.
        filename: the file to write, whose name usually ends in ".ph.safetensors"; a path, or a URL
            of fsspec. A file at a URL is written to a temporary file first, and uploaded as a
            whole.
        metadata: strings to keep in the file.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        base: older arrays: a safetensors file, packed or not, a folder of such files, or arrays by
            name. An array is packed as differences from the older one of the same name, if these
            are shorter; then `load_file` needs the base.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Raises:
        TypeError: one of `tensor_dict` is not an array, or safetensors does not have its dtype.
        ValueError: `level` or `threads` is wrong, or `filename` is the base.
        BaseMismatchError: the base was itself packed against a base.
        CorruptionError, TruncationError, CompatibilityError: the base is bad or too new.
        OSError: the file cannot be written, or the base cannot be read.

    Example:
        >>> import numpy as np
        >>> from packhorse.numpy import load_file, save_file
        >>> old, new = np.zeros(4096, np.float32), np.ones(4096, np.float32)
        >>> save_file({"weight": old}, "old.ph.safetensors")
        >>> save_file({"weight": new}, "new.ph.safetensors", base="old.ph.safetensors")
        >>> len(load_file("new.ph.safetensors", base="old.ph.safetensors")["weight"])
        4096
    """
    header, buffers = lay_out(tensor_dict, FRAMEWORK, metadata)
    write_packed(
        filename, header, buffers, level=level, threads=threads, force=True, base=base,
        storage_options=storage_options,
    )  # fmt: skip


def load_file(
    filename: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    backend: str = "mmap",
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Unpacks all arrays of a packed or plain safetensors file.

    Args:
        filename: the file, packed or plain; a path, or a URL of fsspec, such as `s3://bucket/model`.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: refuse a file whose arrays take more bytes in total, before any is decoded.
        base: what the file was packed against, if it has a base: a file, a folder, or arrays by
            name.
        backend: how the safetensors library reads a plain file, "mmap" or "pread". A packed file is
            always mapped.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The arrays by name, in the order of their names.

    Raises:
        BaseMismatchError: the file needs a base, and no base or another one was given.
        CorruptionError, TruncationError, CompatibilityError: the file is bad or too new, or exceeds
            the limit.
        MissingBackendError: the file is plain, and the safetensors library is not installed.
        MemoryError: there is not enough memory for an array.
        OSError: the file cannot be opened or read.

    Example:
        >>> from packhorse.numpy import load_file
        >>> arrays = load_file("model.ph.safetensors")
        >>> arrays["weight"].shape
        (512, 64)
    """
    with PackedFile(
        filename, FRAMEWORK, threads=threads, max_nbytes=max_nbytes, base=base, backend=backend,
        storage_options=storage_options,
    ) as file:  # fmt: skip
        tensors = file.get_tensors()
        return {name: tensors[name] for name in file.keys()}  # noqa: SIM118 - not a dict
