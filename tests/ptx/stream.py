"""The kernels in CUDA C++ of `packhorse.kernels.stream_product` in the emulator."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from tests.ptx import kernels
from tests.ptx.bulk import TensorMap
from tests.ptx.machine import Launch, run_grid
from tests.ptx.memory import WARP, GlobalMemory
from tests.ptx.program import Program, parse
from tests.ptx.values import from_bf16

from packhorse.codecs import weights as codec
from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source
from packhorse.kernels.stream_product import (
    ADDING_THREADS,
    StreamConfig,
    StreamPlan,
    default_stream_config,
    plan_stream,
    stream_options,
)
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

_ARRAYS = ("first_exponents", "exception_starts", "exceptions")


@dataclass(frozen=True)
class StreamCase:
    """A product.

    Attributes:
        format: name of the format.
        config: the division.
        n_rows, n_columns, n_tokens: sizes.
        n_clusters: clusters of the grid, at most.
    """

    format: str
    config: StreamConfig
    n_rows: int
    n_columns: int
    n_tokens: int
    n_clusters: int = 2

    @property
    def name(self) -> str:
        c = self.config
        parts = (c.block_rows, c.block_tokens, c.n_weight_stages, c.n_token_stages, c.cluster)
        division = "/".join(map(str, (*parts, c.n_splits)))
        return (
            f"stream {self.format} {division} {self.n_rows}x{self.n_columns} {self.n_tokens} tokens"
        )

    @property
    def plain(self) -> kernels.Case:
        """The same data, for the expected result."""
        sizes = (self.n_rows, self.n_columns, self.n_tokens)
        return kernels.Case("few", self.format, (), *sizes, bias=True)


def stream_ptx(case: StreamCase) -> str:
    """The text of both kernels."""
    return _ptx(stream_options(case.config, WEIGHT_FORMATS[case.format]))


@cache
def _ptx(options: tuple[str, ...]) -> str:
    # For a virtual architecture: its text is the same, and nothing is assembled.
    virtual = tuple(option.replace("=sm_", "=compute_") for option in options)
    return compiler().compile_to_ptx(stream_source(), virtual)


@cache
def _program(options: tuple[str, ...], name: str) -> Program:
    return parse(_ptx(options), name)


def _arrange(
    tokens: np.ndarray, plan: StreamPlan, program: Program, how: dict
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens as both kernels know them: arranged, and by columns. Nothing is left as it was."""
    aligned = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 8)))
    if not plan.arranged_nbytes + plan.by_column_nbytes:
        return aligned, aligned
    memory = GlobalMemory()
    outs = [np.full(n, 0xFF, np.uint8) for n in (plan.arranged_nbytes, plan.by_column_nbytes)]
    names = ("tokens", "arranged", "by column")
    pointers = [
        memory.add(name, array, dependent=True)
        for name, array in zip(names, (tokens, *outs), strict=True)
    ]
    sizes = [*tokens.shape, plan.n_steps, plan.n_boxes]
    grid = (plan.n_arranging + plan.n_transposing, 1, 1)
    launch = Launch([*pointers, *sizes], grid, 4, 0, dependent=True, **how)
    run_grid(program, memory, launch)
    arranged = memory.read("arranged", np.uint8) if plan.arranged_nbytes else aligned
    return arranged, memory.read("by column", np.uint8)


def multiply(
    elements: np.ndarray,
    tokens: np.ndarray,
    format: WeightFormat,
    config: StreamConfig,
    bias: np.ndarray | None = None,
    *,
    n_clusters: int = 2,
    program: Program | None = None,
    passes: dict[int, list[int]] | None = None,
    **how: bool,
) -> np.ndarray:
    """A product as the kernels compute it.

    Args:
        elements: BF16 as bits, n_rows x n_columns, uint16.
        tokens: BF16 as bits, n_tokens x n_columns, uint16.
        format: the format to pack the elements in.
        config: the division.
        bias: BF16 as bits, n_rows, uint16.
        n_clusters: clusters of the grid, at most.
        program: another program in the place of the second kernel.
        passes: gets the passes of shared memory of the second kernel, as `Launch.passes`.
        how: `late`, `backwards` and `track`, as for `Launch`.

    Returns:
        FP32, n_tokens x n_rows: sums of the parts if a division of up to 32 tokens has several.
    """
    (n_rows, n_columns), n_tokens = elements.shape, len(tokens)
    arrays, options = codec.pack(elements, format, threads=1), stream_options(config, format)
    plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
    n_programs = min(n_clusters, plan.n_units) * config.cluster
    memory = GlobalMemory()
    is_split = config.n_splits > 1 and not plan.n_adding
    shape = (config.n_splits if is_split else 1, n_tokens, n_rows)
    out = np.full(shape, np.nan, np.float32) if is_split else np.full(shape, 0x7FC1, np.uint16)
    arranged, by_column = _arrange(tokens, plan, _program(options, "arrange_tokens"), how)
    pointers = [
        memory.add("tokens", arranged, dependent=True),
        memory.add("by column", by_column, dependent=True),
        *(memory.add(name, getattr(arrays, name)) for name in _ARRAYS),
        0 if bias is None else memory.add("bias", bias),
        memory.add("sums", out, dependent=True),
        *(
            memory.add(name, np.full(max(nbytes, 16), 0xFF, np.uint8), dependent=True)
            for name, nbytes in (
                ("extras", n_programs * plan.extra_nbytes),
                ("parts", plan.parts_nbytes),
            )
        ),
    ]
    extras = pointers[7]
    memory.add("low", arrays.low_bytes)
    memory.add("high", arrays.high_bits)
    sizes = [n_tokens, n_rows, n_columns, plan.n_turns, plan.n_token_blocks]
    sizes += [plan.n_row_blocks, config.n_splits, 0]
    product = b"".join(
        [*(p.to_bytes(8, "little") for p in pointers), *(n.to_bytes(4, "little") for n in sizes)]
    )
    launch = Launch(
        [0, 0, int.from_bytes(product, "little")],
        (n_programs, 1, 1),
        plan.n_threads // WARP,
        plan.shared_nbytes,
        dependent=True,
        cluster=config.cluster,
        maps=_maps(n_rows, n_columns, format, plan),
        passes=passes,
        exchanged=(extras, plan.extra_nbytes) if plan.extra_nbytes else None,
        **how,
    )
    run_grid(program or _program(options, "multiply"), memory, launch)
    if plan.n_adding:
        launch = Launch(
            [int.from_bytes(product, "little")],
            (plan.n_adding, 1, 1),
            ADDING_THREADS // WARP,
            0,
            dependent=True,
            **how,
        )
        run_grid(_program(options, "add_parts"), memory, launch)
    if is_split:
        return memory.read("sums", np.float32).reshape(shape).sum(0)
    return from_bf16(memory.read("sums", np.uint16)).reshape(shape[1:])


