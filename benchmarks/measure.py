"""Timing of codecs on one data set: correct first, then interleaved.

Every codec proves its round trip bit for bit before anything is timed. The rounds go from codec to
codec, so that a disturbance of the machine meets all of them. One thread is pinned to a core and
timed by the processor time of the process; more threads are timed by the clock on the wall. Both
clocks are kept, because the gain from a second thread must be measured on one and the same clock.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from data import DataSet
from numpy.typing import NDArray
from peers import Codec, UnsupportedError, build

__all__ = ["Contender", "Row", "compete", "enter"]

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@dataclass
class Contender:
    """A codec that takes part, and what was measured of it.

    Attributes:
        name: its name in `peers.CODECS`.
        threads: how many it uses.
        codec: the adapter.
        packed_nbytes: size of its output.
        encode: (processor seconds, wall seconds) of each round.
        decode: the same for decoding.
    """

    name: str
    threads: int
    codec: Codec
    packed_nbytes: int
    encode: list[tuple[float, float]] = field(default_factory=list)
    decode: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One line of a table; speeds are in 10^9 bytes of the original a second.

    Attributes:
        data: name of the data set.
        codec: name of the codec.
        threads: how many it used.
        ratio: original bytes over packed bytes.
        encode: median, least and greatest speed.
        decode: the same for decoding.
        encode_wall: median speed by the wall clock, whatever the number of threads.
        decode_wall: the same for decoding.
    """

    data: str
    codec: str
    threads: int
    ratio: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]
    encode_wall: float
    decode_wall: float


def enter(name: str, data: DataSet, threads: int) -> Contender | str:
    """Build a codec and prove its round trip.

    Args:
        name: a key of `peers.CODECS`.
        data: what it is to pack.
        threads: how many it may use.

    Returns:
        The contender, or one line that says why it cannot take part.

    Raises:
        RuntimeError: what comes back differs from what went in, or the input was changed.
    """
    try:
        codec = build(name, data.array, threads)
    except (UnsupportedError, ImportError) as reason:
        return str(reason)
    with _cores(threads):
        payload = codec.encode(codec.prepare(data.array))
        packed_nbytes = memoryview(payload).nbytes
        back = np.frombuffer(codec.decode(payload), np.uint8)
    if not np.array_equal(back, data.array.view(np.uint8)):
        raise RuntimeError(f"{name} does not give back {data.name} bit for bit")
    return Contender(name, threads, codec, packed_nbytes)


def compete(contenders: list[Contender], data: DataSet, rounds: int) -> list[Row]:
    """Time all contenders in turn, round after round.

    Args:
        contenders: from `enter`, for the same data.
        data: what they pack.
        rounds: how often each is timed.

    Returns:
        One row for each contender, in their order.
    """
    before = data.array.view(np.uint8).copy()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for contender in contenders:
                _time_once(contender, data.array)
    finally:
        gc.enable()
    if not np.array_equal(before, data.array.view(np.uint8)):
        raise RuntimeError(
            f"a codec changed its input, {data.name}; its adapter must copy it first"
        )
    return [_summarise(contender, data) for contender in contenders]


def _time_once(contender: Contender, array: NDArray[Any]) -> None:
    codec = contender.codec
    with _cores(contender.threads):
        source = codec.prepare(array)
        payload, seconds = _timed(codec.encode, source)
        contender.encode.append(seconds)
        _, seconds = _timed(codec.decode, payload)
        contender.decode.append(seconds)


def _timed(call: Callable[[Any], Any], argument: Any) -> tuple[Any, tuple[float, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = call(argument)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return result, (cpu, wall)


@contextmanager
def _cores(threads: int) -> Iterator[None]:
    """One thread stays on one core (not the first, which serves interrupts); more may use all."""
    if threads > 1 or not CORES:
        yield
        return
    os.sched_setaffinity(0, {max(CORES)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def _summarise(contender: Contender, data: DataSet) -> Row:
    clock = 0 if contender.threads == 1 else 1
    nbytes = data.array.nbytes
    return Row(
        data.name,
        contender.name,
        contender.threads,
        nbytes / contender.packed_nbytes,
        _spread([s[clock] for s in contender.encode], nbytes),
        _spread([s[clock] for s in contender.decode], nbytes),
        _spread([s[1] for s in contender.encode], nbytes)[0],
        _spread([s[1] for s in contender.decode], nbytes)[0],
    )


def _spread(seconds: list[float], nbytes: int) -> tuple[float, float, float]:
    """Median, least and greatest speed in GB/s."""
    speeds = [nbytes / s / 1e9 for s in seconds]
    return statistics.median(speeds), min(speeds), max(speeds)
