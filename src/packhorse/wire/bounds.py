"""Error bounds that differ by table and by iteration, and adapt while a model trains.

The bound of a table is `relative bound of its class x running range of its values x multiplier`.

- The class (tight, base, loose) follows from the size of the table, or from how many distinct rows
  merge when they are quantised: a table whose rows become equal loses what it has learnt.
- The running range is what nearly all values lie in (quantiles), and the median of the last
  observations: neither one outlier nor one odd message moves it. Relative to the range of each
  message instead, the bound would follow every outlier.
- The multiplier falls from 2 to 1 while training settles, by a `Schedule`.

Whoever sends decides, and the message says what was decided; so ranks need not agree on any of
this. Each sender keeps a state for each shard that it sends, from the values that it has sent.
Everything is deterministic. Source of classes and schedules: Feng et al., "Accelerating
communication in deep learning recommendation model training with dual-level adaptive lossy
compression", SC 2024, and its public code.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.codecs.bounded import Rounding, bits_for
from packhorse.layout import MAX_BOUNDED_BITS

__all__ = [
    "Bound",
    "ByCardinality",
    "ByHomogenisation",
    "Interval",
    "Schedule",
    "Shape",
    "TableBounds",
    "Tightness",
    "homogenisation",
]

_Rows = npt.NDArray[np.floating[Any]]

# How many values are looked at for a running range, and how many rows for a class.
_SAMPLE = 4096
# How many observations the running range is the median of. The first ones are taken in every
# iteration, later ones only now and then.
_REMEMBERED = 9
# Codes reach a little further than the running range, so that values just outside are no escapes.
_MARGIN = 1.15
_LEAST_BOUND = 1e-30
# Default bounds, as a part of the paper's (docs/dlrm.md). Rows are rounded the same way again and
# again, so their errors stay; stochastic rounding is right on average, and may be coarser.
_OF_PAPER = {Rounding.NEAREST: 0.125, Rounding.STOCHASTIC: 0.25}


class Tightness(Enum):
    """The class of a table; its value is the relative bound of the paper."""

    TIGHT = 0.01
    BASE = 0.03
    LOOSE = 0.05


class Shape(Enum):
    """How a multiplier falls."""

    CONSTANT = "constant"
    STEP = "step"
    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True)
class Schedule:
    """A multiplier that falls from `start` to 1 in some iterations, and stays there.

    Attributes:
        shape: `STEP` falls in `steps` equal steps, `LINEAR` evenly, `LOG` fast at first;
            `CONSTANT` is 1 throughout.
        start: the first multiplier, at least 1.
        iterations: after how many iterations 1 is reached.
        steps: how many steps `STEP` has.

    Raises:
        ValueError: `start` is below 1, or a number is not positive.
    """

    shape: Shape = Shape.STEP
    start: float = 2.0
    iterations: int = 65_536
    steps: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.start < math.inf or self.iterations < 1 or self.steps < 1:
            raise ValueError(
                f"start is {self.start}, iterations {self.iterations}, steps {self.steps}; "
                "start must be at least 1, the others positive"
            )

    def multiplier(self, iteration: int) -> float:
        """What bounds are multiplied by in an iteration.

        Args:
            iteration: counted from 0.

        Returns:
            A number from 1 to `start`.
        """
        if self.shape is Shape.CONSTANT or iteration >= self.iterations:
            return 1.0
        time = iteration / self.iterations
        if self.shape is Shape.STEP:
            fallen = math.floor(time * self.steps) / self.steps
        elif self.shape is Shape.LINEAR:
            fallen = time
        else:
            fallen = math.log(1 + time * (math.e - 1))
        return self.start - (self.start - 1) * fallen


@dataclass(frozen=True)
class ByCardinality:
    """Classes by the number of ids: many ids are tight, few are loose.

    With 400,000 and 1,000 this gives the paper's classes of the 26 tables of Criteo Terabyte,
    with 90,000 and 106 its tight tables of Criteo Kaggle, and 6 of its loose ones.

    Attributes:
        tight_above: a table with more ids is tight.
        loose_below: a table with fewer ids is loose.
    """

    tight_above: int = 90_000
    loose_below: int = 1_000

    def classify(self, rows: int) -> Tightness:
        """The class of a table.

        Args:
            rows: how many ids the table has.

        Returns:
            Its class.
        """
        if rows > self.tight_above:
            return Tightness.TIGHT
        return Tightness.LOOSE if rows < self.loose_below else Tightness.BASE


@dataclass(frozen=True)
class ByHomogenisation:
    """Classes by how many distinct rows are left when rows are quantised (`homogenisation`).

    Attributes:
        tight_below: a table that keeps less than this share of its distinct rows is tight.
        loose_above: a table that keeps more than this share is loose.
        rel_bound: the relative bound at which rows are compared.
        every: after how many iterations a class is looked at again. Until rows were seen,
            a table is tight.
    """

    tight_below: float = 0.5
    loose_above: float = 0.99
    rel_bound: float = 0.01
    every: int = 1024

    def classify(self, index: float) -> Tightness:
        """The class of a table.

        Args:
            index: the homogenisation index of its rows, from 0 to 1.

        Returns:
            Its class.
        """
        if index < self.tight_below:
            return Tightness.TIGHT
        return Tightness.LOOSE if index > self.loose_above else Tightness.BASE


def homogenisation(rows: _Rows, rel_bound: float) -> float:
    """The homogenisation index: distinct rows after quantisation, as a share of those before.

    Args:
        rows: [n, width] of finite floats; they are compared as float32.
        rel_bound: the bound, relative to the range of the values.

    Returns:
        1 if no two distinct rows become equal; the more become equal, the closer to 0.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.bounds import homogenisation
        >>> rows = np.array([[0.0], [0.001], [1.0], [1.001]], np.float32)
        >>> homogenisation(rows, rel_bound=0.01)  # two pairs of rows become equal
        0.5
    """
    distinct = np.unique(np.ascontiguousarray(rows, np.float32), axis=0)
    spread = float(np.ptp(distinct)) if distinct.size else 0.0
    if spread == 0:
        return 1.0
    codes = np.rint(distinct / (2 * rel_bound * spread)).astype(np.int32)
    return len(np.unique(codes, axis=0)) / len(distinct)


class Bound(NamedTuple):
    """What a segment of a message is coded with.

    Attributes:
        bound: no decoded value is further than this from what was sent.
        bits: of the code of an element, 1 to 16.
        center: the middle of the values that codes cover; a value that they do not cover travels
            exactly, as an escape.
    """

    bound: float
    bits: int
    center: float


class Interval(NamedTuple):
    """What happened to a shard in some iterations.

    Attributes:
        table: the name of its table.
        first: the first iteration, counted from 0.
        last: the last iteration, included.
        tightness: the class of the table at the end.
        multiplier: that of the schedule in the last iteration.
        bound: the last error bound.
        bits: the last number of bits of a code.
        n_elements: how many elements were sent.
        n_escapes: how many of them travelled exactly, as escapes.
        nbytes: how many bytes all of them took.
    """

    table: str
    first: int
    last: int
    tightness: Tightness
    multiplier: float
    bound: float
    bits: int
    n_elements: int
    n_escapes: int
    nbytes: int

    def __str__(self) -> str:
        share = self.n_escapes / max(1, self.n_elements)
        return (
            f"{self.table}: iterations {self.first} to {self.last}, {self.tightness.name.lower()}, "
            f"bound {self.bound:.3g} (x{self.multiplier:.2f}), {self.bits} bits, "
            f"{self.nbytes:,} B for {self.n_elements:,} elements, {share:.2%} escapes"
        )


@dataclass
class _State:
    """What is known of one shard's values."""

    table: str
    tightness: Tightness
    lows: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    highs: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    observed: int = -1
    classified: int = -1
    first: int = 0
    n_elements: int = 0
    n_escapes: int = 0
    nbytes: int = 0
    last: Bound = field(default_factory=lambda: Bound(_LEAST_BOUND, 1, 0.0))
    last_relative: float | None = None  # what `last` was made for; None after an observation


