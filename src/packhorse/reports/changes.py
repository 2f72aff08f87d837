"""What changed from one model to another, tensor by tensor.

Tensors of the same name are compared, and those that are left over are looked for under other
names. Samples tell how many values changed and how long the difference is. But no tensor is called
equal because its sample is: it is then compared byte by byte, until the first difference, unless
both sources have written its content hash beside it. Where only the sample is equal, the whole
tensor takes the place of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.disk.results import Progress
from packhorse.frame.base import allowed_casts
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.bits import packed_estimate
from packhorse.reports.movement import unchanged_share
from packhorse.reports.names import kind_of, layer_of
from packhorse.reports.results import ChangeRow, Changes, Estimate, Problem
from packhorse.reports.sampling import Places, Sample, choose_places, take_sample, whole_places
from packhorse.reports.sources import READ_ERRORS, Entry, Opened
from packhorse.threads import map_tensors

__all__ = ["compare_models"]

_LEVEL = "default"
_MARK_NBYTES = 1 << 10  # at the start, in the middle and at the end, which tell tensors apart
_Mark = TypeVar("_Mark")


def compare_models(
    base: Opened,
    tuned: Opened,
    *,
    share: float = 1.0,
    full: Mapping[str, Estimate] | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> tuple[Changes, list[Problem]]:
    """Compares two models. About one tensor of each is in memory for each thread, or less.

    Args:
        base: the first model.
        tuned: the second model.
        share: how much of each tensor to sample, as for `choose_places`; 1 for all of it.
        full: what tensors of the second model take if packed on their own, at the level "default",
            by name; those that are not there are packed here.
        threads: how many threads work on it.
        progress: called with the bytes of the second model that were handled since the last call.

    Returns:
        What changed, and what could not be read. Tensors that could not be read in one of the two
        models are not among what changed.
    """
    pair = _Pair(base, tuned, share, full or {})
    rows = pair.compare_all(threads, progress)
    moves = _find_moves(pair, rows, threads)
    rows = [_moved(row, moves[row.name]) if row.name in moves else row for row in rows]
    gone = [e for e in base.entries if not tuned.entry(e.name) and e.name not in moves.values()]
    rows += pair.describe_removed(gone, threads)
    return Changes(base.row.name, tuned.row.name, tuple(rows)), pair.problems


class _UnreadableError(Exception):
    """A tensor cannot be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@contextmanager
def _reading(opened: Opened, name: str) -> Iterator[None]:
    """Says which source has the tensor that cannot be read."""
    try:
        yield
    except READ_ERRORS as error:
        raise _UnreadableError(Problem(opened.row.name, name, str(error))) from error


