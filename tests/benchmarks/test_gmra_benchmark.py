"""The benchmark of GMRA: its page and its pictures, and the reader of Fashion-MNIST."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_modules import import_afresh

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    with import_afresh("gmra", "data.fashion_mnist") as modules:
        yield modules


def write_part(folder: Path, part: str, n: int, *, magic: int = 0x803) -> None:
    """Files of the set, with n images that count up."""
    pixels = (np.arange(n * 784) % 251).astype(np.uint8)
    labels = (np.arange(n) % 10).astype(np.uint8)
    head = np.array([magic, n, 28, 28], ">u4").tobytes()
    (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes(), 1))
    head = np.array([0x801, n], ">u4").tobytes()
    (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(head + labels.tobytes(), 1))


def test_the_page_has_the_tables_of_the_kept_figures(benchmarks: dict[str, ModuleType]) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "gmra.json").read_text())
    page = (ROOT / "docs" / "gmra.md").read_text()
    assert page == benchmarks["gmra"].with_tables(page, kept)


def test_the_set_is_read(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = benchmarks["data.fashion_mnist"]
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "_SHAPES", {"train": 60, "t10k": 10})
    write_part(tmp_path, "train", 60)
    write_part(tmp_path, "t10k", 10)
    images, labels = data.load()
    assert images.shape == (70, 784)
    assert images.dtype == np.uint8
    assert labels[60:].tolist() == list(range(10))
    write_part(tmp_path, "t10k", 10, magic=0x801)
    with pytest.raises(ValueError, match="is not the file of images that it should be; run: make"):
        data.load("t10k")
    with pytest.raises(ValueError, match="part is 'test'; it must be one of 'all', 'train', 't10"):
        data.load("test")
    monkeypatch.setattr(data, "FOLDER", tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent is missing; run: make data"):
        data.load()


def test_fashion_mnist_is_as_it_was_published(benchmarks: dict[str, ModuleType]) -> None:
    data = benchmarks["data.fashion_mnist"]
    if not data.is_there():
        pytest.skip(f"Fashion-MNIST is not in build/data; {data.HOW}")
    images, labels = data.load()
    assert images.shape == (70_000, 784)
    assert np.bincount(labels).tolist() == [7000] * 10
