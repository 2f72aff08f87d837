"""A frame store that keeps frames in packs. A pack is a safetensors file whose tensors are frames.

Each pack has a new name and is written once, from front to back. Room is left for its header, which
is filled in at the end. So an existing file is never changed, and every frame begins at a multiple
of 64 bytes. A pack without frames is not created.

A reader does not trust a manifest: it checks that each frame is where the manifest says, and holds
the tensor that the manifest says.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Self

from packhorse import _core
from packhorse._core import OpenFrame
from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError, PackhorseError, TruncationError, blaming
from packhorse.frame import Frame
from packhorse.layout import (
    FIXED_HEADER,
    FIXED_HEADER_NBYTES,
    FRAME_ALIGNMENT,
    LENGTH_NBYTES,
    METADATA_KEY,
)
from packhorse.storage.frames.chain import Chain
from packhorse.storage.frames.frame_store import NewFrame
from packhorse.storage.frames.refs import Content, FrameRef
from packhorse.storage.interface import Object, Sink, Storage
from packhorse.storage.strict_json import shortened

__all__ = ["PackLayout", "PackStore", "PackWriter"]

_MAX_OPEN = 256  # packs at a time
_PEEK_NBYTES = 1 << 16  # fetched first of a remote frame: all of a small frame, or most headers


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How a store lays out its packs.

    Attributes:
        new_pack: returns a name for a new pack, which no other pack has.
        path_of: returns the path of a pack in the storage, given its name.
        header_nbytes: returns the most bytes that a header can take, given the names of all tensors
            that the pack may get and the bytes of their frames together. It raises if a header
            must not be that long.
        name_of: returns the name of a frame in the header, given where the frame is stored and the
            name of its tensor.
        metadata: the metadata of the safetensors file; None for none.
    """

    new_pack: Callable[[], str]
    path_of: Callable[[str], str]
    header_nbytes: Callable[[Sequence[str], int], int]
    name_of: Callable[[FrameRef, str], str]
    metadata: Mapping[str, str] | None = None


