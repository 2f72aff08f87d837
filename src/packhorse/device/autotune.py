"""Which strategy and which division a product with a packed weight gets: measured if it was tuned,
predicted by the model of time if it was not.

`choose` is what layers ask. `tune` searches, for one matrix: by coordinate descent on the time of
divisions, for each bucket of tokens. What the search calls for a time is an argument: measurements
on a GPU (`packhorse.device.timing`), or the model.

Up to 32 tokens all buckets share the fields that the order of sums depends on, which are found for
1, 8 and 32 tokens together, and all of them are fused: so a token's result is the same in any batch
of up to 32. Beyond, each bucket takes what is fastest.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from operator import mul
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from packhorse.device.cost import (
    GENERIC,
    MEMORY_SHARE,
    DeviceModel,
    model_of,
    predict_decode,
    predict_fused,
    predict_plain,
    scale_model,
)
from packhorse.device.strategy import (
    BUCKETS,
    INVARIANT_TOKENS,
    MAX_FUSED_TOKENS,
    Choice,
    Strategy,
    bucket_of,
)
from packhorse.device.tune_cache import (
    Entries,
    Identity,
    Key,
    Measured,
    cache_path,
    load_cache,
    order_of,
)
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.matmul import (
    MAX_BLOCK_TOKENS,
    MatmulConfig,
    default_config,
    multiply_weights,
)
from packhorse.kernels.matmul_many import ManyConfig, multiply_many
from packhorse.kernels.weights import decode_weights
from packhorse.layout import W12, WeightFormat

__all__ = [
    "MIN_CAPABILITY",
    "TOKEN_SIZES",
    "Config",
    "Measure",
    "Search",
    "choose",
    "describe_device",
    "expect",
    "forget_choices",
    "identify",
    "multiply",
    "predictor",
    "run_choice",
    "tune",
    "use_cache",
]

# Seconds of a product of so many tokens by a choice; infinity if it does not run.
Config: TypeAlias = MatmulConfig | ManyConfig
_AnyConfig = TypeVar("_AnyConfig", MatmulConfig, ManyConfig)
Measure: TypeAlias = Callable[[Choice, int], float]

MIN_CAPABILITY = 80  # of tensor cores that take BF16
TOKEN_SIZES = tuple(n for n in (8, 16, 32, 64, 128, 256) if n <= MAX_BLOCK_TOKENS)
# What the order of sums is found for, together, and how much each counts: decoding for few users is
# what packed weights are for.
_ORDER_TOKENS = {1: 3, 8: 2, 32: 1}
# What is tried. Each combination that the model does not know (it spills, or is too large) is left
# out before anything is measured.
_ORDER_FIELDS: dict[str, tuple[int, ...]] = {
    "block_steps": (32, 64, 128),
    "n_warps": (2, 4, 8),
    "n_splits": (1, 2, 4, 8),
}
_FREE_FIELDS: dict[str, tuple[int, ...]] = {
    "block_rows": (16, 32, 64, 128),
    "n_stages": (2, 3, 4, 5),
    "n_tiles": (1, 2, 3, 4),
}
_MANY_FIELDS: dict[str, tuple[int, ...]] = {
    "block_rows": (64, 128, 256),
    "block_tokens": (16, 32, 64, 128),
    "block_steps": (32, 64),
    "n_warps": (4, 8),
    "n_splits": (1, 2, 4, 8),
    "n_stages": (2, 3, 4),
}
# A candidate that the model expects to take so many times as long as the best is not measured.
_HOPELESS = 1.5


@dataclass
class Search:
    """How a search is limited, and what it has cost.

    Attributes:
        is_late: called before each measurement; True ends the search with what it has found.
        on_measured: called after each with what was measured.
        n_measured: measurements so far.
    """

    is_late: Callable[[], bool] = field(default_factory=lambda: _never)
    on_measured: Callable[[Choice, int, float], None] = field(default_factory=lambda: _ignore)
    n_measured: int = 0


def _never() -> bool:
    return False


def _ignore(choice: Choice, n_tokens: int, seconds: float) -> None:
    pass


def predictor(n_rows: int, n_columns: int, form: WeightFormat, device: DeviceModel) -> Measure:
    """The model of time for a matrix, as what a search calls."""

    def predict(choice: Choice, n_tokens: int) -> float:
        if choice.config is None:
            return predict_decode(n_rows, n_columns, n_tokens, form, device)
        return predict_fused(n_rows, n_columns, n_tokens, form, choice.config, device)

    return predict


def tune(
    n_rows: int,
    n_columns: int,
    form: WeightFormat,
    device: DeviceModel,
    measure: Measure | None = None,
    *,
    buckets: Iterable[int] = BUCKETS,
    order: MatmulConfig | None = None,
    search: Search | None = None,
) -> dict[int, Measured]:
    """Finds the best choice for each number of tokens.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns.
        form: its format.
        device: its model leaves out candidates that are hopeless.
        measure: gives the seconds of a choice; None for the model.
        buckets: numbers of tokens, of `BUCKETS`.
        order: a division with the order of sums to keep up to 32 tokens; None to find one.
        search: its limits.

    Returns:
        For each bucket what is best, and its seconds; without those for which nothing ran, or for
        which there was no time.
    """
    predict = predictor(n_rows, n_columns, form, device)
    tuner = _Tuner(form, predict, measure or predict, search or Search())
    few = [n for n in sorted(buckets) if n <= INVARIANT_TOKENS]
    many = [n for n in sorted(buckets) if n > INVARIANT_TOKENS]
    if device.capability < MIN_CAPABILITY:
        found = {n: tuner.decoded(n) for n in few + many}
    else:
        order = order or (tuner.find_order() if few else None)
        found = {n: tuner.fused(n, order) for n in few if order is not None}
        for n in many:
            ways = [tuner.decoded(n)]
            if n <= MAX_FUSED_TOKENS:
                ways.append(tuner.many(n) if form is W12 else tuner.fused(n, None))
            found[n] = min((way for way in ways if way), key=lambda way: way.seconds, default=None)
    return {n: measured for n, measured in found.items() if measured is not None}


class _Tuner:
    """The search for one matrix; each measurement is taken once."""

    def __init__(
        self, form: WeightFormat, predict: Measure, measure: Measure, search: Search
    ) -> None:
        self._form = form
        self._predict = predict
        self._measure = measure
        self._search = search
        self._known: dict[tuple[Choice, int], float] = {}

    def find_order(self) -> MatmulConfig | None:
        """A division whose order of sums is the best for few tokens together."""
        fields = _ORDER_FIELDS | _FREE_FIELDS | {"block_tokens": (0,)}  # as many as there are
        start, least = self._expect(MatmulConfig, fields, list(_ORDER_TOKENS))
        if start is None:
            return None
        unit = self._times(start, [math.inf] * len(least))

        def cost(config: MatmulConfig, hopeless: float) -> float:
            times = self._times(config, [hopeless * seconds for seconds in least])
            shares = [t / u if u < math.inf else t for t, u in zip(times, unit, strict=True)]
            return float(sum(map(mul, shares, _ORDER_TOKENS.values())))

        least_config = _least(MatmulConfig, fields)
        for first, hopeless in ((start, _HOPELESS), (start, math.inf), (least_config, math.inf)):
            best, total = _descend(first, fields, partial(cost, hopeless=hopeless))
            if total < math.inf:
                return best
        return None

    def _times(self, config: MatmulConfig, limits: Sequence[float]) -> list[float]:
        return [
            self._seconds(_for_tokens(config, n), n, limit)
            for n, limit in zip(_ORDER_TOKENS, limits, strict=True)
        ]

    def fused(self, n_tokens: int, order: MatmulConfig | None) -> Measured | None:
        """The best division for a number of tokens, with a given order of sums or any."""
        fields = _FREE_FIELDS | {"block_tokens": _token_sizes(n_tokens)}
        if order is None:
            fields = fields | _ORDER_FIELDS
        else:
            steps, n_warps, n_splits = order_of(order)
            fields = fields | {"block_steps": (steps,), "n_warps": (n_warps,)}
            fields = fields | {"n_splits": (n_splits,)}
        return self._search_from(MatmulConfig, fields, n_tokens)

    def _search_from(
        self, kind: type[_AnyConfig], fields: Mapping[str, Sequence[int]], n_tokens: int
    ) -> Measured | None:
        """Descends from the division that the model expects to be the best."""
        start, least = self._expect(kind, fields, (n_tokens,))
        if start is None:
            return None
        # What the model favours may not run, nor what differs from it in one field.
        hopeless = _HOPELESS * least[0]
        attempts = (start, hopeless), (start, math.inf), (_least(kind, fields), math.inf)
        for first, limit in attempts:
            seconds_of = partial(self._seconds, n_tokens=n_tokens, limit=limit)
            best, seconds = _descend(first, fields, seconds_of)
            if seconds < math.inf:
                return Measured(_fused(best), seconds)
        return None

    def many(self, n_tokens: int) -> Measured | None:
        """The best division of the kernel for many tokens."""
        return self._search_from(ManyConfig, _MANY_FIELDS, n_tokens)

    def decoded(self, n_tokens: int) -> Measured | None:
        """Decoding, and a plain product."""
        choice = Choice(Strategy.DECODE)
        seconds = self._take(choice, n_tokens)
        return Measured(choice, seconds) if seconds < math.inf else None

    def _expect(
        self, kind: type[_AnyConfig], fields: Mapping[str, Sequence[int]], tokens: Sequence[int]
    ) -> tuple[_AnyConfig | None, list[float]]:
        """The division that the model expects to be the best, and its seconds for each number."""
        best: _AnyConfig | None = None
        least, total = [math.inf] * len(tokens), math.inf
        for config in _grid(kind, fields):
            times = [self._predict(_fused(_for_tokens(config, n)), n) for n in tokens]
            weighed = sum(_ORDER_TOKENS.get(n, 1) * t for n, t in zip(tokens, times, strict=True))
            if weighed < total:
                best, least, total = config, times, weighed
        return best, least

    def _seconds(self, config: Config, n_tokens: int, limit: float) -> float:
        choice = _fused(config)
        predicted = self._predict(choice, n_tokens)
        if predicted > limit or predicted == math.inf:
            return math.inf
        return self._take(choice, n_tokens)

    def _take(self, choice: Choice, n_tokens: int) -> float:
        key = choice, n_tokens
        if key not in self._known:
            if self._search.is_late():
                return math.inf
            self._known[key] = self._measure(choice, n_tokens)
            self._search.n_measured += 1
            self._search.on_measured(choice, n_tokens, self._known[key])
        return self._known[key]


def _fused(config: Config) -> Choice:
    strategy = Strategy.MANY if isinstance(config, ManyConfig) else Strategy.FUSED
    return Choice(strategy, config)


def _for_tokens(config: _AnyConfig, n_tokens: int) -> _AnyConfig:
    """With blocks that hold all of a few tokens; as it is if the size of a block was chosen."""
    if isinstance(config, ManyConfig) or config.block_tokens:
        return config
    return replace(config, block_tokens=_token_sizes(n_tokens)[0])


def _token_sizes(n_tokens: int) -> tuple[int, ...]:
    """Sizes of a block of tokens that may be best: what holds all, and what is not half empty."""
    least = next((size for size in TOKEN_SIZES if size >= n_tokens), TOKEN_SIZES[-1])
    return (least, *(size for size in TOKEN_SIZES if size < least and size * 4 >= least))


def _grid(kind: type[_AnyConfig], fields: Mapping[str, Sequence[int]]) -> Iterator[_AnyConfig]:
    for values in product(*fields.values()):
        yield kind(**dict(zip(fields, values, strict=True)))


def _least(kind: type[_AnyConfig], fields: Mapping[str, Sequence[int]]) -> _AnyConfig:
    """The division that takes the least memory."""
    return kind(**{name: min(values) for name, values in fields.items()})


def _descend(
    start: _AnyConfig,
    fields: Mapping[str, Sequence[int]],
    cost: Callable[[_AnyConfig], float],
) -> tuple[_AnyConfig, float]:
    """Coordinate descent: field after field the best value, until none gets better."""
    best, least = start, cost(start)
    improved = True
    while improved:
        improved = False
        for name, values in fields.items():
            others = [value for value in values if value != getattr(best, name)]
            for config in [replace(best, **{name: value}) for value in others]:
                seconds = cost(config)
                if seconds < least:
                    best, least, improved = config, seconds, True
    return best, least


# What layers ask.


def choose(
    n_rows: int, n_columns: int, n_tokens: int, form: WeightFormat, device: torch.device
) -> Choice:
    """What to run for a product of a packed weight with some tokens.

    The first call for a matrix reads the cache or asks the model; all others look it up. Nothing
    on the device is read, and nothing waits for it.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        form: its format.
        device: the GPU.
    """
    return expect(n_rows, n_columns, n_tokens, form, device)[0].choice


_EXPECTED: dict[tuple[int, int, int, str, str, int | None], tuple[Measured, bool]] = {}
_ENTRIES: dict[str, Entries] = {}  # of each GPU by its name; read once
_FOLDERS: list[str | os.PathLike[str] | None] = [None]
_LOCK = Lock()
_TOO_LARGE: set[tuple[Choice, str, torch.device]] = set()  # what did not fit, for which format


def expect(
    n_rows: int, n_columns: int, n_tokens: int, form: WeightFormat, device: torch.device
) -> tuple[Measured, bool]:
    """What a product with a packed weight is expected to take, by what `choose` chooses for it.

    Args:
        n_rows: as for `choose`, and so the others.
        n_columns: columns of the weight.
        n_tokens: vectors.
        form: format of the weight.
        device: the GPU.

    Returns:
        The figures, with those of the plain product where they are known; and whether they were
        measured. Predicted seconds are infinite where the model knows nothing.
    """
    bucket = bucket_of(n_tokens)
    key = n_rows, n_columns, bucket, form.name, device.type, device.index
    found = _EXPECTED.get(key)
    if found is None:
        found = _EXPECTED[key] = _expect(n_rows, n_columns, bucket, form, device)
    return found


def _expect(
    n_rows: int, n_columns: int, bucket: int, form: WeightFormat, device: torch.device
) -> tuple[Measured, bool]:
    model = describe_device(device)
    measured = _entries(device).get(Key(n_rows, n_columns, form.name), {})
    if bucket in measured:
        return measured[bucket], True
    few = [row.choice.config for n, row in measured.items() if n <= INVARIANT_TOKENS]
    order = next((config for config in few if isinstance(config, MatmulConfig)), None)
    found = tune(n_rows, n_columns, form, model, buckets=[bucket], order=order).get(bucket)
    if found is None:
        found = Measured(_default(n_rows, n_columns, bucket, form, model), math.inf)
    return replace(found, plain_seconds=predict_plain(n_rows, n_columns, bucket, model)), False


def _default(n_rows: int, n_columns: int, n: int, form: WeightFormat, model: DeviceModel) -> Choice:
    """For a GPU that is too small for all divisions that the model knows."""
    if n > INVARIANT_TOKENS:
        return Choice(Strategy.DECODE)
    shared_nbytes = model.shared_nbytes - 1024  # what the system keeps
    return _fused(default_config(n_rows, n_columns, n, form, model.n_processors, shared_nbytes))


def _entries(device: torch.device) -> Entries:
    if device.type != "cuda":
        return {}
    identity = identify(device)
    with _LOCK:
        if identity.device not in _ENTRIES:
            path = cache_path(identity.device, _FOLDERS[0])
            _ENTRIES[identity.device] = load_cache(path, identity)
        return _ENTRIES[identity.device]


def use_cache(folder: str | os.PathLike[str] | None) -> None:
    """Reads measured choices from another folder from now on.

    Args:
        folder: None for the usual one.
    """
    _FOLDERS[0] = folder
    forget_choices()


def forget_choices() -> None:
    """Makes the next products look into the cache again, after it was written."""
    with _LOCK:
        _ENTRIES.clear()
    _EXPECTED.clear()
    _TOO_LARGE.clear()


def identify(device: torch.device) -> Identity:
    """What figures of this GPU hold for."""
    found = torch.cuda.get_device_properties(device)
    version = sys.modules["packhorse"].__version__  # the package is above this layer
    return Identity(found.name, found.multi_processor_count, triton.__version__, version)


def describe_device(device: torch.device) -> DeviceModel:
    """What a GPU can do, by the presets, or else by what its driver tells."""
    if device.type != "cuda":
        return GENERIC
    found = torch.cuda.get_device_properties(device)
    model = replace(model_of(found.name), capability=found.major * 10 + found.minor)
    if model.name == GENERIC.name:
        shared = getattr(found, "shared_memory_per_multiprocessor", GENERIC.shared_nbytes)
        model = replace(
            model, shared_nbytes=shared, l2_nbytes=getattr(found, "L2_cache_size", model.l2_nbytes)
        )
    return scale_model(model, found.multi_processor_count, _told_bandwidth(found))


def _told_bandwidth(found: Any) -> float | None:
    """Bytes a second by the clock and width of the memory, where PyTorch tells them."""
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 * MEMORY_SHARE or None


def multiply(
    x: torch.Tensor,
    weights: WeightTensors,
    form: WeightFormat,
    n_columns: int,
    *,
    bias: torch.Tensor | None = None,
    choice: Choice | None = None,
) -> torch.Tensor:
    """A product by a choice; if the GPU is too small for that, a warning once, and by decoding.

    Takes, gives and raises what `packhorse.kernels.matmul.multiply_weights` does, but for:

    Args:
        choice: what to run; None for what `choose` says.
    """
    if choice is None:
        choice = choose(len(weights.first_exponents), n_columns, len(x), form, x.device)
    failed = choice, form.name, x.device
    if not _TOO_LARGE or failed not in _TOO_LARGE:
        try:
            return run_choice(choice, x, weights, form, n_columns, bias=bias)
        except OutOfResources as error:
            _TOO_LARGE.add(failed)
            warnings.warn(
                f"{choice} does not fit on this GPU ({error}): weights are decoded first instead, "
                "which is slower. Run `packhorse tune` to find what fits",
                RuntimeWarning,
                stacklevel=2,
            )
    return run_choice(Choice(Strategy.DECODE), x, weights, form, n_columns, bias=bias)


def run_choice(
    choice: Choice,
    x: torch.Tensor,
    weights: WeightTensors,
    form: WeightFormat,
    n_columns: int,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by a given choice, and by no other.

    Args:
        choice: what to run.
        x: BF16, n_tokens x n_columns.
        weights: checked arrays of `n_rows` rows.
        form: their format.
        n_columns: columns of the matrix.
        bias: BF16, n_rows.

    Returns:
        BF16, n_tokens x n_rows.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is elsewhere, or is not contiguous.
        OutOfResources: of Triton, if a program is too large for the GPU.
    """
    if choice.strategy is Strategy.DECODE:
        return torch.nn.functional.linear(x, decode_weights(weights, form, n_columns), bias)
    if choice.strategy is Strategy.MANY:
        assert not isinstance(choice.config, MatmulConfig)
        return multiply_many(x, weights, n_columns, bias=bias, config=choice.config)
    assert not isinstance(choice.config, ManyConfig)
    return multiply_weights(x, weights, form, n_columns, bias=bias, config=choice.config)
