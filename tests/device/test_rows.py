"""Rows of a packed weight by index: they are decoded, can be assigned, and are read-only; and
weights that get gradients, which become plain."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_samples import FORMATS, inputs, matrix, model_matrix, plain_linear, same_bits
from torch import Tensor, nn
from torch.nn import Parameter

from packhorse.device import (
    PackedLinear,
    PackedWeight,
    operators,
    pack_model_,
    pack_weight,
    unpack_model_,
)

INDICES: list[Any] = [
    slice(3, 9), slice(None), slice(-5, None), slice(0, 999), slice(9, 3), slice(1, 40, 7),
    5, -1, (3, slice(2, 9)), (slice(2, 5), 3), (2, 4), (slice(5, 8), slice(None, None, 2)),
]  # fmt: skip


def parameter(plain: Tensor, format: str = "W12") -> PackedWeight:
    packed: PackedWeight = Parameter(pack_weight(plain, format), requires_grad=False)  # type: ignore[assignment]
    return packed


@FORMATS
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_those_of_the_plain_matrix(format: str, index: Any) -> None:
    for plain in (model_matrix(100, 70), matrix("specials").repeat(12, 1)):
        rows = parameter(plain, format)[index]
        assert same_bits(rows, plain[index])
        assert rows.shape == plain[index].shape
        assert same_bits(parameter(plain, format).data[index], plain[index])


@FORMATS
def test_rows_are_decoded_by_kernels(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which stands in for a GPU."""
    plain = model_matrix(100, 70)
    packed = parameter(plain, format)
    monkeypatch.setattr(operators, "_has_kernels", lambda _: True)
    for index in (slice(3, 9), slice(9, 3), -1):
        assert same_bits(packed[index], plain[index])


def test_rows_that_are_not_there() -> None:
    packed = parameter(model_matrix(100, 70))
    for row in (100, -101):
        with pytest.raises(IndexError, match=f"row {row} of a packed weight of 100 rows"):
            packed[row]
    with pytest.raises(ValueError, match="step must be greater than zero"):
        packed[::-1]
    with pytest.raises(IndexError):
        packed[3, 70]


def test_products_with_rows_have_gradients() -> None:
    plain = model_matrix(100, 70)
    packed = parameter(plain)
    xs = [inputs(4, 70).requires_grad_() for _ in range(2)]
    for x, weight in zip(xs, (plain, packed), strict=True):
        product = x @ weight[10:20].to(torch.bfloat16).t()
        assert type(product) is Tensor
        product.float().square().sum().backward()
    assert same_bits(xs[0].grad, xs[1].grad)
    tile = torch.empty(8, 10, dtype=torch.bfloat16)[:4]
    assert type(torch.mm(xs[0].detach(), packed[10:20].t(), out=tile)) is Tensor
    assert same_bits(tile, xs[0].detach() @ plain[10:20].t())


def test_rows_in_compiled_code_and_under_transforms() -> None:
    plain = model_matrix(100, 70)
    packed, x = parameter(plain), inputs(4, 70)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight[2:9].t()

    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x, packed), multiply(x, plain))
    gradients = [torch.func.grad(lambda x, w=w: multiply(x, w).sum())(x) for w in (packed, plain)]
    assert same_bits(*gradients)
    assert packed.to("meta")[2:9].shape == (7, 70)


