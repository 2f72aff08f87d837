"""Weights, layers and small language models for the tests of packed weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from weight_samples import MATRICES, model_rows

from packhorse.device import PackReport
from packhorse.layout import WEIGHT_FORMATS

FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS)
PROMPT = torch.tensor([[1, 5, 9, 2, 77, 30], [4, 4, 8, 16, 32, 64]])


def matrix(name: str) -> Tensor:
    return torch.from_numpy(MATRICES[name]()).view(torch.bfloat16)


def model_matrix(n_rows: int, n_columns: int) -> Tensor:
    return torch.from_numpy(model_rows(n_rows, n_columns)).view(torch.bfloat16)


def same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [each.detach().contiguous().view(torch.int16) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def plain_linear(n_columns: int = 300, n_rows: int = 200, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(n_columns, n_rows, bias=bias, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(model_matrix(n_rows, n_columns), requires_grad=False)
    return layer


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def peak_growth(call: object) -> int:
    """The growth of this process's resident memory at its peak during a call, in bytes."""
    status = Path("/proc/self/status")

    def read(name: str) -> int:
        line = next(row for row in status.read_text().splitlines() if row.startswith(name))
        return int(line.split()[1]) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError as error:
        pytest.skip(f"this kernel does not forget the peak of a process: {error}")
    before = read("VmRSS:")
    call()  # type: ignore[operator]
    return read("VmHWM:") - before


def prepared(plain: PreTrainedModel) -> PreTrainedModel:
    plain.generation_config.pad_token_id = 0
    return plain.to(torch.bfloat16).eval()


def llama(*, tied: bool = False, n_layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        tie_word_embeddings=tied,
    )
    return prepared(LlamaForCausalLM(config))


def reasons(report: PackReport) -> dict[str, str]:
    return {weight.name: weight.reason for weight in report.left}


def assert_same_logits(one: PreTrainedModel, other: PreTrainedModel) -> None:
    with torch.no_grad():
        assert same_bits(one(PROMPT).logits, other(PROMPT).logits)


def product_of_tiles(plain: nn.Linear, x: Tensor, heights: list[int]) -> Tensor:
    """PyTorch's own product, tile by tile. On most machines it has the same bits as the product of
    the whole; with AMX the sums depend on the number of rows."""
    biases = [None] * len(heights) if plain.bias is None else plain.bias.split(heights)
    tiles = zip(plain.weight.split(heights), biases, strict=True)
    return torch.cat([nn.functional.linear(x, weight, bias) for weight, bias in tiles], -1)
