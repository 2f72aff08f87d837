"""Times kernels on a GPU.

A measurement replays a CUDA graph of several calls, each with its own copy of the data, and takes
the median of the times. Together, the copies are larger than the L2 cache, so each call finds its
data in device memory, as it would in a model.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from triton import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = ["CANNOT_RUN", "CHAIN_NBYTES", "N_REPLAYS", "chain_copies", "time_chain"]

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


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
