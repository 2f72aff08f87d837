"""A first look through a series: which checkpoints are there, and whether they are of one model.

Only headers are read. What most checkpoints have in common is the model of the series, so that one
foreign file does not make all others foreign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from packhorse.reports.results import Problem
from packhorse.reports.sources import READ_ERRORS, Source, opened

__all__ = ["Survey", "look_through"]

_MIN_COMMON = 0.5  # of the tensors of the smaller of two models, to count as one model
_Tensors = dict[str, tuple[str, tuple[int, ...], int]]  # dtype, shape and elements by name


@dataclass(frozen=True)
class Survey:
    """The checkpoints of a series that can be used.

    Attributes:
        sources: those that can be opened and belong to one model, in order.
        problems: what is wrong with the others, and what is odd about these.
    """

    sources: tuple[Source, ...]
    problems: tuple[Problem, ...]


def look_through(sources: Sequence[Source]) -> Survey:
    """Opens each checkpoint of a series, and reads its header.

    Args:
        sources: the checkpoints in order.

    Returns:
        The checkpoints to use. There is one problem for each checkpoint that cannot be opened or
        belongs to another model, for each whose tensors have other shapes or dtypes than in the
        one before, and for numbers that are missing in an even series.
    """
    kept: dict[frozenset[Any], _Tensors] = {}
    found: list[tuple[Source, _Tensors]] = []
    problems = []
    for source in sources:
        try:
            found.append((source, _shared(_read(source), kept)))
        except READ_ERRORS as error:
            message = f"{error}; the series goes on without this checkpoint"
            problems.append(Problem(source.name, None, message))
    model = _most_common([tensors for _, tensors in found])
    good = []
    for source, tensors in found:
        share = _common(model, tensors)
        if share < _MIN_COMMON:
            problems.append(_foreign(source, share))
        else:
            good.append((source, tensors))
    for before, after in pairwise(good):
        problems += _changed(before, after)
    return Survey(tuple(source for source, _ in good), (*problems, *_missing(sources)))


def _read(source: Source) -> _Tensors:
    with opened(source) as found:
        return {entry.name: (entry.dtype, entry.shape, entry.numel) for entry in found.entries}


def _shared(tensors: _Tensors, kept: dict[frozenset[Any], _Tensors]) -> _Tensors:
    """An equal object that is known already, so that 1,000 checkpoints take the memory of one."""
    return kept.setdefault(frozenset(tensors.items()), tensors)


def _most_common(found: Sequence[_Tensors]) -> _Tensors:
    """The tensors that most checkpoints have; of the newest, if there are several."""
    counts = Counter(id(tensors) for tensors in found)
    return max(reversed(found), key=lambda tensors: counts[id(tensors)], default={})


def _common(model: _Tensors, tensors: _Tensors) -> float:
    """The share of tensors of one name and size in both, of those of the smaller model."""
    same = sum(model[name][2] == tensors[name][2] for name in model.keys() & tensors.keys())
    return same / max(min(len(model), len(tensors)), 1)


def _foreign(source: Source, share: float) -> Problem:
    return Problem(
        source.name, None,
        f"{source.path}: this seems to be a checkpoint of another model: {share:.0%} of its "
        "tensors have the names and sizes of the others; the series goes on without it; leave it "
        "out, or make a report of its own",
    )  # fmt: skip


def _changed(before: tuple[Source, _Tensors], after: tuple[Source, _Tensors]) -> Iterator[Problem]:
    """One problem if tensors of a checkpoint have other shapes or dtypes than before."""
    (older, old), (source, new) = before, after
    if old is new:
        return
    names = [name for name in new if name in old and old[name][:2] != new[name][:2]]
    if names:
        (was, old_shape, _), (dtype, shape, _) = old[names[0]], new[names[0]]
        others = f" (and {len(names) - 1} more tensors)" if len(names) > 1 else ""
        yield Problem(
            source.name, names[0],
            f"{source.path}: tensor {names[0]!r} is {dtype} {list(shape)}, but {was} "
            f"{list(old_shape)} in {older.name}{others}; such tensors are counted in full; compare "
            "checkpoints of one shape and dtype to see deltas",
        )  # fmt: skip


def _missing(sources: Sequence[Source]) -> Iterator[Problem]:
    """One problem if numbers are missing in a series that is even otherwise."""
    steps = [source.step for source in sources if source.step is not None]
    if len(steps) < 3 or len(steps) < len(sources):
        return
    pairs = list(pairwise(steps))
    counts = Counter(b - a for a, b in pairs)
    stride = max(counts, key=lambda gap: (counts[gap], -gap))
    odd = [(a, b) for a, b in pairs if b - a != stride]
    if len(odd) > max(counts[stride] // 2, 1) or any(
        b - a < stride or (b - a) % stride for a, b in odd
    ):
        return
    missing = [step for a, b in odd for step in range(a + stride, b, stride)]
    if missing:
        shown = ", ".join(map(str, missing[:3])) + (" ..." if len(missing) > 3 else "")
        after = sources[steps.index(odd[0][1])]
        yield Problem(
            after.name, None,
            f"the others are {stride} apart, but {shown} {'are' if len(missing) > 1 else 'is'} "
            f"missing before {after.name}; its delta spans {odd[0][1] - odd[0][0]}; name all "
            "checkpoints if they still exist",
        )  # fmt: skip