@dataclass
class _Pair:
    """Two models that are compared."""

    base: Opened
    tuned: Opened
    share: float
    full: Mapping[str, Estimate]
    problems: list[Problem] = field(default_factory=list)

    def compare_all(self, threads: int, progress: Progress | None) -> list[ChangeRow]:
        """A row for each tensor of the second model that can be read, none of them moved."""
        entries = self.tuned.entries

        def one(i: int, n_threads: int) -> ChangeRow | None:
            try:
                return self._compare(entries[i], n_threads)
            except _UnreadableError as error:
                self.problems.append(error.problem)
                return None
            finally:
                if progress is not None:
                    progress(entries[i].nbytes)

        found = map_tensors(one, [self._read_nbytes(entry) for entry in entries], threads)
        return [row for row in found if row is not None]

    def describe_removed(self, entries: list[Entry], threads: int) -> list[ChangeRow]:
        """Rows for tensors that only the first model has."""

        def one(i: int, n_threads: int) -> ChangeRow | None:
            try:
                sample = self._sample(self.base, entries[i], self._places(entries[i]), n_threads)
            except _UnreadableError as error:
                self.problems.append(error.problem)
                return None
            full = packed_estimate(sample, _LEVEL)[0]
            return _row(entries[i], "removed", None, None, full, None)

        found = map_tensors(one, [self._read_nbytes(entry) for entry in entries], threads)
        return [row for row in found if row is not None]

    def are_equal(self, old: str, new: str, threads: int) -> bool:
        """Whether a tensor of each model have the same bytes; both have the same dtype and shape.

        Raises:
            _UnreadableError: one of them cannot be read.
        """
        hashes = self.hash_of(self.base, old), self.hash_of(self.tuned, new)
        if None not in hashes:
            return hashes[0] == hashes[1]
        blocks = (self._blocks(*each, threads) for each in ((self.base, old), (self.tuned, new)))
        return all(np.array_equal(*pair) for pair in zip(*blocks, strict=True))

    def hash_of(self, opened: Opened, name: str) -> bytes | None:
        """The content hash of a tensor, if it is known without reading the tensor."""
        with _reading(opened, name):
            return opened.content_hash(name)

    def _blocks(self, opened: Opened, name: str, threads: int) -> Iterator[ByteArray]:
        with _reading(opened, name):
            yield from opened.blocks(name, threads)

    def _places(self, entry: Entry) -> Places:
        return choose_places(entry, self.share)

    def _read_nbytes(self, entry: Entry) -> int:
        return self._places(entry).sampled_nbytes

    def _sample(self, opened: Opened, entry: Entry, places: Places, threads: int) -> Sample:
        with _reading(opened, entry.name):
            return take_sample(opened, entry, places, threads)

    def _compare(self, entry: Entry, threads: int) -> ChangeRow:
        old, places = self.base.entry(entry.name), self._places(entry)
        if old is None:
            full = self._full(self._sample(self.tuned, entry, places, threads))
            return _row(entry, "new", None, None, full, None)
        if (old.dtype, old.shape) != (entry.dtype, entry.shape):
            return self._measure_replaced(entry, old, places, threads)
        row = self._measure(entry, old, places, threads)
        if row.changed == 0 and not places.is_whole:
            if self.are_equal(old.name, entry.name, threads):
                return row
            row = self._measure(entry, old, whole_places(entry), threads)
        return row

    def _measure(self, entry: Entry, old: Entry, places: Places, threads: int) -> ChangeRow:
        """Compares what a sample has of two tensors of the same dtype and shape."""
        new = self._sample(self.tuned, entry, places, threads)
        before = self._sample(self.base, old, places, threads)
        changed, full = 1 - unchanged_share(before, new), self._full(new)
        delta = packed_estimate(new, _LEVEL, before)[0]
        return _row(entry, "changed" if changed else "equal", None, changed, full, delta)

    def _measure_replaced(
        self, entry: Entry, old: Entry, places: Places, threads: int
    ) -> ChangeRow:
        """Compares a tensor with one of another dtype or shape. It can be its base if it has as
        many elements, of the same dtype or in F32."""
        new, changed, delta = self._sample(self.tuned, entry, places, threads), None, None
        casts = allowed_casts(DTYPE_BY_NAME[entry.dtype])
        if old.numel == entry.numel > 0 and DTYPE_BY_NAME[old.dtype] in casts:
            growth = old.nbytes // entry.nbytes
            runs = tuple((start * growth, stop * growth) for start, stop in places.runs)
            same = Places(runs, places.shapes, old.nbytes)
            before = self._sample(self.base, old, same, threads)
            changed = 1 - unchanged_share(before, new) if growth == 1 else None
            delta = packed_estimate(new, _LEVEL, before)[0]
        return _row(entry, "replaced", old, changed, self._full(new), delta)

    def _full(self, sample: Sample) -> Estimate:
        known = self.full.get(sample.entry.name)
        return packed_estimate(sample, _LEVEL)[0] if known is None else known


