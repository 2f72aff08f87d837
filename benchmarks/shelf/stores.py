"""All stores of the tables, in their order."""

from functools import partial

from benchmarks.shelf import lmdb_store, memmap_store
from benchmarks.shelf.blosc_store import BloscStore
from benchmarks.shelf.hdf5_store import Hdf5Store
from benchmarks.shelf.own_store import PackhorseStore
from benchmarks.shelf.store import Entry
from benchmarks.shelf.tensorstore_store import TensorStore
from benchmarks.shelf.zarr_store import ZarrStore

__all__ = ["COLUMNS", "MEMMAP", "OURS", "SMALL_CACHE_NBYTES", "SOME", "STORES"]

OURS, MEMMAP, COLUMNS = "packhorse", "memmap (K, n)", "memmap (n, K)"
SMALL_CACHE_NBYTES = 16 << 20
_FLUSHED = "the files are flushed by the benchmark, within the time"
# A column that is written rewrites the whole file. The stores with `SOME` would together need more
# disk than there is for all rows of a full run; ours and the memmap of rows get them all.
FEW, SOME = 3, 200

STORES: dict[str, Entry] = {
    OURS: Entry(
        PackhorseStore,
        '`Shelf`; long rows with `base="previous"`, others as `create` makes them',
    ),
    "packhorse-plain": Entry(
        partial(PackhorseStore, differences=False), "the same without a base", ("rows",), SOME
    ),
    "packhorse-small": Entry(
        partial(PackhorseStore, cache_nbytes=SMALL_CACHE_NBYTES),
        f"the same with a cache of {SMALL_CACHE_NBYTES >> 20} MiB for decoded chunks",
        ("table",),
    ),
    MEMMAP: Entry(memmap_store.Rows, "`numpy.memmap`, a row of the file for each; `flush()`"),
    COLUMNS: Entry(
        memmap_store.Columns,
        "`numpy.memmap` as the paper has it, a column of the file for each row; `flush()`",
        ("rows",),
        FEW,
    ),
    "lmdb-row": Entry(lmdb_store.Rows, "LMDB, a row of plain bytes under each key"),
    "lmdb-chunk": Entry(
        lmdb_store.Chunks,
        "LMDB, plain bytes: a chunk of short rows, or 512 KiB of a long one, under each key",
        max_rows=SOME,
    ),
    "lmdb-xor": Entry(
        lmdb_store.Differences,
        "what a user could write: LMDB, the XOR with every 16th row packed by Blosc2 with byte "
        "shuffle and zstd level 1",
        ("rows",),
        SOME,
    ),
    "zarr": Entry(
        ZarrStore, f"zarr v3, `create_array` with its own choice of zstd; {_FLUSHED}", max_rows=SOME
    ),
    "blosc2": Entry(
        BloscStore,
        f"Blosc2's NDArray in one file, byte shuffle and zstd level 1; {_FLUSHED}",
        max_rows=SOME,
    ),
    "tensorstore": Entry(
        TensorStore,
        "TensorStore, `zarr3` with zstd level 1, a file for each chunk; it flushes them",
        max_rows=SOME,
    ),
    "tensorstore-ocdbt": Entry(
        partial(TensorStore, ocdbt=True), "the same in its database OCDBT", max_rows=SOME
    ),
    "h5py": Entry(
        Hdf5Store,
        "HDF5 data set with byte shuffle and lzf, `flush()` and `fsync`",
        max_rows=SOME,
    ),
}