def _maps(
    n_rows: int, n_columns: int, format: WeightFormat, plan: StreamPlan
) -> dict[str, TensorMap]:
    planes = [
        ("low", format.n_padded(n_columns), plan.low_box),
        ("high", format.n_high_bytes(n_columns), plan.high_box),
    ]
    return {
        f"multiply_param_{i}": TensorMap(
            name, (plan.n_steps, n_rows, box[2]), (stride, plan.n_steps), box, plan.swizzle
        )
        for i, (name, stride, box) in enumerate(planes)
    }


def run_stream(case: StreamCase, program: Program | None = None, **how: bool) -> np.ndarray:
    """Runs a product: `multiply` on the data of a case."""
    data, format = kernels.data_of(case.plain), WEIGHT_FORMATS[case.format]
    return multiply(
        data.elements, data.tokens, format, case.config, data.bias,
        n_clusters=case.n_clusters, program=program, **how,
    )  # fmt: skip


def errors_of(
    y: np.ndarray, elements: np.ndarray, tokens: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Errors as a share of what rounding allows: one rounding of the result to BF16, and one of
    each sum in FP32."""
    w, x = from_bf16(elements).astype(np.float64), from_bf16(tokens).astype(np.float64)
    added = 0.0 if bias is None else from_bf16(bias).astype(np.float64)
    exact, size = x @ w.T + added, np.abs(x) @ np.abs(w).T + np.abs(added)
    return np.abs(y - exact) / (np.abs(exact) * 2**-8 + size * 2**-20 + 1e-37)


def is_right(case: StreamCase, result: np.ndarray) -> bool:
    """Whether a product has no more than the errors of rounding."""
    data = kernels.data_of(case.plain)
    return bool((errors_of(result, data.elements, data.tokens, data.bias) <= 1).all())


CASES = [
    StreamCase("W12", StreamConfig(16, 8, 8, 4, cluster=2), 33, 512, 3),
    StreamCase("W12", StreamConfig(32, 8, 4, 4, cluster=2), 70, 1100, 8),
    StreamCase("W12", StreamConfig(16, 8, 4, 2, cluster=2, n_splits=3), 20, 3200, 5),
    StreamCase("W12", StreamConfig(16, 16, 4, 2, cluster=2), 20, 523, 20),
    StreamCase("W12", StreamConfig(48, 32, 4, 2, cluster=4), 100, 300, 32),
    StreamCase("W11", StreamConfig(16, 8, 8, 2, cluster=2), 40, 1100, 5),
    StreamCase("W11", StreamConfig(32, 16, 4, 2, cluster=2, n_splits=2), 40, 2300, 12),
    StreamCase("W12", StreamConfig(64, 64, 3, 4), 130, 333, 40),
    StreamCase("W12", StreamConfig(128, 128, 2, 3, cluster=2), 140, 200, 70),
    StreamCase("W12", StreamConfig(64, 256, 2, 3, cluster=2), 64, 140, 200),
    StreamCase("W11", StreamConfig(64, 64, 2, 3, n_splits=2), 64, 600, 33),
    StreamCase("W12", StreamConfig(64, 256, 2, 2, n_splits=2), 120, 520, 256),
    StreamCase("W12", StreamConfig(64, 128, 2, 2, cluster=2, n_splits=4), 200, 1100, 100),
]


def default_cases() -> list[StreamCase]:
    """The divisions that a large matrix gets untuned, for each kernel and format, in odd shapes."""
    cases = []
    for n_tokens in (1, 8, 15, 31, 63, 127, 255):
        n_columns = 523 if n_tokens <= 32 else 140
        for name, format in WEIGHT_FORMATS.items():
            config = default_stream_config(28672, 4096, n_tokens, format)
            n_rows = config.block_rows * config.cluster + 3
            cases.append(StreamCase(name, config, n_rows, n_columns, n_tokens))
    return cases


# More turns than stages, and several units for each program.
DAMAGED = [
    StreamCase("W12", StreamConfig(16, 8, 4, 2, cluster=2), 40, 2040, 3, n_clusters=1),
    StreamCase("W12", StreamConfig(16, 8, 4, 2, cluster=4), 70, 2040, 8, n_clusters=1),
    StreamCase("W12", StreamConfig(64, 64, 2, 3), 130, 500, 40, n_clusters=1),
]
