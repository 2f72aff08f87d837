"""The search for the fastest way to multiply with one matrix, for each number of tokens.

The caller gives the search a function that returns the time of a candidate: a measurement on a GPU
(`product_timer.py`) or the model of time. The model also rules out hopeless candidates before they
are measured.

Up to 32 tokens, all products are fused and share the fields that the order of sums depends on, so
that a token's result is the same in any batch of up to 32. These fields are chosen for 1, 8 and 32
tokens together. Above 32, each bucket takes whatever is fastest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import mul
from typing import TypeAlias

from packhorse.device.cost import predict_decode, predict_fused
from packhorse.device.strategy import (
    BUCKETS,
    INVARIANT_TOKENS,
    MAX_FUSED_TOKENS,
    Choice,
    Strategy,
)
from packhorse.device.stream_cost import predict_stream, stream_candidates
from packhorse.device.tune_cache import Measured, order_of
from packhorse.gpu.models import DeviceModel
from packhorse.gpu.search import Fields, Measurements, Search, expect_best, find_best
from packhorse.kernels.matmul import MAX_BLOCK_TOKENS, MatmulConfig
from packhorse.kernels.stream_product import MAX_STREAM_TOKENS, StreamConfig
from packhorse.layout import WeightFormat

__all__ = [
    "MIN_CAPABILITY",
    "TOKEN_SIZES",
    "Measure",
    "expect_order",
    "predictor",
    "tune",
]

# Takes a choice and a number of tokens, and returns the seconds of the product; infinity if it does
# not run.
Measure: TypeAlias = Callable[[Choice, int], float]

MIN_CAPABILITY = 80  # of tensor cores that take BF16
TOKEN_SIZES = tuple(n for n in (8, 16, 32, 64, 128, 256) if n <= MAX_BLOCK_TOKENS)
_HOPELESS_STREAM = 1.5  # candidates that are expected to take this much longer are not measured
# Numbers of tokens for which the order of sums is chosen, and how much each counts: packed weights
# are mainly for generating text for few users.
_ORDER_TOKENS = {1: 3, 8: 2, 32: 1}
# The values to try. Combinations that the model does not know, because they spill or are too large,
# are left out before anything is measured.
_ORDER_FIELDS: Fields = {
    "block_steps": (32, 64, 128),
    "n_warps": (2, 4, 8),
    "n_splits": (1, 2, 4, 8),
}
_FREE_FIELDS: Fields = {
    "block_rows": (16, 32, 64, 128),
    "n_stages": (2, 3, 4, 5, 6),
    "n_tiles": (1, 2, 3, 4),
}


def predictor(n_rows: int, n_columns: int, format: WeightFormat, device: DeviceModel) -> Measure:
    """The model of time for a matrix, as a function that a search can call."""

    def predict(choice: Choice, n_tokens: int) -> float:
        if choice.config is None:
            return predict_decode(n_rows, n_columns, n_tokens, format, device)
        if isinstance(choice.config, StreamConfig):
            return predict_stream(n_rows, n_columns, n_tokens, format, choice.config, device)
        return predict_fused(n_rows, n_columns, n_tokens, format, choice.config, device)

    return predict


def tune(
    n_rows: int,
    n_columns: int,
    format: WeightFormat,
    device: DeviceModel,
    measure: Measure | None = None,
    *,
    buckets: Iterable[int] = BUCKETS,
    order: MatmulConfig | None = None,
    search: Search[Choice, int] | None = None,
    streams: bool = False,
) -> dict[int, Measured]:
    """Finds the best choice for each number of tokens.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        format: its format.
        device: the GPU; its model rules out hopeless candidates.
        measure: gives the seconds of a choice; None for the model's prediction.
        buckets: numbers of tokens, of `BUCKETS`.
        order: a division; its order of sums is kept for up to 32 tokens. None to find one.
        search: limits of the search.
        streams: whether the kernels with warps that fetch run on the GPU. Up to 32 tokens only
            they are then measured, so that all small batches add in the same order; above, Triton's
            are measured, too.

    Returns:
        The best choice for each bucket, and its seconds. A bucket is missing if nothing ran for it,
        or if time ran out.
    """
    predict = predictor(n_rows, n_columns, format, device)
    tuner = _Tuner(predict, measure or predict, search or Search())
    size = n_rows, n_columns, format, device.n_processors
    few = [n for n in sorted(buckets) if n <= INVARIANT_TOKENS]
    many = [n for n in sorted(buckets) if n > INVARIANT_TOKENS]
    if device.capability < MIN_CAPABILITY:
        found = {n: tuner.decoded(n) for n in few + many}
    else:
        if streams:
            found = {n: tuner.stream(n, *size) for n in few}
        else:
            order = order or (tuner.find_order() if few else None)
            found = {n: tuner.fused(n, order) for n in few if order is not None}
        for n in many:
            ways = [tuner.decoded(n)]
            if streams and n <= MAX_STREAM_TOKENS:
                ways.append(tuner.stream(n, *size))
            if n <= MAX_FUSED_TOKENS:
                ways.append(tuner.fused(n, None))
            found[n] = min((way for way in ways if way), key=lambda way: way.seconds, default=None)
    return {n: measured for n, measured in found.items() if measured is not None}


def expect_order(
    n_rows: int, n_columns: int, format: WeightFormat, device: DeviceModel
) -> MatmulConfig | None:
    """The division whose order of sums the model of time expects to be the best, for `tune`; None
    if the model knows none.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        format: its format.
        device: the GPU.
    """
    predict = predictor(n_rows, n_columns, format, device)
    return _Tuner(predict, predict, Search()).find_order()


class _Tuner:
    """The search for one matrix; each measurement is taken once."""

    def __init__(self, predict: Measure, measure: Measure, search: Search[Choice, int]) -> None:
        self._predict = predict
        self._times = Measurements(predict, measure, search)

    def find_order(self) -> MatmulConfig | None:
        """Finds the division whose order of sums is best for all small numbers of tokens
        together."""
        fields = {**_ORDER_FIELDS, **_FREE_FIELDS, "block_tokens": (0,)}  # as many as there are
        start = expect_best(MatmulConfig, fields, self._expected_of_few)
        if start is None:
            return None
        least = self._expected_times(start)
        unit = self._times_of_few(start, [math.inf] * len(least))

        def cost(config: MatmulConfig, hopeless: float) -> float:
            times = self._times_of_few(config, [hopeless * seconds for seconds in least])
            shares = [t / u if u < math.inf else t for t, u in zip(times, unit, strict=True)]
            return float(sum(map(mul, shares, _ORDER_TOKENS.values())))

        found = find_best(start, fields, cost)
        return None if found is None else found[0]

    def _expected_times(self, config: MatmulConfig) -> list[float]:
        return [self._predict(_fused(_for_tokens(config, n)), n) for n in _ORDER_TOKENS]

    def _expected_of_few(self, config: MatmulConfig) -> float:
        times = self._expected_times(config)
        return float(sum(map(mul, times, _ORDER_TOKENS.values())))

    def _times_of_few(self, config: MatmulConfig, limits: Sequence[float]) -> list[float]:
        return [
            self._times.take(_fused(_for_tokens(config, n)), n, limit)
            for n, limit in zip(_ORDER_TOKENS, limits, strict=True)
        ]

    def fused(self, n_tokens: int, order: MatmulConfig | None) -> Measured | None:
        """Finds the best division for a number of tokens, with the given order of sums, or with any
        order if that is None."""
        fields = {**_FREE_FIELDS, "block_tokens": _token_sizes(n_tokens)}
        if order is None:
            return self._find({**fields, **_ORDER_FIELDS}, n_tokens)
        steps, n_warps, n_splits = order_of(order)
        kept = {"block_steps": (steps,), "n_warps": (n_warps,), "n_splits": (n_splits,)}
        return self._find({**fields, **kept}, n_tokens)

    def _find(self, fields: Fields, n_tokens: int) -> Measured | None:
        def expected(config: MatmulConfig) -> float:
            return self._predict(_fused(config), n_tokens)

        start = expect_best(MatmulConfig, fields, expected)
        if start is None:
            return None
        least = expected(start)

        def cost(config: MatmulConfig, hopeless: float) -> float:
            return self._times.take(_fused(config), n_tokens, hopeless * least)

        found = find_best(start, fields, cost)
        return None if found is None else Measured(_fused(found[0]), found[1])

    def stream(
        self, n_tokens: int, n_rows: int, n_columns: int, format: WeightFormat, n_processors: int
    ) -> Measured | None:
        """The best division of the kernels with warps that fetch."""
        configs = stream_candidates(n_rows, n_columns, n_tokens, format, n_processors)
        choices = [Choice(Strategy.STREAM, config) for config in configs]
        limit = _HOPELESS_STREAM * min(self._predict(choice, n_tokens) for choice in choices)
        times = {choice: self._times.take(choice, n_tokens, limit) for choice in choices}
        best = min(choices, key=lambda choice: times[choice])
        return Measured(best, times[best]) if times[best] < math.inf else None

    def decoded(self, n_tokens: int) -> Measured | None:
        """Decoding to memory, and a plain product."""
        choice = Choice(Strategy.DECODE)
        seconds = self._times.take_always(choice, n_tokens)
        return Measured(choice, seconds) if seconds < math.inf else None


def _fused(config: MatmulConfig) -> Choice:
    return Choice(Strategy.FUSED, config)


def _for_tokens(config: MatmulConfig, n_tokens: int) -> MatmulConfig:
    """The division with blocks that hold all of a few tokens, unless it has a size of blocks."""
    return (
        config if config.block_tokens else replace(config, block_tokens=_token_sizes(n_tokens)[0])
    )


def _token_sizes(n_tokens: int) -> tuple[int, ...]:
    """Sizes of a block of tokens that may be best: the smallest size that holds all tokens, and
    smaller ones down to a quarter of it."""
    least = next((size for size in TOKEN_SIZES if size >= n_tokens), TOKEN_SIZES[-1])
    return (least, *(size for size in TOKEN_SIZES if size < least and size * 4 >= least))
