"""Which updates bring a receiver to the newest version, for transports that keep several.

A route begins at the version that the receiver holds, or at an anchor, and has the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.refusals import Refusal, UpdateMismatchError
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Entry", "find_route", "stage_newest"]


class Entry(NamedTuple):
    """An update that a transport keeps.

    Attributes:
        number: the version that it leads to.
        base_number: the version that it starts from; None for an anchor.
        nbytes: its length in bytes.
    """

    number: int
    base_number: int | None
    nbytes: int


def find_route(entries: Iterable[Entry], held: int | None, upto: int | None = None) -> list[Entry]:
    """The updates that lead to the newest version that can be reached.

    Args:
        entries: the updates that are there, of one stream.
        held: the version that the receiver holds; None to begin at an anchor.
        upto: the last version that is wanted; None for the newest.

    Returns:
        The updates in the order in which they apply; none if nothing newer can be reached.
    """
    best: dict[int, tuple[int, list[Entry]]] = {} if held is None else {held: (0, [])}
    for entry in sorted(entries, key=lambda entry: (entry.number, entry.base_number is not None)):
        if (held is not None and entry.number <= held) or (
            upto is not None and entry.number > upto
        ):
            continue
        start = (0, []) if entry.base_number is None else best.get(entry.base_number)
        if start is None:
            continue
        nbytes = start[0] + entry.nbytes
        if entry.number not in best or nbytes < best[entry.number][0]:
            best[entry.number] = nbytes, [*start[1], entry]
    return best[max(best)][1] if best else []


def stage_newest(
    receiver: DeltaReceiver,
    stream: bytes | None,
    fetch: Callable[[int | None], Sequence[Buffer | Update]],
) -> StagedUpdate | None:
    """Stages the newest version that can be reached.

    Args:
        receiver: the receiver. If it holds no version of the stream but has weights, they may be
            those that the sender began with, so updates from version 0 are tried first.
        stream: the stream of the updates; None to take the receiver's.
        fetch: takes the version that is held, or None to begin at an anchor, and returns the
            updates of a route.

    Returns:
        What `DeltaReceiver.commit` takes; None if there is nothing newer.

    Raises:
        PackhorseError: as `DeltaReceiver.stage`.
    """
    is_of_stream = stream is None or receiver.stream_id == stream
    held = (receiver.version or 0) if is_of_stream else 0
    if receiver.has_weights and not receiver.is_torn:
        try:
            payloads = fetch(held)
            if payloads:
                return receiver.stage(list(payloads))
        except UpdateMismatchError as error:
            if error.reason is not Refusal.FOREIGN:
                raise
        else:
            if held:
                return None
    payloads = fetch(None)
    return receiver.stage(list(payloads)) if payloads else None
