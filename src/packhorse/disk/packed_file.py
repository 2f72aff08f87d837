"""Reading a packed file lazily, in the manner of `safetensors.safe_open`.

Opening checks both headers and maps the file. Of an object at a URL, only the bytes that a call
needs are read (`lazy_frames.py`). A tensor's frame is opened when the tensor is asked for. A slice
decodes only the chunks that it needs: the index is reduced to the smallest run of elements that
holds all selected ones (`slices.py`), that run is decoded, and the framework's own
indexing does the rest. So `f.get_slice(name)[i]` equals `f.get_tensor(name)[i]` for every index
that the framework understands.

Several threads may read from one `PackedFile` at once, because each value that it keeps is only
replaced as a whole. A pickled `PackedFile`, for example for a spawned worker of a data loader,
consists of the arguments that it was opened with and an identity of the file, because the file may
be replaced before it is opened again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from packhorse.arguments import resolve_threads
from packhorse.disk.base_files import BaseLike, Bases, open_bases, place_base
from packhorse.disk.frame_table import FrameTable
from packhorse.disk.lazy_bytes import MappedBytes, RemoteBytes, open_bytes
from packhorse.disk.packed_header import is_packed, parse_packed_header
from packhorse.disk.plain_file import BACKENDS, PlainTable, check_backend
from packhorse.disk.slices import Box, cut_index
from packhorse.errors import ChangedError, ClosedError
from packhorse.frame import Frame
from packhorse.framework import Framework, resolve_framework
from packhorse.layout import DTYPE_BY_NAME
from packhorse.storage.locations import Place, open_place
from packhorse.storage.safetensors_header import (
    FileHeader,
    TensorEntry,
    parse_file_header,
    tensor_nbytes,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PackedFile", "PackedSlice", "load_tensors", "load_with_metadata"]


def load_tensors(
    data: Buffer,
    framework: Framework,
    *,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> dict[str, Any]:
    """Decode all tensors of a packed or plain file that is in memory.

    Args:
        data: the bytes of the file.
        framework: makes the tensors.
        threads: the number of threads; None for one per core, at most 8.
        max_nbytes: the most bytes that the tensors may take in total; None for no limit.
        base: what the file was packed against, if it has a base: a file, a folder, or tensors by
            name.

    Returns:
        The tensors by name, in the order of the original data.

    Raises:
        CorruptionError, CompatibilityError: the file is damaged or too new, or the tensors exceed
            the limit.
        BaseMismatchError: a tensor needs a base, and no base or another one was given.
    """
    return load_with_metadata(data, framework, threads=threads, max_nbytes=max_nbytes, base=base)[0]


def load_with_metadata(
    data: Buffer,
    framework: Framework,
    *,
    device: Any = None,
    threads: int | None = None,
    max_nbytes: int | None = None,
    base: BaseLike | None = None,
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """`load_tensors` to a device; also returns the pairs of the file's `__metadata__`, or None if
    it has none."""
    framework.check_device(device)
    view = memoryview(data).cast("B")
    label = "the bytes given"
    header = parse_file_header(view, label)
    content = MappedBytes(view, label)
    table: FrameTable | PlainTable
    with open_bases(base) as bases:
        if is_packed(header):
            table = _packed_table(
                header, content, label, framework, threads, max_nbytes, bases, device
            )
        else:
            table = PlainTable(header, content, label, framework, device, max_nbytes)
        return table.tensors(), table.original.metadata


def _packed_table(
    header: FileHeader, content: MappedBytes | RemoteBytes, label: str, *others: Any
) -> FrameTable:
    return FrameTable(parse_packed_header(header, label=label), content, label, *others)


class PackedFile:
    """A packed file, open for reading; `packhorse.open_file` returns one.

    A plain safetensors file can be read in the same way, so callers need not tell the two apart.

    Use it in a `with` statement, or call `close`. Tensors and frames stay valid after that.
    It can be pickled, and so can its slices: unpickling opens the file again by its path, so they
    can be passed to workers of a data loader, however these are started. If another file is there
    by then, unpickling raises ChangedError.

    Example:
        >>> import packhorse
        >>> with packhorse.open_file("model.ph.safetensors") as file:
        ...     for name in file:
        ...         print(name, file.entry(name).dtype, file.get_tensor(name).shape)
        bias F32 (512,)
        weight BF16 (512, 64)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        framework: Framework,
        *,
        device: Any = None,
        threads: int | None = None,
        max_nbytes: int | None = None,
        base: BaseLike | None = None,
        backend: str = BACKENDS[0],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a packed or plain file and check its headers.

        Args:
            path: the file, at a path or a URL of fsspec.
            framework: makes the tensors.
            device: where tensors are placed (PyTorch only); None for the CPU. A device with kernels
                receives whole tensors packed and decodes them.
            threads: the number of threads; None for one per core, at most 8.
            max_nbytes: the most bytes that one call may decode: a tensor, the rows that a slice
                needs, or all tensors in total; None for no limit. The base does not count.
            base: what the file was packed against, if it has a base: a file or a folder, which is
                closed with this object; or tensors by name.
            backend: how the safetensors library reads a plain file, "mmap" or "pread"; a packed
                file is always mapped, and a file at a URL read in ranges.
            storage_options: options for the file systems of all URLs of this call, as in fsspec.

        Raises:
            ValueError: an option is wrong, or there is no such device.
            CorruptionError, CompatibilityError: the file is damaged or too new.
            MissingBackendError: the file is plain, and the safetensors library is not installed.
            OSError: the file cannot be opened or read.
        """
        framework.check_device(device)
        check_backend(backend)
        place, base = open_place(path, storage_options), place_base(base, storage_options)
        header, content = open_bytes(place)
        self._arguments = (
            _findable(place), framework.name, device, threads, max_nbytes, backend, _findable(base)
        )  # fmt: skip
        self._stack = ExitStack()
        self._open: FrameTable | PlainTable | None = None
        try:
            bases = self._stack.enter_context(open_bases(base))
            if is_packed(header):
                self._open = _packed_table(
                    header, content, str(place), framework, threads, max_nbytes, bases, device
                )
            else:
                resolve_threads(threads)  # plain files need none, but the argument is checked
                self._open = PlainTable(
                    header, content, str(place), framework, device, max_nbytes,
                    path=str(place) if isinstance(place, Path) else None, backend=backend,
                )  # fmt: skip
        except BaseException:
            self._stack.close()
            raise

    @property
    def _table(self) -> FrameTable | PlainTable:
        if self._open is None:
            raise ClosedError("the file is closed")
        return self._open

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """The tensors' names in the order of their data."""
        return [entry.name for entry in self._table.original.entries]

    def metadata(self) -> dict[str, str] | None:
        """The pairs of the original file's `__metadata__`; None if it had none."""
        pairs = self._table.original.metadata
        return None if pairs is None else dict(pairs)

    @property
    def is_packed(self) -> bool:
        """Whether the file is packed; False for a plain safetensors file."""
        return isinstance(self._table, FrameTable)

    @property
    def base_name(self) -> str | None:
        """The recorded name of the base that the file was packed against, or None. It is only a
        hint: nothing checks it."""
        return self._table.base_name

    def entry(self, name: str) -> TensorEntry:
        """A tensor's dtype, shape and offsets in the original file; nothing is decoded.

        Args:
            name: one of `keys()`.

        Returns:
            The tensor's entry in the recorded header.

        Raises:
            ValueError: there is no such tensor.
        """
        return self._table.entry(name)

    def frame(self, name: str) -> Frame:
        """A tensor's frame, which refers to the mapped file. From a URL, the whole frame is read.

        Args:
            name: one of `keys()`.

        Returns:
            The frame, with its header checked.

        Raises:
            ValueError: there is no such tensor, or the file is plain and has no frames.
            CorruptionError, CompatibilityError: its header is bad.
        """
        return self._table.frame(name)

    def outlines(self) -> Iterator[tuple[str, Frame]]:
        """The names and frames of all tensors, in the order of their data, for looking at their
        headers: from a URL, only headers are read, and the payload of these frames is zeros.

        Yields:
            A name, and the frame, with its header checked.

        Raises:
            ValueError: the file is plain and has no frames.
            CorruptionError, CompatibilityError: the header of a frame is bad.
        """
        return self._table.outlines()

    def get_tensor(self, name: str) -> Any:
        """Decode a tensor.

        Args:
            name: one of `keys()`.

        Returns:
            A new tensor of the framework.

        Raises:
            ValueError: there is no such tensor.
            CorruptionError, CompatibilityError: its frame is bad, or it exceeds `max_nbytes`.
            BaseMismatchError: it needs a base, and no base or another one was given.
            ChangedError: its base was written to while it was used.
        """
        return self._table.tensor(name)

    def get_tensors(self) -> dict[str, Any]:
        """Decode all tensors, in the order of their data.

        Returns:
            New tensors by name.

        Raises:
            CorruptionError, CompatibilityError: a frame is bad, or the tensors exceed `max_nbytes`
                in total.
            BaseMismatchError, ChangedError: as for `get_tensor`.
        """
        return self._table.tensors()

    def get_slice(self, name: str) -> PackedSlice:
        """An object that decodes parts of a tensor, as in `get_slice(name)[128:256]`.

        Args:
            name: one of `keys()`.

        Returns:
            The slice object; nothing is decoded until it is indexed.

        Raises:
            ValueError: there is no such tensor.
        """
        return PackedSlice(self, self._table.entry(name))

    def close(self) -> None:
        """Release the file. Closing twice is harmless."""
        # Frames that callers still have keep the mapping; it ends with the last of them.
        self._open = None
        self._stack.close()

    def _take(self, entry: TensorEntry, box: Box) -> Any:
        table = self._table
        if box.is_all:
            return table.tensor(entry.name)[box.inner]
        start = box.start * DTYPE_BY_NAME[entry.dtype].bits // 8
        stop = start + tensor_nbytes(entry.dtype, box.shape)
        part = table.decode(entry.name, box.shape, start, stop)[box.inner]
        if box.is_view:  # a copy, so that the part does not keep the whole box in memory
            whole, part = part, table.framework.empty(entry.dtype, tuple(part.shape))
            part[...] = whole
        return table.place(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self._table.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._table.entries)

    def __reduce__(self) -> tuple[Callable[..., PackedFile], tuple[Any, ...]]:
        label, base = self._table.label, self._arguments[-1]
        if isinstance(base, Bases):
            raise TypeError(
                f"{label}: was opened with a base that is already open, which cannot be pickled; "
                "open the file with the path of the base instead"
            )
        return _reopen, (self._table.identity(), *self._arguments)

    def __repr__(self) -> str:
        if self._open is None:
            return "<PackedFile, closed>"
        return f"<PackedFile {self._open.label!r}, {len(self)} tensors>"


