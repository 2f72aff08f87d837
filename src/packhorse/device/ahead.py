"""Decoding the weight of the next product while this one is multiplied.

A product of many tokens first decodes the weight to memory, which keeps the memory busy, and then
multiplies, which keeps the tensor cores busy. Models run their layers in the same order again and
again. So while a product runs, the weight that followed it last time is decoded on a separate
stream, into the other of two buffers. A wrong guess wastes one decoding, and never changes a
result.

Callers ask for this with `decode_ahead`. It is not the default because a CUDA graph cannot join
work that is still running on the other stream when the graph ends, and has no place for memory that
outlives a pass.
"""

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = ["AheadDecoder", "Decode", "Lane", "Mark", "current_decoder", "decode_ahead"]

# Decodes arrays to a BF16 tensor of rows and columns. It must keep no array alive.
Decode = Callable[[Sequence[Tensor], Tensor], object]
Mark = Any  # a point in the order of work; on a GPU, an event


class Lane(Protocol):
    """Runs work beside the caller's work, and lets each of the two wait for the other."""

    def mark(self) -> Mark:
        """Returns a mark after all work that the caller has requested so far."""

    def run_after(self, mark: Mark, work: Callable[[], object], uses: Sequence[Tensor]) -> Mark:
        """Runs work on the lane after a mark of the caller, and returns a mark of the lane. The
        memory of the tensors that the work uses is not reused before the work is done."""

    def wait(self, mark: Mark) -> None:
        """Makes all later work of the caller wait for a mark of the lane."""


