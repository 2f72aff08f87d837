"""What stores and checkpoints ask of a file system.

Every object is whole or absent. The order of calls is the order in which they survive a loss of
power. No object that exists is ever changed; small ones may be replaced at once.

Paths are relative, parts joined by `/`, and may begin with `..`: a checkpoint names files of
another so that a folder of both may be moved.
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
    """By what it is seen that an object may be another than before, without reading it.

    Attributes:
        nbytes: its size.
        changed: stands for when it was written; from 0 to 2^64 - 1.
    """

    nbytes: int
    changed: int


class Sink(Protocol):
    """An object being written."""

    nbytes: int

    def write(self, data: Buffer) -> None:
        """Append."""

    def patch(self, offset: int, data: Buffer) -> None:
        """Overwrite what was appended before."""


class Object(Protocol):
    """An object being read. Threads may share it."""

    nbytes: int

    def region(self, offset: int, nbytes: int) -> memoryview:
        """Some of its bytes.

        Raises:
            TruncationError: it does not have them.
        """

    def sketch(self, offset: int, nbytes: int) -> ByteArray:
        """The same, but what is remote reads as zeros until `fill` was called.

        Raises:
            TruncationError: it does not have them.
        """

    def fill(self, parts: Sequence[tuple[ByteArray, int]]) -> None:
        """Make parts of a sketch real: memory of it, and its offset in the object."""


class Storage(Protocol):
    """What a store needs of a file system.

    Attributes:
        is_local: whether it is a folder of this machine, where looking at a byte costs no request.
    """

    is_local: bool

    def label(self, path: str = "") -> str:
        """What messages call an object; no other has the same."""

    def make(self) -> None:
        """Make the folder, where there are folders."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders directly in a folder; none if it is not there."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The files directly in a folder, and how many bytes each has."""

    def files(self, folder: str) -> dict[str, Stamp]:
        """`<folder>/<file>` of all files one level deeper, and their stamps."""

    def stamp(self, path: str) -> Stamp:
        """The stamp of an object.

        Raises:
            FileNotFoundError: it is not there.
        """

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""

    def read(self, path: str, max_nbytes: int) -> bytes:
        """A small object, whole.

        Raises:
            FileNotFoundError: it is not there.
            CorruptionError: it is longer than that, or no regular file.
        """

    def open(self, path: str) -> Object:
        """A large object.

        Raises:
            FileNotFoundError: it is not there.
            CorruptionError: it is no regular file.
        """

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Write a small object in one step; its folder is made if need be.

        Args:
            path: of the object.
            data: all of it.
            replace: there may be one, which is replaced at once.
        """

    def put_cache(self, path: str, data: bytes) -> None:
        """Write a small object that was not there and can be made again: it appears in one step,
        but may be lost or cut when the power goes."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a large object that is there when the block ends without an exception."""

    def remove(self, path: str) -> None:
        """Remove an object; it may be gone already."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""

    def flush(self, folder: str) -> None:
        """Make sure that what was removed from a folder stays removed."""

    def remove_temporary(self, folders: Iterable[str]) -> None:
        """Remove what a killed writer left unfinished; only the one writer may."""

    def relative(self, other: Storage, path: str) -> str:
        """The path of an object of another storage, from this one.

        Raises:
            ValueError: the other is on another file system.
        """


def check_region(label: str, nbytes: int, offset: int, wanted: int) -> None:
    """Refuse a region that does not lie in an object.

    Raises:
        TruncationError: it ends behind it.
    """
    if offset + wanted > nbytes:
        raise TruncationError(
            f"{label}: cut short: bytes {offset} to {offset + wanted} are needed, and it has "
            f"{nbytes}"
        )
