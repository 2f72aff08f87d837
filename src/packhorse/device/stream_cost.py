"""A model of time for the kernels of `packhorse.kernels.stream_product`, and the divisions that are
worth measuring. It needs no GPU.

The time is a launch, the start of a program, and the slowest of four things that go on at once:
reading weights, moving weights and tokens from L2, issuing instructions, and multiplying. The
arranging kernel runs while the first weights are fetched. All of it is predicted; nothing has been
measured on a GPU yet.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from packhorse.device.cost import EXCEPTION_RATES, packed_nbytes
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.stream_product import (
    MAX_STREAM_TOKENS,
    StreamConfig,
    default_stream_config,
    fill_stages,
    plan_stream,
)
from packhorse.layout import WeightFormat

__all__ = ["predict_stream", "stream_candidates"]

_BF16_NBYTES = 2
_WARP = 32
_ISSUE_LANES = 128
# Instructions of a thread for a weight, counted in machine code: (format, up to 32 tokens).
_PER_WEIGHT = {("W12", True): 2.1, ("W12", False): 3.0, ("W11", True): 2.9, ("W11", False): 3.5}
_PER_WEIGHT_AND_TOKEN = {True: 0.016, False: 0.01}  # more tokens, more products
_ISSUE_SHARE = 0.5  # of the issue slots, with three warps for a scheduler; assumed
_MMA_SHARE = {True: 0.63, False: 0.75}  # of the rate of cuBLAS: mma.sync and wgmma; assumed
_PER_EXCEPTION = 3  # instructions for each token of an exception, where consumers add them
_END = {True: 0.7e-6, False: 1.2e-6}  # of a unit: sums, exceptions, results; assumed


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
    units = plan.n_units * config.cluster
    busy = min(units, device.n_processors)
    rounds = -(-units // device.n_processors)
    balance = units / (device.n_processors * rounds)
    elements = float(n_rows) * n_columns
    weights = packed_nbytes(n_rows, n_columns, format)
    tokens = float(plan.n_token_blocks * config.block_tokens) * n_columns * _BF16_NBYTES
    # A multiprocessor draws some 45 GB/s at most, so few of them do not fill the memory.
    memory = weights / (device.bandwidth * min(1.0, busy / (0.75 * device.n_processors)))
    l2 = (weights * plan.n_token_blocks + tokens * plan.n_row_blocks) / device.l2_bandwidth
    issued = (
        elements
        * plan.n_token_blocks
        * (_PER_WEIGHT[format.name, few] + _PER_WEIGHT_AND_TOKEN[few] * config.block_tokens)
    )
    if not few:
        issued += EXCEPTION_RATES[format.name] * elements * n_tokens * _PER_EXCEPTION
    issue = issued / (device.n_processors * _ISSUE_LANES * device.clock * _ISSUE_SHARE * balance)
    work = 2 * elements * plan.n_token_blocks * config.block_tokens
    multiply = work / (device.bf16_rate * _MMA_SHARE[few] * balance)
    partial = 0.0
    if config.n_splits > 1:
        partial = 8 * config.n_splits * n_tokens * n_rows / device.l2_bandwidth + device.launch
    ends = _END[few] * (1 if few else rounds)
    pace = max(memory, l2, issue, multiply)
    return pace + ends + partial + device.latency + device.launch


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
    for rows in (16, 32, 64) if few else (64, 128):
        for cluster in (1, 2, 4):
            for n_splits in sorted(splits):
                config = replace(default, block_rows=rows, cluster=cluster, n_splits=n_splits)
                found = fill_stages(config, format)
                if found is not None and found != default and n_rows >= rows * cluster:
                    yield found
