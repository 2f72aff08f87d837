"""The kernels in CUDA C++: their values in the emulator of PTX, and their machine code for sm_90a.
No GPU is needed, only NVRTC. Orders of warps and copies are in test_emulated_stream.py."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.ptx.stream import errors_of, multiply
from tests.ptx.values import to_bf16
from tests.samples.offline_kernels import KEPT_KERNELS
from weight_samples import MATRICES, model_rows

from benchmarks.gpu.hazards import find_hazards, without_waits
from benchmarks.gpu.machine_code import MachineCode, disassemble, parse_listing
from packhorse.errors import MissingBackendError
from packhorse.gpu.figure_cache import CACHE_VARIABLE
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


SMALL = StreamConfig(16, 8, 4, 2, cluster=2)


def numbers(*shape: int) -> NDArray[np.uint16]:
    return to_bf16(np.random.default_rng(5).standard_normal(shape).astype(np.float32))


@FORMATS
@pytest.mark.parametrize("name", ["specials", "17 columns", "one element", "zeros"])
def test_elements_of_every_kind(name: str, format: WeightFormat) -> None:
    """Rows with infinities and NaNs have them in the result; all others are right."""
    elements = MATRICES[name]()
    finite = (elements >> 7 & 0xFF) != 0xFF
    x = numbers(2, elements.shape[1])
    y = multiply(elements, x, format, SMALL, track=False)
    rows = finite.all(axis=1)
    assert not np.isfinite(y[:, ~rows]).any()
    if rows.any():
        huge = np.abs(y[:, rows]) == np.inf  # sums beyond FP32
        errors = errors_of(y[:, rows], elements[rows], x)
        assert (errors[~huge] <= 1).all()


@FORMATS
def test_exact_sums_are_exact(format: WeightFormat) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(-8, 9, (48, 640)).astype(np.float32)
    x = rng.integers(-4, 5, (8, 640)).astype(np.float32)
    y = multiply(to_bf16(rows), to_bf16(x), format, replace(SMALL, n_splits=2), track=False)
    np.testing.assert_array_equal(y, x @ rows.T)


@FORMATS
def test_a_tokens_result_does_not_depend_on_the_batch(format: WeightFormat) -> None:
    """Nor on rows, stages and clusters."""
    elements, x = model_rows(100, 1100), numbers(32, 1100)
    alone = multiply(elements, x[:1], format, SMALL, track=False)
    for config in (StreamConfig(32, 8, 8, 2, cluster=2), StreamConfig(16, 32, 8, 2, cluster=4)):
        together = multiply(elements, x[: config.block_tokens], format, config, track=False)
        np.testing.assert_array_equal(alone[0], together[0])


@pytest.mark.parametrize(
    ("format", "config"), [(W12, SMALL), (W11, SMALL), (W12, StreamConfig(64, 64, 2, 3))]
)
def test_shared_memory_is_read_without_conflicts(
    format: WeightFormat, config: StreamConfig
) -> None:
    """Of loads with 16 bytes for each lane, which are all those of the main loop."""
    passes: dict[int, list[int]] = {}
    x = numbers(config.block_tokens, 256)
    multiply(model_rows(16, 256), x, format, config, passes=passes, track=False)
    taken, least = passes[16]
    assert taken == least > 0


# The machine code.


@cache
def machine_code(config: StreamConfig, format: WeightFormat) -> MachineCode:
    with patch.dict(os.environ, {CACHE_VARIABLE: str(KEPT_KERNELS)}):
        cubin = compiler().compile_once(stream_source(), stream_options(config, format))
    return parse_listing(disassemble(cubin))["multiply"]


COMPILED = [(W12, n) for n in (8, 32, 64, 128, 256)] + [(W11, n) for n in (8, 64)]


@pytest.mark.parametrize(
    ("format", "n_tokens"), COMPILED, ids=[f"{format.name}-{n}" for format, n in COMPILED]
)
def test_default_divisions_keep_all_in_registers(n_tokens: int, format: WeightFormat) -> None:
    """Nothing spills while products run; with 256 tokens, a few registers do so between units. And
    no register is written while a product may read it."""
    config = default_stream_config(4096, 4096, n_tokens, format)
    assert stream_shared_nbytes(config, format) <= 227 << 10
    code = machine_code(config, format)
    operations = Counter(x.operation for x in code.instructions)
    main = min(
        (code.instructions[slice(*span)] for span in code.loops),
        key=lambda body: (-sum(x.operation in ("HMMA", "HGMMA") for x in body), len(body)),
    )
    assert not {"LDL", "STL"} & {x.operation for x in main}
    assert operations["LDL"] <= (16 if n_tokens == 256 else 0)
    assert {"UBLKCP" if n_tokens > 32 else "LDGSTS", "UTMALDG"} <= operations.keys()
    assert ("HGMMA" in operations) == (n_tokens > 32)
    assert not find_hazards(code)
    if n_tokens == 64:
        assert find_hazards(without_waits(code))  # the check would find them


@pytest.mark.parametrize("n_splits", [3, 8])
def test_splits_that_exceptions_cannot_be_shared_out_to_are_refused(n_splits: int) -> None:
    with pytest.raises(ValueError, match=f"{n_splits} splits of 64 rows.*up to 4"):
        plan_stream(64, 64, 64, W12, StreamConfig(64, 64, 2, 3, n_splits=n_splits))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (StreamConfig(16, 8, 4, 4), "cluster is 1"),
        (StreamConfig(16, 8, 10, 4, cluster=4), "10 stages of weights"),
        (StreamConfig(16, 8, 8, 3, cluster=2), "3 of tokens"),
    ],
)
def test_what_few_tokens_cannot_be_divided_to_is_refused(
    config: StreamConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_stream(64, 64, 8, W12, config)


@pytest.mark.parametrize(("n_tokens", "most"), [(8, 2.3), (32, 3.0), (64, 3.6), (128, 3.6)])
def test_instructions_of_a_weight(n_tokens: int, most: float) -> None:
    """Counted in the longest loop with products."""
    config = default_stream_config(4096, 4096, n_tokens, W12)
    code = machine_code(config, W12)
    counts = []
    for start, stop in code.loops:
        body = code.instructions[start:stop]
        products = sum(x.operation in ("HMMA", "HGMMA") for x in body)
        if products:
            counts.append((len(body), products))
    length, products = min(counts)
    # A product has 16 x 16 weights and 8 tokens, or all tokens if there are many.
    weights = products * 256 / (config.block_tokens / 8 if n_tokens <= 32 else 1)
    assert length * 32 / weights <= most


def test_divisions_without_splits_share_their_machine_code() -> None:
    four = replace(SMALL, n_splits=4)
    assert stream_options(SMALL, W12) == stream_options(four, W12)


def test_default_divisions_do_not_depend_on_few_tokens() -> None:
    shapes = ((4096, 4096), (4608, 4608), (1024, 8192), (6144, 4096), (300, 300))
    for n_rows, n_columns in shapes:
        for format in WEIGHT_FORMATS.values():
            found = [default_stream_config(n_rows, n_columns, n, format) for n in (1, 16, 32)]
            assert len({config.n_splits for config in found}) == 1
            plans = [
                plan_stream(n_rows, n_columns, n, format, config)
                for n, config in zip((1, 16, 32), found, strict=True)
            ]
            assert len({plan.n_turns for plan in plans}) == 1
