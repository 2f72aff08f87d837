"""Compiles, loads and launches the kernels of `packhorse.kernels.stream_product`.

A division is compiled once on a machine, which takes about a second, and loaded once in a process.
Neither may happen while a CUDA graph is captured; `StreamKernels.get` refuses it.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import packhorse.kernels
from packhorse.errors import MissingBackendError
from packhorse.gpu.cuda_driver import Kernel, TensorMap, driver
from packhorse.gpu.nvrtc import compiler
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import limits_of
from packhorse.kernels.stream_product import (
    ADDING_THREADS,
    ARRANGED_THREADS,
    StreamConfig,
    StreamPlan,
    plan_stream,
    stream_options,
)
from packhorse.layout import WeightFormat

__all__ = ["StreamKernels", "stream_source"]

_COPY_NBYTES = 16  # of one copy of tokens, which its address must be a multiple of
_MAX_MAPS = 1 << 14  # a model has far fewer weights


class _Product(ctypes.Structure):
    """`Product` of stream_product.cu."""

    _fields_ = (
        *((f"pointer_{i}", ctypes.c_void_p) for i in range(9)),
        *((f"size_{i}", ctypes.c_uint32) for i in range(7)),
    )


class _Loaded(NamedTuple):
    """The kernels of a division.

    Attributes:
        arrange: arranges tokens.
        multiply: the product.
        add: adds the sums of parts, above 32 tokens.
        n_clusters: clusters of the product that the GPU runs at once.
    """

    arrange: Kernel
    multiply: Kernel
    add: Kernel
    n_clusters: int


@cache
def stream_source() -> str:
    """The source of both kernels."""
    folder = Path(packhorse.kernels.__file__).parent
    names = ("common", "tokens", "units", "few", "many", "product")
    return "\n".join((folder / f"stream_{name}.cu").read_text() for name in names)


class StreamKernels:
    """The kernels of a device, by division."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: a GPU of compute capability 9.0.
        """
        self._device = device
        self._loaded: dict[tuple[str, ...], _Loaded] = {}
        self._maps: dict[tuple[object, ...], tuple[TensorMap, TensorMap]] = {}

    def is_loaded(self, config: StreamConfig, format: WeightFormat) -> bool:
        """Whether a division can run in a capture."""
        return stream_options(config, format) in self._loaded

    def load(self, config: StreamConfig, format: WeightFormat) -> None:
        """Compiles a division, if it is not loaded.

        Raises:
            MissingBackendError: there is no compiler or no driver; or a CUDA graph is captured.
            ValueError: the compiler refuses.
            DriverError: the driver refuses.
        """
        options = stream_options(config, format)
        if options in self._loaded:
            return
        if torch.cuda.is_current_stream_capturing():
            raise MissingBackendError(f"{config} is not loaded, and a CUDA graph is captured")
        module = driver().load(compiler().compile_once(stream_source(), options))
        plan = plan_stream(1, 1, 1, format, config)
        multiply = driver().kernel(module, "multiply", plan.n_threads, plan.shared_nbytes)
        n_clusters = multiply.n_resident(config.cluster, limits_of(self._device).n_processors)
        arrange = driver().kernel(module, "arrange_tokens", ARRANGED_THREADS)
        add = driver().kernel(module, "add_parts", ADDING_THREADS)
        self._loaded[options] = _Loaded(arrange, multiply, add, n_clusters)

    def run(
        self,
        x: Tensor,
        weights: WeightTensors,
        format: WeightFormat,
        bias: Tensor | None,
        y: Tensor,
        config: StreamConfig,
    ) -> None:
        """Runs the kernels on the current stream.

        Args:
            x: BF16, n_tokens x n_columns.
            weights: checked arrays of `n_rows` rows.
            format: their format.
            bias: BF16, n_rows.
            y: BF16, n_tokens x n_rows; or FP32, n_splits x n_tokens x n_rows, if a division of up
                to 32 tokens has splits.
            config: the division.

        Raises:
            MissingBackendError, ValueError, DriverError: as `load`.
        """
        self.load(config, format)
        (n_tokens, n_columns), n_rows = x.shape, weights.n_rows
        kernels = self._loaded[stream_options(config, format)]
        plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        n_programs = min(plan.n_units, kernels.n_clusters) * config.cluster
        tokens, by_column = self._prepare(x, plan, kernels.arrange, stream)
        nbytes = n_programs * plan.extra_nbytes + plan.parts_nbytes
        extras = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        product = _Product(
            tokens.data_ptr(),
            by_column.data_ptr(),
            *(array.data_ptr() for array in weights[2:]),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            extras.data_ptr(),
            extras.data_ptr() + n_programs * plan.extra_nbytes,
            *(n_tokens, n_rows, n_columns, plan.n_turns),
            *(plan.n_token_blocks, plan.n_row_blocks, config.n_splits),
        )
        maps = self._maps_of(weights, n_columns, format, plan)
        kernels.multiply(n_programs, stream, [*maps, product], early=True)
        if plan.n_adding:
            kernels.add(plan.n_adding, stream, [product], early=True)

    def _prepare(
        self, x: Tensor, plan: StreamPlan, arrange: Kernel, stream: int
    ) -> tuple[Tensor, Tensor]:
        """The tokens as the product fetches them, and as exceptions find them."""
        nbytes = plan.arranged_nbytes + plan.by_column_nbytes
        rows = _aligned(x)
        if not nbytes:
            return rows, rows
        if rows.shape == x.shape:  # the first kernel takes rows of any length, but not padded ones
            x = rows
        both = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        arranged, by_column = both[: plan.arranged_nbytes], both[plan.arranged_nbytes :]
        pointers = (x.data_ptr(), arranged.data_ptr(), by_column.data_ptr())
        sizes = (*x.shape, plan.n_steps, plan.n_boxes)
        arrange(
            plan.n_arranging + plan.n_transposing,
            stream,
            [*map(ctypes.c_uint64, pointers), *map(ctypes.c_uint32, sizes)],
            early=True,
        )
        return arranged if plan.arranged_nbytes else rows, by_column

    def _maps_of(
        self, weights: WeightTensors, n_columns: int, format: WeightFormat, plan: StreamPlan
    ) -> tuple[TensorMap, TensorMap]:
        low, high, n_rows = weights.low_bytes, weights.high_bits, weights.n_rows
        key = low.data_ptr(), high.data_ptr(), n_rows, n_columns, format.name, plan.low_box
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            strides = (format.n_padded(n_columns), plan.n_steps)
            high_strides = (format.n_high_bytes(n_columns), plan.n_steps)
            low_sizes = (plan.n_steps, n_rows, plan.low_box[2])
            high_sizes = (plan.n_steps, n_rows, plan.high_box[2])
            describe, swizzle = driver().describe, plan.swizzle
            found = self._maps[key] = (
                describe(low.data_ptr(), low_sizes, strides, plan.low_box, swizzle=swizzle),
                describe(high.data_ptr(), high_sizes, high_strides, plan.high_box, swizzle=swizzle),
            )
        return found


def _aligned(x: Tensor) -> Tensor:
    """Tokens at addresses that copies of 16 bytes take: those given, or a copy."""
    if x.shape[1] * x.element_size() % _COPY_NBYTES == 0:
        return x if x.data_ptr() % _COPY_NBYTES == 0 else x.clone()
    return pad(x, (0, -x.shape[1] % (_COPY_NBYTES // x.element_size())))
