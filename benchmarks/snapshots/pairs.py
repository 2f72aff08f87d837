"""Pairs of neighbouring checkpoints of the training run, as data sets with bases.

Everything comes from the files that `benchmarks/training.py` leaves. A pair is a data set with a
base of the same dtype and size. Steps are counted from the last step of the run with fp32 masters.
Only steps whose files are kept are available.

In `bf16_sparse`, 1 % of the values have changed, about as many as in a step of reinforcement
learning: they are a fixed choice among the values that one step changes. `state_128` is a whole
state in four parts, and the base of each is the same part of the older state. The bf16 copy also
equals the rounded masters of its own step, which are in the same checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.data import sets
from benchmarks.data.sets import DataSet

__all__ = ["DTYPES", "NAMES", "STATE", "STATE_KINDS", "Array", "Pair", "make"]

STATE = "state_128"
CHANGED_SHARE = 0.01
DTYPES = {"16": ("BF16", ml_dtypes.bfloat16), "32": ("F32", np.float32)}
# Kinds of files, in the order of a state's parts; the copy follows the masters that it is made
# from.
MASTERS, COPY = "w32", "w16"
STATE_KINDS = (MASTERS, COPY, "m32", "v32")
STATE_GAP = 128
Array = NDArray[Any]


def _nothing() -> Array:
    return np.empty(0, np.uint8)


@dataclass(frozen=True)
class Pair(DataSet):
    """A data set, and its values a few steps before.

    Attributes:
        base: the values of the older checkpoint, in the same form as `array`.
        base_sha256: of the bytes of the base.
        parts: the sets that a whole state consists of, in the order of its bytes; empty for others.
        cast_of: for a part of a state, the index of the part whose rounded values it equals.
    """

    base: Array = field(default_factory=_nothing)
    base_sha256: str = ""
    parts: tuple["Pair", ...] = ()
    cast_of: int | None = None

    @property
    def bases(self) -> list[Array]:
        """The base of each tensor, in its shape."""
        return [tensor for _, tensor in replace(self, array=self.base).tensors]

    @property
    def inputs(self) -> list[Array]:
        """The array and its base."""
        return [self.array, self.base]

    def part(self, first: int, end: int) -> "Pair":
        """A run of elements and of their base, as one flat tensor."""
        array, base = self.array[first:end], self.base[first:end]
        return replace(self, array=array, base=base, shapes=())


def _pair(name: str, kind: str, old: int, new: int, what: str) -> Pair:
    """The pair of one kind of file at two steps."""
    dtype, numpy_type = DTYPES[kind[-2:]]
    tensors = sets.training_tensors(kind, new, dtype, numpy_type)
    older = sets.training_tensors(kind, old, dtype, numpy_type)
    array, base = (np.concatenate([t.reshape(-1) for t in of.values()]) for of in (tensors, older))
    shapes = tuple((key, tensor.shape) for key, tensor in tensors.items())
    source = f"{what}, step {old} to {new}"
    return Pair(
        name, dtype, array, sets.digest(array), source, shapes, base, sets.digest(base)
    )  # fmt: skip


def _last() -> int:
    """The last step with fp32 masters."""
    manifest = sets.training_folder() / sets.TRAINING_MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(
            f"there is no complete training run in {manifest.parent}; make it in about 17 minutes "
            "with: make training"
        )
    recipe = json.loads(manifest.read_text())["recipe"]
    return int(recipe["full_steps"] + recipe["cool_down"])


def _steps_apart(gap: int, kind: str, what: str, name: str) -> Pair:
    last = _last()
    return _pair(name, kind, last - gap, last, what)


def _pure(name: str) -> Pair:
    """A pair of the run's tail, in which weights and moments are bf16."""
    last = _last()
    return _pair(name, "p16", last + 4, last + 5, "weights of pure-bf16 training")


def _sparse(name: str) -> Pair:
    whole = _steps_apart(1, COPY, "bf16 weights", name)
    new, old = whole.array.view(np.uint16), whole.base.view(np.uint16)
    changed = np.flatnonzero(new != old)
    n_kept = round(CHANGED_SHARE * new.size)
    if n_kept > changed.size:
        raise ValueError(f"one step changed {changed.size} values, fewer than the {n_kept} needed")
    kept = np.random.default_rng(sets.SEED).choice(changed, n_kept, replace=False)
    sparse = old.copy()
    sparse[kept] = new[kept]
    array = sparse.view(whole.array.dtype)
    source = f"{whole.source}, with {CHANGED_SHARE:.0%} of the values changed and all others kept"
    return replace(whole, array=array, sha256=sets.digest(array), source=source)


def _state(name: str) -> Pair:
    parts = [_steps_apart(STATE_GAP, kind, "", f"{name}.{kind}") for kind in STATE_KINDS]
    array, base = (
        np.concatenate([a.view(np.uint8) for a in arrays])
        for arrays in ([p.array for p in parts], [p.base for p in parts])
    )
    return Pair(
        name, "U8", array, sets.digest(array),
        f"fp32 masters, bf16 copy and both moments, step {_last() - STATE_GAP} to {_last()}",
        tuple((f"{p.name}/{key}", shape) for p in parts for key, shape in p.shapes),
        base, sets.digest(base), _views(parts, array, base),
    )  # fmt: skip


def _views(parts: list[Pair], array: Array, base: Array) -> tuple[Pair, ...]:
    """The parts as views of the state's bytes, so that no memory is used twice."""
    out = []
    start = 0
    for kind, part in zip(STATE_KINDS, parts, strict=True):
        end = start + part.array.nbytes
        new, old = (whole[start:end].view(part.array.dtype) for whole in (array, base))
        cast_of = STATE_KINDS.index(MASTERS) if kind == COPY else None
        out.append(replace(part, array=new, base=old, cast_of=cast_of))
        start = end
    return tuple(out)


_WEIGHTS, _FP32 = "bf16 weights", "fp32 masters"
_RECIPES: dict[str, Callable[[str], Pair]] = {
    "bf16_1": partial(_steps_apart, 1, COPY, _WEIGHTS),
    "bf16_8": partial(_steps_apart, 8, COPY, _WEIGHTS),
    "bf16_128": partial(_steps_apart, 128, COPY, _WEIGHTS),
    "pure_bf16_1": _pure,
    "fp32_1": partial(_steps_apart, 1, MASTERS, _FP32),
    "bf16_sparse": _sparse,
    STATE: _state,
}
NAMES = tuple(_RECIPES)


def make(name: str) -> Pair:
    """Read a pair from the training run.

    Args:
        name: one of `NAMES`.

    Raises:
        FileNotFoundError: there is no complete run, or it has not kept a step.
        ValueError: a file is not the one that the run wrote.
    """
    return _RECIPES[name](name)
