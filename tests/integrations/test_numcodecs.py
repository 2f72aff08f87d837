"""The codec for numcodecs: its own battery, zarr's format 2, and all kinds of arrays."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import zarr
from entry_points import environment_of
from fsspec.implementations.reference import ReferenceFileSystem
from numcodecs.tests import common
from zarr.storage import FsspecStore

import packhorse
from packhorse.frame import Frame, compress_buffer
from packhorse.numcodecs import Packhorse

RNG = np.random.default_rng(0)


def arrays() -> Iterator[np.ndarray]:
    """The kinds of arrays that numcodecs tries its compressors on."""
    yield np.arange(1000, dtype="i4")
    yield np.linspace(1000, 1001, 1000, dtype="f8")
    yield RNG.normal(1000, 1, (100, 10))
    yield RNG.integers(0, 2, 1000, dtype=bool)
    yield RNG.choice([b"a", b"bb", b"ccc"], 1000).reshape(100, 10)
    for unit in ("s", "ns"):
        for kind in "Mm":
            values = RNG.integers(0, 2**60, 1000, dtype="u8")
            yield values.view(f"{kind}8[{unit}]")
    yield RNG.normal(0, 1, (100, 10)).astype("f4", order="F")
    yield RNG.normal(0, 1, (5, 6, 7)).astype(">f8")
    yield np.zeros((10, 10), [("a", "f4"), ("b", ">i2")])
    yield RNG.normal(0, 1, 200).view("c16")
    yield RNG.normal(0, 1, 200).astype("f4").view("c8")
    yield np.array(["häl", "o"] * 10)
    yield np.zeros((0, 3), "f2")
    yield np.array(3.5)


@pytest.mark.parametrize("array", [*arrays()], ids=lambda array: f"{array.dtype}{array.shape}")
def test_numcodecs_own_checks(array: np.ndarray) -> None:
    for codec in (Packhorse(), Packhorse("fast")):
        common.check_encode_decode(array, codec)


def test_numcodecs_checks_of_configurations_and_objects() -> None:
    for codec in (Packhorse(), Packhorse("max"), Packhorse(dtype=">f4"), Packhorse(dtype="f2")):
        common.check_config(codec)
        assert eval(repr(codec)) == codec
    common.check_err_encode_object_buffer(Packhorse())
    common.check_err_decode_object_buffer(Packhorse())


def test_the_frame_has_the_dtype_and_shape_of_the_array() -> None:
    array = RNG.normal(0, 1, (64, 48)).astype(ml_dtypes.bfloat16)
    frame = Frame.from_buffer(Packhorse().encode(array))
    assert (frame.dtype, frame.shape) == ("BF16", (64, 48))
    turned = Frame.from_buffer(Packhorse().encode(array.T))
    assert (turned.dtype, turned.shape) == ("BF16", (64, 48)), "as it lies in memory"
    back = Packhorse().decode(frame.buffer())
    assert (back.dtype, back.shape) == (array.dtype, (64 * 48,))


def test_a_dtype_makes_bytes_and_foreign_byte_order_small() -> None:
    array = RNG.normal(0, 0.02, 1 << 16).astype("f4")
    swapped = array.astype(">f4")
    size = len(Packhorse().encode(array))
    for codec, data in (
        (Packhorse(dtype="f4"), array.tobytes()),
        (Packhorse(dtype=">f4"), swapped),
    ):
        encoded = codec.encode(data)
        assert len(encoded) == size
        out = np.empty_like(array)
        assert codec.decode(encoded, out) is out
        assert out.tobytes() == bytes(data.data if isinstance(data, np.ndarray) else data)
        assert codec.decode(encoded).dtype == np.dtype(codec.dtype)
    assert len(Packhorse().encode(swapped)) > size


def test_bits_of_bfloat16_in_integers() -> None:
    bits = RNG.normal(0, 0.02, (64, 512)).astype(ml_dtypes.bfloat16).view(np.uint16)
    codec = Packhorse(dtype="bfloat16")
    assert Frame.from_buffer(codec.encode(bits)).shape == (64, 512)
    assert len(codec.encode(bits)) < len(Packhorse().encode(bits))
    assert codec.decode(codec.encode(bits)).tobytes() == bits.tobytes()
    assert numcodecs.get_codec(json.loads(json.dumps(codec.get_config()))) == codec


def test_what_is_encoded_is_only_read() -> None:
    array = RNG.normal(0, 1, 100).astype(">f4")
    before = array.tobytes()
    array.flags.writeable = False
    Packhorse(dtype=">f4").encode(array)
    assert array.tobytes() == before


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="level is 'best'; it must be one of 'fast'"):
        Packhorse("best")
    with pytest.raises(TypeError, match="dtype is 'float7', which NumPy does not know"):
        Packhorse(dtype="float7")
    with pytest.raises(TypeError, match="dtype is 'S4', which would be packed as bytes"):
        Packhorse(dtype="S4")
    with pytest.raises(ValueError, match="6 bytes are not a whole number of elements of float32"):
        Packhorse(dtype="f4").encode(bytes(6))
    with pytest.raises(ValueError, match="contiguous"):
        Packhorse().encode(np.zeros((4, 4))[:, ::2])


def test_bad_data_and_bad_outputs_are_named() -> None:
    encoded = Packhorse().encode(np.arange(100.0))
    with pytest.raises(packhorse.TruncationError):
        Packhorse().decode(encoded[:-1])
    with pytest.raises(ValueError, match="out has 792 bytes; the frame holds 800"):
        Packhorse().decode(encoded, np.empty(99))
    with pytest.raises(packhorse.CorruptionError, match="holds F64, and this codec decodes F32"):
        Packhorse(dtype="f4").decode(encoded)
    fixed = np.empty(100)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        Packhorse().decode(encoded, fixed)
    old = np.arange(100.0)
    delta = compress_buffer(old.tobytes(), "F64", (100,), base=old.tobytes())
    with pytest.raises(packhorse.BaseMismatchError):
        Packhorse().decode(delta.buffer())


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", ["f4", ">f4", "i8", "M8[ns]", "c16", "S7", "?"])
def test_zarr_format_2(dtype: str, order: str, tmp_path: Path) -> None:
    data = RNG.integers(0, 2**40, (50, 30)).astype(dtype)
    codec = Packhorse(dtype=dtype if dtype == ">f4" else None)
    array = zarr.create_array(
        tmp_path / "a", shape=data.shape, chunks=(20, 20), dtype=dtype, zarr_format=2,
        compressors=codec, order=order, fill_value=None,
    )  # fmt: skip
    array[:] = data
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.compressors == (codec,)
    np.testing.assert_array_equal(again[:], data)
    np.testing.assert_array_equal(again[5:31, 7], data[5:31, 7])


def test_references_to_chunks_in_other_files(tmp_path: Path) -> None:
    """As kerchunk writes them."""
    data, codec = RNG.normal(0, 1, (50, 40)).astype("f4"), Packhorse()
    encoded = codec.encode(data)
    (tmp_path / "blob").write_bytes(b"before" + encoded + b"after")
    metadata = {"zarr_format": 2, "shape": [50, 40], "chunks": [50, 40], "dtype": "<f4"}
    metadata |= {"compressor": codec.get_config(), "fill_value": 0, "order": "C", "filters": None}
    references = {
        ".zarray": json.dumps(metadata), "0.0": [str(tmp_path / "blob"), 6, len(encoded)]
    }  # fmt: skip
    files = ReferenceFileSystem(references, remote_protocol="file", asynchronous=True)
    array = zarr.open_array(FsspecStore(files, read_only=True, path=""), mode="r", zarr_format=2)
    np.testing.assert_array_equal(array[3:5, 7], data[3:5, 7])


def test_a_process_that_knows_only_numcodecs_finds_the_codec(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=(6,), dtype="f4", zarr_format=2, compressors=Packhorse()
    )
    array[:] = 7
    code = (
        "import numcodecs, sys, zarr\n"
        "assert not any(name.startswith('packhorse') for name in sys.modules)\n"
        "print(numcodecs.get_codec({'id': 'packhorse', 'level': 'fast'}))\n"
        "print(zarr.open_array('a', mode='r')[:].sum())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env=environment_of(tmp_path / "installed"),
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["Packhorse(dtype=None, level='fast')", "42.0"], (
        done.stderr
    )


def test_without_numcodecs_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['numcodecs'] = None\n"
        "import packhorse\n"
        "try: import packhorse.numcodecs\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'packhorse[numcodecs]'" in done.stdout, done.stderr
