"""The code of `compress` and `decompress`, for one tensor or many, that all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from packhorse.arguments import resolve_threads
from packhorse.codecs.base import as_bytes
from packhorse.errors import (
    BaseMismatchError,
    ChangedError,
    CompatibilityError,
    CorruptionError,
    blaming,
)
from packhorse.frame.compress import compress_buffer
from packhorse.frame.frame import Frame
from packhorse.framework import Framework
from packhorse.layout import Level
from packhorse.threads import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["call_for_each", "check_limit", "compress_tensor", "decompress_tensor", "read_frames"]

_Result = TypeVar("_Result")
_BLAMED = (
    CorruptionError, CompatibilityError, BaseMismatchError, TypeError, ValueError, ChangedError
)  # fmt: skip


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


def call_for_each(
    call: Callable[[Any, Any, Any, int], _Result],
    items: Iterable[Any],
    outs: Sequence[Any] | None,
    bases: Sequence[Any] | None,
    *,
    threads: int | None,
    what: str,
    framework: Framework,
) -> list[_Result]:
    """Makes a call for each item, in several threads, and returns the results.

    Args:
        call: takes an item, its memory or None, its base or None, and how many threads to use.
        items: tensors or frames.
        outs: memory for each item; None for new memory.
        bases: the base of each item; None for no bases.
        threads: the number of threads; None for one per core, at most 8.
        what: the word for an item in messages.
        framework: the framework of the tensors.

    Raises:
        ValueError: there are more or fewer `outs` or `bases` than items, or one of `outs` shares
            memory with another, with an item or with a base. Nothing is written then.
        Exception: what a call raised; its message names the item.
    """
    items = list(items)
    given = {"outs": outs, "bases": bases}
    for name, members in given.items():
        if members is not None and len(members) != len(items):
            raise ValueError(f"{name} has {len(members)} members; there are {len(items)} {what}s")

    if outs is not None:
        spans = [_Span.of(f"outs[{i}]", out, framework, True) for i, out in enumerate(outs)]
        spans += [_Span.of(f"{what} {i}", item, framework) for i, item in enumerate(items)]
        spans += [_Span.of(f"bases[{i}]", base, framework) for i, base in enumerate(bases or ())]
        _refuse_overlaps([span for span in spans if span is not None])

    def work(i: int, n_threads: int) -> _Result:
        out, base = (None if members is None else members[i] for members in given.values())
        with blaming(f"{what} {i}", _BLAMED):
            return call(items[i], out, base, n_threads)

    # An item without a size is not a tensor; the call refuses it.
    sizes = [
        item.logical_nbytes if isinstance(item, Frame) else getattr(item, "nbytes", 0)
        for item in items
    ]
    return map_tensors(work, sizes, resolve_threads(threads))


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
        with blaming(f"frame {i}", _BLAMED):
            read.append(frame if isinstance(frame, Frame) else Frame.from_buffer(frame))
    nbytes = sum(frame.logical_nbytes for frame in read)
    if max_nbytes is not None and nbytes > max_nbytes:
        raise CorruptionError(
            f"the frames hold {nbytes} bytes together, more than max_nbytes = {max_nbytes}"
        )
    return read
