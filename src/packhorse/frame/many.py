"""Packs and unpacks many tensors in one call, with threads that share all of them.

Most tensors are floats that need no plan, and most frames need nothing else to be unpacked. The
core takes all of these at once. The others are packed and unpacked one by one, side by side in
Python's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from packhorse import _core
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray, as_writable_bytes
from packhorse.codecs.source import Source
from packhorse.errors import (
    BaseMismatchError,
    ChangedError,
    CompatibilityError,
    CorruptionError,
)
from packhorse.frame.compress import compress_buffer, pack_plain, room_for
from packhorse.frame.frame import Frame
from packhorse.frame.plan import checked_source
from packhorse.layout import Level
from packhorse.threads import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BLAMED", "PackJob", "UnpackJob", "compress_many", "decompress_many"]

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
    n_threads, effort = resolve_threads(threads), resolve_level(level)
    sources: list[Source] = []
    rooms: list[ByteArray] = []
    try:
        for job in jobs:
            sources.append(checked_source(job.src, job.dtype, job.shape))
            rooms.append(room_for(sources[-1], job.out))
    except BLAMED as error:
        _blame(error, len(rooms), name_of)
    frames: list[Frame | None] = [None] * len(jobs)
    alone = [i for i, job in enumerate(jobs) if job.base is None]
    packed_alone = pack_plain(
        [sources[i] for i in alone],
        [rooms[i] for i in alone],
        [jobs[i].name for i in alone],
        effort,
        n_threads,
    )
    for i, frame in zip(alone, packed_alone, strict=True):
        frames[i] = frame
    rest = [i for i, frame in enumerate(frames) if frame is None]
    if not rest:
        return [frame for frame in frames if frame is not None]

    def pack(k: int, share: int) -> Frame:
        job = jobs[rest[k]]
        try:
            return compress_buffer(
                job.src, job.dtype, job.shape, level=effort, threads=share, out=rooms[rest[k]],
                name=job.name, base=job.base, base_dtype=job.base_dtype, base_hash=job.base_hash,
            )  # fmt: skip
        except BLAMED as error:
            _blame(error, rest[k], name_of)

    sizes = [sources[i].data.size for i in rest]
    packed = iter(map_tensors(pack, sizes, n_threads))
    return [next(packed) if frame is None else frame for frame in frames]


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
    opened = [job.frame.opened for job in jobs]
    alone = [i for i, frame in enumerate(opened) if frame.stands_alone]
    status, bad, chunk = _core.unpack_frames(
        [opened[i] for i in alone], [targets[i] for i in alone], True, n_threads
    )
    if status:
        _blame(jobs[alone[bad]].frame.chunk_error(chunk, status), alone[bad], name_of)
    if len(alone) == len(jobs):
        return
    rest = [i for i, frame in enumerate(opened) if not frame.stands_alone]

    def unpack(k: int, share: int) -> None:
        frame, _, base, base_hash = jobs[rest[k]]
        try:
            frame.decompress_into(targets[rest[k]], threads=share, base=base, base_hash=base_hash)
        except BLAMED as error:
            _blame(error, rest[k], name_of)

    map_tensors(unpack, [jobs[i].frame.logical_nbytes for i in rest], n_threads)


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
