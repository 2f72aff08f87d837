"""Threads of Python for one call: started for it, joined before it returns.

The core has threads of its own for the chunks of one tensor. These are for what Python has many of:
the tensors of a model, most of which are no more than a chunk, and chunks coded by Zstandard.
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

__all__ = ["batches", "in_order", "map_tensors"]

_Result = TypeVar("_Result")

# What a call costs beside the bytes, as bytes that could be coded meanwhile.
_CALL_NBYTES = 1 << 16
# Below this a tensor is a chunk or two, and cannot be shared among threads.
_MIN_SHARED_NBYTES = 1 << 19
# Below this the core keeps Python's lock (csrc/bind/gil.hpp): threads would wait for each other.
_MIN_PARALLEL_NBYTES = 1 << 16
# How much longer than the average one thread may work.
_MAX_IMBALANCE = 1.1
# Taken at once where memory is bounded: many small tensors for every thread.
_BATCH_NBYTES = 1 << 25


def map_tensors(
    work: Callable[[int, int], _Result], sizes: Sequence[int], threads: int
) -> list[_Result]:
    """Results of one call for each tensor, with threads shared out among calls or inside of them.

    A tensor so large that the others could not keep all threads busy meanwhile is worked on by all
    of them; of the others each thread takes one after the other, the largest first.

    Args:
        work: is called once with each index and a number of threads to use, in no set order and
            from several threads at once.
        sizes: bytes of each tensor.
        threads: how many to use.

    Returns:
        The results in the order of the tensors.

    Raises:
        BaseException: what a call raised, of the first tensor if several did; after one has failed,
            no call is begun.
    """
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run(indices: Iterator[int], n_threads: int) -> None:
        for i in indices:  # next() of it is atomic
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
        with suppress(RuntimeError):  # the system gives no more threads, or Python is at its end
            for _ in range(min(threads, len(single)) - 1):
                helper = threading.Thread(target=run, args=(todo, 1))
                helper.start()
                helpers.append(helper)
        run(todo, 1)
        run(iter(short), 1)
    finally:
        deque(todo, maxlen=0)  # should this thread be interrupted, nothing more is begun
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[i] for i in range(len(sizes))]


def _share_out(sizes: Sequence[int], threads: int) -> tuple[list[int], list[int], list[int]]:
    """Indices of tensors for all threads together, of those for one thread each, and of those for
    the caller's thread."""
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
    """Runs of consecutive tensors to take at once: of 32 MiB together at most, or of one tensor.

    Args:
        sizes: bytes of each tensor.
        max_nbytes: of a run together, if that is less.

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
    """Results of work(0), ..., work(n - 1) in order, with so many ahead: `n_ahead`, or twice as
    many as threads."""
    if threads == 1 or n < 2:
        yield from map(work, range(n))
        return
    with ThreadPoolExecutor(min(threads, n)) as pool:
        results = (_submit(pool, work, i) for i in range(n))
        ahead = deque(islice(results, n_ahead or 2 * threads))
        while ahead:
            yield ahead.popleft()()
            ahead.extend(islice(results, 1))


def _submit(pool: ThreadPoolExecutor, work: Callable[[int], Any], i: int) -> Callable[[], Any]:
    """What waits for work(i), or does it: no thread starts where the system gives none, or once the
    main thread of the program has ended."""
    try:
        return pool.submit(work, i).result
    except RuntimeError:
        return partial(work, i)
