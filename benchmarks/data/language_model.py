"""A small LLaMA-like language model, for the training run of the benchmark data.

Rotary positions, RMS norms, gated feed-forward, no biases, the embedding tied to the output; the
parameters carry the names that published LLaMA checkpoints use. Nothing here is tuned, because it
only matters that the weights and the optimizer's moments come from a real training run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LanguageModel", "ModelShape"]

ROTARY_BASE = 10000.0
EPSILON = 1e-5
INITIAL_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        vocabulary: rows of the embedding.
        width: of the residual stream.
        hidden: of the feed-forward layers.
        n_layers: blocks.
        n_heads: of each attention; divides `width`.
    """

    vocabulary: int = 8192
    width: int = 448
    hidden: int = 1216
    n_layers: int = 6
    n_heads: int = 7


class LanguageModel(nn.Module):
    """The whole model; fp32."""

    def __init__(self, shape: ModelShape, *, seed: int) -> None:
        """Make a model with random weights.

        Args:
            shape: its sizes.
            seed: of the random weights.
        """
        super().__init__()
        self.model = _Stack(shape)
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * shape.n_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            # Weights that add to the residual stream start smaller, so that their sum over all
            # layers has the scale of one.
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = INITIAL_STD * (depth_scale if into_stream else 1.0)
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of predicting each id from those before it.

        Args:
            ids: int64, shape (batch, context + 1).

        Returns:
            A scalar, in nats.
        """
        logits = F.linear(self.model(ids[:, :-1]), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class _Stack(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(shape.width, shape.width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = (batch, context, self.n_heads, width // self.n_heads)
        q, k, v = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotate(x: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head by an angle that grows with the position.

    Args:
        x: shape (batch, heads, context, size of a head).
    """
    half = x.shape[-1] // 2
    speed = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), speed)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
