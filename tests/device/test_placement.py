"""Packed weights in host memory: the same bits by views and by the ring, what lies where, and
everything that is done with a weight besides multiplying."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from device_samples import FORMATS, PROMPT, inputs, llama, model_matrix, plain_linear, same_bits
from torch import Tensor, nn

from packhorse.device import (
    PackedLinear,
    PackedWeight,
    host_planes,
    offload_model_,
    pack_model_,
    pack_weight,
    placement,
    unpack_model_,
)
from packhorse.device.host_planes import HostPlanes, planes_nbytes
from packhorse.device.products import multiply
from packhorse.errors import MissingBackendError
from packhorse.gpu.copy_ring import CopyRing
from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory
from packhorse.kernels.arrays import WeightTensors


class Runtime:
    """CUDA's runtime, which registers whatever it is asked to."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def wait(self, others: object) -> None:
        pass

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def node(self) -> None:
        return None


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT).logits
    return found


@pytest.mark.parametrize(
    ("tied", "view_tokens"), [(False, 0), (True, 2), (False, 100)], ids=["ring", "both", "views"]
)
def test_a_model_gives_the_same_bits(tied: bool, view_tokens: int) -> None:
    model = llama(tied=tied)
    pack_model_(model)
    expected = logits(model)
    tokens = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    report = offload_model_(model, "cpu", view_tokens=view_tokens)
    assert all(weight.is_on_host for weight in report.weights)
    assert model.lm_head.weight.host_nbytes > 0
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for _ in range(2):
        assert same_bits(logits(model), expected)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=4, do_sample=False), tokens)
    unpack_model_(model)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=4, do_sample=False), tokens)


@FORMATS
def test_kernels_read_views_and_the_ring(format: str) -> None:
    """Triton's interpreter runs the kernels of a GPU on memory of the host."""
    weight = pack_weight(model_matrix(70, 300), format)
    planes = HostPlanes(
        weight.arrays, torch.device("cpu"), CopyRing(planes_nbytes(weight.arrays), "cpu"), 2
    )
    placed = weight.in_host_memory(planes)
    assert placed.low_bytes.data_ptr() == planes.stored.data_ptr()
    for x in (inputs(2, 300), inputs(3, 300)):
        expected = multiply(x, weight.arrays, weight.format, 300)
        with placed.lend(len(x)) as arrays:
            assert not arrays.misaligned()
            is_view = arrays.low_bytes.data_ptr() == planes.stored.data_ptr()
            assert is_view == (len(x) <= 2)
            assert same_bits(multiply(x, arrays, weight.format, 300), expected)


def test_planes_lie_in_registered_memory_until_nothing_uses_them() -> None:
    runtime, weight = Runtime(), pack_weight(model_matrix(70, 300))
    planes = HostPlanes(weight.arrays, torch.device("cpu"), runtime=runtime)
    assert planes.kind is MemoryKind.REGISTERED
    assert runtime.registered == {planes.stored.data_ptr(): planes.nbytes}
    placed = weight.in_host_memory(planes)
    del planes
    gc.collect()
    assert runtime.registered
    assert same_bits(placed.unpack(), weight.unpack())
    del placed
    gc.collect()
    assert not runtime.registered


def test_a_captured_graph_reads_views() -> None:
    """A graph would repeat copies to buffers that other weights take meanwhile."""

    class Capturing(CopyRing):
        def is_capturing(self) -> bool:
            return True

    weight = pack_weight(model_matrix(70, 300))
    planes = HostPlanes(weight.arrays, torch.device("cpu"), Capturing(1, "cpu"), 0)
    with weight.in_host_memory(planes).lend(64) as arrays:
        assert arrays.low_bytes.data_ptr() == planes.stored.data_ptr()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(plain_linear(256, 256) for _ in range(3))).requires_grad_(False)
    pack_model_(model)
    return model


def test_a_budget_keeps_the_first_layers_on_the_device() -> None:
    model = mlp()
    x, nbytes = inputs(20, 256), model[0].weight.packed_nbytes
    expected = model(x)
    for budget, on_host in ((2 * nbytes, [False, False, True]), (nbytes, [False, True, True])):
        report = offload_model_(model, "cpu", keep_nbytes=budget)
        assert [weight.is_on_host for weight in report.weights] == on_host
        assert [bool(layer.weight.host_nbytes) for layer in model] == on_host
        assert same_bits(model(x), expected)
    assert report.host_nbytes == sum(layer.weight.host_nbytes for layer in model)
    assert report.ring_nbytes == 2 * model[2].weight.host_nbytes == 2 * 256 * 384
    assert "2 in host memory" in str(report)
    assert "1 on cpu" in str(report)
    report = offload_model_(model, "cpu", keep_nbytes=1 << 30)
    assert not report.host_nbytes
    assert not report.ring_nbytes
    assert same_bits(model(x), expected)


def test_gradients_reach_the_input() -> None:
    model = mlp()
    grads = []
    for _ in range(2):
        x = inputs(20, 256).requires_grad_()
        model(x).sum().backward()
        grads.append(x.grad)
        offload_model_(model, "cpu")
    assert same_bits(*grads)


def placed_weight() -> tuple[PackedWeight, Tensor]:
    plain = model_matrix(70, 300)
    weight = pack_weight(plain)
    return weight.in_host_memory(HostPlanes(weight.arrays, torch.device("cpu"))), plain


