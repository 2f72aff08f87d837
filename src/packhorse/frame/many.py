"""Packs and unpacks many tensors in one call, with threads that share all of them.

Most tensors are floats that need no plan, and most frames need nothing else to be unpacked. The
core takes all of these at once. The others are packed and unpacked one by one, side by side in
Python's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from packhorse import _core
from packhorse._core import Views
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray, as_writable_bytes
from packhorse.errors import (
    BaseMismatchError,
    ChangedError,
    CompatibilityError,
    CorruptionError,
)
from packhorse.frame.compress import compress_planned, pack_plain, room_for
from packhorse.frame.frame import Frame
from packhorse.frame.plan import checked_source
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.threads import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BLAMED",
    "PackJob",
    "UnpackJob",
    "compress_in_rooms",
    "compress_many",
    "compress_views",
    "decompress_many",
    "decompress_to_views",
]

# The errors that say which tensor they are about.
BLAMED = (
    CorruptionError, CompatibilityError, BaseMismatchError, TypeError, ValueError, ChangedError
)  # fmt: skip


class PackJob(NamedTuple):
    """A tensor to be packed; the arguments of `compress_buffer`."""

    src: Buffer
    dtype: str
    shape: tuple[int, ...]
    out: Buffer | None = None
    name: str | None = None
    base: Buffer | None = None
    base_dtype: str | None = None
    base_hash: bytes | None = None


class UnpackJob(NamedTuple):
    """A frame to be unpacked as a whole; the arguments of `Frame.decompress_into`."""

    frame: Frame
    dst: Buffer
    base: Buffer | None = None
    base_hash: bytes | None = None


def compress_many(
    jobs: Sequence[PackJob],
    *,
    level: Level | str = "default",
    threads: int | None = None,
    name_of: Callable[[int], str] | None = None,
) -> list[Frame]:
    """Packs tensors, each as `compress_buffer` does.

    Args:
        jobs: the tensors. Each `out` has memory of its own.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.
        name_of: what errors call the tensor of a number; None if its `name` says enough.

    Returns:
        A frame for each tensor, in the same order.

    Raises:
        ChangedError, TypeError, ValueError: as for `compress_buffer`, for one of the tensors.
    """
    effort, n_threads = resolve_level(level), resolve_threads(threads)
    views, rooms = _checked(jobs, name_of)
    for i, job in enumerate(jobs):
        if job.base is not None:
            views.forget(i)  # so that the core leaves it
    names = [job.name for job in jobs]
    return compress_views(views, rooms, names, jobs.__getitem__, effort, n_threads, name_of)


def compress_views(
    views: Views,
    rooms: Sequence[ByteArray] | None,
    names: Sequence[str | None] | None,
    job_of: Callable[[int], PackJob],
    level: Level,
    threads: int,
    name_of: Callable[[int], str] | None,
) -> list[Frame]:
    """Packs tensors, most of them in one call of the core.

    Args:
        views: where the tensors lie; unknown for those that the core cannot pack.
        rooms: memory for each frame; None for new memory.
        names: what messages call the tensors; None for no names.
        job_of: the tensor of a number, for those that the core leaves.
        level: how hard to try.
        threads: how many to use.
        name_of: as for `compress_many`.

    Returns:
        A frame for each tensor.

    Raises:
        ChangedError, TypeError, ValueError: as for `compress_buffer`, for one of the tensors.
    """
    frames = pack_plain(views, rooms, names, level, threads)
    rest = [i for i, frame in enumerate(frames) if frame is None]
    if not rest:
        return [frame for frame in frames if frame is not None]

    def pack(k: int, share: int) -> Frame:
        i = rest[k]
        try:
            job = job_of(i)
            return _pack_planned(job if rooms is None else job._replace(out=rooms[i]), level, share)
        except BLAMED as error:
            _blame(error, i, name_of)

    packed = iter(map_tensors(pack, [views.nbytes(i) for i in rest], threads))
    return [next(packed) if frame is None else frame for frame in frames]


def compress_in_rooms(
    views: Views,
    rooms: Sequence[int],
    out: ByteArray,
    job_of: Callable[[int], PackJob],
    level: Level,
    threads: int,
) -> list[int]:
    """Does what `compress_views` does, without an object for each frame.

    Args:
        views: as there.
        rooms: the length of the memory for each frame; these lie one after another in `out`.
        out: memory for all frames.
        job_of: as there; each `out` is the tensor's own room.
        level: how hard to try.
        threads: how many to use.

    Returns:
        The length of each frame.
    """
    if level == Level.MAX:
        sizes = [0] * len(views)
    else:
        sizes = _core.pack_lengths(views, _core.views_of_rooms(out, rooms), level, threads)
    rest = [i for i, nbytes in enumerate(sizes) if not nbytes]

    def pack(k: int, share: int) -> int:
        return _pack_planned(job_of(rest[k]), level, share).nbytes

    for i, nbytes in zip(
        rest, map_tensors(pack, [views.nbytes(i) for i in rest], threads), strict=True
    ):
        sizes[i] = nbytes
    return sizes


def _pack_planned(job: PackJob, level: Level, threads: int) -> Frame:
    return compress_planned(
        job.src, job.dtype, job.shape, level=level, threads=threads, out=job.out, name=job.name,
        base=job.base, base_dtype=job.base_dtype, base_hash=job.base_hash,
    )  # fmt: skip


def _checked(
    jobs: Sequence[PackJob], name_of: Callable[[int], str] | None
) -> tuple[Views, list[ByteArray] | None]:
    """Where tensors lie, and memory for their frames if a caller gives any.

    Raises:
        TypeError, ValueError: as for `compress_buffer`, for one of the tensors.
    """
    views = _views(jobs)
    if views is None:
        sources = []
        try:
            for job in jobs:
                sources.append(checked_source(job.src, job.dtype, job.shape))
        except BLAMED as error:
            _blame(error, len(sources), name_of)
        views = _core.views_of_buffers(
            [source.data for source in sources],
            [source.dtype.code for source in sources],
            [source.shape for source in sources],
        )
    if all(job.out is None for job in jobs):
        return views, None
    rooms: list[ByteArray] = []
    try:
        for job in jobs:
            rooms.append(room_for(job.dtype, job.shape, job.out))
    except BLAMED as error:
        _blame(error, len(rooms), name_of)
    return views, rooms


def _views(jobs: Sequence[PackJob]) -> Views | None:
    """Where tensors lie, if all are buffers of plain bytes that are as long as they must be."""
    try:
        views = _core.views_of_buffers(
            [job.src for job in jobs],
            [DTYPE_BY_NAME[job.dtype].code for job in jobs],
            [job.shape for job in jobs],
        )
    except (KeyError, TypeError, OverflowError):  # what is wrong is found out one by one
        return None
    return None if views.unknown() else views


def decompress_many(
    jobs: Sequence[UnpackJob],
    *,
    threads: int | None = None,
    name_of: Callable[[int], str] | None = None,
) -> None:
    """Unpacks frames as a whole, each as `Frame.decompress_into` does.

    Args:
        jobs: the frames. Each `dst` has memory of its own.
        threads: the number of threads; None for one per core, at most 8.
        name_of: what errors call the frame of a number; None if the frame's name says enough.

    Raises:
        BaseMismatchError, CorruptionError, TypeError, ValueError: as for `Frame.decompress_into`,
            for one of the frames. What was written to all `dst` is undefined then.
    """
    n_threads = resolve_threads(threads)
    targets: list[ByteArray] = []
    try:
        for job in jobs:
            targets.append(_target(job))
    except BLAMED as error:
        _blame(error, len(targets), name_of)
    frames = [job.frame for job in jobs]
    views = _core.views_of_buffers(targets, [], [])
    rest = decompress_to_views(frames, views, n_threads, name_of)
    if not rest:
        return

    def unpack(k: int, share: int) -> None:
        frame, _, base, base_hash = jobs[rest[k]]
        try:
            frame.decompress_into(targets[rest[k]], threads=share, base=base, base_hash=base_hash)
        except BLAMED as error:
            _blame(error, rest[k], name_of)

    map_tensors(unpack, [jobs[i].frame.logical_nbytes for i in rest], n_threads)


def decompress_to_views(
    frames: Sequence[Frame], views: Views, threads: int, name_of: Callable[[int], str] | None
) -> list[int]:
    """Unpacks frames that need nothing else, in one call of the core.

    Args:
        frames: the frames.
        views: memory for the tensor of each; unknown where the core cannot write.
        threads: how many to use.
        name_of: as for `decompress_many`.

    Returns:
        Which frames are left, because they need more or because their memory does not suit.

    Raises:
        CorruptionError: as for `decompress_many`.
    """
    opened = [frame.opened for frame in frames]
    status, bad, chunk, rest = _core.unpack_to_views(opened, views, threads)
    if status:
        error = frames[bad].chunk_error(chunk, status)
        _blame(error, bad, name_of)
    return rest


def _blame(error: Exception, i: int, name_of: Callable[[int], str] | None) -> NoReturn:
    """Raises an error, with the name of the tensor of a number in front of its message."""
    if name_of is None:
        raise error
    raise type(error)(f"{name_of(i)}: {error}") from error


def _target(job: UnpackJob) -> ByteArray:
    """The memory for the tensor of a frame."""
    target = as_writable_bytes(job.dst, "dst")
    if target.size != job.frame.logical_nbytes:
        raise ValueError(
            f"dst has {target.size} bytes; the tensor needs {job.frame.logical_nbytes}"
        )
    return target
