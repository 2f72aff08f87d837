"""The handshake: before the first transfer, all ranks find out whether they speak alike.

Every rank says which version of the messages and of the package it has, and with which options it
was set up. All of them must be equal: ranks with different options would send messages of different
lengths, and wait for each other. Every rank reads what all have said, so all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

from packhorse._version import __version__
from packhorse.errors import CompatibilityError, PeerError
from packhorse.wire.board import Board

__all__ = ["WIRE_VERSION", "agree_or_raise", "ranks_words", "shake_hands"]

WIRE_VERSION = 2  # of the messages between ranks; they are never stored


def shake_hands(board: Board, options: Mapping[str, str], timeout: timedelta) -> None:
    """Compares versions and options with those of all other ranks.

    Args:
        board: where ranks talk.
        options: what must be equal on all ranks, by name.
        timeout: how long to wait for the others.

    Raises:
        CompatibilityError: ranks differ; the message names ranks and values.
        PeerError: a rank did not appear in time.
    """
    mine = {"wire version": str(WIRE_VERSION), "packhorse": __version__, **options}
    found, is_reachable = board.greet(json.dumps(mine), timeout)
    if not is_reachable:
        raise PeerError(
            "the store of the process group cannot be reached, so the rank that serves it has died "
            "or left, most likely rank 0; start all ranks again"
        )
    absent = [rank for rank, text in enumerate(found) if text is None]
    if absent:
        raise PeerError(
            f"{ranks_words(absent)} did not appear within {timeout.total_seconds():g} s to compare "
            "versions; make the same objects of packhorse.wire on all ranks, in the same order"
        )
    agree_or_raise([_read(text or "") for text in found])


def agree_or_raise(said: Sequence[Mapping[str, str]]) -> None:
    """Checks that all ranks have said the same.

    Args:
        said: for each rank, its values by name.

    Raises:
        CompatibilityError: two ranks differ; the message names the first value that differs, and
            the ranks that have each value.
    """
    names = list(dict.fromkeys(name for one in said for name in one))
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            by_value.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            pairs = [f"{ranks_words(ranks)}: {value}" for value, ranks in by_value.items()]
            raise CompatibilityError(
                f"{name} differs among the ranks ({'; '.join(pairs)}); use the same on all"
            )


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _read(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {"wire version": "unreadable"}
    if not isinstance(found, dict):
        return {"wire version": "unreadable"}
    return {str(name)[:40]: str(value)[:100] for name, value in found.items()}