class _StreamLane:
    """A second stream of a GPU, beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        return torch.cuda.current_stream(self._stream.device).record_event()

    def run_after(self, mark: Mark, work: Callable[[], object], uses: Sequence[Tensor]) -> Mark:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            work()
        for tensor in uses:
            tensor.record_stream(self._stream)
        return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(mark)


@dataclass(eq=False)
class _Weight:
    """A weight that has been multiplied.

    Attributes:
        arrays: weak references to its arrays.
        shape: rows and columns.
        decode: how its arrays are decoded.
        next: the weight that was multiplied after it.
    """

    arrays: tuple[TensorWeakRef, ...]
    shape: tuple[int, int]
    decode: Decode
    next: "_Weight | None" = None

    def alive(self) -> list[Tensor] | None:
        """Its arrays, or None if some are gone."""
        arrays = [
            array for array in (reference() for reference in self.arrays) if array is not None
        ]
        return arrays if len(arrays) == len(self.arrays) else None


@dataclass(eq=False)
class _Buffer:
    """Memory for a plain weight.

    Attributes:
        memory: BF16, one dimension, as long as the longest weight so far.
        holds: the weight that is being decoded into the memory ahead of its product.
        ready: the lane's mark after that decoding.
        used: the caller's mark after the last product that read the memory.
    """

    memory: Tensor
    holds: _Weight | None = None
    ready: Mark = None
    used: Mark = None

    def view(self, shape: tuple[int, int]) -> Tensor:
        """Its first elements as a matrix."""
        return self.memory[: shape[0] * shape[1]].view(shape)


class AheadDecoder:
    """Gives plain weights for products, and decodes them ahead where their order is known.

    Each stream that multiplies has its own decoder. A decoder is not safe for several threads.

    Attributes:
        n_hits: weights that were decoded ahead and used.
        n_misses: weights that were decoded only when they were needed.
    """

    def __init__(self, lane: Lane) -> None:
        """
        Args:
            lane: where to decode ahead.
        """
        self.n_hits = 0
        self.n_misses = 0
        self._lane = lane
        weights: Any = WeakTensorKeyDictionary()
        self._weights: MutableMapping[Tensor, _Weight] = weights
        self._last: _Weight | None = None
        self._buffers: list[_Buffer] = []

    @contextmanager
    def plain(
        self, arrays: Sequence[Tensor], shape: tuple[int, int], decode: Decode
    ) -> Iterator[Tensor]:
        """A plain weight, while the caller asks for products with it.

        Args:
            arrays: the arrays of a packed weight, which must not change. The first one identifies
                the weight.
            shape: rows and columns of the weight.
            decode: how to decode them.

        Yields:
            A BF16 tensor of the shape. Do not write to it; later, other weights are decoded to its
            memory.
        """
        weight = self._remember(arrays, shape, decode)
        buffer = next((buffer for buffer in self._buffers if buffer.holds is weight), None)
        if buffer is None:
            self.n_misses += 1
            buffer = self._take(weight, arrays[0].device)
            decode(arrays, buffer.view(shape))
        else:
            self.n_hits += 1
            self._lane.wait(buffer.ready)
        buffer.holds = None
        try:
            yield buffer.view(shape)
        finally:
            buffer.used = self._lane.mark()
        # The next weight goes to the other buffer.
        self._buffers.sort(key=lambda other: other is buffer)
        self._decode_ahead(weight.next)

    def _remember(
        self, arrays: Sequence[Tensor], shape: tuple[int, int], decode: Decode
    ) -> _Weight:
        weight = self._weights.get(arrays[0])
        if weight is None or weight.shape != shape:
            weight = _Weight(tuple(map(TensorWeakRef, arrays)), shape, decode)
            self._weights[arrays[0]] = weight
        if self._last is not None:
            self._last.next = weight
        self._last = weight
        return weight

    def _take(self, weight: _Weight, device: torch.device) -> _Buffer:
        """The first buffer, which the caller may write to."""
        while len(self._buffers) < 2:
            self._buffers.append(_Buffer(torch.empty(0, dtype=torch.bfloat16, device=device)))
        buffer = self._buffers[0]
        if buffer.ready is not None:
            self._lane.wait(buffer.ready)  # it may still be written to
            buffer.holds = buffer.ready = None
        numel = weight.shape[0] * weight.shape[1]
        if buffer.memory.numel() < numel:
            buffer.memory = torch.empty(numel, dtype=torch.bfloat16, device=device)
            buffer.used = None
        return buffer

    def _decode_ahead(self, weight: _Weight | None) -> None:
        arrays = None if weight is None else weight.alive()
        if weight is None or arrays is None or weight is self._last:
            return
        if any(buffer.holds is weight for buffer in self._buffers):
            return
        buffer = self._take(weight, arrays[0].device)
        target, decode = buffer.view(weight.shape), weight.decode
        # Pending work may still use new memory for another purpose; decoding then waits for that
        # work.
        mark = self._lane.mark() if buffer.used is None else buffer.used
        uses = [*arrays, buffer.memory]
        buffer.ready = self._lane.run_after(mark, lambda: decode(arrays, target), uses)
        buffer.holds = weight


_ACTIVE = threading.local()


@contextmanager
def decode_ahead() -> Iterator[None]:
    """Inside the block, products of many tokens with packed weights on a GPU decode ahead.

    Use it for passes over many tokens (a long prompt, scoring, training on top), but not in CUDA
    graphs, nor in code that is compiled to them. It takes memory for the two longest plain weights
    until the block ends, and affects only the calling thread.

    Yields:
        Nothing; the block runs.

    Example:
        >>> import torch
        >>> from packhorse.device import decode_ahead, pack_model_
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
        >>> report = pack_model_(model)
        >>> with decode_ahead(), torch.inference_mode():
        ...     scores = model(torch.ones(1024, 512, dtype=torch.bfloat16))
    """
    before = getattr(_ACTIVE, "decoders", None)
    _ACTIVE.decoders = {}
    try:
        yield
    finally:
        _ACTIVE.decoders = before


def current_decoder(device: torch.device) -> AheadDecoder | None:
    """The decoder for the current stream of a GPU; None outside of `decode_ahead`, and while a CUDA
    graph is captured."""
    decoders: dict[tuple[int, int], AheadDecoder] | None = getattr(_ACTIVE, "decoders", None)
    if decoders is None or torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    key = stream.device_index, stream.cuda_stream
    if key not in decoders:
        decoders[key] = AheadDecoder(_StreamLane(stream.device))
    return decoders[key]
