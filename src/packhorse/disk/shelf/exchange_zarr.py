"""Exporting a shelf to zarr, format 3, and importing arrays from zarr.

Exports are for everyone: chunks are compressed by Zstandard, which every implementation of format 3
reads, and not by our codec. Tensors of more than 8 MiB are in shards, so that a large tensor is
not a million files. bfloat16 and the small floats have the names that zarr's extensions give them
(`zarr_dtypes.py`); zarr for Python reads those once `packhorse.zarr` is imported.

All elements are written, but for shards whose bytes are all zero: zarr's own test for empty chunks
takes -0.0 for 0.0 where NumPy has no such dtype itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

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
    sync_files,
    tile_shape,
    tiles,
)
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.late_import import import_late
from packhorse.storage.atomic import atomic_folder
from packhorse.storage.strict_json import shown

__all__ = ["ZarrExport", "ZarrImport"]

_CHUNK_NBYTES = 1 << 20
_LEVEL = 3
_ROOT = "zarr.json"
# What zarr and its codecs raise for chunks that are damaged.
_FAULTS = (ValueError, RuntimeError, TypeError, KeyError)


class ZarrExport(ReadsLikeShelf):
    """Exporting to zarr."""

    def export_zarr(
        self,
        path: str | os.PathLike[str],
        names: str | Iterable[str] | None = None,
        *,
        progress: ShelfProgress | None = None,
        force: bool = False,
    ) -> Path:
        """Write tensors as the arrays of a group of zarr, format 3. Names become nested groups at
        "/". Chunks are compressed by Zstandard, so that others can read them without Packhorse.

        Args:
            path: the folder to create.
            names: the tensors; None for all, without nested states.
            progress: called with the bytes done, and the bytes of all tensors.
            force: whether a group of zarr at `path` may be replaced.

        Returns:
            The folder.

        Raises:
            KeyError: the shelf has no tensor of a name.
            TypeError: a name is that of a nested state.
            ValueError: zarr cannot have an array of a name, or one array inside another.
            MissingBackendError: zarr is not installed.
            OSError: the folder cannot be written; FileExistsError if it exists and `force` is
                False.
        """
        _require_zarr("export_zarr")
        folder = _local(path)
        with outgoing(self, names, progress) as (tensors, meter):
            check_segments(tensors, "zarr", ("__", _ROOT))
            with atomic_folder(folder, _replaceable(folder, force)) as building:
                group = import_late("zarr").create_group(building, zarr_format=3)
                for name, tensor in tensors.items():
                    _export(group, name, tensor, meter)
                sync_files(building)
        return folder


class ZarrImport:
    """Importing from zarr."""

    def import_zarr(
        self,
        path: Any,
        prefix: str = "",
        names: str | Iterable[str] | None = None,
        *,
        replace: bool = False,
        resume: bool = False,
        progress: ShelfProgress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Read the arrays of a group of zarr, or one array, of format 2 or 3.

        Args:
            path: the folder or URL of the group or array, or a store of zarr.
            prefix: a name for the group in the shelf, in front of the names of its arrays. An array
                that is in no group gets it as its name, by default the name of its folder.
            names: the arrays of the group; None for all.
            replace: whether tensors of the same names may be replaced.
            resume: whether each array is a transaction of its own, instead of all together. Arrays
                that the shelf has already, equal in every bit, are then kept.
            progress: called with the bytes done, and the bytes of all arrays.
            storage_options: options for the file system of a URL, as in fsspec.

        Returns:
            The names of the tensors in the shelf.

        Raises:
            KeyError: the group has no array of a name.
            TypeError: a shelf has no such dtype.
            ValueError: there is no group or array of zarr; or the shelf has a tensor of such a
                name, and `replace` is False.
            CorruptionError: a chunk is damaged.
            MissingBackendError: zarr is not installed.
            OSError: a file cannot be read.
        """
        _require_zarr("import_zarr")
        arrays = _arrays(path, prefix, names, storage_options)
        tensors = [
            _incoming(name, array, f"{path}: array {shown(array.path or name)}")
            for name, array in arrays.items()
        ]
        return store(self, tensors, replace=replace, resume=resume, progress=progress)