WRITES: list[Callable[[Tensor], object]] = [
    lambda rows: rows.zero_(),
    lambda rows: rows.t().mul_(2),
    lambda rows: rows.split(2)[0].add_(1),
    lambda rows: rows.__setitem__(0, 1),
    lambda rows: rows.__iadd__(1),
    lambda rows: rows.data.fill_(2),
    lambda rows: rows.detach().fill_(2),
    lambda rows: rows.copy_(rows + 1),
    lambda rows: torch.zero_(rows),
    lambda rows: torch.nn.init.normal_(rows),
    lambda rows: torch.add(rows, 1, out=rows),
    lambda rows: torch._foreach_add_([rows], 1),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_rows_is_refused(write: Callable[[Tensor], object]) -> None:
    plain = model_matrix(100, 70)
    rows = parameter(plain)[3:9]
    with pytest.raises(RuntimeError, match=r"are a copy.*weight\[rows\] = values.*clone\(\)"):
        write(rows)
    assert same_bits(rows, plain[3:9])
    for free in (rows.clone(), rows + 0, copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert type(free) is Tensor
        write(free)


@FORMATS
def test_assigned_rows_are_packed(format: str) -> None:
    plain = model_matrix(100, 70)
    weight = parameter(plain, format)
    plain[-3:] = plain[0]
    weight.data[-3:] = weight[0]
    plain[7, 2:5] = 3.0
    weight[7, 2:5] = 3.0
    assert same_bits(weight.unpack(), plain)
    assert weight.format.name == format
    with pytest.raises(RuntimeError, match=r"assign value\.detach\(\)"):
        weight[3] = torch.ones(70, requires_grad=True)
    assert same_bits(weight.unpack(), plain)


# Weights that get gradients.


@pytest.mark.parametrize("by_method", [True, False], ids=["method", "attribute"])
def test_a_parameter_that_gets_gradients_becomes_plain(by_method: bool) -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain)
    (trained,), weight = copy.deepcopy([packed]), packed.weight
    held = trained.weight
    other = nn.Linear(300, 200, bias=False)
    other.weight = held
    for each in trained.parameters():  # as PEFT does
        if by_method:
            each.requires_grad_(True)
        else:
            each.requires_grad = True
    assert trained.weight is held is other.weight
    assert type(held) is Parameter
    assert same_bits(held, plain.weight)
    layers = [trained, plain.requires_grad_(True)]
    for layer in layers:
        layer(inputs(3, 300)).float().square().sum().backward()
        torch.optim.SGD([layer.weight], 0.1).step()
    assert same_bits(trained.weight.grad, plain.weight.grad)
    assert same_bits(trained.weight, plain.weight)
    assert not same_bits(trained.weight, weight.unpack())
    assert isinstance(weight, PackedWeight)
    state = trained.state_dict()
    assert set(state) == {"weight", "bias"}
    plain_linear().load_state_dict(state)
    unpack_model_(nn.Sequential(trained))
    assert type(trained) is nn.Linear
    assert trained.weight is held
    assert held.requires_grad


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_copy_of_one_layer_alone_is_plain(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(200, 300, dtype=torch.bfloat16))
    pack_model_(model, embeddings=True)
    weight = model[0].weight
    assert isinstance(weight, PackedWeight)
    copied = copy.deepcopy(model[0])
    assert type(copied.weight) is Parameter
    assert same_bits(copied.weight, weight.unpack())
    assert not copied.weight.requires_grad
    assert set(copied.state_dict()) == {name for name, _ in kind(2, 3).named_parameters()}
    model[0].load_state_dict(copied.state_dict())
    for packed in (model[0].weight, copy.deepcopy(model)[0].weight, copy.deepcopy(weight)):
        assert isinstance(packed, PackedWeight)
        assert same_bits(packed.unpack(), copied.weight)


def test_freezing_leaves_weights_packed() -> None:
    model = nn.Sequential(plain_linear())
    pack_model_(model)
    model.requires_grad_(False).train().zero_grad()
    model[0].weight.requires_grad = False
    assert isinstance(model[0].weight, PackedWeight)


def test_a_weight_may_become_plain_before_the_backward_pass() -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain)
    x, y = inputs(3, 300).requires_grad_(), inputs(3, 300).requires_grad_()
    product, expected = packed(x).sum(), plain(y).sum()
    packed.weight.requires_grad_(True)
    assert not isinstance(packed.weight, PackedWeight)
    product.backward()
    expected.backward()
    assert same_bits(x.grad, y.grad)


def test_a_weight_that_others_refer_to_stays_packed() -> None:
    packed = PackedLinear.from_linear(plain_linear())
    reference = weakref.ref(packed.weight)  # as compiled code has it
    with pytest.raises(RuntimeError, match=r"do this first.* lm_head=False, embeddings=False"):
        packed.weight.requires_grad_(True)
    assert isinstance(reference(), PackedWeight)
