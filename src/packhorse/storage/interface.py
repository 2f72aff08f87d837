"""The interface to a file system, for stores and checkpoints.

Every object is complete or absent. If power is lost, the effect of a call survives only if the
effects of all earlier calls do. An existing object never changes; small objects can be replaced in
one step.

Paths are relative, with parts joined by `/`. They may begin with `..`: a checkpoint names files of
another checkpoint like this, so that a folder with both can be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from packhorse.codecs.base import ByteArray
from packhorse.errors import TruncationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Object", "Sink", "Stamp", "Storage", "check_region"]


class Stamp(NamedTuple):
    """Shows whether an object may have been replaced, without reading the object.

    Attributes:
        nbytes: its size in bytes.
        changed: a number that depends on when it was written, from 0 to 2^64 - 1.
    """

    nbytes: int
    changed: int

    def difference(self, now: Stamp) -> str:
        """What happened between this stamp and a later one, in words; empty if nothing did."""
        if self.nbytes != now.nbytes:
            return f"its size went from {self.nbytes} to {now.nbytes} bytes"
        return "" if self == now else "it was replaced"


class Sink(Protocol):
    """An object that is being written."""

    nbytes: int

    def write(self, data: Buffer) -> None:
        """Append bytes."""

    def write_all(self, pieces: Iterable[Buffer]) -> None:
        """Append several pieces, in few calls of the system."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite bytes that were appended before."""


class Object(Protocol):
    """An object that is open for reading. Several threads may use it at once."""

    nbytes: int

    def region(self, offset: int, nbytes: int) -> memoryview:
        """Some of the object's bytes.

        Raises:
            TruncationError: the object ends before.
        """

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """Like `region`, but the bytes of a remote object are zeros until `fill` reads them.

        Raises:
            TruncationError: the object ends before.
        """

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Read the bytes of parts of sketches. A part is a piece of a sketch's memory, with the
        offset of its bytes in the object."""


class Storage(Protocol):
    """What a store needs of a file system.

    Attributes:
        is_local: whether it is a folder of this machine, where reading a byte needs no request.
    """

    is_local: bool

    def label(self, path: str = "") -> str:
        """The name of an object in messages; no two objects have the same name."""

    def make(self) -> None:
        """Create the folder, if the file system has folders."""

    def names(self, folder: str = "") -> list[str]:
        """The names of files and folders directly in a folder; none if it does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, with their sizes in bytes."""

    def files(self, folder: str) -> dict[str, Stamp]:
        """All files one level deeper, as `<subfolder>/<file>`, with their stamps."""

    def stamp(self, path: str) -> Stamp:
        """The stamp of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""

    def read(self, path: str, max_nbytes: int) -> bytes:
        """Read a small object as a whole.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptionError: it is longer than `max_nbytes`, or is not a regular file.
        """

    def open(self, path: str) -> Object:
        """Open a large object for reading.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptionError: it is not a regular file.
        """

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small object in one step, and create its folder if needed.

        Args:
            path: the object.
            data: its bytes.
            replace: whether an existing object may be replaced, in one step.
        """

    def put_cache(self, path: str, data: bytes) -> None:
        """Write a small object that does not exist and can be rebuilt. It appears in one step, but
        may be lost or cut short if power is lost."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a large object, which appears when the block ends without an exception."""

    def remove(self, path: str) -> None:
        """Remove an object, if it exists."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""

    def flush(self, folder: str) -> None:
        """Make sure that removals from a folder survive a loss of power."""

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Remove the unfinished files of a killed writer; only the store's single writer may call
        this."""

    def relative(self, other: Storage, path: str) -> str:
        """The path of an object of another storage, relative to this one.

        Raises:
            ValueError: the other storage is on another file system.
        """


def check_region(label: str, nbytes: int, offset: int, wanted: int) -> None:
    """Refuse a region that is not inside an object.

    Raises:
        TruncationError: the region ends after the object does.
    """
    if offset + wanted > nbytes:
        raise TruncationError(
            f"{label}: cut short: bytes {offset} to {offset + wanted} are needed, but it has "
            f"{nbytes} bytes"
        )
