"""What `compress_all` and `decompress_all` of all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from packhorse.arguments import resolve_threads
from packhorse.errors import BaseMismatchError, CompatibilityError, CorruptionError, blaming
from packhorse.frame import Frame
from packhorse.threads import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["call_for_each", "read_frames"]

_Result = TypeVar("_Result")
_BLAMED = (CorruptionError, CompatibilityError, BaseMismatchError, TypeError, ValueError)


def call_for_each(
    call: Callable[[Any, Any, Any, int], _Result],
    items: Iterable[Any],
    outs: Sequence[Any] | None,
    bases: Sequence[Any] | None,
    *,
    threads: int | None,
    what: str,
) -> list[_Result]:
    """Results of a call for each item; threads share the items out among them.

    Args:
        call: gets an item, its memory or None, its base or None, and how many threads to use.
        items: tensors or frames.
        outs: the memory for each, if there is any.
        bases: the base of each, if there is any.
        threads: None for the cores of this process, at most 8.
        what: an item, in messages.

    Raises:
        ValueError: there are more or fewer `outs` or `bases` than items.
        Exception: what a call raised; its message says for which item.
    """
    items = list(items)
    given = {"outs": outs, "bases": bases}
    for name, members in given.items():
        if members is not None and len(members) != len(items):
            raise ValueError(f"{name} has {len(members)} members; there are {len(items)} {what}s")

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
