"""packhorse.disk.Shelf."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.shelf.store import BLOCK_NBYTES, Array, Layout, Store

__all__ = ["PackhorseStore"]


class PackhorseStore(Store):
    """A tensor of a shelf that grows by rows."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        cache_nbytes: int | None = None,
        differences: bool = True,
    ) -> None:
        """Args:
        folder: of the shelf.
        layout: of the rows.
        cache_nbytes: memory for decoded chunks, if not that of the layout.
        differences: whether long rows are coded against the keyframe before them.
        """
        from packhorse.disk import Shelf

        cache = layout.cache_nbytes if cache_nbytes is None else cache_nbytes
        self._shelf = Shelf(folder, cache_nbytes=cache)
        if "rows" in self._shelf:
            self._rows = self._shelf["rows"]
            return
        base = "previous" if differences and layout.chunk_rows == 1 else None
        self._rows = self._shelf.create("rows", (0, layout.width), "float32", base=base)

    def append(self, rows: Array) -> None:
        self._rows.append(rows)

    def blocks(self) -> Iterator[Array]:
        yield from self._rows.iter_chunks(nbytes=BLOCK_NBYTES)

    def take(self, index: Array) -> Array:
        return self._rows[index]

    def overwrite(self, index: Array, rows: Array) -> None:
        with self._shelf.transaction():
            self._rows[index] = rows

    def close(self) -> None:
        self._shelf.close()
