"""Properties of every input: any tensor comes back, and any bytes give a documented error."""

import io
import math
from collections.abc import Callable

import numpy as np
import planes
import pytest
from codec_battery import ISAS, forced, guarded, guarded_output
from frame_builder import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse import numpy as ph_numpy
from packhorse.disk.container import pack_tensors
from packhorse.disk.packed_header import is_packed
from packhorse.errors import PackhorseError
from packhorse.frame import Frame, compress_buffer, plan_buffer
from packhorse.layout import DTYPE_BY_NAME, DTYPES, Level, Split
from packhorse.reference import decode_file, decode_frame
from packhorse.storage.safetensors_header import build_header, parse_file_header

SETTINGS = settings(max_examples=150, deadline=None)
dtypes = st.sampled_from([dtype.name for dtype in DTYPES])
levels = st.sampled_from(["fast", "default", "max", *Level])
isas = st.sampled_from(ISAS)
threads = st.sampled_from([None, 1, 2, 3, 7])


@st.composite
def shapes(draw: st.DrawFn, dtype: str) -> tuple[int, ...]:
    """Shapes of whole bytes, some thousand elements at most."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    while math.prod(shape) > 3000:
        shape.pop()
    if math.prod(shape) * DTYPE_BY_NAME[dtype].bits % 8:
        shape.append(4)
    return tuple(shape)


@st.composite
def contents(draw: st.DrawFn, nbytes: int) -> bytes:
    """Bytes that hypothesis shrinks, or that have a pattern, with or without a blemish."""
    seed = draw(st.integers(0, 1 << 16))
    rng = np.random.default_rng(seed)
    period, n_values = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 16, 33, 256]))
    base: list[Callable[[], np.ndarray]] = [
        lambda: np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8),
        lambda: rng.integers(0, n_values, nbytes).astype(np.uint8),
        lambda: np.resize(rng.integers(0, 256, period).astype(np.uint8), nbytes),
        lambda: np.minimum(rng.geometric(0.2, nbytes), 255).astype(np.uint8),
    ]
    data = bytearray(base[draw(st.integers(0, 0 if nbytes < 40 else 3))]().tobytes())
    for at in draw(st.lists(st.integers(0, max(nbytes - 1, 0)), max_size=3)) if nbytes else []:
        data[at] ^= 0xFF
    return bytes(data)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], bytes]:
    dtype = draw(dtypes)
    shape = draw(shapes(dtype))
    return dtype, shape, draw(contents(math.prod(shape) * DTYPE_BY_NAME[dtype].bits // 8))


@settings(SETTINGS, max_examples=400)
@given(tensors(), levels, threads, isas, isas)
def test_any_tensor_comes_back(
    tensor: tuple[str, tuple[int, ...], bytes], level: str, n: int | None, isa: str, other: str
) -> None:
    dtype, shape, data = tensor
    with forced(isa):
        packed = compress_buffer(guarded(data), dtype, shape, level=level, threads=n).to_bytes()
    with forced(other):
        assert compress_buffer(data, dtype, shape, level=level, threads=1).to_bytes() == packed
        frame = Frame.from_buffer(guarded(packed))
        target = guarded_output(len(data))
        frame.decompress_into(target, threads=n)
        frame.verify()
    assert (frame.dtype, frame.shape, bytes(target)) == tensor
    slow = decode_frame(packed)
    assert (slow.dtype, slow.shape, slow.data) == tensor


@SETTINGS
@given(st.sampled_from([2, 4, 8]), st.sampled_from([Split.BYTES, Split.FLOAT]), st.data(), isas)
def test_merge_undoes_split(unit_nbytes: int, how: Split, draw: st.DataObject, isa: str) -> None:
    data = draw.draw(contents(unit_nbytes * draw.draw(st.integers(0, 300))))
    with forced(isa):
        rows = planes.split(data, unit_nbytes, how)
        assert planes.merge(rows, how).tobytes() == data
    assert rows.shape == (unit_nbytes, len(data) // unit_nbytes)


@SETTINGS
@given(tensors(), levels)
def test_a_plan_says_what_was_done(tensor: tuple[str, tuple[int, ...], bytes], level: str) -> None:
    dtype, shape, data = tensor
    frame = compress_buffer(data, dtype, shape, level=level)
    plan = plan_buffer(data, dtype, shape, level=level)
    done = frame.plan
    assert done is not None
    # A frame that was packed without a plan says how long its planes are, not what was expected.
    assert done._replace(estimated_nbytes=0, planes=()) == plan._replace(
        estimated_nbytes=0, planes=()
    )
    assert plan.split == frame.split
    assert plan.reason
    assert 0 <= plan.estimated_nbytes <= len(data) + 64


def read_frame(data: bytes) -> None:
    frame = Frame.from_buffer(data, max_nbytes=1 << 24)
    frame.decompress_into(guarded_output(frame.logical_nbytes))
    frame.verify()


def check_documented(
    read: Callable[[bytes], object], data: bytes, allowed: type[Exception]
) -> None:
    message = "fine"
    try:
        read(data)
    except PackhorseError as error:
        message = str(error)
    except allowed:
        return
    assert message
    assert "\n" not in message


@settings(SETTINGS, max_examples=300)
@given(st.binary(max_size=400) | st.binary(max_size=400).map(lambda tail: b"\x89PHF\1" + tail))
@example(b"")
@example(b"\x89PHF")
def test_any_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(PackhorseError):
        read_frame(data)


GOOD = compress_buffer(np.arange(600, dtype=np.float32), "F32", (20, 30)).to_bytes()


@settings(SETTINGS, max_examples=400)
@given(st.data())
def test_an_edited_header_gives_a_documented_error(draw: st.DataObject) -> None:
    """Whole fields are drawn, and the CRC is corrected."""
    data, header_nbytes = bytearray(GOOD), int.from_bytes(GOOD[12:16], "little")
    for _ in range(draw.draw(st.integers(1, 3))):
        size = draw.draw(st.sampled_from([1, 2, 4, 8]))
        at = draw.draw(st.integers(4, header_nbytes - size))
        top = 256**size - 1
        value = draw.draw(st.integers(0, top) | st.integers(0, min(100, top)))
        data[at : at + size] = value.to_bytes(size, "little")
    data[44:48] = bytes(4)
    data[44:48] = crc32c(data[:header_nbytes]).to_bytes(4, "little")
    check_documented(read_frame, bytes(data), ())


def packed_file() -> bytes:
    parts = {"a": ("F32", (30, 20)), "b": ("U8", (0,)), "c": ("I64", (9,))}
    arrays = {"a": np.arange(600, dtype=np.float32), "b": b"", "c": np.arange(9)}
    header = build_header(parts, {"k": "v"})
    buffers = (memoryview(arrays[entry.name]) for entry in header.entries)
    return pack_tensors(header, buffers, level="default", threads=1)


PACKED = packed_file()


EXPECTED = {name: array.tobytes() for name, array in ph_numpy.load(PACKED).items()}


def load(data: bytes) -> None:
    """A file without the record is an ordinary one, with tensors that nobody packed."""
    tensors = ph_numpy.load(data, threads=1)
    if not is_packed(parse_file_header(memoryview(data), "f")):
        return
    assert {name: array.tobytes() for name, array in tensors.items()} == EXPECTED


@settings(SETTINGS, max_examples=300)
@given(st.binary(max_size=300) | st.binary(max_size=300).map(
    lambda text: len(text).to_bytes(8, "little") + text
))  # fmt: skip
@example(b"")
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_any_bytes_are_no_file_or_an_ordinary_one(data: bytes) -> None:
    check_documented(load, data, ())


@settings(SETTINGS, max_examples=400)
@given(st.data())
def test_an_edited_file_gives_a_documented_error_or_the_same_tensors(draw: st.DataObject) -> None:
    """The text of the header is edited as text."""
    data = bytearray(PACKED)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data) - 1) | st.integers(8, 400))
        new = draw.draw(
            st.sampled_from([b"0", b"9", b'"', b"{", b"}", b"[", b",", b"\\", b"", b"\xff", b"-1"])
            | st.binary(max_size=3)
        )
        data[at : at + draw.draw(st.integers(0, 3))] = new
    if draw.draw(st.booleans()):  # keep the length honest, so that the JSON is read at all
        end = bytes(data).rfind(b"}") + 1
        data[:8] = max(end - 8, 0).to_bytes(8, "little")
    check_documented(load, bytes(data), ())


@settings(SETTINGS, max_examples=80)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"), tensors(), max_size=4
    ),
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_any_file_comes_back(
    parts: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str] | None
) -> None:
    header = build_header({name: part[:2] for name, part in parts.items()}, metadata)
    original = io.BytesIO()
    original.write(header.prefix())
    for entry in header.entries:
        original.write(parts[entry.name][2])
    packed = pack_tensors(
        header, (memoryview(parts[entry.name][2]) for entry in header.entries), level="max"
    )
    assert decode_file(packed) == original.getvalue()