class TableBounds:
    """Bounds for the tables that one rank sends, by table and by iteration.

    Args:
        relative: the relative bound of each class; by default an eighth of the paper's,
            with stochastic rounding a quarter.
        classes: how a table gets its class.
        schedule: how bounds tighten.
        overrides: relative bounds of single tables, by name.
        rounding: stochastic rounding needs a bit more for the same bound.
        observe_every: after how many iterations a range is observed again.
        log_every: how many iterations an entry of `history` covers.

    Attributes:
        iteration: counted by `advance`.
        history: an `Interval` for each shard and interval.

    Raises:
        ValueError: a relative bound is not between 0 and 1.

    Example:
        >>> import numpy as np
        >>> from packhorse.wire.bounds import Schedule, Shape, TableBounds
        >>> bounds = TableBounds(schedule=Schedule(Shape.CONSTANT))
        >>> rows = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(-1, 10)
        >>> bounds.bound_for(0, "user", 100, rows).bits  # 100 ids: loose, .00625 of the range
        7
    """

    def __init__(
        self,
        relative: Mapping[Tightness, float] | None = None,
        *,
        classes: ByCardinality | ByHomogenisation | None = None,
        schedule: Schedule | None = None,
        overrides: Mapping[str, float] | None = None,
        rounding: Rounding = Rounding.NEAREST,
        observe_every: int = 16,
        log_every: int = 256,
    ) -> None:
        self.relative = {kind: _OF_PAPER[rounding] * kind.value for kind in Tightness}
        self.relative.update(relative or {})
        self.overrides = dict(overrides or {})
        for name, bound in [*self.relative.items(), *self.overrides.items()]:
            if not 0 < bound < 1:
                raise ValueError(f"relative bound of {name} is {bound}; it must be in 0 to 1")
        self.classes = classes or ByCardinality()
        self.schedule = schedule or Schedule()
        self.rounding = rounding
        self.observe_every = observe_every
        self.log_every = log_every
        self.iteration = 0
        self.history: list[Interval] = []
        self._states: dict[int, _State] = {}

    def bound_for(self, shard: int, table: str, n_ids: int, rows: _Rows) -> Bound:
        """The bound for rows of a shard that are about to be sent; looks at them now and then.

        Args:
            shard: its number; each has a state of its own.
            table: the name of its table.
            n_ids: how many ids the table has.
            rows: [n, width] of floats.

        Returns:
            The bound, the bits and the center to code these rows with.
        """
        state = self._states.get(shard)
        if state is None:
            state = self._states[shard] = _State(table, self._first_class(n_ids))
            state.first = self.iteration
        if rows.size and state.observed < self.iteration:
            self._observe(state, rows)
        relative = self.overrides.get(table, self.relative[state.tightness])
        relative *= self.schedule.multiplier(self.iteration)
        if relative != state.last_relative:
            state.last = self._bound(state, relative)
            state.last_relative = relative
        return state.last

    def bits_of(self, shard: int) -> int | None:
        """The bits of the last bound of a shard.

        Args:
            shard: its number.

        Returns:
            1 to 16, or None if the shard has had no bound.
        """
        state = self._states.get(shard)
        return None if state is None else state.last.bits

    def count(self, shard: int, n_elements: int, n_escapes: int, nbytes: int) -> None:
        """Says what was sent of a shard, for `history`.

        Args:
            shard: its number; `bound_for` has been called for it.
            n_elements: how many elements were sent.
            n_escapes: how many of them were escapes.
            nbytes: how many bytes they took.
        """
        state = self._states[shard]
        state.n_elements += n_elements
        state.n_escapes += n_escapes
        state.nbytes += nbytes

    def advance(self) -> None:
        """Ends an iteration."""
        self.iteration += 1
        if self.iteration % self.log_every == 0:
            self.history += self._intervals()
            for state in self._states.values():
                state.first, state.n_elements = self.iteration, 0
                state.n_escapes = state.nbytes = 0

    def explain(self) -> str:
        """A line for each shard since the last entry of `history`, or the last ones."""
        return "\n".join(map(str, self._intervals()))

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs, of plain types."""
        states = {
            number: {
                "table": state.table,
                "tightness": state.tightness.name,
                "lows": list(state.lows),
                "highs": list(state.highs),
                "observed": state.observed,
                "classified": state.classified,
            }
            for number, state in self._states.items()
        }
        return {"iteration": self.iteration, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where `state_dict` was called, with this object's own arguments.

        Args:
            state: what `state_dict` returned.

        Raises:
            KeyError: something is missing.
        """
        found = {}
        for number, saved in state["states"].items():
            one = _State(saved["table"], Tightness[saved["tightness"]])
            one.lows.extend(saved["lows"])
            one.highs.extend(saved["highs"])
            one.observed, one.classified = saved["observed"], saved["classified"]
            one.first = state["iteration"]
            found[number] = one
        self._states, self.iteration = found, state["iteration"]

    def _first_class(self, n_ids: int) -> Tightness:
        if isinstance(self.classes, ByCardinality):
            return self.classes.classify(n_ids)
        return Tightness.TIGHT

    def _observe(self, state: _State, rows: _Rows) -> None:
        is_new = len(state.lows) < _REMEMBERED
        if is_new or self.iteration - state.observed >= self.observe_every:
            flat = rows.reshape(-1)
            values = np.ascontiguousarray(flat[:: max(1, flat.size // _SAMPLE)])
            is_finite = np.isfinite(values)
            if not is_finite.all():
                values = values[is_finite]
            if values.size:
                low, high = _ends(values)
                state.lows.append(low)
                state.highs.append(high)
                state.observed = self.iteration
                state.last_relative = None
        if isinstance(self.classes, ByHomogenisation) and (
            state.classified < 0 or self.iteration - state.classified >= self.classes.every
        ):
            some = rows[:: max(1, len(rows) // _SAMPLE)]
            some = some[np.isfinite(some).all(axis=1)]
            state.tightness = self.classes.classify(homogenisation(some, self.classes.rel_bound))
            state.classified = self.iteration

    def _bound(self, state: _State, relative: float) -> Bound:
        if not state.lows:
            return Bound(_LEAST_BOUND, 1, 0.0)
        low, high = statistics.median(state.lows), statistics.median(state.highs)
        center, spread = (low + high) / 2, max(0.0, (high - low) / 2)
        bound = max(2 * relative * spread, abs(center) * 2.0**-20, _LEAST_BOUND)
        reach = _MARGIN * spread
        try:
            bits = bits_for(reach, bound, self.rounding)
        except ValueError:
            bits = MAX_BOUNDED_BITS
        return Bound(bound, bits, center)

    def _intervals(self) -> list[Interval]:
        multiplier = self.schedule.multiplier(max(0, self.iteration - 1))
        return [
            Interval(
                state.table, state.first, self.iteration - 1, state.tightness, multiplier,
                state.last.bound, state.last.bits, state.n_elements, state.n_escapes, state.nbytes,
            )
            for state in self._states.values()
        ]  # fmt: skip


def _ends(values: _Rows) -> tuple[float, float]:
    """The ends of the range in which nearly all values lie; all of them if there are few."""
    out = values.size // 1000
    ordered = np.partition(values, (out, values.size - 1 - out))
    return float(ordered[out]), float(ordered[-1 - out])
