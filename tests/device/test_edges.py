"""Packed layers where PyTorch is used in unusual ways: transforms, hooks, default devices, inputs
of one dimension, rests of tiles, several processes. Each gives the same result as the plain layer,
or is refused."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_samples import product_of_tiles
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weight_samples import model_rows

from packhorse.device import (
    PackedLinear,
    PackedWeight,
    WeightTensors,
    check_arrays,
    join_arrays,
    operators,
    pack_model_,
    pack_weight,
)
from packhorse.errors import CorruptionError

Layer = Callable[[Tensor], Tensor]


def layers(n_columns: int = 96, n_rows: int = 70) -> tuple[nn.Linear, PackedLinear]:
    plain = nn.Linear(n_columns, n_rows, dtype=torch.bfloat16)
    rows = torch.from_numpy(model_rows(n_rows, n_columns)).view(torch.bfloat16)
    plain.weight = nn.Parameter(rows, requires_grad=False)
    return plain, PackedLinear.from_linear(plain)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [each.detach().contiguous().view(torch.int16) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


# Gradients.


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 96), (2, 3, 96)])
def test_gradients_of_all_shapes(shape: tuple[int, ...]) -> None:
    found = []
    for layer in layers():
        x = inputs(*shape).requires_grad_()
        layer.bias.grad = None
        layer(x).sum().backward()
        found.append((x.grad, layer.bias.grad))
    # Both layers share the bias, but each computes its own gradient.
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


def test_gradients_of_gradients() -> None:
    found = []
    for layer in layers():
        x = inputs(2, 96).requires_grad_()
        (first,) = torch.autograd.grad(layer(x).float().pow(3).sum(), x, create_graph=True)
        first.float().square().sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


def test_saved_tensors_may_come_back_plain() -> None:
    """`torch.autograd.graph.save_on_cpu` keeps such tensors in pinned memory."""
    found = []
    for layer in layers():
        x = inputs(2, 96).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: torch.empty(saved.shape, dtype=saved.dtype).copy_(saved),
            lambda kept: kept,
        ):
            y = layer(x)
        y.sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


def loss(layer: Layer) -> Layer:
    return lambda x: layer(x).float().square().sum()


def dual(layer: Layer, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(y).tangent


TRANSFORMS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "grad": lambda layer, x: torch.func.grad(loss(layer))(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x)[1](torch.ones(2, 70).bfloat16())[0],
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda layer, x: torch.func.jacrev(layer)(x[0]),
    "jacfwd": lambda layer, x: torch.func.jacfwd(layer)(x[0]),
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "a gradient a sample": lambda layer, x: torch.func.vmap(torch.func.grad(loss(layer)))(x),
    "hessian": lambda layer, x: torch.func.hessian(loss(layer))(x[0]),
    "dual numbers": dual,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("watched", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_the_product(name: str, watched: bool) -> None:
    """Custom operators would drop tangents."""
    with torch.set_grad_enabled(watched):
        one, other = (TRANSFORMS[name](layer, inputs(2, 96)) for layer in layers())
    assert one.count_nonzero()
    assert same_bits(one, other)


def views_are_batched() -> bool:
    """Whether PyTorch's `vmap` supports views as another dtype; 2.11 does not."""
    try:
        torch.func.vmap(lambda bits: bits.view(torch.bfloat16))(torch.zeros(2, dtype=torch.int16))
    except RuntimeError:
        return False
    return True


def test_transforms_see_looked_up_rows() -> None:
    rows, (plain, packed) = torch.tensor([[3, 0], [69, 3]]), layers()
    looks = [lambda ids, w=layer.weight: F.embedding(ids, w) for layer in (plain, packed)]
    if views_are_batched():
        assert same_bits(*(torch.func.vmap(look)(rows) for look in looks))
    x = inputs(96)
    found = [torch.func.grad(lambda x, f=look: (f(rows) * x).float().sum())(x) for look in looks]
    assert same_bits(*found)


