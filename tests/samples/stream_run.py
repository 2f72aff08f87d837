"""Runs the products of `packhorse.kernels.stream_product` in the machine of `warp_runner`."""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from warp_machine import Memory, Program, TensorMap, narrow, widen
from warp_runner import run

from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source
from packhorse.kernels.stream_product import (
    StreamConfig,
    StreamPlan,
    plan_stream,
    stream_options,
)
from packhorse.layout import WeightFormat
from packhorse.reference.weights import encode_weights

__all__ = ["arrange", "errors_of", "multiply_stream", "stream_programs"]

Bits = NDArray[np.uint16]


@cache
def stream_programs(config: StreamConfig, format: WeightFormat) -> tuple[Program, Program]:
    """The kernel that arranges tokens, and the one that multiplies."""
    ptx = compiler().compile_to_ptx(stream_source(), stream_options(config, format))
    return Program(ptx, "arrange_tokens"), Program(ptx, "multiply")


def arrange(
    memory: Memory, x: Bits, plan: StreamPlan, program: Program, mode: str = "late"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The tokens as both kernels know them: arranged, and by columns. Nothing is left as it was."""
    arranged = np.full(plan.arranged_nbytes, 0xFF, np.uint8)
    by_column = np.full(plan.by_column_nbytes, 0xFF, np.uint8)
    pointers = [("<u8", memory.add(array)) for array in (x, arranged, by_column)]
    sizes = [*x.shape, plan.n_steps, plan.n_groups, plan.n_arranging]
    run(
        program, memory, [*pointers, *(("<u4", size) for size in sizes)],
        n_programs=plan.n_arranging + plan.n_transposing, n_threads=128, mode=mode,
    )  # fmt: skip
    return arranged, by_column


def multiply_stream(
    elements: Bits,
    x: Bits,
    format: WeightFormat,
    config: StreamConfig,
    bias: Bits | None = None,
    *,
    n_clusters: int = 2,
    mode: str = "late",
    order: Callable[[int], Iterable[int]] = range,
) -> tuple[NDArray[np.float32], dict[str, list[int]]]:
    """The product as both kernels compute it.

    Args:
        elements: BF16 as bits, n_rows x n_columns.
        x: BF16 as bits, n_tokens x n_columns.
        format: the format to pack the elements in.
        config: the division.
        bias: BF16 as bits, n_rows.
        n_clusters: clusters of the grid, at most.
        mode: as `warp_runner.run`.
        order: as there.

    Returns:
        FP32 with BF16's bits, n_tokens x n_rows; and the passes of shared memory.
    """
    (n_rows, n_columns), n_tokens, splits = elements.shape, len(x), config.n_splits
    low, high, first, starts, exceptions = encode_weights(elements, format)
    plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
    arranging, multiplying = stream_programs(config, format)
    memory = Memory()
    tokens = arrange(memory, x, plan, arranging, mode)
    shape = (splits, n_tokens, n_rows)
    y = np.full(shape, np.nan, np.float32) if splits > 1 else np.full(shape, 0x7FC0, np.uint16)
    arrays = [*tokens, first, starts, exceptions, bias, y]
    pointers = [
        0 if a is None or not a.size else memory.add(np.ascontiguousarray(a)) for a in arrays
    ]
    pointers[-1] = memory.add(y)
    n_high = format.n_high_bytes(n_columns)
    low_strides, high_strides = (format.n_padded(n_columns), plan.n_steps), (n_high, plan.n_steps)
    maps = {
        f"multiply_param_{i}": TensorMap(
            np.ascontiguousarray(array), (plan.n_steps, n_rows, box[2]), strides, box, plan.swizzle
        )
        for i, (array, strides, box) in enumerate(
            [(low, low_strides, plan.low_box), (high, high_strides, plan.high_box)]
        )
    }
    sizes = [
        n_tokens, n_rows, n_columns, plan.n_turns, plan.n_token_blocks, plan.n_row_blocks, splits, 0
    ]  # fmt: skip
    passes = run(
        multiplying, memory,
        [("V128", 0), ("V128", 0), *(("<u8", p) for p in pointers), *(("<u4", n) for n in sizes)],
        n_programs=min(n_clusters, plan.n_units) * config.cluster,
        n_threads=plan.n_threads, cluster=config.cluster, shared_nbytes=plan.shared_nbytes,
        maps=maps, mode=mode, order=order,
    )  # fmt: skip
    if splits == 1:
        return widen(y[0]), passes
    total = y[0]
    for part in y[1:]:
        total = total + part
    return widen(narrow(total)), passes


def errors_of(
    y: NDArray[np.float32], elements: Bits, x: Bits, bias: Bits | None = None
) -> NDArray[np.float64]:
    """Errors as a share of what rounding allows: one rounding of the result to BF16, and one of
    each sum in FP32."""
    rows, tokens = widen(elements).astype(np.float64), widen(x).astype(np.float64)
    added = 0.0 if bias is None else widen(bias).astype(np.float64)
    exact, size = tokens @ rows.T + added, np.abs(tokens) @ np.abs(rows).T + np.abs(added)
    return np.abs(y - exact) / (np.abs(exact) * 2**-8 + size * 2**-20 + 1e-37)
