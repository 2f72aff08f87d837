"""Turns the paths of a command line into jobs: what is read, and where the result is written.

A source is a file or a model folder, on this machine or at a URL. Without `-o` the result is
written beside it: `X.safetensors` to `X.ph.safetensors`, a folder `X` to `X.ph`. With several
sources, `-o` names a folder for all results.
All paths are checked before the first job starts, so that the tenth file does not fail
after an hour for a reason that was known at the start. The disk hop checks each path again when the
job starts.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packhorse import disk
from packhorse.cli.failures import UsageError
from packhorse.disk.folder_index import packed_place_name, plain_place_name
from packhorse.storage.locations import Place, check_output, open_place

__all__ = ["Job", "check_source", "pack_jobs", "packed_files", "unpack_jobs"]


@dataclass(frozen=True)
class Job:
    """One source and its output.

    Attributes:
        src: an existing file or folder.
        dst: where the result is written; a file if `src` is a file, otherwise a folder.
        is_folder: whether `src` and `dst` are folders.
    """

    src: Place
    dst: Place
    is_folder: bool


def pack_jobs(sources: Iterable[str], output: str | None, *, force: bool) -> list[Job]:
    """The jobs that pack sources.

    Args:
        sources: files and folders.
        output: the path of `-o`; None to write each result beside its source.
        force: whether existing outputs may be replaced.

    Returns:
        One job for each source, in order.

    Raises:
        OSError: a source is missing, or an output exists and `force` is False.
        ValueError: an output is an input or the output of another source, or its name is unclear.
    """
    return _jobs(sources, output, packed_place_name, force)


def unpack_jobs(sources: Iterable[str], output: str | None, *, force: bool) -> list[Job]:
    """The jobs that unpack sources; arguments and errors as for `pack_jobs`."""
    return _jobs(sources, output, plain_place_name, force)


def check_source(path: str | os.PathLike[str]) -> Place:
    """The place of a path or URL that leads to a file or folder.

    Raises:
        FileNotFoundError: nothing exists there.
        UsageError: it is neither a file nor a folder.
        MissingBackendError, OSError, ValueError: as for `open_place`.
    """
    place = open_place(path)
    if not place.exists():
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(place))
    if isinstance(place, Path) and not place.is_file() and not place.is_dir():
        raise UsageError(f"{place}: neither a file nor a folder; name a model file or model folder")
    return place


def packed_files(place: Place) -> Sequence[Place]:
    """The packed files of a source: the file itself, or all in a folder and its subfolders.

    Raises:
        ValueError: the folder has no packed file.
    """
    return disk.packed_files(place) if place.is_dir() else [place]


def _jobs(
    sources: Iterable[str], output: str | None, rename: Callable[[Place, bool], str], force: bool
) -> list[Job]:
    places = [check_source(path) for path in sources]
    into = None if output is None else open_place(output)
    is_folder = into is not None and _is_folder(into)
    if len(places) > 1 and into is not None and not is_folder:
        remedy = "create it first" if isinstance(into, Path) else "end the URL with a slash"
        raise UsageError(f"{into}: with several sources, -o must be an existing folder; {remedy}")
    jobs = [
        _job(place, into, rename, is_alone=len(places) == 1, is_into=is_folder) for place in places
    ]
    _refuse_shared_outputs(jobs)
    for job in jobs:
        if not job.is_folder:
            check_output(job.dst, source=job.src, force=force)
    return jobs


def _is_folder(place: Place) -> bool:
    """Whether results are written into a place. A URL that ends in a slash need not exist."""
    return (not isinstance(place, Path) and place.is_called_folder) or place.is_dir()


def _job(
    src: Place,
    output: Place | None,
    rename: Callable[[Place, bool], str],
    *,
    is_alone: bool,
    is_into: bool,
) -> Job:
    is_folder = src.is_dir()
    named = src
    if isinstance(src, Path) and src.name in {"", ".."}:
        named = src.resolve()  # `.` and `..` have no name to change
    if output is None:
        return Job(src, named.with_name(rename(named, is_folder)), is_folder)
    is_into = is_into and not (is_alone and is_folder)
    return Job(src, output / rename(named, is_folder) if is_into else output, is_folder)


def _refuse_shared_outputs(jobs: list[Job]) -> None:
    owners: dict[str, Place] = {}
    for job in jobs:
        dst = os.path.abspath(job.dst) if isinstance(job.dst, Path) else str(job.dst)
        other = owners.setdefault(dst, job.src)
        if other is not job.src:
            raise UsageError(
                f"{job.dst}: {other} and {job.src} would both be written here; pack or unpack them "
                "one by one"
            )
