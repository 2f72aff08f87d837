"""The cache of measured products with packed weights on a GPU: for each matrix and number of
tokens, the fastest choice.

Every entry is checked when it is read: it must be one that this release could have written.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from packhorse.device.strategy import (
    BUCKETS,
    INVARIANT_TOKENS,
    MAX_FUSED_TOKENS,
    Choice,
    Strategy,
)
from packhorse.gpu.figure_cache import FigureCache, require, require_keys
from packhorse.kernels.matmul import MatmulConfig
from packhorse.kernels.stream_product import MAX_STREAM_TOKENS, StreamConfig, check_stream
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS

__all__ = [
    "CONFIG_VALUES",
    "TUNE_CACHE",
    "Entries",
    "Key",
    "Measured",
    "check_config",
    "order_of",
]

_MAX_ROWS = 1 << 31
# The values that each field of a division may have. The launchers accept all of them; some fit on
# no GPU.
CONFIG_VALUES: dict[type, dict[str, tuple[int, ...]]] = {
    MatmulConfig: {
        "block_rows": (16, 32, 64, 128, 256),
        "block_tokens": (8, 16, 32, 64),
        "block_steps": (16, 32, 64, 128, 256),
        "n_warps": (1, 2, 4, 8),
        "n_splits": (1, 2, 4, 8, 16, 32, 64),
        "n_stages": (1, 2, 3, 4, 5, 6, 7, 8),
        "n_tiles": (1, 2, 3, 4),
    },
    StreamConfig: {
        "block_rows": (16, 32, 48, 64, 128),
        "block_tokens": (8, 16, 32, 64, 128, 256),
        "n_weight_stages": tuple(range(2, 17)),
        "n_token_stages": tuple(range(2, 65)),
        "cluster": (1, 2, 4),
        "n_splits": (1, 2, 4, 8, 16, 32, 64),
    },
}
_KINDS: dict[str, tuple[type, int]] = {  # divisions of strategies, most tokens
    Strategy.FUSED.value: (MatmulConfig, MAX_FUSED_TOKENS),
    Strategy.STREAM.value: (StreamConfig, MAX_STREAM_TOKENS),
}


@dataclass(frozen=True)
class Key:
    """A matrix whose products were measured.

    Attributes:
        n_rows: its rows.
        n_columns: its columns.
        format: name of its format.
    """

    n_rows: int
    n_columns: int
    format: str


@dataclass(frozen=True)
class Measured:
    """The best choice for a number of tokens.

    Attributes:
        choice: the best choice.
        seconds: the time of the choice.
        plain_seconds: the time of a product with the BF16 weight; None if it was not measured.
    """

    choice: Choice
    seconds: float
    plain_seconds: float | None = None


Entries: TypeAlias = dict[Key, dict[int, Measured]]


def order_of(config: MatmulConfig) -> tuple[int, int, int]:
    """The fields of a division that the order of sums depends on."""
    return config.block_steps, config.n_warps, config.n_splits


def check_config(config: MatmulConfig | StreamConfig) -> None:
    """Checks the ranges of a division, and whether its fields fit each other.

    Raises:
        ValueError: a field is out of its range, or they do not fit; the message names it.
    """
    for field in fields(config):
        value, allowed = getattr(config, field.name), CONFIG_VALUES[type(config)][field.name]
        if type(value) is not int or value not in allowed:
            raise ValueError(f"{field.name} is {value!r}; it must be one of {allowed}")
    if isinstance(config, StreamConfig):
        check_stream(config)


def _parse_entry(entry: Any) -> tuple[Key, dict[int, Measured]]:
    require_keys(entry, {"n_rows", "n_columns", "form", "buckets"}, "an entry")
    n_rows, n_columns = entry["n_rows"], entry["n_columns"]
    require(type(n_rows) is int and 0 < n_rows < _MAX_ROWS, "n_rows is out of range")
    require(
        type(n_columns) is int and 0 < n_columns <= MAX_WEIGHT_COLUMNS, "n_columns is out of range"
    )
    require(type(entry["form"]) is str and entry["form"] in WEIGHT_FORMATS, "the format is unknown")
    require(type(entry["buckets"]) is list, "buckets is not a list")
    parsed = [_parse_measured(row) for row in entry["buckets"]]
    numbers = [n_tokens for n_tokens, _ in parsed]
    require(numbers == sorted(set(numbers)), "buckets do not ascend")
    orders = {_order(measured) for n, measured in parsed if n <= INVARIANT_TOKENS}
    require(len(orders) <= 1, "the order of sums depends on the number of tokens")
    return Key(n_rows, n_columns, entry["form"]), dict(parsed)


def _order(measured: Measured) -> tuple[int, ...] | None:
    config = measured.choice.config
    if isinstance(config, StreamConfig):
        return (config.n_splits,)
    return order_of(config) if isinstance(config, MatmulConfig) else None


def _parse_measured(row: Any) -> tuple[int, Measured]:
    names = {"n_tokens", "strategy", "config", "seconds", "plain_seconds"}
    require_keys(row, names, "a bucket")
    n_tokens, strategy, config = row["n_tokens"], row["strategy"], row["config"]
    require(type(n_tokens) is int and n_tokens in BUCKETS, "the number of tokens is not a bucket")
    require(strategy in [s.value for s in Strategy], "the strategy is unknown")
    times = [row["seconds"]] + ([row["plain_seconds"]] if row["plain_seconds"] is not None else [])
    require(
        all(type(time) is float and 0 < time < math.inf for time in times),
        "a time is not a positive number",
    )
    if strategy == Strategy.DECODE.value:
        require(config is None, "a strategy without a division has one")
        choice = Choice(Strategy.DECODE)
    else:
        kind, most = _KINDS[strategy]
        require(n_tokens <= most, f"too many tokens for the strategy {strategy}")
        require_keys(config, {field.name for field in fields(kind)}, "a division")
        parsed = kind(**config)
        check_config(parsed)
        shares = isinstance(parsed, MatmulConfig) and parsed.shares
        require(not shares or n_tokens > INVARIANT_TOKENS, "few tokens have the order of many")
        choice = Choice(Strategy(strategy), parsed)
    return n_tokens, Measured(choice, row["seconds"], row["plain_seconds"])


def _dump_entry(key: Key, buckets: dict[int, Measured]) -> dict[str, Any]:
    rows = [
        {
            "n_tokens": n_tokens,
            "strategy": measured.choice.strategy.value,
            "config": None if measured.choice.config is None else asdict(measured.choice.config),
            "seconds": measured.seconds,
            "plain_seconds": measured.plain_seconds,
        }
        for n_tokens, measured in sorted(buckets.items())
    ]
    return {
        "n_rows": key.n_rows, "n_columns": key.n_columns, "form": key.format, "buckets": rows,
    }  # fmt: skip


TUNE_CACHE = FigureCache[Key, dict[int, Measured]](
    "tune",
    # 1 had the kernel for many tokens, and fused products of 512 and 1024 tokens; 2 had divisions
    # of the kernels in CUDA C++ that an H200 ran wrongly.
    version=3,
    parse=_parse_entry,
    dump=_dump_entry,
    remedy=(
        "measured choices are not used: {}; predictions choose the kernels instead. Run "
        "`packhorse tune` to measure again"
    ),
)
