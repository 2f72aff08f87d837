"""Times work on a GPU.

A measurement replays a CUDA graph of several calls, each with its own copy of the data, and takes
the median of the times. Together, the copies are larger than the L2 cache, so each call finds its
data in device memory, as it would in a model. Work that a graph cannot hold is timed as it runs.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from triton import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = ["CANNOT_RUN", "CHAIN_NBYTES", "N_REPLAYS", "chain_copies", "time_calls", "time_chain"]

CHAIN_NBYTES = 240_000_000  # four times the largest L2 cache
N_REPLAYS = 30
# Errors of a kernel that is too large for a GPU, or that the compiler cannot translate.
CANNOT_RUN = (OutOfResources, PTXASError, CompilationError, torch.OutOfMemoryError)
_MIN_COPIES = 4
_WARM_REPLAYS = 3


def chain_copies(nbytes: int, chain_nbytes: int = CHAIN_NBYTES) -> int:
    """How many copies of some bytes are larger than the caches together; at least four."""
    return max(_MIN_COPIES, -(-chain_nbytes // max(nbytes, 1)))


def time_chain(calls: Sequence[Callable[[], object]], *, n_replays: int = N_REPLAYS) -> float:
    """Seconds of one call: the median over replays of a CUDA graph that has all calls in order.

    Args:
        calls: each call has its own memory, and was made once before, so that nothing is compiled
            now.
        n_replays: timed replays.
    """
    graph = torch.cuda.CUDAGraph()
    # All captures share one stream, because every new stream would keep a workspace of cuBLAS.
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(_WARM_REPLAYS + n_replays):
        seconds = _replay(graph)
        if replay >= _WARM_REPLAYS:
            times.append(seconds)
    graph.reset()
    return statistics.median(times) / len(calls)


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, *, n_rounds: int = 10
) -> float:
    """Seconds of one call: the median over rounds of all calls in order, without a graph.

    Args:
        calls: the first round is not timed.
        device: where their work runs; on the host, by its clock.
        n_rounds: timed rounds.
    """
    times = []
    for _ in range(n_rounds + 1):
        times.append(_time_round(calls, device))
    return statistics.median(times[1:]) / len(calls)


def _time_round(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    if device.type != "cuda":
        before = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - before
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
