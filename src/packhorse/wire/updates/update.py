"""`Update`: what a sender makes and a transport carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from packhorse.wire.updates.message import Message, read_message

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["UnitReport", "Update"]


class UnitReport(NamedTuple):
    """What an update has of a tensor, or of small tensors that share a frame.

    Attributes:
        names: the tensors.
        dtype: their dtype.
        logical_nbytes: their bytes.
        nbytes: bytes of their frame; 0 if nothing changed.
        kind: "same", "delta" or "full".
        changed: the share of elements that changed, from 0 to 1; None if it was not counted.
    """

    names: tuple[str, ...]
    dtype: str
    logical_nbytes: int
    nbytes: int
    kind: str
    changed: float | None

    @property
    def ratio(self) -> float:
        """Bytes of the tensors divided by bytes sent; infinite if nothing was sent."""
        return self.logical_nbytes / self.nbytes if self.nbytes else float("inf")


class Update:
    """One version of a model's weights, as bytes to send to every receiver.

    `bytes(update)` and `update.buffer()` are the bytes; `Update(data)` reads and checks some. An
    update is immutable.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.updates import DeltaSender, Update
        >>> update = DeltaSender({"w": np.zeros(1000, np.float32)}).pack()
        >>> Update(bytes(update)).version
        1
    """

    def __init__(self, data: Buffer, *, changed: Mapping[int, float] | None = None) -> None:
        """
        Args:
            data: exactly an update's bytes; kept, not copied.
            changed: the share of elements that changed, by unit, where it was counted.

        Raises:
            CorruptionError, CompatibilityError, TypeError: as `DeltaReceiver.stage`.
        """
        self._set(read_message(data), data, changed)

    @classmethod
    def of_message(
        cls, message: Message, data: Buffer, changed: Mapping[int, float] | None = None
    ) -> Update:
        """An update whose message was read or made already."""
        update = cls.__new__(cls)
        update._set(message, data, changed)
        return update

    def _set(self, message: Message, data: Buffer, changed: Mapping[int, float] | None) -> None:
        self._message = message
        self._view = memoryview(data).toreadonly()
        self._changed = dict(changed or {})

    def __bytes__(self) -> bytes:
        return self._view.tobytes()

    def __repr__(self) -> str:
        kind = "anchor" if self.is_anchor else f"from {self.base_version}"
        return f"Update({self.version}, {kind}, nbytes={self.nbytes}, ratio={self.ratio:.1f})"

    def buffer(self) -> memoryview:
        """Views the update's bytes, read-only."""
        return self._view

    @property
    def message(self) -> Message:
        """What was read from the bytes."""
        return self._message

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._view.nbytes

    @property
    def logical_nbytes(self) -> int:
        """Bytes of all tensors that the update is about."""
        return self._message.contents.nbytes

    @property
    def ratio(self) -> float:
        """Bytes of all tensors divided by the update's bytes."""
        return self.logical_nbytes / self.nbytes

    @property
    def version(self) -> int:
        """The version that the update leads to; the first is 1."""
        return self._message.header.number

    @property
    def base_version(self) -> int | None:
        """The version that the update starts from; None for an anchor. Version 0 is the state that
        the sender was made with."""
        return None if self.is_anchor else self._message.header.base_number

    @property
    def is_anchor(self) -> bool:
        """Whether it has all tensors in full and needs no base."""
        return self._message.header.is_anchor

    @property
    def stream_id(self) -> bytes:
        """16 bytes that all updates of a sender share."""
        return self._message.header.stream

    @property
    def shard(self) -> tuple[int, int]:
        """Which of how many senders made it."""
        return self._message.header.shard, self._message.header.n_shards

    @property
    def state_hash(self) -> bytes:
        """Hash of the whole state that the update leads to, 16 bytes."""
        return self._message.header.state_hash

    @property
    def base_hash(self) -> bytes | None:
        """Hash of the whole state that the update starts from; None for an anchor."""
        return None if self.is_anchor else self._message.header.base_hash

    @property
    def names(self) -> list[str]:
        """Names of all tensors, aliases included."""
        contents = self._message.contents
        return sorted([*(part.name for part in contents.parts), *contents.aliases])

    @property
    def report(self) -> tuple[UnitReport, ...]:
        """What the update has of each tensor; small tensors of one dtype share a row."""
        return tuple(self._row(i) for i in range(len(self._message.contents.units)))

    def _row(self, i: int) -> UnitReport:
        unit, frame = self._message.contents.units[i], self._message.frames.get(i)
        names = tuple(part.name for part in unit.parts)
        fields: dict[str, Any] = {"changed": self._changed.get(i)}
        if frame is None:
            return UnitReport(names, unit.dtype, unit.nbytes, 0, "same", 0.0)
        kind = "full" if frame.base_hash is None else "delta"
        return UnitReport(names, unit.dtype, unit.nbytes, frame.nbytes, kind, **fields)
