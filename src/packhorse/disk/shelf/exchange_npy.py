"""Exporting tensors of a shelf to `.npy` files of NumPy, and importing such files.

One tensor is a file, several are a folder of files, with subfolders at "/" in their names. NumPy's
format has no name for bfloat16 and the small floats: they are written as `V2` and `V1`, which is
their bits alone (`np.load(path).view(ml_dtypes.bfloat16)` reads them), and an import must be told
what they are (`dtype=`).

A file in C order is read from front to back. One in Fortran order is mapped, and the system may
drop its pages at any time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from packhorse.disk.shelf.exchange import (
    BLOCK_NBYTES,
    Block,
    Incoming,
    Meter,
    Outgoing,
    ReadsLikeShelf,
    ShelfProgress,
    bits_of,
    check_segments,
    dtype_of,
    name_below,
    native_dtype,
    outgoing,
    store,
    tile_shape,
    tiles,
)
from packhorse.errors import CorruptionError, TruncationError
from packhorse.framework import resolve_framework
from packhorse.storage.atomic import atomic_file, atomic_folder
from packhorse.storage.opening import open_regular
from packhorse.storage.output_file import OutputFile
from packhorse.storage.source_file import SourceFile, open_local

__all__ = ["NpyExport", "NpyImport"]

_SUFFIX = ".npy"


class NpyExport(ReadsLikeShelf):
    """Exporting to files of NumPy."""

    def export_npy(
        self,
        path: str | os.PathLike[str],
        names: str | Iterable[str] | None = None,
        *,
        progress: ShelfProgress | None = None,
        force: bool = False,
    ) -> Path:
        """Write a tensor as a file of NumPy, or several as a folder of files.

        Args:
            path: the file to write if `names` is one name, otherwise the folder to create.
            names: a tensor, or several; None for all, without nested states. Of bfloat16 and the
                small floats, the bits alone are written, because the format has no name for them:
                `np.load(path).view(ml_dtypes.bfloat16)` reads them.
            progress: called with the bytes done, and the bytes of all tensors.
            force: whether an existing file, or a folder that has nothing but such files, may be
                replaced.

        Returns:
            The file or folder.

        Raises:
            KeyError: the shelf has no tensor of a name.
            TypeError: a name is that of a nested state.
            ValueError: no file can have such a name.
            OSError: a file cannot be written; FileExistsError if `path` exists and `force` is
                False.
        """
        place = Path(path)
        with outgoing(self, names, progress) as (tensors, meter):
            if isinstance(names, str):
                with atomic_file(place, force=force) as output:
                    _write(output, tensors[names], meter)
                return place
            check_segments(tensors, "a folder of files")
            with atomic_folder(place, _replaceable(place) if force else None) as building:
                for name, tensor in tensors.items():
                    target = building / f"{name}{_SUFFIX}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_file(target) as output:
                        _write(output, tensor, meter)
        return place


class NpyImport:
    """Importing from files of NumPy."""

    def import_npy(
        self,
        names: str | Mapping[str, str | os.PathLike[str]],
        path: str | os.PathLike[str] | None = None,
        *,
        dtype: Any = None,
        replace: bool = False,
        resume: bool = False,
        progress: ShelfProgress | None = None,
    ) -> list[str]:
        """Read files of NumPy. Arrays of Python objects are refused; nothing is unpickled.

        Args:
            names: a name, or the paths of files by name.
            path: the file for the name; or a folder, whose files get names below that one by their
                paths. (An empty name leaves it out.)
            dtype: what elements are that NumPy's format has no name for: "bfloat16", for example.
                All others keep their dtype.
            replace: whether tensors of the same names may be replaced.
            resume: whether each file is a transaction of its own, instead of all together. Tensors
                that the shelf has already, equal in every bit, are then kept.
            progress: called with the bytes done, and the bytes of all files.

        Returns:
            The names of the tensors in the shelf.

        Raises:
            TypeError: a shelf has no such dtype, or `dtype` is needed or of another size.
            ValueError: the folder has no such file; or the shelf has a tensor of such a name, and
                `replace` is False.
            CorruptionError: a file is damaged, or not of NumPy.
            OSError: a file cannot be read, or has changed.
        """
        files = _files(names, path)
        meant = None if dtype is None else _meant(dtype)
        with ExitStack() as stack:
            sources = {
                name: stack.enter_context(open_local(Path(file))) for name, file in files.items()
            }
            tensors = [_incoming(name, source, meant) for name, source in sources.items()]
            return store(self, tensors, replace=replace, resume=resume, progress=progress)


# Exporting.


def _replaceable(folder: Path) -> list[Path]:
    """What may be removed with an old folder: folders, and files of NumPy."""
    found = (path for path in folder.rglob("*") if path.is_dir() or path.suffix == _SUFFIX)
    return [path.relative_to(folder) for path in found]


def _write(output: OutputFile, tensor: Outgoing, meter: Meter) -> None:
    # ml_dtypes gives some of its dtypes descriptions that np.load refuses.
    is_numpys = tensor.native.isbuiltin == 1
    descr = npy.dtype_to_descr(tensor.native) if is_numpys else f"|V{tensor.native.itemsize}"
    header = {"descr": descr, "fortran_order": False, "shape": tensor.shape}
    npy.write_array_header_1_0(output, header)
    for _, block in tensor.read(tensor.tile(BLOCK_NBYTES), meter):
        output.write(bits_of(block))


# Importing.


class _Header(NamedTuple):
    """The header of a file.

    Attributes:
        dtype: the dtype of NumPy.
        shape: the shape.
        is_fortran: whether the first axis changes fastest.
        offset: of the first element.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int


