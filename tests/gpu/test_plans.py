"""Plans of chunks for kernels: tables, groups, refusals and their places, and Python's lock.

`tests/kernels/test_rans.py` tests that kernels decode the right units by these plans.
"""

import random
import sys
import threading
import time
from collections.abc import Sequence

import frame_builder as fb
import numpy as np
import pytest
from codec_battery import guarded
from frame_builder import Palette, Rans, Stored, build_frame
from plan_samples import floats, header_of, plan_of

from packhorse._core import Geometry
from packhorse.errors import CorruptionError
from packhorse.gpu.plans import ChunkPlan, Unsupported, plan_chunks, why_unsupported
from packhorse.layout import Mode, PlaneField, Split
from packhorse.reference.symbols import _slots


def random_frequencies(rng: random.Random, n: int) -> tuple[int, ...]:
    if rng.random() < 0.3:
        parts = [1] * n
        parts[rng.randrange(n)] += 4096 - n
        return tuple(parts)
    cuts = sorted(rng.sample(range(1, 4096), n - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, 4096], strict=True))


def bare_stream(frequencies: Sequence[int]) -> bytes:
    """The fields of an rANS stream of four lanes whose symbols are 0, 1, 2 and so on; no words."""
    numbers = [*frequencies, 0, 0][: len(frequencies) // 2 * 2 + 2]  # and that of no escape
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    packed = b"".join((low | high << 12).to_bytes(3, "little") for low, high in pairs)
    model = bytes([0, len(frequencies) - 1]) + packed[: (3 * (len(frequencies) + 1) + 1) // 2]
    return bytes([2, 12, 0, 0, 0, 0, 0, 0]) + model + 4 * (1 << 16).to_bytes(4, "little")


def plan_streams(streams: Sequence[bytes]) -> ChunkPlan:
    """A plan of units of one byte, with a chunk of 64 units for each stream."""
    table = np.array([[0, Mode.RANS << 24 | len(stream)] for stream in streams], np.uint32)
    payload = b"".join(stream.ljust(-(-len(stream) // 64) * 64, b"\0") for stream in streams)
    geometry = Geometry(1, Split.WHOLE, 6, 64 * len(streams))
    return plan_chunks(np.frombuffer(payload, np.uint8), table, geometry)


@pytest.mark.parametrize("sizes", [(2, 3, 31, 32), (2, 32, 33, 63, 64), (65, 200, 256)])
def test_tables_mean_what_the_slow_decoder_reads(sizes: tuple[int, ...]) -> None:
    rng = random.Random(sizes[0])
    models = [random_frequencies(rng, n) for n in sizes for _ in range(8)]
    (group,) = plan_streams([bare_stream(model) for model in models]).rans
    assert group.n_buckets == {32: 32, 64: 64, 256: 4096}[sizes[-1]]
    slots = np.arange(4096)
    entries = group.tables
    if group.n_buckets < 4096:
        tables = group.tables[:, :, slots * group.n_buckets // 4096]
        entries = np.where(slots < tables[:, 0], tables[:, 1], tables[:, 2])
    for row, model in zip(entries.astype(np.int64), models, strict=True):
        owners, ranks = (np.array(numbers) for numbers in _slots(model))
        assert np.array_equal(row & 4095, np.array(model)[owners])
        assert np.array_equal((slots + (row >> 12)) & 4095, ranks)
        assert np.array_equal(row >> 24, owners)


def test_streams_are_grouped_by_their_tables() -> None:
    """Each group is in the order of chunks; the uploaded memory has all arrays at aligned
    places."""
    rng = random.Random(9)
    sizes = (70, 3, 40, 256, 2)
    plan = plan_streams([bare_stream(random_frequencies(rng, n)) for n in sizes])
    assert [group.n_buckets for group in plan.rans] == [64, 4096]
    assert [group.places[:, 0].tolist() for group in plan.rans] == [[1, 2, 4], [0, 3]]
    uploaded = b"".join(array.tobytes() for array in plan.arrays())
    assert plan.memory.tobytes() == uploaded
    assert all(array.nbytes % 16 == 0 for array in plan.arrays()), "as `part_arrays` expects them"
    assert plan.planes[:, 0, PlaneField.OFFSET].tolist() == [128 * chunk for chunk in range(5)]


# Refusals.


def test_the_planner_says_what_it_does_not_know() -> None:
    with pytest.raises(Unsupported, match="a plane of mode classed_rans"):
        plan_of(bytes(fb.SMALL["lead"]()))


def test_a_table_that_does_not_fit_is_a_mistake() -> None:
    header = header_of(bytes(fb.SMALL["rans"]()))
    geometry = Geometry(2, Split.FLOAT, 6, 1800)
    with pytest.raises(ValueError, match="does not fit"):
        plan_chunks(np.zeros(64, np.uint8), header.table, geometry)


FAULTS = {
    "lanes": (0, 0, b"\x09", "chunk 1 of 3: plane 0: a field is outside of its range"),
    "raw bits": (0, 2, b"\x08", "chunk 1 of 3: plane 0: a field is outside of its range"),
    "frequencies": (
        0,
        10,
        b"\xff\xff\xff",
        "plane 0: a frequency is zero, or the frequencies do not",
    ),
    "a code": (1, 0, b"\x05", "chunk 1 of 3: plane 1: a field is outside of its range"),
    "escapes": (1, 4, b"\x01", "chunk 1 of 3: plane 1: a stream is longer or shorter than its own"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_planner_says_what_is_wrong_and_where(name: str) -> None:
    plane, at, value, words = FAULTS[name]

    def edit(chunk: int, here: int, stream: bytes) -> bytes:
        if (chunk, here) != (1, plane):
            return stream
        return stream[:at] + value + stream[at + len(value) :]

    data = floats(64 * 3, "BF16")
    built = build_frame(data, "BF16", codings=[Rans(3), Palette(3)], split=2, edit=edit)
    start = built.streams[1, plane][0]
    with pytest.raises(CorruptionError, match=f"^byte {start}: .*{words}"):
        plan_of(bytes(built))


def test_padding_and_length_of_a_payload_are_checked() -> None:
    built = build_frame(floats(64 * 3, "BF16"), "BF16", codings=[Rans(3), Stored()], split=2)
    payload, plan = plan_of(bytes(built))
    header = header_of(bytes(built))
    with pytest.raises(CorruptionError, match=f"has {payload.size - 64} bytes, its chunks"):
        plan_chunks(payload[:-64], header.table, plan.geometry)
    damaged = payload.copy()
    damaged[-1] = 1
    with pytest.raises(CorruptionError, match="chunk 2 of 3: the padding behind its streams"):
        plan_chunks(damaged, header.table, plan.geometry)


def test_the_planner_reads_nothing_behind_the_payload() -> None:
    """The payload ends at a page that nobody may touch; its fields are good or damaged."""
    rng = random.Random(11)
    refused = 0
    for name in (name for name in fb.SMALL if name not in fb.DELTAS):
        built = fb.SMALL[name]()
        header = header_of(bytes(built))
        geometry = header.geometry
        if header.n_row_dims or why_unsupported(header.table, geometry) is not None:
            continue
        for _ in range(20):
            payload = bytearray(built.data[header.header_nbytes :])
            payload[rng.randrange(min(len(payload), 40))] ^= 1 << rng.randrange(8)
            try:
                plan_chunks(
                    np.frombuffer(guarded(bytes(payload)), np.uint8), header.table, geometry
                )
            except CorruptionError:
                refused += 1
    assert refused > 20


def test_plans_are_made_without_the_lock_of_python() -> None:
    """Here Python never switches threads by itself, so another thread runs only if the planner
    releases the lock."""
    model = random_frequencies(random.Random(2), 200)
    streams = [bare_stream(model)] * 1000
    waiting, ran = threading.Lock(), threading.Event()
    waiting.acquire()

    def wait() -> None:
        with waiting:
            ran.set()

    before = sys.getswitchinterval()
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        waiting.release()
        ends = time.monotonic() + 60
        while not ran.is_set() and time.monotonic() < ends:
            plan_streams(streams)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert time.monotonic() < ends
