"""Products that start while the kernel before them still runs: when they do, and how they are
launched. That they load nothing before they wait is read in machine code, in
tests/benchmarks/test_simulations.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from weight_samples import model_rows

from packhorse.kernels import early_launch, launch, matmul
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.launch import Dialect
from packhorse.kernels.matmul import MatmulConfig, multiply_weights
from packhorse.layout import W12
from packhorse.reference.weights import encode_weights


def test_only_gpus_from_9_0_on_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKHORSE_EARLY_LAUNCH", raising=False)
    offered = {x: early_launch.is_offered(x) for x in [(0, 0), (8, 0), (8, 9), (9, 0), (10, 0)]}
    assert offered == {(0, 0): False, (8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True}


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHORSE_EARLY_LAUNCH", "0")
    assert not early_launch.is_offered((9, 0))
    monkeypatch.setenv("PACKHORSE_EARLY_LAUNCH", "1")
    assert early_launch.is_offered((9, 0))


def test_a_triton_without_such_launches_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKHORSE_EARLY_LAUNCH", raising=False)
    monkeypatch.setattr(early_launch, "cuda", SimpleNamespace(gdc_wait=None))
    assert not early_launch.is_offered((9, 0))


def test_the_interpreter_knows_no_such_launch() -> None:
    if launch.knobs.runtime.interpret:
        assert not launch.choose_dialect(torch.device("cpu")).early
    assert early_launch.launch_options(False) == {}
    assert early_launch.launch_options(True) == {"launch_pdl": True}


class Recorder:
    """In place of a kernel: keeps the options of its launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launches.append(options)


@pytest.mark.parametrize("early", [False, True])
def test_products_and_sums_of_splits_are_launched_alike(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """A kernel that is launched early waits, and one that does not wait is not launched early."""
    products, sums = Recorder(), Recorder()
    monkeypatch.setattr(matmul, "multiply_weights_kernel", products)
    monkeypatch.setattr(matmul, "add_splits_kernel", sums)
    dialect = Dialect(assembly=True, upcast=False, hopper=True, early=early)
    monkeypatch.setattr(matmul, "choose_dialect", lambda device: dialect)
    for n_columns in (512, 333):  # turns beyond the end of a row are not fetched ahead
        weights = WeightTensors(
            *map(torch.from_numpy, encode_weights(model_rows(64, n_columns), W12))
        )
        x = torch.zeros(4, n_columns, dtype=torch.bfloat16)
        multiply_weights(x, weights, W12, n_columns, config=MatmulConfig(32, 8, 32, 4, 2, 4))
    options = [(launch["EARLY"], launch.get("launch_pdl", False)) for launch in products.launches]
    assert options == ([(3, True), (0, False)] if early else [(0, False)] * 2)
    options = [(launch["EARLY"], launch.get("launch_pdl", False)) for launch in sums.launches]
    assert options == [(early, early)] * 2


def test_a_sum_of_splits_waits_for_all_of_them() -> None:
    """In the interpreter nothing starts early, and the sums are right."""
    elements = model_rows(64, 512)
    weights = WeightTensors(*map(torch.from_numpy, encode_weights(elements, W12)))
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = multiply_weights(x, weights, W12, 512, config=MatmulConfig(32, 8, 32, 4, 2, 4))
    weight = torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7 * exact.abs().max())
