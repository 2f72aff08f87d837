"""The codec for zarr's format 3: dtypes, selections, shards, and the bytes that are read."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from entry_points import environment_of
from zarr.abc.store import ByteRequest, RangeByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore

import packhorse
from packhorse.frame import Frame
from packhorse.zarr import PackhorseCodec

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")

RNG = np.random.default_rng(0)
DTYPES = [
    *("?", "u1", "i2", "<u4", ">i8", "f2", "f4", ">f8", "c8", "c16", ">c16"),
    *("M8[ns]", ">M8[s]", "m8[ms]", "S5", "U3", ">U2", "V6"),
]
STRUCTURED = np.dtype([("a", ">f4"), ("b", "<i2"), ("c", "S3")])


def create(store: Any, data: np.ndarray, chunks: tuple[int, ...], **options: Any) -> zarr.Array:
    codec = options.pop("codec", PackhorseCodec())
    array = zarr.create_array(
        store, shape=data.shape, chunks=chunks, dtype=data.dtype, serializer=codec,
        **{"compressors": None, **options},
    )  # fmt: skip
    array[...] = data
    return array


def values(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Every bit pattern, if the dtype is a number."""
    dtype = np.dtype(dtype)
    if dtype.kind in "SU":
        return RNG.integers(0, 10**4, shape).astype(dtype)
    if dtype.kind == "b":
        return RNG.integers(0, 2, shape, dtype=bool)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(RNG.bytes(nbytes), dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which compares NaN
@pytest.mark.parametrize("dtype", [*DTYPES, STRUCTURED], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: Any, tmp_path: Path) -> None:
    data = values(dtype, (30, 11))
    create(tmp_path / "a", data, (16, 8), fill_value=None)
    again = zarr.open_array(tmp_path / "a", mode="r")
    back = np.asarray(again[...]).astype(data.dtype, copy=False)
    assert back.tobytes() == data.tobytes()
    assert np.asarray(again[17:21, 3]).astype(data.dtype).tobytes() == data[17:21, 3].tobytes()


def test_a_chunk_is_a_frame() -> None:
    data = RNG.normal(0, 1, (64, 48)).astype(">f4")
    store: dict[str, Any] = {}
    create(store, data, (32, 48))
    frame = Frame.from_buffer(store["c/1/0"].to_bytes())
    assert (frame.dtype, frame.shape) == ("F32", (32, 48))


def test_no_dimensions_and_no_elements() -> None:
    assert create({}, np.array(7.5), ())[()] == 7.5
    assert create({}, np.zeros((0, 4)), (1, 4))[...].shape == (0, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_dtype_that_zarr_lacks_is_packed_as_what_it_is(dtype: str, tmp_path: Path) -> None:
    floats = RNG.normal(0, 0.02, (64, 512)).astype(dtype)
    bits = floats.view(f"u{floats.itemsize}")
    create(tmp_path / "a", bits, (64, 512), codec=PackhorseCodec(dtype=dtype))
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.serializer == PackhorseCodec(dtype=dtype)
    assert again[...].view(dtype).tobytes() == floats.tobytes()
    frame = Frame.from_buffer((tmp_path / "a" / "c" / "0" / "0").read_bytes())
    assert frame.dtype == {"bfloat16": "BF16"}.get(dtype, dtype.replace("float8", "F8").upper()[:7])


def test_a_dtype_registered_with_zarr_is_packed_as_what_it_is() -> None:
    """Others add dtypes to zarr; the codec asks NumPy and not zarr what they are."""
    data = RNG.normal(0, 1, (8, 8)).astype(ml_dtypes.bfloat16)

    @dataclass(frozen=True, kw_only=True)
    class BFloat16(zarr.dtype.Float16):
        _zarr_v3_name = "bfloat16"
        dtype_cls = type(data.dtype)

        @classmethod
        def from_native_dtype(cls, dtype: np.dtype) -> "BFloat16":
            return cls()

        def to_native_dtype(self) -> np.dtype:
            return data.dtype

    store: dict[str, Any] = {}
    registry = zarr.dtype.data_type_registry
    ours = registry.get("bfloat16")
    registry.register("bfloat16", BFloat16)
    try:
        create(store, data, (8, 8))
        back = zarr.open_array(store)[2:]
    finally:
        registry.register("bfloat16", ours)
    assert (back.dtype, back.tobytes()) == (data.dtype, data[2:].tobytes())
    assert Frame.from_buffer(store["c/0/0"].to_bytes()).dtype == "BF16"


SELECTIONS = [
    *(np.s_[...], np.s_[3], np.s_[700:900], np.s_[10:20, 5:900], np.s_[-1, -1], np.s_[::-1]),
    *(np.s_[5:1900:7, 3], np.s_[100:100], np.s_[:, 17]),
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("shards", [None, (2048, 1024)])
def test_selections(selection: Any, shards: Any) -> None:
    data = np.arange(2000 * 1024, dtype="f4").reshape(2000, 1024)
    array = create({}, data, (1024, 1024), shards=shards)
    if not (isinstance(selection, slice) and selection.step == -1):  # zarr has no negative steps
        np.testing.assert_array_equal(array[selection], data[selection])
    rows, mask = [3, 1999, 17], data[:, 0] % 5 == 0
    np.testing.assert_array_equal(array.oindex[rows, [1, 900]], data[np.ix_(rows, [1, 900])])
    np.testing.assert_array_equal(array.vindex[rows, [1, 2, 3]], data[rows, [1, 2, 3]])
    np.testing.assert_array_equal(array.oindex[mask], data[mask])
    np.testing.assert_array_equal(array.blocks[-1, 0], data[0 if shards else 1024 :])


def test_shards_transposed_chunks_and_checksums_around_the_codec(tmp_path: Path) -> None:
    data = RNG.normal(0, 1, (64, 96)).astype("f4")
    filters = [zarr.codecs.TransposeCodec(order=(1, 0))]
    compressors = [zarr.codecs.Crc32cCodec()]
    create(tmp_path / "a", data, (16, 32), filters=filters, compressors=compressors)
    create(tmp_path / "b", data, (16, 32), shards=(32, 96))
    for name in "ab":
        array = zarr.open_array(tmp_path / name)
        np.testing.assert_array_equal(array[7:50, 30:70], data[7:50, 30:70])
        array[7:50, 30:70] = 1  # parts of chunks
        assert array[...].sum() == pytest.approx(data.sum() - data[7:50, 30:70].sum() + 43 * 40)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")  # of numcodecs in format 3
def test_a_filter_may_hand_over_the_bits_of_floats_as_integers() -> None:
    data = RNG.normal(0, 1, (16, 16)).astype("f4")
    rounded = zarr.codecs.numcodecs.BitRound(keepbits=3)
    ours = create({}, data, (16, 16), filters=[rounded])
    theirs = create({}, data, (16, 16), filters=[rounded], codec=zarr.codecs.BytesCodec())
    assert ours[...].tobytes() == theirs[...].tobytes()


class Ledger(MemoryStore):
    """A store that writes down what is read of the chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[ByteRequest | None, int]] = []

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        data = await super().get(key, prototype, byte_range)
        if key.startswith("c/") and data is not None:
            self.read.append((byte_range, len(data)))
        return data


def test_a_slice_reads_only_the_chunks_of_the_frame_that_it_meets() -> None:
    data = RNG.normal(0, 1, (4096, 1024)).astype("f4")
    store = Ledger()
    array = create(store, data, data.shape)
    store.read.clear()
    np.testing.assert_array_equal(array[2000:2010], data[2000:2010])
    assert [type(asked) for asked, _ in store.read] == [RangeByteRequest, RangeByteRequest]
    assert sum(nbytes for _, nbytes in store.read) < data.nbytes / 10
    store.read.clear()
    np.testing.assert_array_equal(array[10:], data[10:])
    assert [asked for asked, _ in store.read] == [None], "most of it: one request"
    absent = zarr.create_array(
        Ledger(), shape=(4096, 1024), dtype="f4", serializer=PackhorseCodec(),
        compressors=None, fill_value=5,
    )  # fmt: skip
    assert (absent[3] == 5).all()


def test_a_long_header_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.integrations.zarr._HEAD_NBYTES", 256)
    data = RNG.normal(0, 1, (2048, 1024)).astype("f4")
    store = Ledger()
    array = create(store, data, data.shape)
    store.read.clear()
    np.testing.assert_array_equal(array[1000:1010], data[1000:1010])
    header_nbytes = Frame.from_buffer(store._store_dict["c/0/0"].to_bytes()).header.header_nbytes
    assert [nbytes for _, nbytes in store.read][:2] == [256, header_nbytes - 256]
    assert len(store.read) == 3


@pytest.mark.parametrize("part", [np.s_[...], np.s_[100:110]], ids=["all", "part"])
def test_damaged_chunks_are_refused(part: Any) -> None:
    data = RNG.normal(0, 1, (2048, 1024)).astype("f4")
    store: dict[str, Any] = {}
    array = create(store, data, data.shape)
    good = store["c/0/0"].to_bytes()
    kind = type(store["c/0/0"])
    cases = [
        (good[:-1], packhorse.TruncationError),
        (good + b"\0", packhorse.CorruptionError),
        (good[:100_000], packhorse.TruncationError),
        (good[:1000], packhorse.TruncationError),
        (b"", packhorse.TruncationError),
        (good[:16] + b"\xff" * 8 + good[24:], packhorse.CorruptionError),  # frame_nbytes
        (good[:100] + bytes([good[100] ^ 1]) + good[101:], packhorse.CorruptionError),
        (b"x" * len(good), packhorse.CorruptionError),
    ]
    at = Frame.from_buffer(good).payload_range(100 * 4096, 110 * 4096)[0] + 500
    cases.append((good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], packhorse.CorruptionError))
    for bad, error in cases[2 * (part != np.s_[...]) :]:  # a part need not see the end
        store["c/0/0"] = kind.from_bytes(bad)
        with pytest.raises(error):
            array[part]
    store["c/0/0"] = kind.from_bytes(good)
    np.testing.assert_array_equal(array[part], data[part])


def test_a_frame_of_another_array_is_refused() -> None:
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    array = create(one, np.ones((8, 8), "f4"), (8, 8))
    create(other, np.ones((64,), "f4"), (64,))
    one["c/0/0"] = other["c/0"]
    words = r"the frame holds F32 of shape \[64\], but the array's metadata say F32 of shape \[8, 8"
    with pytest.raises(packhorse.CorruptionError, match=words):
        array[...]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="got `PackhorseCodec`"):  # zarr's own words
        zarr.create_array({}, shape=(4,), dtype=str, serializer=PackhorseCodec())
    with pytest.raises(ValueError, match="level is 9; it must be one of 'fast'"):
        PackhorseCodec(level=9)
    with pytest.raises(ValueError, match="dtype='bfloat16' of the codec has 2 bytes; the elements"):
        create({}, np.ones(4, "f4"), (4,), codec=PackhorseCodec(dtype="bfloat16"))
    with pytest.raises(TypeError, match="speed"):
        PackhorseCodec.from_dict({"name": "packhorse", "configuration": {"speed": 9}})
    assert PackhorseCodec.from_dict({"name": "packhorse"}) == PackhorseCodec()


def test_a_process_that_knows_only_zarr_finds_the_codec(tmp_path: Path) -> None:
    create(tmp_path / "a", np.full((6, 7), 2.0), (4, 4))
    code = (
        "import sys, zarr\n"
        "assert not any(name.startswith('packhorse') for name in sys.modules)\n"
        "print(zarr.open_array('a', mode='r')[:].sum())\n"
        "import packhorse.zarr\n"
        "print(zarr.open_array('a', mode='r').serializer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120,
        cwd=tmp_path, env=environment_of(tmp_path / "installed"),
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["84.0", f"{PackhorseCodec()}"], done.stderr


def test_without_zarr_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['zarr'] = None\n"
        "import packhorse\n"
        "try: import packhorse.zarr\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'packhorse[zarr]'" in done.stdout, done.stderr
