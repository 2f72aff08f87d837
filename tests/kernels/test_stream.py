"""The kernels in CUDA C++: compiled for sm_90a, their machine code read, and run in a machine of
NumPy against FP64. No GPU is needed, only NVRTC."""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from stream_run import errors_of, multiply_stream, stream_programs
from warp_machine import MachineError, Program, narrow
from weight_samples import MATRICES, model_rows

from benchmarks.gpu.hazards import find_hazards, without_waits
from benchmarks.gpu.machine_code import MachineCode, disassemble, parse_listing
from packhorse.errors import MissingBackendError
from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source
from packhorse.kernels.stream_product import (
    StreamConfig,
    default_stream_config,
    plan_stream,
    stream_options,
    stream_shared_nbytes,
)
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat


def _has_compiler() -> bool:
    try:
        compiler()
    except MissingBackendError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_compiler(), reason="needs NVRTC: nvidia-cuda-nvrtc")
FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))


def backwards(n: int) -> Iterable[int]:
    return range(n - 1, -1, -1)


def numbers(*shape: int, seed: int = 5) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return narrow(values).astype(np.uint16)


def check(
    elements: NDArray[np.uint16],
    n_tokens: int,
    format: WeightFormat,
    config: StreamConfig,
    mode: str = "late",
    order: Callable[[int], Iterable[int]] = range,
) -> NDArray[np.float32]:
    x, bias = numbers(n_tokens, elements.shape[1]), numbers(len(elements), seed=6)
    y, _ = multiply_stream(elements, x, format, config, bias, mode=mode, order=order)
    assert errors_of(y, elements, x, bias).max() <= 1
    return y


