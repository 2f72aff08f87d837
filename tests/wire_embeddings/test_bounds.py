"""Bounds by table and iteration: schedules, classes, ranges that outliers do not move, resuming."""

import math
import pickle

import numpy as np
import pytest

from packhorse.codecs.bounded import Rounding
from packhorse.wire.bounds import (
    ByCardinality,
    ByHomogenisation,
    Schedule,
    Shape,
    TableBounds,
    Tightness,
    homogenisation,
)

KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
TERABYTE = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208,
    11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
CONSTANT = Schedule(Shape.CONSTANT)


def rows_of(seed: int, n: int = 500) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 16)).astype(np.float32)


def classed(rule: ByCardinality, rows: tuple[int, ...], kind: Tightness) -> set[int]:
    return {i for i, n in enumerate(rows) if rule.classify(n) is kind}


def test_cardinality_gives_the_classes_of_the_paper() -> None:
    rule = ByCardinality(tight_above=400_000, loose_below=1_000)
    assert classed(rule, TERABYTE, Tightness.TIGHT) == {0, 9, 10, 19, 20, 21, 22}
    assert classed(rule, TERABYTE, Tightness.LOOSE) == {5, 8, 12, 15, 16, 17, 18, 24, 25}
    rule = ByCardinality(tight_above=90_000, loose_below=106)
    assert classed(rule, KAGGLE, Tightness.TIGHT) == {2, 3, 9, 11, 15, 20, 23, 25}
    assert classed(rule, KAGGLE, Tightness.LOOSE) >= {8, 16, 19, 21, 22, 24}


def test_schedules_fall_as_in_the_paper() -> None:
    step = Schedule()
    assert [step.multiplier(i) for i in (0, 6553, 6554, 65_535, 65_536, 10**9)] == pytest.approx(
        [2, 2, 1.9, 1.1, 1, 1]
    )
    linear = Schedule(Shape.LINEAR, iterations=100)
    assert [linear.multiplier(i) for i in (0, 25, 50, 100)] == [2, 1.75, 1.5, 1]
    log = Schedule(Shape.LOG, iterations=100)
    assert log.multiplier(50) == pytest.approx(2 - math.log(1 + 0.5 * (math.e - 1)))
    assert log.multiplier(0) == 2
    assert CONSTANT.multiplier(0) == 1
    for shape in Shape:
        falling = [Schedule(shape, iterations=64).multiplier(i) for i in range(70)]
        assert falling == sorted(falling, reverse=True)
        assert falling[-1] == 1


def test_homogenisation_counts_rows_that_merge() -> None:
    far = np.arange(20, dtype=np.float32)[:, None] * np.ones((1, 4), np.float32)
    assert homogenisation(far, 0.01) == 1
    near = np.concatenate([far, far + 1e-4])
    assert homogenisation(near, 0.01) == 0.5
    assert homogenisation(np.zeros((5, 4), np.float32), 0.01) == 1


def test_classes_by_homogenisation_follow_the_rows() -> None:
    bounds = TableBounds(classes=ByHomogenisation(every=1), schedule=CONSTANT)
    cold = np.concatenate([rows_of(0, 20), 1e-4 * rows_of(1, 400)])
    bounds.bound_for(0, "cold", 10**6, cold)
    bounds.bound_for(1, "distinct", 10**6, rows_of(2, 200))
    kinds = {one.table: one.tightness for one in bounds._intervals()}
    assert kinds == {"cold": Tightness.TIGHT, "distinct": Tightness.LOOSE}


@pytest.mark.parametrize("rounding", list(Rounding))
def test_bounds_are_relative_to_the_range_and_bits_follow(rounding: Rounding) -> None:
    rows = np.linspace(-1, 1, 4000, dtype=np.float32).reshape(-1, 8)
    bounds = TableBounds(schedule=CONSTANT, rounding=rounding)
    found = {name: bounds.bound_for(i, name, n, rows) for i, (name, n) in enumerate(
        {"tight": 10**6, "base": 10**4, "loose": 10}.items())}  # fmt: skip
    # Stochastic rounding has twice the bound, and needs a bit more for the same one.
    times = 2 if rounding is Rounding.STOCHASTIC else 1
    assert {k: v.bound / times for k, v in found.items()} == pytest.approx(
        {"tight": 0.0025, "base": 0.0075, "loose": 0.0125}, rel=0.01
    )
    assert [found[k].bits for k in found] == [9, 8, 7]


def test_an_outlier_and_an_odd_message_do_not_move_the_range() -> None:
    bounds = TableBounds(schedule=CONSTANT, observe_every=1)
    for step in range(12):
        usual = bounds.bound_for(0, "t", 10**6, rows_of(step))
        bounds.advance()
    spoilt = rows_of(99)
    spoilt[3, 5] = 1e9
    spoilt[4, 5] = np.inf
    found = bounds.bound_for(0, "t", 10**6, spoilt)
    assert found.bound == pytest.approx(usual.bound, rel=0.05)
    bounds.advance()
    assert bounds.bound_for(0, "t", 10**6, 1e6 * rows_of(5)).bound == pytest.approx(
        usual.bound, rel=0.05
    )
    for step in range(12):
        bounds.advance()
        last = bounds.bound_for(0, "t", 10**6, 10 * rows_of(step))
    assert last.bound == pytest.approx(10 * usual.bound, rel=0.1)  # but what stays is followed


def test_history_tells_what_was_sent() -> None:
    bounds = TableBounds(log_every=4, schedule=Schedule(iterations=8, steps=2))
    for _ in range(8):
        bounds.bound_for(0, "user", 50, rows_of(1))
        bounds.count(0, 8000, 7, 5000)
        bounds.advance()
    assert [one[1:3] for one in bounds.history] == [(0, 3), (4, 7)]
    assert {one[-3:] for one in bounds.history} == {(32_000, 28, 20_000)}
    assert [one.multiplier for one in bounds.history] == [2, 1.5]
    assert "user: iterations 4 to 7, loose" in str(bounds.history[1])
    bounds.bound_for(0, "user", 50, rows_of(1))
    assert bounds.explain().startswith("user: iterations 8 to ")


def test_resuming_goes_on_with_the_same_bounds() -> None:
    def run(bounds: TableBounds, steps: range) -> list[object]:
        found = []
        for step in steps:
            found.append(bounds.bound_for(0, "t", 10**6, (1 + step) * rows_of(step)))
            bounds.advance()
        return found

    whole = run(TableBounds(observe_every=3), range(30))
    first = TableBounds(observe_every=3)
    begun = run(first, range(17))
    second = TableBounds(observe_every=3)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert begun + run(second, range(17, 30)) == whole
    assert run(pickle.loads(pickle.dumps(first)), range(17, 30)) == whole[17:]


def test_values_without_a_range_still_get_a_bound() -> None:
    bounds = TableBounds()
    for rows in (np.zeros((4, 4), np.float32), np.full((4, 4), 7, np.float32)):
        assert bounds.bound_for(len(bounds._states), "t", 10, rows).bound > 0
    assert bounds.bound_for(9, "t", 10, np.full((2, 2), np.nan, np.float32)).bound > 0


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="relative bound of user"):
        TableBounds(overrides={"user": 0})
    with pytest.raises(ValueError, match="start must be at least 1"):
        Schedule(start=0.5)
