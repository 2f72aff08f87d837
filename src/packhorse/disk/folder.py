"""Model folders as Hugging Face lays them out: shards, an index of them, and other files.

Each `X.safetensors` becomes `X.ph.safetensors`. Each `*.safetensors.index.json` is rewritten to
name the packed shards, and records its own original text. All other files are copied. Subfolders
are treated in the same way. Links are followed, because a download cache consists of links: the
output has files instead. A link to a folder that is also elsewhere in the tree becomes a link in
the output, so that each folder is packed once (`walk.py`). Unpacking restores the original folder
byte for byte.

A base can be such a folder too: the tensors in a subfolder are packed against those in the
subfolder of the same name, whatever shards they are in.

All names, headers and indexes are checked before anything is written (`folder_items.py`). A folder
of this machine is then complete or absent. A folder at a URL cannot appear in one step: it is
marked as unfinished until it is complete, and a run that was interrupted can be continued
(`folder_output.py`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.base_files import BaseLike, Bases, open_parts, place_base
from packhorse.disk.container import pack_file, plan_file
from packhorse.disk.folder_index import INDEX_SUFFIX, PLAIN_SUFFIX
from packhorse.disk.folder_items import (
    Item,
    files_in,
    items_to_pack,
    items_to_unpack,
    logical_nbytes_of,
    models,
    packed_in,
    unchanged,
)
from packhorse.disk.folder_output import Task, build_folder
from packhorse.disk.index_file import verify_index
from packhorse.disk.results import FileResult, FolderResult, Problem, Progress, TensorPlan
from packhorse.disk.unpack import check_bases, unpack_file
from packhorse.disk.verify import verify_file
from packhorse.errors import CorruptionError
from packhorse.layout import Level
from packhorse.storage.locations import Place, is_same_file, is_within, open_place

__all__ = [
    "folder_logical_nbytes",
    "pack_folder",
    "packed_files",
    "plan_folder",
    "refuse_base",
    "require_parts",
    "unpack_folder",
    "verify_folder",
]


def pack_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FolderResult:
    """Pack a model folder.

    Args:
        src: a folder with `*.safetensors` files in it or in its subfolders.
        dst: the folder to create; an empty folder may exist there.
            Either may be at a URL of fsspec. A folder at a URL has the object
            `.packhorse-unfinished.json` until it is complete. The same call, made again after an
            interruption, goes on with the files that are missing.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        force: whether a folder at `dst` may be replaced, if the new one has a counterpart for each
            of its files.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        base: the model that this one was tuned from, as for `pack_file`. The shards of the two may
            differ. If the base is a folder, a subfolder is packed against the base's subfolder of
            the same name.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        Sizes, for the folder and for each model file.

    Raises:
        ValueError: `src` has no safetensors file or has packed ones, the folders overlap, or the
            base has no safetensors file in any folder where `src` has one.
        CorruptionError, CompatibilityError: a model file, an index or the base is bad; nothing is
            written.
        BaseMismatchError: the base was itself packed against a base.
        OSError: a file cannot be read or written; FileExistsError if `dst` may not be replaced.

    Example:
        >>> from packhorse.disk import pack_folder
        >>> result = pack_folder("llama", "llama-packed", level="fast")
    """
    source, destination = open_place(src, storage_options), open_place(dst, storage_options)
    is_url = not isinstance(destination, Path)  # there, unfinished files are replaced
    base = place_base(base, storage_options)
    row = resolve_level(level)
    resolve_threads(threads)
    items = items_to_pack(source)
    refuse_base(destination, base)
    with open_parts(base) as part:
        require_parts(items, part, source, base)

        def pack(item: Item, output: Place) -> FileResult:
            against = part(item.relative.parent)
            return pack_file(
                item.source, output, level=level, threads=threads, force=is_url,
                progress=progress, base=against,
            )  # fmt: skip

        task = Task("pack", source, destination, items, base, row.name.lower())
        return build_folder(task, pack, force=force, progress=progress)


def unpack_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FolderResult:
    """Restore the model folder that was packed, every file byte for byte.

    Args:
        src: a folder that `pack_folder` wrote.
        dst: the folder to create; an empty folder may exist there.
            Either may be at a URL of fsspec. A folder at a URL has the object
            `.packhorse-unfinished.json` until it is complete. The same call, made again after an
            interruption, goes on with the files that are missing.
        threads: the number of threads; None for one per core, at most 8.
        force: whether a folder at `dst` may be replaced, if the new one has a counterpart for each
            of its files.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        max_nbytes: refuse a folder whose tensors take more bytes in total; None for no limit.
        base: what the folder was packed against, if it has a base.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        Sizes, for the folder and for each model file.

    Raises:
        ValueError: `src` has no packed file, or the folders overlap.
        CorruptionError, CompatibilityError: a packed file, an index or the base is bad, or the
            folder exceeds the limit.
        BaseMismatchError: a tensor needs a base, and no base or another one was given.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read or written; FileExistsError if `dst` may not be replaced.

    Example:
        >>> from packhorse.disk import unpack_folder
        >>> result = unpack_folder("llama.ph", "llama-again")
    """
    source, destination = open_place(src, storage_options), open_place(dst, storage_options)
    is_url = not isinstance(destination, Path)  # there, unfinished files are replaced
    base = place_base(base, storage_options)
    resolve_threads(threads)
    items = items_to_unpack(source)
    _check_limit(items, max_nbytes, source)
    refuse_base(destination, base)
    with open_parts(base) as part:

        def unpack(item: Item, output: Place) -> FileResult:
            against = part(item.relative.parent)
            return unpack_file(
                item.source, output, threads=threads, force=is_url, progress=progress,
                base=against,
            )  # fmt: skip

        for item in models(items):
            check_bases(item.source, part(item.relative.parent))
        task = Task("unpack", source, destination, items, base)
        return build_folder(task, unpack, force=force, progress=progress)


def plan_folder(
    src: str | os.PathLike[str],
    *,
    level: Level | str = "default",
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[tuple[PurePath, list[TensorPlan]]]:
    """Estimate what `pack_folder` would do; nothing is written.

    Args:
        src: a folder with `*.safetensors` files in it or in its subfolders, at a path or a URL.
        level: "fast", "default" or "max".
        base: as for `pack_folder`.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The path relative to `src` and the tensors' plans, for each model file.

    Raises:
        ValueError, BaseMismatchError, CorruptionError, CompatibilityError, OSError: as for
            `pack_folder`.

    Example:
        >>> from packhorse.disk import plan_folder
        >>> [(str(path), len(plans)) for path, plans in plan_folder("llama")]
        [('model.safetensors', 21)]
    """
    source, base = open_place(src, storage_options), place_base(base, storage_options)
    items = items_to_pack(source)
    with open_parts(base) as part:
        require_parts(items, part, source, base)
        with unchanged(source, items, "there is no result"):
            return [
                (
                    item.relative,
                    plan_file(item.source, level=level, base=part(item.relative.parent)),
                )
                for item in models(items)
            ]


def verify_folder(
    src: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Check every packed file and every index of a packed folder, and continue after a bad one.

    Args:
        src: a folder that `pack_folder` wrote, at a path or a URL.
        threads: the number of threads; None for one per core, at most 8.
        progress: called with the bytes done since the last call; the total is that of
            `folder_logical_nbytes`.
        max_nbytes: report a packed file whose tensors take more bytes in total; None for no limit.
        base: what the folder was packed against, if it has a base; as for `verify_file`.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        All problems; an empty list if the folder is good. Copied files have no checksums, so they
        are not checked.

    Raises:
        ValueError: `src` has no packed file, or `threads` is wrong.
        CorruptionError, CompatibilityError: the base is bad.
        ChangedError: the base was written to while it was used.
        OSError: a file cannot be read.

    Example:
        >>> from packhorse.disk import verify_folder
        >>> problems = verify_folder("llama.ph")
    """
    source, base = open_place(src, storage_options), place_base(base, storage_options)
    resolve_threads(threads)
    models = set(packed_in(source))
    problems: list[Problem] = []
    with open_parts(base) as part:
        for path, relative, nbytes in files_in(source):
            if path in models:
                against = part(relative.parent)
                problems += _verify_model(path, threads, progress, max_nbytes, against)
                continue
            if path.name.endswith(INDEX_SUFFIX):
                problems += verify_index(path)
            if progress is not None:
                progress(nbytes)
    return problems


