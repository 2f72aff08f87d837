"""The filter for HDF5, called by the HDF5 library of h5py."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest

from packhorse.frame import Frame
from packhorse.h5py import FILTER_ID, Packhorse
from packhorse.layout import Mode

RNG = np.random.default_rng(0)
STRUCTURED = np.dtype([("a", "<f4"), ("b", ">i2"), ("c", "S3")])
DTYPES = ["f2", "f4", ">f4", "f8", "i1", ">i8", "u2", "?", "c8", ">c16", "S5", STRUCTURED]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arrays.h5"


def write(path: Path, data: np.ndarray, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, **{"compression": Packhorse(), **options})


def read(path: Path, part: Any = ...) -> Any:
    with h5py.File(path) as file:
        return file["x"][part]


def first_chunk(path: Path) -> Frame:
    with h5py.File(path) as file:
        return Frame.from_buffer(file["x"].id.read_direct_chunk((0, 0))[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: Any, path: Path) -> None:
    data = np.frombuffer(RNG.bytes(100 * 30 * np.dtype(dtype).itemsize), dtype).reshape(100, 30)
    data = np.char.add(data, b"x") if np.dtype(dtype).kind == "S" else data
    data = RNG.integers(0, 2, (100, 30), dtype=bool) if dtype == "?" else data
    write(path, data, chunks=(32, 16))
    back = read(path)
    assert (back.dtype, back.tobytes()) == (data.dtype, data.tobytes())
    assert read(path, np.s_[33:70:5, 3]).tobytes() == data[33:70:5, 3].tobytes()


def test_a_chunk_is_a_frame_of_the_dtype_and_shape(path: Path) -> None:
    data = RNG.normal(0, 0.02, (128, 64)).astype("f4")
    write(path, data, chunks=(64, 64))
    frame = first_chunk(path)
    assert (frame.dtype, frame.shape) == ("F32", (64, 64))
    size = frame.nbytes
    write(path, data.astype(">f4"), chunks=(64, 64))
    assert first_chunk(path).nbytes == size, "foreign byte order costs nothing"


def test_levels_and_dtypes_that_hdf5_lacks(path: Path) -> None:
    floats = RNG.normal(0, 0.02, (512, 512)).astype(ml_dtypes.bfloat16)
    sizes = []
    for codec in (Packhorse("fast", dtype="bfloat16"), Packhorse(dtype="bfloat16"), Packhorse()):
        write(path, floats.view(np.uint16), chunks=(512, 512), **codec)
        assert read(path).tobytes() == floats.tobytes()
        sizes.append(first_chunk(path).nbytes)
    assert sizes[0] > sizes[1] < sizes[2]
    assert first_chunk(path).dtype == "U16"


def test_other_filters_around_it(path: Path) -> None:
    data = RNG.normal(0, 1, (100, 30)).astype(">f4")
    write(path, data, chunks=(50, 30), shuffle=True, fletcher32=True)
    assert read(path).tobytes() == data.tobytes()
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((50, 30))
        plist.set_deflate(1)  # changes the size before ours
        plist.set_filter(FILTER_ID, 0, (1, 2, 0))
        space = h5py.h5s.create_simple(data.shape)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32BE, space, plist)
        file["x"][...] = data
    assert read(path).tobytes() == data.tobytes()


def test_the_filter_waits_for_no_thread_of_python(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread might release an object of h5py, for which it needs h5py's lock."""
    data = np.tile(RNG.integers(0, 256, 8000).astype(np.uint8), 1000)
    monkeypatch.setattr("packhorse.threads.ThreadPoolExecutor", None)
    write(path, data, chunks=data.shape)
    with h5py.File(path) as file:
        frame = Frame.from_buffer(file["x"].id.read_direct_chunk((0,))[1])
    assert Mode.ZSTD in frame.planes()[0].modes
    assert frame.n_chunks > 1
    assert read(path).tobytes() == data.tobytes()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_damage_is_an_error_that_says_what_is_wrong(path: Path) -> None:
    data = RNG.normal(0, 1, (64, 64)).astype("f4")
    write(path, data, chunks=(64, 64))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(0)
    good = path.read_bytes()
    for at, words in ((200, "checksum"), (0, "magic"), (chunk.size - 70, "checksum")):
        bad = bytearray(good)
        bad[chunk.byte_offset + at] ^= 1
        path.write_bytes(bad)
        with (
            pytest.warns(RuntimeWarning, match=f"packhorse: .*{words}"),
            pytest.raises(OSError, match="filter returned failure"),
        ):
            read(path)
        with pytest.raises(OSError, match="filter returned failure"):
            read(path)  # also where a warning is an error
    path.write_bytes(good)
    assert read(path).tobytes() == data.tobytes()


def test_mistakes_are_named(path: Path) -> None:
    with pytest.raises(ValueError, match="level is 9; it must be one of"):
        Packhorse(9)
    with pytest.raises(ValueError, match="packhorse: elements of float32 cannot stand for BF16"):
        write(path, np.ones((4, 4), "f4"), compression=Packhorse(dtype="bfloat16"))
    with pytest.raises(TypeError, match="which would be packed as bytes"):
        Packhorse(dtype="S3")


def test_a_reader_imports_the_module_first(path: Path) -> None:
    write(path, np.full((8, 8), 2.0))
    for line, expected in (("", "OSError"), ("import packhorse.h5py; ", "128.0")):
        code = f"import h5py, sys; {line}print(h5py.File(sys.argv[1])['x'][...].sum())"
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
        )
        assert expected in done.stdout + done.stderr


def test_without_h5py_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "import packhorse\n"
        "try: import packhorse.h5py\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'packhorse[h5py]'" in done.stdout, done.stderr
