"""Packing where speed counts: formats compared by measured or predicted times, and layers that stay
plain because they would be slower."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from triton import knobs

from packhorse.device import choices, pack_model_, speed
from packhorse.device.choices import use_cache
from packhorse.device.linear import PackedLinear
from packhorse.device.matrix_tuning import random_weight
from packhorse.device.speed import Speed, compare_formats
from packhorse.device.strategy import Choice, Strategy
from packhorse.device.tune_cache import TUNE_CACHE, Key, Measured
from packhorse.gpu.figure_cache import Identity
from packhorse.gpu.models import PRESETS
from packhorse.integrations.transformers.quantizer import PackhorseConfig, PackhorseQuantizer
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import W11, W12, WEIGHT_FORMATS

H200 = PRESETS[0]
IDENTITY = Identity("NVIDIA H200", 132, "3.6.0", "0.1")
CUDA = torch.device("cuda")  # nothing runs there
FORMATS = tuple(WEIGHT_FORMATS.values())


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Pretends that this machine has a GPU; gives the path of its cache."""
    monkeypatch.setattr(choices, "identify", lambda _: IDENTITY)
    monkeypatch.setattr(choices, "describe_device", lambda _: H200)
    monkeypatch.setattr(speed, "describe_device", lambda _: H200)
    use_cache(tmp_path)
    yield TUNE_CACHE.path(IDENTITY.device, tmp_path)
    use_cache(None)


def linear(n_rows: int, n_columns: int, weight: torch.Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(n_columns, n_rows, bias=False, dtype=torch.bfloat16)
    made = random_weight(n_rows, n_columns, torch.device("cpu")) if weight is None else weight
    layer.weight = nn.Parameter(made, requires_grad=False)
    return layer


def test_what_is_predicted_names_the_gpu_and_the_fastest_is_first(on_h200: Path) -> None:
    speeds = compare_formats(28672, 4096, 1, FORMATS, CUDA)
    assert [speed.format for speed in speeds] == [W12, W11]
    assert speeds[0].times > 1.1, "packed weights are for few tokens"
    assert 0.4 < speeds[1].times < 0.6, "W11 with 1.2 % exceptions, as docs/device.md says"
    assert str(speeds[0]).endswith("predicted for H200")
    assert [each.format for each in compare_formats(28672, 4096, 8, [W12], CUDA)] == [W12]


def test_what_was_measured_counts_alone(on_h200: Path) -> None:
    fused = Choice(Strategy.FUSED, MatmulConfig())
    figures = {8: Measured(fused, 50e-6, 60e-6), 16: Measured(fused, 50e-6, 40e-6)}
    TUNE_CACHE.write(on_h200, IDENTITY, {Key(28672, 4096, "W12"): figures})
    choices.forget_choices()
    assert compare_formats(28672, 4096, 5, FORMATS, CUDA) == [Speed(W12, 60e-6 / 50e-6, "measured")]
    assert compare_formats(28672, 4096, 16, FORMATS, CUDA)[0].times == pytest.approx(0.8)
    predicted = compare_formats(28672, 4096, 1, FORMATS, CUDA)
    assert len(predicted) == 2, "nothing was measured for one token"


def test_a_layer_that_would_be_slower_stays_plain() -> None:
    few, many = nn.Sequential(linear(512, 4096)), nn.Sequential(linear(512, 4096))
    assert pack_model_(few).packed, "memory counts where nothing is said of speed"
    report = pack_model_(many, for_tokens=4096)
    assert type(many[0]) is nn.Linear
    assert not report.packed
    assert report.left[0].reason.startswith("slower with for_tokens=4096: 0.")
    assert "predicted for an unknown GPU" in report.left[0].reason


def test_a_layer_that_is_faster_packed_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "describe_device", lambda _: H200)
    model = nn.Sequential(linear(4096, 4096), linear(64, 4096))
    report = pack_model_(model, "W12", for_tokens=1)
    assert isinstance(model[0], PackedLinear)
    assert report.packed[0].format == "W12"
    assert not isinstance(model[1], PackedLinear), "a launch takes as long as so small a product"
    assert report.left[0].reason.startswith("slower with for_tokens=1: 0.")


def test_figures_do_not_hold_for_weights_of_many_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "describe_device", lambda _: H200)
    weight = random_weight(4096, 4096, torch.device("cpu"))
    weight[:, ::50] = 1e-30  # 2 %
    report = pack_model_(nn.Sequential(linear(4096, 4096, weight)), for_tokens=1)
    assert report.left[0].reason == "slower with for_tokens=1: too many exceptions"


def test_embeddings_are_looked_up_and_no_product_is_slower() -> None:
    model = nn.Sequential(nn.Embedding(512, 256, dtype=torch.bfloat16))
    model[0].weight.data = random_weight(512, 256, torch.device("cpu"))
    assert pack_model_(model, embeddings=True, for_tokens=4096).packed


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_a_bad_number_of_tokens_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"for_tokens is .*; it must be a positive number"):
        pack_model_(linear(64, 64), for_tokens=bad)  # type: ignore[arg-type]


def test_speed_on_the_host_is_not_known() -> None:
    layer = linear(64, 64)
    quantizer = partial(PackhorseQuantizer, PackhorseConfig(for_tokens=8))
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        with pytest.raises(ValueError, match="it is on cpu: move it to a GPU first"):
            pack_model_(layer, for_tokens=8)
        with pytest.raises(ValueError, match='pass device_map="cuda" to from_pretrained'):
            quantizer(pre_quantized=False).validate_environment(device_map={"": "cpu"})
        quantizer(pre_quantized=True).validate_environment(device_map={"": "cpu"})
        quantizer(pre_quantized=False).validate_environment(device_map="cuda")
    assert type(layer) is nn.Linear


def test_a_layer_without_outputs_has_no_speed() -> None:
    layer = linear(64, 64)
    layer.weight = nn.Parameter(torch.zeros(0, 64, dtype=torch.bfloat16))
    report = pack_model_(layer, for_tokens=1)
    assert report.left[0].reason.startswith("no gain")
