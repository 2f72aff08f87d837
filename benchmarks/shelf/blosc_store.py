"""Blosc2's NDArray in one file. It does not flush the file, so that is done here, within the
time."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from benchmarks.common.files import flush
from benchmarks.shelf.store import Array, Layout, Store

__all__ = ["BloscStore"]


class BloscStore(Store):
    """An array that grows by rows, with byte shuffle and zstd level 1."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        blosc = import_module("blosc2")
        self._path, self._layout = folder / "rows.b2nd", layout
        if self._path.exists():
            self._array = blosc.open(str(self._path), mode="a")
            return
        self._array = blosc.zeros(
            (0, layout.width),
            dtype="f4",
            chunks=(layout.chunk_rows, layout.width),
            urlpath=str(self._path),
            mode="w",
            contiguous=True,
            cparams={"codec": blosc.Codec.ZSTD, "clevel": 1},
        )

    def append(self, rows: Array) -> None:
        n = self._array.shape[0]
        self._array.resize((n + len(rows), self._layout.width))
        self._array[n : n + len(rows)] = rows
        flush([self._path])

    def blocks(self) -> Iterator[Array]:
        for start in range(0, self._array.shape[0], self._layout.block_rows):
            yield self._array[start : start + self._layout.block_rows]

    def take(self, index: Array) -> Array:
        return self._array[index]

    def overwrite(self, index: Array, rows: Array) -> None:
        self._array[index] = rows
        flush([self._path])
