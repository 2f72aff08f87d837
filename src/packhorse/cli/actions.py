"""The work of the verbs: each takes a source and returns rows. Nothing here draws, prints or exits.

The disk hop does the work. This module calls its function for files or the one for folders,
measures the time, and turns the results into rows.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

import packhorse
from packhorse.cli.failures import UsageError
from packhorse.cli.jobs import Job, packed_files
from packhorse.cli.rows import (
    BenchedFile,
    FileRow,
    InspectedFile,
    PlaneRow,
    PlannedFile,
    PlanRow,
    ProblemRow,
    TensorRow,
    VerifiedFile,
    gb_per_s,
    ratio,
)
from packhorse.disk import (
    FileResult,
    FolderResult,
    TensorPlan,
    folder_logical_nbytes,
    logical_nbytes,
    pack_file,
    pack_folder,
    plan_file,
    plan_folder,
    unpack_file,
    unpack_folder,
    verify_file,
    verify_folder,
)
from packhorse.disk.packed_header import PrefixWriter, is_packed
from packhorse.disk.results import notice_of
from packhorse.errors import PackhorseError
from packhorse.frame import Frame
from packhorse.storage.locations import Place
from packhorse.storage.source import header_at
from packhorse.storage.source_file import stamp_of

if TYPE_CHECKING:
    from packhorse.cli.measure import Settings

__all__ = ["Watch", "bench", "inspect", "pack", "plan", "unpack", "verify"]

# Opens a progress display, for a title and a total number of bytes. It yields a function that takes
# the bytes done since the last call.
Watch: TypeAlias = Callable[[str, int | None], AbstractContextManager[Callable[[int], None] | None]]


def pack(
    job: Job,
    *,
    base: Place | None,
    level: str,
    threads: int | None,
    force: bool,
    watch: Watch,
) -> FileRow:
    """Pack a file or a folder."""
    run = pack_folder if job.is_folder else pack_file
    with watch(f"pack {job.src.name}", _nbytes(job.src)) as progress:
        start = time.perf_counter()
        result = run(
            job.src,
            job.dst,
            level=level,
            threads=threads,
            force=force,
            progress=progress,
            base=base,
        )
        return _file_row(result, time.perf_counter() - start)


def unpack(
    job: Job,
    *,
    base: Place | None,
    threads: int | None,
    force: bool,
    max_nbytes: int | None,
    watch: Watch,
) -> FileRow:
    """Unpack a file or a folder."""
    run = unpack_folder if job.is_folder else unpack_file
    with watch(f"unpack {job.src.name}", _nbytes(job.src)) as progress:
        start = time.perf_counter()
        result = run(
            job.src,
            job.dst,
            threads=threads,
            force=force,
            progress=progress,
            max_nbytes=max_nbytes,
            base=base,
        )
        return _file_row(result, time.perf_counter() - start)


def plan(job: Job, *, base: Place | None, level: str) -> list[PlannedFile]:
    """Estimate from samples what packing would do; a row for each model file."""
    if not job.is_folder:
        return [_planned(job.src, job.dst, plan_file(job.src, level=level, base=base))]
    return [
        _planned(job.src / file, job.dst / file, plans)
        for file, plans in plan_folder(job.src, level=level, base=base)
    ]


def inspect(path: Place) -> list[InspectedFile]:
    """Describe a packed file, or every packed file of a folder; no tensor is decoded."""
    return [_inspect_file(file) for file in packed_files(path)]


def verify(
    path: Place,
    *,
    base: Place | None,
    threads: int | None,
    max_nbytes: int | None,
    watch: Watch,
) -> VerifiedFile:
    """Check all checksums of a packed file or folder, and continue after a bad one."""
    run = verify_folder if path.is_dir() else verify_file
    files = packed_files(path)
    with watch(f"verify {path.name}", _nbytes(path)) as progress:
        start = time.perf_counter()
        problems = run(path, threads=threads, progress=progress, max_nbytes=max_nbytes, base=base)
        seconds = time.perf_counter() - start
    return VerifiedFile(
        path=str(path),
        ok=not problems,
        n_files=len(files),
        packed_nbytes=sum(stamp_of(file).nbytes for file in files),
        seconds=seconds,
        problems=[
            ProblemRow(str(problem.path), problem.tensor, problem.offset, problem.message)
            for problem in problems
        ],
    )


def bench(path: Place, base: Place | None, settings: "Settings", watch: Watch) -> BenchedFile:
    """Time the codecs on a file's tensors, in memory."""
    from packhorse.cli.measure import bench_file

    if path.is_dir():
        raise UsageError(f"{path}: this is a folder, but bench needs a file; name one of its files")
    header = header_at(path)
    if is_packed(header):
        raise UsageError(f"{path}: already packed, but bench needs a plain file; unpack it first")
    with watch(f"bench {path.name}", header.data_nbytes) as progress:
        rows = bench_file(path, settings, progress, base=base)
    return BenchedFile(
        path=str(path),
        level=settings.level,
        threads=settings.threads,
        bit_exact=all(row.bit_exact for row in rows),
        dtypes=rows[:-1],
        total=rows[-1],
    )


