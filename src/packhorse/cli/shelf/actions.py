"""The work of the verbs for shelves: each takes an open shelf and returns a row.

Nothing here draws, prints or exits.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from packhorse.cli.actions import Watch
from packhorse.cli.failures import UsageError
from packhorse.cli.rows import ratio
from packhorse.cli.shelf.rows import (
    CompactedShelf,
    ListedShelf,
    ListedTensor,
    ReaderRow,
    ShelfProblemRow,
    ShownState,
    ShownTensor,
    StateTensor,
    TagRow,
    VerifiedShelf,
)
from packhorse.cli.shelf.selection import beginning, parse_index
from packhorse.cli.shelf.statistics import describe_values, plain_values
from packhorse.disk import Shelf
from packhorse.disk.shelf.store import newest_file
from packhorse.disk.state import find_tensors, path_below

__all__ = ["check_path", "compact", "listed", "open_shelf", "show", "stepping", "verify", "view_of"]

# What the methods of a shelf call: with the bytes that are done, and those that there are.
_Steps: TypeAlias = Callable[[int, int], None]


def open_shelf(path: str, mode: str = "r", **options: Any) -> Shelf:
    """Open an existing shelf.

    Raises:
        FileNotFoundError: there is none.
    """
    check_path(path)
    if newest_file(Path(path)) is None:
        raise FileNotFoundError(f"{path}: there is no shelf here; check the path")
    return Shelf(path, mode, **options)


def check_path(path: str) -> None:
    """Check that a shelf's path is no URL.

    Raises:
        UsageError: it is one.
    """
    if "://" in path:
        raise UsageError(f"{path}: a shelf lies in a folder of a local disk, never at a URL")


def view_of(shelf: Shelf, tag: str | None) -> Any:
    """The shelf as it is, or as it was at a tag.

    Raises:
        UsageError: there is no such tag.
    """
    if tag is None:
        return shelf
    if tag not in shelf.tags():
        raise UsageError(f"there is no tag {tag!r}; `packhorse shelf list` shows all")
    return shelf.at(tag)


def listed(shelf: Shelf, url: str, tag: str | None) -> ListedShelf:
    """All tensors, states and tags."""
    info = shelf.info()
    there = view_of(shelf, tag).info() if tag is not None else info
    rows = [_tensor_row(tensor) for tensor in there.tensors]
    nbytes = sum(row.nbytes for row in rows)
    packed = sum(row.packed_nbytes for row in rows)
    return ListedShelf(
        url, tag, nbytes, packed, ratio(nbytes, packed), info.file_nbytes, info.free_nbytes,
        info.n_commits, rows, list(there.states),
        [TagRow(each.name, str(each.time), each.commit) for each in info.tags],
        [ReaderRow(each.pid, each.n_commits_behind) for each in info.readers],
    )  # fmt: skip


def _tensor_row(tensor: Any) -> ListedTensor:
    """The row of a `TensorInfo`."""
    return ListedTensor(
        tensor.name, tensor.dtype, tuple(tensor.shape), tuple(tensor.chunks), tensor.base,
        tensor.nbytes, tensor.packed_nbytes, ratio(tensor.nbytes, tensor.packed_nbytes),
    )  # fmt: skip


def show(
    shelf: Shelf,
    path: str,
    name: str,
    index: str | None,
    tag: str | None,
    *,
    stats: bool,
    watch: Watch,
) -> ShownTensor | ShownState:
    """One tensor with some of its values, or one state.

    Raises:
        UsageError: there is no such name, or the index is wrong.
    """
    items = () if index is None else parse_index(index)
    with shelf.reading():
        view = view_of(shelf, tag)
        if name not in view:
            raise UsageError(f"there is no tensor or state {name!r}; `list` shows all names")
        rows = [_tensor_row(tensor) for tensor in view.info().tensors if tensor.name == name]
        if not rows:
            return _state_row(path, tag, name, view.load(name))
        tensor = view[name]
        places, selected = beginning(items, tuple(tensor.shape))
        values = plain_values(np.asarray(tensor[places]))
        found = None
        if stats:
            with watch(f"read {name}", tensor.nbytes) as progress:
                found = describe_values(_blocks(tensor, progress))
    return ShownTensor(path, tag, rows[0], index, selected, values, found)


def _blocks(tensor: Any, progress: Callable[[int], None] | None) -> Iterator[Any]:
    """The values of a tensor, block by block."""
    for block in tensor.iter_chunks() if tensor.ndim else [tensor[()]]:
        values = np.asarray(block)
        yield values
        if progress is not None:
            progress(values.nbytes)


def _state_row(path: str, tag: str | None, name: str, state: Any) -> ShownState:
    tensors = [
        StateTensor(leaf.path, leaf.dtype, leaf.shape, leaf.tensor.nbytes)
        for leaf in find_tensors(state).values()
    ]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return ShownState(path, tag, name, nbytes, tensors, dict(_values_of(state, "")))


def _values_of(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """The values of a state that are not tensors, by their paths."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values_of(item, path_below(path, key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, str(value)
    elif value is None or isinstance(value, str | int | float):
        yield path, value


def verify(shelf: Shelf, path: str, watch: Watch) -> VerifiedShelf:
    """Check all checksums, of the present state and of all tags."""
    info = shelf.info()
    with stepping(watch, f"verify {path}", info.packed_nbytes) as progress:
        start = time.perf_counter()
        problems = shelf.verify(progress)
        seconds = time.perf_counter() - start
    return VerifiedShelf(
        path,
        not problems,
        info.n_tensors,
        len(info.tags),
        info.packed_nbytes,
        seconds,
        [ShelfProblemRow(p.name, p.tag, p.chunk, p.message) for p in problems],
    )


def compact(shelf: Shelf, path: str, watch: Watch, *, dry_run: bool) -> CompactedShelf:
    """Write the shelf anew without its free space."""
    info = shelf.info()
    if dry_run:
        return CompactedShelf(path, True, info.file_nbytes, info.free_nbytes, 0.0)
    with stepping(watch, f"compact {path}", info.file_nbytes) as progress:
        start = time.perf_counter()
        saved = shelf.compact(progress)
        seconds = time.perf_counter() - start
    return CompactedShelf(path, False, info.file_nbytes, saved, seconds)


@contextmanager
def stepping(watch: Watch, title: str, nbytes: int) -> Iterator[_Steps | None]:
    """A progress display for a method that tells what is done of how much: it moves in proportion,
    because the total that the method finds may differ from `nbytes`."""
    with watch(title, nbytes) as advance:
        if advance is None:
            yield None
            return
        shown = 0

        def step(done: int, total: int) -> None:
            nonlocal shown
            now = nbytes * done // total if total else nbytes
            advance(now - shown)
            shown = now

        yield step
