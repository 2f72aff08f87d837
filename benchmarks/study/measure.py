"""What a state of a training run takes when it is packed, alone and as a difference, and which bits
are to blame.

Sizes are those of whole frames at the level "default", of every tensor in its own shape; every
frame is unpacked again and compared. Entropies are of order 0, of each tensor on its own, and
averaged by size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.study.runs import ANCHORS, STEPS, gaps
from benchmarks.study.states import States
from packhorse.frame import compress_buffer
from packhorse.reports.bits import PlaneCounts, bit_entropies, entropy
from packhorse.reports.engines import compare_engines, huffman_nbytes
from packhorse.reports.movement import StepSizes
from packhorse.reports.names import kind_of
from packhorse.reports.sampling import whole_sample

__all__ = ["KINDS", "Tensors", "alone", "engines_of", "measure_run"]

KINDS = ("embedding", "attention", "feed-forward", "norm")
Tensors = Mapping[str, NDArray[Any]]
Row = dict[str, Any]


def measure_run(states: States, *, in_detail: bool) -> Row:
    """All figures of a run.

    Args:
        states: what it has kept.
        in_detail: whether single bits and exponents are looked at, and differences by kind.

    Returns:
        Under "series" a row for each part and step that has the step before it, or is one of the
        first; under "gaps" one for each part, anchor and gap; under "step_sizes", if in
        detail, one for each exponent of weights and masters at each anchor.
    """
    return {
        "series": [row for step in _series_steps() for row in _series(states, step, in_detail)],
        "gaps": [row for anchor in ANCHORS for row in _gaps(states, anchor, in_detail)],
        "step_sizes": [
            row for anchor in ANCHORS if in_detail for row in _step_sizes(states, anchor)
        ],
    }


def _series_steps() -> list[int]:
    """The first steps and the powers of two; all but the first have the step before them."""
    return [step for step in STEPS if step < 5 or step.bit_count() == 1]


def _series(states: States, step: int, in_detail: bool) -> Iterator[Row]:
    for part in states.parts(step):
        new, dtype = states.tensors(step, part), states.dtype(part)
        old = None
        if step and part in states.parts(step - 1):
            old = states.tensors(step - 1, part)
        row = {"step": step, "part": part, "rate": states.run.rate(step)}
        row |= {"kinds": _packed(new, dtype, old), **_planes_of(new, dtype, old)}
        yield row | _bits_of(new, dtype, old) if in_detail else row


def _gaps(states: States, anchor: int, in_detail: bool) -> Iterator[Row]:
    for part in states.parts(anchor):
        new, dtype = states.tensors(anchor, part), states.dtype(part)
        for gap in gaps(anchor):
            if part in states.parts(anchor - gap):
                old = states.tensors(anchor - gap, part)
                row = {"anchor": anchor, "gap": gap, "part": part}
                kinds = _packed(new, dtype, old)
                row["kinds"] = kinds if in_detail else {"all": _summed(kinds)}
                yield row | _of_xor(new, old)


def _summed(kinds: Mapping[str, Row]) -> Row:
    keys = next(iter(kinds.values()))
    return {key: sum(sizes[key] for sizes in kinds.values()) for key in keys}


def _step_sizes(states: States, anchor: int) -> Iterator[Row]:
    for part in ("weights", "masters"):
        if part in states.parts(anchor):
            new, old = states.tensors(anchor, part), states.tensors(anchor - 1, part)
            sizes, dtype = StepSizes(), states.dtype(part)
            for name, array in new.items():
                pair = (whole_sample(name, dtype, t.shape, _bytes(t)) for t in (old[name], array))
                sizes.add(*pair)
            for row in sizes.rows():
                kept = {k: v for k, v in asdict(row).items() if k not in ("role", "dtype")}
                yield {"step": anchor, "part": part, **kept}


def alone(tensors: Tensors, dtype: str) -> Row:
    """The figures of tensors that have no history.

    Args:
        tensors: by their names.
        dtype: of all of them.
    """
    kinds = _packed(tensors, dtype)
    return {"kinds": kinds, **_planes_of(tensors, dtype), **_bits_of(tensors, dtype)}


def _packed(new: Tensors, dtype: str, old: Tensors | None = None) -> dict[str, Row]:
    """Sizes by kind: bytes, packed alone, packed at the level "max", as a difference, and the share
    of elements that have not changed."""
    found: dict[str, Row] = {}
    for name, array in new.items():
        row = found.setdefault(kind_of(name), {"nbytes": 0, "full": 0, "max": 0})
        row["nbytes"] += array.nbytes
        row["full"] += _frame_nbytes(array, dtype)
        row["max"] += _frame_nbytes(array, dtype, level="max")
        if old is not None:
            base = old[name]
            row["delta"] = row.get("delta", 0) + _frame_nbytes(array, dtype, base)
            same = int(np.count_nonzero(_units(array) == _units(base)))
            row["same"] = row.get("same", 0) + same
    return {kind: found[kind] for kind in KINDS if kind in found} | found


def _frame_nbytes(
    array: NDArray[Any], dtype: str, base: NDArray[Any] | None = None, *, level: str = "default"
) -> int:
    data = _bytes(array)
    old = None if base is None else _bytes(base)
    frame = compress_buffer(data, dtype, array.shape, level=level, threads=1, base=old)
    back = np.empty_like(data)
    frame.decompress_into(back, threads=1, base=old)
    if not np.array_equal(back, data):
        raise RuntimeError(f"a frame of {dtype} {array.shape} does not restore its tensor")
    return frame.nbytes


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _units(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1).view(f"u{array.itemsize}")


def _of_xor(new: Tensors, old: Tensors) -> Row:
    """Bytes of the XOR in the two ways that others pack it: grouped bytes with Huffman codes, one
    for each group of each tensor, and grouped bytes with zstd 3."""
    coder = zstandard.ZstdCompressor(level=3)
    huffman = zstd = 0
    for name, array in new.items():
        xor = _units(array) ^ _units(old[name])
        groups = np.ascontiguousarray(xor.view(np.uint8).reshape(-1, array.itemsize).T)
        for group in groups:
            huffman += huffman_nbytes(np.bincount(group, minlength=256))
            zstd += len(coder.compress(group))
    return {"xor_huffman": huffman, "xor_zstd": zstd}


def _planes_of(new: Tensors, dtype: str, old: Tensors | None = None) -> Row:
    """Entropies of planes, and of those of the XOR with older tensors; the most significant plane
    comes first.

    Args:
        new: the tensors.
        dtype: of all of them.
        old: the same tensors some steps earlier.
    """
    row = {"planes": _plane_entropies(new, dtype)}
    if old is not None:
        xor = {name: _units(array) ^ _units(old[name]) for name, array in new.items()}
        row["xor_planes"] = _plane_entropies(xor, dtype)
    return row


def _bits_of(new: Tensors, dtype: str, old: Tensors | None = None) -> Row:
    """Entropies of bits, and the share of elements in which each has changed; the most significant
    bit comes first.

    Args:
        new: the tensors.
        dtype: of all of them.
        old: the same tensors some steps earlier.
    """
    row = {"bits": _mean(new, {n: bit_entropies(_counted(t, dtype)) for n, t in new.items()})}
    if old is not None:
        flips = {name: _ones(_units(t) ^ _units(old[name])) for name, t in new.items()}
        row["flips"] = _mean(new, flips)
    return row


def _plane_entropies(tensors: Tensors, dtype: str) -> list[float]:
    counts = {name: _counted(array, dtype) for name, array in tensors.items()}
    return _mean(tensors, {n: [entropy(p) for p in c.planes] for n, c in counts.items()})


def _counted(array: NDArray[Any], dtype: str) -> PlaneCounts:
    counts = PlaneCounts(dtype)
    counts.add(_bytes(array))
    return counts


def _ones(units: NDArray[Any]) -> list[float]:
    """The share of ones of each bit, the most significant first."""
    one = units.dtype.type(1)
    shifts = [units.dtype.type(i) for i in reversed(range(8 * units.itemsize))]
    return [float(np.count_nonzero(units >> shift & one)) / units.size for shift in shifts]


def _mean(tensors: Tensors, values: Mapping[str, Sequence[float]]) -> list[float]:
    """The average of lists, one for each tensor, weighted by the tensors' sizes."""
    weights = [array.size for array in tensors.values()]
    found = np.average(list(values.values()), axis=0, weights=weights)
    return [round(float(value), 4) for value in found]


def engines_of(new: Tensors, dtype: str, old: Tensors | None, *, title: str, seconds: float) -> Row:
    """All engines on matrices that have the same width, one above the other.

    Args:
        new: the matrices.
        dtype: of all of them.
        old: the same matrices some steps earlier; None to pack them alone.
        title: what they are.
        seconds: of processor time.
    """
    sample = np.concatenate(list(new.values()))
    base = None if old is None else np.concatenate([old[name] for name in new])
    table = compare_engines(
        _bytes(sample),
        dtype,
        None if base is None else _bytes(base),
        seconds=seconds,
        title=title,
        shape=sample.shape,
    )
    return asdict(table)
