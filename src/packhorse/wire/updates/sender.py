"""`DeltaSender`: packs each version of a model's weights as a difference from the one before.

The sender keeps a copy of what it packed last: as many bytes as the tensors have, in host memory or
in a file that is mapped. A unit whose bytes equal the copy is not sent. Each other unit is
packed against the copy, which becomes the new unit in the same pass (frame/follow.py). Every byte
is read once, so an update and the copy agree, whatever is written to the tensors meanwhile. Where
PyTorch counts writes, they are noticed.

If packing fails, nothing was sent and some units of the copy may be new. The next update is
therefore an anchor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs.base import ByteArray
from packhorse.errors import ChangedError
from packhorse.frame.follow import Follower
from packhorse.layout import DTYPE_BY_NAME, Level
from packhorse.threads import map_tensors
from packhorse.wire.updates.contents import Contents, state_hash
from packhorse.wire.updates.message import MAX_SHARDS, Header, write_message
from packhorse.wire.updates.tensors import (
    Binding,
    Shards,
    Tensors,
    contents_of,
    named_tensors,
)
from packhorse.wire.updates.update import Update

if TYPE_CHECKING:
    PathLike = str | os.PathLike[str]

__all__ = ["DeltaSender", "make_update"]

_STREAM_NBYTES = 16
_ALIGNMENT = 64  # of units in the copy
# Words that are compared first, and at most at a time: a changed unit is recognised early.
_FIRST_WORDS, _MOST_WORDS = 1 << 9, 1 << 17
_WORD: np.dtype[Any] = np.dtype(np.uint64)
_UNITS: dict[int, np.dtype[Any]] = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}


class DeltaSender:
    """Packs versions of a model's weights for receivers that hold an earlier version.

    It costs a copy of all tensors in host memory, or in a file. Use it from one thread at a time,
    and let nothing write to the tensors while `pack` runs.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaReceiver, DeltaSender
        >>> weights = {"w": np.zeros(1000, np.float32)}
        >>> sender, receiver = DeltaSender(weights), DeltaReceiver(into={"w": np.ones(1000, "f4")})
        >>> receiver.unpack(bytes(sender.pack()))
        >>> weights["w"][7] = 3
        >>> receiver.unpack(bytes(sender.pack()))
        >>> float(receiver.state["w"][7]), receiver.version
        (3.0, 2)
    """

    def __init__(
        self,
        model_or_state: Tensors,
        *,
        anchor_every: int | None = 25,
        level: Level | str = "default",
        threads: int | None = None,
        receivers_have_it: bool = False,
        snapshot: PathLike | None = None,
        shards: Shards | None = None,
        count_changed: bool = False,
        stream_id: bytes | None = None,
    ) -> None:
        """
        Args:
            model_or_state: an object with `state_dict()`, or a mapping from names to tensors of
                NumPy or PyTorch. It is read again by each `pack()`; names, dtypes and shapes stay.
            anchor_every: every n-th update is an anchor, which has all tensors in full; None for
                the first only.
            level: "fast", "default" or "max".
            threads: the number of threads; None for one per core, at most 8.
            receivers_have_it: whether the receivers start from the same weights, as when both sides
                loaded one checkpoint. The first update is then a delta, too. A receiver that has
                other weights refuses it.
            snapshot: a file for the copy, which is created or replaced, and mapped; None to keep
                the copy in host memory.
            shards: which part of the model this sender has; None for all of it.
            count_changed: whether `Update.report` counts changed elements, which takes one more
                pass over the tensors.
            stream_id: 16 bytes that no other sender has, if receivers must know them beforehand;
                None to draw them.

        Raises:
            TypeError: a value is no tensor, or has no dtype of safetensors.
            ValueError: an argument is out of range, or tensors do not fit.
            OSError: the file for the copy cannot be written.
        """
        if anchor_every is not None and (type(anchor_every) is not int or anchor_every < 1):
            raise ValueError(f"anchor_every is {anchor_every!r}; it must be at least 1, or None")
        if stream_id is not None and len(stream_id) != _STREAM_NBYTES:
            raise ValueError(f"stream_id has {len(stream_id)} bytes; it must have {_STREAM_NBYTES}")
        index, count = (0, 1) if shards is None else (shards.index, shards.count)
        if not 0 <= index < count <= MAX_SHARDS:
            raise ValueError(f"shard {index} of {count}: at most {MAX_SHARDS}, numbered from 0")
        self._source = model_or_state
        self._anchor_every = anchor_every
        self._level = resolve_level(level)
        self._threads = resolve_threads(threads)
        self._shard = index, count
        self._counts = count_changed
        self._stream = stream_id or os.urandom(_STREAM_NBYTES)
        self._version = 0
        self._since_anchor = 0
        tensors = named_tensors(model_or_state)
        self._names = tensors.keys() | set()
        self._contents = contents_of(tensors, shards)
        self._copy = _make_copy(self._contents, snapshot)
        self._followers = [
            Follower(unit.dtype, unit.shape, memory, self._level, unit.label)
            for unit, memory in zip(self._contents.units, self._copy, strict=True)
        ]
        self._still: set[int] = set()  # units that did not change the last time
        self._must_anchor = not receivers_have_it
        if receivers_have_it:
            self._keep_all(Binding(self._contents, tensors))

    @property
    def version(self) -> int:
        """The version that was packed last; 0 before the first."""
        return self._version

    @property
    def stream_id(self) -> bytes:
        """16 bytes that all updates of this sender share."""
        return self._stream

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, and of the copy that the sender keeps."""
        return self._contents.nbytes

    def pack(self, state: Tensors | None = None) -> Update:
        """Packs the weights as they are now, as the next version.

        Args:
            state: the tensors, if they are others than those that the sender was made with: the
                same names, dtypes and shapes.

        Returns:
            The update; the same bytes are for all receivers. If it gets lost, send it again, or
            send an `anchor()`.

        Raises:
            ChangedError: PyTorch wrote to a tensor meanwhile. The next update is an anchor.
            TypeError, ValueError: the tensors are not those that the sender was made with.
        """
        tensors = named_tensors(self._source if state is None else state)
        binding = self._bind(tensors)
        is_anchor = self._must_anchor or (
            self._anchor_every is not None and self._since_anchor + 1 >= self._anchor_every
        )
        before = b"" if is_anchor else self.state_hash
        self._must_anchor = True  # until all units are packed and kept
        writes = binding.write_counts()
        frames, changed = self._pack_units(binding, is_anchor)
        _check_writes(writes, binding.write_counts())
        update = self._update(
            is_anchor, self._version + 1, 0 if is_anchor else self._version, before, frames, changed
        )
        self._version += 1
        self._since_anchor = 0 if is_anchor else self._since_anchor + 1
        self._must_anchor = False
        return update

    def anchor(self) -> Update:
        """Packs the version that was packed last once more, with all tensors in full, for receivers
        that join late or have lost their version. The next `pack` is not affected.

        Raises:
            ValueError: no version was packed yet, or the last `pack` failed.
        """
        if self._version == 0 or self._must_anchor:
            raise ValueError("no version is packed; call pack(), which makes an anchor now")
        units = self._contents.units

        def work(i: int, n_threads: int) -> bytes:
            return self._followers[i].full(n_threads).to_bytes()

        sizes = [unit.nbytes for unit in units]
        packed = map_tensors(work, sizes, self._threads)
        frames = {i: frame for i, frame in enumerate(packed) if units[i].nbytes}
        return self._update(True, self._version, 0, b"", frames, {})

    @property
    def state_hash(self) -> bytes:
        """Hash of the state that was packed last, 16 bytes."""
        return state_hash(self._contents, [each.content_sum for each in self._followers])

    def _bind(self, tensors: Mapping[str, Any]) -> Binding:
        if tensors.keys() != self._names:
            other = min(tensors.keys() ^ self._names)
            raise ValueError(
                f"the tensors are not those that the sender was made with: {other!r} is in one of "
                "them only; make a new sender"
            )
        binding = Binding(self._contents, tensors)
        if (name := binding.untied()) is not None:
            raise ValueError(
                f"{name} shared memory with another tensor when the sender was made, and does not "
                "now; make a new sender"
            )
        return binding

    def _pack_units(
        self, binding: Binding, is_anchor: bool
    ) -> tuple[dict[int, bytes], dict[int, float]]:
        """Frames of changed units, and the shares of changed elements. The copy becomes the new
        state."""
        changed: dict[int, float] = {}

        def work(i: int, n_threads: int) -> bytes | None:
            data, follower = binding.read(i), self._followers[i]
            # A unit that stays as it is, as those of frozen layers do, need not be hashed.
            if not is_anchor and i in self._still and _is_same(data, self._copy[i]):
                return None
            if self._counts and follower.content_sum:
                changed[i] = _share_of_changed(data, self._copy[i], binding.unit(i).dtype)
            pack = follower.begin if is_anchor else follower.follow
            frame = pack(data, n_threads)
            return None if frame is None else frame.to_bytes()

        sizes = [unit.nbytes for unit in self._contents.units]
        packed = map_tensors(work, sizes, self._threads)
        if not is_anchor:
            self._still = {i for i, frame in enumerate(packed) if frame is None}
        frames = {i: frame for i, frame in enumerate(packed) if frame is not None and sizes[i]}
        return frames, changed

    def _keep_all(self, binding: Binding) -> None:
        def work(i: int, n_threads: int) -> None:
            self._followers[i].keep(binding.read(i))

        map_tensors(work, [unit.nbytes for unit in self._contents.units], self._threads)

    def _update(
        self,
        is_anchor: bool,
        number: int,
        base_number: int,
        before: bytes,
        frames: Mapping[int, bytes],
        changed: Mapping[int, float],
    ) -> Update:
        header = Header(
            is_anchor, *self._shard, self._stream, number, base_number,
            before or bytes(_STREAM_NBYTES), self.state_hash,
        )  # fmt: skip
        return make_update(header, self._contents, frames, changed)


