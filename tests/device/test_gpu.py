"""Tests that only a GPU can run: CUDA graphs, concurrent streams, compiled layers, measurements.

All of them need a GPU and TRITON_INTERPRET=0.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from weight_samples import model_rows

from packhorse.device import PackedLinear, pack_weight
from packhorse.device.matrix_tuning import pack_on, random_weight
from packhorse.device.product_timer import ProductTimer
from packhorse.device.strategy import Choice, Strategy
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import W12, WEIGHT_FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        triton.knobs.runtime.interpret or not torch.cuda.is_available(),
        reason="needs a GPU, and TRITON_INTERPRET=0",
    ),
]
FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS)
MANY = 3000  # tokens, for which weights are decoded first


def layer(n_rows: int, n_columns: int, format: str = "W12") -> PackedLinear:
    plain = torch.from_numpy(model_rows(n_rows, n_columns)).view(torch.bfloat16)
    bias = torch.arange(n_rows).to(torch.bfloat16)
    return PackedLinear(pack_weight(plain, format), bias).to("cuda")


def inputs(n_tokens: int, n_columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n_tokens, n_columns, generator=generator, device="cuda").bfloat16()


def check_replays(run: Callable[[Tensor], Tensor], n_tokens: int, n_columns: int) -> None:
    """A graph of a function gives the same results as the function, even for later inputs."""
    x = inputs(n_tokens, n_columns)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    for seed in (1, 2):
        x.copy_(inputs(n_tokens, n_columns, seed))
        expected = run(x)
        y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


@FORMATS
@pytest.mark.parametrize("n_tokens", [1, 8, 40, MANY])
def test_products_in_cuda_graphs(n_tokens: int, format: str) -> None:
    packed = layer(512, 768, format)
    check_replays(packed, n_tokens, 768)


@FORMATS
def test_rows_are_looked_up_in_cuda_graphs(format: str) -> None:
    """This holds in a batch of another size too, which uses the same machine code."""
    plain = torch.from_numpy(model_rows(300, 256)).view(torch.bfloat16).to("cuda")
    packed = pack_weight(plain, format)
    F.embedding(torch.arange(5, device="cuda"), packed)
    for n in (1, 16, 33):
        ids = torch.zeros(n, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = F.embedding(ids, packed)
        ids.copy_(torch.arange(n) * 7)
        graph.replay()
        assert torch.equal(found, plain[ids])


@FORMATS
def test_rows_are_taken_by_index(format: str) -> None:
    plain = torch.from_numpy(model_rows(300, 257)).view(torch.bfloat16).to("cuda")
    packed = pack_weight(plain, format)
    for index in (slice(37, 250), slice(9, 3), slice(None, None, 7), -1, (5, slice(2, 9))):
        assert torch.equal(packed[index], plain[index])
    packed[250:] = plain[0]
    assert torch.equal(packed[299], plain[0])


def test_inputs_that_are_not_aligned_need_no_other_machine_code() -> None:
    packed, x = layer(512, 769), inputs(1, 8 * 769 + 1)[0]
    expected = packed(x[1:].clone().view(8, 769))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed(x[1:].view(8, 769))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_layers(mode: str) -> None:
    model = nn.Sequential(layer(512, 256), nn.ReLU(), layer(128, 512)).requires_grad_(False)
    compiled = torch.compile(model, mode=mode)
    for n_tokens in (4, 40):
        for seed in range(4):
            x = inputs(n_tokens, 256, seed)
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=0.02, atol=1.0)


def test_what_the_timer_says() -> None:
    """Gives times of divisions that run, infinity for one that is too large, and then goes on."""
    weights = pack_on(random_weight(1024, 1024, torch.device("cuda")), W12)
    timer = ProductTimer(weights, W12, 1024, chain_nbytes=10_000_000, n_replays=5)
    too_large = Choice(Strategy.FUSED, MatmulConfig(256, 32, 256, 8, 1, 8))
    choices = [Choice(Strategy.FUSED), too_large, Choice(Strategy.MANY), Choice(Strategy.DECODE)]
    times = [timer(choice, 8) for choice in choices]
    assert times.pop(1) == math.inf
    for seconds in (*times, timer.plain(8), timer.decoding()):
        assert 1e-6 < seconds < 1e-3


def test_rows_are_looked_up_for_some_tokens_of_a_batch() -> None:
    """Numbers that begin at any address, as those of `input_ids[:, -1:]` do, need no other machine
    code, which would be compiled in the capture."""
    plain = torch.from_numpy(model_rows(300, 256)).view(torch.bfloat16).to("cuda")
    packed = pack_weight(plain, "W12")
    ids = torch.arange(9, device="cuda") * 7
    F.embedding(ids, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = F.embedding(ids[1:4], packed)
    graph.replay()
    assert torch.equal(found, plain[ids[1:4]])