def _require_zarr(verb: str) -> None:
    try:
        import_late("packhorse.zarr_dtypes")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "zarr":
            raise
        raise MissingBackendError(
            f"{verb} needs zarr; install it with: pip install 'packhorse[zarr]'"
        ) from None


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(
            f"{path}: a shelf is exported to a folder of this machine; copy that to the URL"
        )
    return Path(path)


def _replaceable(folder: Path, force: bool) -> list[Path] | None:
    """What may be removed with an old folder: all that a group of zarr has."""
    if not force or not folder.is_dir():
        return None
    if any(folder.iterdir()) and not (folder / _ROOT).is_file():
        raise FileExistsError(
            f"{folder}: is no group of zarr (it has no {_ROOT}), so it is not replaced; move it "
            "away or name another output"
        )
    return [path.relative_to(folder) for path in folder.rglob("*")]


# Exporting.


def _export(group: Any, name: str, tensor: Outgoing, meter: Meter) -> None:
    # In whole chunks of the shelf, which would otherwise be decoded again for the next shard.
    chunk = tensor.tile(_CHUNK_NBYTES)
    tile = tile_shape(tensor.shape, chunk, BLOCK_NBYTES // tensor.native.itemsize)
    is_sharded = any(part < size for part, size in zip(tile, tensor.shape, strict=True))
    shard = tuple(-(-part // unit) * unit for part, unit in zip(tile, chunk, strict=True))
    dtype = import_late("packhorse.zarr_dtypes").zarr_dtype(tensor.native)
    parent, _, leaf = name.rpartition("/")
    array = (group.require_group(parent) if parent else group).create_array(
        leaf,
        shape=tensor.shape,
        dtype=dtype,
        chunks=chunk,
        shards=shard if is_sharded else None,
        compressors=import_late("zarr.codecs").ZstdCodec(level=_LEVEL, checksum=True),
        fill_value=dtype.default_scalar(),
        config={"write_empty_chunks": True},
    )
    for box, block in tensor.read(shard, meter):
        if bits_of(block).any():
            array[box] = block


# Importing.


def _arrays(
    path: Any, prefix: str, names: str | Iterable[str] | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arrays to import, by their names in the shelf."""
    root = _open(path, options)
    if not hasattr(root, "members"):
        if names is not None:
            raise KeyError(f"{path}: is one array and no group; leave names= out")
        return {prefix or Path(str(path)).stem: root}
    found = {name: node for name, node in root.members(max_depth=None) if hasattr(node, "chunks")}
    asked = sorted(found) if names is None else [names] if isinstance(names, str) else list(names)
    for name in asked:
        if name not in found:
            raise KeyError(f"{path}: has no array {shown(name)}; it has {shown(sorted(found))}")
    return {name_below(prefix, name): found[name] for name in asked}


def _open(path: Any, options: Mapping[str, Any] | None) -> Any:
    is_path = isinstance(path, str | os.PathLike)
    if is_path and "://" not in os.fspath(path) and not Path(path).is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder; name a group or array of zarr")
    given = {} if options is None else {"storage_options": dict(options)}
    try:
        return import_late("zarr").open(path, mode="r", **given)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: is neither a group nor an array of zarr; name the folder that has {_ROOT}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"{path}: zarr cannot read its metadata: {error}") from error


def _incoming(name: str, array: Any, where: str) -> Incoming:
    with _naming(where, "its metadata"):
        found, shape = array.dtype, tuple(array.shape)
    dtype = dtype_of(found, where)
    native = native_dtype(dtype)
    tile = tile_shape(shape, array.chunks, BLOCK_NBYTES // native.itemsize)

    def blocks() -> Iterator[Block]:
        for box in tiles(shape, tile):
            with _naming(where, f"elements {_words(box)}"):
                block = np.asarray(array[box])
            yield box, block.astype(native, copy=False)

    return Incoming(name, dtype, shape, where, blocks)


def _words(box: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{cut.start}:{cut.stop}" for cut in box) + "]"


@contextmanager
def _naming(where: str, what: str) -> Iterator[None]:
    """Make the errors of zarr and its codecs name the array and the place."""
    try:
        yield
    except _FAULTS as error:
        reason = str(error).partition("\n")[0]
        raise CorruptionError(
            f"{where}: {what} cannot be read ({reason}); get the array again"
        ) from error
