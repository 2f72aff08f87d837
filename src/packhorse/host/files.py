"""Files of packed tables (docs/format.md, section 14): tensors of a safetensors file, written and
read block by block of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse.arguments import resolve_threads
from packhorse.codecs.content import crc32c
from packhorse.codecs.tables import checksums, decode_header
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.gpu.host_memory import host_memory
from packhorse.host.table import PackedTable
from packhorse.host.table_state import TABLE_PARTS, header_bytes, make_table, small_parts
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.locations import open_place, writing
from packhorse.storage.safetensors_header import FileHeader, TensorEntry, build_header
from packhorse.storage.source import open_source
from packhorse.storage.source_file import Source
from packhorse.threads import in_order

if TYPE_CHECKING:
    import torch

    Progress = Callable[[int, int], object]

__all__ = ["load_table", "load_tables", "save_tables"]

_Bytes = NDArray[np.uint8]


def save_tables(
    tables: Mapping[str, PackedTable],
    path: str | PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Writes packed tables to a file, as they are: nothing is packed again but changed rows.

    The file is a safetensors file; each table is seven tensors of it. It appears under its name
    only when it is whole.

    Args:
        tables: packed tables by name. Nothing may update them meanwhile.
        path: the file, at a path or a URL that fsspec knows.
        metadata: pairs of strings for the file's header.
        force: whether an existing file may be replaced.
        progress: called with bytes of rows written, and bytes of all rows.
        storage_options: options for fsspec's file system.

    Raises:
        FileExistsError: there is such a file, and `force` is False.
        OSError: the file cannot be written.
        TypeError: `tables` is not a mapping of strings to packed tables.
        ValueError: a name cannot be that of a tensor, or a table has too many exceptions.

    Example:
        >>> import numpy as np
        >>> from packhorse.host import load_table, pack_table, save_tables
        >>> table = pack_table(np.zeros((1000, 64), np.float32))
        >>> save_tables({"features": table}, "features.safetensors")
        >>> load_table("features.safetensors").shape
        (1000, 64)
    """
    stored = {name: _Stored(name, table) for name, table in _checked(tables).items()}
    tensors = {
        f"{name}.{part}": kind
        for name, table in stored.items()
        for part, kind in table.tensors().items()
    }
    header = build_header(tensors, metadata)
    total = sum(table.arrays.rows.nbytes for table in stored.values())
    done = 0
    with writing(open_place(path, storage_options), force=force) as output:
        output.write(header.prefix())
        for entry in header.entries:
            name, _, part = entry.name.rpartition(".")
            if part != "rows":
                output.write(stored[name].part(part))
                continue
            for block in stored[name].blocks():
                output.write(block)
                done += block.nbytes
                if progress is not None:
                    progress(done, total)


def _checked(tables: Mapping[str, PackedTable]) -> Mapping[str, PackedTable]:
    if not isinstance(tables, Mapping):
        raise TypeError(f"tables must be a dict of names, not {type(tables).__name__}")
    for name, table in tables.items():
        if not isinstance(name, str):
            raise TypeError(f"a table's name must be a string, not {name!r}")
        if not isinstance(table, PackedTable):
            raise TypeError(f"table {name!r} must be a PackedTable, not {type(table).__name__}")
    return tables


