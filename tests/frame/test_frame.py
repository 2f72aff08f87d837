"""The Frame: its properties, whole and partial decoding, the caller's memory and mistakes."""

import mmap
from functools import cache

import numpy as np
import pytest
import xxhash
from codec_battery import ISAS, forced, guarded, guarded_output, make_data, tensor_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import _core
from packhorse.arguments import resolve_level, resolve_threads
from packhorse.codecs import content
from packhorse.errors import CorruptionError
from packhorse.frame import Frame, compress_buffer, content_hash, max_frame_nbytes, plan_buffer
from packhorse.layout import DTYPE_BY_NAME, DTYPES, FIXED_HEADER_NBYTES, Level, Mode, Split
from packhorse.reference import content_hash as slow_content_hash
from packhorse.reference import decode_frame


@cache
def tensor(kind: str) -> tuple[bytes, Frame]:
    """A tensor of several chunks and its frame, which needs every way of decoding a chunk."""
    how = {
        "planes": ("BF16", "weights", 700_001),
        "whole": ("F32", "noise", 300_001),
        "bytes": ("F8_E4M3", "33 values", 900_001),
        "zstd": ("I64", "sorted", 700_001),
        "constant": ("F64", "constant", 300_001),  # chunks of 1 MiB
    }
    dtype, data_kind, n = how[kind]
    data = make_data(data_kind, dtype, n)
    return data, compress_buffer(data, dtype, tensor_shape(data, dtype))


KINDS = ("planes", "whole", "bytes", "zstd", "constant")
SMALL_DATA = make_data("weights", "F32", 1200)


def small_frame(**kwargs: object) -> Frame:
    return compress_buffer(SMALL_DATA, "F32", (30, 40), **kwargs)


