"""Weight updates to send: the weights of a model in bf16 before and after a step of training.

The stand-in has normal weights with a standard deviation of .02 and adds a learning rate times
normal values, clipped at 1.5: what Adam's steps look like. Masters are fp32, so of the bf16 copies
only those change whose master crosses a rounding border; learning rates of 1e-7 to 3e-6 change .5
to 8 % of the elements.

A trace is a real run of reinforcement learning, which `make rl-trace` makes: for each learning rate
some of its steps, spread evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["STAND_INS", "Units", "Update", "stand_in", "trace", "updates"]

Units = NDArray[np.unsignedinteger[Any]]
# Percent of changed elements and the learning rate that gives about that many.
STAND_INS = {"0.5": 1e-7, "1.2": 3e-7, "3.3": 1e-6, "8": 3e-6}
SEED = 20261125
SIGMA, CLIP = 0.02, 1.5
MATRIX = (1024, 1024)
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Update:
    """Two states of the same weights, each as one flat array of the elements' bits.

    Attributes:
        name: in the tables.
        source: where the values come from.
        base: the elements of all tensors before, end to end, as unsigned integers.
        new: the same after.
        shapes: name and shape of each tensor.
        dtype: of the elements, by safetensors' name.
    """

    name: str
    source: str
    base: Units
    new: Units
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str = "BF16"

    @property
    def density(self) -> float:
        """Share of the elements that differ."""
        return float(np.count_nonzero(self.base != self.new) / self.new.size)

    @property
    def byte_density(self) -> float:
        """Share of the bytes that differ, which some projects report instead."""
        differ = self.base.view(np.uint8) != self.new.view(np.uint8)
        return float(np.count_nonzero(differ) / differ.size)

    def spans(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Name, shape, first element and end of each tensor in the flat arrays."""
        first = 0
        for name, shape in self.shapes:
            end = first + int(np.prod(shape, dtype=np.int64))
            yield name, shape, first, end
            first = end


def stand_in(name: str, nbytes: int) -> Update:
    """An update as a step of training makes it.

    Args:
        name: a key of `STAND_INS`.
        nbytes: about how large; whole matrices of 2 MiB, at least one.
    """
    rng = np.random.default_rng(SEED)
    count = max(1, round(nbytes / (2 * MATRIX[0] * MATRIX[1])))
    masters = rng.standard_normal((count, *MATRIX), np.float32)
    masters *= np.float32(SIGMA)
    step = rng.standard_normal(masters.shape, np.float32)
    np.clip(step, -CLIP, CLIP, out=step)
    step *= np.float32(STAND_INS[name])
    base = masters.astype(ml_dtypes.bfloat16)
    masters += step
    new = masters.astype(ml_dtypes.bfloat16)
    shapes = tuple((f"layers.{i}.weight", MATRIX) for i in range(count))
    old, after = (array.reshape(-1).view(np.uint16) for array in (base, new))
    return Update(name, f"stand-in, learning rate {STAND_INS[name]:g}", old, after, shapes)


def trace(folder: Path, count: int) -> Iterator[Update]:
    """Updates of a real run: for each learning rate, `count` steps spread evenly.

    Args:
        folder: of the trace.
        count: of one learning rate.

    Raises:
        FileNotFoundError: there is no trace in the folder.
    """
    run = import_module("benchmarks.data.rl_trace")
    rates = run.rates(folder)
    if not rates:
        raise FileNotFoundError(f"no trace in {folder}; make it with: make rl-trace")
    for rate in rates:
        store = run.open_store(folder, rate)
        last = len(store.names()) - 1
        for number in range(1, count + 1):
            step = round(number * last / count)
            base, new = run.state(store, step - 1), run.state(store, step)
            shapes = tuple((name, array.shape) for name, array in new.items())
            name = f"{rate:.0e}, step {step}"
            yield Update(name, f"trace, learning rate {name}", _units(base), _units(new), shapes)


def updates(options: dict[str, Any]) -> Iterator[Update]:
    """The updates that a scenario's options ask for.

    Args:
        options: "densities" (keys of `STAND_INS`) and "nbytes" of a stand-in; "trace", a folder or
            None, and "trace_steps" of each of its learning rates.
    """
    for name in options["densities"]:
        yield stand_in(name, options["nbytes"])
    if options.get("trace"):
        yield from trace(Path(options["trace"]), options["trace_steps"])


def _units(state: dict[str, NDArray[Any]]) -> Units:
    return np.concatenate([array.reshape(-1).view(np.uint16) for array in state.values()])