# Devices and modes.


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode])
def test_the_first_product_of_a_thread_in_a_mode(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    """The tile that later products reuse is in host memory, whatever the default device."""
    (plain, packed), x = layers(), inputs(2, 96)

    def run() -> bool:
        with mode(), torch.no_grad():
            first = same_bits(packed(x), plain(x))
        watched = packed(x.clone().requires_grad_())
        watched.sum().backward()
        return first and same_bits(watched, plain(x))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result()


def test_autocast_converts_all_operands() -> None:
    (plain, packed), x = layers(), inputs(2, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for bias in (None, plain.bias, plain.bias.float()):
            found = [F.linear(x.float(), layer.weight, bias) for layer in (plain, packed)]
            assert same_bits(*found)
        for layer in (plain, packed):
            layer.bias = nn.Parameter(layer.bias.float())
        with torch.no_grad():
            assert same_bits(packed(x), plain(x))
        assert same_bits(packed(x), plain(x))
        with pytest.raises(TypeError, match=r"is torch\.float64"):
            packed(x.double())


# Tiles.


@pytest.mark.parametrize(("n_columns", "n_tokens", "step"), [(65, 1, 64), (4096, 130, 192)])
@pytest.mark.parametrize("rest", [1, 31, 63, 64])
def test_a_rest_of_few_rows_is_no_tile_of_its_own(
    rest: int, n_columns: int, n_tokens: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch multiplies few rows with other kernels, which round differently."""
    (plain, packed), x = layers(n_columns, 2 * step + rest), inputs(n_tokens, n_columns)
    heights, unpack_rows = [], operators.unpack_rows
    monkeypatch.setattr(operators, "TILE_NBYTES", step * 2 * n_columns)
    monkeypatch.setattr(
        operators, "unpack_rows", lambda *args: (heights.append(len(args[2])), unpack_rows(*args))
    )
    expected = [step, step + rest] if rest < 64 else [step, step, rest]
    with torch.no_grad():
        assert same_bits(packed(x), product_of_tiles(plain, x, expected))
    assert heights == expected


@pytest.mark.parametrize(("n_columns", "least"), [(16, 257), (48, 86), (64, 65)])
def test_tiles_of_few_columns_have_more_rows(
    n_columns: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes a product of at most 4096 elements differently: with random numbers, one in
    400 such products differs in some bits."""
    monkeypatch.setattr(operators, "TILE_NBYTES", 1)
    step = operators.n_tile_rows(n_columns, 1)
    assert step == -(-least // 64) * 64
    for rest, n_tiles in ((least - 1, 1), (least, 2)):
        plain, packed = layers(n_columns, step + rest)
        with torch.no_grad():
            for seed in range(150):
                plain.weight.copy_(noise(*plain.weight.shape, seed=seed))
                packed = PackedLinear.from_linear(plain)
                x = noise(1, n_columns, seed=-1 - seed)
                assert same_bits(packed(x), plain(x))
        heights = []
        unpack_rows = operators.unpack_rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                operators,
                "unpack_rows",
                lambda *args: (heights.append(len(args[2])), unpack_rows(*args)),  # noqa: B023
            )
            packed(x)
        assert len(heights) == n_tiles


# Operations that are refused.


def test_a_bias_of_another_shape_or_device_is_refused() -> None:
    weight, x = layers()[1].weight, inputs(2, 96)
    for shape in ((71,), (300,), (1,), (), (2, 70)):
        with pytest.raises(ValueError, match=r"bias of a packed layer has shape .* must be \[70\]"):
            F.linear(x, weight, torch.ones(shape).bfloat16())
    with pytest.raises(ValueError, match="the bias is on meta, the packed weight on cpu"):
        F.linear(x, weight, torch.ones(70, device="meta").bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_rows_are_integers(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"rows are {dtype}; they must be torch.int32"):
        F.embedding(torch.ones(2, dtype=dtype), layers()[1].weight)


def test_arrays_that_do_not_lie_in_order() -> None:
    """Kernels read arrays as if they were contiguous."""
    weight = pack_weight(layers()[0].weight)
    turned = weight.arrays._replace(low_bytes=weight.low_bytes.T.contiguous().T)
    with pytest.raises(ValueError, match=r"^w: low_bytes is not contiguous"):
        check_arrays(turned, weight.format, 96, name="w")
    again = pickle.loads(pickle.dumps(PackedWeight(turned, weight.format, 96)))
    state = dict(zip((f"w.{field}" for field in WeightTensors._fields), turned, strict=True))
    for other in (again, join_arrays(state, "w", 96)):
        assert other.low_bytes.is_contiguous()
        assert same_bits(other.unpack(), weight.unpack())
    with pytest.raises(CorruptionError, match=r"w\.low_bytes is not a plain tensor, but torch\.s"):
        join_arrays(state | {"w.low_bytes": weight.low_bytes.to_sparse()}, "w", 96)


def test_a_state_with_a_weight_packed_and_plain_is_refused() -> None:
    plain, packed = layers()
    with pytest.raises(CorruptionError, match="weight: is both packed and plain"):
        packed.load_state_dict(packed.state_dict() | {"weight": plain.weight})


# Models.


def test_a_module_is_skipped_by_any_of_its_names() -> None:
    layer = layers(512, 512)[0]
    model = nn.ModuleDict({"one": layer, "other": layer})
    report = pack_model_(model, skip="other")
    assert [left.reason for left in report.left] == ["skipped"]


def table() -> nn.Embedding:
    return nn.Embedding(50, 512, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("is_plain", [False, True])
def test_embeddings_are_prepared_when_they_are_loaded(is_plain: bool) -> None:
    """Otherwise each look-up would allow for a row full of exceptions."""
    plain, packed, rows = table(), table(), torch.tensor([3, 49, 0])
    packed.load_state_dict(plain.state_dict())
    pack_model_(packed, embeddings=True)
    state = (plain if is_plain else packed).state_dict()
    most = packed.weight.exception_starts.diff().max()
    for assign in (False, True):
        bare = table()
        pack_model_(bare, embeddings=True)
        bare.to("meta")
        bare = bare if assign else bare.to_empty(device="cpu")
        bare.load_state_dict(state, assign=assign)
        assert bare.weight._held.max_row_exceptions == most
        assert same_bits(bare(rows), plain(rows))


def test_packing_twice_reports_what_there_is() -> None:
    model = nn.Sequential(layers(512, 512)[0])
    first = pack_model_(model)
    again = pack_model_(model)
    assert [left.reason for left in again.left] == ["is packed already"]
    assert again.left[0].nbytes == first.packed[0].nbytes
    assert again.plain_nbytes == again.nbytes == first.nbytes < first.plain_nbytes


# Several processes.


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def packed_and_trained() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 64, dtype=torch.bfloat16), nn.Linear(64, 4, dtype=torch.bfloat16)]
    return nn.Sequential(PackedLinear.from_linear(layers[0]), layers[1])


@pytest.mark.usefixtures("process_group")
def test_data_parallel_trains_what_is_plain() -> None:
    model = packed_and_trained()
    with pytest.raises(NotImplementedError, match="give DistributedDataParallel init_sync=False"):
        nn.parallel.DistributedDataParallel(model)
    parallel = nn.parallel.DistributedDataParallel(model, init_sync=False)
    parallel(torch.randn(3, 96).bfloat16()).sum().backward()
    assert model[1].weight.grad is not None
    assert isinstance(model[0].weight, PackedWeight)


@pytest.mark.usefixtures("process_group")
def test_sharding_leaves_packed_weights_whole() -> None:
    x = torch.randn(3, 96).bfloat16()
    with pytest.raises(NotImplementedError, match="packed weights as ignored_params"):
        fully_shard(packed_and_trained(), mesh=init_device_mesh("cpu", (1,)))
    model = packed_and_trained()
    expected = model(x)
    packed = {each for each in model.parameters() if isinstance(each, PackedWeight)}
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=packed)
    assert torch.equal(model(x), expected)