class _Stored:
    """The tensors of a table, with changed rows in their places."""

    def __init__(self, name: str, table: PackedTable) -> None:
        table.memory.numpy()  # refuses in a fork
        self.format, self.dtype = table.way.format, table.dtype
        try:
            self.numbers, self.changed, self.arrays = table.settle()
        except ValueError as error:
            raise ValueError(f"table {name!r}: {error}") from error
        crcs = [crc32c(block.reshape(-1)) for block in self.blocks()]
        without = self.arrays._replace(rows=self.arrays.rows[:0])
        self.crcs = np.append(checksums(without, self.format), np.array(crcs, np.uint32))

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each tensor, by part."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "table": ("U8", (len(self.part("table")),)),
            "rows": ("U8", self.arrays.rows.shape),
        }
        for part, dtype in small_parts(self.format).items():
            nbytes = len(self.part(part))
            found[part] = (dtype, (nbytes * 8 // DTYPE_BY_NAME[dtype].bits,))
        return found

    def part(self, part: str) -> bytes:
        """The bytes of a tensor other than the rows."""
        if part == "table":
            return header_bytes(self.dtype, self.format, self.arrays)
        array = self.crcs if part == "crcs" else getattr(self.arrays, part)
        return bytes(array.tobytes())

    def blocks(self) -> Iterator[_Bytes]:
        """All rows, in blocks that share a checksum."""
        rows, step = self.arrays.rows, self.format.block_rows
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            first, stop = np.searchsorted(self.numbers, (start, start + len(block)))
            if first != stop:
                block = block.copy()
                block[self.numbers[first:stop] - start] = self.changed[first:stop]
            yield block


def load_tables(
    path: str | PathLike[str],
    *,
    device: torch.device | str | None = "cpu",
    shared: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, PackedTable]:
    """Reads all packed tables of a file into memory of the host. Other tensors are not read. Every
    checksum is checked.

    A name of which the file has two or more of a table's seven tensors is that of a table; if it
    lacks one of them, the file is damaged.

    Args:
        path: the file, at a path or a URL that fsspec knows.
        device: as for `pack_table`.
        shared: as for `pack_table`.
        threads: threads to use; None for one per core, at most 8.
        progress: called with bytes of rows read, and bytes of all rows.
        storage_options: options for fsspec's file system.

    Returns:
        The tables by name, in alphabetical order.

    Raises:
        CompatibilityError: a table is of a later version.
        CorruptionError: the file is damaged, or is not a safetensors file; the message names
            the table, and the tensor that is missing or the rows of a damaged block.
        MemoryError: the rows do not fit in memory.
        OSError: the file cannot be read, or it changed meanwhile.
    """
    place = open_place(path, storage_options)
    with open_source(place) as source:
        header = source.header()
        loader = _Loader(source, header, str(place), device, shared, resolve_threads(threads))
        return loader.load(loader.names(), progress)


def load_table(
    path: str | PathLike[str],
    name: str | None = None,
    *,
    device: torch.device | str | None = "cpu",
    shared: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PackedTable:
    """Reads one packed table of a file.

    Args:
        path: as for `load_tables`.
        name: the table's name; None for the only one.
        device: as for `pack_table`.
        shared: as for `pack_table`.
        threads: as for `load_tables`.
        progress: as for `load_tables`.
        storage_options: as for `load_tables`.

    Raises:
        CompatibilityError, CorruptionError, MemoryError, OSError: as for `load_tables`.
        KeyError: the file has no such table.
        ValueError: `name` is None, and the file has not just one table.
    """
    place = open_place(path, storage_options)
    with open_source(place) as source:
        header = source.header()
        loader = _Loader(source, header, str(place), device, shared, resolve_threads(threads))
        names = loader.names()
        if name is None:
            if len(names) != 1:
                raise ValueError(f"{place}: has {len(names)} tables; name one of {names}")
            name = names[0]
        if name not in names:
            raise KeyError(f"{place}: has no packed table {name!r}; it has {names}")
        return loader.load([name], progress)[name]


class _Loader:
    """Reads tables of an open file."""

    def __init__(
        self,
        source: Source,
        header: FileHeader,
        label: str,
        device: torch.device | str | None,
        shared: bool,
        threads: int,
    ) -> None:
        self._source, self._header, self._label = source, header, label
        self._device, self._shared, self._threads = device, shared, threads
        self._entries = {entry.name: entry for entry in header.entries}

    def names(self) -> list[str]:
        """The names of all tables, also of those that lack a tensor."""
        parts = (name.rpartition(".") for name in self._entries)
        counts = Counter(name for name, dot, part in parts if dot and part in TABLE_PARTS)
        return sorted(name for name, n in counts.items() if n > 1)

    def load(self, names: list[str], progress: Progress | None) -> dict[str, PackedTable]:
        """Reads tables."""
        rows = [self._entries.get(f"{name}.rows") for name in names]
        total = sum(entry.nbytes for entry in rows if entry is not None)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        return {name: self._load(name, advance) for name in names}

    def _load(self, name: str, advance: Callable[[int], object]) -> PackedTable:
        try:
            return self._read(name, advance)
        except PackhorseError as error:
            raise type(error)(f"{self._label}: table {name!r}: {error}") from error

    def _read(self, name: str, advance: Callable[[int], object]) -> PackedTable:
        entry = self._entry(name, "table", "U8")
        header = decode_header(bytes(self._source.map(*self._place_of(entry))))
        format = header.format
        small = {
            part: self._array(self._entry(name, part, dtype))
            for part, dtype in small_parts(format).items()
        }
        rows = self._entry(name, "rows", "U8")
        if rows.shape != (header.n_rows, format.stride):
            raise CorruptionError(
                f"rows have shape {list(rows.shape)}; its header says"
                f" {[header.n_rows, format.stride]}"
            )
        memory = host_memory(
            max(rows.nbytes, 1), device=self._device, shared=self._shared, threads=self._threads
        )
        held = memory.numpy()[: rows.nbytes].reshape(rows.shape)
        self._copy(rows, held, format.block_rows, advance)
        return make_table(header, held, small, memory)

    def _copy(
        self, entry: TensorEntry, dst: _Bytes, step: int, advance: Callable[[int], object]
    ) -> None:
        """Copies rows, some blocks at a time, by several threads."""
        start, _ = self._place_of(entry)
        stride = dst.shape[1]

        def copy(block: int) -> int:
            part = dst[block * step : (block + 1) * step]
            source = self._source.map(start + block * step * stride, part.nbytes)
            np.copyto(part.reshape(-1), np.frombuffer(source, np.uint8))
            return part.nbytes

        for nbytes in in_order(copy, -(-len(dst) // step), self._threads):
            advance(nbytes)

    def _entry(self, name: str, part: str, dtype: str) -> TensorEntry:
        entry = self._entries.get(f"{name}.{part}")
        if entry is None:
            raise CorruptionError(f"the file has no tensor {f'{name}.{part}'!r}")
        if entry.dtype != dtype:
            raise CorruptionError(f"tensor {entry.name!r} is {entry.dtype}; it must be {dtype}")
        return entry

    def _place_of(self, entry: TensorEntry) -> tuple[int, int]:
        return self._header.data_offset + entry.start, entry.nbytes

    def _array(self, entry: TensorEntry) -> NDArray[Any]:
        data = bytes(self._source.map(*self._place_of(entry)))
        nbytes = DTYPE_BY_NAME[entry.dtype].bits // 8
        return np.frombuffer(data, f"<u{nbytes}").reshape(entry.shape)
