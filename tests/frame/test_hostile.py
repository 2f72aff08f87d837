"""Frames whose bytes an adversary chooses give the documented error, and nothing else.

The lies are those that the slow decoder is tested with. Here every code path must refuse them for
the same kind of reason. Random damage runs in guarded memory, so an access out of bounds ends the
run.
"""

import random
import re
import time
from collections.abc import Iterable
from functools import cache
from itertools import chain, cycle

import numpy as np
import pytest
import zstandard
from cases import each
from codec_battery import ISAS, REAL, SAMPLES, Sample, forced, guarded, guarded_output, sample
from format_page import clauses
from frame_builder import DELTAS, SMALL, Palette, build_frame, crc32c
from lying_frames import LIES

from packhorse._core import Geometry
from packhorse.errors import BaseMismatchError, CorruptionError, PackhorseError, TruncationError
from packhorse.frame import Frame, compress_buffer
from packhorse.frame.header import FrameHeader, frame_header_nbytes, write_header
from packhorse.layout import DTYPE_BY_NAME, Mode, Split


def read_all(
    data: bytes,
    *,
    name: str | None = None,
    offset: int = 0,
    max_nbytes: int = 1 << 26,
    base: bytes | None = None,
) -> bytes:
    frame = Frame.from_buffer(data, name=name, offset=offset, max_nbytes=max_nbytes)
    frame.verify(threads=2, base=base)
    target = guarded_output(frame.logical_nbytes)
    frame.decompress_into(target, base=None if base is None else guarded(base))
    return bytes(target)


@pytest.mark.parametrize("isa", ISAS)
@each("lie", LIES)
def test_a_lie_is_refused(lie: str, isa: str) -> None:
    data, base, limit = LIES[lie].frame(), LIES[lie].base(), LIES[lie].max_nbytes or 1 << 26
    with forced(isa), pytest.raises(PackhorseError) as caught:
        read_all(data, name="layers.0.w", offset=100_000, max_nbytes=limit, base=base)
    assert {caught.type} == clauses()[LIES[lie].clause]
    assert str(caught.value).startswith("tensor 'layers.0.w': ")
    if caught.type is BaseMismatchError:
        return  # the frame may be good, so there is no place in it to blame
    match = re.match(r"tensor 'layers\.0\.w': byte (\d+): ", str(caught.value))
    assert match, caught.value
    assert 100_000 <= int(match[1]) <= 100_000 + len(data)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SAMPLES)
def test_the_frames_that_are_damaged_here_are_good(name: str, isa: str) -> None:
    good = sample(name)
    with forced(isa):
        assert read_all(guarded(good.frame), base=good.base) == good.source


def test_every_mode_has_a_frame_that_is_damaged_here() -> None:
    for names in ((*SMALL, *DELTAS), SAMPLES):
        planes = [
            plane for name in names for plane in Frame.from_buffer(sample(name).frame).planes()
        ]
        assert {mode for plane in planes for mode in plane.modes} == set(Mode)


