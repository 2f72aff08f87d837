"""The code of `compress` and `decompress`, for one tensor or many, that all frameworks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from packhorse import _core
from packhorse.codecs.base import as_bytes
from packhorse.errors import CorruptionError, blaming
from packhorse.frame.compress import compress_buffer
from packhorse.frame.frame import Frame
from packhorse.frame.many import BLAMED, PackJob, UnpackJob, compress_many, decompress_many
from packhorse.framework import Framework
from packhorse.layout import Level

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
    copies = [not framework.is_readable_in_place(tensor) for tensor in tensors]
    check = _MemoryCheck(framework, tensors, outs, bases, what)
    if any(copies):  # the jobs may be done in several parts, and nothing shall be written before
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
        check.run_for([job.out for job in jobs], [(job.src, job.base) for job in jobs])
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
    tensors, jobs, direct = [], [], []
    for i, frame in enumerate(frames):
        try:
            if outs is not None:
                framework.check_out(outs[i], frame.dtype, frame.shape)
            tensors.append(framework.empty(frame.dtype, frame.shape) if outs is None else outs[i])
            base = None if bases is None or bases[i] is None else framework.readable(bases[i])[0]
        except BLAMED as error:
            raise type(error)(f"frame {i}: {error}") from error
        memory = framework.memory(tensors[i])
        if memory is not None:
            jobs.append(UnpackJob(frame, memory, base))
            direct.append(i)
    if outs is not None and len(jobs) < len(frames):
        check.run()
    elif outs is not None:
        check.run_for([job.dst for job in jobs], [(job.frame.data, job.base) for job in jobs])
    try:
        decompress_many(jobs, threads=threads, name_of=lambda k: f"frame {direct[k]}")
    finally:
        for i in direct:
            framework.mark_written(tensors[i])
    for i in sorted(set(range(len(frames))) - set(direct)):  # elements of less than a byte
        base = None if bases is None else bases[i]
        with blaming(f"frame {i}", BLAMED):
            decompress_tensor(framework, frames[i], out=tensors[i], threads=threads, base=base)
    return tensors


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
        self._outs = outs
        self._bases = bases
        self._what = what

    def run_for(self, outs: Sequence[Any], read: Iterable[tuple[Any, Any]]) -> None:
        """Does what `run` does, faster, if the memory of all lists is known.

        Args:
            outs: buffers.
            read: the buffer of each item and that of its base, or None.
        """
        if any(
            base is not None and not self._framework.is_readable_in_place(base)
            for base in self._bases or ()
        ):  # what is given for it is a copy
            self.run()
            return
        try:
            written = [as_bytes(out) for out in outs]
            if _core.are_apart(
                written, [data for pair in read for data in pair if data is not None]
            ):
                return
        except TypeError:
            pass  # the call itself refuses such an object
        self.run()

    def run(self) -> None:
        """Compares all memory.

        Raises:
            ValueError: two members share memory, and one of them is written to.
        """
        if self._outs is None:
            return
        lists: list[tuple[str, Sequence[Any], bool]] = [
            ("outs[{}]", self._outs, True),
            (self._what + " {}", self._items, False),
            ("bases[{}]", self._bases or (), False),
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
    read = []
    for i, frame in enumerate(frames):
        if isinstance(frame, Frame):
            read.append(frame)
            continue
        try:
            read.append(Frame.from_buffer(frame))
        except BLAMED as error:
            raise type(error)(f"frame {i}: {error}") from error
    nbytes = sum(frame.logical_nbytes for frame in read)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"the frames hold {nbytes} bytes together, more than max_nbytes = {max_nbytes}"
        )
    return read
