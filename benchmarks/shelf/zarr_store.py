"""zarr v3 in a folder. It does not flush its files, so that is done here, within the time."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.common.files import flush
from benchmarks.shelf.store import Array, Layout, Store

__all__ = ["ZarrStore"]


class ZarrStore(Store):
    """An array that grows by rows, with the codec that zarr takes if nothing is said."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        zarr = import_module("zarr")
        self._folder, self._layout = folder / "rows.zarr", layout
        if self._folder.exists():
            self._array = zarr.open_array(self._folder)
            return
        chunks = (layout.chunk_rows, layout.width)
        self._array = zarr.create_array(
            self._folder, shape=(0, layout.width), chunks=chunks, dtype="f4"
        )

    def append(self, rows: Array) -> None:
        n = self._array.shape[0]
        self._array.resize((n + len(rows), self._layout.width))
        self._array[n:] = rows
        flush([self._folder / "zarr.json", self._folder])
        self._flush_chunks(np.arange(n, n + len(rows)))

    def _flush_chunks(self, index: Array) -> None:
        folders = [self._folder / "c" / str(i) for i in np.unique(index // self._layout.chunk_rows)]
        flush([*(folder / "0" for folder in folders), *folders, self._folder / "c"])

    def blocks(self) -> Iterator[Array]:
        for start in range(0, self._array.shape[0], self._layout.block_rows):
            yield self._array[start : start + self._layout.block_rows]

    def take(self, index: Array) -> Array:
        return self._array.oindex[index]

    def overwrite(self, index: Array, rows: Array) -> None:
        self._array.oindex[index] = rows
        self._flush_chunks(index)