def test_a_frame_tells_what_it_holds() -> None:
    frame = small_frame(level="max")
    again = Frame.from_buffer(frame.to_bytes())
    for this in (frame, again):
        assert (this.dtype, this.shape, this.numel) == ("F32", (30, 40), 1200)
        assert (this.logical_nbytes, this.n_chunks) == (4800, 1)
        assert this.nbytes == len(this.to_bytes())
        assert this.nbytes % 64 == 0
        assert this.ratio == 4800 / this.nbytes
        assert (this.split, this.level) == (Split.FLOAT, Level.MAX)
        assert this.content_hash == xxhash.xxh3_128_digest(SMALL_DATA)
        assert repr(this) == f"Frame(F32, (30, 40), nbytes={this.nbytes}, ratio={this.ratio:.3f})"
    assert again.plan is None
    assert frame.plan == plan_buffer(SMALL_DATA, "F32", (30, 40), level="max")


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_length_that_the_frame_says(kind: str) -> None:
    data, frame = tensor(kind)
    assert frame.n_chunks == -(-len(data) // frame.chunk_nbytes) > 1
    assert {mode for plane in frame.planes() for mode in plane.modes} == {
        mode for modes in decode_modes(frame) for mode in modes
    }


def decode_modes(frame: Frame) -> list[tuple[Mode, ...]]:
    """Reads the modes straight from the bytes of the chunk table."""
    n_planes, at = len(frame.planes()), FIXED_HEADER_NBYTES + 8 * len(frame.shape)
    table = np.frombuffer(frame.to_bytes(), "<u4", frame.n_chunks * (1 + n_planes), at)
    return [tuple(Mode(int(d) >> 24) for d in row[1:]) for row in table.reshape(-1, 1 + n_planes)]


def test_plane_summaries_add_up() -> None:
    _, frame = tensor("planes")
    planes = frame.planes()
    assert [plane.index for plane in planes] == [0, 1]
    assert [plane.name for plane in planes] == ["exponent", "mantissa+sign"]
    assert all(sum(plane.modes.values()) == frame.n_chunks for plane in planes)
    assert sum(plane.logical_nbytes for plane in planes) == frame.logical_nbytes
    streams = sum(plane.nbytes for plane in planes)
    assert streams < frame.nbytes < streams + 64 * frame.n_chunks + 256
    assert {plane.name for plane in small_frame().planes()} >= {"mantissa 1", "mantissa 0"}
    integers = compress_buffer(bytes(range(256)) * 16, "U16", (2048,))
    assert [p.name for p in integers.planes()] in (["all"], ["byte 1", "byte 0"])


def test_buffer_is_a_view_and_to_bytes_a_copy() -> None:
    data = bytearray(small_frame().to_bytes())
    frame = Frame.from_buffer(data)
    view, copy = frame.buffer(), frame.to_bytes()
    assert view.readonly
    assert view == copy == data
    data[-1] ^= 1
    assert view == data
    assert copy != data


def test_a_frame_keeps_its_buffer_alive() -> None:
    packed = small_frame().to_bytes()
    frame = Frame.from_buffer(np.frombuffer(bytearray(packed), np.uint8))
    assert frame.to_bytes() == packed


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(draw=st.data())
def test_any_range_decodes_to_that_range(kind: str, draw: st.DataObject) -> None:
    data, frame = tensor(kind)
    edges = [
        e for i in range(frame.n_chunks) for e in (i * frame.chunk_nbytes + d for d in (-1, 0, 1))
    ]
    edge = st.integers(0, len(data)) | st.sampled_from([e for e in edges if 0 <= e <= len(data)])
    start, stop = sorted((draw.draw(edge), draw.draw(edge)))
    target = guarded_output(stop - start)
    with forced(draw.draw(st.sampled_from(ISAS))):
        frame.decompress_into(target, start=start, stop=stop, threads=draw.draw(st.integers(1, 4)))
    assert target == data[start:stop]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_reads_only_the_chunks_it_meets(kind: str, threads: int) -> None:
    data, frame = tensor(kind)
    packed = bytearray(frame.to_bytes())
    packed[-64] ^= 1  # in the last chunk
    damaged = Frame.from_buffer(packed, name="w", offset=1000)
    good = (frame.n_chunks - 1) * frame.chunk_nbytes
    target = bytearray(good)
    damaged.decompress_into(target, stop=good, threads=threads)
    assert target == data[:good]
    with pytest.raises(CorruptionError) as caught:
        damaged.decompress_into(bytearray(2), start=good - 1, stop=good + 1, threads=threads)
    last = frame.n_chunks - 1
    assert f"chunk {last} of {frame.n_chunks}: its checksum does not match" in str(caught.value)
    assert str(caught.value).startswith(f"tensor 'w': byte {1000 + last_chunk_offset(frame)}: ")


def last_chunk_offset(frame: Frame) -> int:
    """Where the last chunk begins, from the table and the page's rules."""
    n_planes, at = len(frame.planes()), FIXED_HEADER_NBYTES + 8 * len(frame.shape)
    table = np.frombuffer(frame.to_bytes(), "<u4", frame.n_chunks * (1 + n_planes), at)
    lengths = (table.reshape(-1, 1 + n_planes)[:-1, 1:] & 0xFFFFFF).sum(axis=1)
    header = -(-(at + 4 * frame.n_chunks * (1 + n_planes)) // 64) * 64
    return header + sum(-(-int(length) // 64) * 64 for length in lengths)


def test_several_bad_chunks_report_the_first() -> None:
    _, frame = tensor("planes")
    packed = bytearray(frame.to_bytes())
    for at in range(4096, len(packed), 9973):
        packed[at] ^= 0x55
    damaged = Frame.from_buffer(packed)
    for threads in (1, 2, 5):
        with pytest.raises(CorruptionError, match="chunk 0 of"):
            damaged.decompress_into(bytearray(frame.logical_nbytes), threads=threads)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frame_is_built_in_the_memory_that_is_given(kind: str) -> None:
    data, expected = tensor(kind)
    capacity = max_frame_nbytes(expected.dtype, expected.shape)
    for spare in (0, 1, 4097):
        out = guarded_output(capacity + spare)
        frame = compress_buffer(data, expected.dtype, expected.shape, out=out)
        assert frame.to_bytes() == expected.to_bytes()
        out[0] = 0  # it is a view of that memory
        assert frame.to_bytes()[0] == 0


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_max_frame_nbytes_is_enough_and_not_much_more(dtype: str) -> None:
    for n in (0, 1, 24, 1000, 300_000):
        data = make_data("noise", dtype, n)
        shape = tensor_shape(data, dtype)
        bound = max_frame_nbytes(dtype, shape)
        frame = compress_buffer(data, dtype, shape, level="max")
        assert frame.nbytes <= bound <= len(data) * 1.01 + 320


def test_a_caller_who_gives_wrong_memory_is_told() -> None:
    _, frame = tensor("constant")
    nbytes = frame.logical_nbytes
    with pytest.raises(ValueError, match=f"dst has {nbytes - 1} bytes; .* need {nbytes}"):
        frame.decompress_into(bytearray(nbytes - 1))
    with pytest.raises(ValueError, match="dst has 10 bytes; bytes 5:10 need 5"):
        frame.decompress_into(bytearray(10), start=5, stop=10)
    for start, stop in ((-1, 3), (5, 4), (0, nbytes + 1), (nbytes + 1, nbytes + 1)):
        with pytest.raises(ValueError, match="are not inside"):
            frame.decompress_into(bytearray(8), start=start, stop=stop)
    with pytest.raises(TypeError, match="read-only"):
        frame.decompress_into(bytes(nbytes))
    with pytest.raises(TypeError, match="C-contiguous"):
        frame.decompress_into(np.empty(2 * nbytes, np.uint8)[::2])
    with pytest.raises(TypeError, match="buffer protocol"):
        frame.decompress_into([0] * nbytes)


def test_a_caller_who_asks_for_nonsense_is_told() -> None:
    with pytest.raises(ValueError, match="dtype 'F128' is unknown; known are BOOL, "):
        compress_buffer(b"", "F128", (0,))
    with pytest.raises(ValueError, match="has 8 bytes, src 4"):
        compress_buffer(b"abcd", "F32", (2,))
    with pytest.raises(ValueError, match="dimensions, none < 0"):
        compress_buffer(b"", "F32", (-1, 0))
    with pytest.raises(ValueError, match="at most 64 dimensions"):
        compress_buffer(b"", "F32", (0,) * 65)
    with pytest.raises(ValueError, match=r"2\^63 bits"):
        max_frame_nbytes("F32", (1 << 40, 1 << 40, 0))
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        max_frame_nbytes("F4", (3,))
    with pytest.raises(ValueError, match="out has 10 bytes; a frame of this tensor may take"):
        small_frame(out=bytearray(10))
    with pytest.raises(TypeError, match="out is read-only"):
        small_frame(out=bytes(10_000))
    with pytest.raises(TypeError, match="src must offer the buffer protocol"):
        compress_buffer(5, "U8", (1,))
    with pytest.raises(ValueError, match="level is 'best'; it must be one of 'fast', 'default'"):
        small_frame(level="best")
    with pytest.raises(ValueError, match="threads is 0; it must be at least 1"):
        small_frame(threads=0)
    with pytest.raises(TypeError, match="threads must be an integer or None, not float"):
        small_frame().verify(threads=1.5)


def test_levels_and_threads_are_understood() -> None:
    assert resolve_level("FAST") is resolve_level(1) is resolve_level(Level.FAST) is Level.FAST
    for wrong in ("", "4", 0, 4, None, 1.5):
        with pytest.raises(ValueError, match="level is"):
            resolve_level(wrong)
    assert resolve_threads(17) == 17
    assert 1 <= resolve_threads(None) <= 8


def test_nothing_has_a_frame_of_its_header_alone() -> None:
    for dtype in DTYPE_BY_NAME:
        for shape in ((0,), (3, 0, 5), (0,) * 64):
            frame = compress_buffer(b"", dtype, shape)
            assert (frame.shape, frame.n_chunks, frame.logical_nbytes) == (shape, 0, 0)
            assert frame.nbytes == -(-(FIXED_HEADER_NBYTES + 8 * len(shape)) // 64) * 64
            frame.verify()
            frame.decompress_into(b"")
            assert decode_frame(frame.to_bytes()).shape == shape


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (2, 3), (1,) * 64])
def test_shapes_survive(shape: tuple[int, ...]) -> None:
    nbytes = 4 * int(np.prod(shape, dtype=int))
    frame = Frame.from_buffer(compress_buffer(bytes(range(nbytes)), "F32", shape).to_bytes())
    assert frame.shape == shape
    target = bytearray(nbytes)
    frame.decompress_into(target)
    assert target == bytes(range(nbytes))


def test_max_nbytes_refuses_a_larger_tensor() -> None:
    packed = small_frame().to_bytes()
    assert Frame.from_buffer(packed, max_nbytes=4800).logical_nbytes == 4800
    with pytest.raises(CorruptionError, match="4800 bytes, more than max_nbytes = 4799"):
        Frame.from_buffer(packed, max_nbytes=4799)


@pytest.mark.parametrize("isa", ISAS)
def test_content_hash_is_the_one_of_the_page(isa: str) -> None:
    rng = np.random.default_rng(0)
    sizes = (0, 1, 16, 239, 240, 241, 1000, 1024, 1025, 262_143, 262_144, 262_145)
    with forced(isa):
        for n in (*sizes, 262_144 + 240, 262_144 + 241, 524_288, 1_000_003):
            data = rng.bytes(n)
            for threads in (1, 3):
                assert content_hash(guarded(data), threads=threads) == slow_content_hash(data)


@pytest.mark.parametrize("isa", ISAS)
def test_crc32c_is_the_published_one(isa: str) -> None:
    """The check value of the CRC catalogues, and RFC 3720's examples (section B.4)."""
    examples = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
        b"": 0,
    }
    with forced(isa):
        for data, crc in examples.items():
            assert _core.crc32c(np.frombuffer(data, np.uint8)) == crc


@pytest.mark.parametrize("isa", ISAS)
def test_crc32c_of_odd_lengths(isa: str) -> None:
    from frame_builder import crc32c

    data = np.random.default_rng(1).integers(0, 256, 20000).astype(np.uint8)
    short = (1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1007, 1023, 1024, 1025, 1287, 3077)
    long = (4095, 4096, 4097, 4223, 4224, 4225, 12287, 12288, 12289, 19990)
    blocks = (3071, 3072, 3073, 3839, 3840, 3841, 4606, 4608, 4610)
    with forced(isa):
        for n in (*short, *blocks, *long):
            expected = crc32c(data[1 : n + 1].tobytes())
            assert _core.crc32c(data[1 : n + 1]) == expected
            assert _core.crc32c_unfolded(data[1 : n + 1]) == expected


@pytest.mark.slow
def test_a_tensor_above_4_gib() -> None:
    """Mostly zeros, so that the pages of source and frame cost nothing; read back in parts."""
    nbytes = (4 << 30) + (300 << 20) + 5
    source = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    marks = (0, (1 << 31) - 3, (1 << 32) - 3, (1 << 32) + 7, nbytes - 9)
    for mark in marks:
        source[mark : mark + 9] = b"packhorse"
    frame = compress_buffer(source, "U8", (nbytes,))
    assert frame.logical_nbytes == nbytes
    assert frame.ratio > 1000
    again = Frame.from_buffer(frame.to_bytes())
    for mark in marks:
        target = bytearray(9)
        again.decompress_into(target, start=mark, stop=mark + 9)
        assert target == b"packhorse"
    part = bytearray(1 << 22)
    again.decompress_into(part, start=(1 << 32) - (1 << 21), stop=(1 << 32) + (1 << 21))
    assert part.count(b"packhorse") == 2
    assert part.count(0) == len(part) - 18


def test_content_module_agrees_with_the_frame() -> None:
    data, frame = tensor("bytes")
    assert content.content_hash(data) == frame.content_hash == slow_content_hash(data)