def packed_files(
    src: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Sequence[Place]:
    """The packed files of a folder and its subfolders.

    Args:
        src: the folder, at a path or a URL.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The paths of the files, which are not opened.

    Raises:
        ValueError: there is no packed file.
        CorruptionError: an interrupted run has left the folder.
        OSError: the folder cannot be read.

    Example:
        >>> from packhorse.disk import packed_files
        >>> files = packed_files("llama.ph")
    """
    return packed_in(open_place(src, storage_options))


def folder_logical_nbytes(
    src: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> int:
    """The total that `progress` counts up to for a folder, packed or not.

    Args:
        src: the folder, at a path or a URL; only headers are read.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        The size of all tensors of model files, plus the size of all other files. A model file with
        a bad header counts as 0.

    Raises:
        OSError: the folder cannot be read.

    Example:
        >>> from packhorse.disk import folder_logical_nbytes
        >>> total = folder_logical_nbytes("llama")
    """
    return logical_nbytes_of(open_place(src, storage_options))


def _check_limit(items: list[Item], max_nbytes: int | None, source: Place) -> None:
    nbytes = sum(item.nbytes for item in models(items))
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"{source}: its tensors take {nbytes} bytes in total, more than max_nbytes = "
            f"{max_nbytes}; unpack only some of its files, or allow more"
        )


def require_parts(
    items: list[Item],
    part: Callable[[PurePath], Bases | None],
    source: Place,
    base: BaseLike | None,
) -> None:
    """Refuse a base that has no file for any of the model files, or that is the folder itself.

    Args:
        items: what is in the folder.
        part: gives the base of the files of a subfolder.
        source: the folder.
        base: the base; None if there is none.

    Raises:
        ValueError: it is such a base.
    """
    if base is None:
        return
    if isinstance(base, str | os.PathLike) and is_same_file(source, open_place(base)):
        raise ValueError(f"{source}: the base is the folder itself; name the older model")
    parts = [part(item.relative.parent) for item in models(items)]
    if all(bases is None or bases.is_empty for bases in parts):
        raise ValueError(
            f"{base}: no *{PLAIN_SUFFIX} file in any folder where the model has one; name a base "
            "with the same subfolders"
        )


def refuse_base(destination: Place, base: BaseLike | None) -> None:
    """Refuse an output that would replace the base.

    Raises:
        ValueError: the base is in it.
    """
    if not isinstance(base, str | os.PathLike):
        return
    if is_within(open_place(base), destination):
        raise ValueError(f"{destination}: the base is inside this output; name another output")


def _verify_model(
    path: Place,
    threads: int | None,
    progress: Progress | None,
    max_nbytes: int | None,
    base: Bases | None,
) -> list[Problem]:
    try:
        return verify_file(
            path, threads=threads, progress=progress, max_nbytes=max_nbytes, base=base
        )
    except ValueError as error:  # it has the name of a packed file, but it is not one
        return [Problem(path, None, None, str(error))]
