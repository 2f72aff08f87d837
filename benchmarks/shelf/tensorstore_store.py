"""TensorStore with its zarr3 driver: a file for each chunk, or its own database OCDBT. It flushes
what it writes."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.shelf.store import Array, Layout, Store

__all__ = ["TensorStore"]


class TensorStore(Store):
    """An array that grows by rows, packed with zstd level 1."""

    def __init__(self, folder: Path, layout: Layout, *, ocdbt: bool = False) -> None:
        self._ts = import_module("tensorstore")
        self._layout, self._ocdbt = layout, ocdbt
        files = {"driver": "file", "path": f"{folder}/rows/"}
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": files} if ocdbt else files,
            "open": True,
            "context": {"cache_pool": {"total_bytes_limit": layout.cache_nbytes}},
            # Nobody else writes, so the cache need not ask the files.
            "recheck_cached_data": False,
        }
        if not (folder / "rows").exists():
            spec |= {"create": True, "metadata": _metadata(layout)}
        self._array = self._ts.open(spec).result()

    def append(self, rows: Array) -> None:
        n = self._array.shape[0]
        end = [n + len(rows), self._layout.width]
        self._array = self._array.resize(exclusive_max=end, expand_only=True).result()
        self._array[n:].write(rows).result()

    def blocks(self) -> Iterator[Array]:
        for start in range(0, self._array.shape[0], self._layout.block_rows):
            end = min(start + self._layout.block_rows, self._array.shape[0])
            yield self._array[start:end].read().result()

    def take(self, index: Array) -> Array:
        return self._array[index].read().result()

    def overwrite(self, index: Array, rows: Array) -> None:
        # Only OCDBT can commit several chunks at once.
        with self._ts.Transaction(atomic=self._ocdbt) as transaction:
            self._array.with_transaction(transaction)[index] = rows


def _metadata(layout: Layout) -> dict[str, Any]:
    chunks = {"chunk_shape": [layout.chunk_rows, layout.width]}
    return {
        "shape": [0, layout.width],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": chunks},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
        ],
    }
