"""A small LLaMA-like language model, for the training runs of the benchmark data.

Rotary positions, RMS norms, gated feed-forward, no biases, the embedding tied to the output; the
parameters carry the names that published LLaMA checkpoints use. Nothing here is tuned, because it
only matters that the weights and the optimizer's moments come from a real training run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Cache", "LanguageModel", "ModelShape"]

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
        return F.cross_entropy(self.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def logits(self, ids: Tensor, cache: "Cache | None" = None) -> Tensor:
        """The scores of every possible next id, after each id.

        Args:
            ids: int64, shape (batch, context).
            cache: keys and values of the ids before these; those of these ids are appended. Without
                one the ids are the first.

        Returns:
            Shape (batch, context, vocabulary).
        """
        return F.linear(self.model(ids, cache), self.model.embed_tokens.weight)


class Cache:
    """Keys and values of the ids that a model has seen, so that the next id costs one step.

    Attributes:
        layers: of each block that has seen ids, keys and values; each has the shape
            (batch, heads, ids seen, size of a head).
    """

    def __init__(self) -> None:
        """Make the cache of a model that has seen nothing."""
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def n_seen(self) -> int:
        """The number of ids of a sequence that the whole model has seen."""
        return self.layers[-1][0].shape[-2] if self.layers else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new ids; returns those of all ids.

        Args:
            layer: the number of the block.
            k: the new keys, not yet seen by this block.
            v: the new values.
        """
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            old_k, old_v = self.layers[layer]
            self.layers[layer] = torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)
        return self.layers[layer]

    def repeat(self, n: int) -> None:
        """Make n sequences of each, one after the other.

        Args:
            n: how many.
        """
        self.layers = [
            (k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)) for k, v in self.layers
        ]


class _Stack(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embed_tokens(ids)
        first = cache.n_seen if cache else 0
        for i, layer in enumerate(self.layers):
            x = layer(x, first, i, cache)
        return self.norm(x)


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, x: Tensor, first: int, layer: int, cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), first, layer, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(shape.width, shape.width, bias=False))

    def forward(self, x: Tensor, first: int, layer: int, cache: Cache | None) -> Tensor:
        batch, context, width = x.shape
        heads = (batch, context, self.n_heads, width // self.n_heads)
        q, k, v = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, first), _rotate(k, first)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        # One new id sees all before it; several are the first of their sequences.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=context > 1)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotate(x: Tensor, first: int) -> Tensor:
    """Turn the pairs (i, i + half) of each head by an angle that grows with the position.

    Args:
        x: shape (batch, heads, context, size of a head).
        first: the position of the first element of the context.
    """
    half = x.shape[-1] // 2
    speed = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    positions = torch.arange(first, first + x.shape[-2], dtype=torch.float32)
    angle = torch.outer(positions, speed)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
