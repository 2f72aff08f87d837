"""A search for the fastest way to do something on a GPU.

A `Config`, which is a frozen dataclass of integers, says how a kernel divides its work. The search
begins with the config that a model of time expects to be the best, and changes one field after the
other as long as that makes the kernel faster. Configs that the model expects to be far slower than
the best are not measured.

`Measurements` measures each `Choice` for a `Key`, such as a number of tokens, only once and within
the limits of a `Search`. Choices and keys are any hashable objects of the caller. The caller also
gives the function that measures.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

__all__ = ["Fields", "Measurements", "Search", "expect_best", "find_best"]

# A candidate is not measured if the model expects it to take this many times as long as the best.
_HOPELESS = 1.5


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_Choice = TypeVar("_Choice", bound=Hashable)
_Key = TypeVar("_Key", bound=Hashable)
_Config = TypeVar("_Config", bound=_Dataclass)
Fields: TypeAlias = Mapping[str, Sequence[int]]  # of a config, with the values to try


@dataclass
class Search(Generic[_Choice, _Key]):
    """How a search is limited, and what it has cost.

    Attributes:
        is_late: called before each measurement; True ends the search with the results so far.
        on_measured: called after each measurement with its choice, key and seconds.
        n_measured: measurements so far.
    """

    is_late: Callable[[], bool] = field(default_factory=lambda: _never)
    on_measured: Callable[[_Choice, _Key, float], None] = field(default_factory=lambda: _ignore)
    n_measured: int = 0


def _never() -> bool:
    return False


def _ignore(*_: object) -> None:
    pass


class Measurements(Generic[_Choice, _Key]):
    """Seconds of choices, each measured once; infinity for one that cannot run, or is hopeless."""

    def __init__(
        self,
        predict: Callable[[_Choice, _Key], float],
        measure: Callable[[_Choice, _Key], float],
        search: Search[_Choice, _Key],
    ) -> None:
        """Nothing is measured yet.

        Args:
            predict: gives the seconds of a choice by a model of time, which is cheap.
            measure: measures the seconds; infinity if the choice does not run.
            search: the limits.
        """
        self._predict = predict
        self._measure = measure
        self._search = search
        self._known: dict[tuple[_Choice, _Key], float] = {}

    def take(self, choice: _Choice, key: _Key, limit: float = math.inf) -> float:
        """Seconds of a choice; infinity if the model expects more than the limit, or does not know
        it."""
        predicted = self._predict(choice, key)
        if predicted > limit or predicted == math.inf:
            return math.inf
        return self.take_always(choice, key)

    def take_always(self, choice: _Choice, key: _Key) -> float:
        """Seconds of a choice, whatever the model expects."""
        at = choice, key
        if at not in self._known:
            if self._search.is_late():
                return math.inf
            self._known[at] = self._measure(choice, key)
            self._search.n_measured += 1
            self._search.on_measured(choice, key, self._known[at])
        return self._known[at]


def expect_best(
    kind: Callable[..., _Config], fields: Fields, cost: Callable[[_Config], float]
) -> _Config | None:
    """Among all combinations, the config with the least cost; None if all costs are infinite.

    Args:
        kind: makes a config from its fields.
        fields: the fields and their values.
        cost: gives the cost that a model expects; it must be cheap to call.
    """
    best, least = None, math.inf
    for config in _grid(kind, fields):
        found = cost(config)
        if found < least:
            best, least = config, found
    return best


def _grid(kind: Callable[..., _Config], fields: Fields) -> Iterator[_Config]:
    for values in product(*fields.values()):
        yield kind(**dict(zip(fields, values, strict=True)))


def find_best(
    start: _Config, fields: Fields, cost: Callable[[_Config, float], float]
) -> tuple[_Config, float] | None:
    """Descends from a config to one with no better neighbour.

    Perhaps neither the config that the model favours nor any config that differs from it in one
    field runs. Then the search begins again without leaving out any config. If that fails too, it
    begins once more from the config that takes the least memory.

    Args:
        start: the config that the model expects to be the best.
        fields: the values to try for each field.
        cost: gives the cost of a config. Its second argument is a limit: the cost is infinite if
            the model expects the config to take more than that many times as long as the best.

    Returns:
        The config and its cost; None if nothing ran.
    """
    smallest = replace(start, **{name: min(values) for name, values in fields.items()})
    for first, hopeless in ((start, _HOPELESS), (start, math.inf), (smallest, math.inf)):
        best, least = _descend(first, fields, partial(_with_limit, cost, hopeless))
        if least < math.inf:
            return best, least
    return None


def _with_limit(cost: Callable[[_Config, float], float], limit: float, config: _Config) -> float:
    return cost(config, limit)


def _descend(
    start: _Config, fields: Fields, cost: Callable[[_Config], float]
) -> tuple[_Config, float]:
    """Coordinate descent: takes the best value of field after field, until nothing improves."""
    best, least = start, cost(start)
    improved = True
    while improved:
        improved = False
        for name, values in fields.items():
            others = [value for value in values if value != getattr(best, name)]
            for config in [replace(best, **{name: value}) for value in others]:
                found = cost(config)
                if found < least:
                    best, least, improved = config, found, True
    return best, least
