"""Time a step of a Llama with random weights, plain or packed: tokens a second, and memory.

The model has the shapes of Llama-3.1-8B. Query, key and value are joined, and so are gate and up,
as in inference engines; attention is over a cache of a fixed length. Each layer has its own weights
in memory, though with the same values: one layer is packed, and its arrays are copied. A step is
one CUDA graph: embedding, layers, head, and the most likely token, which is the next input. Plain
and packed models have the same weights, so their logits must agree except for rounding.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.device.matrix_tuning import pack_on, random_weight
from packhorse.device.products import multiply
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.weights import decode_rows
from packhorse.layout import W11, W12, WeightFormat

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["Size", "measure"]

BATCHES = (1, 8, 32)
CONTEXT = 512  # tokens in the cache
N_REPLAYS = 30


@dataclass(frozen=True)
class Size:
    """The sizes of a model.

    Attributes:
        n_layers: blocks.
        width: elements of a token.
        n_heads: heads of queries.
        n_groups: heads of keys and values.
        n_hidden: elements within the feed-forward part.
        n_words: of the vocabulary.
    """

    n_layers: int
    width: int
    n_heads: int
    n_groups: int
    n_hidden: int
    n_words: int

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.width // self.n_heads

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's matrices."""
        n_qkv = self.width + 2 * self.n_groups * self.head
        return {
            "qkv": (n_qkv, self.width),
            "out": (self.width, self.width),
            "up": (2 * self.n_hidden, self.width),
            "down": (self.width, self.n_hidden),
        }


LLAMA_8B = Size(32, 4096, 32, 8, 14336, 128256)
TINY = Size(1, 32, 2, 1, 48, 40)
Linear = Callable[[Tensor], Tensor]


class Model:
    """The weights of a model, plain (`format` is None) or packed, and the code of a step."""

    def __init__(self, size: Size, format: WeightFormat | None, device: torch.device) -> None:
        self.size, self.format = size, format
        self.layers: list[dict[str, Linear]] = [{} for _ in range(size.n_layers)]
        for seed, (name, shape) in enumerate(size.shapes.items()):
            made = self._copies(random_weight(*shape, device, seed), size.n_layers)
            for layer, linear in zip(self.layers, made, strict=True):
                layer[name] = linear
        self.head = self._copies(random_weight(size.n_words, size.width, device, 9), 1)[0]
        self.look_up = self._embedding(random_weight(size.n_words, size.width, device, 10))
        self.gain = torch.ones(size.width, dtype=torch.bfloat16, device=device)

    def _copies(self, weight: Tensor, n: int) -> list[Linear]:
        """Linear maps with memory of their own."""
        if self.format is None:
            return [_plain(weight.clone()) for _ in range(n)]
        packed, n_columns = pack_on(weight, self.format), weight.shape[1]
        arrays = (WeightTensors(*(array.clone() for array in packed)) for _ in range(n))
        return [_packed(each, self.format, n_columns) for each in arrays]

    def _embedding(self, weight: Tensor) -> Linear:
        """The rows of words."""
        if self.format is None:
            return lambda words: weight[words]
        packed, format, n_columns = pack_on(weight, self.format), self.format, weight.shape[1]
        return lambda words: decode_rows(packed, format, n_columns, words)

    def step(self, words: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits of the next words, batch x n_words."""
        x = self.look_up(words)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x = x + layer["out"](self._attend(layer["qkv"](self._norm(x)), keys, values))
            gate, up = layer["up"](self._norm(x)).chunk(2, dim=-1)
            x = x + layer["down"](F.silu(gate) * up)
        return self.head(self._norm(x))

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size.width,), self.gain, 1e-5)

    def _attend(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend over the whole cache; its last place belongs to the new token. Positions are left
        out, because rotating queries and keys takes hardly any time."""
        size, batch = self.size, qkv.shape[0]
        n_kv = size.n_groups * size.head
        query, key, value = qkv.split([size.width, n_kv, n_kv], dim=-1)
        keys[:, :, -1] = key.view(batch, size.n_groups, size.head)
        values[:, :, -1] = value.view(batch, size.n_groups, size.head)
        query = query.view(batch, size.n_heads, 1, size.head)
        found = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return found.reshape(batch, size.width)

    def caches(self, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of earlier tokens, the same for all models."""
        size, device = self.size, self.gain.device
        generator = torch.Generator(device).manual_seed(0)
        shape = batch, size.n_groups, context, size.head

        def fill() -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

        return [(fill(), fill()) for _ in range(size.n_layers)]


def _plain(weight: Tensor) -> Linear:
    return lambda x: F.linear(x, weight)


def _packed(arrays: WeightTensors, format: WeightFormat, n_columns: int) -> Linear:
    return lambda x: multiply(x.contiguous(), arrays, format, n_columns)


def measure(run: "Run", device: torch.device) -> list[dict[str, Any]]:
    """A table of plain and packed models at some batches."""
    size, context = (TINY, 8) if run.smoke else (LLAMA_8B, CONTEXT)
    rows: list[dict[str, Any]] = []
    logits: dict[int, Tensor] = {}
    plain: dict[int, float] = {}
    print(
        "| weights | batch | ms a step | tokens/s | times BF16 | weights GiB | peak GiB | logits |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for format in (None, W12, W11):
        if run.is_late():
            break
        model = Model(size, format, device)
        weights_gib = _allocated(run)
        for batch in BATCHES[: 1 if run.smoke else None]:
            seconds, found = _time_steps(run, model, batch, context)
            plain.setdefault(batch, seconds)
            same = _agreement(found, logits.setdefault(batch, found))
            row = {
                "weights": format.name if format else "BF16", "batch": batch, "seconds": seconds,
                "tokens_per_s": batch / seconds, "speedup": plain[batch] / seconds,
                "weights_gib": weights_gib, "peak_gib": _peak(run), "agreement": same,
            }  # fmt: skip
            rows.append(row)
            cells = [row["weights"], batch, f"{seconds * 1e3:.3f}", f"{batch / seconds:.0f}"]
            cells += [f"{row['speedup']:.2f}", f"{weights_gib:.2f}", f"{row['peak_gib']:.2f}", same]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            run.keep(rows)
        del model
        if not run.smoke:
            torch.cuda.empty_cache()
    return rows


def _agreement(found: Tensor, expected: Tensor) -> str:
    """The distance of logits from those of the plain model, relative to the largest logit."""
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    n_same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return f"within {error:.4f}, {n_same} of {len(found)} tokens the same"


def _time_steps(run: "Run", model: Model, batch: int, context: int) -> tuple[float, Tensor]:
    """Seconds of a step, and the logits of the first."""
    caches = model.caches(batch, context)
    words = torch.arange(batch, device=model.gain.device)
    start = time.perf_counter()
    first = model.step(words, caches).clone()
    if run.smoke:
        return time.perf_counter() - start, first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words.copy_(model.step(words, caches).argmax(-1))
    times = [_replay(graph) for _ in range(3 + N_REPLAYS)][3:]
    graph.reset()
    return statistics.median(times), first


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _allocated(run: "Run") -> float:
    if run.smoke:
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def _peak(run: "Run") -> float:
    return 0.0 if run.smoke else torch.cuda.max_memory_allocated() / 2**30
