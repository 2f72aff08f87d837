"""h5py: a chunked data set with byte shuffle and lzf, its fastest filters of its own."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.shelf.store import Array, Layout, Store, by_chunk

__all__ = ["Hdf5Store"]


class Hdf5Store(Store):
    """A data set that grows by rows. HDF5 selects scattered rows slowly, so whole chunks are read,
    and rows are written one by one."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        path = folder / "rows.h5"
        new = not path.exists()
        self._file = import_module("h5py").File(path, "a", rdcc_nbytes=layout.cache_nbytes)
        if new:
            self._file.create_dataset(
                "rows",
                shape=(0, layout.width),
                maxshape=(None, layout.width),
                chunks=(layout.chunk_rows, layout.width),
                dtype="f4",
                shuffle=True,
                compression="lzf",
            )
        self._rows = self._file["rows"]

    def append(self, rows: Array) -> None:
        n = len(self._rows)
        self._rows.resize(n + len(rows), 0)
        self._rows[n:] = rows
        self._flush()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.id.get_vfd_handle())

    def blocks(self) -> Iterator[Array]:
        for start in range(0, len(self._rows), self._layout.block_rows):
            yield self._rows[start : start + self._layout.block_rows]

    def take(self, index: Array) -> Array:
        out = np.empty((len(index), self._layout.width), np.float32)
        n = self._layout.chunk_rows
        for chunk, places, inside in by_chunk(index, n):
            out[places] = self._rows[chunk * n : (chunk + 1) * n][inside]
        return out

    def overwrite(self, index: Array, rows: Array) -> None:
        for i, row in zip(index.tolist(), rows, strict=True):
            self._rows[i] = row
        self._flush()

    def close(self) -> None:
        self._file.close()