class PackWriter:
    """A `FrameBatch` that writes one pack, once there is a frame to write. It is a context manager,
    and the pack exists only after its block has ended without an exception.

    Attributes:
        pack: name of the pack.
        nbytes: length of the pack so far; 0 before the first frame.
    """

    def __init__(
        self, storage: Storage, layout: PackLayout, names: Sequence[str], nbytes: int
    ) -> None:
        """
        Args:
            storage: where the pack goes.
            layout: how the store lays out its packs.
            names: the names of all tensors that the pack may get.
            nbytes: the most bytes that their frames may take together.
        """
        self.pack = layout.new_pack()
        self.nbytes = 0
        self._storage = storage
        self._layout = layout
        room = LENGTH_NBYTES + layout.header_nbytes(names, nbytes)
        self._data_offset = -(-room // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
        self._rows: dict[str, str] = {}
        self._context: AbstractContextManager[Sink] | None = None
        self._sink: Sink | None = None

    def put(self, frames: Sequence[NewFrame]) -> list[FrameRef]:
        """Append frames, and return where each one is stored."""
        sink = self._begun() if frames else None
        refs = [self._placed(frame) for frame in frames]
        if sink is not None:
            sink.write_all([frame.data for frame in frames])
        return refs

    def _begun(self) -> Sink:
        """The file, with room for the header in front."""
        if self._sink is None:
            self._context = self._storage.create(self._layout.path_of(self.pack))
            self._sink = self._context.__enter__()
            self._sink.write(bytes(self._data_offset))
            self.nbytes = self._data_offset
        return self._sink

    def _placed(self, new: NewFrame) -> FrameRef:
        """Give a frame its place."""
        n_deltas = 0 if new.base is None else new.base.n_deltas + 1
        nbytes = new.data.nbytes
        ref = FrameRef(self.pack, self.nbytes, nbytes, new.content, new.base, n_deltas)
        name = self._layout.name_of(ref, new.name)
        self._rows[name] = _row(name, ref.offset - self._data_offset, nbytes)
        self.nbytes += nbytes
        return ref

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._context is None or self._sink is None:
            return
        if kind is None:
            try:
                self._sink.patch(0, self._header())
            except BaseException as failure:
                self._context.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._context.__exit__(kind, error, trace)

    def _header(self) -> bytes:
        metadata = self._layout.metadata
        first = [] if metadata is None else [f"{_json(METADATA_KEY)}:{_json(metadata)}"]
        text = "{" + ",".join([*first, *self._rows.values()]) + "}"
        room = self._data_offset - LENGTH_NBYTES
        header = room.to_bytes(LENGTH_NBYTES, "little") + text.encode().ljust(room)
        assert len(header) == self._data_offset
        return header


def _row(name: str, start: int, nbytes: int) -> str:
    """The entry of a frame in the header."""
    offsets = f"[{start},{start + nbytes}]"
    return f'{_json(name)}:{{"dtype":"U8","shape":[{nbytes}],"data_offsets":{offsets}}}'


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class PackStore:
    """A `FrameStore` of packs. It keeps some packs open, and threads may share it."""

    def __init__(self, storage: Storage, layout: PackLayout) -> None:
        self.storage = storage
        self._layout = layout
        self._open: OrderedDict[str, Object] = OrderedDict()
        self._lock = threading.Lock()
        self._fetched: dict[tuple[str, int], ByteArray] = {}

    # Reading.

    def label(self, pack: str) -> str:
        """What messages call a pack."""
        return self.storage.label(self._layout.path_of(pack))

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        """Always finds nothing. A subclass that can look up contents overrides this."""
        return {}

    def open(self, ref: FrameRef, name: str | None = None) -> Frame:
        """A stored frame; see `FrameStore.open`."""
        (frame,) = self.open_all({ref: name})
        return frame

    def open_all(self, wanted: Mapping[FrameRef, str | None]) -> list[Frame]:
        """Stored frames; see `FrameStore.open_all`. The core reads all headers in one call. An
        error is about the first frame whose bytes cannot be had, or else about the first that is
        wrong."""
        names = [None if name is None else shortened(name) for name in wanted.values()]
        data = [self._bytes_of(ref, name) for ref, name in zip(wanted, names, strict=True)]
        rows = zip(wanted, names, data, _core.open_each(data), strict=True)
        frames: list[Frame] = []
        for pack, some in groupby(rows, lambda row: row[0].pack):
            with blaming(self.label(pack)):
                frames += [_checked(*row) for row in some]
        return frames

    def _bytes_of(self, ref: FrameRef, name: str | None) -> memoryview | ByteArray:
        fetched = self._fetched.get((ref.pack, ref.offset))
        if fetched is not None:
            return fetched
        whole = self.file(ref.pack, ref.pack_nbytes)
        try:
            return whole.region(ref.offset, ref.nbytes)
        except TruncationError as error:
            if name is None:
                raise
            raise TruncationError(f"tensor {name!r}: {error}") from error

    def chain(self, ref: FrameRef, name: str | None = None) -> Chain:
        """A stored frame with all frames that it needs; see `FrameStore.chain`."""
        frames, labels = [], []
        for link in ref.chain:
            frames.append(self.open(link, name))
            labels.append(self.label(link.pack))
        return Chain(ref, frames, labels, name)

    def is_there(self, ref: FrameRef) -> bool:
        """Whether a frame and its chain can be read, as far as a cheap check can tell."""
        try:
            for link in ref.chain:
                if self.storage.is_local:
                    self.open(link)
                elif self.file(link.pack).nbytes < link.offset + link.nbytes:
                    return False
        except (PackhorseError, OSError):
            return False
        return True

    def fetch(self, refs: Iterable[FrameRef]) -> None:
        """Get the bytes of remote frames and of their chains in few requests. Does nothing if the
        storage is local."""
        if self.storage.is_local:
            return
        links = {link: None for ref in refs for link in ref.chain}
        try:
            self.peek(links)
            self.fetch_parts((link, 0, link.nbytes) for link in links)
        except BaseException:
            self.release(links)  # the parts that were not fetched would read as zeros
            raise

    def release(self, refs: Iterable[FrameRef]) -> None:
        """Drop the bytes that `fetch` got for these frames and their chains."""
        for ref in refs:
            for link in ref.chain:
                self.forget(link)

    def forget(self, ref: FrameRef) -> None:
        """Drop the bytes that `peek` and `fetch_parts` got of one frame."""
        self._fetched.pop((ref.pack, ref.offset), None)

    def peek(self, refs: Iterable[FrameRef]) -> None:
        """Get the headers of remote frames in few requests. The rest of such a frame reads as zeros
        until `fetch_parts` gets it. Does nothing if the storage is local."""
        if self.storage.is_local:
            return
        new = [ref for ref in refs if (ref.pack, ref.offset) not in self._fetched]
        for ref in new:
            whole = self.file(ref.pack, ref.pack_nbytes)
            self._fetched[ref.pack, ref.offset] = whole.sketch(ref.offset, ref.nbytes)
        self.fetch_parts((ref, 0, min(ref.nbytes, _PEEK_NBYTES)) for ref in new)
        longer = [(ref, 0, self._header_nbytes(ref)) for ref in new]
        self.fetch_parts(part for part in longer if _PEEK_NBYTES < part[2] <= part[0].nbytes)

    def fetch_parts(self, parts: Iterable[tuple[FrameRef, int, int]]) -> None:
        """Get parts of remote frames that `peek` was called for. Does nothing if the storage is
        local.

        Args:
            parts: for each part, the frame, the first byte in the frame, and one past the last.
        """
        if self.storage.is_local:
            return
        by_pack: dict[str, list[tuple[ByteArray, int]]] = {}
        for ref, start, stop in parts:
            place = self._fetched[ref.pack, ref.offset][start:stop], ref.offset + start
            by_pack.setdefault(ref.pack, []).append(place)
        for pack, places in by_pack.items():
            self.file(pack).fill(places)

    def _header_nbytes(self, ref: FrameRef) -> int:
        """How long the header of a frame claims to be; 0 if the frame is too short to say so."""
        data = self._fetched[ref.pack, ref.offset][:FIXED_HEADER_NBYTES].tobytes()
        if len(data) < FIXED_HEADER_NBYTES:
            return 0
        nbytes: int = FIXED_HEADER.unpack(data)[8]
        return nbytes

    def file(self, pack: str, nbytes: int = 0) -> Object:
        """The file of a pack.

        Args:
            pack: its name.
            nbytes: its length; 0 if it is not known.

        Raises:
            FileNotFoundError: there is no such pack.
            TruncationError: the file has another length.
        """
        with self._lock:
            found = self._open.pop(pack, None) or self._opened(pack)
            self._open[pack] = found
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)  # a reader that still uses it keeps it open
        if nbytes and found.nbytes != nbytes:
            raise TruncationError(
                f"{self.label(pack)}: has {found.nbytes} bytes, but the manifest says {nbytes}; "
                "get the file again"
            )
        return found

    def _opened(self, pack: str) -> Object:
        try:
            return self.storage.open(self._layout.path_of(pack))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.label(pack)}: the pack does not exist") from error

    def close(self) -> None:
        """Close all packs."""
        with self._lock:
            self._open.clear()
            self._fetched.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    def batch(self, names: Sequence[str], nbytes: int) -> PackWriter:
        """A new pack, to be written in a `with` block; see `FrameStore.batch`."""
        return PackWriter(self.storage, self._layout, names, nbytes)

    def commit(self, name: str, document: bytes, *, replace: bool = False) -> None:
        """Write a document in one step; `name` is its path in the storage."""
        self.storage.put(name, document, replace=replace)

    def delete(self, packs: Iterable[str]) -> None:
        """Remove packs. Packs that do not exist are skipped."""
        for pack in packs:
            self.storage.remove(self._layout.path_of(pack))


