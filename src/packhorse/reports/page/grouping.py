"""Sums of tensors that belong together, for the figures of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from packhorse.reports.page import words
from packhorse.reports.results import Estimate, TensorRow, total

__all__ = ["LEVELS", "Group", "Sized", "float_parts", "group", "group_label", "grouped", "weighted"]

_PART_NCHARS = 40
LEVELS = ("fast", "default", "max")
_Key = TypeVar("_Key")
# Bits of sign, exponent and mantissa.
_FLOATS = {
    "F16": (1, 5, 10), "BF16": (1, 8, 7), "F32": (1, 8, 23), "F64": (1, 11, 52),
    "F8_E4M3": (1, 4, 3), "F8_E5M2": (1, 5, 2), "F8_E8M0": (0, 8, 0),
    "F8_E4M3FNUZ": (1, 4, 3), "F8_E5M2FNUZ": (1, 5, 2),
    "F4": (1, 2, 1), "F6_E2M3": (1, 2, 3), "F6_E3M2": (1, 3, 2),
}  # fmt: skip


class Sized(NamedTuple):
    """Bytes that a figure shows.

    Attributes:
        label: whose.
        nbytes: plain.
        packed: packed.
    """

    label: str
    nbytes: int
    packed: Estimate


@dataclass(frozen=True)
class Group:
    """Tensors that belong together, summed up.

    Attributes:
        rows: the tensors.
        nbytes: their bytes.
        numel: their elements.
        levels: bytes by level.
        bound: what their planes would take at their entropy of order 0.
    """

    rows: tuple[TensorRow, ...]
    nbytes: int
    numel: int
    levels: dict[str, Estimate]
    bound: Estimate

    @property
    def default(self) -> Estimate:
        """Bytes at the level "default"."""
        return self.levels["default"]

    @property
    def bits(self) -> float:
        """Bits of an element."""
        return 8 * self.nbytes / self.numel if self.numel else 0.0

    def bits_of(self, nbytes: float) -> float:
        """Bytes of all tensors as bits of an element."""
        return 8 * nbytes / self.numel if self.numel else 0.0


def group(rows: Sequence[TensorRow]) -> Group:
    """The sum of tensors."""
    levels = {
        name: total([row.levels[name] for row in rows if name in row.levels]) for name in LEVELS
    }
    return Group(
        tuple(rows),
        sum(row.nbytes for row in rows),
        sum(prod(row.shape) for row in rows),
        levels,
        total([row.bound for row in rows]),
    )


def grouped(
    rows: Iterable[TensorRow], key: Callable[[TensorRow], _Key | None]
) -> dict[_Key, Group]:
    """Sums of tensors with the same key, the largest first. Tensors whose key is None are left
    out."""
    found: dict[_Key, list[TensorRow]] = {}
    for row in rows:
        which = key(row)
        if which is not None:
            found.setdefault(which, []).append(row)
    sums = {which: group(some) for which, some in found.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].nbytes))


def weighted(pairs: Iterable[tuple[float, float]]) -> float:
    """The mean of values, given as (weight, value)."""
    known = list(pairs)
    weights = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / weights if weights else 0.0


def group_label(role: str, kind: str, dtype: str, *, n_roles: int, n_dtypes: int = 2) -> str:
    """What a group is called: the role and the dtype are named only where there are several."""
    parts = [kind, *([role] if n_roles > 1 else []), *([dtype] if n_dtypes > 1 else [])]
    return " · ".join(words.shorten(part, _PART_NCHARS) for part in parts)


def float_parts(dtype: str, n_bits: int) -> list[tuple[str, int]]:
    """What the bits of an element are, the most significant first: names and numbers of bits."""
    widths = _FLOATS.get(dtype, ())
    if not widths or n_bits % sum(widths):
        return [("bits", n_bits)]
    names = ("sign", "exponent", "mantissa")
    parts = [(name, width) for name, width in zip(names, widths, strict=True) if width]
    return parts * (n_bits // sum(widths))
