"""Every codec on every dtype, size, kind of data, level and code path, and each codec alone."""

import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import frame_builder as fb
import numpy as np
import planes
import pytest
import zstandard
from codec_battery import (
    ISAS,
    KINDS,
    LARGE,
    SMALL,
    check_tensor,
    forced,
    guarded,
    large_sizes,
    make_data,
    symbols,
)

from packhorse import _core
from packhorse.codecs import zstd
from packhorse.codecs.base import (
    ISA_VARIABLE,
    Isa,
    as_bytes,
    as_writable_bytes,
    choose_isa,
    decode_plane,
    encode_plane,
)
from packhorse.errors import CorruptionError, MissingBackendError
from packhorse.frame import compress_buffer, plan_buffer
from packhorse.layout import DTYPE_BY_NAME, DTYPES, MAX_CHUNK_NBYTES, Level, Mode, Split
from packhorse.reference import decode_frame

NAMES = [dtype.name for dtype in DTYPES]
LEVELS = ("fast", "default", "max")
CASES = list(product(NAMES, KINDS))
PLANE_SIZES = (1, 63, 64, 65, 127, 129, 1000, 1024, 1536, 8191, 8192, 8193, 40_000)


@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_battery(dtype: str, kind: str) -> None:
    """Every second small size, one around a chunk in every third case, and the levels in turn.

    The step from one dtype to the next is prime to the numbers of levels and of large sizes, so
    that each kind meets each of them with some dtype.
    """
    shift = 7 * NAMES.index(dtype) + list(KINDS).index(kind)
    for i, n in enumerate(SMALL[shift % 2 :: 2]):
        check_tensor(make_data(kind, dtype, n), dtype, level=LEVELS[(i + shift) % 3])
    if shift % 3 == 0:
        size = large_sizes(dtype)[LARGE[shift % len(LARGE)]]
        check_tensor(make_data(kind, dtype, size), dtype, level=LEVELS[shift // 3 % 3])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_battery_around_a_chunk(dtype: str, size: str, level: str) -> None:
    check_tensor(make_data("weights", dtype, large_sizes(dtype)[size]), dtype, level=level)


@pytest.mark.parametrize(
    ("dtype", "kind", "level", "expected"),
    [
        ("BF16", "weights", "fast", {Mode.PALETTE}),
        ("BF16", "weights", "default", {Mode.RANS}),
        ("F32", "weights", "max", {Mode.RANS}),
        ("F64", "constant", "default", {Mode.CONSTANT}),
        ("F16", "noise", "default", {Mode.STORED}),
        ("I64", "sorted", "default", {Mode.MATCHES}),
        ("BOOL", "ids", "default", {Mode.ZSTD}),
        ("F8_E4M3", "33 values", "default", {Mode.RANS}),
        ("U8", "noise", "default", {Mode.STORED}),
    ],
)
def test_the_battery_meets_every_mode(
    dtype: str, kind: str, level: str, expected: set[Mode]
) -> None:
    """The first plane is coded as expected, or the battery would test less than it says."""
    data = make_data(kind, dtype, large_sizes(dtype)["chunk"])
    frame = check_tensor(data, dtype, level=level)
    assert set(frame.planes()[0].modes) == expected


@pytest.mark.parametrize("dtype", NAMES)
def test_a_frame_never_grows_by_more_than_its_header(dtype: str) -> None:
    for n in SMALL:
        data = make_data("noise", dtype, n)
        frame = check_tensor(data, dtype, level="max")
        assert frame.nbytes <= 128 + 64 + len(data)


def test_incompressible_data_is_planned_as_stored() -> None:
    data = np.frombuffer(make_data("noise", "BF16", 1 << 17), np.uint8)
    plan = plan_buffer(data, "BF16", (1 << 17,))
    assert (plan.split, plan.whole, plan.estimated_nbytes) == (Split.WHOLE, Mode.STORED, data.size)
    assert "incompressible" in plan.reason


@pytest.mark.parametrize(("level", "share"), [("default", 1.006), ("max", 1.003)])
def test_bytes_of_many_values_take_little_more_than_their_entropy(level: str, share: float) -> None:
    """All 256 bytes occur, many of them rarely, and none of their bits is noise."""
    numbers = np.random.default_rng(3).standard_normal(1 << 20) * 45
    data = np.clip(np.rint(numbers), -128, 127).astype(np.int8)
    shares = np.bincount(data.view(np.uint8), minlength=256) / data.size
    assert shares.all()
    entropy_nbytes = -(shares * np.log2(shares)).sum() / 8 * data.size
    frame = check_tensor(data.tobytes(), "I8", level=level)
    assert frame.nbytes < share * entropy_nbytes
    assert frame.plan is not None
    assert "planes in bits" in frame.plan.reason


def test_a_constant_tensor_has_few_chunks() -> None:
    frame = check_tensor(make_data("constant", "BF16", 1 << 22), "BF16")
    assert frame.n_chunks == 8
    assert frame.ratio > 8000


def test_the_plan_does_not_depend_on_the_code_path() -> None:
    data = np.frombuffer(make_data("weights", "F16", 100_001), np.uint8)
    plans = []
    for isa in ISAS:
        with forced(isa):
            plans.append(plan_buffer(data, "F16", (100_001,)))
    assert all(plan == plans[0] for plan in plans)


# Planes.


def split_slowly(data: bytes, unit_nbytes: int, how: Split) -> list[bytes]:
    """Splits by section 4 of docs/format.md, as the builder of test frames reads it."""
    dtype = {2: "BF16", 4: "F32", 8: "F64"}[unit_nbytes]
    return fb.split_planes(data, DTYPE_BY_NAME[dtype], how)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("how", [Split.BYTES, Split.FLOAT])
@pytest.mark.parametrize("unit_nbytes", [2, 4, 8])
def test_planes_are_those_of_the_page(unit_nbytes: int, how: Split, isa: str) -> None:
    for n in (0, 1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 8193):
        data = random.Random(n).randbytes(n * unit_nbytes)
        with forced(isa):
            rows = planes.split(guarded(data), unit_nbytes, how)
            merged = planes.merge(rows, how)
        assert [row.tobytes() for row in rows] == split_slowly(data, unit_nbytes, how)
        assert merged.tobytes() == data


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_are_rotated(isa: str) -> None:
    for n in (0, 1, 31, 32, 33, 64, 95, 1000, 8193):
        data = random.Random(n).randbytes(n)
        with forced(isa):
            rows = planes.split(guarded(data), 1, Split.FLOAT)
            merged = planes.merge(rows, Split.FLOAT)
        assert rows[0].tobytes() == bytes(byte << 1 & 0xFF | byte >> 7 for byte in data)
        assert merged.tobytes() == data


def test_planes_refuse_what_is_no_array_of_planes() -> None:
    with pytest.raises(ValueError, match="multiple of unit_nbytes"):
        planes.split(b"abc", 2, Split.BYTES)
    with pytest.raises(ValueError, match="must be 1, 2, 4 or 8"):
        planes.split(b"abc", 3, Split.BYTES)
    with pytest.raises(ValueError, match="split 0 has no planes"):
        planes.split(b"abcd", 2, Split.WHOLE)
    with pytest.raises(ValueError, match="one-byte units are not split into bytes"):
        planes.split(b"abcd", 1, Split.BYTES)
    with pytest.raises(ValueError, match="two dimensions"):
        planes.merge(np.zeros(4, np.uint8), Split.BYTES)
    with pytest.raises(ValueError, match="must be 1, 2, 4 or 8"):
        planes.merge(np.zeros((3, 4), np.uint8), Split.BYTES)
    with pytest.raises(TypeError, match="C-contiguous"):
        planes.merge(np.zeros((4, 4), np.uint8).T[:2], Split.BYTES)
    with pytest.raises(TypeError, match="buffer protocol"):
        planes.split([1, 2], 2, Split.BYTES)


# Palette and rANS, on one plane.

CODED = (Mode.PALETTE, Mode.RANS)
CODER_CASES = [
    pytest.param(mode, n_values, id=f"{mode.name.lower()}-{n_values}")
    for mode in CODED
    for n_values in (2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100, 255, 256)
    if mode == Mode.RANS or n_values < 100  # a palette of 16 does not pay for more
]


@pytest.mark.parametrize(("mode", "n_values"), CODER_CASES)
def test_coders_round_trip_on_every_path(mode: Mode, n_values: int) -> None:
    n_coded = 0
    for n in PLANE_SIZES:
        plane = symbols(n, n_values).tobytes()
        streams = set()
        for isa in ISAS:
            with forced(isa):
                streams.add(encode_plane(guarded(plane), mode))
        assert len(streams) == 1, "the paths' bytes differ"
        stream = streams.pop()
        if stream is None:
            continue
        n_coded += 1
        assert len(stream) < n
        for isa in ISAS:
            with forced(isa):
                assert decode_plane(guarded(stream), mode, n).tobytes() == plane
        check_stream_by_reference(plane, mode, stream)
    assert n_coded >= 2, "most planes here should pay"


def stream_of_all_paths(plane: bytes) -> bytes | None:
    """The stream of a plane by rANS, which all code paths write alike; None if it does not pay."""
    streams = set()
    for isa in ISAS:
        with forced(isa):
            streams.add(encode_plane(guarded(plane), Mode.RANS))
    assert len(streams) == 1, "the paths' bytes differ"
    return streams.pop()


@pytest.mark.parametrize("raw_bits", range(5))
@pytest.mark.parametrize("reach", [9, 16, 17, 50, 256])
def test_alphabets_with_gaps_above_raw_bits(reach: int, raw_bits: int) -> None:
    """Every third symbol of a range is missing, but for rare ones, which may escape."""
    rng = np.random.default_rng([reach, raw_bits])
    reach = min(reach, 256 >> raw_bits)
    n_coded = 0
    for n in (1023, 8192, 9001):
        found = np.minimum(rng.geometric(0.4, n) * 3 // 2, reach - 1)
        found[rng.integers(0, n, 3)] = rng.integers(0, reach, 3)
        symbol = found + rng.integers(0, (256 >> raw_bits) - reach + 1)
        plane = (symbol << raw_bits | rng.integers(0, 1 << raw_bits, n)).astype(np.uint8).tobytes()
        stream = stream_of_all_paths(plane)
        if stream is None:
            continue
        n_coded += 1
        check_stream_by_reference(plane, Mode.RANS, stream)
    assert n_coded >= 2, "most planes here should pay"


@pytest.mark.parametrize("n_values", [2, 24, 31, 32, 33, 63, 64, 65])
def test_paths_agree_with_and_without_pairs_of_codes(n_values: int) -> None:
    """From eight units for each pair of codes on, AVX2 has a table of pairs."""
    rng = np.random.default_rng(n_values)
    even = rng.dirichlet(np.ones(n_values))
    skewed = np.where(np.arange(n_values) == n_values // 2, 5000.0, 1.0) / (n_values + 4999)
    for n in sorted({max(8192, 8 * n_values**2 + more) for more in (-1, 0, 5000)}):
        for chances in (even, skewed):
            plane = (100 + rng.choice(n_values, n, p=chances)).astype(np.uint8).tobytes()
            stream = stream_of_all_paths(plane)
            assert stream is not None
            for isa in ISAS:
                with forced(isa):
                    assert decode_plane(guarded(stream), Mode.RANS, n).tobytes() == plane


# Frequencies of these planes reach from 1 to 4095 of 4096, and rare values become escapes.
@pytest.mark.parametrize("n_values", [2, 3, 20, 31, 40])
@pytest.mark.parametrize("n", [1024, 1039, 4096, 8191])
def test_short_streams_of_common_and_rare_values(n: int, n_values: int) -> None:
    rng = np.random.default_rng(n + n_values)
    for share in (0.9999, 0.99, 0.7, 0.1):
        common = rng.random(n) < share
        plane = np.where(common, 77, rng.integers(60, 60 + n_values, n)).astype(np.uint8)
        plane[rng.integers(n)] = 200
        streams = set()
        for isa in ISAS:
            with forced(isa):
                streams.add(encode_plane(guarded(plane.tobytes()), Mode.RANS))
        assert len(streams) == 1, "the paths' bytes differ"
        stream = streams.pop()
        assert stream is not None
        check_stream_by_reference(plane.tobytes(), Mode.RANS, stream)


def check_stream_by_reference(plane: bytes, mode: Mode, stream: bytes) -> None:
    built = fb.build_frame(plane, codings=[fb.Raw(mode, stream)], chunk_log=16)
    assert decode_frame(bytes(built)).data == plane


def test_rans_comes_near_the_entropy() -> None:
    plane = symbols(1 << 17, 20)
    shares = np.bincount(plane, minlength=256) / plane.size
    entropy = -sum(share * np.log2(share) for share in shares if share)
    stream = encode_plane(plane, Mode.RANS)
    assert stream is not None
    model_nbytes = 2 + 3 * 257 // 2
    least = entropy * plane.size / 8
    assert least <= len(stream) <= least * 1.01 + model_nbytes


@pytest.mark.parametrize("mode", CODED)
def test_planes_that_do_not_pay_have_no_stream(mode: Mode) -> None:
    assert encode_plane(random.Random(1).randbytes(10_000), mode) is None
    assert encode_plane(b"x", mode) is None


@pytest.mark.parametrize("value", [0, 1, 255])
def test_a_stream_is_shorter_than_its_plane(value: int) -> None:
    for n in range(1, 200):
        for mode in CODED:
            stream = encode_plane(np.full(n, value, np.uint8), mode)
            assert stream is None or len(stream) < n


@pytest.mark.parametrize("mode", CODED)
def test_coders_refuse_what_is_no_plane(mode: Mode) -> None:
    for encode_or_decode in (
        lambda plane: encode_plane(plane, mode),
        lambda plane: decode_plane(plane, mode, 5),
    ):
        with pytest.raises(TypeError, match="buffer protocol"):
            encode_or_decode(7)
        with pytest.raises(TypeError, match="C-contiguous"):
            encode_or_decode(np.zeros(100, np.uint8)[::2])
    with pytest.raises(ValueError, match="2 Mi"):
        encode_plane(b"", mode)
    with pytest.raises(ValueError, match="2 Mi"):
        encode_plane(bytes(MAX_CHUNK_NBYTES + 1), mode)
    for n in (0, -1, MAX_CHUNK_NBYTES + 1):
        with pytest.raises(ValueError, match="a plane has 1 to"):
            decode_plane(b"stream", mode, n)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", CODED, ids=lambda mode: mode.name.lower())
def test_a_damaged_stream_is_refused_or_decodes_to_something(mode: Mode, isa: str) -> None:
    """An access out of bounds would end the run, because of the guard pages."""
    plane = symbols(1000, 20)
    whole = bytearray(encode_plane(plane, mode) or b"")
    assert whole
    rng, n_refused = random.Random(5), 0
    with forced(isa):
        for length in range(len(whole)):
            with pytest.raises(CorruptionError, match=f"{mode.name.lower()} stream: "):
                decode_plane(guarded(bytes(whole[:length])), mode, plane.size)
        for _ in range(1500):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                at = min(int(rng.expovariate(0.01)), len(whole) - 1)
                damaged[at] = rng.randrange(256)
            try:
                assert decode_plane(guarded(bytes(damaged)), mode, plane.size).size == plane.size
            except CorruptionError:
                n_refused += 1
    assert n_refused > 300


# Zstandard, on a chunk.


@pytest.mark.parametrize("level", Level)
def test_zstd_round_trips(level: Level) -> None:
    chunk = np.frombuffer(make_data("sorted", "I64", 5000), np.uint8)
    stream = zstd.compress_chunk(chunk, level)
    assert stream[:4] == bytes.fromhex("28b52ffd")
    dst = np.empty_like(chunk)
    zstd.ChunkDecoder().decode(as_bytes(guarded(stream)), dst)
    assert np.array_equal(dst, chunk)


def test_zstd_finds_what_repeats_far_behind() -> None:
    """The ordinary search does not look that far behind."""
    rng = np.random.default_rng(3)
    pieces = rng.integers(0, 256, (100, 1000)).astype(np.uint8)
    between = rng.integers(0, 9, 1_500_000).astype(np.uint8)
    chunk = np.concatenate([pieces.ravel(), between, rng.permutation(pieces).ravel()])
    near = zstd.compress_chunk(chunk, Level.DEFAULT)
    stream = zstd.compress_chunk(chunk, Level.DEFAULT, long_matches=True)
    assert len(stream) < len(near) - 60_000
    dst = np.empty_like(chunk)
    zstd.ChunkDecoder().decode(as_bytes(guarded(stream)), dst)
    assert np.array_equal(dst, chunk)


CHUNK = bytes(range(100))
CHECKED_ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress(CHUNK)
ZSTD_HEADER = bytes.fromhex("28b52ffd2064")  # of one segment of 100 bytes
BAD_ZSTD = {
    "a wrong checksum": CHECKED_ZSTD[:-1] + bytes([CHECKED_ZSTD[-1] ^ 1]),
    "a checksum that is cut": CHECKED_ZSTD[:-1],
    "no checksum where one is declared": CHECKED_ZSTD[:-4],
    "no block": ZSTD_HEADER,
    "a block of the reserved type": ZSTD_HEADER + bytes.fromhex("270300") + CHUNK,
    "a block that is longer": ZSTD_HEADER + bytes.fromhex("290300") + CHUNK,
    "a block that is shorter": ZSTD_HEADER + bytes.fromhex("190300") + CHUNK[1:],
    "no last block": ZSTD_HEADER + bytes.fromhex("200300") + CHUNK,
    "a million empty blocks": ZSTD_HEADER + bytes(3_000_000),
    "a skippable frame that declares as much": b"\x50\x2a\x4d\x18\x64\0\0\0" + CHUNK,
    "too long": zstandard.compress(CHUNK + b"x"),
    "too short": zstandard.compress(CHUNK[1:]),
    "no size": zstandard.ZstdCompressor(write_content_size=False).compress(CHUNK),
    "cut": zstandard.compress(CHUNK)[:-1],
    "only a magic": zstandard.compress(CHUNK)[:4],
    "something behind": zstandard.compress(CHUNK) + b"x",
    "two frames": zstandard.compress(CHUNK) * 2,
    "a skippable frame": b"\x50\x2a\x4d\x18\4\0\0\0abcd",
    "nothing": b"",
    "no frame": CHUNK,
}


def test_a_hand_made_zstd_stream_is_read() -> None:
    """The bad streams below differ from this one. Empty blocks are allowed."""
    for block in ("210300", "000000" * 5 + "210300"):
        dst = np.empty(len(CHUNK), np.uint8)
        stream = ZSTD_HEADER + bytes.fromhex(block) + CHUNK
        zstd.ChunkDecoder().decode(as_bytes(guarded(stream)), dst)
        assert dst.tobytes() == CHUNK


@pytest.mark.parametrize("stream", BAD_ZSTD.values(), ids=BAD_ZSTD)
def test_zstd_refuses_a_stream_that_lies(stream: bytes) -> None:
    with pytest.raises(CorruptionError, match="zstd stream"):
        zstd.ChunkDecoder().decode(as_bytes(stream), np.empty(len(CHUNK), np.uint8))


# Properties of all codecs.


FAULTS = {
    "input is written": "memoryview(region)[end - 1 : end] = b'x'",
    "input is overrun": "bytes(memoryview(region)[end : end + 1])",
    "input is underrun": "bytes(memoryview(region)[4095:4096])",
    "output is overrun": "codec_battery.guarded_output(5).obj[8192] = 1",
    "output is underrun": "codec_battery.guarded_output(5).obj[4095] = 1",
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS)
def test_guarded_memory_is_guarded(code: str) -> None:
    """The battery relies on it: a kernel that leaves its memory must end the process."""
    prepare = "import codec_battery; region = codec_battery.guarded(b'12345').obj; end = 8192; "
    done = subprocess.run(
        [sys.executable, "-c", f"{prepare}{code}; print('survived')"],
        cwd=Path(__file__).parents[1] / "samples",
        capture_output=True,
        check=False,
    )
    # Under a sanitizer, the fault does not end the process by the signal, but in another way.
    assert done.returncode != 0
    assert b"survived" not in done.stdout


def test_the_code_path_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ISAS:
        monkeypatch.setenv(ISA_VARIABLE, isa.upper())
        assert choose_isa().name.lower() == isa
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(
        ValueError, match=r"PACKHORSE_SIMD is 'mmx'.*portable, neon, avx2, avx512, avx512_vbmi2"
    ):
        choose_isa()
    with pytest.raises(ValueError, match="mmx"):
        compress_buffer(b"abc", "U8", (3,))
    monkeypatch.setenv(ISA_VARIABLE, "\udcff")  # not UTF-8
    with pytest.raises(ValueError, match=r"PACKHORSE_SIMD is '\\udcff'"):
        choose_isa()


def test_a_missing_instruction_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    with pytest.raises(MissingBackendError, match="asks for avx512, but this machine has portable"):
        _core.choose_isa(best=Isa.PORTABLE)


def test_views_of_buffers() -> None:
    data = bytearray(b"12345678")
    view = as_writable_bytes(memoryview(data).cast("I"))
    view[0] = ord("x")
    assert data == b"x2345678"
    with pytest.raises(TypeError, match="read-only"):
        as_writable_bytes(b"1234")
    with pytest.raises(TypeError, match="C-contiguous"):
        as_bytes(memoryview(data)[::2])
    with pytest.raises(TypeError, match="C-contiguous"):
        as_bytes(np.zeros(8, np.uint8)[::2])
    array = np.zeros(8, np.uint8)
    mine = as_bytes(array)
    array.shape = (2, 4)  # the caller's business, not ours
    assert mine.shape == (8,)
    assert np.shares_memory(mine, array)
    assert as_bytes(b"").size == as_writable_bytes(b"").size == 0
    for dtype in (object, [("Offset", "i4"), ("O", object)]):
        with pytest.raises(TypeError, match="Python objects"):
            as_writable_bytes(np.empty(3, dtype))
    assert as_bytes(np.empty(3, [("Offset", "i4")])).size == 12
