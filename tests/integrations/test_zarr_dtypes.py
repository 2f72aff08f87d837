"""zarr's data types for the floats of ml_dtypes: every bit pattern, metadata, and other readers."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from exchange_samples import DTYPES, bits, random_array

from packhorse.zarr_dtypes import BFloat16, zarr_dtype

SMALL = {name: dtype for name, dtype in DTYPES.items() if dtype.isbuiltin != 1}


@pytest.mark.parametrize("name", SMALL)
def test_every_bit_pattern_survives(name: str, tmp_path: Path) -> None:
    data = random_array(SMALL[name], (512, 300))
    zarr.create_array(
        tmp_path / "a", data=data, chunks=(100, 300), config={"write_empty_chunks": True}
    )
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.dtype == SMALL[name]
    assert bits(again[...]) == bits(data)
    assert json.loads((tmp_path / "a" / "zarr.json").read_text())["data_type"] == data.dtype.name


@pytest.mark.parametrize("name", SMALL)
def test_fill_values(name: str, tmp_path: Path) -> None:
    """Zeros, ones and NaN, as far as the dtype has them."""
    dtype = SMALL[name]
    values = [zarr_dtype(dtype).default_scalar(), dtype.type(1)]
    with np.errstate(invalid="ignore"):
        nan = dtype.type(float("nan"))
    values += [nan] if np.isnan(float(nan)) else []
    for value in values:
        zarr.create_array(tmp_path / "a", shape=(3,), dtype=dtype, fill_value=value, overwrite=True)
        found = zarr.open_array(tmp_path / "a", mode="r")[...]
        assert found.tobytes() == np.full(3, value).tobytes()


def test_words_and_bits_of_fill_values() -> None:
    half = BFloat16()
    assert np.isnan(half.from_json_scalar("NaN", zarr_format=3))
    assert float(half.from_json_scalar("-Infinity", zarr_format=3)) == -np.inf
    assert float(half.from_json_scalar("0x3f80", zarr_format=3)) == 1
    assert half.to_json_scalar(ml_dtypes.bfloat16(np.inf), zarr_format=3) == "0x7f80"
    assert half.to_json_scalar(1.5, zarr_format=3) == 1.5
    for wrong in ("one", None, [1]):
        with pytest.raises(TypeError):
            half.from_json_scalar(wrong, zarr_format=3)


def test_big_endian_bfloat16_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", data=np.ones(3, ml_dtypes.bfloat16))
    path = tmp_path / "a" / "zarr.json"
    path.write_text(path.read_text().replace('"little"', '"big"'))
    with pytest.raises(ValueError, match="big-endian byte order cannot be read"):
        zarr.open_array(tmp_path / "a", mode="r")[...]


@pytest.mark.parametrize("dtype", [*SMALL.values(), np.dtype("f4"), np.dtype("?")], ids=str)
def test_data_types_can_be_pickled(dtype: np.dtype) -> None:
    found = zarr_dtype(dtype)
    assert found == pickle.loads(pickle.dumps(found))
    assert found.to_native_dtype() == dtype
    assert found.item_size == dtype.itemsize


def test_importing_packhorse_zarr_is_enough(tmp_path: Path) -> None:
    data = random_array(SMALL["BF16"], (30, 4))
    zarr.create_array(tmp_path / "a", data=data, config={"write_empty_chunks": True})
    code = (
        "import sys, zarr\n"
        "try:\n    zarr.open_array(sys.argv[1])\n"
        "except ValueError:\n    pass\nelse:\n    raise SystemExit('zarr knows it already')\n"
        "import packhorse.zarr\n"
        "print(zarr.open_array(sys.argv[1])[...].tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert bytes.fromhex(done.stdout) == data.tobytes()


@pytest.mark.parametrize("name", [name for name in SMALL if not name.startswith("F6")])
def test_tensorstore_reads_them(name: str, tmp_path: Path) -> None:
    """It has no floats of 6 bits."""
    tensorstore = pytest.importorskip("tensorstore")
    data = random_array(SMALL[name], (100, 7))
    array = zarr.create_array(
        tmp_path / "a", shape=(100, 7), dtype=SMALL[name], chunks=(10, 7), shards=(50, 7),
        config={"write_empty_chunks": True},
    )  # fmt: skip
    array[...] = data
    place = {"driver": "file", "path": str(tmp_path / "a")}
    opened = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
    assert opened.read().result().tobytes() == data.tobytes()
