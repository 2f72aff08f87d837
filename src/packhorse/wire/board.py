"""What the ranks of a group tell each other beside their transfers, through the group's store.

PyTorch gives every process group a store of keys and values (a TCP server or a file), which is
reachable even while a transfer hangs. Three things are written there:

- `hello/RANK`: what a rank says of itself before the first transfer (handshake.py);
- `failure`: the first error of any rank. The first to write it wins, so that all ranks raise the
  same error;
- `at/RANK`: how far a rank is, written only once a transfer has kept it waiting. It tells after
  a time-out which ranks never arrived.

A store can be lost with the process that serves it. Then nothing can be read or written, and every
rank goes by what it sees itself.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import NamedTuple

from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, PeerError
from packhorse.wire.backend import c10d

__all__ = ["Board", "Failure"]

_KINDS: dict[str, type[PackhorseError]] = {
    "compatibility": CompatibilityError,
    "corruption": CorruptionError,
    "peer": PeerError,
}
# A message is cut to this length, and a longer one in the store is not ours.
_MAX_WORDS = 2000


class Failure(NamedTuple):
    """The error that every rank raises.

    Attributes:
        kind: a key of `_KINDS`.
        words: the message.
    """

    kind: str
    words: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that an error of this rank means to the others."""
        for kind, of_kind in _KINDS.items():
            if isinstance(error, of_kind):
                return cls(kind, str(error))
        return cls("peer", f"{type(error).__name__}: {error}")

    def error(self) -> PackhorseError:
        """The error to raise."""
        return _KINDS[self.kind](self.words)


class Board:
    """The keys of one object in the store of its group.

    Objects on one group must be made in the same order by all ranks; each gets keys of its own.

    Args:
        store: the group's store.
        rank: this rank.
        size: how many ranks there are.

    Attributes:
        is_lost: whether the store could not be reached.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int) -> None:
        number = store.add(f"packhorse/wire/objects/{rank}", 1)
        self._store = store
        self._prefix = f"packhorse/wire/{number}"
        self._rank = rank
        self._size = size
        self.is_lost = False

    def greet(self, words: str, timeout: timedelta) -> tuple[list[str | None], bool]:
        """Says hello, and waits for all others.

        Returns:
            What each rank said, None for those that did not within the time; and whether the store
            was reachable.
        """
        keys = [f"{self._prefix}/hello/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], words)
            self._store.wait(keys, timeout)
        except RuntimeError:  # of the store: a time-out, or the store is lost
            pass
        else:
            return [self._store.get(key).decode(errors="replace") for key in keys], True
        try:
            return [self._peek(key) for key in keys], True
        except RuntimeError:
            return [None] * self._size, False

    def post(self, failure: Failure) -> Failure:
        """Writes a failure down, unless another one is there already.

        Returns:
            The failure that is there now, which all ranks raise.
        """
        text = json.dumps([failure.kind, failure.words[:_MAX_WORDS]])
        try:
            kept = self._store.compare_set(f"{self._prefix}/failure", "", text)
        except RuntimeError:
            self.is_lost = True
            return failure
        return _parsed(kept) or failure

    def failure(self) -> Failure | None:
        """The failure that a rank has written down; None if there is none, or no store."""
        try:
            text = self._peek(f"{self._prefix}/failure")
        except RuntimeError:
            self.is_lost = True
            return None
        return None if text is None else _parsed(text.encode())

    def arrive(self, number: int) -> None:
        """Says that this rank waits in an operation."""
        try:
            self._store.set(f"{self._prefix}/at/{self._rank}", str(number))
        except RuntimeError:
            self.is_lost = True

    def missing(self, number: int) -> list[int]:
        """The ranks that have not said that they wait in an operation, or a later one. Empty if
        the store is lost."""
        try:
            found = [self._peek(f"{self._prefix}/at/{rank}") for rank in range(self._size)]
        except RuntimeError:
            return []
        at = [int(text) if text and text.isdecimal() else 0 for text in found]
        return [rank for rank in range(self._size) if at[rank] < number and rank != self._rank]

    def _peek(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        text: bytes = self._store.get(key)
        return text.decode(errors="replace")


def _parsed(text: bytes) -> Failure | None:
    """A failure as the store has it; None if it is nothing of ours."""
    try:
        kind, words = json.loads(text)
    except ValueError:
        return None
    if kind not in _KINDS or not isinstance(words, str):
        return None
    return Failure(kind, words)
