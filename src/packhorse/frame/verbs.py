"""The code of `compress` and `decompress`, for one tensor or many, that all frameworks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from packhorse import _core
from packhorse._core import OpenFrame, Views
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.errors import CorruptionError, blaming
from packhorse.frame.compress import compress_buffer, compress_planned, pack_plain, room_for
from packhorse.frame.frame import Frame
from packhorse.frame.many import (
    BLAMED,
    PackJob,
    UnpackJob,
    compress_many,
    compress_views,
    decompress_many,
    decompress_to_views,
)
from packhorse.framework import Framework
from packhorse.layout import DTYPE_BY_CODE, Level

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "check_limit",
    "compress_tensor",
    "compress_tensors",
    "decompress_tensor",
    "decompress_tensors",
    "read_frames",
]

# The most bytes of copies, of tensors that cannot be read where they are, at a time.
_COPIED_NBYTES = 1 << 28


def compress_tensor(
    framework: Framework,
    tensor: Any,
    *,
    level: Level | str,
    threads: int | None,
    out: Buffer | None,
    base: Any,
) -> Frame:
    """Packs a tensor; arguments and errors as for `packhorse.numpy.compress`."""
    if base is None and out is None:
        views = framework.views([tensor])
        effort, n_threads = resolve_level(level), resolve_threads(threads)
        (frame,) = pack_plain(views, None, None, effort, n_threads)
        if frame is not None:
            return frame
        if not views.unknown():
            return compress_planned(
                *framework.readable(tensor), level=effort, threads=n_threads, out=None, name=None
            )
    data, dtype, shape = framework.readable(tensor)
    base_data, base_dtype = (None, None) if base is None else framework.readable(base)[:2]
    return compress_buffer(
        data, dtype, shape, level=level, threads=threads, out=out, base=base_data,
        base_dtype=base_dtype,
    )  # fmt: skip


def check_limit(frame: Frame | Buffer, max_nbytes: int | None) -> Frame:
    """Returns a frame, given as such or as its bytes, whose tensor is not larger than allowed.

    Raises:
        CorruptionError, CompatibilityError: the frame is bad, or its tensor is larger.
    """
    if not isinstance(frame, Frame):
        return Frame.from_buffer(frame, max_nbytes=max_nbytes)
    if max_nbytes is not None and frame.logical_nbytes > max_nbytes:
        found = f"the frame holds {frame.logical_nbytes} bytes"
        raise CorruptionError(f"{found}, more than max_nbytes = {max_nbytes}")
    return frame


def decompress_tensor(
    framework: Framework, frame: Frame, *, out: Any, threads: int | None, base: Any
) -> Any:
    """Unpacks a frame to host memory; arguments and errors as for `packhorse.numpy.decompress`."""
    if out is not None:
        framework.check_out(out, frame.dtype, frame.shape)
    tensor = framework.empty(frame.dtype, frame.shape) if out is None else out
    if base is None and frame.opened.stands_alone:
        views, n_threads = framework.views([tensor]), resolve_threads(threads)
        try:
            if not decompress_to_views([frame], views, n_threads, None):
                return tensor
        finally:
            if out is not None:  # nobody knows the new tensor yet
                framework.mark_written(tensor)
    base_data = None if base is None else framework.readable(base)[0]
    framework.fill(
        tensor, lambda memory: frame.decompress_into(memory, threads=threads, base=base_data)
    )
    return tensor


def compress_tensors(
    framework: Framework,
    tensors: Iterable[Any],
    *,
    level: Level | str,
    threads: int | None,
    outs: Sequence[Buffer] | None,
    bases: Sequence[Any] | None,
    what: str,
) -> list[Frame]:
    """Packs many tensors; arguments and errors as for `packhorse.numpy.compress_all`. `what` is the
    word for a tensor in messages."""
    tensors = list(tensors)
    check = _MemoryCheck(framework, tensors, outs, bases, what)
    views = framework.views(tensors)
    if bases is not None or views.unknown():
        return _compress_in_parts(framework, tensors, check, level, threads)
    rooms = None if outs is None else _rooms(views, outs, what)
    if rooms is not None:
        check.run_for(_core.views_of_buffers(rooms, [], []), [views])
    return compress_views(
        views, rooms, None, lambda i: PackJob(*framework.readable(tensors[i])),
        resolve_level(level), resolve_threads(threads), lambda i: f"{what} {i}",
    )  # fmt: skip


def _rooms(views: Views, outs: Sequence[Buffer], what: str) -> list[ByteArray]:
    """The memory that a caller gives for the frames of tensors.

    Raises:
        TypeError: an object is not a writable C-contiguous buffer.
        ValueError: one is too small.
    """
    forms, numbers = _core.forms_of_views(views)
    named = [(DTYPE_BY_CODE[code].name, shape) for code, shape in forms]
    rooms: list[ByteArray] = []
    try:
        for k, out in zip(numbers, outs, strict=True):
            rooms.append(room_for(*named[k], out))
    except BLAMED as error:
        raise type(error)(f"{what} {len(rooms)}: {error}") from error
    return rooms


def _compress_in_parts(
    framework: Framework,
    tensors: Sequence[Any],
    check: _MemoryCheck,
    level: Level | str,
    threads: int | None,
) -> list[Frame]:
    """Packs tensors of which some have bases, or must be copied: only some at a time."""
    outs, bases, what = check.outs, check.bases, check.what
    copies = [not framework.is_readable_in_place(tensor) for tensor in tensors]
    if any(copies):  # nothing shall be written before
        check.run()
    frames: list[Frame] = []
    jobs: list[PackJob] = []
    copied = 0

    def name(k: int) -> str:
        return f"{what} {len(frames) + k}"

    def flush() -> None:
        frames.extend(compress_many(jobs, level=level, threads=threads, name_of=name))
        jobs.clear()

    for i, tensor in enumerate(tensors):
        copied += getattr(tensor, "nbytes", 0) if copies[i] else 0
        if copied > _COPIED_NBYTES and jobs:
            flush()
            copied = tensor.nbytes if copies[i] else 0
        try:
            base = None if bases is None else bases[i]
            of_base = (None, None) if base is None else framework.readable(base)[:2]
            out = None if outs is None else outs[i]
            jobs.append(PackJob(*framework.readable(tensor), out, None, *of_base))
        except BLAMED as error:
            raise type(error)(f"{what} {i}: {error}") from error
    if outs is not None and not any(copies):
        read = [[job.src for job in jobs], [job.base for job in jobs if job.base is not None]]
        check.run_for(
            _core.views_of_buffers([job.out for job in jobs], [], []),
            [_core.views_of_buffers(buffers, [], []) for buffers in read],
        )
    flush()
    return frames


def decompress_tensors(
    framework: Framework,
    frames: Sequence[Frame],
    *,
    outs: Sequence[Any] | None,
    threads: int | None,
    bases: Sequence[Any] | None,
) -> list[Any]:
    """Unpacks many frames to host memory; arguments and errors as for
    `packhorse.numpy.decompress_all`."""
    check = _MemoryCheck(framework, frames, outs, bases, "frame")
    opened = [frame.opened for frame in frames]
    tensors = _new_tensors(framework, opened) if outs is None else list(outs)
    views = framework.views(tensors)
    if outs is not None:
        for i in _core.misfits(opened, views):
            with blaming(f"frame {i}", BLAMED):
                framework.check_out(tensors[i], frames[i].dtype, frames[i].shape)
    n_threads = resolve_threads(threads)
    if bases is not None:
        if outs is not None:
            check.run()
        _decompress_rest(framework, frames, tensors, bases, range(len(frames)), n_threads)
        return tensors
    if outs is not None:
        check.run_for(views, [_core.views_of_frames(opened)])
    try:
        rest = decompress_to_views(frames, views, n_threads, lambda i: f"frame {i}")
    finally:
        if outs is not None:
            framework.mark_all_written(tensors)
    _decompress_rest(framework, frames, tensors, None, rest, n_threads)
    return tensors


def _new_tensors(framework: Framework, opened: Sequence[OpenFrame]) -> list[Any]:
    """A new tensor for each frame.

    Raises:
        CompatibilityError: the framework has no such tensor.
    """
    forms, numbers = _core.forms_of_frames(opened)
    named = [(DTYPE_BY_CODE[code].name, shape) for code, shape in forms]
    for k, form in enumerate(named):
        with blaming(f"frame {numbers.index(k)}", BLAMED):
            framework.check_form(*form)
    return framework.empty_all(named, numbers)


def _decompress_rest(
    framework: Framework,
    frames: Sequence[Frame],
    tensors: Sequence[Any],
    bases: Sequence[Any] | None,
    numbers: Sequence[int],
    threads: int,
) -> None:
    """Unpacks the frames of these numbers, which need more than `decompress_to_views` does."""
    jobs, direct, others = [], [], []
    for i in numbers:
        with blaming(f"frame {i}", BLAMED):
            base = None if bases is None or bases[i] is None else framework.readable(bases[i])[0]
        memory = framework.memory(tensors[i])
        if memory is None:  # elements of less than a byte
            others.append(i)
            continue
        jobs.append(UnpackJob(frames[i], memory, base))
        direct.append(i)
    try:
        decompress_many(jobs, threads=threads, name_of=lambda k: f"frame {direct[k]}")
    finally:
        framework.mark_all_written([tensors[i] for i in direct])
    for i in others:
        base = None if bases is None else bases[i]
        with blaming(f"frame {i}", BLAMED):
            decompress_tensor(framework, frames[i], out=tensors[i], threads=threads, base=base)


class _MemoryCheck:
    """Refuses lists that do not fit each other: one of `outs` shares memory with another, with an
    item or with a base.

    Raises:
        ValueError: there are more or fewer `outs` or `bases` than items.
    """

    def __init__(
        self,
        framework: Framework,
        items: Sequence[Any],
        outs: Sequence[Any] | None,
        bases: Sequence[Any] | None,
        what: str,
    ) -> None:
        for name, members in (("outs", outs), ("bases", bases)):
            if members is not None and len(members) != len(items):
                raise ValueError(
                    f"{name} has {len(members)} members; there are {len(items)} {what}s"
                )
        self._framework = framework
        self._items = items
        self.outs = outs
        self.bases = bases
        self.what = what

    def run_for(self, written: Views, read: Sequence[Views]) -> None:
        """Does what `run` does, faster, if the memory of all lists is known.

        Args:
            written: the memory of `outs`.
            read: the memory of the items, and that of the bases.
        """
        are_copies = any(
            base is not None and not self._framework.is_readable_in_place(base)
            for base in self.bases or ()
        )
        is_known = not are_copies and not any(views.unknown() for views in (written, *read))
        if not is_known or not _core.are_apart([written], read):
            self.run()

    def run(self) -> None:
        """Compares all memory.

        Raises:
            ValueError: two members share memory, and one of them is written to.
        """
        if self.outs is None:
            return
        lists: list[tuple[str, Sequence[Any], bool]] = [
            ("outs[{}]", self.outs, True),
            (self.what + " {}", self._items, False),
            ("bases[{}]", self.bases or (), False),
        ]
        _refuse_overlaps(
            [
                span
                for name, members, is_written in lists
                for i, member in enumerate(members)
                if (span := _Span.of(name.format(i), member, self._framework, is_written))
            ]
        )


class _Span(NamedTuple):
    """Memory that one call reads or writes while other calls work.

    Attributes:
        start: the address of its first byte.
        stop: the address after its last byte.
        name: what messages call the memory.
        is_written: whether it is written to.
    """

    start: int
    stop: int
    name: str
    is_written: bool

    @classmethod
    def of(
        cls, name: str, value: object, framework: Framework, is_written: bool = False
    ) -> _Span | None:
        """Finds where a value lies. None if it is not in host memory, or if no call takes such a
        value: the call itself refuses it."""
        found = None if isinstance(value, Frame) else framework.span(value)
        if found is None:
            try:
                data = as_bytes(value.buffer() if isinstance(value, Frame) else value)
            except TypeError:
                return None
            found = data.ctypes.data, data.ctypes.data + data.size
        return cls(*found, name, is_written) if found[0] < found[1] else None


def _refuse_overlaps(spans: list[_Span]) -> None:
    """Refuses spans that overlap if one of them is written to.

    Raises:
        ValueError: two spans share memory, and one of them is written to.
    """
    reaching: dict[bool, _Span] = {}  # the one that ends last so far, by `is_written`
    for span in sorted(spans):
        for is_written, other in reaching.items():
            if span.start < other.stop and (span.is_written or is_written):
                raise ValueError(
                    f"{other.name} and {span.name} share memory; each needs memory of its own"
                )
        farthest = reaching.get(span.is_written)
        if farthest is None or span.stop > farthest.stop:
            reaching[span.is_written] = span


def read_frames(frames: Iterable[Frame | Buffer], max_nbytes: int | None) -> list[Frame]:
    """Returns frames, given as such or as their bytes, with their headers checked.

    Raises:
        CorruptionError: a frame is bad, or the tensors take more than `max_nbytes` together.
        CompatibilityError, TypeError: as `Frame.from_buffer`; the message names the frame.
    """
    given = list(frames)
    opened = iter(_core.open_each([frame for frame in given if not isinstance(frame, Frame)]))
    read = []
    for i, frame in enumerate(given):
        if isinstance(frame, Frame):
            read.append(frame)
            continue
        found = next(opened)
        if found is not None:
            read.append(Frame(found.memory, found, None, 0))
            continue
        with blaming(f"frame {i}", BLAMED):
            read.append(Frame.from_buffer(frame))
    if max_nbytes is None:
        return read
    nbytes = sum(frame.logical_nbytes for frame in read)
    if nbytes > max_nbytes:
        raise CorruptionError(
            f"the frames hold {nbytes} bytes together, more than max_nbytes = {max_nbytes}"
        )
    return read