def _nbytes(path: Place) -> int | None:
    """The total for the progress bar. None if the header is bad, which the work then reports."""
    try:
        return folder_logical_nbytes(path) if path.is_dir() else logical_nbytes(path)
    except PackhorseError:
        return None


def _file_row(result: FileResult | FolderResult, seconds: float) -> FileRow:
    files = result.files if isinstance(result, FolderResult) else (result,)
    return FileRow(
        src=str(result.source),
        dst=str(result.output),
        n_files=len(files),
        n_copied=result.n_copied if isinstance(result, FolderResult) else 0,
        n_tensors=sum(len(file.tensors) for file in files),
        n_delta=sum(tensor.base_hash is not None for file in files for tensor in file.tensors),
        nbytes=result.original_nbytes,
        packed_nbytes=result.packed_nbytes,
        ratio=result.ratio,
        seconds=seconds,
        gb_per_s=gb_per_s(result.original_nbytes, seconds),
        notice=result.notice,
    )


def _planned(src: Place, dst: Place, plans: list[TensorPlan]) -> PlannedFile:
    header = header_at(src)
    prefix_nbytes = PrefixWriter(header).nbytes
    estimated = prefix_nbytes + sum(item.packed_nbytes for item in plans)
    return PlannedFile(
        src=str(src),
        dst=str(dst),
        nbytes=header.file_nbytes,
        estimated_nbytes=estimated,
        ratio=ratio(header.file_nbytes, estimated),
        notice=notice_of([(item.nbytes, item.packed_nbytes) for item in plans]),
        tensors=[_plan_row(item) for item in plans],
    )


def _plan_row(item: TensorPlan) -> PlanRow:
    return PlanRow(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        nbytes=item.nbytes,
        estimated_nbytes=item.packed_nbytes,
        ratio=ratio(item.nbytes, item.packed_nbytes),
        level=item.plan.level.name.lower(),
        split=item.plan.split.name.lower(),
        reason=item.plan.reason,
    )


def _inspect_file(path: Place) -> InspectedFile:
    with packhorse.open_file(path, framework="np") as file:
        if not file.is_packed:
            raise ValueError(
                f"{path}: not a packed file, but a plain safetensors file: pack it first"
            )
        tensors = [_tensor_row(name, frame) for name, frame in file.outlines()]
        metadata, base_name = file.metadata(), file.base_name
    nbytes = sum(tensor.nbytes for tensor in tensors)
    packed_nbytes = stamp_of(path).nbytes
    return InspectedFile(
        path=str(path),
        nbytes=nbytes,
        packed_nbytes=packed_nbytes,
        ratio=ratio(nbytes, packed_nbytes),
        metadata=metadata or {},
        n_delta=sum(tensor.base_hash is not None for tensor in tensors),
        base_name=base_name,
        tensors=tensors,
    )


def _tensor_row(name: str, frame: Frame) -> TensorRow:
    return TensorRow(
        name=name,
        dtype=frame.dtype,
        shape=frame.shape,
        nbytes=frame.logical_nbytes,
        packed_nbytes=frame.nbytes,
        ratio=frame.ratio,
        level=frame.level.name.lower() if frame.level else "unknown",
        split=frame.split.name.lower(),
        n_chunks=frame.n_chunks,
        content_hash=frame.content_hash.hex(),
        base_hash=frame.base_hash.hex() if frame.base_hash else None,
        base_dtype=frame.base_dtype,
        planes=[
            PlaneRow(
                name=plane.name,
                nbytes=plane.logical_nbytes,
                packed_nbytes=plane.nbytes,
                ratio=ratio(plane.logical_nbytes, plane.nbytes),
                modes={mode.name.lower(): n for mode, n in plane.modes.items()},
            )
            for plane in frame.planes()
        ],
    )
