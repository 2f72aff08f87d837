"""The work of `packhorse shelf export` and `import`: tensors to and from files of other formats.

Nothing here draws, prints or exits.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packhorse.cli.actions import Watch
from packhorse.cli.failures import UsageError
from packhorse.cli.jobs import check_source as check_place
from packhorse.cli.rows import gb_per_s, ratio
from packhorse.cli.runs import Source
from packhorse.cli.shelf.actions import check_path, stepping, view_of
from packhorse.cli.shelf.rows import ExchangedTensor, ExportedTensors, ImportedTensors
from packhorse.disk import Shelf
from packhorse.disk.shelf.exchange_methods import Exports, ImportPlan, Imports

__all__ = ["FormatName", "Incoming", "export", "import_", "incoming", "receiver"]


class FormatName(StrEnum):
    """Names of the formats on the command line."""

    ZARR = "zarr"
    NPY = "npy"
    SAFETENSORS = "safetensors"


_EXPORTS: dict[FormatName, Callable[..., object]] = {
    FormatName.ZARR: Exports.export_zarr,
    FormatName.NPY: Exports.export_npy,
    FormatName.SAFETENSORS: Exports.export_safetensors,
}


@dataclass(frozen=True)
class Incoming:
    """A file or folder to import.

    Attributes:
        src: its path or URL.
        format: what it is.
        name: the name of its tensor, or a name in front of those of its tensors; may be empty.
        dtype: what the elements of an .npy file are, if it does not say so.
    """

    src: str
    format: FormatName
    name: str
    dtype: str | None


def format_of(path: str, given: FormatName | None) -> FormatName:
    """The format of a file or folder: as given, or by what its name ends in.

    Raises:
        UsageError: the name does not say it, or it is a file of NumPy at a URL.
    """
    named = (each for each in FormatName if path.lower().rstrip("/").endswith(f".{each}"))
    found = given or next(named, None)
    if found is None:
        raise UsageError(
            f"{path}: its name does not end in .zarr, .npy or .safetensors; say what it is with "
            "--format"
        )
    if found is FormatName.NPY and "://" in path:
        raise UsageError(f"{path}: files of NumPy must be on this machine; copy it first")
    return found


def export(
    shelf: Shelf,
    path: str,
    dest: str,
    names: Sequence[str],
    *,
    format: FormatName | None,
    tag: str | None,
    dry_run: bool,
    force: bool,
    watch: Watch,
) -> ExportedTensors:
    """Write tensors to a file or folder.

    Raises:
        UsageError: a name does not exist, or the format is unknown or has one tensor only.
    """
    kind = format_of(dest, format)
    view = view_of(shelf, tag)
    there = {tensor.name: tensor for tensor in view.info().tensors}
    wanted = list(dict.fromkeys(names)) or list(there)
    for name in wanted:
        if name not in there:
            raise UsageError(f"there is no tensor {name!r}; `packhorse shelf list` shows all")
    is_file = kind is FormatName.NPY and dest.endswith(".npy")
    if is_file and len(wanted) != 1:
        raise UsageError(
            f"{dest}: an .npy file has one tensor, not {len(wanted)}; name one, or give a folder "
            "and --format npy"
        )
    rows = [_row(there[name].name, there[name]) for name in wanted]
    nbytes, seconds = sum(row.nbytes for row in rows), 0.0
    if not dry_run:
        with stepping(watch, f"export {dest}", nbytes) as progress:
            start = time.perf_counter()
            chosen = wanted[0] if is_file else wanted
            _EXPORTS[kind](view, dest, chosen, force=force, progress=progress)
            seconds = time.perf_counter() - start
    return ExportedTensors(
        path, dest, str(kind), dry_run, nbytes, seconds, gb_per_s(nbytes, seconds), rows
    )


def _row(name: str, tensor: Any) -> ExchangedTensor:
    return ExchangedTensor(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes)


def incoming(
    sources: Sequence[str], format: FormatName | None, name: str | None, dtype: str | None
) -> list[Incoming]:
    """The sources of a command line, if they are there.

    Args:
        sources: paths and URLs.
        format: of all; None for what their names end in.
        name: of the one tensor, or in front of the names of several; None for none.
        dtype: of elements in .npy files that do not say it.

    Raises:
        FileNotFoundError: a path leads nowhere.
        UsageError: a format is unknown.
    """
    jobs = []
    for source in map(Source.of, sources):
        place = None if "://" in source.src else check_place(source.src)
        kind = format_of(source.src, format)
        own = name or ""
        if kind is FormatName.NPY and not (place and place.is_dir()):
            stem = Path(source.src).name.removesuffix(".npy")
            own = stem if name is None else name if len(sources) == 1 else f"{name}/{stem}"
        jobs.append(Incoming(source.src, kind, own, dtype))
    return jobs


@contextmanager
def receiver(path: str, *, dry_run: bool, **options: Any) -> Iterator[Shelf | None]:
    """The shelf to import to; in a dry run for reading, and None if there is none yet."""
    check_path(path)
    if dry_run and not Path(path).exists():
        yield None
        return
    with Shelf(path, "r" if dry_run else "r+", **options) as shelf:
        yield shelf


def import_(
    shelf: Shelf | None, path: str, job: Incoming, *, dry_run: bool, replace: bool, watch: Watch
) -> ImportedTensors:
    """Put the tensors of one source into a shelf, all of them or none.

    Raises:
        FileExistsError: the shelf has a tensor of such a name, and `replace` is False.
    """
    plan = ImportPlan()
    _run_import(job, plan)
    rows = [_row(tensor.name, tensor) for tensor in plan.tensors]
    replaced = [row.name for row in rows if shelf is not None and row.name in shelf]
    nbytes = sum(row.nbytes for row in rows)
    if dry_run or shelf is None:
        return ImportedTensors(
            path, job.src, str(job.format), True, nbytes, None, None, 0.0, 0.0, rows, replaced
        )
    if replaced and not replace:
        raise FileExistsError(
            f"{job.src}: the shelf has {replaced[0]!r} already; allow it with --replace, or choose "
            "another name with --name"
        )
    with stepping(watch, f"import {job.src}", nbytes) as progress:
        start = time.perf_counter()
        _run_import(job, shelf, replace=replace, progress=progress)
        seconds = time.perf_counter() - start
    packed = sum(shelf[row.name].packed_nbytes for row in rows)
    return ImportedTensors(
        path, job.src, str(job.format), False, nbytes, packed, ratio(nbytes, packed), seconds,
        gb_per_s(nbytes, seconds), rows, replaced,
    )  # fmt: skip


def _run_import(job: Incoming, shelf: Imports, **options: Any) -> None:
    if job.format is FormatName.NPY:
        shelf.import_npy(job.name, job.src, dtype=job.dtype, **options)
    elif job.format is FormatName.ZARR:
        shelf.import_zarr(job.src, job.name, **options)
    else:
        shelf.import_safetensors(job.src, job.name, **options)