def _findable(place: Any) -> Any:
    """A path as an absolute path, so that it is found from another working folder; anything else
    as it is."""
    return os.path.abspath(place) if isinstance(place, Path) else place


def _reopen(
    identity: tuple[int, str],
    path: Place,
    framework: str,
    device: Any,
    threads: int | None,
    max_nbytes: int | None,
    backend: str,
    base: BaseLike | None,
) -> PackedFile:
    """Unpickle: open the file again, usually in another process."""
    file = PackedFile(
        path, resolve_framework(framework), device=device, threads=threads, max_nbytes=max_nbytes,
        backend=backend, base=base,
    )  # fmt: skip
    if file._table.identity() == identity:
        return file
    file.close()
    raise ChangedError(
        f"{path}: is not the file that was pickled: that file, of {identity[0]} bytes, has been "
        "replaced or written to since; open the new file, and pickle that"
    )


class PackedSlice:
    """A tensor of a packed file; indexing it decodes the needed part.

    Example:
        >>> import packhorse
        >>> with packhorse.open_file("model.ph.safetensors") as file:
        ...     weight = file.get_slice("weight")
        ...     print(weight.get_shape(), weight[:16, ::2].shape)
        [512, 64] (16, 32)
    """

    def __init__(self, file: PackedFile, entry: TensorEntry) -> None:
        self._file = file
        self._entry = entry

    def get_shape(self) -> list[int]:
        """The dimensions of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the dtype, such as "BF16"."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """Decode a part of the tensor.

        Args:
            index: any index of the framework's tensors. Integers, slices and `...` decode only the
                chunks of the rows that they select; any other index decodes the whole tensor.

        Returns:
            A new tensor, equal to `get_tensor(name)[index]`; never a bare scalar.

        Raises:
            IndexError, TypeError, ValueError: as the framework's own indexing.
            CorruptionError, CompatibilityError: the frame is bad.
            BaseMismatchError, ChangedError: as for `PackedFile.get_tensor`.
        """
        shape = self._entry.shape
        bits = DTYPE_BY_NAME[self._entry.dtype].bits
        # Frameworks store elements smaller than a byte in other shapes.
        box = cut_index(index, shape) if bits % 8 == 0 else Box(0, shape, index, is_view=False)
        return self._file._take(self._entry, box)
