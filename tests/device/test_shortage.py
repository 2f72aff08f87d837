"""Products on a GPU that has no memory left for a plain weight.

There is no GPU here whose memory could run out, so a stand-in counts the bytes that it has and
refuses more; the kernels run in Triton's interpreter.
"""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from weight_samples import model_rows

from packhorse.device import choices, pack_weight, products, shortage
from packhorse.device.strategy import Choice, Strategy
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.weights import decode_weights
from packhorse.layout import W12, WeightFormat
from packhorse.reference.weights import encode_weights


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    choices.forget_choices()


class Memory:
    """A GPU's memory.

    Args:
        limit: bytes that it has.
        held: bytes of them that other tensors have.
    """

    def __init__(self, limit: int, held: int = 0) -> None:
        self.limit, self.held = limit, held
        self.now = 0.0  # seconds
        self.tried: list[int] = []  # bytes of each plain weight

    def decode(self, weights: WeightTensors, format: WeightFormat, n_columns: int) -> torch.Tensor:
        nbytes = 2 * weights.n_rows * n_columns
        self.tried.append(nbytes)
        if self.held + nbytes > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 KiB")
        return decode_weights(weights, format, n_columns)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory(10_000)
    monkeypatch.setattr(products, "decode_weights", found.decode)
    monkeypatch.setattr(shortage, "_held_nbytes", lambda _: found.held)
    monkeypatch.setattr(shortage, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def operands(n_rows: int = 32) -> tuple[WeightTensors, torch.Tensor]:
    """A weight and tokens."""
    weights = WeightTensors(*map(torch.from_numpy, encode_weights(model_rows(n_rows, 256), W12)))
    return weights, torch.ones(2, 256).bfloat16()


def test_without_memory_for_the_plain_weight_products_go_on_and_say_so_once(
    memory: Memory,
) -> None:
    weights, x = operands()
    expected = products.multiply(x, weights, W12, 256, choice=Choice(Strategy.FUSED))
    with pytest.warns(RuntimeWarning, match="0 MiB left for the plain weight of 32 x 256") as told:
        found = [
            products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE))
            for _ in range(3)
        ]
    assert len(told) == 1
    assert memory.tried == [16384]
    assert all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("format", ["W12", "W11"])
@pytest.mark.usefixtures("memory")
def test_without_memory_for_the_plain_weight_products_are_right(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.from_numpy(model_rows(60, 96)).view(torch.bfloat16)
    weight[3, 5] = 1e-30
    packed = pack_weight(weight, format)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    monkeypatch.setattr(products, "choose", lambda *_: Choice(Strategy.DECODE))  # as if many
    with pytest.warns(RuntimeWarning, match="no 0 MiB left for the plain weight of 60 x 96"):
        y = products.multiply(x, packed.arrays, packed.format, 96)
    exact = x.double() @ weight.double().T
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_without_memory_the_kernels_for_hopper_are_taken_where_they_run(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher is the test's own, because there is no GPU here."""
    weights, x = operands()
    expected = torch.zeros(2, 32).bfloat16()
    monkeypatch.setattr(products, "is_ready", lambda _: True)
    monkeypatch.setitem(products.LAUNCHERS, Strategy.STREAM, lambda *_, **__: expected)
    with pytest.warns(RuntimeWarning, match="left for the plain weight"):
        y = products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE))
    assert torch.equal(y, expected)


def test_without_memory_a_capture_ends_with_one_clear_error(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures need a GPU, so here one only seems to be under way."""
    weights, x = operands()
    monkeypatch.setattr(products, "_is_capturing", lambda _: True)
    monkeypatch.setattr(products, "LAUNCHERS", {})  # another product would be a second error
    with pytest.raises(torch.OutOfMemoryError, match=r"captured.*batches of fewer tokens"):
        products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE))


def test_an_attempt_that_failed_is_not_made_again_while_as_much_is_held(memory: Memory) -> None:
    weights, x = operands()
    small = operands(16)[0]  # 8192 bytes
    decode = Choice(Strategy.DECODE)

    def tries(weights: WeightTensors, held: int) -> bool:
        memory.held = held
        before = len(memory.tried)
        products.multiply(x, weights, W12, 256, choice=decode)
        return len(memory.tried) > before

    memory.limit = 20_000
    with pytest.warns(RuntimeWarning, match="left for the plain weight"):
        assert tries(weights, 5_000)  # 21384 bytes do not fit
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was said is not said again
        assert not tries(weights, 5_000)
        assert not tries(weights, 6_000)
        assert tries(small, 5_000)
        assert tries(weights, 3_000)  # other tensors were freed
        memory.now = 59
        assert not tries(weights, 5_000)
        memory.now, memory.limit = 61, 30_000  # another program may have freed some
        assert tries(weights, 5_000)
        assert tries(weights, 13_000)


def test_what_does_not_fit_is_known_in_a_capture(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a batch ran once before its capture, the capture has the same kernel."""
    weights, x = operands()
    with pytest.warns(RuntimeWarning, match="left for the plain weight"):
        expected = products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE))
    monkeypatch.setattr(products, "_is_capturing", lambda _: True)
    assert torch.equal(
        products.multiply(x, weights, W12, 256, choice=Choice(Strategy.DECODE)), expected
    )
