"""`ShelfTensor`: a tensor of a shelf, which reads and writes like an array."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from packhorse.arguments import resolve_threads
from packhorse.disk.shelf.arrays import Array, dtype_of
from packhorse.disk.shelf.blocks import read_blocks
from packhorse.disk.shelf.cache import Cache
from packhorse.disk.shelf.changes import Changes
from packhorse.disk.shelf.committed import Settings
from packhorse.disk.shelf.elements import (
    blocks_of,
    read_all,
    read_index,
    shrink,
    write_index,
    write_rows,
)
from packhorse.disk.shelf.records import TensorRecord
from packhorse.disk.shelf.session import Session
from packhorse.disk.shelf.store import Folder
from packhorse.disk.shelf.values import (
    as_array,
    as_operand,
    check_kind,
    check_size,
    run_nbytes,
    to_framework,
    whole_number,
)
from packhorse.disk.shelf.versions import Known
from packhorse.framework import Framework, resolve_framework
from packhorse.layout import Level

__all__ = ["ShelfTensor"]

_BLOCK_NBYTES = 1 << 24
_CACHE_NBYTES, _TIMEOUT_S = 1 << 28, 60.0  # of a shelf that a pickled tensor opens


class ShelfTensor:
    """A tensor that lies on a shelf.

    It reads nothing until it is indexed, and holds no elements. It stands for whatever tensor has
    its name when it is used.

    Indexing is NumPy's, and so are the errors. What is read is always a copy. Each statement that
    writes is one durable commit, unless it is inside `Shelf.transaction`.

    Attributes:
        name: its name on the shelf.
        tag: the tag whose state it shows; None for the newest state.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from packhorse.disk import Shelf
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Shelf(f"{folder.name}/data.shelf") as shelf:
        ...     x = shelf.create("x", (0, 3), "float32")
        ...     x.append(np.ones((4, 3)))
        ...     x[[0, 2]] *= 5
        ...     x[:, 0].tolist()
        [5.0, 1.0, 5.0, 1.0]
    """

    def __init__(self, session: Session, name: str, framework: Framework, tag: str | None) -> None:
        """Private: use `shelf[name]`."""
        self._session, self._framework = session, framework
        self.name, self.tag = name, tag

    def _record(self) -> TensorRecord:
        return self._session.record(self.name, self.tag)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._record().shape

    @property
    def dtype(self) -> Any:
        """Its dtype, of NumPy (also of ml_dtypes) or of PyTorch, as the shelf was opened."""
        name = self._record().dtype
        if self._framework.name == "np":
            return dtype_of(name)
        return self._framework.empty(name, (0,)).dtype

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of a chunk."""
        return self._record().chunk

    @property
    def nbytes(self) -> int:
        """The bytes of its elements in memory."""
        record = self._record()
        return math.prod(record.shape) * dtype_of(record.dtype).itemsize

    @property
    def packed_nbytes(self) -> int:
        """The bytes that its chunks take on the shelf, as of the last commit."""
        return self._record().packed_nbytes

    @property
    def ratio(self) -> float:
        """`nbytes` divided by `packed_nbytes`; 1 if nothing is stored."""
        packed = self.packed_nbytes
        return self.nbytes / packed if packed else 1.0

    def __len__(self) -> int:
        """The size of the first axis."""
        shape = self.shape
        if not shape:
            raise TypeError("len() of unsized object")
        return shape[0]

    def __repr__(self) -> str:
        tag = "" if self.tag is None else f", tag={self.tag!r}"
        try:
            record = self._record()
        except (KeyError, ValueError, TypeError):
            return f"ShelfTensor({self.name!r}{tag}, not there)"
        return f"ShelfTensor({self.name!r}, {record.dtype}, {record.shape}{tag})"

    # Reading.

    def __getitem__(self, index: Any) -> Any:
        """What an index selects, as a new array or tensor; a number for a single element of NumPy.

        Args:
            index: integers, slices, `...`, arrays or lists of integers, masks, None: as for
                `numpy.ndarray`. Rows on the first axis are read alone; so is a run of elements of
                each row. Lists and masks on other axes read whole rows.

        Raises:
            IndexError: NumPy's own, for an index that does not fit.
            CorruptionError: a chunk is damaged; the message names it.
        """
        with self._session.tensor(self.name, self.tag) as (record, chunks):
            found = read_index(record, chunks, _plain_index(index))
        return to_framework(found, record.dtype, self._framework)

    def __iter__(self) -> Iterator[Any]:
        """Its rows, one after the other."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        for block in self.iter_chunks():
            yield from block

    def iter_chunks(self, nbytes: int | None = None) -> Iterator[Any]:
        """Runs of whole rows, in order; the next run is read while one is used.

        All runs are of the state at the first one: what is written meanwhile is not seen, except
        inside a transaction.

        Args:
            nbytes: about how many bytes a run has; None for 16 MiB, or less with a small cache. A
                run has at least one row.

        Yields:
            New arrays or tensors of shape (rows, *shape[1:]).

        Raises:
            TypeError: the tensor has no axes, or `nbytes` is no integer.
            CorruptionError: a chunk is damaged; the message names it.
        """
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        limit = min(_BLOCK_NBYTES, max(1 << 20, self._session.settings.cache.max_nbytes // 4))
        blocks = read_blocks(self._session, self.name, self.tag, run_nbytes(nbytes, limit))
        for dtype, block in blocks:
            yield to_framework(block, dtype, self._framework)

    def numpy(self) -> Array:
        """All elements, as a new NumPy array."""
        with self._session.tensor(self.name, self.tag) as (record, chunks):
            return read_all(record, chunks)

    def torch(self) -> Any:
        """All elements, as a new PyTorch tensor.

        Raises:
            MissingBackendError: PyTorch is not installed.
            CompatibilityError: PyTorch has no such dtype.
        """
        framework = resolve_framework("pt")
        with self._session.tensor(self.name, self.tag) as (record, chunks):
            return to_framework(read_all(record, chunks), record.dtype, framework)

    def as_framework(self, framework: str) -> ShelfTensor:
        """The same tensor, read as arrays or tensors of another framework.

        Args:
            framework: "np" or "pt".

        Returns:
            Another handle; nothing is read.

        Raises:
            ValueError: there is no such framework.
            MissingBackendError: it is not installed.
        """
        return ShelfTensor(self._session, self.name, resolve_framework(framework), self.tag)

    def reading(self) -> AbstractContextManager[None]:
        """Let all reads of this thread inside the block, of any tensor of the shelf, see one
        committed state, as `Shelf.reading` does.

        Returns:
            The block.
        """
        return self._session.folder.hold()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All elements, for `numpy.asarray`.

        Raises:
            ValueError: `copy` is False; the elements are packed, so reading them makes new memory.
        """
        if copy is False:
            raise ValueError("a tensor of a shelf is packed, so an array of it is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    # Writing.

    def _check_no_tag(self) -> None:
        if self.tag is not None:
            raise PermissionError(
                f"{self._session.path}: tag {self.tag!r} cannot be changed; write to the shelf "
                f"itself, or go back with rollback({self.tag!r})"
            )

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write what an index selects, in one commit.

        Args:
            index: as for reading. If it names a row twice, the last value stays.
            value: an array, a tensor or a number; it is broadcast and converted as NumPy does.

        Raises:
            IndexError, ValueError, TypeError: NumPy's own, for what does not fit; nothing is
                written.
            PermissionError: the shelf is open for reading only, or this is the state of a tag.
            OSError: the disk is full, or failed; nothing is written.
        """
        self._check_no_tag()
        index = _plain_index(index)
        with self._session.transaction() as changes:
            record = self._session.record(self.name, None)
            write_index(record, changes, index, as_array(value, record.dtype))
            self._settle(changes, record)

    def _settle(self, changes: Changes, record: TensorRecord) -> None:
        changes.put(self.name, record)
        changes.settle()

    def append(self, rows: Any) -> None:
        """Add rows at the end, in one commit.

        Args:
            rows: of shape (n, *shape[1:]), or shape[1:] for one row.

        Raises:
            ValueError: the shape does not fit, or the tensor has no axes.
            TypeError: the elements cannot become of this dtype without a change of kind, such as
                floats to integers.
            PermissionError, OSError: as for `__setitem__`.
        """
        self._check_no_tag()
        with self._session.transaction() as changes:
            record = self._session.record(self.name, None)
            block = self._rows_of(record, rows)
            n_rows = record.shape[0]
            if not len(block):
                return
            check_size(record.dtype, (n_rows + len(block), *record.shape[1:]))
            grown = record.with_rows(n_rows + len(block))
            changes.put(self.name, grown)
            block = block.reshape(len(block), -1) if block.size else np.empty((len(block), 0))
            places = range(n_rows, n_rows + len(block))
            write_rows(grown, changes, places, 0, block.shape[1], block)
            self._settle(changes, grown)

    def _rows_of(self, record: TensorRecord, rows: Any) -> Array:
        if not record.shape:
            raise ValueError(f"{self.name!r} has no axes; rows cannot be appended")
        check_kind(rows, record.dtype, self.name)
        block = as_array(rows, record.dtype)
        wanted = record.shape[1:]
        if block.shape == wanted:
            block = block[None]
        if block.ndim != len(record.shape) or block.shape[1:] != wanted:
            given = block.shape if block.ndim == len(wanted) else block.shape[1:]
            raise ValueError(
                f"{self.name!r} has rows of shape {wanted}; these have the shape {given}"
            )
        return block

    def resize(self, n_rows: int) -> None:
        """Set the size of the first axis, in one commit. New rows are zero; the rows that remain
        keep their content.

        Args:
            n_rows: the new size.

        Raises:
            TypeError: `n_rows` is no integer.
            ValueError: `n_rows` is negative or too large, or the tensor has no axes.
        """
        self._check_no_tag()
        n_rows = whole_number(n_rows, "n_rows")
        with self._session.transaction() as changes:
            record = self._session.record(self.name, None)
            if not record.shape:
                raise ValueError(f"{self.name!r} has no axes, and cannot be resized")
            if n_rows < 0:
                raise ValueError(f"{self.name!r} cannot have {n_rows} rows")
            if n_rows == record.shape[0]:
                return
            check_size(record.dtype, (n_rows, *record.shape[1:]))
            resized = record.with_rows(n_rows)
            if n_rows < record.shape[0]:
                shrink(record, resized, changes)
            self._settle(changes, resized)

    def apply(self, function: Callable[[Any], Any], nbytes: int | None = None) -> None:
        """Replace all elements, run of rows by run of rows, in one transaction.

        Args:
            function: takes a run of rows, which it may change, and returns what is written: as
                many elements of the same shape.
            nbytes: about how many bytes a run has; None for 16 MiB.

        Raises:
            ValueError: the function returned another shape; nothing is written then.
            Exception: what the function raised; nothing is written then.
        """
        self._check_no_tag()
        self._change(lambda block, _: function(block), run_nbytes(nbytes, _BLOCK_NBYTES))

    def _change(self, function: Callable[[Any, Any], Any], nbytes: int) -> None:
        """Replace all elements by those that a function of a block and its place returns."""
        with self._session.transaction() as changes:
            record = self._session.record(self.name, None)
            if not math.prod(record.shape):
                return
            for place in blocks_of(record, nbytes):
                block = read_index(record, changes, place)
                value = function(to_framework(block, record.dtype, self._framework), place)
                shape = tuple(getattr(value, "shape", ()))
                if shape != block.shape:
                    raise ValueError(
                        f"{self.name!r}: the function returned the shape {shape} for a block of "
                        f"shape {block.shape}"
                    )
                now = self._session.record(self.name, None)
                if (now.id, now.shape) != (record.id, record.shape):
                    raise RuntimeError(f"{self.name!r}: the function has resized or replaced it")
                array = as_array(value, record.dtype)
                changes.put(self.name, record)
                write_index(record, changes, place, array)
                changes.settle()

    def _in_place(self, operation: Callable[[Any, Any], Any], other: Any) -> Self:
        """An operator that changes all elements, run by run."""
        self._check_no_tag()
        framework = self._framework
        with self._session.transaction():
            record = self._session.record(self.name, None)
            other = _operand(self.name, record.shape, other)
            has_places = isinstance(other, ShelfTensor) or np.ndim(other) > 0

            def change(block: Any, place: Any) -> Any:
                piece = other[place] if has_places else other
                return operation(block, as_operand(piece, framework))

            if not math.prod(record.shape):  # only errors can come of it
                empty = np.empty(record.shape, dtype_of(record.dtype))
                change(to_framework(empty, record.dtype, framework), ...)
            self._change(change, _BLOCK_NBYTES)
        return self

    def __iadd__(self, other: Any) -> Self:
        """Add, in place and in one transaction, as `numpy.ndarray` does."""
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Self:
        """Subtract, as for `+=`."""
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Self:
        """Multiply, as for `+=`."""
        return self._in_place(operator.imul, other)

    def __imatmul__(self, other: Any) -> Self:
        """Multiply by a square matrix from the right, as for `+=`.

        Raises:
            ValueError: the tensor has less than two axes, or the matrix is not as wide and as high
                as the last axis.
        """
        self._check_no_tag()
        matrix = other[...] if isinstance(other, ShelfTensor) else other
        with self._session.transaction():
            shape = self.shape
            if len(shape) < 2 or tuple(np.shape(matrix)) != shape[-1:] * 2:
                raise ValueError(
                    f"{self.name!r} of shape {shape} cannot be multiplied in place by the shape "
                    f"{tuple(np.shape(matrix))}; it needs a square matrix for its last axis"
                )
            matrix = as_operand(matrix, self._framework)
            row_nbytes = self.nbytes // max(1, shape[0])  # blocks are never parts of a row

            def multiply(block: Any, _: Any) -> Any:
                block @= matrix
                return block

            self._change(multiply, max(_BLOCK_NBYTES, row_nbytes))
        return self

    def __itruediv__(self, other: Any) -> Self:
        """Divide, as for `+=`."""
        return self._in_place(operator.itruediv, other)

    def __ifloordiv__(self, other: Any) -> Self:
        """Divide to integers, as for `+=`."""
        return self._in_place(operator.ifloordiv, other)

    def __imod__(self, other: Any) -> Self:
        """Take the remainder, as for `+=`."""
        return self._in_place(operator.imod, other)

    def __ipow__(self, other: Any) -> Self:
        """Raise to a power, as for `+=`."""
        return self._in_place(operator.ipow, other)

    def __iand__(self, other: Any) -> Self:
        """And of bits, as for `+=`."""
        return self._in_place(operator.iand, other)

    def __ior__(self, other: Any) -> Self:
        """Or of bits, as for `+=`."""
        return self._in_place(operator.ior, other)

    def __ixor__(self, other: Any) -> Self:
        """Exclusive or of bits, as for `+=`."""
        return self._in_place(operator.ixor, other)

    def __ilshift__(self, other: Any) -> Self:
        """Shift bits to the left, as for `+=`."""
        return self._in_place(operator.ilshift, other)

    def __irshift__(self, other: Any) -> Self:
        """Shift bits to the right, as for `+=`."""
        return self._in_place(operator.irshift, other)

    def _is_same(self, other: object) -> bool:
        """Whether another handle is of the same tensor of the same open shelf."""
        return isinstance(other, ShelfTensor) and (other._session, other.name, other.tag) == (
            self._session,
            self.name,
            self.tag,
        )

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """Dask takes arrays of the same token for equal, so it changes with every commit."""
        session, changes = self._session, None if self.tag else self._session.seen()
        with session.state(self.tag) as state:
            place = state.head.n_commits if self.tag is None else state.epoch
        writes = 0 if changes is None else changes.n_writes
        return str(session.path.absolute()), self.name, self.tag, place, writes

    def __copy__(self) -> ShelfTensor:
        """Another handle of the same tensor; without this, one of a shelf opened for reading."""
        return ShelfTensor(self._session, self.name, self._framework, self.tag)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShelfTensor:
        """As `copy.copy`: a handle holds no elements."""
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: it opens the shelf for reading there."""
        path = str(self._session.path.absolute())
        return _reopened, (path, self.name, self._framework.name, self.tag)


_sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()


def _reopened(path: str, name: str, framework: str, tag: str | None) -> ShelfTensor:
    """A tensor that was pickled. All tensors of a shelf in this process share one session."""
    session = _sessions.get(path)
    if session is None or session.folder.is_closed:
        settings = Settings(Cache(_CACHE_NBYTES), Known(), resolve_threads(None), Level.DEFAULT)
        folder = Folder(Path(path), writes=False, timeout=_TIMEOUT_S)
        session = _sessions[path] = Session(folder, settings)
    return ShelfTensor(session, name, resolve_framework(framework), tag)


def _is_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _operand(name: str, shape: tuple[int, ...], other: Any) -> Any:
    """The other operand of an operator in place, of the shape of the tensor, or a number."""
    if isinstance(other, ShelfTensor):
        if other.shape == shape:
            return other
        other = other[...]
    if not np.ndim(other) and not hasattr(other, "shape"):
        return other
    if not _is_torch(other):
        other = np.asarray(other)
    given = tuple(other.shape)
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(size not in (1, target) for size, target in pairs):
        raise ValueError(f"{name!r} of shape {shape} cannot take the shape {given}")
    return other.broadcast_to(shape) if _is_torch(other) else np.broadcast_to(other, shape)


def _plain_index(index: Any) -> Any:
    """An index without tensors of PyTorch and of shelves, which NumPy does not know."""
    if isinstance(index, tuple):
        return tuple(_plain_index(item) for item in index)
    return np.asarray(index) if _is_torch(index) or isinstance(index, ShelfTensor) else index