CASES = {
    "few rows": (W12, 3, (33, 512), StreamConfig(16, 8, 3, 3)),
    "a cluster": (W12, 8, (70, 700), StreamConfig(32, 8, 2, 2, cluster=2)),
    "two blocks": (W12, 20, (20, 523), StreamConfig(16, 16, 2, 2)),
    "32 tokens": (W12, 32, (33, 300), StreamConfig(32, 32, 2, 2)),
    "splits": (W12, 5, (20, 1600), StreamConfig(16, 8, 2, 2, n_splits=3)),
    "W11": (W11, 5, (40, 1100), StreamConfig(16, 8, 3, 3)),
    "W11, all": (W11, 12, (40, 1030), StreamConfig(32, 16, 2, 2, cluster=2, n_splits=2)),
    "64 tokens": (W12, 40, (130, 200), StreamConfig(128, 64, 3, 4)),
    "128 tokens": (W12, 70, (100, 140), StreamConfig(64, 128, 2, 3, cluster=2)),
    "256 tokens": (W12, 200, (20, 100), StreamConfig(64, 256, 2, 3)),
    "W11, 64 tokens": (W11, 33, (30, 600), StreamConfig(64, 64, 2, 3, n_splits=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_right_however_late_copies_come(name: str) -> None:
    format, n_tokens, shape, config = CASES[name]
    late = check(model_rows(*shape), n_tokens, format, config)
    early = check(model_rows(*shape), n_tokens, format, config, "early", backwards)
    np.testing.assert_array_equal(late, early)


@FORMATS
@pytest.mark.parametrize("name", ["specials", "17 columns", "one element", "zeros"])
def test_elements_of_every_kind(name: str, format: WeightFormat) -> None:
    """Rows with infinities and NaNs have them in the result; all others are right."""
    elements = MATRICES[name]()
    finite = (elements >> 7 & 0xFF) != 0xFF
    config = StreamConfig(16, 8, 2, 2)
    x = numbers(2, elements.shape[1])
    y, _ = multiply_stream(elements, x, format, config)
    rows = finite.all(axis=1)
    assert not np.isfinite(y[:, ~rows]).any()
    if rows.any():
        huge = np.abs(y[:, rows]) == np.inf  # sums beyond FP32
        errors = errors_of(y[:, rows], elements[rows], x)
        assert (errors[~huge] <= 1).all()


def test_exact_sums_are_exact() -> None:
    rng = np.random.default_rng(1)
    elements = narrow(rng.integers(-8, 9, (48, 640)).astype(np.float32)).astype(np.uint16)
    x = narrow(rng.integers(-4, 5, (8, 640)).astype(np.float32)).astype(np.uint16)
    for format in WEIGHT_FORMATS.values():
        y, _ = multiply_stream(elements, x, format, StreamConfig(16, 8, 2, 2, n_splits=2))
        exact = (x_of(x) @ x_of(elements).T).astype(np.float32)
        np.testing.assert_array_equal(narrow(y), narrow(exact))


def x_of(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@FORMATS
def test_a_tokens_result_does_not_depend_on_the_batch(format: WeightFormat) -> None:
    elements, x = model_rows(32, 600), numbers(32, 600)
    alone, _ = multiply_stream(elements, x[:1], format, StreamConfig(16, 8, 3, 3))
    together, _ = multiply_stream(elements, x, format, StreamConfig(32, 32, 2, 2, cluster=2))
    np.testing.assert_array_equal(alone[0], together[0])


def test_shared_memory_is_read_without_conflicts() -> None:
    for config in (StreamConfig(16, 8, 2, 2), StreamConfig(64, 64, 2, 3)):
        for format in WEIGHT_FORMATS.values():
            x = numbers(config.block_tokens, 512)
            _, passes = multiply_stream(model_rows(16, 512), x, format, config)
            loop = [row for text, row in passes.items() if "v4.u32" in text or "ldmatrix" in text]
            assert loop
            assert all(taken == least for taken, least in loop)


@pytest.mark.parametrize(
    "weaker",
    [
        ("mbarrier.try_wait.parity.shared::cta.b64 p, [%r", "full"),
        ("barrier.sync.aligned", "sums"),
        ("wgmma.wait_group", "products"),
        ("mbarrier.arrive.shared::cta.b64 _", "empty"),
    ],
    ids=lambda weaker: weaker[1],
)
def test_the_machine_notices_what_is_missing(weaker: tuple[str, str]) -> None:
    """Without a wait or a barrier the result is wrong, or the machine says what is."""
    text, what = weaker
    config = StreamConfig(64, 64, 2, 3) if what == "products" else StreamConfig(16, 8, 2, 2)
    shape = (16, 300) if what == "products" else (32, 2100)
    elements, x = model_rows(*shape), numbers(config.block_tokens, shape[1])
    programs = stream_programs(config, W12)[1]
    kept = list(programs.instructions)
    noticed = False
    try:
        for number, step in enumerate(kept):
            if noticed or text not in step.text:
                continue
            programs.instructions[number] = _nothing(step.text, programs)
            try:
                for mode, order in (("late", range), ("early", backwards)):
                    y, _ = multiply_stream(elements, x, W12, config, mode=mode, order=order)
                    noticed |= not errors_of(y, elements, x).max() <= 1
            except MachineError:
                noticed = True
            programs.instructions[:] = kept
    finally:
        programs.instructions[:] = kept
    assert noticed


def _nothing(text: str, program: Program) -> "object":
    """An instruction that does nothing, or a wait that is always over."""
    step = next(x for x in program.instructions if x.text == text)
    if "try_wait" in text:
        return type(step)("", ["setp", "eq", "u32"], ["p", "0", "0"], "setp.eq.u32 p, 0, 0")
    return type(step)("", ["fence"], [], "fence")


# The machine code.


@cache
def machine_code(config: StreamConfig, format: WeightFormat) -> MachineCode:
    cubin = compiler().compile(stream_source(), stream_options(config, format))
    return parse_listing(disassemble(cubin))["multiply"]


COMPILED = [(W12, n) for n in (8, 32, 64, 128, 256)] + [(W11, n) for n in (8, 64)]


@pytest.mark.parametrize(
    ("format", "n_tokens"), COMPILED, ids=[f"{format.name}-{n}" for format, n in COMPILED]
)
def test_default_divisions_keep_all_in_registers(n_tokens: int, format: WeightFormat) -> None:
    """Nothing spills, and no register is written while a product may read it."""
    config = default_stream_config(4096, 4096, n_tokens, format)
    assert stream_shared_nbytes(config, format) <= 227 << 10
    code = machine_code(config, format)
    operations = {x.operation for x in code.instructions}
    assert not {"LDL", "STL"} & operations
    assert {"UBLKCP", "UTMALDG"} <= operations
    assert ("HGMMA" in operations) == (n_tokens > 32)
    assert not find_hazards(code)
    if n_tokens == 64:
        assert find_hazards(without_waits(code))  # the check would find them


@pytest.mark.parametrize(("n_tokens", "most"), [(8, 2.3), (32, 2.6), (64, 3.2), (128, 3.8)])
def test_instructions_of_a_weight(n_tokens: int, most: float) -> None:
    """Counted in the longest loop with products, which has a group of 64 steps for each warp."""
    config = default_stream_config(4096, 4096, n_tokens, W12)
    code = machine_code(config, W12)
    counts = []
    for start, stop in code.loops:
        body = code.instructions[start:stop]
        products = sum(x.operation in ("HMMA", "HGMMA") for x in body)
        if products:
            counts.append((len(body), products))
    length, products = min(counts)
    tokens = 8 if n_tokens <= 32 else 64
    weights = products * 256 / (config.block_tokens / tokens)
    assert length * 32 / weights <= most


def test_divisions_without_splits_share_their_machine_code() -> None:
    one, four = StreamConfig(16, 8, 3, 3), StreamConfig(16, 8, 3, 3, n_splits=4)
    assert stream_options(one, W12) == stream_options(four, W12)


def test_default_divisions_do_not_depend_on_few_tokens() -> None:
    for n_rows, n_columns in ((4096, 4096), (1024, 8192), (6144, 4096), (300, 300)):
        for format in WEIGHT_FORMATS.values():
            found = [default_stream_config(n_rows, n_columns, n, format) for n in (1, 8, 32)]
            assert len({config.n_splits for config in found}) == 1
            plans = [
                plan_stream(n_rows, n_columns, n, format, config)
                for n, config in zip((1, 8, 32), found, strict=True)
            ]
            assert len({plan.n_turns for plan in plans}) == 1
