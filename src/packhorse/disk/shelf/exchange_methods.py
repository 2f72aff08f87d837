"""The methods of shelves that exchange tensors with other formats.

`Shelf` and the state of a tag have `Exports`, and `Shelf` has `Imports`. The work is in
`exchange_zarr`, `exchange_npy` and `exchange_safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packhorse.disk.base_files import BaseLike
from packhorse.disk.shelf import exchange_npy, exchange_safetensors, exchange_zarr
from packhorse.disk.shelf.exchange import ReadsLikeShelf, ShelfProgress
from packhorse.storage.locations import Place

__all__ = ["Exports", "Imports"]


class Exports(ReadsLikeShelf):
    """Exporting to other formats, block by block. Output is complete or absent."""

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
        return exchange_zarr.export_zarr(self, path, names, progress=progress, force=force)

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
        return exchange_npy.export_npy(self, path, names, progress=progress, force=force)

    def export_safetensors(
        self,
        path: str | os.PathLike[str],
        names: str | Iterable[str] | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        progress: ShelfProgress | None = None,
        force: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Place:
        """Write tensors as a plain safetensors file, which `packhorse.disk.pack_file` can pack.

        Args:
            path: the file to write, at a path or a URL.
            names: the tensors; None for all, without nested states.
            metadata: pairs of strings for the file's header.
            progress: called with the bytes done, and the bytes of all tensors.
            force: whether an existing file may be replaced.
            storage_options: options for the file system of a URL, as in fsspec.

        Returns:
            The file.

        Raises:
            KeyError: the shelf has no tensor of a name.
            TypeError: a name is that of a nested state.
            ValueError: the file's name is that of a packed file, or a tensor of elements of 4 or 6
                bits does not end at a byte.
            OSError: the file cannot be written; FileExistsError if it exists and `force` is False.
        """
        return exchange_safetensors.export_safetensors(
            self, path, names, metadata=metadata, progress=progress, force=force,
            storage_options=storage_options,
        )  # fmt: skip


class Imports:
    """Importing from other formats, block by block: in one transaction, or one for each tensor."""

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
        return exchange_zarr.import_zarr(
            self, path, prefix, names, replace=replace, resume=resume, progress=progress,
            storage_options=storage_options,
        )  # fmt: skip

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
        return exchange_npy.import_npy(
            self, names, path, dtype=dtype, replace=replace, resume=resume, progress=progress
        )

    def import_safetensors(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        names: str | Iterable[str] | None = None,
        *,
        base: BaseLike | None = None,
        replace: bool = False,
        resume: bool = False,
        progress: ShelfProgress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Read the tensors of a model: of a safetensors file, packed or not, or of a folder of
        such.

        Args:
            path: the file, the index of a sharded model, or the folder, at a path or a URL.
            prefix: a name for the model in the shelf, in front of the names of its tensors.
            names: tensors of the model; None for all.
            base: what a packed model was packed against, if it has a base; as for `unpack_file`.
            replace: whether tensors of the same names may be replaced.
            resume: whether each tensor is a transaction of its own, instead of all together.
                Tensors that the shelf has already, equal in every bit, are then kept.
            progress: called with the bytes done, and the bytes of all tensors.
            storage_options: options for the file systems of all URLs of this call, as in fsspec.

        Returns:
            The names of the tensors in the shelf.

        Raises:
            KeyError: the model has no tensor of a name.
            ValueError: the folder has no model, or several; or the shelf has a tensor of such a
                name, and `replace` is False.
            CorruptionError, CompatibilityError: a file is damaged, or too new.
            BaseMismatchError: a tensor needs a base, and no base or another one was given.
            OSError: a file cannot be read, or has changed.
        """
        return exchange_safetensors.import_safetensors(
            self, path, prefix, names, base=base, replace=replace, resume=resume,
            progress=progress, storage_options=storage_options,
        )  # fmt: skip
