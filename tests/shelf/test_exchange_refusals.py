"""What is wrong with files that are imported, and with places that are exported to: one clear error
each, and the shelf stays as it was."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from exchange_samples import DTYPES, random_array
from safetensors.numpy import save_file

from packhorse.disk import Shelf, pack_file
from packhorse.errors import CorruptionError, TruncationError


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """An empty shelf."""
    with Shelf(tmp_path / "own.shelf") as opened:
        yield opened


def test_npy_files_that_are_wrong(shelf: Shelf, tmp_path: Path) -> None:
    def written(data: bytes) -> Path:
        (tmp_path / "x.npy").write_bytes(data)
        return tmp_path / "x.npy"

    np.save(tmp_path / "good.npy", np.arange(100))
    good = (tmp_path / "good.npy").read_bytes()
    cases: list[tuple[bytes, type[Exception], str]] = [
        (b"", CorruptionError, "not a .npy file, or damaged"),
        (b"hello, this is no array", CorruptionError, "not a .npy file, or damaged"),
        (good[:50], CorruptionError, "not a .npy file, or damaged"),
        (good[:-1], TruncationError, "cut short: int64 of shape \\[100\\] ends at byte 928"),
        (good + good, CorruptionError, "928 more bytes follow"),
    ]
    for data, kind, words in cases:
        with pytest.raises(kind, match=words):
            shelf.import_npy("x", written(data))
    for array, words in (
        (np.array([{}]), "has Python objects, which are never loaded"),
        (np.array(["text"]), "a shelf has no dtype for <U4"),
        (np.zeros(3, np.complex128), "a shelf has no dtype for complex128"),
        (np.zeros(3, [("a", "f4"), ("b", "i8")]), "a shelf has no dtype for"),
        (np.zeros(3, "V2"), "give dtype=, such as 'bfloat16'"),
    ):
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(TypeError, match=words):
            shelf.import_npy("x", tmp_path / "x.npy")
    with pytest.raises(TypeError, match="dtype is float32, of 4 bytes, but the elements have 2"):
        shelf.import_npy("x", tmp_path / "x.npy", dtype="float32")
    with pytest.raises(TypeError, match="dtype is 'flote', which NumPy"):
        shelf.import_npy("x", tmp_path / "x.npy", dtype="flote")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there is no \*.npy file in it"):
        shelf.import_npy("x", tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        shelf.import_npy("x", tmp_path / "none.npy")
    assert list(shelf) == []


def test_zarr_that_is_wrong(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        shelf.import_zarr(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a group nor an array of zarr"):
        shelf.import_zarr(tmp_path / "empty")
    zarr.create_array(tmp_path / "text.zarr", data=np.array([1 + 2j, 3]))
    with pytest.raises(TypeError, match=r"text.zarr: array 'text': a shelf has no dtype"):
        shelf.import_zarr(tmp_path / "text.zarr")
    data = np.random.default_rng(0).standard_normal((4, 1000))
    zarr.create_array(tmp_path / "bad.zarr", data=data, chunks=(2, 1000))
    chunk = tmp_path / "bad.zarr" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-100])
    with pytest.raises(CorruptionError, match=r"bad.zarr: array 'bad': elements \[0:4, 0:1000\]"):
        shelf.import_zarr(tmp_path / "bad.zarr")
    (tmp_path / "bad.zarr" / "zarr.json").write_text("{")
    with pytest.raises(CorruptionError, match=r"bad.zarr: zarr cannot read its metadata"):
        shelf.import_zarr(tmp_path / "bad.zarr")
    with pytest.raises(ValueError, match="exported to a folder of this machine"):
        shelf.export_zarr("s3://bucket/x")
    assert list(shelf) == []


def test_models_that_are_wrong(shelf: Shelf, tmp_path: Path) -> None:
    save_file({"w": np.arange(1000.0)}, tmp_path / "m.safetensors")
    good = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(good[:-1])
    with pytest.raises(TruncationError, match=r"m.safetensors: cut short"):
        shelf.import_safetensors(tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").write_bytes(good)
    pack_file(tmp_path / "m.safetensors", tmp_path / "m.ph.safetensors")
    damaged = bytearray((tmp_path / "m.ph.safetensors").read_bytes())
    damaged[-9] ^= 1
    (tmp_path / "m.ph.safetensors").write_bytes(damaged)
    with pytest.raises(CorruptionError, match=r"m.ph.safetensors: tensor 'w'"):
        shelf.import_safetensors(tmp_path / "m.ph.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there is no \*.safetensors file in this folder"):
        shelf.import_safetensors(tmp_path / "empty")
    shelf["half"] = random_array(DTYPES["F4"], (3,))
    with pytest.raises(ValueError, match="'half': 3 elements of 4 bits do not end at a byte"):
        shelf.export_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="is the name of a packed file"):
        shelf.export_safetensors(tmp_path / "x.ph.safetensors")
    assert list(shelf) == ["half"]


def test_a_file_that_changes_while_it_is_imported(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.arange(1000.0), "b": np.arange(9.0)}, path)

    def touch(done: int, total: int) -> None:
        path.write_bytes(path.read_bytes())

    with pytest.raises(OSError, match="changed while it was being read"):
        shelf.import_safetensors(path, progress=touch)
    assert list(shelf) == []
