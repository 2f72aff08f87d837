"""What snapshots, checkpoints and the Shelf ask of a store of frames.

A store has frames and documents. Frames are found by what they decode to; documents (manifests)
say which frames are needed, so a frame that no document needs is garbage. The order of the calls
is the order in which their effects survive a loss of power:

1. `batch` writes frames. They are all there when its block ends without an exception.
2. `commit` writes the document that needs them, in one step.
3. `delete` removes packs that no document needs any more.

So every document finds its frames at any moment, and an interrupted writer leaves only garbage.

`packs.PackStore` is the store of files, on a disk or in a bucket. Another engine (LMDB) implements
the same calls; what `FrameRef.pack` and `FrameRef.offset` mean is the engine's own business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        content: what it decodes to.
        base: the stored frame that it is a delta against; None for a full frame.
        name: of the tensor, for people who look into the store.
    """

    data: memoryview
    content: Content
    base: FrameRef | None
    name: str


class FrameBatch(Protocol):
    """Frames being written together."""

    def put(self, frames: Sequence[NewFrame]) -> list[FrameRef]:
        """Append frames.

        Returns:
            Where each one lies now. A later frame of the batch may be a delta against it.
        """


class FrameStore(Protocol):
    """Frames by content, and the documents that need them."""

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """Stored frames of these contents, for as many of them as there are any.

        Every frame that is returned, and its chain, can be read, as far as that is cheap to check.
        """

    def open(self, ref: FrameRef, name: str | None = None) -> Frame:
        """A stored frame, its header checked against `ref`.

        Args:
            ref: where it lies, and what it must hold.
            name: of the tensor that it is read for, for messages.

        Raises:
            CorruptionError, CompatibilityError: the frame is damaged, or is another one.
            FileNotFoundError: its pack does not exist.
        """

    def chain(self, ref: FrameRef, name: str | None = None) -> Chain:
        """A stored frame with all frames that it needs; arguments and errors as of `open`."""

    def fetch(self, refs: Iterable[FrameRef]) -> None:
        """Get the bytes of frames and of their chains in few requests, where each request to the
        store takes long. `release` drops them again."""

    def release(self, refs: Iterable[FrameRef]) -> None:
        """Drop what `fetch` got for these frames and their chains."""

    def batch(self, names: Sequence[str], nbytes: int) -> AbstractContextManager[FrameBatch]:
        """Write frames. They are all stored when the block ends, and none is if it raises.

        Args:
            names: of all tensors that may come.
            nbytes: of their frames together, at most.
        """

    def commit(self, name: str, document: bytes, *, replace: bool = False) -> None:
        """Write a document in one step.

        Args:
            name: of the document.
            document: all of its bytes.
            replace: whether it may replace a document of the same name.
        """

    def delete(self, packs: Iterable[str]) -> None:
        """Remove packs with all of their frames. Those that are gone already are skipped."""
