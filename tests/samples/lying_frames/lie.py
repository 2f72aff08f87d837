"""The definition of a lie, the list of all lies, and edits of streams."""

from collections.abc import Callable
from dataclasses import dataclass

import frame_builder as fb
from frame_builder import BuiltFrame, Edit

__all__ = ["DATA", "LIES", "Lie", "add", "appended", "cut_to", "set_at"]

DATA = fb.units_of_values(30, 2, 9)


@dataclass(frozen=True)
class Lie:
    """One frame that must be refused.

    Attributes:
        clause: the number of the clause that it breaks.
        build: makes the frame.
        fragment: a part of the slow decoder's message.
        max_nbytes: the caller's limit.
    """

    clause: str
    build: Callable[[], bytes | BuiltFrame]
    fragment: str
    max_nbytes: int | None = None

    def frame(self) -> bytes:
        return bytes(self.build())

    def base(self) -> bytes | None:
        """The base with which the frame must be decoded."""
        built = self.build()
        return built.base if isinstance(built, BuiltFrame) else None


LIES: dict[str, Lie] = {}


def add(clause: str, name: str, build: Callable[[], bytes | BuiltFrame], fragment: str) -> None:
    assert name not in LIES, name
    LIES[name] = Lie(clause, build, fragment)


def set_at(offset: int, *replacement: int, plane: int = 0) -> Edit:
    """An edit that overwrites bytes of the stream of one plane."""
    new, end = bytes(replacement), offset + len(replacement)
    return lambda _, p, stream: stream[:offset] + new + stream[end:] if p == plane else stream


def cut_to(nbytes: int, *, plane: int = 0) -> Edit:
    return lambda _, p, stream: stream[:nbytes] if p == plane else stream


def appended(tail: bytes, *, plane: int = 0) -> Edit:
    return lambda _, p, stream: stream + tail if p == plane else stream
