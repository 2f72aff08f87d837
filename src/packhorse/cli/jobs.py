"""Turns the paths of a command line into jobs: what is read, and where the result is written.

A source is a file or a model folder. Without `-o` the result is written beside it: `X.safetensors`
to `X.ph.safetensors`, a folder `X` to `X.ph`. With several sources, `-o` names a folder for all
results. All paths are checked before the first job starts, so that the tenth file does not fail
after an hour for a reason that was known at the start. The disk hop checks each path again when the
job starts.
"""

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from packhorse import disk
from packhorse.cli.failures import UsageError
from packhorse.disk.folder_index import packed_name, plain_name
from packhorse.layout import FILE_SUFFIX
from packhorse.storage.atomic import check_output_file

__all__ = ["Job", "check_source", "pack_jobs", "packed_files", "unpack_jobs"]

_FOLDER_SUFFIX = ".ph"


@dataclass(frozen=True)
class Job:
    """One source and its output.

    Attributes:
        src: an existing file or folder.
        dst: where the result is written; a file if `src` is a file, otherwise a folder.
        is_folder: whether `src` and `dst` are folders.
    """

    src: Path
    dst: Path
    is_folder: bool


def pack_jobs(sources: Iterable[Path], output: Path | None, *, force: bool) -> list[Job]:
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
    return _jobs(sources, output, _packed_name, force)


def unpack_jobs(sources: Iterable[Path], output: Path | None, *, force: bool) -> list[Job]:
    """The jobs that unpack sources; arguments and errors as for `pack_jobs`."""
    return _jobs(sources, output, _unpacked_name, force)


def check_source(path: Path) -> Path:
    """Returns the path if it leads to a file or folder.

    Raises:
        FileNotFoundError: nothing exists there.
        UsageError: it is neither a file nor a folder.
    """
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(path))
    if not path.is_file() and not path.is_dir():
        raise UsageError(f"{path}: neither a file nor a folder; name a model file or model folder")
    return path


def packed_files(path: Path) -> list[Path]:
    """The packed files of a source: the file itself, or all in a folder and its subfolders.

    Raises:
        ValueError: the folder has no packed file.
    """
    return disk.packed_files(path) if path.is_dir() else [path]


def _jobs(
    sources: Iterable[Path], output: Path | None, rename: Callable[[Path], str], force: bool
) -> list[Job]:
    paths = [check_source(path) for path in sources]
    _refuse_file_for_many(paths, output)
    jobs = [_job(path, output, rename, is_alone=len(paths) == 1) for path in paths]
    _refuse_shared_outputs(jobs)
    for job in jobs:
        if not job.is_folder:
            check_output_file(job.dst, source=job.src, force=force)
    return jobs


def _refuse_file_for_many(sources: list[Path], output: Path | None) -> None:
    if len(sources) > 1 and output is not None and not output.is_dir():
        raise UsageError(
            f"{output}: with several sources, -o must be an existing folder; create it first"
        )


def _job(src: Path, output: Path | None, rename: Callable[[Path], str], *, is_alone: bool) -> Job:
    is_folder = src.is_dir()
    named = src.resolve() if src.name in {"", ".."} else src  # `.` and `..` have no name to change
    if output is None:
        return Job(src, named.with_name(rename(named)), is_folder)
    into = output.is_dir() and not (is_alone and is_folder)
    return Job(src, output / rename(named) if into else output, is_folder)


def _packed_name(src: Path) -> str:
    return src.name + _FOLDER_SUFFIX if src.is_dir() else packed_name(src.name)


def _unpacked_name(src: Path) -> str:
    suffix = _FOLDER_SUFFIX if src.is_dir() else FILE_SUFFIX
    if not src.name.endswith(suffix) or src.name == suffix:
        raise UsageError(f"{src}: does not end in {suffix}; name the output with -o")
    return src.name.removesuffix(suffix) if src.is_dir() else plain_name(src.name)


def _refuse_shared_outputs(jobs: list[Job]) -> None:
    owners: dict[str, Path] = {}
    for job in jobs:
        other = owners.setdefault(os.path.abspath(job.dst), job.src)
        if other is not job.src:
            raise UsageError(
                f"{job.dst}: {other} and {job.src} would both be written here; pack or unpack them "
                "one by one"
            )