def _row(
    entry: Entry, change: str, old: Entry | None, changed: float | None, full: Estimate,
    delta: Estimate | None,
) -> ChangeRow:  # fmt: skip
    was = f"{old.dtype} {list(old.shape)}" if old else None
    kind, layer = kind_of(entry.name), layer_of(entry.name)
    return ChangeRow(
        entry.name, change, was, entry.dtype, entry.shape, entry.nbytes, kind, layer, changed,
        full, delta,
    )  # fmt: skip


# Tensors that have another name now.


def _moved(row: ChangeRow, was: str) -> ChangeRow:
    """The row of a tensor that equals one of another name. Files look for bases by name, so that it
    is packed on its own."""
    return replace(row, change="moved", was=was, changed=0.0, delta=row.full)


def _find_moves(pair: _Pair, rows: list[ChangeRow], threads: int) -> dict[str, str]:
    """The former names of tensors that moved, by their new names.

    A new tensor may equal any tensor of the first model. A tensor that changed may equal one whose
    place was taken by another, too: layers that were left out shift the numbers of later ones.
    """
    change = {row.name: row.change for row in rows}
    wanted = [row for row in rows if row.change != "equal" and row.nbytes]
    kinds = {(row.dtype, row.shape) for row in wanted}
    entries = [entry for entry in pair.base.entries if (entry.dtype, entry.shape) in kinds]
    marks = _marks(pair, [entry.name for entry in entries], [row.name for row in wanted])
    candidates: dict[tuple[str, tuple[int, ...], bytes], list[str]] = {}
    for entry in sorted(entries, key=lambda each: each.name in change):  # removed ones first
        if entry.name in marks[0]:
            key = entry.dtype, entry.shape, marks[0][entry.name]
            candidates.setdefault(key, []).append(entry.name)
    moves = {}
    for row in wanted:
        group = candidates.get((row.dtype, row.shape, marks[1].get(row.name, b"")), [])
        found = group
        if row.change != "new":
            found = [old for old in group if change.get(old) != "equal" and old != row.name]
        old = _first_equal(pair, found, row.name, threads)
        if old is not None:
            moves[row.name] = old
            if len(group) > 1 and old not in change:  # the next one that is equal takes another
                group.remove(old)
    return moves


def _first_equal(pair: _Pair, candidates: list[str], new: str, threads: int) -> str | None:
    """The first candidate that equals a tensor, and not by chance: many tensors are all zeros or
    all ones, so that such a tensor has moved only if the former one is gone."""
    try:
        if candidates and len(set(_few_bytes(pair.tuned, new))) == 1:
            candidates = [old for old in candidates if pair.tuned.entry(old) is None]
        return next((old for old in candidates if pair.are_equal(old, new, threads)), None)
    except _UnreadableError:  # which is reported where the tensor is described
        return None


def _marks(
    pair: _Pair, old: list[str], new: list[str]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What equal tensors of two models have in common, by name: their content hashes, if all are
    known, or else a few bytes. Tensors that cannot be read have no mark."""
    if old and new:
        hashes = _each(pair.hash_of, pair.base, old), _each(pair.hash_of, pair.tuned, new)
        if not any(digest is None for known in hashes for digest in known.values()):
            return hashes  # type: ignore[return-value]
        return _each(_few_bytes, pair.base, old), _each(_few_bytes, pair.tuned, new)
    return {}, {}


def _each(
    call: Callable[[Opened, str], _Mark], opened: Opened, names: list[str]
) -> dict[str, _Mark]:
    found = {}
    for name in names:
        with suppress(_UnreadableError):
            found[name] = call(opened, name)
    return found


def _few_bytes(opened: Opened, name: str) -> bytes:
    """Some bytes of a tensor: of its start, its middle and its end."""
    entry = opened.entry(name)
    assert entry is not None
    starts = (0, entry.nbytes // 2, max(entry.nbytes - _MARK_NBYTES, 0))
    runs = [(start, min(start + _MARK_NBYTES, entry.nbytes)) for start in starts]
    with _reading(opened, name):
        return b"".join(run.tobytes() for run in opened.runs(name, runs))
