"""Training states for the tests of snapshots: real modules and optimizers, and odd values."""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from packhorse.codecs.content import crc32c

__all__ = ["Run", "assert_same", "odd_state", "signed"]


class Run:
    """A small training run in bfloat16 with AdamW, whose state is taken step after step."""

    def __init__(self, seed: int = 0, width: int = 96) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8)
        ).to(torch.bfloat16)
        for parameter in self.model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = generator
        self.n_steps = 0

    def step(self, n: int = 1) -> "Run":
        """Train for some steps."""
        for _ in range(n):
            x = torch.randn(16, 64, generator=self.generator).to(torch.bfloat16)
            loss = (self.model(x).float() - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.n_steps += 1
        return self

    def state(self) -> dict[str, Any]:
        """The live state: its tensors are those of the run."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.generator.get_state(),
            "step": self.n_steps,
        }

    def copy(self) -> dict[str, Any]:
        """The state as it is now, in memory of its own."""
        return copied(self.state())


def copied(value: Any) -> Any:
    """A deep copy in plain containers."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def odd_state() -> dict[str, Any]:
    """A state with every kind of value that a state may have."""
    rng = np.random.default_rng(3)
    shared = torch.arange(12, dtype=torch.float64)
    return {
        "": "an empty key",
        "a.b": [1, 2.5, -0.0, 10**40, True, False, None, "ü\n\x00"],
        "nested": {0: {None: (), True: [], 1.5: {}, "x": ((),)}, -7: "int key"},
        "specials": [math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
        math.inf: "an infinite key",
        "empty": {},
        "tensors": {
            "strided": torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
            "expanded": torch.ones(1, 1).expand(3, 5),
            "grad": torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(1))),
            "zero_dim": torch.tensor(3.5),
            "none_of_it": torch.empty(0, 7, dtype=torch.int8),
            "tied": (shared, shared),
            "bool": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j, -3j]).conj(),
            "fp8": torch.arange(16.0).to(torch.float8_e4m3fn),
        },
        "arrays": [
            rng.standard_normal((5, 3)).astype(np.float16)[::-1],
            np.asfortranarray(rng.integers(0, 9, (4, 4))),
            np.arange(3, dtype=">i4"),
            np.float32([np.nan, -0.0, np.inf]),
        ],
    }


def assert_same(found: Any, wanted: Any, path: str = "state") -> None:
    """Check that two states are equal, tensors and floats bit for bit, whatever framework."""
    if isinstance(wanted, torch.Tensor | np.ndarray):
        assert bits(found) == bits(wanted), path
        return
    if isinstance(wanted, dict):
        assert isinstance(found, dict), path
        assert [repr(key) for key in found] == [repr(key) for key in wanted], path
        for key, item in wanted.items():
            assert_same(found[key], item, f"{path}[{key!r}]")
        return
    if isinstance(wanted, list | tuple):
        assert type(found) is type(wanted), path
        assert len(found) == len(wanted), path
        for i, item in enumerate(wanted):
            assert_same(found[i], item, f"{path}[{i}]")
        return
    assert type(found) is type(wanted), path
    if isinstance(wanted, float):
        assert struct.pack("<d", found) == struct.pack("<d", wanted), path
    else:
        assert found == wanted, path


def bits(tensor: Any) -> tuple[Any, ...]:
    """Dtype name, shape and bytes."""
    from packhorse.framework import framework_of

    framework = framework_of(tensor)
    assert framework is not None, f"{type(tensor)} is no tensor"
    data, dtype, shape = framework.readable(tensor)
    return dtype, tuple(shape), data.tobytes()


def every_tensor(state: Any, visit: Callable[[Any], None]) -> None:
    """Call something for each tensor of a state."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for item in state:
            every_tensor(item, visit)
    elif isinstance(state, torch.Tensor | np.ndarray):
        visit(state)


def signed(document: dict[str, Any]) -> bytes:
    """The text of a manifest with any content and the right checksum."""
    document = {"crc32c": "0" * 8, **{k: v for k, v in document.items() if k != "crc32c"}}
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("0" * 8, f"{crc32c(text.encode()):08x}", 1).encode()