@pytest.mark.parametrize("name", REAL)
def test_the_real_frames_are_of_the_modes_they_stand_for(name: str) -> None:
    planes = Frame.from_buffer(sample(name).frame).planes()
    assert REAL[name].mode in {mode for plane in planes for mode in plane.modes}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_truncation_is_reported(name: str) -> None:
    whole = sample(name).frame
    for length in range(0, len(whole), len(whole) // 500 + 1 if name in REAL else 1):
        with pytest.raises(TruncationError, match=rf"^tensor 'w': byte {77 + length}: .* cut off"):
            Frame.from_buffer(whole[:length], name="w", offset=77)


def bits_of(name: str, n_real: int) -> Iterable[int]:
    """Of a small frame, all bits of the header and every third one of the payload, so that each
    byte has some; of a real one, some bits, half of them in its first 256 bytes."""
    n_bits, start = 8 * len(sample(name).frame), 8 * sample(name).payload_offset
    if name not in REAL:
        return chain(range(start), range(start, n_bits, 3))
    rng = random.Random(name)
    start = range(min(2048, n_bits))
    return [*rng.sample(start, n_real // 2), *rng.sample(range(n_bits), n_real // 2)]


@pytest.mark.parametrize("name", SAMPLES)
def test_flipped_bits_are_noticed(name: str) -> None:
    """The code paths take turns, as each computes checksums in its own way."""
    good = sample(name)
    for bit, isa in zip(bits_of(name, 1000), cycle(ISAS), strict=False):
        with forced(isa), pytest.raises(PackhorseError):
            read_all(good.flipped(bit), base=good.base)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_flipped_bit_under_new_checksums_is_refused_or_told_by_the_hash(name: str) -> None:
    """Behind the CRC, damage gives other data at worst, in bounds; the content hash shows it."""
    good, n_tried, n_refused = sample(name), 0, 0
    damaged = guarded_output(len(good.frame))
    for bit in bits_of(name, 400):
        damaged[:] = good.sealed(good.flipped(bit))
        outcomes = []
        for isa in ISAS:
            with forced(isa):
                outcomes.append(decoded(damaged, len(good.source), good.base))
        assert all(outcome == outcomes[0] for outcome in outcomes), f"bit {bit}: paths differ"
        n_tried += 1
        n_refused += outcomes[0] is None
        if outcomes[0] not in (None, good.source):
            with pytest.raises(CorruptionError, match="content hash"):
                Frame.from_buffer(damaged).verify(base=good.base)
    assert n_refused > n_tried // 20


output = cache(guarded_output)


def decoded(data: memoryview, limit: int, base: bytes | None) -> bytes | None:
    """Decodes a frame. None if it is refused, as it must be if the tensor is too large."""
    try:
        frame = Frame.from_buffer(data, max_nbytes=limit)
        target = output(frame.logical_nbytes)
        frame.decompress_into(target, threads=1, base=base)
    except PackhorseError:
        return None
    assert len(target) <= limit
    return bytes(target)


def damage(good: Sample, rng: random.Random) -> bytes:
    """Random bytes, small numbers and runs in the payload, most of them near its start."""
    damaged, start = bytearray(good.frame), good.payload_offset
    for _ in range(rng.randint(1, 4)):
        at = start + int(rng.random() ** 3 * (len(damaged) - start))
        value = rng.choice((0, 1, 255, rng.randrange(256)))
        n = min(rng.choice((1, 1, 2, 8)), len(damaged) - at)
        damaged[at : at + n] = bytes([value]) * n
    return bytes(damaged)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "empty"])
def test_unchecked_damage_is_refused_or_decodes_to_something(name: str, isa: str) -> None:
    good, n_decoded, n_tries = sample(name), 0, 250 if name in REAL else 600
    rng, damaged = random.Random(name), guarded_output(len(good.frame))
    with forced(isa):
        for _ in range(n_tries):
            damaged[:] = damage(good, rng)
            frame = Frame.from_buffer(damaged)
            try:
                target = output(frame.logical_nbytes)
                frame.decompress_into(target, check=False, threads=1, base=good.base)
                n_decoded += 1
            except CorruptionError:
                continue
    assert n_decoded < n_tries or any(w in name for w in ("stored", "constant", "equal"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*SMALL, *DELTAS, "real rans of several planes", "real zstd"])
def test_damaged_headers_under_a_new_checksum_are_refused_or_harmless(name: str, isa: str) -> None:
    """Fields of the header are random, with a matching CRC; nothing large may be allocated."""
    good, rng = sample(name), random.Random(name)
    with forced(isa):
        for _ in range(300):
            damaged = bytearray(good.frame)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(4, min(good.payload_offset, 100))
                damaged[at] = rng.choice((0, 1, 2, 6, 7, 63, 64, 128, 255, rng.randrange(256)))
            try:
                frame = Frame.from_buffer(guarded(good.sealed(damaged)), max_nbytes=1 << 24)
                target = guarded_output(frame.logical_nbytes)
                frame.decompress_into(target, check=False, base=good.base)
            except PackhorseError:
                continue


def frame_of_chunks(*streams: tuple[Mode, bytes], repeat: int) -> bytes:
    """A frame of bytes in the smallest chunks there are, coded in these ways in turn."""
    chunks = [stream + bytes(-len(stream) % 64) for _, stream in streams]
    descriptors = [len(stream) | mode << 24 for mode, stream in streams]
    rows = list(zip(map(crc32c, chunks), descriptors, strict=True))
    table = np.tile(np.array(rows, np.uint32), (repeat, 1))
    header_nbytes = frame_header_nbytes(1, len(table), 1, 0, has_base=False)
    frame_nbytes = header_nbytes + repeat * sum(map(len, chunks))
    shape, dtype = (64 * len(table),), DTYPE_BY_NAME["U8"]
    sizes = (header_nbytes, frame_nbytes)
    geometry = Geometry(1, Split.WHOLE, 6, 64 * len(table))
    header = FrameHeader(dtype, shape, geometry, 2, bytes(16), *sizes, table, 0, 0, b"")
    memory = np.zeros(header_nbytes, np.uint8)
    write_header(header, memory)
    return memory.tobytes() + b"".join(chunks) * repeat


def test_many_small_chunks_take_time_in_proportion() -> None:
    """There are 39,000 chunks. Decoding would take minutes if each chunk searched for its place
    from the start."""
    plane = bytes([1, 2] * 32)
    built = build_frame(plane, codings=[Palette(1, has_escape=False)])
    at, nbytes = built.streams[0, 0]
    ways = [
        (Mode.ZSTD, zstandard.compress(bytes(64))),
        (Mode.PALETTE, bytes(built.data[at : at + nbytes])),
        (Mode.CONSTANT, b"x"),
    ]
    frame = Frame.from_buffer(frame_of_chunks(*ways, repeat=13_000))
    start = time.process_time()
    target = bytearray(frame.logical_nbytes)
    frame.decompress_into(target, threads=2)
    assert target == (bytes(64) + plane + b"x" * 64) * 13_000
    assert time.process_time() - start < 10


def test_a_short_frame_cannot_ask_for_much_memory() -> None:
    """64 bytes of payload and 8 of table stand for at most 2 MiB."""
    data = bytes(40 << 20)
    frame = compress_buffer(data, "U8", (len(data),))
    assert frame.logical_nbytes / frame.nbytes < 29_000
