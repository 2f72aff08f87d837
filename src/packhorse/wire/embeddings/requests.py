"""What a rank asks the holders of embedding tables for, as bytes, and as a holder reads it.

One message goes from each rank to each holder, with all tables in it. For every shard of
the holder it says which rows are wanted: a set of distinct ids, each of which brings one row,
or bags of ids, each of which brings one row, the sum.

Layout, little-endian: for each shard of the holder, in the order of the tables, u32 rows to bring
and u32 how many ids (0 for a set). Then the sets, as `pack_set`: those of dense shards as one set,
those of sparse shards as another, since few large sets are quicker to pack than many small ones.
Then, for each shard with bags, u8 bits of a length; the number of ids in each bag minus one,
and the ids, as `pack_list`.

A holder checks a message wholly before it looks up a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import CorruptionError, TruncationError
from packhorse.wire.embeddings.id_sets import (
    list_nbytes,
    pack_list,
    pack_set,
    set_nbytes,
    unpack_list,
    unpack_set,
)

__all__ = ["Wanted", "bags_nbytes", "pack_request", "unpack_request"]

_Bytes = npt.NDArray[np.uint8]
_Ids = npt.NDArray[np.int64]

# A shard of which at least one row in so many is wanted is dense: its ids go into a bitmap.
_DENSE = 8


class Wanted(NamedTuple):
    """What is wanted of one shard.

    `lengths` is None: the rows `ids`, ascending and distinct.
    Otherwise [bags], each at least 1: the sums of so many rows of `ids`, one bag after the other.
    """

    ids: _Ids
    lengths: _Ids | None = None

    @property
    def n(self) -> int:
        """How many rows this brings."""
        return len(self.ids if self.lengths is None else self.lengths)


def bags_nbytes(n_bags: int, n_ids: int, longest: int, rows: int) -> int:
    """How many bytes bags of ids take in a request.

    Args:
        n_bags: how many bags.
        n_ids: how many ids they have together.
        longest: the most ids in a bag.
        rows: of the shard.
    """
    return 1 + list_nbytes(n_bags, (longest - 1).bit_length()) + list_nbytes(n_ids, _bits(rows))


def pack_request(wanted: Sequence[Wanted], rows: Sequence[int]) -> _Bytes:
    """The message to one holder.

    Args:
        wanted: of each of the holder's shards, ids from 0 in each.
        rows: how many rows each of these shards has.
    """
    heads = np.array(
        [(w.n, 0 if w.lengths is None else len(w.ids)) for w in wanted], "<u4"
    ).reshape(-1, 2)
    parts = [heads.view(np.uint8).reshape(-1)]
    for members in _kinds(heads, rows):
        ids = [wanted[i].ids + base for i, base in zip(members.shards, members.bases, strict=True)]
        if ids:
            parts.append(pack_set(np.concatenate(ids), members.universe))
    for w, size in zip(wanted, rows, strict=True):
        if w.lengths is not None and w.n:
            bits = int(w.lengths.max() - 1).bit_length()
            parts += [
                np.array([bits], np.uint8),
                pack_list(w.lengths - 1, bits),
                pack_list(w.ids, _bits(size)),
            ]
    return np.concatenate(parts)


def unpack_request(message: _Bytes, rows: Sequence[int]) -> list[Wanted]:
    """What `pack_request` packed.

    Raises:
        CorruptionError: the message is none.
    """
    reader = _Reader(message)
    heads = reader.take(8 * len(rows)).view("<u4").reshape(-1, 2).astype(np.int64)
    wanted: list[Wanted] = [Wanted(np.empty(0, np.int64))] * len(rows)
    for members in _kinds(heads, rows):
        counts = heads[members.shards, 0]
        _check_counts(counts, [rows[i] for i in members.shards])
        n = int(counts.sum())
        ids = unpack_set(reader.take(set_nbytes(n, members.universe)), n, members.universe)
        cuts = np.searchsorted(ids, members.bases)
        if not np.array_equal(cuts, np.cumsum(counts) - counts):
            raise CorruptionError("a request has other ids than it announced, for some table")
        for shard, base, at, count in zip(members.shards, members.bases, cuts, counts, strict=True):
            wanted[shard] = Wanted(ids[at : at + count] - base)
    for i in range(len(rows)):
        if heads[i, 1]:
            wanted[i] = _bags(reader, int(heads[i, 0]), int(heads[i, 1]), rows[i])
    reader.check_end()
    return wanted


@dataclass(frozen=True)
class _Members:
    """Shards whose sets are packed as one: the ids of each start at its base."""

    shards: list[int]
    bases: list[int]
    universe: int


def _kinds(heads: npt.NDArray[np.integer], rows: Sequence[int]) -> Iterator[_Members]:
    """The dense shards with sets, then the sparse ones; none of which nothing is wanted."""
    sizes = np.array(rows, np.int64)
    has_set = (heads[:, 1] == 0) & (heads[:, 0] > 0)
    dense = heads[:, 0].astype(np.int64) * _DENSE >= sizes
    for chosen in (has_set & dense, has_set & ~dense):
        shards = np.flatnonzero(chosen)
        ends = np.cumsum(sizes[shards])
        if len(shards):
            yield _Members(shards.tolist(), (ends - sizes[shards]).tolist(), int(ends[-1]))


def _bags(reader: _Reader, n_bags: int, n_ids: int, rows: int) -> Wanted:
    if not 0 < n_bags <= n_ids:
        raise CorruptionError(f"a request has {n_bags} bags of {n_ids} ids")
    bits = int(reader.take(1)[0])
    if bits > 32:
        raise CorruptionError(f"lengths of bags have {bits} bits, at most 32 are allowed")
    of_lengths = reader.take(list_nbytes(n_bags, bits))
    of_ids = reader.take(list_nbytes(n_ids, _bits(rows)))
    # Lengths of 0 bits take no bytes. That the ids have come shows that there are not too many.
    lengths = unpack_list(of_lengths, n_bags, bits) + 1
    ids = unpack_list(of_ids, n_ids, _bits(rows))
    if lengths.sum() != n_ids:
        raise CorruptionError(f"bags of {lengths.sum()} ids were announced as {n_ids}")
    if ids.max() >= rows:
        raise CorruptionError(f"id {ids.max()} of a request is not below {rows}")
    return Wanted(ids, lengths)


def _check_counts(counts: _Ids, rows: Sequence[int]) -> None:
    if (counts > rows).any():
        raise CorruptionError(f"a request wants {counts.tolist()} of {list(rows)} rows")


def _bits(rows: int) -> int:
    """Of an id in a list: at least 1, so that few bytes never announce many ids."""
    return max(1, (rows - 1).bit_length())


class _Reader:
    """Takes bytes from the front of a message."""

    def __init__(self, message: _Bytes) -> None:
        self._message = message
        self._at = 0

    def take(self, size: int) -> _Bytes:
        taken = self._message[self._at : self._at + size]
        if len(taken) < size:
            raise TruncationError(
                f"a request ends after {len(self._message)} bytes; {self._at + size} are needed"
            )
        self._at += size
        return taken

    def check_end(self) -> None:
        if self._at != len(self._message):
            raise CorruptionError(
                f"a request has {len(self._message) - self._at} bytes more than it announced"
            )
