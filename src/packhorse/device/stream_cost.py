"""A model of time for the kernels of `packhorse.kernels.stream_product`, and the divisions that are
worth measuring. It needs no GPU.

The time is a launch, the arranging kernel if there is one, during which the first weights are
fetched, and the turns of the busiest program. A turn takes a little more than the slowest of three
things that go on at once: reading weights, moving weights and tokens from L2, and decoding and
multiplying. The cycles of the last are simulated (`benchmarks/gpu/stream_simulations.py`).
`expect_stream` knows how far an H200 was from that.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from packhorse.device.cost import EXCEPTION_RATES, packed_nbytes, processor_bandwidth
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.stream_product import (
    MAX_STREAM_TOKENS,
    StreamConfig,
    default_stream_config,
    fill_stages,
    keeps_tokens,
    plan_stream,
)
from packhorse.layout import W11, W12, WeightFormat

__all__ = ["clusters_at_once", "expect_stream", "predict_stream", "stream_candidates"]

_BF16_NBYTES = 2
_WARP = 32
# Cycles by rows and tokens of a program, from `python benchmarks/gpu.py simulate --stream` with
# W12 and a memory that never makes a warp wait: of a turn, and of the end of a unit of 4096
# columns (sums, results, and the start of the next one). Simulated, not measured.
_CYCLES: dict[tuple[int, int], tuple[float, float]] = {
    (16, 8): (1080, 190),
    (32, 8): (1250, 580),
    (48, 8): (1860, 2640),
    (64, 8): (2590, 1490),
    (16, 16): (930, 1950),
    (32, 16): (1500, 1700),
    (48, 16): (1810, 5480),
    (64, 16): (2900, 2740),
    (16, 32): (1390, 1600),
    (32, 32): (1940, 1840),
    (48, 32): (3150, 2410),
    (64, 64): (540, 2800),
    (128, 64): (770, 3300),
    (64, 128): (700, 3700),
    (128, 128): (1150, 4700),
    (64, 256): (1220, 7600),
}
# Instructions of a turn of W11 beside one of W12, which has fewer columns if there are many tokens.
_W11_SHARE = {True: 2.9 / 2.1, False: 4 * 3.5 / 3.0}
# Cycles that a warp sums up exceptions of a unit, from the same simulation: at all, and for each.
_EXCEPTIONS = 3000
_EXCEPTION = {64: 90, 128: 110, 256: 150}
_AT_ONCE = 4  # exceptions that a thread loads at once, with 32 tokens
_FINISH = 1500  # cycles until their results are stored; assumed
_FEW_BOXES = 4  # stages of weights in a turn up to 32 tokens
_START = 700  # cycles until a program fetches weights; assumed, as in the simulation
_LOAD, _COPY = 650, 900  # cycles, as in cost.py
_GAP, _EARLY_GAP = 1.8e-6, 0.9e-6  # between dependent kernels, and if the later one starts early
_ARRANGING = (1500, 3.0)  # cycles of the first kernel: at all, and of a token of 4096 columns
_ADDING = 0.8e-6  # of the kernel that adds parts, beside what it reads
# Fitted to the simulation; cost.py has the same sum of powers.
_SHARPNESS = 9
# The share of multiprocessors that programs of a cluster reach, because a cluster never spans two
# groups of multiprocessors, and groups differ in size: on an H200, 30 clusters of 4 ran at once.
_REACHED = {1: 1.0, 2: 1.0, 4: 10 / 11}
# The time that an H200 took, relative to the predicted one, by tokens and cluster of a program:
# geometric means over matrices of two Llamas, tuned, and untuned ones before, which all had
# clusters of 4 (docs/decisions.md, section 42). With 8 tokens and clusters of 4 it was 0.92; the
# tuner, which measured both, mostly preferred clusters of 2.
_MEASURED = {
    W12.name: {
        (8, 2): 1.00, (8, 4): 1.00, (16, 2): 1.02, (16, 4): 1.00, (32, 2): 1.12, (32, 4): 1.10,
        (64, 1): 0.95, (64, 2): 1.08, (64, 4): 1.18, (128, 1): 1.03, (128, 2): 1.17,
        (128, 4): 1.33, (256, 1): 0.85, (256, 2): 1.01, (256, 4): 1.19,
    },
    W11.name: {(8, 4): 1.25, (16, 4): 1.40, (32, 4): 1.20},
}  # fmt: skip


def predict_stream(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    config: StreamConfig,
    device: DeviceModel,
) -> float:
    """Seconds of a product.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        config: how the product is divided.
        device: the GPU.

    Returns:
        The seconds; infinity if the division does not fit.
    """
    plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
    resident = device.shared_nbytes // (plan.shared_nbytes + 1024)
    if resident == 0:
        return math.inf
    few = config.block_tokens <= _WARP
    counted = _CYCLES.get((config.block_rows, config.block_tokens))
    if counted is None:
        return math.inf
    rounds = -(-plan.n_units // clusters_at_once(config, device))
    turns = -(-plan.n_turns // config.n_splits)  # of a unit
    share = rounds / (plan.n_units * config.cluster)  # of the memory, for the busiest program

    # Cycles of a turn.
    weights = packed_nbytes(n_rows, n_columns, format) * plan.n_token_blocks
    weights /= plan.n_units * config.cluster * turns
    tokens = config.block_tokens * n_columns * _BF16_NBYTES / (plan.n_turns * config.cluster)
    drawn = min(device.bandwidth * share * plan.n_token_blocks, processor_bandwidth(device))
    memory = weights * device.clock / drawn
    if keeps_tokens(n_columns, n_tokens, format, config):
        tokens /= rounds
    l2 = (weights + tokens) * device.clock / (device.l2_bandwidth * share)
    multiply, end = counted
    exceptions = EXCEPTION_RATES[format.name] * n_columns / config.n_splits  # of a row
    if format is not W12:
        multiply *= _W11_SHARE[few]
    issue = multiply
    if few:  # two warps take the exceptions of a unit meanwhile, one load after the other
        passes = -(-config.block_rows // _WARP)
        at_once = min(_AT_ONCE * _WARP // config.block_tokens, 8)
        trips = 2 + 2 * math.ceil((1.3 * exceptions + 2) / at_once)
        issue = max(issue + end / turns, (passes * trips * _LOAD + _FINISH) / turns)
    pace = _together(memory, l2, issue)

    # Weights are fetched while the tokens are arranged.
    first = _START + _COPY
    late = float(first)
    if plan.n_arranging + plan.n_transposing:
        arranging = _ARRANGING[0] + _ARRANGING[1] * n_tokens * n_columns / 4096
        late = max(late, arranging + _EARLY_GAP * device.clock + _LOAD)
    staged = config.n_weight_stages // (_FEW_BOXES if few else 1)
    ready = min(staged, turns, (late - first) / memory)
    if few:
        cycles = late + ready * multiply + (rounds * turns - ready) * pace + end + 2 * _LOAD
    else:  # each of two warps has half of the exceptions of a unit
        n = exceptions * config.block_rows / 2
        summing = _EXCEPTIONS + n * _EXCEPTION[config.block_tokens]
        cycles = late + rounds * max(turns * pace + end, summing + end / 2)
        cycles -= ready * (pace - multiply)
    partial = 0.0
    if plan.n_adding:
        partial = 1.3 * plan.parts_nbytes / device.l2_bandwidth + _ADDING + _GAP
    elif config.n_splits > 1:
        partial = 8 * config.n_splits * n_tokens * n_rows / device.l2_bandwidth + _GAP
    return cycles / device.clock + partial + _GAP


def clusters_at_once(config: StreamConfig, device: DeviceModel) -> int:
    """Clusters of programs that a GPU runs at once; at least 1."""
    return max(int(device.n_processors * _REACHED[config.cluster]) // config.cluster, 1)


def expect_stream(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: DeviceModel
) -> tuple[StreamConfig, float]:
    """The division that is expected to be the fastest, and its seconds: predicted, times the share
    that an H200 took.

    Args:
        n_rows, n_columns, n_tokens, format, device: as for `predict_stream`; not more tokens than
            the kernels take.
    """
    size = n_rows, n_columns, n_tokens, format

    def expected(config: StreamConfig) -> float:
        return _measured_share(format, config) * predict_stream(*size, config, device)

    best = min(stream_candidates(*size, device.n_processors), key=expected)
    return best, expected(best)


def _measured_share(format: WeightFormat, config: StreamConfig) -> float:
    """How many times as long as `predict_stream` says an H200 took for products with such a
    division."""
    at = config.block_tokens, config.cluster
    few = config.block_tokens, 4  # W11 was timed with clusters of 4 only
    shares = _MEASURED[format.name]
    return shares.get(at) or shares.get(few) or _MEASURED[W12.name][at]


def _together(*times: float) -> float:
    """The time of things that go on at once and wait for each other now and then."""
    return float(sum(t**_SHARPNESS for t in times) ** (1 / _SHARPNESS))


def stream_candidates(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, n_processors: int
) -> Iterator[StreamConfig]:
    """Divisions that are worth measuring, the default one first. Up to 32 tokens they all add in
    the same order."""
    if n_tokens > MAX_STREAM_TOKENS:
        return
    default = default_stream_config(n_rows, n_columns, n_tokens, format, n_processors)
    few = default.block_tokens <= _WARP
    yield default
    splits = {default.n_splits} if few else {default.n_splits, 1, 2, 4}
    for rows in (16, 32, 48, 64) if few else (64, 128):
        for cluster in (2, 4) if few else (1, 2, 4):
            for n_splits in sorted(splits):
                config = replace(default, block_rows=rows, cluster=cluster, n_splits=n_splits)
                found = fill_stages(config, format, n_columns)
                fits = n_rows >= rows * cluster and (few or n_splits <= rows // 16)
                if found is not None and found != default and fits:
                    yield found
