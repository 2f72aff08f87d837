"""What `compress_all` and `decompress_all` of all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from packhorse.arguments import Framework, resolve_threads
from packhorse.codecs.base import as_bytes
from packhorse.errors import (
    BaseMismatchError,
    ChangedError,
    CompatibilityError,
    CorruptionError,
    blaming,
)
from packhorse.frame import Frame
from packhorse.threads import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["call_for_each", "read_frames"]

_Result = TypeVar("_Result")
_BLAMED = (
    CorruptionError, CompatibilityError, BaseMismatchError, TypeError, ValueError, ChangedError
)  # fmt: skip


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
    """Results of a call for each item; threads share the items out among them.

    Args:
        call: gets an item, its memory or None, its base or None, and how many threads to use.
        items: tensors or frames.
        outs: the memory for each, if there is any.
        bases: the base of each, if there is any.
        threads: None for the cores of this process, at most 8.
        what: an item, in messages.
        framework: of tensors.

    Raises:
        ValueError: there are more or fewer `outs` or `bases` than items, or one of `outs` shares
            memory with another, with an item or with a base; nothing is written then.
        Exception: what a call raised; its message says for which item.
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

    # What has no size is no tensor, and the call says so.
    sizes = [
        item.logical_nbytes if isinstance(item, Frame) else getattr(item, "nbytes", 0)
        for item in items
    ]
    return map_tensors(work, sizes, resolve_threads(threads))


class _Span(NamedTuple):
    """Memory that one call reads or writes while others work.

    Attributes:
        start: the address of its first byte.
        stop: the address behind its last byte.
        name: of what lies there, in messages.
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
        """Where something lies; None if nowhere in host memory, or if it is nothing that a call
        takes: the call itself says so."""
        found = None if isinstance(value, Frame) else framework.span(value)
        if found is None:
            try:
                data = as_bytes(value.buffer() if isinstance(value, Frame) else value)
            except TypeError:
                return None
            found = data.ctypes.data, data.ctypes.data + data.size
        return cls(*found, name, is_written) if found[0] < found[1] else None


def _refuse_overlaps(spans: list[_Span]) -> None:
    """Refuse to write to memory that is written to or read for something else, too.

    Raises:
        ValueError: two spans share memory, of which one is written to.
    """
    reaching: dict[bool, _Span] = {}  # the farthest so far of those written to, and of the others
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
    """Frames of themselves or of their bytes, the headers checked.

    Raises:
        CorruptionError: bad, or their tensors take more than `max_nbytes` together.
        CompatibilityError, TypeError: as `Frame.from_buffer`; the message says for which frame.
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
