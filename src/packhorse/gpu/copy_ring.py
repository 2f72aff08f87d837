"""Blocks of host memory that a GPU needs one after the other, copied to two buffers in turn.

While the work on one block runs on the current stream, the copy engine brings the next block to
the other buffer, on a stream of its own. Events order the two, and the host waits for neither:

- a copy waits until the work on the block that was in its buffer has ended;
- work waits until the copy of its block has ended.

The ring learns which block follows which from the calls of `lend`, so it needs to be told nothing
if the order is the same each time. A wrong guess costs a copy, and never gives a wrong block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

__all__ = ["Block", "CopyEngine", "CopyRing", "copy_engine"]

_ALIGNMENT = 256  # bytes; of both buffers, and more than any kernel wants


class Block(Protocol):
    """What a ring copies.

    Attributes:
        stored: its bytes in host memory: u8, one dimension.
        name: for messages.
    """

    stored: Tensor
    name: str


class CopyEngine(Protocol):
    """Copies to a device that run beside its current stream, and the events that order them.

    An event is whatever an engine returns; None has passed already.
    """

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Starts a copy from host memory that runs once an event has passed.

        Returns:
            The event of its end.
        """

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""

    def mark(self) -> Any:
        """The event that all work of the current stream so far has ended."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured to a graph, and does not run."""


class _HostCopies:
    """The host copies at once, so there is nothing to wait for."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> None:
        target.copy_(source)

    def wait(self, event: Any) -> None:
        pass

    def mark(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class _CudaCopies:
    """Copies on a side stream of a GPU; the host goes on at once if the source is registered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        if after is not None:
            self._side.wait_event(after)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._side)  # it is memory of another stream
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def is_capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()


def copy_engine(device: torch.device) -> CopyEngine:
    """The engine of a device: a CUDA device, or the host."""
    return _CudaCopies(device) if device.type == "cuda" else _HostCopies()


@dataclass(eq=False)
class _Slot:
    """A buffer: the block in it, the event of its arrival, and that of the end of work on it."""

    buffer: Tensor
    freed: Any
    block: ReferenceType[Block] | None = None
    arrived: Any = None

    def holds(self, block: Block) -> bool:
        return self.block is not None and self.block() is block


class CopyRing:
    """Lends the device's copies of blocks of host memory.

    Threads take turns: while one launches its work on a block, others wait.

    Attributes:
        nbytes: bytes of the device's memory that it holds.

    Example:
        >>> import torch
        >>> from packhorse.gpu.copy_ring import CopyRing
        >>> class Block:
        ...     name, stored = "one", torch.arange(4, dtype=torch.uint8)
        >>> with CopyRing(4, "cpu").lend(Block()) as copied:
        ...     print(copied.tolist())
        [0, 1, 2, 3]
    """

    def __init__(
        self, block_nbytes: int, device: torch.device | str, *, engine: CopyEngine | None = None
    ) -> None:
        """A ring with both buffers.

        Args:
            block_nbytes: bytes of the largest block.
            device: where the buffers are.
            engine: how to copy; None for what the device has.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the buffers.
        """
        target = torch.device(device)
        self._engine = copy_engine(target) if engine is None else engine
        size = -(-block_nbytes // _ALIGNMENT) * _ALIGNMENT
        buffers = torch.empty(2, size, dtype=torch.uint8, device=target)
        self.nbytes = buffers.nbytes
        freed = self._engine.mark()  # what used this memory before may still run
        self._slots = [_Slot(buffer, freed) for buffer in buffers]
        self._lent = 0  # the number of the slot that was lent last
        self._following: WeakKeyDictionary[Block, ReferenceType[Block]] = WeakKeyDictionary()
        self._last: ReferenceType[Block] | None = None
        self._lock = Lock()

    def expect(self, order: Sequence[Block]) -> None:
        """Says in which order blocks will probably be asked for, again and again."""
        for block, following in zip(order, [*order[1:], *order[:1]], strict=True):
            self._following[block] = ref(following)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured to a graph. A ring cannot lend then: the
        graph would repeat copies to buffers that hold other blocks by then."""
        return self._engine.is_capturing()

    @contextmanager
    def lend(self, block: Block) -> Iterator[Tensor]:
        """The device's copy of a block, for work that is launched on the current stream before the
        context ends; meanwhile, the block that probably follows is on its way.

        Args:
            block: with at most `block_nbytes` bytes.

        Returns:
            u8, as many as the block has; not to be used after the context.
        """
        with self._lock:
            slot = self._slots[self._lent]
            if not slot.holds(block):
                self._lent = 1 - self._lent
                slot = self._slots[self._lent]
                if not slot.holds(block):
                    self._fetch(block, slot)
            self._engine.wait(slot.arrived)
            # Work of another stream may still read this buffer. This stream comes after it, so one
            # event says when both are done.
            if slot.freed is not None:
                self._engine.wait(slot.freed)
            self._fetch_ahead(block)
            try:
                yield slot.buffer[: block.stored.numel()]
            finally:
                slot.freed = self._engine.mark()

    def _fetch_ahead(self, block: Block) -> None:
        last = None if self._last is None else self._last()
        if last is not None:
            self._following[last] = ref(block)
        self._last = ref(block)
        found = self._following.get(block)
        following = None if found is None else found()
        other = self._slots[1 - self._lent]
        if following is not None and following is not block and not other.holds(following):
            self._fetch(following, other)

    def _fetch(self, block: Block, slot: _Slot) -> None:
        slot.block = None  # if the copy fails, the slot holds nothing
        target = slot.buffer[: block.stored.numel()]
        try:
            slot.arrived = self._engine.copy(target, block.stored, slot.freed)
        except Exception as error:
            error.add_note(f"{block.name} was being copied to the device")
            raise
        slot.block = ref(block)

    def forget(self, block: Block) -> None:
        """Copies a block anew when it is asked for the next time, because the host changes it."""
        with self._lock:
            for slot in self._slots:
                if slot.holds(block):
                    slot.block = None
