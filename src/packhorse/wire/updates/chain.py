"""Folding: several updates in a row become one, for receivers that join late or were away.

A difference says how an element moves from its base, so differences can only be put together where
the base is at hand: at a receiver that still holds the first version, or at a relay with a copy.
Without a base, `DeltaReceiver.stage` takes a list of updates and commits them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.frame.follow import Follower
from packhorse.layout import Level
from packhorse.threads import map_tensors
from packhorse.wire.updates.message import Header
from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.sender import make_update
from packhorse.wire.updates.tensors import Tensors
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["fold"]


def fold(
    updates: Sequence[Buffer | Update],
    base: Tensors | None = None,
    *,
    level: Level | str = "default",
    threads: int | None = None,
) -> Update:
    """Makes one update of several in a row.

    Args:
        updates: in the order of their versions, of one stream. Those before an anchor are skipped.
        base: the tensors at the version that the first update starts from; they are only read.
            Not needed if there is an anchor among the updates.
        level: "fast", "default" or "max".
        threads: the number of threads; None for one per core, at most 8.

    Returns:
        The update: from the first one's base to the last one's version; an anchor if there is one
        among the updates.

    Raises:
        ValueError: the updates are of several streams.
        CorruptionError, CompatibilityError, BaseMismatchError: as `DeltaReceiver.stage`.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaReceiver, DeltaSender, fold
        >>> weights = {"w": np.zeros(9)}
        >>> joiner = DeltaReceiver(into={"w": np.zeros(9)})
        >>> sender = DeltaSender(weights, receivers_have_it=True)
        >>> chain = []
        >>> for i in range(3):
        ...     weights["w"][i] = 1
        ...     chain.append(sender.pack())
        >>> folded = fold(chain, base=joiner.state)
        >>> folded.base_version, folded.version
        (0, 3)
    """
    read = [each if isinstance(each, Update) else Update(each) for each in updates]
    if len({update.stream_id for update in read}) > 1:
        raise ValueError("the updates are of several streams; fold those of one")
    starts = [i for i, update in enumerate(read) if update.is_anchor]
    chain = read[starts[-1] if starts else 0 :]
    receiver = DeltaReceiver(None if starts else base, strict=False, threads=threads)
    staged = receiver.stage(chain)
    return _packed(staged, chain[0].message.header, level, threads)


def _packed(staged: StagedUpdate, first: Header, level: Level | str, threads: int | None) -> Update:
    """What is staged, as one update."""
    contents, order = staged.binding.contents, staged.changed()
    effort = resolve_level(level)

    def work(at: int, n_threads: int) -> bytes | None:
        i = order[at]
        unit, before = contents.units[i], staged.before[i]
        if before == staged.hashes[i] and not staged.is_anchor:
            return None
        new, memory = staged.new_bytes(i, n_threads), np.empty(unit.nbytes, np.uint8)
        follower = Follower(unit.dtype, unit.shape, memory, effort, unit.label)
        if staged.is_anchor:
            return follower.begin(new, n_threads).to_bytes()
        follower.keep(staged.binding.read(i))
        frame = follower.follow(new, n_threads)
        return None if frame is None else frame.to_bytes()

    packed = map_tensors(work, [contents.units[i].nbytes for i in order], resolve_threads(threads))
    frames = {i: frame for i, frame in zip(order, packed, strict=True) if frame is not None}
    last = staged.header
    assert last is not None
    header = last._replace(
        is_anchor=staged.is_anchor, base_number=first.base_number, base_hash=first.base_hash
    )
    return make_update(header, contents, frames)