def test_copies_are_whole_and_writes_stay_in_host_memory() -> None:
    weight, plain = placed_weight()
    for copied in (weight.clone(), copy.deepcopy(weight), weight.to("cpu", copy=True)):
        assert isinstance(copied, PackedWeight)
        assert not copied.host_nbytes
        assert same_bits(copied.unpack(), plain)
    assert weight.to("meta").is_meta
    assert weight.detach().host_nbytes
    with pytest.raises(RuntimeError, match=r"in host memory that cpu reads \(offload_model_\)"):
        weight.pin_memory()
    before = weight.low_bytes.data_ptr()
    for other in (-plain, pack_weight(plain * 2), pack_weight(plain * 4, "W11")):
        weight.copy_(other)
        expected = other.unpack() if isinstance(other, PackedWeight) else other
        assert same_bits(weight.unpack(), expected)
        assert weight.low_bytes.data_ptr() == before
        assert weight.host_nbytes


def test_a_write_is_seen_by_the_next_product() -> None:
    model = mlp()
    offload_model_(model, "cpu", view_tokens=0)
    x = inputs(20, 256)
    model(x)  # the ring holds the first layer again by now
    new = model_matrix(256, 256) * 2
    model[0].weight.data = new
    expected = mlp()
    expected[0].weight.data = new
    assert same_bits(model(x), expected(x))


def test_states_and_pickles_have_the_whole_weight() -> None:
    model = mlp()
    x = inputs(3, 256)
    expected, states = model(x), [model.state_dict()]
    offload_model_(model, "cpu")
    states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], array) for name, array in states[1].items())
    places = [array.untyped_storage().data_ptr() for array in states[1].values()]
    assert len(set(places)) == len(places), "programs would take them for shared weights"
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert isinstance(again[0], PackedLinear)
    assert not again[0].weight.host_nbytes
    assert same_bits(again(x), expected)
    plain = mlp()
    unpack_model_(plain)
    for state in (states[0], plain.state_dict()):
        for assign in (False, True):
            weight = model[1].weight
            weight.copy_(-weight)
            model.load_state_dict(state, assign=assign)
            assert same_bits(model(x), expected)
            assert all(layer.weight.host_nbytes for layer in model)


def test_a_second_call_replaces_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[weakref.ref[CopyRing]] = []

    class Ring(CopyRing):
        def __init__(self, *args: Any) -> None:
            assert not any(ring() for ring in rings), "both would be in device memory"
            super().__init__(*args)
            rings.append(weakref.ref(self))

    monkeypatch.setattr(placement, "CopyRing", Ring)
    model, x = mlp(), inputs(20, 256)
    expected = model(x)
    for tokens, n_rings in ((0, 1), (0, 2), (100, 3)):
        placed = [layer.weight.host_planes for layer in model]
        offload_model_(model, "cpu", view_tokens=tokens)
        assert len(rings) == n_rings
        if n_rings > 1:
            assert [layer.weight.host_planes for layer in model] == placed  # nothing has moved
        assert same_bits(model(x), expected)


def test_arrays_are_what_the_format_says() -> None:
    weight, plain = placed_weight()
    expected = pack_weight(plain).arrays
    for arrays in (weight.arrays, weight.stored_arrays):
        assert isinstance(arrays, WeightTensors)
        assert all(map(torch.equal, arrays, expected))


def test_a_host_without_memory_leaves_a_model_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), inputs(20, 256)
    expected, given = model(x), []

    def allocate(*args: Any, **options: Any) -> HostMemory:
        given.append(args)
        if len(given) == 2:
            raise MemoryError("98304 bytes of host memory are asked for, and 7 are available")
        return host_memory(*args, **options)

    monkeypatch.setattr(host_planes, "host_memory", allocate)
    with pytest.raises(MemoryError, match="98304 bytes of host memory are asked for") as refused:
        offload_model_(model, "cpu")
    assert "the weight of 1 was being moved" in refused.value.__notes__[0]
    assert [bool(layer.weight.host_nbytes) for layer in model] == [True, False, False]
    assert same_bits(model(x), expected)
    assert offload_model_(model, "cpu").host_nbytes == 3 * 256 * 384
    assert same_bits(model(x), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_done_is_refused_and_leaves_the_model() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="the model is PackedWeight; it must be a"):
        offload_model_(model[0].weight, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no packed weights: call pack_model_ first"):
        offload_model_(nn.Linear(3, 3), "cpu")
    with pytest.raises(MissingBackendError, match="cuda cannot be used: PyTorch finds no NVIDIA"):
        offload_model_(model)
    with pytest.raises(ValueError, match="the device is meta; it must be a CUDA device, or cpu"):
        offload_model_(model, "meta")
    for wrong in ({"keep_nbytes": -1}, {"view_tokens": -1}):
        with pytest.raises(ValueError, match="neither may be negative"):
            offload_model_(model, "cpu", **wrong)
    with pytest.raises(ValueError, match="the weight of 0 has no data: it is on the meta device"):
        offload_model_(copy.deepcopy(model).to("meta"), "cpu")
    assert not any(layer.weight.host_nbytes for layer in model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("view_tokens", [0, 16])
def test_a_gpu_gives_the_same_bits(view_tokens: int) -> None:
    model = mlp().cuda()
    x = inputs(24, 256).cuda()
    expected = [model(x[:n]) for n in (1, 8, 24)]
    offload_model_(model, "cuda", view_tokens=view_tokens)
    for _ in range(2):
        found = [model(x[:n]) for n in (1, 8, 24)]
        assert all(map(same_bits, found, expected))
    assert same_bits(model.cpu()(x.cpu()), mlp()(x.cpu()))
