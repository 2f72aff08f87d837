"""Every dtype of the format, bit for bit, through all that reads and writes, in NumPy and PyTorch.

An array in memory goes through the same steps. Random bits are written, so there are NaNs with
payloads, signed zeros and subnormal numbers.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfTensor
from packhorse.errors import CompatibilityError
from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME, DTYPES

NAMES = [dtype.name for dtype in DTYPES]
# Long rows have several chunks of 512 KiB; the sizes of rows are odd.
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0), (0, 5), (1,), (7,), (5, 13), (999, 11)]
SHAPES += [(4, 3, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf") / "data.shelf"


@pytest.fixture(scope="module")
def shelf(folder: Path) -> Iterator[Shelf]:
    with Shelf(folder) as opened:
        yield opened


def noise(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits."""
    bits = DTYPE_BY_NAME[dtype].bits
    empty = resolve_framework("np").empty(dtype, (0,))
    n = int(np.prod(shape)) * empty.itemsize
    top = 2 if dtype == "BOOL" else 1 << min(8, bits)
    data = np.random.default_rng(seed).integers(0, top, n, np.uint8)
    return data.view(empty.dtype).reshape(shape)


def bits_of(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    assert isinstance(array, np.ndarray | np.generic)
    return array.dtype.name, array.shape, array.tobytes()


@pytest.mark.parametrize("dtype", NAMES)
def test_a_whole_tensor_comes_back(shelf: Shelf, dtype: str) -> None:
    with shelf.transaction():
        for shape in SHAPES:
            shelf[f"{dtype} {shape}"] = noise(dtype, shape)
    for shape in SHAPES:
        x, array = shelf[f"{dtype} {shape}"], noise(dtype, shape)
        assert (x.dtype, x.shape, x.ndim, x.size) == (array.dtype, shape, array.ndim, array.size)
        assert x.nbytes == array.nbytes
        assert bits_of(x.numpy()) == bits_of(array)
        assert bits_of(np.asarray(x)) == bits_of(array)
        assert bits_of(x[...]) == bits_of(array)
        if shape:
            assert len(x) == len(array)
            assert [bits_of(row) for row in x] == [bits_of(row) for row in array]


class Twice:
    """A tensor and the same in memory; each step is done to both."""

    def __init__(self, tensor: ShelfTensor, array: np.ndarray) -> None:
        self.tensor, self.array = tensor, array

    def check(self, *indices: Any) -> None:
        assert self.tensor.shape == self.array.shape
        for index in indices or (...,):
            assert bits_of(self.tensor[index]) == bits_of(self.array[index]), index

    def set(self, index: Any, value: Any) -> None:
        self.tensor[index] = value
        self.array[index] = value

    def append(self, rows: np.ndarray) -> None:
        self.tensor.append(rows)
        self.array = np.concatenate([self.array, rows.reshape(-1, *self.array.shape[1:])])

    def resize(self, n_rows: int) -> None:
        self.tensor.resize(n_rows)
        n_new = max(0, n_rows - len(self.array))
        more = np.zeros((n_new, *self.array.shape[1:]), self.array.dtype)
        self.array = np.concatenate([self.array[:n_rows], more])


@pytest.mark.parametrize("base", [None, "previous"])
@pytest.mark.parametrize("dtype", NAMES)
def test_rows_of_an_odd_length(folder: Path, shelf: Shelf, dtype: str, base: str | None) -> None:
    width, n_rows = 37, 70 if base else 700
    x = shelf.create(
        "odd", (0, width), dtype, base=base, keyframe_every=4, chunk_nbytes=4096, replace=True
    )
    twice = Twice(x, noise(dtype, (0, width)))
    for seed, n in enumerate([1, 0, 3, n_rows, 2]):
        twice.append(noise(dtype, (n, width), seed))
    twice.append(noise(dtype, (width,)))
    twice.check(..., 0, -1, slice(2, 9), [5, 3, 3], (slice(None), slice(3, 8)), (-1, 36))
    with shelf.transaction():
        twice.set(1, noise(dtype, (width,), 7))
        twice.set((slice(0, 50, 3), slice(5, 6)), noise(dtype, (17, 1), 8))
        twice.set([9, 2, 60], noise(dtype, (3, width), 9))
        twice.check()
    twice.set((slice(None), -1), noise(dtype, (1,), 10)[0])
    for n in (len(twice.array) - 3, 61, 64, 3, 40, 0, 2):
        twice.resize(n)
        twice.check()
    twice.append(noise(dtype, (5, width), 11))
    with Shelf(folder, "r") as other:
        assert bits_of(other["odd"].numpy()) == bits_of(twice.array)


@pytest.mark.parametrize("dtype", NAMES)
def test_rows_of_several_chunks(shelf: Shelf, dtype: str) -> None:
    width = (1 << 19) * 8 // DTYPE_BY_NAME[dtype].bits + 4099
    x = shelf.create("long", (0, width), dtype, replace=True)
    assert x.chunks[0] == 1
    assert x.chunks[1] < width
    twice = Twice(x, noise(dtype, (0, width)))
    rows = np.zeros((2, width), twice.array.dtype)
    rows[:, ::1000] = noise(dtype, (2, len(rows[0, ::1000])))
    with shelf.transaction():
        twice.append(rows)
        twice.append(rows[0])
        middle = x.chunks[1]
        twice.set((1, slice(middle - 5, middle + 4)), noise(dtype, (9,), 1))
        twice.set(([0, 2], slice(-3, None)), noise(dtype, (2, 3), 2))
        twice.check()
    twice.check(..., 1, (slice(None), slice(middle - 9, middle + 9)), (2, -1))
    twice.resize(1)
    twice.resize(2)
    twice.check()


@pytest.mark.parametrize("dtype", NAMES)
def test_pytorch(shelf: Shelf, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    framework = resolve_framework("pt")
    array = noise(dtype, (40, 8))
    shelf["pt"] = array
    pt = shelf["pt"].as_framework("pt")
    try:
        framework.check_form(dtype, (40, 8))
    except CompatibilityError as error:
        with pytest.raises(CompatibilityError, match=re.escape(str(error))):
            pt.torch()
        return
    if DTYPE_BY_NAME[dtype].bits == 4:  # a tensor holds pairs of elements
        with pytest.raises(CompatibilityError, match=r"the last dimension of .* must be even"):
            pt[:, :3]
    tensor = pt.torch()
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == pt.dtype
    assert tensor.numel() * tensor.itemsize == array.size * DTYPE_BY_NAME[dtype].bits // 8
    shelf["again"] = tensor
    assert bits_of(shelf["again"].numpy()) == bits_of(array)
    shelf["again"][:20] = tensor[20:]
    shelf["again"].append(tensor)
    shelf["again"].append(tensor[3])
    expected = np.concatenate([array[20:], array[20:], array, array[3:4]])
    assert bits_of(shelf["again"].numpy()) == bits_of(expected)
    assert bits_of(shelf["again"][5:7]) == bits_of(expected[5:7])
    part = pt[3:6]
    assert part.dtype == tensor.dtype
    assert torch.equal(part.view(torch.uint8), tensor[3:6].view(torch.uint8))


def test_all_are_whole(shelf: Shelf) -> None:
    for name in NAMES:  # other tests may have run in another process
        shelf[f"{name} (5, 13)"] = noise(name, (5, 13))
    assert shelf.verify() == []
    shelf.compact()
    for name in NAMES:
        assert bits_of(shelf[f"{name} (5, 13)"][...]) == bits_of(noise(name, (5, 13)))
