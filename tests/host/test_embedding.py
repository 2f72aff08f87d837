"""Packed embeddings: what PyTorch's modules compute, bit for bit; their states, moves and
copies; embeddings of other classes."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.errors import CorruptionError
from packhorse.host import (
    PackedEmbedding,
    PackedEmbeddingBag,
    RowOptimizer,
    pack_embedding_,
    pack_table,
    unpack_embedding_,
)
from packhorse.host import embedding as embedding_module

N_ROWS, N_COLUMNS = 300, 64


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    made = 0.05 * torch.randn(N_ROWS, N_COLUMNS, generator=generator)
    return made.to(dtype) if dtype.is_floating_point else (1000 * made).to(dtype)


def ids_of(*shape: int) -> Tensor:
    return torch.randint(0, N_ROWS, shape, generator=torch.Generator().manual_seed(len(shape)))


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.fixture(params=["direct", "distinct"])
def fetching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to fetch the rows of bags."""
    if request.param == "distinct":
        monkeypatch.setattr(embedding_module, "_DISTINCT_NBYTES", -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_that_are_added_up_packed_are_those_of_pytorch(
    dtype: torch.dtype, mode: str, include_last_offset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = weights(dtype)
    plain[0], plain[1] = torch.inf, 1e30  # exceptions
    options: Any = {"mode": mode, "include_last_offset": include_last_offset}
    ours = PackedEmbeddingBag.from_pretrained(plain, **options)
    theirs = nn.EmbeddingBag.from_pretrained(plain, **options)
    counts = torch.arange(200) * 7 % 40
    starts = F.pad(counts.cumsum(0), (1, 0))
    ids = torch.randint(0, N_ROWS, (int(starts[-1]),), generator=torch.Generator().manual_seed(2))
    offsets = starts if include_last_offset else starts[:-1]
    bags = [(ids, offsets), (ids.int(), offsets.int()), (ids_of(9, 5), None)]
    with monkeypatch.context() as patch:
        patch.setattr(PackedEmbeddingBag, "fetch", None)  # no row is decoded to memory
        assert all(same(ours(*bag), theirs(*bag)) for bag in bags)
    ours.update_(torch.tensor([3]), torch.full((1, N_COLUMNS), 1e-30).to(dtype))
    assert ours.table.n_unpacked_rows == 1  # kept plain: bags go the other way
    theirs = nn.EmbeddingBag.from_pretrained(ours.unpacked(), **options)
    assert all(same(ours(*bag), theirs(*bag)) for bag in bags)


def test_bags_with_wrong_offsets_are_refused_as_by_pytorch() -> None:
    modules = (
        PackedEmbeddingBag.from_pretrained(weights(), mode="sum"),
        nn.EmbeddingBag.from_pretrained(weights(), mode="sum"),
    )
    for offsets in (torch.tensor([1, 2]), torch.tensor([0, 9]), torch.tensor([[0]]), None):
        messages = []
        for module in modules:
            with pytest.raises((ValueError, RuntimeError)) as error:
                module(ids_of(5), offsets)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    with pytest.raises(ValueError, match="starts must ascend"):
        modules[0].table.sum_bags(np.arange(4), np.array([0, 3, 2, 4]))
    with pytest.raises(ValueError, match=r"of F16, .* gather them"):
        pack_table(weights(torch.float16)).sum_bags(np.arange(4), np.array([0, 4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_look_ups_are_those_of_pytorch(dtype: torch.dtype) -> None:
    plain = weights(dtype)
    module = PackedEmbedding.from_pretrained(plain, padding_idx=-1)
    assert module.padding_idx == N_ROWS - 1
    for ids in (ids_of(5, 7), ids_of(3).int(), torch.tensor(4), ids_of(0), ids_of(2, 0)):
        assert same(module(ids), F.embedding(ids, plain))
    with pytest.raises(IndexError, match="id 300"):
        module(torch.tensor([1, 300]))
    with pytest.raises(TypeError, match="integers"):
        module(torch.tensor([1.0]))


BAGS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean", "padding_idx": 7},
    {"mode": "max"},
    {"mode": "max", "padding_idx": 0},
    {"mode": "sum", "include_last_offset": True, "padding_idx": 3},
]


@pytest.mark.usefixtures("fetching")
@pytest.mark.parametrize("options", BAGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags_are_those_of_pytorch(options: dict[str, Any], dtype: torch.dtype) -> None:
    plain = nn.EmbeddingBag.from_pretrained(weights(dtype), **options)
    packed = PackedEmbeddingBag.from_pretrained(weights(dtype), **options)
    ids = torch.cat([ids_of(40), torch.tensor([7, 0, 3, 7, 7, 3, 0])])
    offsets = torch.tensor([0, 0, 9, 30, 40, 44, 47])
    assert same(packed(ids, offsets), plain(ids, offsets))
    assert same(packed(ids.int(), offsets.int()), plain(ids.int(), offsets.int()))
    assert same(packed(ids_of(6, 9)), plain(ids_of(6, 9)))
    with pytest.raises(TypeError, match="ids must be integers"):
        packed(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="offsets must be integers"):
        packed(ids, offsets.float())
    if options["mode"] == "sum":
        scales = torch.rand(len(ids)).to(dtype)
        assert same(packed(ids, offsets, scales), plain(ids, offsets, scales))


def test_what_cannot_be_had_is_refused() -> None:
    for make in (PackedEmbedding, PackedEmbeddingBag):
        with pytest.raises(ValueError, match="max_norm changes rows"):
            make(4, 8, max_norm=1.0)
        with pytest.raises(ValueError, match="not for sparse gradients"):
            make.from_pretrained(weights(), scale_grad_by_freq=True)
        with pytest.raises(ValueError, match=r"shape \(300, 64\); it must be \(5, 64\)"):
            make(5, 64, _weight=weights())
    with pytest.raises(TypeError, match=r"Linear is not a torch\.nn\.Embedding"):
        pack_embedding_(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no packed rows"):
        unpack_embedding_(nn.Embedding(2, 2))
    module = PackedEmbedding(4, 8)
    with pytest.raises(AttributeError, match="load_state_dict packs"):
        module.weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(TypeError, match="would change them"):
        module.half()
    with pytest.raises(TypeError, match="ids must be a tensor of integers, not list"):
        module([1, 2])  # type: ignore[arg-type]


def test_new_modules_have_the_rows_that_pytorch_would_make() -> None:
    for ours, theirs in ((PackedEmbedding, nn.Embedding), (PackedEmbeddingBag, nn.EmbeddingBag)):
        torch.manual_seed(5)
        plain = theirs(50, 16, padding_idx=2, dtype=torch.bfloat16)
        torch.manual_seed(5)
        packed = ours(50, 16, padding_idx=2, dtype=torch.bfloat16)
        assert same(packed.unpacked(), plain.weight.detach())
        torch.manual_seed(6)
        plain.reset_parameters()
        torch.manual_seed(6)
        packed.reset_parameters()
        assert same(packed.unpacked(), plain.weight.detach())


def test_states_are_packed_and_plain_ones_are_packed_when_loaded() -> None:
    plain = nn.Embedding.from_pretrained(weights())
    module = nn.ModuleDict({"words": PackedEmbedding(N_ROWS, N_COLUMNS)})
    module.load_state_dict({"words.weight": plain.weight})
    assert same(module["words"].unpacked(), plain.weight.detach())

    new = torch.full((2, N_COLUMNS), 3e30)
    module["words"].update_(torch.tensor([5, 7]), new)
    assert module["words"].table.n_unpacked_rows == 2
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    assert file.tell() < 0.95 * plain.weight.nbytes
    file.seek(0)
    other = nn.ModuleDict({"words": PackedEmbedding(N_ROWS, N_COLUMNS)})
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(other["words"].unpacked(), module["words"].unpacked())
    assert same(other["words"](torch.tensor([5])), new[:1])

    module["words"].plain_state = True
    plain.load_state_dict(module["words"].state_dict())
    assert same(plain.weight.detach(), module["words"].unpacked())


def test_bad_states_are_refused_by_name() -> None:
    module = PackedEmbedding.from_pretrained(weights())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.zeros(3, N_COLUMNS)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        module.load_state_dict({})
    state = module.state_dict()
    state["weight.rows"] = state["weight.rows"].clone()
    state["weight.rows"][7, 3] ^= 1
    with pytest.raises(CorruptionError, match="rows 0 to 299 do not match"):
        module.load_state_dict(state)
    del state["weight.rows"]
    with pytest.raises(CorruptionError, match=r"weight\.rows is missing"):
        module.load_state_dict(state)
    bad = module.state_dict() | {"weight.crcs": torch.zeros(5).bfloat16()}
    with pytest.raises(CorruptionError, match=r"weight\.crcs is no tensor of integers"):
        module.load_state_dict(bad)
    assert same(module.unpacked(), weights())


class Scaled(nn.Embedding):
    """As several models of transformers have it."""

    scale = 3.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.tensor(self.scale).to(self.weight.dtype)


class Direct(nn.Embedding):
    """One that does not call the method of its base."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input + 1, self.weight)


class Positions(nn.Embedding):
    """As Whisper has it."""

    def forward(self, start: int) -> Tensor:  # type: ignore[override]
        return self.weight[start : start + 3]


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Direct])
def test_a_module_of_any_class_is_packed_in_place_and_back(kind: type[nn.Embedding]) -> None:
    module = kind(N_ROWS, N_COLUMNS, dtype=torch.bfloat16)
    weight, ids = module.weight.detach().clone(), ids_of(4, 5) - 1
    ids.clamp_(0)
    expected = module(ids).detach()
    pack_embedding_(module)
    assert isinstance(module, (kind, PackedEmbedding))
    assert sum(each.numel() for each in module.parameters()) == 0
    with torch.no_grad():
        assert same(module(ids), expected)
        for other in (copy.deepcopy(module), through_pickle(module)):
            assert type(other).__mro__[1:] == type(module).__mro__[1:]
            assert same(other(ids), expected)
    unpack_embedding_(module)
    assert type(module) is kind
    assert same(module.weight.detach(), weight)
    assert module.weight.requires_grad
    assert not dict(module.named_buffers())


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_hooks_of_accelerate_go_on(kind: type[nn.Embedding]) -> None:
    module = kind(N_ROWS, N_COLUMNS)
    ids = ids_of(5)
    expected = module(ids).detach()
    add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    pack_embedding_(module)
    module.requires_grad_(False)
    assert same(module(ids), expected)
    remove_hook_from_module(module)
    assert same(module(ids), expected)
    unpack_embedding_(module)
    assert same(module(ids), expected)


def through_pickle(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_moving_a_module_says_where_rows_come_out() -> None:
    module = PackedEmbedding.from_pretrained(weights())
    address = module.table.memory.address
    assert str(module.to("cpu").device) == "cpu"
    model = nn.Sequential(module, nn.Linear(N_COLUMNS, 2)).to("meta")
    assert module.table.memory.address == address
    assert module.device.type == module.weight.device.type == "meta"
    assert model(ids_of(2, 3)).device.type == "meta"
    assert module.to_empty(device="cpu").device.type == "cpu"
    assert same(module(ids_of(3)), weights()[ids_of(3)])


def test_tables_from_elsewhere_are_used_as_they_are(tmp_path: Any) -> None:
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (60, 16))
    rows[:] = weights().numpy()[:60, :16]
    table = pack_table(rows)
    module = PackedEmbeddingBag.from_pretrained(table, mode="sum")
    assert module.table is table
    assert same(module(torch.tensor([[1, 2]])), torch.from_numpy(rows[1] + rows[2])[None])
    assert "PackedTable(60 x 16 F32" in repr(module)
    assert "60, 16, mode='sum'" in repr(module)


def test_compiled_models_run_look_ups_as_they_are() -> None:
    model = nn.Sequential(PackedEmbedding.from_pretrained(weights()), nn.Linear(N_COLUMNS, 4))
    bag = PackedEmbeddingBag.from_pretrained(weights(), mode="sum")
    positions = Positions(N_ROWS, N_COLUMNS).requires_grad_(False)
    pack_embedding_(positions)
    assert same(torch.compile(positions, backend="eager")(7), positions.unpacked()[7:10])
    ids = ids_of(3, 5)
    assert same(torch.compile(model, backend="eager")(ids), model(ids))
    assert same(torch.compile(bag, backend="eager")(ids), bag(ids))


def test_a_state_stays_as_it_was_when_rows_change() -> None:
    module = PackedEmbedding.from_pretrained(weights())
    state, before = module.state_dict(), module.unpacked()
    module.update_(torch.tensor([3]), torch.ones(1, N_COLUMNS))
    other = PackedEmbedding(N_ROWS, N_COLUMNS)
    other.load_state_dict(state)
    assert same(other.unpacked(), before)


def test_modules_that_share_rows_share_them_on() -> None:
    one, other = nn.Embedding(N_ROWS, N_COLUMNS), nn.Embedding(N_ROWS, N_COLUMNS)
    other.weight = one.weight
    pack_embedding_(one, other)
    new = torch.full((1, N_COLUMNS), 1.5)
    state = one.state_dict()
    load = partial(one.load_state_dict, state)
    for change in (one.repack_, one.reset_parameters, load):  # type: ignore[list-item]
        change()
        one.update_(torch.tensor([3]), new)  # type: ignore[operator]
        assert same(other(torch.tensor([3])), new)


def test_look_ups_beside_the_module_are_not_trained_in_silence() -> None:
    module = PackedEmbedding.from_pretrained(weights(), freeze=False)
    with pytest.raises(RuntimeError, match="call the module instead"):
        nn.functional.embedding(torch.tensor([1]), module.weight)
    module.requires_grad_(False)
    assert same(nn.functional.embedding(torch.tensor([1]), module.weight), module.unpacked()[1:2])


def test_the_weight_gives_rows_and_nothing_else() -> None:
    plain, ids = weights(), ids_of(4)
    weight = PackedEmbedding.from_pretrained(plain).weight
    for taken in (lambda w: w[ids], lambda w: w[3:9], lambda w: w[3], lambda w: w[ids, :5]):
        assert torch.equal(taken(weight), taken(plain))
    assert torch.equal(weight.index_select(0, ids), plain[ids])
    assert torch.equal(weight, plain)
    assert not torch.equal(weight, plain + 1)
    whole: list[Any] = [
        lambda: weight.norm(),
        lambda: weight.clone(),
        lambda: copy.deepcopy(weight),
        lambda: F.linear(plain, weight),
        lambda: nn.init.normal_(weight),
        lambda: setattr(weight, "data", plain),
    ]
    for operation in whole:
        with pytest.raises(TypeError, match="needs the whole matrix of PackedEmbedding"):
            operation()
    with pytest.raises(TypeError, match="not assigned"):
        weight[3] = 0
    with pytest.raises(RuntimeError, match="are a copy"):
        weight[3].zero_()


class Freezing(nn.Sequential):
    """Ways to say that an embedding, the first of its modules, is trained or is not."""

    def by_weight(self, value: bool) -> None:
        self[0].weight.requires_grad = value

    def by_method_of_the_weight(self, value: bool) -> None:
        self[0].weight.requires_grad_(value)

    def by_module(self, value: bool) -> None:
        self[0].requires_grad_(value)

    def by_model(self, value: bool) -> None:
        self.requires_grad_(value)

    def by_parameters(self, value: bool) -> None:
        for each in self.parameters():
            each.requires_grad = value


@pytest.mark.parametrize("way", [name for name in vars(Freezing) if name.startswith("by_")])
def test_rows_are_frozen_as_those_of_pytorch(way: str) -> None:
    module = PackedEmbedding(N_ROWS, N_COLUMNS)
    model = copy.deepcopy(Freezing(module, nn.Linear(N_COLUMNS, 2)))
    module = model[0]
    for value in (False, True, False):
        getattr(model, way)(value)
        assert module.trains is module.weight.requires_grad is value
        trained = torch.ones(1, requires_grad=True)
        (model(torch.tensor([1])) * trained).sum().backward()
        assert (module.weight.grad is not None) is value
        module.weight.grad = None
    with pytest.raises(RuntimeError, match="floating point"):
        PackedEmbedding.from_pretrained(weights(torch.int8)).requires_grad_()


def test_copies_of_modules_that_share_rows_share_them() -> None:
    one, other = nn.Embedding(N_ROWS, N_COLUMNS), nn.Embedding(N_ROWS, N_COLUMNS)
    other.weight = one.weight
    pack_embedding_(one, other)
    third = PackedEmbedding.from_pretrained(one.table)  # type: ignore[arg-type]
    model = nn.ModuleList([one, other, third])
    for copied in (copy.deepcopy(model), through_pickle(model), pickle.loads(pickle.dumps(model))):
        tables = {id(each.table) for each in copied}
        assert len(tables) == 1
        assert id(one.table) not in tables
        assert same(copied[1].unpacked(), third.unpacked())
    assert copy.copy(model)[0].table is one.table


def test_gradients_move_with_a_module() -> None:
    module = PackedEmbedding(N_ROWS, N_COLUMNS)
    module(torch.tensor([1])).sum().backward()
    module.to("meta")
    assert module.gradient is not None
    assert module.gradient.device.type == "meta"


def test_replicas_of_data_parallel_do_not_lose_gradients() -> None:
    """There is no GPU here: this is the method by which `nn.DataParallel` makes replicas."""
    module = PackedEmbedding(N_ROWS, N_COLUMNS)
    with pytest.raises(RuntimeError, match=r"cannot be trained in nn\.DataParallel"):
        module._replicate_for_data_parallel()
    replica = module.requires_grad_(False)._replicate_for_data_parallel()
    assert same(replica(torch.tensor([1])), module(torch.tensor([1])))


def test_trained_rows_are_offloaded_by_accelerate() -> None:
    model = nn.Sequential(PackedEmbedding(N_ROWS, N_COLUMNS), nn.Linear(N_COLUMNS, 2))
    expected = model(torch.tensor([1]))
    cpu_offload(model, "cpu")
    assert same(model(torch.tensor([1])), expected)


def test_a_default_device_is_that_of_rows_alone() -> None:
    ids, plain = torch.tensor([1, 5]), weights()
    with torch.device("meta"):
        new = PackedEmbedding(N_ROWS, N_COLUMNS)
        given = PackedEmbedding.from_pretrained(plain, freeze=False)
        given(ids).sum().backward()
        RowOptimizer(given, torch.optim.SparseAdam).step()
        given.repack_()
        assert new.weight.device.type == new(ids).device.type == "meta"
        assert given.unpacked().device.type == given(ids).device.type == "cpu"
    assert same(given.unpacked()[6:], plain[6:])


def test_zero_grad_forgets_the_gradient_of_the_rows() -> None:
    module = PackedEmbedding.from_pretrained(weights(), freeze=False)
    module(torch.tensor([1])).sum().backward()
    assert module.gradient is not None
    module.zero_grad()
    assert module.gradient is None


def test_a_class_that_has_packed_rows_keeps_them() -> None:
    class Words(PackedEmbedding):
        pass

    module = Words(N_ROWS, N_COLUMNS)
    with pytest.raises(TypeError, match="Words derives from PackedEmbedding"):
        unpack_embedding_(module)
    assert module(torch.tensor([1])).shape == (1, N_COLUMNS)
