"""Collectives that go on in the background while the caller computes.

One thread runs them, in the order in which they were begun, because all ranks must run the same
ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from packhorse.wire.backend import dist, torch

__all__ = ["Background", "Pending"]


class Pending(dist.Work):
    """A collective in the background. PyTorch waits for it as for one of its own: FSDP2 does so
    only for a `torch.distributed.Work`.

    Example:
        >>> def gather(collectives, output, input):
        ...     pending = collectives.all_gather(output, input, async_op=True)
        ...     ...  # something else meanwhile
        ...     pending.wait()
    """

    def __init__(self, future: Future[None], result: torch.Tensor) -> None:
        """Private: collectives make them."""
        super().__init__()
        self._future = future
        self._result = result

    @classmethod
    def done(cls, result: torch.Tensor) -> Pending:
        """A collective that has ended, or that a stream of a device has in order.

        Args:
            result: the tensor that it wrote to.

        Returns:
            One that does not wait.
        """
        future: Future[None] = Future()
        future.set_result(None)
        return cls(future, result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the collective has ended.

        Args:
            timeout: how long to wait; None for as long as the collective itself may take.

        Returns:
            True, as PyTorch's own does.

        Raises:
            PackhorseError: the collective failed.
            TimeoutError: the time is over; the collective goes on.
        """
        self._future.result(None if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future of PyTorch, which yields the tensor that the collective writes to."""
        device = self._result.device
        devices: list[int | str | torch.device] = [] if device.type == "cpu" else [device]
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def tell(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                found.set_result(self._result)
            else:
                found.set_exception(error)  # type: ignore[arg-type]

        self._future.add_done_callback(tell)
        return found


class Background:
    """Runs calls in order, some of them in a thread, which starts when it is first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Runs a call after all those that were begun before it, and waits for it."""
        if self._last is None or self._last.done():
            call()
        else:
            self._begin(call).result()

    def begin(self, call: Callable[[], None], result: torch.Tensor) -> Pending:
        """Begins a call, and returns at once."""
        return Pending(self._begin(call), result)

    def _begin(self, call: Callable[[], None]) -> Future[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "packhorse-wire")
        self._last = self._pool.submit(call)
        return self._last
