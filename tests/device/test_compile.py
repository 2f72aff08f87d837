"""Packed weights under PyTorch's compilers, and a GPU's code path in Triton's interpreter."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from device_samples import FORMATS, inputs, model_matrix, plain_linear, same_bits

import packhorse
from packhorse.device import PackedLinear, operators, pack_weight, products
from packhorse.device.strategy import Choice, Strategy


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_compile_without_breaks(backend: str) -> None:
    plain = plain_linear()
    packed = PackedLinear.from_linear(plain)
    compiled = torch.compile(packed, backend=backend, fullgraph=True)
    for n_tokens in (1, 3, 5):
        with torch.no_grad():
            assert same_bits(compiled(inputs(n_tokens, 300)), plain(inputs(n_tokens, 300)))
    grads = []
    for layer in (plain, compiled):
        x = inputs(4, 300).requires_grad_()
        layer(x).float().sum().backward()
        grads.append(x.grad)
    assert same_bits(*grads)
    with pytest.raises(Exception, match="packed weights multiply"):
        compiled(torch.ones(2, 300))


def test_embeddings_compile_without_breaks() -> None:
    plain = model_matrix(50, 96)
    packed = pack_weight(plain)
    found = torch.compile(
        lambda rows: F.embedding(rows, packed) * 2, backend="aot_eager", fullgraph=True
    )
    rows = torch.randint(50, (3, 4))
    assert same_bits(found(rows), plain[rows] * 2)
    with pytest.raises(NotImplementedError, match="max_norm"):
        F.embedding(rows, packed, max_norm=1.0)


def test_blocks_share_a_graph_where_shapes_of_parameters_may_vary() -> None:
    """Each layer has another number of exceptions."""
    blocks = [PackedLinear.from_linear(plain_linear(256, 256)) for _ in range(12)]
    for i, block in enumerate(blocks):
        block.weight.data = model_matrix(256, 256) * (i + 1)
        block.weight.data = torch.cat([block.weight.unpack()[i:], block.weight.unpack()[:i]])
        block.weight.data = block.weight.unpack().index_fill(1, torch.arange(i), 1e-30)
        block.compile(backend="aot_eager", fullgraph=True)
    x = inputs(2, 256)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False), torch.no_grad():
        found = [block(x) for block in blocks]
    for block, y in zip(blocks, found, strict=True):
        assert same_bits(y, F.linear(x, block.weight.unpack(), block.bias))


def test_layers_are_exported() -> None:
    plain = plain_linear()
    packed, x = PackedLinear.from_linear(plain), inputs(4, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(packed, (x,))
        assert same_bits(program.module()(x), plain(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("packhorse" in target for target in targets)


# The code path of a GPU.


@FORMATS
@pytest.mark.parametrize("strategy", [Strategy.FUSED, Strategy.DECODE])
def test_the_kernels_give_the_products_of_a_gpu(
    strategy: Strategy, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels in host memory."""
    monkeypatch.setattr(products, "choose", lambda *_: Choice(strategy))
    monkeypatch.setattr(operators, "_has_kernels", lambda _: True)
    plain = plain_linear(96, 40)
    packed, x = pack_weight(plain.weight, format), inputs(2, 3, 96)
    y = products.multiply(x, packed.arrays, packed.format, 96, bias=plain.bias)
    assert y.shape == (2, 3, 40)
    exact = F.linear(x.double(), plain.weight.double(), plain.bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-3)


def test_without_triton_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "find_spec", lambda _: None)
    operators.require_kernels.cache_clear()
    with pytest.raises(packhorse.MissingBackendError, match=r"packhorse\[gpu\]"):
        operators.require_kernels()