def make_update(
    header: Header,
    contents: Contents,
    frames: Mapping[int, bytes],
    changed: Mapping[int, float] | None = None,
) -> Update:
    """An update of packed units.

    Args:
        header: its fields.
        contents: its tensors.
        frames: the frames of changed units.
        changed: the share of elements that changed, where it was counted.
    """
    return Update._made(header, contents, write_message(header, contents, frames), changed)


def _make_copy(contents: Contents, path: PathLike | None) -> list[ByteArray]:
    """Memory for each unit, in one allocation or one file."""
    offsets, end = [], 0
    for unit in contents.units:
        offsets.append(end)
        end += -(-unit.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory: Any
    if path is None or end == 0:
        memory = np.empty(end, np.uint8)
    else:
        memory = np.memmap(path, np.uint8, "w+", shape=(end,)).view(np.ndarray)
    return [
        memory[offset : offset + unit.nbytes]
        for offset, unit in zip(offsets, contents.units, strict=True)
    ]


def _check_writes(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Refuses an update if a tensor was written to between two counts of writes.

    Raises:
        ChangedError: one was.
    """
    for name, count in before.items():
        if after[name] != count:
            raise ChangedError(
                f"{name}: it was written to while it was packed; pack when nothing writes to it"
            )


def _is_same(a: ByteArray, b: ByteArray) -> bool:
    """Whether the bytes of two arrays of one length are equal."""
    whole = a.size // _WORD.itemsize * _WORD.itemsize
    if not np.array_equal(a[whole:], b[whole:]):
        return False
    words, others = a[:whole].view(_WORD), b[:whole].view(_WORD)
    at, step = 0, _FIRST_WORDS
    while at < words.size:
        if not np.array_equal(words[at : at + step], others[at : at + step]):
            return False
        at, step = at + step, min(2 * step, _MOST_WORDS)
    return True


def _share_of_changed(new: ByteArray, old: ByteArray, dtype: str) -> float:
    """The share of a unit's elements that changed; of its bytes, if elements are shorter."""
    nbytes = max(DTYPE_BY_NAME[dtype].bits // 8, 1)
    word = _UNITS[nbytes]
    n = new.size // nbytes
    return int(np.count_nonzero(new.view(word) != old.view(word))) / n if n else 0.0
