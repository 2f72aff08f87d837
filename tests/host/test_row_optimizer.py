"""Training of packed embeddings: the losses and rows of PyTorch's optimizers, bit for bit."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from packhorse.host import PackedEmbedding, PackedEmbeddingBag, RowOptimizer, pack_embedding_

N_ROWS, N_COLUMNS, N_BAGS = 120, 64, 20

# PyTorch says so of its own optimizers.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    (torch.optim.SparseAdam, {"lr": 0.01}),
]
MODES = [("sum", None), ("mean", 3), ("rows", 5)]


class Model(nn.Module):
    """Bags or rows, and a layer above."""

    def __init__(self, mode: str, padding_idx: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.words: nn.Module
        how: dict[str, Any] = {"padding_idx": padding_idx, "sparse": True, "dtype": dtype}
        if mode == "rows":
            self.words = nn.Embedding(N_ROWS, N_COLUMNS, **how)
        else:
            self.words = nn.EmbeddingBag(N_ROWS, N_COLUMNS, mode=mode, **how)
        self.top = nn.Linear(N_COLUMNS, 1, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.words(ids).reshape(-1, N_COLUMNS)).square().mean()


def batches(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 60, (N_BAGS, 6), generator=generator) for _ in range(n)]


def pair(mode: str, padding_idx: int | None, dtype: torch.dtype) -> tuple[Model, Model]:
    torch.manual_seed(4)
    plain = Model(mode, padding_idx, dtype)
    with torch.no_grad():
        plain.words.weight.mul_(0.05)
    packed = copy.deepcopy(plain)
    pack_embedding_(packed.words)
    return plain, packed


@pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize(("mode", "padding_idx"), MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_rows_are_those_of_pytorch(
    kind: Any, options: dict[str, Any], mode: str, padding_idx: int | None, dtype: torch.dtype
) -> None:
    plain, packed = pair(mode, padding_idx, dtype)
    theirs = kind([plain.words.weight], **options)
    ours = RowOptimizer(packed, kind, **options)
    decays = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (theirs, ours)]
    for step, ids in enumerate(batches(5)):
        losses = [model(ids) for model in (plain, packed)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        if step == 2:  # gradients of two batches add up
            continue
        for each in (theirs, ours):
            each.step()
            each.zero_grad()
        for decay in decays:
            decay.step()
    assert torch.equal(packed.words.unpacked(), plain.words.weight.detach())


def test_gradients_are_those_of_pytorch() -> None:
    plain, packed = pair("sum", 3, torch.float32)
    (ids,) = batches(1)
    plain(ids).backward()
    packed(ids).backward()
    gradient = packed.words.gradient
    assert torch.equal(gradient.to_dense(), plain.words.weight.grad.to_dense())
    packed.words.gradient = None
    packed.words.requires_grad_(False)
    packed(ids).backward()
    assert packed.words.gradient is None


def test_maxima_and_weights_of_samples_train() -> None:
    for mode, weighted in (("max", False), ("sum", True)):
        plain = nn.EmbeddingBag(N_ROWS, N_COLUMNS, mode=mode, sparse=weighted)
        packed = copy.deepcopy(plain)
        pack_embedding_(packed)
        (ids,) = batches(1)
        scales = [torch.rand(ids.shape).requires_grad_() for _ in range(2)]
        scales[1].data.copy_(scales[0].data)
        for module, scale in zip((plain, packed), scales, strict=True):
            module(ids, None, scale if weighted else None).square().sum().backward()
        assert torch.equal(packed.gradient.to_dense(), plain.weight.grad.to_dense())
        if weighted:
            assert torch.equal(scales[0].grad, scales[1].grad)


def test_a_state_goes_on_where_it_was() -> None:
    _, whole = pair("sum", None, torch.float32)
    parted = copy.deepcopy(whole)
    optimizer = RowOptimizer(whole, torch.optim.SparseAdam, lr=0.01)
    other = RowOptimizer(parted, torch.optim.SparseAdam, lr=0.01)
    for step, ids in enumerate(batches(4)):
        if step == 2:
            model_state, state = parted.state_dict(), copy.deepcopy(other.state_dict())
            _, parted = pair("mean", None, torch.float32)
            parted.words.mode = "sum"
            parted.load_state_dict(model_state)
            other = RowOptimizer(parted, torch.optim.SparseAdam, lr=7.0)
            other.load_state_dict(state)
        for model, each in ((whole, optimizer), (parted, other)):
            model(ids).backward()
            each.step()
            each.zero_grad()
    assert torch.equal(whole.words.unpacked(), parted.words.unpacked())


def test_rows_that_no_longer_fit_are_told_and_repacked() -> None:
    bag = PackedEmbeddingBag.from_pretrained(0.05 * torch.randn(100, 64), freeze=False, mode="sum")
    optimizer = RowOptimizer(bag, torch.optim.SGD, lr=1e12)
    bag(torch.arange(20)[None]).sum().backward()
    lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    with pytest.warns(RuntimeWarning, match=r"repack_\(\) packs them again") as warned:
        optimizer.step()
    assert warned[0].filename == __file__
    assert bag.table.n_unpacked_rows >= 20
    rows = bag.unpacked()
    bag.repack_()
    assert bag.table.n_unpacked_rows == 0
    assert torch.equal(bag.unpacked(), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        optimizer.step()


def test_what_changes_all_rows_is_refused() -> None:
    bag = PackedEmbeddingBag(10, 8)
    with pytest.raises(ValueError, match="Adam changes all rows of a matrix at each step"):
        RowOptimizer(bag, torch.optim.Adam)
    with pytest.raises(ValueError, match=r"momentum=0\.9 changes rows that have no gradient"):
        RowOptimizer(bag, torch.optim.SGD, lr=0.1, momentum=0.9)
    first, second = nn.Embedding(10, 8), nn.Embedding(10, 8)
    second.weight = first.weight
    pack_embedding_(first, second)
    with pytest.raises(ValueError, match="share their rows"):
        RowOptimizer([first, second], torch.optim.SGD)
    with pytest.raises(ValueError, match="no packed embedding that is trained"):
        RowOptimizer(PackedEmbedding.from_pretrained(torch.zeros(3, 4)), torch.optim.SGD)


def test_a_batch_of_padding_changes_nothing() -> None:
    bag = PackedEmbeddingBag(10, 8, padding_idx=0, mode="sum")
    optimizer = RowOptimizer(bag, torch.optim.SGD, lr=0.1)
    rows = bag.unpacked()
    bag(torch.zeros(3, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert torch.equal(bag.unpacked(), rows)


SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
    "CosineAnnealingLR": {"T_max": 4},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.5**epoch},
    "ReduceLROnPlateau": {"patience": 0, "mode": "max"},
}


@pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_do_what_they_do_in_pytorch(
    name: str, kind: Any, options: dict[str, Any]
) -> None:
    cycles = "Cyc" in name and kind is not torch.optim.SparseAdam
    how = SCHEDULERS[name] | ({"cycle_momentum": False} if cycles else {})
    plain, packed = pair("sum", None, torch.float32)
    optimizers = (
        kind([plain.words.weight], **options),
        RowOptimizer(packed, kind, **options),
    )
    schedulers = [getattr(lr_scheduler, name)(each, **how) for each in optimizers]
    for ids in batches(4):
        for model, optimizer, scheduler in zip(
            (plain, packed), optimizers, schedulers, strict=True
        ):
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))
    assert torch.equal(packed.words.unpacked(), plain.words.weight.detach())


def test_a_scheduler_cannot_bring_in_momentum() -> None:
    bag = PackedEmbeddingBag(10, 8)
    optimizer = RowOptimizer(bag, torch.optim.SGD, lr=0.1)
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    bag(torch.tensor([[1]])).sum().backward()
    before = bag.unpacked()
    with pytest.raises(
        ValueError, match=r"momentum=0\.95.*give schedulers .* cycle_momentum=False"
    ):
        optimizer.step()
    assert torch.equal(bag.unpacked(), before)


class OwnAdam(torch.optim.Adam):
    pass


class OwnSGD(torch.optim.SGD):
    pass


def test_optimizers_are_called_in_many_ways() -> None:
    model = nn.Sequential(PackedEmbeddingBag(10, 8))
    for make in (OwnSGD, partial(torch.optim.SGD, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)):
        assert RowOptimizer(model, make).defaults["momentum"] == 0
    for parameters in (model.parameters(), model.named_parameters()):
        with pytest.raises(TypeError, match="give RowOptimizer the model or packed embeddings"):
            RowOptimizer(parameters, torch.optim.SGD)  # type: ignore[arg-type]
    for make in (OwnAdam, partial(torch.optim.Adam, lr=0.1)):
        with pytest.raises(ValueError, match="Adam changes all rows"):
            RowOptimizer(model, make)
    with pytest.raises(ValueError, match=r"momentum=0\.9"):
        RowOptimizer(model, partial(torch.optim.SGD, momentum=0.9))
    with pytest.raises(TypeError, match="an object of SGD; give its class"):
        RowOptimizer(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="makes list, which is no"):
        RowOptimizer(model, list)  # type: ignore[arg-type]


def test_groups_have_options_of_their_own() -> None:
    first, second, third = (PackedEmbedding(10, 8) for _ in range(3))
    groups = [{"params": first}, {"params": [second], "lr": 0.2}]
    optimizer = RowOptimizer(groups, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="in more than one group"):
        optimizer.add_param_group({"params": nn.Sequential(first)})
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        optimizer.add_param_group({"params": third, "weight_decay": 0.1})
    optimizer.add_param_group({"params": third, "lr": 0.3})
    before = [module.unpacked()[4] for module in (first, second, third)]
    for module in (first, second, third):
        module(torch.tensor([4])).sum().backward()
    optimizer.step()
    for row, module, lr in zip(before, (first, second, third), (0.1, 0.2, 0.3), strict=True):
        assert torch.equal(module.unpacked()[4], row - lr)


def test_copies_change_the_modules_that_were_copied_with_them() -> None:
    bag = PackedEmbeddingBag(10, 8)
    pair_of = (bag, RowOptimizer(bag, torch.optim.Adagrad, lr=0.1))
    for own, optimizer in (copy.deepcopy(pair_of), pickle.loads(pickle.dumps(pair_of))):
        own(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        assert not torch.equal(own.unpacked(), bag.unpacked())
