"""Packed weights and layers in PyTorch: operations give the same bits as with plain ones, or are
refused."""

import copy
import io
import pickle
import pickletools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_samples import (
    FORMATS,
    inputs,
    matrix,
    model_matrix,
    peak_growth,
    plain_linear,
    product_of_tiles,
    same_bits,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from weight_samples import MATRICES

import packhorse
import packhorse.torch
from packhorse.device import (
    PackedLinear,
    PackedWeight,
    WeightTensors,
    empty_weight,
    operators,
    pack_weight,
    packed_arrays,
)
from packhorse.device import linear as linear_module
from packhorse.device.packing import array_names
from packhorse.errors import CorruptionError
from packhorse.layout import W11, W12, WEIGHT_FORMATS

# The weight as a tensor.


@FORMATS
@pytest.mark.parametrize("name", MATRICES)
def test_every_matrix_comes_back(name: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_arrays, "BLOCK_NBYTES", 5000)  # several blocks
    plain = matrix(name)
    before = plain.clone()
    packed = pack_weight(plain, format)
    assert same_bits(packed.unpack(), plain)
    assert same_bits(plain, before)
    assert (packed.shape, packed.dtype, packed.device) == (plain.shape, plain.dtype, plain.device)
    assert packed.format is WEIGHT_FORMATS[format]
    if len(plain):
        rows = torch.randint(len(plain), (3, 4))
        assert same_bits(packed.gather_rows(rows), plain[rows])
        packed.prepare_gather()
        assert same_bits(packed.gather_rows(rows.int()), plain[rows])
        assert same_bits(pickle.loads(pickle.dumps(packed)).gather_rows(rows), plain[rows])
        for wrong in (-1, len(plain)):
            with pytest.raises(IndexError):
                F.embedding(torch.tensor([wrong]), packed)


@FORMATS
@pytest.mark.parametrize("name", ["specials", "any patterns, odd rows", "rows of models"])
def test_plain_pytorch_decodes_as_the_core_does(name: str, format: str) -> None:
    """The code path for devices that have neither the core nor the kernels."""
    packed = pack_weight(matrix(name), format)
    rows = torch.arange(len(packed))
    most = int(packed.exception_starts.diff().max())
    found = operators.gather_rows(packed.arrays, packed.format, packed.shape[1], rows, most)
    assert same_bits(found, packed.unpack())


@FORMATS
def test_kernels_look_rows_up(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of a GPU, in Triton's interpreter: eager, compiled, and on fake tensors."""
    plain = matrix("specials")
    packed = nn.Parameter(pack_weight(plain, format), requires_grad=False)
    monkeypatch.setattr(operators, "_has_kernels", lambda _: True)
    ids = torch.randint(len(plain), (2, 3))
    assert same_bits(F.embedding(ids, packed), plain[ids])
    compiled = torch.compile(F.embedding, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(ids, packed), plain[ids])
    torch._dynamo.reset()
    assert F.embedding(ids.to("meta"), packed.to("meta")).shape == (2, 3, plain.shape[1])


@FORMATS
def test_a_device_of_its_own_gets_the_same_arrays(format: str) -> None:
    """Arrays go to the device block by block, as they would to a GPU."""
    plain = matrix("specials")
    expected = pack_weight(plain, format).arrays
    shape, device = tuple(plain.shape), torch.device("cpu")
    arrays = packed_arrays._pack_to_device(plain, *shape, WEIGHT_FORMATS[format], device)
    for one, other in zip(arrays, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@FORMATS
def test_packing_straight_from_a_packed_file(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are decoded block by block; the whole matrix is never in memory."""
    plain, path = model_matrix(700, 256), tmp_path / "m.ph.safetensors"
    packhorse.torch.save_file({"w": plain, "half": plain.half()}, path)
    monkeypatch.setattr(packed_arrays, "BLOCK_NBYTES", 100 * 512)
    sizes = []
    with packhorse.open_file(path, "pt") as file:
        source = file.get_slice("w")
        take = type(source).__getitem__
        monkeypatch.setattr(
            type(source),
            "__getitem__",
            lambda s, i: (sizes.append(i.stop - i.start), take(s, i))[1],
        )
        packed = pack_weight(source, format)
        with pytest.raises(TypeError, match="BF16, not F16"):
            pack_weight(file.get_slice("half"), format)
    assert same_bits(packed.unpack(), plain)
    assert sizes == [100] * 7


def test_a_weight_is_shown() -> None:
    packed = pack_weight(model_matrix(64, 4096))
    assert str(packed) == "PackedWeight(W12, 64 x 4096, 12.01 bits a weight, device='cpu')"
    assert packed.packed_nbytes < 0.76 * packed.nbytes == 0.76 * 2 * 64 * 4096
    assert "weight=W12" in str(PackedLinear(packed))


def test_other_operations_run_on_the_plain_matrix() -> None:
    plain = model_matrix(20, 64)
    packed = pack_weight(plain)
    assert torch.equal(packed.float(), plain.float())
    assert torch.equal(packed.norm(), plain.norm())
    assert torch.equal(packed + 1, plain + 1)
    assert torch.equal(packed.isfinite().all(), torch.tensor(True))
    assert torch.equal(torch.zeros_like(packed), torch.zeros_like(plain))
    assert torch.equal(torch.empty(20, 64).copy_(packed), plain.float())
    assert torch.equal(F.linear(inputs(64), packed), F.linear(inputs(64), plain))
    assert type(packed + 1) is Tensor


def test_writes_are_packed_again_and_seen_by_all_that_share() -> None:
    plain = model_matrix(20, 64)
    packed = nn.Parameter(pack_weight(plain), requires_grad=False)
    other = packed.detach()
    packed.data += 1
    assert isinstance(packed, PackedWeight)
    assert same_bits(packed.unpack(), plain + 1)
    assert same_bits(other.unpack(), plain + 1)
    packed.data = plain * 2
    assert same_bits(other.unpack(), plain * 2)
    with torch.no_grad():
        packed.zero_()
        assert same_bits(other.unpack(), torch.zeros_like(plain))
        packed.copy_(plain.float())
        assert same_bits(other.unpack(), plain)
        packed.copy_(torch.tensor(3.0))
        assert same_bits(other.unpack(), torch.full_like(plain, 3))
        torch.mul(plain, 5, out=packed)
        assert same_bits(other.unpack(), plain * 5)
    copied = packed.clone()
    packed.data = plain
    assert same_bits(copied.unpack(), plain * 5)
    assert same_bits(torch.empty_like(packed).zero_().unpack(), torch.zeros_like(plain))


def test_views_are_refused() -> None:
    """A write to a view would be lost."""
    packed = pack_weight(model_matrix(20, 64))
    for view in (lambda: packed[None], lambda: packed.T, lambda: packed.view(-1)):
        with pytest.raises(NotImplementedError, match=r"weight\.unpack\(\)"):
            view()
    with pytest.raises(NotImplementedError, match="list of packed weights"):
        torch._foreach_add_([packed], 1)


def test_memory_that_is_not_there_is_not_looked_at() -> None:
    packed = nn.Parameter(pack_weight(model_matrix(20, 64)), requires_grad=False)
    for look in (
        lambda: packed.numpy(),
        lambda: packed.view(torch.int16),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            look()
    with pytest.raises(BufferError, match=r"weight\.unpack"):
        torch.from_dlpack(packed)
    with pytest.raises(TypeError, match="no memory of its own"):
        packhorse.torch.compress(packed)
    assert not packed.is_shared()
    nn.ParameterList([packed]).share_memory()
    assert packed.is_shared()
    assert packed.exceptions.is_shared()


def test_what_cannot_be_packed_is_refused() -> None:
    for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="packed weights are BF16"):
            pack_weight(torch.zeros(4, 4, dtype=dtype))
    for shape in ((4,), (2, 3, 4), (2, 0), (1, 65537)):
        with pytest.raises(ValueError, match="1 to 65536 columns"):
            pack_weight(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="'W13'; it must be one of W12, W11"):
        pack_weight(torch.zeros(2, 2, dtype=torch.bfloat16), "W13")
    with pytest.raises(TypeError, match=r"is already packed; give its unpack\(\)"):
        pack_weight(pack_weight(torch.zeros(2, 2, dtype=torch.bfloat16)), "W11")
    with pytest.raises(TypeError, match="not ndarray"):
        pack_weight(np.zeros((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the weight is a Tensor, not packed"):
        PackedLinear(torch.zeros(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns"):
        empty_weight(3, 0, "W12")
    with pytest.raises(ValueError, match="the bias has shape"):
        PackedLinear(empty_weight(3, 5, W12), torch.zeros(4))


# The layer.


@FORMATS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(300,), (1, 300), (7, 300), (2, 3, 300), (0, 300), (2, 0, 300)])
def test_products_are_those_of_the_plain_layer(
    shape: tuple[int, ...], bias: bool, format: str
) -> None:
    plain = plain_linear(bias=bias)
    packed = PackedLinear.from_linear(plain, format)
    x = inputs(*shape)
    with torch.no_grad():
        assert same_bits(packed(x), plain(x))
        strided = x.mT.contiguous().mT if x.dim() > 1 else x
        assert same_bits(packed(strided), plain(strided))
    assert same_bits(packed(x), plain(x))
    assert same_bits(F.linear(x, packed.weight, packed.bias), plain(x))
    assert isinstance(packed, nn.Linear)
    assert isinstance(packed.weight, nn.Parameter)
    assert (packed.in_features, packed.out_features) == (300, 200)


@FORMATS
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_products_of_tiles_are_those_of_the_whole(
    n_tokens: int, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_linear(1000, 1111)
    packed = PackedLinear.from_linear(plain, format)
    x, calls = inputs(n_tokens, 1000), []
    unpack_rows = operators.unpack_rows
    monkeypatch.setattr(
        operators, "unpack_rows", lambda *args: (calls.append(args[2].shape[0]), unpack_rows(*args))
    )
    monkeypatch.setattr(operators, "TILE_NBYTES", 200 * 2000)
    with torch.no_grad():
        assert same_bits(packed(x), product_of_tiles(plain, x, [192] * 5 + [151]))
    assert calls == [192] * 5 + [151]


def test_threads_do_not_share_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "TILE_NBYTES", 64 * 600)
    layers = [plain_linear(300, n, bias=False) for n in (1000, 1100)]
    layers[1].weight.data *= 3
    pairs = [(plain, PackedLinear.from_linear(plain)) for plain in layers]
    x = inputs(2, 300)

    def works(i: int) -> bool:
        plain, packed = pairs[i % 2]
        with torch.no_grad():
            return same_bits(packed(x), plain(x))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(works, range(60)))


def test_infinities_and_nans_multiply_as_they_do() -> None:
    plain = plain_linear(611, 9, bias=False)
    plain.weight.data = matrix("specials")
    packed, x = PackedLinear.from_linear(plain), inputs(3, 611)
    with torch.no_grad():
        assert torch.equal(packed(x).isnan(), plain(x).isnan())
        assert packed(x).isnan().any()
        torch.testing.assert_close(packed(x), plain(x), rtol=0, atol=0, equal_nan=True)


def test_memory_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the process's memory while a layer of 64 MiB is multiplied."""
    packed = PackedLinear(pack_weight(model_matrix(256, 4096).repeat(32, 1)))
    x = inputs(1, 4096)
    monkeypatch.setattr(operators, "TILE_NBYTES", 4 << 20)
    vars(operators._SCRATCH).clear()
    with torch.no_grad():
        small = PackedLinear(pack_weight(model_matrix(64, 4096)))
        small(x)  # memory that PyTorch keeps for itself from its first product on
        vars(operators._SCRATCH).clear()
        assert peak_growth(lambda: packed(x)) < (4 << 20) * 1.5 + (2 << 20)
        assert peak_growth(lambda: packed.weight.unpack()) > 60 << 20
    assert operators._SCRATCH.tile.nbytes == 4 << 20


def test_gradients_of_inputs_are_those_of_the_plain_layer() -> None:
    plain = plain_linear()
    packed = copied_in_model(PackedLinear.from_linear(plain))
    xs = [inputs(2, 5, 300).requires_grad_() for _ in range(2)]
    for layer, x in zip((plain, packed), xs, strict=True):
        layer(x).float().square().sum().backward()
    assert same_bits(xs[0].grad, xs[1].grad)
    assert same_bits(plain.bias.grad, packed.bias.grad)
    packed.weight = nn.Parameter(packed.weight, requires_grad=True)
    for use in (lambda: packed(xs[1]), lambda: packed.weight[3:]):
        with pytest.raises(RuntimeError, match="has no gradient; freeze it"):
            use()


def test_wrong_inputs_are_named() -> None:
    packed = PackedLinear.from_linear(plain_linear())
    for watched in (False, True):
        for dtype in (torch.float32, torch.float16, torch.int32):
            x = torch.ones(2, 300, dtype=dtype)
            x = x.requires_grad_(watched and dtype.is_floating_point)
            with pytest.raises(
                TypeError, match=f"is {dtype}; packed weights multiply torch.bfloat"
            ):
                packed(x)
        x = inputs(2, 299).requires_grad_(watched)
        with pytest.raises(ValueError, match="last dimension must be 300"):
            packed(x)
    with pytest.raises(ValueError, match="last dimension"):
        packed(inputs())
    with pytest.raises(ValueError, match="the input is on meta, the packed weight on cpu"):
        packed(inputs(2, 300).to("meta"))
    packed.bias.data = packed.bias.data.float()
    with pytest.raises(TypeError, match=r"the bias of a packed layer is torch\.float32"):
        packed(inputs(2, 300))
    with pytest.raises(TypeError, match="plain tensor, not a packed weight"):
        F.linear(packed.weight, packed.weight)


def test_autocast_is_obeyed() -> None:
    plain = plain_linear()
    packed, x = PackedLinear.from_linear(plain), inputs(2, 300).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(packed(x), plain(x))
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(TypeError, match=r"is torch\.float16"),
    ):
        packed(x)


# Devices, copies, files.


def test_layers_move_as_layers_do() -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain)
    weight = packed.weight
    assert packed.to("cpu").to(torch.bfloat16).weight is weight
    with pytest.raises(TypeError, match=r"cannot become torch\.float16.*unpack_model_"):
        packed.half()
    assert same_bits(packed.weight.unpack(), plain.weight)
    packed = copied_in_model(packed).to("meta")
    assert isinstance(packed.weight, PackedWeight)
    assert packed.weight.device.type == "meta"
    assert packed(inputs(2, 300).to("meta")).shape == (2, 200)
    filled = packed.to_empty(device="cpu")
    assert filled.weight.device.type == "cpu"
    filled.load_state_dict(plain.state_dict())
    assert same_bits(filled(inputs(4, 300)), plain(inputs(4, 300)))


def test_fake_tensors_have_the_right_shapes() -> None:
    with FakeTensorMode() as mode:
        packed = PackedLinear.empty(300, 200, W11)
        y = packed(torch.empty(2, 7, 300, dtype=torch.bfloat16))
        assert (y.shape, y.dtype) == ((2, 7, 200), torch.bfloat16)
        assert packed.weight.unpack().shape == (200, 300)
    real = PackedLinear.from_linear(plain_linear())
    fake = mode.from_tensor(real.weight)
    assert isinstance(fake, PackedWeight)
    assert fake.shape == (200, 300)


def copied_in_model(layer: PackedLinear) -> PackedLinear:
    """A copy of a layer alone would be plain."""
    copied: PackedLinear = copy.deepcopy(nn.Sequential(layer))[0]
    return copied


def saved(layer: object) -> object:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@FORMATS
@pytest.mark.parametrize(
    "copied", [copied_in_model, lambda m: pickle.loads(pickle.dumps(m)), saved], ids=range(3)
)
def test_copies_and_pickles(copied: object, format: str) -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain, format)
    other = copied(packed)  # type: ignore[operator]
    assert isinstance(other.weight, nn.Parameter)
    assert isinstance(other.weight, PackedWeight)
    assert other.weight.low_bytes.data_ptr() != packed.weight.low_bytes.data_ptr()
    packed.weight.data = torch.zeros(200, 300, dtype=torch.bfloat16)
    assert same_bits(other(inputs(2, 300)), plain(inputs(2, 300)))
    assert list(other.state_dict()) == list(packed.state_dict())
    again = copy.deepcopy(other.state_dict())
    packed.load_state_dict(again)
    assert same_bits(packed.weight.unpack(), plain.weight)


def test_pickles_name_nothing_that_may_move() -> None:
    stream = pickletools.genops(pickle.dumps(pack_weight(model_matrix(20, 64))))
    words = {word for _, word, _ in stream if isinstance(word, str)}
    assert {word for word in words if word.startswith("packhorse")} == {"packhorse.device"}


def test_a_pickle_with_broken_arrays_is_refused() -> None:
    packed = pack_weight(model_matrix(20, 64))
    packed.exception_starts[3] = 1 << 30
    with pytest.raises(CorruptionError, match="exception_starts"):
        pickle.loads(pickle.dumps(packed))


@FORMATS
def test_state_dicts_are_plain_tensors_in_both_directions(format: str, tmp_path: Path) -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain, format)
    state = packed.state_dict()
    fields = [field for field in WeightTensors._fields if field != "high_bits"]
    assert set(state) == {"bias", "weight", *(f"weight.{field}" for field in fields)}
    assert all(type(tensor) is Tensor for tensor in state.values())
    assert state["weight"].shape == (*packed.weight.high_bits.shape, 1)
    former = {key: value for key, value in state.items() if key != "weight"}
    former["weight.high_bits"] = state["weight"][..., 0]
    save_file(dict(state), tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    states = [
        state,
        load_file(tmp_path / "m.safetensors"),
        torch.load(tmp_path / "m.pt", weights_only=True),
        former,
        plain.state_dict(),
    ]
    for given in states:
        names = list(given)
        for layer in (PackedLinear.empty(300, 200), PackedLinear.empty(300, 200, format)):
            assert str(layer.load_state_dict(given)) == "<All keys matched successfully>"
            assert list(given) == names, "the caller's dict is left alone"
            assert isinstance(layer.weight, PackedWeight)
            assert same_bits(layer(inputs(3, 300)), plain(inputs(3, 300)))
        bare = PackedLinear.empty(300, 200, format, device="meta")
        bare.load_state_dict(given, assign=True)
        assert isinstance(bare.weight, PackedWeight)
        assert same_bits(bare(inputs(3, 300)), plain(inputs(3, 300)))
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            plain_linear().load_state_dict(state, strict=strict)
    assert same_bits(packed.to_linear().weight, plain.weight)
    assert type(packed.to_linear()) is nn.Linear


@FORMATS
def test_arrays_that_break_the_format_are_refused(format: str) -> None:
    plain = plain_linear()
    packed, state = nn.Sequential(PackedLinear.from_linear(plain, format)), {}
    for key, tensor in packed.state_dict().items():
        state[key] = tensor.clone()

    def loading(match: str, **changed: Tensor | None) -> None:
        keys = array_names("0.weight")
        broken = state | {keys[field]: tensor for field, tensor in changed.items()}
        broken = {key: tensor for key, tensor in broken.items() if tensor is not None}
        with pytest.raises(CorruptionError, match=rf"^0\.weight: .*{match}"):
            packed.load_state_dict(broken)

    for field in WeightTensors._fields:
        loading(f"{field} is missing", **{field: None})
        array = state[array_names("0.weight")[field]]
        loading("has dtype", **{field: array.to(torch.int64)})
        loading("shape|fit|descend", **{field: array[:-1]})
    loading("", low_bytes=None, high_bits=None)
    with pytest.raises(CorruptionError, match=r"0\.weight\.exceptions is not a tensor, but list"):
        packed.load_state_dict(state | {"0.weight.exceptions": []})
    with pytest.raises(ValueError, match=r"0\.weight: arrays .* are on \['cpu', 'meta'\]"):
        packed.load_state_dict(state | {"0.weight.exceptions": torch.zeros(2, device="meta")})
    loading("format|shape", low_bytes=state["0.weight.low_bytes"][:, :-1])
    loading("no format", low_bytes=state["0.weight.low_bytes"][0])
    loading("is missing", **dict.fromkeys(set(WeightTensors._fields) - {"high_bits"}))
    loading("three dimensions", high_bits=state["0.weight"].expand(-1, -1, 2))
    loading("both packed and plain", high_bits=state["0.weight"][..., 0])
    twice = state | {"0.weight.high_bits": state["0.weight"][..., 0]}
    with pytest.raises(CorruptionError, match="both packed and plain"):
        packed.load_state_dict(twice)
    loading("exception_starts", exception_starts=state["0.weight.exception_starts"] + 1)
    loading("first exponent", first_exponents=state["0.weight.first_exponents"] | 255)
    loading("column|hole", exceptions=state["0.weight.exceptions"] | 0xFFFF)
    assert same_bits(packed[0].weight.unpack(), plain.weight), "what was there is there"


def test_a_state_of_another_shape_is_refused_by_pytorch() -> None:
    packed = PackedLinear.from_linear(plain_linear())
    for other in (plain_linear(301, 200), plain_linear(300, 201)):
        with pytest.raises(RuntimeError, match="size mismatch for"):
            packed.load_state_dict(other.state_dict())
    taller = PackedLinear.from_linear(plain_linear(300, 201)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        packed.load_state_dict(taller)
    with pytest.raises(CorruptionError, match=r"weight: .* must be"):
        packed.load_state_dict(PackedLinear.from_linear(plain_linear(500, 200)).state_dict())


def test_hooks_of_state_dicts_are_put_once() -> None:
    packed = PackedLinear.from_linear(plain_linear())
    linear_module.hold_packed(packed, packed.weight)
    assert len(packed._state_dict_hooks) == len(packed._load_state_dict_pre_hooks) == 1
