"""Part `repeat` of gpu.py: its sums are exact, and it notices one wrong bit in one run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import repeats
from benchmarks.gpu.checks import WrongError
from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice, Strategy
from packhorse.layout import W12, WEIGHT_FORMATS

CPU = torch.device("cpu")


def test_every_strategy_has_divisions_to_repeat() -> None:
    """A strategy that is added must be added there, too."""
    assert set(repeats.DIVISIONS) == set(Strategy)
    whole = repeats.repeats(smoke=False)
    assert len(whole) == len(set(whole)) > 100
    assert {job.format for job in whole} == set(WEIGHT_FORMATS)


def test_sums_are_exact_in_any_order() -> None:
    weight, x = repeats.exact_operands(16, 14336, 4, CPU)
    exact = x.double() @ weight.double().T
    for seed in range(3):
        order = torch.randperm(14336, generator=torch.Generator().manual_seed(seed))
        terms = x[:, None, order].float() * weight[None, :, order].float()
        assert torch.equal(terms.cumsum(-1, dtype=torch.float32)[..., -1].double(), exact)
    assert weight.abs().max() == 1 << 16
    assert (exact.float().bfloat16().double() != exact).any(), "results must need rounding"
    with pytest.raises(ValueError, match="60000 columns"):
        repeats.exact_operands(4, 60000, 1, CPU)


def spoil_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    n_calls = 0

    def run(choice: Choice, *args: Any) -> Tensor:
        nonlocal n_calls
        y = run_choice(choice, *args)
        n_calls += 1
        if n_calls == repeats.N_RUNS_SMALL:
            y.view(torch.int16)[3, 5] ^= 1
        return y

    monkeypatch.setattr(repeats, "run_choice", run)


def test_one_wrong_bit_in_one_run_ends_it_and_names_the_division(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_one_run(monkeypatch)
    run = SimpleNamespace(smoke=True, keep=lambda rows: None, strategies=())
    with pytest.raises(WrongError, match=r"W12, 20 tokens, .*MatmulConfig.*: 1 of 3 runs"):
        repeats.repeat(run)


def test_runs_that_are_equal_but_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a kernel forgot the exceptions each time."""
    job = next(j for j in repeats.repeats(smoke=True) if j.choice.strategy is Strategy.FUSED)
    weight, arrays, x, exact = repeats._operands(job.format, job.n_tokens, True)
    none = arrays._replace(exception_starts=torch.zeros_like(arrays.exception_starts))
    monkeypatch.setattr(repeats, "_operands", lambda *_: (weight, none, x, exact))
    with pytest.raises(WrongError, match="3 of 3 runs"):
        repeats.repeat_division(job)


def test_lost_bits_of_decoding_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = repeats.Repeat(Choice(Strategy.DECODE), W12.name, 20, True)
    assert repeats.repeat_division(job) == 3
    plain = repeats.decode_weights
    monkeypatch.setattr(repeats, "decode_weights", lambda *args: plain(*args).neg())
    with pytest.raises(WrongError, match="DECODE"):
        repeats.repeat_division(job)