def _checked(
    ref: FrameRef, name: str | None, data: memoryview | ByteArray, opened: OpenFrame | None
) -> Frame:
    """A frame that the core has opened, or could not, if it is the one that a manifest describes.

    Raises:
        CorruptionError, CompatibilityError: it is not.
    """
    if opened is None:  # this finds out why
        frame = Frame.from_buffer(data, name=name, offset=ref.offset)
    else:
        frame = Frame(data, opened, name, ref.offset)
    tensor = "" if name is None else f"tensor {name!r} "
    wanted = ref.content
    shape = None if wanted.shape is None else frame.shape
    if Content(frame.content_hash, frame.dtype, frame.numel, shape) != wanted:
        raise CorruptionError(
            f"{tensor}at byte {ref.offset}: the frame holds {frame.dtype} of shape "
            f"{list(frame.shape)} with content hash {frame.content_hash.hex()}, but the manifest "
            f"says {_described(wanted)} with content hash {wanted.digest.hex()}"
        )
    base = None if ref.base is None else ref.base.content
    if (frame.base_hash, frame.base_dtype) != ((None, None) if base is None else base[:2]):
        raise CorruptionError(
            f"{tensor}at byte {ref.offset}: the frame is a delta against {_hex(frame.base_hash)}, "
            f"but the manifest says {_hex(base and base.digest)}"
        )
    return frame


def _described(content: Content) -> str:
    if content.shape is not None:
        return f"{content.dtype} of shape {list(content.shape)}"
    return f"{content.numel} elements of {content.dtype}"


def _hex(digest: bytes | None) -> str:
    return "no base" if digest is None else f"the base {digest.hex()}"
