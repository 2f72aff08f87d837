"""The interface of a frame store, which snapshots, checkpoints and the Shelf use.

A store holds frames and documents. A frame is found by the tensor that it decodes to. A document (a
manifest) lists the frames that it needs; a frame that no document needs is garbage. A writer makes
these calls in this order, and their effects reach the disk in the same order, even if power fails:

1. `batch` writes frames. All of them are stored once its block ends without an exception.
2. `commit` writes the document that needs them, in one step.
3. `delete` removes packs that no document needs any more.

So every document always finds its frames, and an interrupted writer leaves only garbage behind.

`pack_store.PackStore` keeps frames in files, on a disk or in a bucket. Another engine (such as
LMDB) implements the same calls, and gives `FrameRef.pack` and `FrameRef.offset` its own meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from packhorse.frame import Frame
from packhorse.storage.frames.chain import Chain
from packhorse.storage.frames.refs import Content, FrameRef

__all__ = ["FrameBatch", "FrameStore", "NewFrame"]


class NewFrame(NamedTuple):
    """A frame to be written.

    Attributes:
        data: the bytes of the frame.
        content: the tensor that it decodes to.
        base: the stored frame that it is a delta against; None for a full frame.
        name: the name of the tensor, for people who look into the store.
    """

    data: memoryview
    content: Content
    base: FrameRef | None
    name: str


class FrameBatch(Protocol):
    """Frames that are written together."""

    def put(self, frames: Sequence[NewFrame]) -> list[FrameRef]:
        """Append frames.

        Returns:
            Where each frame is stored. A later frame of the batch may be a delta against it.
        """


class FrameStore(Protocol):
    """Frames, found by content, and the documents that need them."""

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """A stored frame for each of these contents that has one.

        Every returned frame can be read, with its chain, as far as a cheap check can tell.
        """

    def open(self, ref: FrameRef, name: str | None = None) -> Frame:
        """A stored frame, with its header checked against `ref`.

        Args:
            ref: where the frame is stored, and what it must hold.
            name: the name of the tensor that it is read for, for messages.

        Raises:
            CorruptionError, CompatibilityError: the frame is damaged, or is not the one that `ref`
                names.
            FileNotFoundError: its pack does not exist.
        """

    def open_all(self, wanted: Mapping[FrameRef, str | None]) -> list[Frame]:
        """Stored frames, each with the name of the tensor that it is read for. Raises what `open`
        raises, for one of them; a store may look at all in one call."""

    def chain(self, ref: FrameRef, name: str | None = None) -> Chain:
        """A stored frame with all frames that it needs. Takes and raises the same as `open`."""

    def fetch(self, refs: Iterable[FrameRef]) -> None:
        """Get the bytes of frames and of their chains in few requests; `release` drops them again.
        A store whose requests are fast may do nothing."""

    def release(self, refs: Iterable[FrameRef]) -> None:
        """Drop the bytes that `fetch` got for these frames and their chains."""

    def batch(self, names: Sequence[str], nbytes: int) -> AbstractContextManager[FrameBatch]:
        """Write frames in a `with` block. All of them are stored when the block ends; none is
        stored if it raises.

        Args:
            names: the names of all tensors that the batch may get.
            nbytes: the most bytes that their frames may take together.
        """

    def commit(self, name: str, document: bytes, *, replace: bool = False) -> None:
        """Write a document in one step.

        Args:
            name: the name of the document.
            document: all of its bytes.
            replace: whether it may replace a document of the same name.
        """

    def delete(self, packs: Iterable[str]) -> None:
        """Remove packs with all of their frames. Packs that do not exist are skipped."""
