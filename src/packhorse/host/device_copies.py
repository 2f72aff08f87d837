"""Brings blocks of packed rows to a GPU by its copy engine, in a ring of two buffers.

While one part of a block is copied on a stream of its own, the one before it is decoded on the
caller's. A copy takes no multiprocessors, but it costs its start, and the decoding of the last part
comes on top: so short blocks are better read in place (packhorse.host.crossover says from when).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RING_NBYTES", "RowRing"]

RING_NBYTES = 8 << 20  # of a buffer: some 150 us of a link, 50 times what a copy costs to start


class RowRing:
    """The stream that copies rows to one device. A device that has no streams (the host, where
    kernels are interpreted) copies and decodes in turns.

    Args:
        device: the device.
        nbytes: bytes of each of the two buffers.
    """

    def __init__(self, device: torch.device, nbytes: int = RING_NBYTES) -> None:
        self._device, self._nbytes = device, nbytes
        make: Any = torch.cuda.Stream  # PyTorch has no type hints for it
        self._stream = make(device) if device.type == "cuda" else None

    def run(
        self,
        rows: torch.Tensor,
        start: int,
        stop: int,
        decode: Callable[[torch.Tensor, int, int], None],
    ) -> None:
        """Copies rows, part by part, and decodes each. The caller's stream waits for all of it; the
        host waits for nothing.

        Args:
            rows: uint8 (n_rows, stride), in memory of the host that is registered or pinned.
            start, stop: the rows that are copied.
            decode: called with a part in device memory, the number of its first row, and the
                number behind its last one; launches work on the current stream.
        """
        stride = rows.shape[1]
        step = max(1, min(self._nbytes // stride, stop - start))
        # They belong to the caller's stream, which waits for each copy before it decodes.
        buffers = torch.empty((2, step, stride), dtype=torch.uint8, device=self._device)
        if self._stream is None:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                decode(buffers[0, : last - first].copy_(rows[first:last]), first, last)
            return
        home = torch.cuda.current_stream(self._device)
        free = [home.record_event(), home.record_event()]
        for number, first in enumerate(range(start, stop, step)):
            last, turn = min(first + step, stop), number % 2
            part = buffers[turn, : last - first]
            self._stream.wait_event(free[turn])
            with torch.cuda.stream(self._stream):
                part.copy_(rows[first:last], non_blocking=True)
                copied = self._stream.record_event()
            home.wait_event(copied)
            decode(part, first, last)
            free[turn] = home.record_event()
