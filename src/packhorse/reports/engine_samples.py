"""Which bytes of a model are packed with other engines, to compare these with ours.

Tensors of one role and dtype are alike, so each such group gives a sample: pieces of a chunk's
length, evenly spread over its tensors, one after the other. A tensor gives as much as its share of
the group. Where there is a base, only tensors that it has, too, are taken, and the same pieces of
the base.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.codecs.base import ByteArray
from packhorse.layout import DTYPE_BY_NAME
from packhorse.reports.names import role_of
from packhorse.reports.sources import READ_ERRORS, Entry, Opened

__all__ = ["EngineSample", "take_engine_samples"]

_PIECE_NBYTES = 3 << 16  # whole elements of every dtype
_MIN_SHARE = 0.01  # of the model's bytes; a smaller group matters to nobody
_Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class EngineSample:
    """Bytes for `compare_engines`.

    Attributes:
        title: what they are, such as "weights, BF16" or "weights, BF16, against step 100".
        dtype: safetensors' name of their dtype.
        data: whole elements, of many tensors.
        base: the same places of the base; None if there is none.
    """

    title: str
    dtype: str
    data: ByteArray
    base: ByteArray | None


def take_engine_samples(
    opened: Opened,
    base: Opened | None = None,
    *,
    nbytes: int = 8 << 20,
    most: int = 4,
    threads: int = 1,
) -> list[EngineSample]:
    """Takes a sample of each large group of tensors, the largest group first.

    Args:
        opened: the model, or a checkpoint.
        base: the model that it was made from, or the checkpoint before.
        nbytes: bytes of a sample, about; a smaller group is taken whole.
        most: how many samples to take.
        threads: how many threads decode a tensor.

    Returns:
        The samples. What cannot be read is left out.
    """
    samples = []
    for (role, dtype), entries in _groups(opened, most):
        pairs = [entry for entry in entries if base is not None and _has(base, entry)]
        other = base if 2 * _nbytes(pairs) >= _nbytes(entries) else None
        runs = _spread(pairs if other else entries, nbytes)
        found = [_read(opened, other, name, places, threads) for name, places in runs.items()]
        data, old = (b"".join(each[k] for each in found) for k in (0, 1))
        if data:
            title = f"{role}, {dtype}" + (f", against {other.row.name}" if other else "")
            arrays = [np.frombuffer(each, np.uint8) for each in (data, old)]
            samples.append(EngineSample(title, dtype, arrays[0], arrays[1] if other else None))
    return samples


def _groups(opened: Opened, most: int) -> list[tuple[tuple[str, str], list[Entry]]]:
    """The largest groups of tensors, by role and dtype."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in opened.entries:
        if entry.nbytes:
            groups.setdefault((role_of(entry.name), entry.dtype), []).append(entry)
    ordered = sorted(groups.items(), key=lambda group: -_nbytes(group[1]))
    least = _MIN_SHARE * _nbytes(opened.entries)
    return [group for group in ordered[:most] if _nbytes(group[1]) >= least]


def _nbytes(entries: list[Entry] | tuple[Entry, ...]) -> int:
    return sum(entry.nbytes for entry in entries)


def _has(base: Opened, entry: Entry) -> bool:
    """Whether a base has a tensor of the same name, dtype and shape."""
    old = base.entry(entry.name)
    return old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape)


def _spread(entries: list[Entry], nbytes: int) -> dict[str, _Runs]:
    """Pieces by tensor, in the order of the tensors: one in the middle of each of so many equal
    parts of all their bytes."""
    total = _nbytes(entries)
    if total <= nbytes:
        return {entry.name: [(0, entry.nbytes)] for entry in entries}
    n_pieces = max(nbytes // _PIECE_NBYTES, 1)
    wanted = iter((2 * i + 1) * total // (2 * n_pieces) for i in range(n_pieces))
    place, begin, found = next(wanted, total), 0, {}
    for entry in entries:
        pieces: _Runs = []
        while place < begin + entry.nbytes:
            piece = _piece_at(entry, place - begin)
            if not pieces or piece[0] >= pieces[-1][1]:
                pieces.append(piece)
            place = next(wanted, total)
        if pieces:
            found[entry.name] = pieces
        begin += entry.nbytes
    return found


def _piece_at(entry: Entry, place: int) -> tuple[int, int]:
    """A piece of whole elements that begins at about a place; all of a short tensor."""
    unit = 3 * DTYPE_BY_NAME[entry.dtype].unit_nbytes  # elements of 4 and 6 bits fill three bytes
    start = max(min(place, entry.nbytes - _PIECE_NBYTES), 0) // unit * unit
    return start, min(start + _PIECE_NBYTES, entry.nbytes)


def _read(
    opened: Opened, base: Opened | None, name: str, runs: _Runs, threads: int
) -> tuple[bytes, bytes]:
    """The pieces of a tensor, and those of its base; nothing if one of them cannot be read, which
    is reported where the tensor is described."""
    try:
        data = b"".join(run.tobytes() for run in opened.runs(name, runs, threads))
        old = base.runs(name, runs, threads) if base else []
        return data, b"".join(run.tobytes() for run in old)
    except READ_ERRORS:
        return b"", b""
