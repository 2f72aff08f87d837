"""What the autotuner takes for a wrong product: one lost exception, one wrong sum, runs that differ
in a bit. Such a division is named and never chosen."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weight_samples import model_rows

from packhorse.device import product_timer
from packhorse.device.autotune import tune
from packhorse.device.product_check import ExactProduct, WrongProductWarning, are_equal_bits
from packhorse.device.product_timer import ProductTimer
from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice, Strategy
from packhorse.gpu.models import PRESETS
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import W12
from packhorse.reference.weights import encode_weights

FUSED = Choice(Strategy.FUSED, MatmulConfig(16, 8, 32, 2))
DECODE = Choice(Strategy.DECODE)


class WallTimer(ProductTimer):
    """The timer with a clock that stands still: it times the interpreter."""

    def time(self, calls: Any) -> float:
        return 1e-3


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.from_numpy(model_rows(48, 320).view(np.int16)).view(torch.bfloat16)


def pack(weight: Tensor) -> WeightTensors:
    elements = weight.view(torch.int16).numpy().view(np.uint16)
    return WeightTensors(*map(torch.from_numpy, encode_weights(elements, W12)))


def tokens(n_tokens: int, n_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_tokens)
    return torch.randn(n_tokens, n_columns, generator=generator).bfloat16()


@pytest.mark.parametrize("choice", [FUSED, DECODE], ids=lambda c: c.strategy.value)
def test_right_products_are_allowed(choice: Choice, weight: Tensor) -> None:
    x = tokens(9, 320)
    runs = [run_choice(choice, x, pack(weight), W12, 320) for _ in range(2)]
    assert are_equal_bits(runs)
    assert ExactProduct(x, weight).allows(runs[0], choice)


def test_blocks_of_rows_give_the_same(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(3, 320)
    whole = ExactProduct(x, weight).exact
    monkeypatch.setattr("packhorse.device.product_check._BLOCK_NBYTES", 5 * 320 * 8)
    assert torch.equal(ExactProduct(x, weight).exact, whole)
    assert torch.equal(whole, x.double() @ weight.double().T)


def test_one_lost_exception_is_noticed(weight: Tensor) -> None:
    """In one row of many, and of a usual size: compared with the largest result it is nothing."""
    weight = weight.clone()
    weight[17, 100] = 2.0**-9  # far below the window of its row
    arrays = pack(weight * 64)
    x = tokens(1, 320)
    x[0, 100] = 8.0
    exact = ExactProduct(x, weight * 64)
    y = run_choice(FUSED, x, arrays, W12, 320)
    assert exact.allows(y, FUSED)
    lost = y.clone()
    lost[0, 17] = (exact.exact[0, 17] - 8.0 * 64 * 2.0**-9).float()
    assert not exact.allows(lost, FUSED)
    assert (lost - y).abs().max() < exact.exact.abs().max() * 2**-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_noticed(bad: float, weight: Tensor) -> None:
    x = tokens(2, 320)
    y = F.linear(x, weight)
    assert ExactProduct(x, weight).allows(y, DECODE)
    y[1, 40] = bad
    assert not ExactProduct(x, weight).allows(y, DECODE)


def test_one_bit_is_noticed() -> None:
    y = torch.ones(2, 3).bfloat16()
    other = y.clone()
    other.view(torch.int16)[1, 2] ^= 1
    assert are_equal_bits([y, y.clone()])
    assert not are_equal_bits([y, y, other])
    assert not are_equal_bits([torch.zeros(1).bfloat16(), -torch.zeros(1).bfloat16()])


def spoiled(spoil: Callable[[Tensor, int], None]) -> Callable[..., Tensor]:
    """`run_choice`, whose fused products are spoiled."""
    n_calls = 0

    def run(choice: Choice, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal n_calls
        y = run_choice(choice, *args, **kwargs)
        if choice.strategy is Strategy.FUSED:
            n_calls += 1
            spoil(y, n_calls)
        return y

    return run


def every_third(y: Tensor, n_calls: int) -> None:
    if n_calls % 3 == 0:
        y.view(torch.int16)[-1, -1] ^= 1


def the_last(y: Tensor, _: int) -> None:
    y[-1, -1] *= 1.02


@pytest.mark.parametrize(
    ("spoil", "what"), [(every_third, "3 runs differ"), (the_last, "outside of the error bound")]
)
def test_a_division_that_is_wrong_is_named_and_never_chosen(
    spoil: Callable[[Tensor, int], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.from_numpy(model_rows(20, 64).view(np.int16)).view(torch.bfloat16)
    timer = WallTimer(pack(weight), W12, 64, chain_nbytes=1)
    monkeypatch.setattr(product_timer, "run_choice", spoiled(spoil))
    with pytest.warns(WrongProductWarning, match=rf"MatmulConfig.*WRONG PRODUCT.*18.*{what}"):
        of_fused = timer(FUSED, 18)
    of_decoding = timer(DECODE, 18)
    assert (of_fused, of_decoding) == (math.inf, 1e-3)

    # One division stands for all of its kernel, because the interpreter is slow.
    def measure(choice: Choice, _: int) -> float:
        return of_fused if choice.strategy is Strategy.FUSED else of_decoding

    found = tune(4096, 4096, W12, PRESETS[0], measure, buckets=[64])
    assert found[64].choice == DECODE