def _files(
    names: str | Mapping[str, str | os.PathLike[str]], path: str | os.PathLike[str] | None
) -> dict[str, Path]:
    if isinstance(names, Mapping):
        if path is not None:
            raise TypeError("names= has paths already; leave path= out")
        return {name: Path(file) for name, file in names.items()}
    if path is None:
        raise TypeError("path= is missing: import_npy(name, path), or import_npy({name: path})")
    place = Path(path)
    if not place.is_dir():
        return {names: place}
    found = sorted(file for file in place.rglob(f"*{_SUFFIX}") if file.is_file())
    if not found:
        raise ValueError(f"{place}: there is no *{_SUFFIX} file in it or its subfolders")
    below = (file.relative_to(place).as_posix().removesuffix(_SUFFIX) for file in found)
    return {name_below(names, name): file for name, file in zip(below, found, strict=True)}


def _meant(dtype: Any) -> np.dtype[Any]:
    """The dtype of NumPy for one of NumPy or PyTorch, or the name of one."""
    resolve_framework("np")  # gives np.dtype() the names of ml_dtypes
    text = str(dtype)
    is_text = isinstance(dtype, str) or text.startswith("torch.")
    try:
        return np.dtype(text.removeprefix("torch.") if is_text else dtype)
    except TypeError:
        raise TypeError(f"dtype is {dtype!r}, which NumPy and ml_dtypes do not know") from None


def _incoming(name: str, source: SourceFile, meant: np.dtype[Any] | None) -> Incoming:
    where = str(source.path)
    header = _header(source)
    native = _resolved(header.dtype, meant, where)
    dtype = dtype_of(native, where)
    kept = header._replace(dtype=native)

    def blocks() -> Iterator[Block]:
        tile = tile_shape(kept.shape, [1] * len(kept.shape), BLOCK_NBYTES // native.itemsize)
        read = _fortran_block if kept.is_fortran else _block
        for box in tiles(kept.shape, tile):
            yield box, read(source, kept, box).astype(native_dtype(dtype), copy=False)

    return Incoming(name, dtype, kept.shape, where, blocks, source.check)


def _header(source: SourceFile) -> _Header:
    """Read the header of a file and check the length of the file.

    Raises:
        CorruptionError: the file is not of NumPy, or damaged.
        TypeError: it has Python objects.
    """
    label = str(source.path)
    with open_regular(label) as file:
        try:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise CorruptionError(f"{label}: not a {_SUFFIX} file, or damaged: {reason}") from None
        offset = file.tell()
    if dtype.hasobject:
        raise TypeError(f"{label}: has Python objects, which are never loaded; convert it first")
    end = offset + math.prod(shape) * dtype.itemsize
    if source.stamp.nbytes < end:
        raise TruncationError(
            f"{label}: cut short: {dtype} of shape {list(shape)} ends at byte {end}, but the file "
            f"has {source.stamp.nbytes}; get the file again"
        )
    if source.stamp.nbytes > end:
        raise CorruptionError(
            f"{label}: the array ends at byte {end}, but {source.stamp.nbytes - end} more bytes "
            "follow; if they are more arrays, save each in a file of its own"
        )
    return _Header(dtype, tuple(shape), is_fortran, offset)


def _resolved(dtype: np.dtype[Any], meant: np.dtype[Any] | None, where: str) -> np.dtype[Any]:
    """What the elements of a file are.

    Raises:
        TypeError: the caller has to say it, or says something that does not fit.
    """
    if dtype.kind != "V" or dtype.names is not None:
        return dtype
    if meant is None:
        raise TypeError(
            f"{where}: NumPy's format does not say what its elements of {dtype.itemsize} bytes "
            f"are; give dtype=, such as {'bfloat16' if dtype.itemsize == 2 else 'float8_e4m3fn'!r}"
        )
    if meant.itemsize != dtype.itemsize:
        raise TypeError(
            f"{where}: dtype is {meant}, of {meant.itemsize} bytes, but the elements have "
            f"{dtype.itemsize} bytes"
        )
    return meant


def _block(source: SourceFile, header: _Header, box: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """A block of consecutive elements of a file in C order."""
    first = 0
    for cut, size in zip(box, header.shape, strict=True):
        first = first * size + cut.start
    shape = [cut.stop - cut.start for cut in box]
    nbytes = math.prod(shape) * header.dtype.itemsize
    data = source.map(header.offset + first * header.dtype.itemsize, nbytes)
    return np.frombuffer(data, header.dtype).reshape(shape)


def _fortran_block(
    source: SourceFile, header: _Header, box: tuple[slice, ...]
) -> np.ndarray[Any, Any]:
    """A block of a file in Fortran order, as a copy, so that the file is mapped only so long."""
    nbytes = math.prod(header.shape) * header.dtype.itemsize
    data = np.frombuffer(source.map(header.offset, nbytes), header.dtype)
    return np.ascontiguousarray(data.reshape(header.shape, order="F")[box])
