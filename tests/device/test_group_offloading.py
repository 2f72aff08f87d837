"""Packed weights under group offloading of the real diffusers, on a small Flux.

Without a GPU, the host stands in for it, or the meta device, to which a weight really leaves the
host; pinned memory and streams are made for the latter here.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_samples import inputs, model_matrix, plain_linear, same_bits
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

from packhorse.device import PackedWeight, offload_model_, pack_model_, pack_weight
from packhorse.kernels.arrays import WeightTensors

HOW = {
    "blocks": {"offload_type": "block_level", "num_blocks_per_group": 2, "non_blocking": True},
    "leaves": {"offload_type": "leaf_level"},
}


def flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=64, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model.to(torch.bfloat16).eval()


def packed() -> FluxTransformer2DModel:
    model = flux()
    pack_model_(model)
    return model


def run(model: FluxTransformer2DModel, device: str = "cpu") -> Tensor:
    noise = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).bfloat16().to(device)

    with torch.no_grad():
        found: Tensor = model(
            hidden_states=random(1, 16, 16), encoder_hidden_states=random(1, 8, 64),
            pooled_projections=random(1, 32), timestep=torch.tensor([0.5]).bfloat16().to(device),
            img_ids=torch.zeros(16, 3, device=device), txt_ids=torch.zeros(8, 3, device=device),
        ).sample  # fmt: skip
    return found


class Stream(torch.Stream):
    """A stream whose work has always ended."""

    def __new__(cls) -> "Stream":
        return super().__new__(cls, stream_id=1, device_index=0, device_type=1)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Pinned memory and streams as a GPU has them; devices and sizes of tensors that a stream
    uses."""
    kept: list[Tensor] = []
    recorded: list[tuple[str, int]] = []

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        return any(each.data_ptr() == tensor.data_ptr() for each in kept)

    def pin(tensor: Tensor, device: Any = None) -> Tensor:
        kept.append(tensor.clone())
        return kept[-1]

    def record(tensor: Tensor, stream: object) -> None:
        recorded.append((tensor.device.type, tensor.numel()))

    library = torch.library.Library("aten", "IMPL")
    library.impl("is_pinned", is_pinned, "CPU")
    library.impl("_pin_memory", pin, "CPU")
    for key in ("CPU", "Meta"):
        library.impl("record_stream", record, key)
    meta = SimpleNamespace(Stream=Stream, stream=nullcontext, current_stream=Stream)
    monkeypatch.setattr(torch, "meta", meta, raising=False)  # as torch.cuda is that of "cuda"
    yield recorded
    library._destroy()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_outputs_are_the_same(how: dict[str, Any]) -> None:
    expected = run(packed())
    assert same_bits(expected, run(flux()))
    model = packed()
    model.enable_group_offload(torch.device("cpu"), **how)
    for _ in range(2):
        assert same_bits(run(model), expected)
    model = packed()
    offload_model_(model, "cpu")  # and not by diffusers
    assert same_bits(run(model), expected)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_with_a_stream_weights_leave_pinned_memory_and_come_back(
    low_cpu_mem_usage: bool, pinning: list[tuple[str, int]]
) -> None:
    """Without biases: the meta device does not take data of plain tensors."""
    model = nn.Sequential(*(plain_linear(256, 256, bias=False) for _ in range(4)))
    pack_model_(model)
    expected = [layer.weight.unpack() for layer in model]
    apply_group_offloading(
        model, torch.device("meta"), offload_type="leaf_level", use_stream=True,
        record_stream=True, low_cpu_mem_usage=low_cpu_mem_usage,
    )  # fmt: skip
    for _ in range(2):
        assert model(torch.empty(3, 256, dtype=torch.bfloat16, device="meta")).is_meta
    assert [device for device, _ in pinning] == ["meta"] * (8 * len(WeightTensors._fields))
    for layer, plain in zip(model, expected, strict=True):
        assert layer.weight.device.type == "cpu"
        assert layer.weight.is_pinned() != low_cpu_mem_usage
        assert same_bits(layer.weight.unpack(), plain)


def test_a_stream_is_told_of_every_array(pinning: list[tuple[str, int]]) -> None:
    weight = pack_weight(model_matrix(70, 300))
    weight.record_stream(Stream())
    assert pinning == [("cpu", array.numel()) for array in weight.arrays]
    pinned = weight.pin_memory()
    assert isinstance(pinned, PackedWeight)
    assert pinned.is_pinned()
    assert pinned.pin_memory() is pinned
    assert not weight.is_pinned()


def test_data_of_another_device_takes_the_place_of_a_weight() -> None:
    plain = model_matrix(70, 300)
    held = torch.nn.Parameter(pack_weight(plain), requires_grad=False)
    layer = torch.nn.Linear(300, 70, bias=False, device="meta")
    layer.weight = held
    alias = held.detach()
    stored = held.data
    held.data = held.to("meta")
    assert layer.weight is held
    assert held.is_meta
    assert isinstance(held, torch.nn.Parameter)
    assert same_bits(alias.unpack(), plain)  # type: ignore[attr-defined]
    held.data = stored
    assert same_bits(held.unpack(), plain)
    assert stored.data_ptr() == held.data_ptr()


def test_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save the state dict .* without offload_to_disk_path"):
        packed().enable_group_offload(
            torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )


def test_a_weight_may_leave_before_the_backward_pass() -> None:
    """diffusers offloads a layer as soon as it has run, also while a graph is recorded."""
    layer = plain_linear(256, 256)
    x = inputs(3, 256).requires_grad_()
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    pack_model_(layer)
    y = layer(x)
    layer.weight.data = layer.weight.to("meta")
    y.sum().backward()
    assert same_bits(x.grad, expected)
