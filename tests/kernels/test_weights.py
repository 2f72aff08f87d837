"""The kernels for packed weights against the slow coder and FP64, in Triton's interpreter (or on a
GPU, with TRITON_INTERPRET=0)."""

import dataclasses
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from weight_samples import MATRICES, model_rows

from packhorse.kernels import weights as weights_module
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import MIN_SHARED_NBYTES, choose_dialect
from packhorse.kernels.matmul import (
    MatmulConfig,
    default_config,
    multiply_weights,
    shared_nbytes_of,
)
from packhorse.kernels.weights import decode_rows, decode_weights, require_weights
from packhorse.layout import W11, W12, WEIGHT_FORMATS, WeightFormat
from packhorse.reference.weights import encode_weights

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))
LARGE = {"one column", "rows of models"}  # the interpreter is slow


def pack(elements: NDArray[np.uint16], format: WeightFormat) -> WeightTensors:
    arrays = encode_weights(elements, format)
    return WeightTensors(*(torch.from_numpy(array).to(DEVICE) for array in arrays))


def plain(elements: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16).to(DEVICE)


def bits(tensor: torch.Tensor) -> NDArray[np.int16]:
    return tensor.view(torch.int16).cpu().numpy()


def tokens(n: int, n_columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, n_columns, generator=generator).to(torch.bfloat16).to(DEVICE)


# Decoding.


@FORMATS
@pytest.mark.parametrize(
    "name", [name for name in MATRICES if name not in LARGE | {"all patterns in a row"}]
)
def test_decoding_gives_every_bit(name: str, format: WeightFormat) -> None:
    elements = MATRICES[name]()
    poisoned = torch.full(elements.shape, math.nan, dtype=torch.bfloat16, device=DEVICE)
    decode_weights(pack(elements, format), format, elements.shape[1], poisoned)
    np.testing.assert_array_equal(bits(poisoned), elements.view(np.int16))


@FORMATS
def test_rows_are_looked_up(format: WeightFormat) -> None:
    """Rows are looked up in any order and number, with repetitions, and with exceptions of every
    kind."""
    elements = MATRICES["specials"]()
    weights, n_rows = pack(elements, format), len(elements)
    for rows in ([0], [n_rows - 1, 0, 0], list(range(n_rows - 1, -1, -1)) * 2, []):
        wanted = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        found = decode_rows(weights, format, elements.shape[1], wanted)
        np.testing.assert_array_equal(bits(found), elements.view(np.int16)[rows])


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, PyTorch ends the process")
def test_rows_that_are_not_there_are_refused() -> None:
    elements = MATRICES["specials"]()
    weights = pack(elements, W12)
    for row in (-1, len(elements)):
        with pytest.raises(IndexError, match="out of range"):
            decode_rows(weights, W12, elements.shape[1], torch.tensor([row]))
    with pytest.raises(TypeError, match="rows"):
        decode_rows(weights, W12, elements.shape[1], torch.tensor([0], dtype=torch.int32))


@pytest.mark.parametrize("name", sorted(LARGE))
def test_decoding_large_matrices_gives_every_bit(name: str) -> None:
    elements = MATRICES[name]()
    decoded = decode_weights(pack(elements, W12), W12, elements.shape[1])
    np.testing.assert_array_equal(bits(decoded), elements.view(np.int16))


# Products.


