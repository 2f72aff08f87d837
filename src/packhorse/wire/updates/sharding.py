"""`ShardedReceiver`: one model from the updates of several senders, each of which has a part.

The ranks of a trainer that shards its weights need not gather them: each makes a `DeltaSender` for
its flat ranges, and the receiver puts the parts together. All parts are staged before the first is
committed, so that a part that is missing or bad changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from packhorse.errors import CorruptionError
from packhorse.wire.updates.contents import Part
from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.tensors import Tensors, named_tensors
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ShardedReceiver"]


class ShardedReceiver:
    """Applies the updates of several senders to one model.

    Attributes:
        version: the version that all shards hold; None if there is none.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaSender, ShardedReceiver, Shards
        >>> whole = np.arange(10.0)
        >>> parts = [whole[:6], whole[6:]]
        >>> senders = [
        ...     DeltaSender({"w": part}, shards=Shards(i, 2, {"w": ((10,), 6 * i)}))
        ...     for i, part in enumerate(parts)
        ... ]
        >>> receiver = ShardedReceiver({"w": np.zeros(10)}, n_shards=2)
        >>> receiver.unpack([sender.pack() for sender in senders])
        >>> bool((receiver.state["w"] == whole).all())
        True
    """

    def __init__(
        self, into: Tensors, *, n_shards: int, threads: int | None = None, strict: bool = True
    ) -> None:
        """
        Args:
            into: the whole tensors to write to, as for `DeltaReceiver`.
            n_shards: how many senders there are.
            threads: the number of threads; None for one per core, at most 8.
            strict: whether the shards must have every element of `into`.

        Raises:
            ValueError: `n_shards` or `threads` is below 1.
        """
        if n_shards < 1:
            raise ValueError(f"n_shards is {n_shards}; it must be at least 1")
        self._into = into
        self._strict = strict
        self._parts = [DeltaReceiver(into, threads=threads, strict=False) for _ in range(n_shards)]
        self._covered: tuple[bytes, ...] = ()  # the contents that were compared with `into`

    @property
    def version(self) -> int | None:
        """The version that all shards hold; None if there is none."""
        return self._parts[0].version

    @property
    def state(self) -> dict[str, object]:
        """The tensors by name."""
        return named_tensors(self._into)

    def stage(
        self, payloads: Sequence[Buffer | Update], *, verify: bool = False
    ) -> list[StagedUpdate]:
        """Checks and decodes one update of each sender, in any order.

        Args:
            payloads: the updates, all to one version.
            verify: as for `DeltaReceiver.stage`.

        Raises:
            ValueError: a shard is missing or there twice, their versions differ, or they do not
                cover the tensors.
            CorruptionError, CompatibilityError, UpdateMismatchError, TypeError: as
                `DeltaReceiver.stage`; the message names the shard.
        """
        updates = [each if isinstance(each, Update) else Update(each) for each in payloads]
        n = len(self._parts)
        found = sorted(update.shard for update in updates)
        if found != [(i, n) for i in range(n)]:
            raise ValueError(f"one update of each of {n} shards is needed, but there are {found}")
        updates.sort(key=lambda update: update.shard)
        if len({update.version for update in updates}) > 1:
            versions = [update.version for update in updates]
            raise ValueError(f"the shards lead to different versions: {versions}, in their order")
        self._check_cover(updates)
        return [
            part.stage(update, verify=verify)
            for part, update in zip(self._parts, updates, strict=True)
        ]

    def commit(self, staged: Sequence[StagedUpdate]) -> None:
        """Applies what `stage` returned. This is the pause.

        Raises:
            ValueError: as `DeltaReceiver.commit`.
        """
        for part, each in zip(self._parts, staged, strict=True):
            part.check_staged(each)
        for part, each in zip(self._parts, staged, strict=True):
            part.commit(each)

    def unpack(self, payloads: Sequence[Buffer | Update], *, verify: bool = False) -> None:
        """`stage` and `commit` in one; arguments and errors are theirs."""
        self.commit(self.stage(payloads, verify=verify))

    def _check_cover(self, updates: list[Update]) -> None:
        """Refuses shards that overlap, or that leave elements out."""
        digests = tuple(update.message.contents.digest for update in updates)
        if digests == self._covered:
            return
        ranges: dict[str, list[Part]] = {}
        for update in updates:
            for part in update.message.contents.parts:
                ranges.setdefault(part.name, []).append(part)
        for name, parts in ranges.items():
            _check_ranges(name, parts, whole=self._strict)
        aliases = {name for update in updates for name in update.message.contents.aliases}
        missing = named_tensors(self._into).keys() - ranges.keys() - aliases
        if missing and self._strict:
            raise ValueError(f"no shard has {min(missing)!r}, which is here")
        self._covered = digests


def _check_ranges(name: str, parts: list[Part], *, whole: bool) -> None:
    if len({(part.form.dtype, part.form.shape) for part in parts}) > 1:
        raise CorruptionError(f"{name}: the shards disagree about its dtype or shape")
    parts.sort(key=lambda part: (part.form.start, part.form.stop))
    end = 0
    for part in parts:
        start, stop = part.form.start, part.form.stop
        if start < end:
            raise ValueError(
                f"{name}: elements {start}:{end} are in two shards; send each from one rank only"
            )
        if start > end and whole:
            raise ValueError(f"{name}: elements {end}:{start} are in no shard")
        end = stop
    first = parts[0].form
    if whole and end != math.prod(first.shape):
        raise ValueError(f"{name}: elements {end}:{math.prod(first.shape)} are in no shard")
