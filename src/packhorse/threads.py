"""Python threads that start in a call and are joined before it returns.

The core has threads of its own for the chunks of one tensor. The threads here work on many things
at once: the tensors of a model, most of which are no longer than a chunk, and Zstandard chunks.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

__all__ = ["batches", "in_order", "map_tensors", "one_ahead"]

_Result = TypeVar("_Result")

# The fixed cost of a call, as the number of bytes that could be coded in the same time.
_CALL_NBYTES = 1 << 16
# A smaller tensor has a chunk or two, too few for several threads.
_MIN_SHARED_NBYTES = 1 << 19
# For a smaller tensor the core keeps the GIL (csrc/bind/gil.hpp), and threads would only wait.
_MIN_PARALLEL_NBYTES = 1 << 16
# The busiest thread may work this many times as long as the average.
_MAX_IMBALANCE = 1.1
# A batch, where memory is bounded: enough for many small tensors in each thread.
_BATCH_NBYTES = 1 << 25


def map_tensors(
    work: Callable[[int, int], _Result], sizes: Sequence[int], threads: int
) -> list[_Result]:
    """Calls a function once for each tensor, and divides the threads between or inside the calls.

    If a tensor is so large that the other tensors could not keep the other threads busy meanwhile,
    all threads work on it together. Each other tensor is handled by one thread, the largest first.

    Args:
        work: takes the index of a tensor and the number of threads to use. The order of the calls
            is not fixed, and several threads call it at once.
        sizes: the size of each tensor in bytes.
        threads: the number of threads.

    Returns:
        The results in the order of the tensors.

    Raises:
        BaseException: the error of a call; that of the first tensor, if several calls failed. No
            call starts after one has failed.
    """
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run(indices: Iterator[int], n_threads: int) -> None:
        for i in indices:  # several threads may share an iterator of a list: next() is atomic
            if errors:
                return
            try:
                results[i] = work(i, n_threads)
            except BaseException as error:
                errors[i] = error

    shared, single, short = _share_out(sizes, threads)
    run(iter(shared), threads)
    todo = iter(single)
    helpers = []
    try:
        with suppress(RuntimeError):  # no more threads can start, or the interpreter is ending
            for _ in range(min(threads, len(single)) - 1):
                helper = threading.Thread(target=run, args=(todo, 1))
                helper.start()
                helpers.append(helper)
        run(todo, 1)
        run(iter(short), 1)
    finally:
        deque(todo, maxlen=0)  # empties it: if this thread is interrupted, no further call starts
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[i] for i in range(len(sizes))]


def _share_out(sizes: Sequence[int], threads: int) -> tuple[list[int], list[int], list[int]]:
    """The indices of the tensors for all threads together, of those for one thread each, and of
    those for the caller's thread."""
    if threads == 1 or len(sizes) < 2:
        return list(range(len(sizes))), [], []
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    n_long = sum([size >= _MIN_PARALLEL_NBYTES for size in sizes])
    n_shared = 0
    while n_shared < n_long and sizes[order[n_shared]] >= _MIN_SHARED_NBYTES:
        loads = [0] * threads
        for i in order[n_shared:n_long]:
            heapq.heapreplace(loads, loads[0] + sizes[i] + _CALL_NBYTES)
        if max(loads) <= _MAX_IMBALANCE * sum(loads) / threads:
            break
        n_shared += 1
    return order[:n_shared], order[n_shared:n_long], order[n_long:]


def batches(sizes: Sequence[int], max_nbytes: int | None = None) -> Iterator[range]:
    """Splits tensors into runs of consecutive ones, of at most 32 MiB; a larger tensor is a run of
    its own.

    Args:
        sizes: the size of each tensor in bytes.
        max_nbytes: the size limit of a run, if it is less than 32 MiB.

    Yields:
        The indices of the next run.
    """
    limit = _BATCH_NBYTES if max_nbytes is None else min(max_nbytes, _BATCH_NBYTES)
    start = nbytes = 0
    for i, size in enumerate(sizes):
        if i > start and nbytes + size > limit:
            yield range(start, i)
            start = i
            nbytes = 0
        nbytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


def in_order(
    work: Callable[[int], Any], n: int, threads: int, n_ahead: int | None = None
) -> Generator[Any, None, None]:
    """Yields work(0), ..., work(n - 1) in order, while threads work on the next ones.

    Args:
        work: takes an index.
        n: the number of calls.
        threads: the number of threads.
        n_ahead: how many calls may be submitted before their turn; None for two per thread.
    """
    if threads == 1 or n < 2:
        yield from map(work, range(n))
        return
    with ThreadPoolExecutor(min(threads, n)) as pool:
        results = (_submit(pool, work, i) for i in range(n))
        ahead = deque(islice(results, n_ahead or 2 * threads))
        while ahead:
            yield ahead.popleft()()
            ahead.extend(islice(results, 1))


def one_ahead(results: Iterator[_Result], nbytes: int) -> Generator[_Result, None, None]:
    """Yields what an iterator yields, while a thread takes its next result. The caller closes the
    generator, which waits for the thread.

    Args:
        results: the iterator. One thread at a time uses it. When a result is requested, the result
            before is no longer used, so the iterator may reuse the memory of every other result.
        nbytes: the size of all that the results stand for; for one batch, no thread is started.
    """
    if nbytes <= _BATCH_NBYTES:
        yield from results
        return
    end = object()

    def take(_: int) -> Any:
        return next(results, end)

    with ThreadPoolExecutor(1) as pool:
        result = take(0)
        while result is not end:
            following = _submit(pool, take, 0)
            yield result
            result = following()


def _submit(pool: ThreadPoolExecutor, work: Callable[[int], Any], i: int) -> Callable[[], Any]:
    """A function that waits for work(i). It does the work itself if no thread can start: because
    the system refuses one, or because the program's main thread has ended."""
    try:
        return pool.submit(work, i).result
    except RuntimeError:
        return partial(work, i)