def check_product(
    elements: NDArray[np.uint16],
    x: torch.Tensor,
    format: WeightFormat,
    config: MatmulConfig | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if config is not None and config.shares and not choose_dialect(x.device).shares:
        pytest.skip("this GPU does not take divisions whose warps share the columns")
    y = multiply_weights(
        x, pack(elements, format), format, elements.shape[1], bias=bias, config=config
    )
    check_sums(y, elements, x, bias)
    return y


def check_sums(
    y: torch.Tensor, elements: NDArray[np.uint16], x: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Compares with FP64, within the rounding to BF16 and the loss of sums in FP32."""
    weight = plain(elements).double()
    exact = torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double())
    sizes = torch.nn.functional.linear(x.double().abs(), weight.abs())
    assert y.shape == exact.shape
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.isfinite(), exact.isfinite())
    lost = 2**-20 if INTERPRETED else 2**-18  # tensor cores truncate instead of rounding
    bound = exact.abs() * 2**-8 + sizes * lost + 2.0**-133
    finite = exact.isfinite()
    assert bool(((y.double() - exact).abs() <= bound)[finite].all())


SMALL = MatmulConfig(16, 8, 16, 2, 1, 2)  # many turns
MANY = MatmulConfig(64, 64, 32, 4, 1, 3)  # all warps share the columns


@FORMATS
@pytest.mark.parametrize(
    ("n_rows", "n_columns"), [(1, 333), (63, 1000), (40, 1), (17, 2048), (130, 96)]
)
def test_products_of_odd_shapes(n_rows: int, n_columns: int, format: WeightFormat) -> None:
    elements = model_rows(n_rows, n_columns)
    bias = tokens(1, n_rows, seed=5)[0]
    for n_tokens, n_splits in ((1, 3), (17, 1)):
        config = default_config(n_rows, n_columns, n_tokens, format)
        config = dataclasses.replace(config, n_splits=n_splits)
        check_product(elements, tokens(n_tokens, n_columns), format, config, bias)
    check_product(elements, tokens(70, n_columns), format, MANY, bias)


def test_products_of_a_thousand_rows() -> None:
    check_product(model_rows(1000, 40), tokens(1, 40), W12, MatmulConfig(128, 8, 16, 1, 1, 2))


@FORMATS
@pytest.mark.parametrize(
    "config",
    [
        MatmulConfig(16, 8, 64, 2, 1, 2),
        MatmulConfig(64, 16, 32, 1, 1, 2),
        MatmulConfig(32, 32, 16, 8, 2, 5),
        MatmulConfig(16, 16, 32, 2, 2, 2, 3),
        MatmulConfig(64, 64, 32, 4, 2, 3),
    ],
    ids=str,
)
def test_products_by_any_division(config: MatmulConfig, format: WeightFormat) -> None:
    check_product(model_rows(70, 600), tokens(35, 600), format, config)


def test_products_by_the_default_divisions() -> None:
    for n_tokens in (1, 8, 9, 33):
        check_product(model_rows(48, 1024), tokens(n_tokens, 1024), W12)
    check_product(model_rows(48, 1024), tokens(2, 1024), W11)


@FORMATS
def test_exceptions_of_every_kind_but_the_infinite_count(format: WeightFormat) -> None:
    elements = MATRICES["specials"]().copy()
    elements[(elements & 0x7F80) >= 0x7F00] = 0x5A33  # large, but the sums stay finite
    assert len(pack(elements, format).exceptions) > 600
    check_product(elements, tokens(3, elements.shape[1]), format)
    check_product(elements, tokens(33, elements.shape[1]), format, MANY)


@FORMATS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # 0 x infinity, not stored
def test_infinite_weights_make_infinite_sums(format: WeightFormat) -> None:
    elements = model_rows(18, 200).copy()
    elements[3, 7], elements[4, 8], elements[5, 9] = 0x7F80, 0xFF80, 0x7FC0
    x = tokens(2, 200).abs() + 1
    y = multiply_weights(x, pack(elements, format), format, 200)
    assert (y[:, 3] == math.inf).all()
    assert (y[:, 4] == -math.inf).all()
    assert y[:, 5].isnan().all()
    others = torch.ones(18, dtype=torch.bool)
    others[3:6] = False
    assert y[:, others].isfinite().all()


@FORMATS
@pytest.mark.parametrize("shift", [-118, -60, -20, 0, 40, 60])
def test_rows_and_tokens_of_any_size(shift: int, format: WeightFormat) -> None:
    """Weights from nearly subnormal ones to those that nearly overflow."""
    exponents = (model_rows(16, 128) >> 7 & 0xFF).astype(np.int64)
    moved = np.clip(exponents + shift, 1, 230)
    elements = (model_rows(16, 128) & 0x807F | moved << 7).astype(np.uint16)
    for size in (2.0**-30, 1.0, 2.0**30):
        check_product(elements, tokens(2, 128) * size, format, SMALL)
        check_product(elements, tokens(2, 128) * size, format, MANY)


@FORMATS
def test_a_token_does_not_depend_on_its_batch(format: WeightFormat) -> None:
    elements, x = model_rows(40, 512), tokens(33, 512)
    weights = pack(elements, format)
    together = multiply_weights(x, weights, format, 512)
    for n in (1, 2, 8, 16):
        some = multiply_weights(x[:n].contiguous(), weights, format, 512)
        np.testing.assert_array_equal(bits(some), bits(together[:n]))


@FORMATS
def test_sums_do_not_depend_on_the_block_of_rows(format: WeightFormat) -> None:
    """This matters with many exceptions, because their index in the whole weight assigns them to
    parts."""
    elements = MATRICES["specials"]().copy()
    elements[(elements & 0x7F80) >= 0x7F00] = 0x5A33
    elements = np.tile(elements, (4, 1))
    weights, x = pack(elements, format), tokens(3, elements.shape[1])
    divisions = [MatmulConfig(rows, 8, 32, 4, 2, 2) for rows in (16, 128)]
    divisions.append(MatmulConfig(16, 8, 32, 4, 2, 2, 3))
    products = [
        bits(multiply_weights(x, weights, format, elements.shape[1], config=division))
        for division in divisions
    ]
    for product in products[1:]:
        np.testing.assert_array_equal(product, products[0])


@FORMATS
@pytest.mark.parametrize("shared_nbytes", [MIN_SHARED_NBYTES, 163 << 10, 227 << 10])
def test_default_divisions_keep_the_order_of_sums_and_fit(
    shared_nbytes: int, format: WeightFormat
) -> None:
    for n_rows, n_columns in [(1024, 4096), (4096, 14336), (28672, 4096), (128256, 8192), (7, 9)]:
        configs = [
            default_config(n_rows, n_columns, n, format, shared_nbytes=shared_nbytes)
            for n in (1, 8, 16, 32, 200)
        ]
        assert len({(c.block_steps, c.n_warps, c.n_splits) for c in configs}) == 1
        assert max(shared_nbytes_of(c, format) for c in configs) <= shared_nbytes


def test_nothing_is_multiplied_by_nothing() -> None:
    weights = pack(model_rows(4, 40), W12)
    assert multiply_weights(tokens(0, 40), weights, W12, 40).shape == (0, 4)
    none = pack(MATRICES["no rows"](), W12)
    assert multiply_weights(tokens(3, 40), none, W12, 40).shape == (3, 0)


# Refusals.


def test_checks_are_for_once_and_for_these_arrays_only() -> None:
    weights = pack(model_rows(4, 40), W12)
    kept = weights_module._CHECKED
    n_known = len(kept)
    require_weights(weights, W12, 40)
    require_weights(weights, W12, 40)
    assert len(kept) == n_known + 1
    # The low bytes have passed the checks, the other array has not.
    for name in weights._fields[1:]:
        shorter = weights._replace(**{name: getattr(weights, name)[:0, None]})
        with pytest.raises(ValueError, match="has shape"):
            require_weights(shorter, W12, 40)
    with pytest.raises(ValueError, match="low_bytes has shape"):
        require_weights(weights, W11, 40)
    with pytest.raises(ValueError, match="low_bytes has shape"):
        require_weights(weights, W12, 90)
    del shorter, weights
    gc.collect()
    assert len(kept) == n_known


def test_what_does_not_fit_is_named() -> None:
    weights = pack(model_rows(4, 40), W12)
    with pytest.raises(ValueError, match=r"x has shape \(2, 41\); it must have \(2, 40\)"):
        multiply_weights(tokens(2, 41), weights, W12, 40)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float32; it must have torch"):
        multiply_weights(tokens(2, 40).float(), weights, W12, 40)
    with pytest.raises(ValueError, match="x must be contiguous"):
        multiply_weights(tokens(40, 2).T, weights, W12, 40)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\)"):
        multiply_weights(tokens(2, 40), weights, W12, 40, bias=tokens(1, 3)[0])
    with pytest.raises(ValueError, match="low_bytes has shape"):
        decode_weights(weights, W12, 90)
    with pytest.raises(ValueError, match="high_bits has shape"):
        decode_weights(weights._replace(high_bits=weights.high_bits[:2]), W12, 40)
    with pytest.raises(TypeError, match=r"exceptions has dtype torch\.int64"):
        decode_weights(weights._replace(exceptions=weights.exceptions.long()), W12, 40)
    with pytest.raises(ValueError, match=r"out has shape \(4, 41\)"):
        decode_weights(weights, W12, 40, torch.empty(4, 41, dtype=torch.bfloat16, device=DEVICE))


@FORMATS
def test_tokens_that_are_gathered_by_column_give_the_same_bits(
    format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with many exceptions, which would otherwise fetch a sector for each token."""
    elements = model_rows(20, 64)
    elements[::4, 5:25] = 0x4300  # 128, far above the window
    weights, exact = pack(elements, format), plain(elements).double()
    assert weights.exceptions.numel() >= 60
    x, found = tokens(9, 64), []
    for least in (1 << 40, 0):
        monkeypatch.setattr("packhorse.kernels.matmul._LEAST_SAVED_NBYTES", least)
        config = MatmulConfig(16, 8, 16, 2, 2, 3, 2)
        found.append(multiply_weights(x, weights, format, 64, config=config))
    assert torch.equal(*(y.view(torch.int16) for y in found))
    torch.testing.assert_close(found[1].double(), x.double() @ exact.T, rtol=2**-7, atol=0.01)


@pytest.mark.parametrize(
    ("n_exceptions", "block_tokens", "gathers_by_column"),
    [(17_600, 8, False), (17_600, 32, False), (218_000, 8, False), (218_000, 16, True)],
)
def test_tokens_are_gathered_by_column_where_that_saves_more_than_it_costs(
    n_exceptions: int, block_tokens: int, gathers_by_column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 x 14336 in W12, and 4096 x 4096 in W11. The kernel itself is not run."""
    elements = model_rows(16, 64)
    weights = pack(elements, W12)
    many = weights._replace(exceptions=torch.zeros(n_exceptions, dtype=torch.int32, device=DEVICE))
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, _: object) -> Any:
            return lambda *_, **constants: launched.append(constants["BY_COLUMN"])

    monkeypatch.setattr("packhorse.kernels.matmul.multiply_weights_kernel", Kernel())
    config = MatmulConfig(16, block_tokens, 16, 2)
    multiply_weights(tokens(block_tokens, 64), many, W12, 64, config=config)
    assert launched == [gathers_by_column]
