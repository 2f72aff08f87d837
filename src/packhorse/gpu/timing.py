"""Times kernels on a GPU.

What is timed is a CUDA graph of one call on each of several copies of its data, together more than
the L2 cache holds, so that each call finds its data in device memory, as it does in a model. The
graph is replayed, and the median of its times counts.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from triton import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = ["CANNOT_RUN", "CHAIN_NBYTES", "N_REPLAYS", "chain_copies", "time_chain"]

CHAIN_NBYTES = 240_000_000  # four times the largest L2 cache
N_REPLAYS = 30
# What a kernel raises that is too large for a GPU, or not known to its compiler.
CANNOT_RUN = (OutOfResources, PTXASError, CompilationError, torch.OutOfMemoryError)
_MIN_COPIES = 4
_WARM_REPLAYS = 3


def chain_copies(nbytes: int, chain_nbytes: int = CHAIN_NBYTES) -> int:
    """Copies of so many bytes that are more than the caches hold; at least four."""
    return max(_MIN_COPIES, -(-chain_nbytes // max(nbytes, 1)))


def time_chain(calls: Sequence[Callable[[], object]], *, n_replays: int = N_REPLAYS) -> float:
    """Seconds of a call, the median over replays of a CUDA graph of all of them, one after the
    other.

    Args:
        calls: each works on memory of its own. They were called before, so nothing is compiled.
        n_replays: timed replays.
    """
    graph = torch.cuda.CUDAGraph()
    # On the stream of all captures: each stream of its own would keep a workspace of cuBLAS.
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
