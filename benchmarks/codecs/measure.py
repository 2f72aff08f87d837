"""Time codecs on one data set, after their round trips are proved.

Every codec proves its round trip bit for bit before anything is timed. Each round runs all codecs
in turn, so that a disturbance of the machine meets all of them. One thread is pinned to a core and
timed by the processor time of the process; more threads are timed by the wall clock. Both clocks
are kept, because the gain from a second thread must be measured with the same clock.

A slow codec would take hours: it proves its round trip and its ratio on all of the data, but is
timed on a part from the middle, in every third round.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.codecs.peers import CODECS, Codec, Entry, Setup, UnsupportedError, build, parts
from benchmarks.data.sets import DataSet

__all__ = [
    "SLICE_NBYTES",
    "Contender",
    "Row",
    "Seconds",
    "compete",
    "cores",
    "enter",
    "time_call",
]

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
SLICE_NBYTES = 8_000_000
SLOW_EVERY = 3
Seconds = tuple[float, float]


@dataclass
class Contender:
    """A codec that takes part, and its measurements.

    Attributes:
        name: its name in the tables.
        setup: threads and memory.
        codec: the adapter.
        slow: whether it is timed less often, on a part.
        timed: the data on which it is timed: the data set, or a part of it.
        ratio: of the whole data set.
        encode: (processor seconds, wall seconds) of each round.
        decode: the same for decoding.
    """

    name: str
    setup: Setup
    codec: Codec
    slow: bool
    timed: DataSet
    ratio: float
    encode: list[Seconds] = field(default_factory=list)
    decode: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One line of a table; speeds are in 10^9 bytes of the original a second.

    Attributes:
        data: name of the data set.
        codec: name of the codec.
        threads: how many it used.
        ratio: original bytes over packed bytes, of the whole set.
        encode: median, least and greatest speed.
        decode: the same for decoding.
        encode_wall: median speed by the wall clock, whatever the number of threads.
        decode_wall: the same for decoding.
        timed_nbytes: size of the data that were timed; less than the set for a slow codec.
        rounds: how often it was timed.
    """

    data: str
    codec: str
    threads: int
    ratio: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]
    encode_wall: float
    decode_wall: float
    timed_nbytes: int
    rounds: int


def enter(
    name: str, data: DataSet, setup: Setup, entries: Mapping[str, Entry] = CODECS
) -> Contender | str:
    """Build a codec and prove its round trip.

    Args:
        name: a key of `entries`.
        data: the data to pack.
        setup: threads and memory.
        entries: the codecs that there are.

    Returns:
        The contender, or one line that says why it cannot take part.

    Raises:
        RuntimeError: the unpacked data differ from the original, or the input was changed.
    """
    try:
        codec = build(name, data, setup, entries)
    except (UnsupportedError, ImportError) as reason:
        return str(reason)
    with cores(setup.threads):
        packed_nbytes = _prove(name, codec, data)
        slow = entries[name].slow
        timed = data.middle(SLICE_NBYTES) if slow else data
        if timed is not data:
            codec = build(name, timed, setup, entries)
            _prove(name, codec, timed)
    return Contender(name, setup, codec, slow, timed, data.array.nbytes / packed_nbytes)


def _prove(name: str, codec: Codec, data: DataSet) -> int:
    """Pack and unpack once, and compare; returns the packed size."""
    packed = codec.encode(codec.prepare(data))
    packed_nbytes = sum(part.nbytes for part in parts(packed))
    original = memoryview(data.array.view(np.uint8))
    offset = 0
    for part in parts(codec.decode(packed)):
        piece = original[offset : offset + part.nbytes]
        if not np.array_equal(part, piece):
            break
        offset += part.nbytes
    if offset != original.nbytes:
        raise RuntimeError(
            f"{name} does not restore {data.name} bit for bit: there is a difference after byte "
            f"{offset} of {original.nbytes}"
        )
    return packed_nbytes


def compete(contenders: list[Contender], data: DataSet, rounds: int) -> list[Row]:
    """Time all contenders in turn, round after round.

    Args:
        contenders: from `enter`, for the same data.
        data: the data that they pack.
        rounds: how often each is timed; a slow one less often.

    Returns:
        One row for each contender, in their order.
    """
    before = [array.view(np.uint8).copy() for array in data.inputs]
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for contender in contenders:
                if i % SLOW_EVERY == 0 or not contender.slow:
                    _time_once(contender)
    finally:
        gc.enable()
    after = [array.view(np.uint8) for array in data.inputs]
    if not all(map(np.array_equal, before, after)):
        raise RuntimeError(
            f"a codec changed its input, {data.name}; its adapter must copy it first"
        )
    return [_summarise(contender) for contender in contenders]


def _time_once(contender: Contender) -> None:
    codec = contender.codec
    with cores(contender.setup.threads):
        source = codec.prepare(contender.timed)
        packed, seconds = time_call(codec.encode, source)
        contender.encode.append(seconds)
        _, seconds = time_call(codec.decode, packed)
        contender.decode.append(seconds)


def time_call(call: Callable[[Any], Any], argument: Any) -> tuple[Any, Seconds]:
    """The result of a call, and the processor and wall seconds that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call(argument)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return result, (cpu, wall)


@contextmanager
def cores(threads: int) -> Iterator[None]:
    """Keep one thread on one core (not the first, which serves interrupts); more may use all."""
    if threads > 1 or not CORES:
        yield
        return
    os.sched_setaffinity(0, {max(CORES)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def _summarise(contender: Contender) -> Row:
    clock = 0 if contender.setup.threads == 1 else 1
    nbytes = contender.timed.array.nbytes
    return Row(
        contender.timed.name,
        contender.name,
        contender.setup.threads,
        contender.ratio,
        _spread([s[clock] for s in contender.encode], nbytes),
        _spread([s[clock] for s in contender.decode], nbytes),
        _spread([s[1] for s in contender.encode], nbytes)[0],
        _spread([s[1] for s in contender.decode], nbytes)[0],
        nbytes,
        len(contender.encode),
    )


def _spread(seconds: list[float], nbytes: int) -> tuple[float, float, float]:
    """Median, least and greatest speed in GB/s."""
    speeds = [nbytes / s / 1e9 for s in seconds]
    return statistics.median(speeds), min(speeds), max(speeds)
