"""Packs, unpacks and verifies many files and folders, on a Dask cluster or in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.disk.base_files import open_bases
from packhorse.disk.cluster.results import FileReport, ManyResult
from packhorse.disk.cluster.run import Run
from packhorse.disk.cluster.steps import PART_NBYTES, Job, Settings
from packhorse.disk.folder_index import packed_place_name, plain_place_name
from packhorse.disk.results import Progress
from packhorse.layout import Level
from packhorse.storage.cluster import check_cluster
from packhorse.storage.locations import Place, open_place

__all__ = ["pack_many", "run_jobs", "unpack_many", "verify_many"]

_N_CHECKED = 1000  # sources that workers are asked for by name
_N_LOOKING = 16  # threads that ask servers what is there
_PathLike: TypeAlias = str | os.PathLike[str]
# Opens a display of progress for a total number of bytes.
_Watch: TypeAlias = Callable[[int], AbstractContextManager[Progress | None]]


def pack_many(
    sources: Iterable[_PathLike],
    dst: _PathLike | None = None,
    *,
    client: Any = None,
    level: Level | str = "default",
    threads: int | None = None,
    force: bool = False,
    check: str = "quick",
    part_nbytes: int = PART_NBYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
    base: _PathLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ManyResult:
    """Pack many files and model folders; each file is a task, and one that fails stops no other.

    What is packed already is skipped, so a run that was interrupted can be repeated. A folder is
    marked as unfinished until all its files are there.

    Args:
        sources: safetensors files and model folders, at paths or URLs of fsspec.
        dst: the folder for all outputs; None to write each beside its source. `X.safetensors`
            becomes `X.ph.safetensors`, and a folder `X` becomes `X.ph`.
        client: a `distributed.Client`. Its workers must see all paths. None to work in this
            process, one task after the other.
        level: "fast", "default" or "max".
        threads: the number of threads of a task; None for what its worker can spare.
        force: whether an existing output that is not the wanted one may be replaced.
        check: how an existing output is compared with its source: "quick" compares headers, times
            and the content hashes of a few tensors, "whole" all bytes.
        part_nbytes: a file with more bytes is packed by several tasks, each of tensors of about
            this size together, whose frames go to temporary parts beside the output.
        dry_run: whether nothing is written; the reports then say what would be done.
        progress: called with the bytes done since the last call.
        base: the base of all sources, a file or a folder, as for `pack_folder`.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        A report for each file. The errors of files are in the reports.

    Raises:
        ValueError: two sources have the same output, or an option is wrong.
        FileNotFoundError: a source is missing, or a worker does not see it.
        MissingBackendError: the cluster has no Packhorse, or other versions.
        OSError: the cluster has no workers, or was lost for a minute.

    Example:
        >>> from packhorse.disk import pack_many
        >>> # model.safetensors was packed before
        >>> result = pack_many(["model.safetensors", "tuned.safetensors"])
        >>> [report.status for report in result.files]
        ['skipped', 'packed']
    """
    settings = Settings(
        "pack", resolve_level(level).name.lower(), force, _threads(threads),
        _absolute(base, storage_options), _is_whole(check), part_nbytes, None, dry_run,
    )  # fmt: skip
    if part_nbytes < 1:
        raise ValueError(f"part_nbytes is {part_nbytes}; it must be at least 1")
    jobs = _jobs(sources, dst, packed_place_name, storage_options)
    return run_jobs(jobs, settings, client, lambda _: nullcontext(progress))


def unpack_many(
    sources: Iterable[_PathLike],
    dst: _PathLike | None = None,
    *,
    client: Any = None,
    threads: int | None = None,
    force: bool = False,
    check: str = "quick",
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: _PathLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ManyResult:
    """Restore many packed files and folders, byte for byte; the inverse of `pack_many`.

    Args:
        sources: packed files and folders, at paths or URLs.
        dst: the folder for all outputs; None to write each beside its source.
        client: as for `pack_many`.
        threads: the number of threads of a task; None for what its worker can spare.
        force: whether an existing output that is not the wanted one may be replaced.
        check: how an existing output is compared with its source, as for `pack_many`.
        progress: called with the bytes done since the last call.
        max_nbytes: refuse a file whose tensors take more bytes in total; None for no limit.
        base: what the sources were packed against.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        A report for each file. The errors of files are in the reports.

    Raises:
        ValueError, FileNotFoundError, MissingBackendError, OSError: as for `pack_many`.

    Example:
        >>> from packhorse.disk import unpack_many
        >>> unpack_many(["model.ph.safetensors"]).files[0].status
        'skipped'
    """
    settings = Settings(
        "unpack", "default", force, _threads(threads), _absolute(base, storage_options),
        _is_whole(check), max_nbytes=max_nbytes,
    )  # fmt: skip
    jobs = _jobs(sources, dst, plain_place_name, storage_options)
    return run_jobs(jobs, settings, client, lambda _: nullcontext(progress))


def verify_many(
    sources: Iterable[_PathLike],
    *,
    client: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
    max_nbytes: int | None = None,
    base: _PathLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ManyResult:
    """Check every checksum of many packed files and folders.

    Args:
        sources: packed files and folders, at paths or URLs.
        client: as for `pack_many`.
        threads: the number of threads of a task; None for what its worker can spare.
        progress: called with the bytes done since the last call.
        max_nbytes: report a file whose tensors take more bytes in total; None for no limit.
        base: what the sources were packed against.
        storage_options: options for the file systems of all URLs of this call, as in fsspec.

    Returns:
        A report for each file, with its problems.

    Raises:
        FileNotFoundError, MissingBackendError, OSError: as for `pack_many`.

    Example:
        >>> from packhorse.disk import verify_many
        >>> verify_many(["model.ph.safetensors"]).ok
        True
    """
    base_place = _absolute(base, storage_options)
    settings = Settings("verify", threads=_threads(threads), base=base_place, max_nbytes=max_nbytes)
    places = _sources(sources, storage_options)
    jobs = [Job(place, None, is_folder) for place, is_folder in places]
    return run_jobs(jobs, settings, client, lambda _: nullcontext(progress))


def run_jobs(
    jobs: Sequence[Job],
    settings: Settings,
    client: Any,
    watch: _Watch,
    tell: Callable[[FileReport], object] = lambda _: None,
) -> ManyResult:
    """Do jobs, after checking the cluster.

    Args:
        jobs: the sources and their outputs.
        settings: what to do with them.
        client: a `distributed.Client`, or None.
        watch: opens a display of progress for a total number of bytes.
        tell: is called with each report as soon as it is there.

    Raises:
        ValueError, FileNotFoundError, MissingBackendError, OSError: as for `pack_many`.
    """
    start = time.perf_counter()
    jobs = [Job(_full(job.source), _full(job.output), job.is_folder) for job in jobs]
    _refuse_shared_outputs(jobs)
    if settings.base is not None and not all(job.is_folder for job in jobs):
        with open_bases(settings.base):  # refuses a folder without models, before any work
            pass
    if client is not None:
        check_cluster(client, list(_paths_of(jobs, settings)))
    run = Run(jobs, settings, client)
    run.look()
    with watch(run.nbytes) as progress, closing(run.work(progress)) as reports:
        files = []
        for report in reports:
            files.append(report)
            tell(report)
    order = {str(job.source): number for number, job in enumerate(jobs)}
    files.sort(key=lambda file: (_number(file, order), str(file.source)))
    return ManyResult(tuple(files), time.perf_counter() - start)


def _number(file: FileReport, order: Mapping[str, int]) -> int:
    """The number of the job that a file belongs to."""
    place = file.source
    while str(place) not in order:
        place = place.parent
    return order[str(place)]


def _threads(threads: int | None) -> int | None:
    return None if threads is None else resolve_threads(threads)


def _is_whole(check: str) -> bool:
    if check not in ("quick", "whole"):
        raise ValueError(f"check is {check!r}; it must be 'quick' or 'whole'")
    return check == "whole"


def _absolute(path: _PathLike | None, options: Mapping[str, Any] | None) -> Place | None:
    return None if path is None else _full(open_place(path, options))


def _full(place: Any) -> Any:
    """A place that means the same in every process; None stays None."""
    return Path(os.path.abspath(place)) if isinstance(place, Path) else place


def _sources(
    sources: Iterable[_PathLike], options: Mapping[str, Any] | None
) -> list[tuple[Place, bool]]:
    """The places of sources, and whether each is a folder; servers are asked several at a time."""
    if isinstance(sources, str | os.PathLike):
        raise TypeError(f"sources must be a list of paths, not the path {os.fspath(sources)!r}")
    places = [_full(open_place(path, options)) for path in sources]
    with ThreadPoolExecutor(_N_LOOKING) as pool:
        return list(zip(places, pool.map(_is_folder, places), strict=True))


def _is_folder(place: Place) -> bool:
    if place.is_dir():
        return True
    if not place.exists():
        raise FileNotFoundError(f"{place}: no such file or folder; check the path")
    return False


def _jobs(
    sources: Iterable[_PathLike],
    dst: _PathLike | None,
    rename: Callable[[Place, bool], str],
    options: Mapping[str, Any] | None,
) -> list[Job]:
    into = _absolute(dst, options)
    if isinstance(into, Path) and not into.is_dir():
        raise FileNotFoundError(f"{into}: there is no such folder; create it, or name another")
    return [
        Job(place, (into or place.parent) / rename(place, is_folder), is_folder)
        for place, is_folder in _sources(sources, options)
    ]


def _refuse_shared_outputs(jobs: Sequence[Job]) -> None:
    owners: dict[str, Place] = {}
    for job in jobs:
        other = owners.setdefault(str(job.output or job.source), job.source)
        if other is not job.source:
            raise ValueError(
                f"{job.output or job.source}: {other} and {job.source} would both be written or "
                "read here; name each source once, or handle them one by one"
            )


def _paths_of(jobs: Sequence[Job], settings: Settings) -> Iterator[Path]:
    """The paths of this machine that workers must see: all folders, and the first sources."""
    sources = [job.source for job in jobs]
    outputs = [job.output for job in jobs if job.output is not None]
    folders = [place.parent for place in (*sources, *outputs) if isinstance(place, Path)]
    for place in dict.fromkeys((settings.base, *sources[:_N_CHECKED], *folders)):
        if isinstance(place, Path) and place.exists():
            yield place
