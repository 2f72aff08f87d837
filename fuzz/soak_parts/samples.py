"""The tensors and files of cases. A case draws a few numbers, from which the data are made.

Some data are like those of models, and some are unexpected: NaN payloads, constants, values that
follow from row and column, values one step of training away from others, no bytes at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from make_corpus import make_step

from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME, DTYPES, Split
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.storage.safetensors_header import build_header

__all__ = [
    "Spec",
    "array_of",
    "base_of",
    "digest",
    "draw_base",
    "draw_tensor",
    "draw_tensors",
    "make_array",
    "make_bytes",
    "write_file",
    "write_folder",
]

Spec = dict[str, Any]
_ODD_SHAPES = ([], [0], [1], [0, 7], [3, 0, 2], [1, 1, 1], [7], [63], [64], [65], [4097], [3, 5, 7])
_COMMON = ("BF16", "F16", "F32", "F8_E4M3")
_ONLY_IN_FILES = ("F4", "F6_E2M3", "F6_E3M2")
_BASES = ("same", "zeros", "noise", "step", "step", "step", "master")


def draw_tensor(rng: Random, *, most: int = 300_000, in_file: bool = False) -> Spec:
    """Draw the description of a tensor, without its data.

    Args:
        rng: to draw with.
        most: the most elements that it may have.
        in_file: allow dtypes that PyTorch lacks or has in other shapes.
    """
    names = [row.name for row in DTYPES if in_file or row.name not in _ONLY_IN_FILES]
    dtype = rng.choice(_COMMON if rng.random() < 0.5 else names)
    shape = rng.choice(_ODD_SHAPES) if rng.random() < 0.25 else _draw_shape(rng, most)
    if dtype in _ONLY_IN_FILES:
        shape = [*shape, 4]  # so that its bits are whole bytes
    kind = rng.choice(list(_MAKERS))
    return {"dtype": dtype, "shape": shape, "kind": kind, "seed": rng.getrandbits(32)}


def _draw_shape(rng: Random, most: int) -> list[int]:
    numel = max(1, round(math.exp(rng.uniform(0, math.log(most)))))
    shape = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        shape.append(rng.randint(1, max(1, math.isqrt(numel) * 2)))
        numel = max(1, numel // shape[-1])
    return [*shape, numel]


def draw_tensors(rng: Random, n: int, *, most: int = 30_000, in_file: bool = False) -> list[Spec]:
    """Some tensors for one file or state."""
    return [draw_tensor(rng, most=most, in_file=in_file) for _ in range(n)]


def draw_base(rng: Random) -> Spec:
    """Draw how the base of a tensor follows from it."""
    scale = math.exp(rng.uniform(-2, 8))
    return {"how": rng.choice(_BASES), "scale": scale, "seed": rng.getrandbits(32)}


def make_bytes(spec: Spec) -> bytes:
    """The data of a tensor."""
    row, numel = DTYPE_BY_NAME[spec["dtype"]], math.prod(spec["shape"])
    n_units = numel * row.bits // 8 // row.unit_nbytes
    rng = np.random.default_rng(spec["seed"])
    made = _MAKERS[spec["kind"]](rng, spec, n_units)
    made = made if len(made) == n_units * row.unit_nbytes else _bits(rng, spec, n_units)
    # A single element of a NumPy array of booleans is 0 or 1, whatever its byte was.
    return made if row.name != "BOOL" else (np.frombuffer(made, np.uint8) & 1).tobytes()


def make_array(spec: Spec, framework: str = "np") -> Any:
    """The tensor in a framework."""
    return array_of(make_bytes(spec), spec["dtype"], spec["shape"], framework)


def array_of(data: bytes, dtype: str, shape: list[int], framework: str = "np") -> Any:
    """A tensor of bytes."""
    adapter = resolve_framework(framework)
    tensor = adapter.empty(dtype, tuple(shape))
    adapter.fill(tensor, lambda memory: np.copyto(memory, np.frombuffer(data, np.uint8)))
    return tensor


def base_of(spec: Spec, base: Spec) -> tuple[str, bytes]:
    """Dtype and data of the base of a tensor."""
    data, row, how = make_bytes(spec), DTYPE_BY_NAME[spec["dtype"]], base["how"]
    if how == "master" and spec["dtype"] in ("BF16", "F16"):
        wide = array_of(data, spec["dtype"], [len(data) // 2])
        return "F32", wide.astype(np.float32).tobytes()
    if how == "zeros":
        return row.name, bytes(len(data))
    if how == "noise":
        return row.name, np.random.default_rng(base["seed"]).bytes(len(data))
    if how == "same":
        return row.name, data
    scale = min(base["scale"], 8.0**row.unit_nbytes)
    return row.name, make_step(data, row.unit_nbytes, scale) if data else b""


def write_file(path: Path, specs: list[Spec], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of tensors, which are called `t0`, `t1` and so on."""
    shapes = {f"t{i}": (spec["dtype"], spec["shape"]) for i, spec in enumerate(specs)}
    header = build_header(shapes, metadata)
    with path.open("wb") as file:
        file.write(header.prefix())
        for entry in header.entries:
            file.write(make_bytes(specs[int(entry.name[1:])]))


def write_folder(case: dict[str, Any], folder: Path) -> None:
    """A model folder of some shards (`shards`), with an index and a subfolder if the case says
    so."""
    (folder / "below").mkdir(parents=True)
    names = [f"model-{i + 1:05}.safetensors" for i in range(len(case["shards"]))]
    for name, specs in zip(names, case["shards"], strict=True):
        write_file(folder / name, specs)
    if case["index"]:
        places = {f"t{i}": names[0] for i in range(len(case["shards"][0]))}
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index)
    if case["below"]:
        write_file(folder / "below" / "vae.safetensors", case["shards"][0])
    (folder / "config.json").write_text("{}")


def digest(path: Path) -> dict[str, str]:
    """A value that is equal for files and folders with the same bytes."""
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    return {
        os.path.relpath(file, path): hashlib.sha1(file.read_bytes()).hexdigest()
        for file in paths
        if file.is_file()
    }


# Kinds of data. Each function gets a generator, the tensor, and its number of units.


def _bits(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    return rng.bytes(n * DTYPE_BY_NAME[spec["dtype"]].unit_nbytes)


def _zeros(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    return bytes(n * DTYPE_BY_NAME[spec["dtype"]].unit_nbytes)


def _constant(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    return rng.bytes(DTYPE_BY_NAME[spec["dtype"]].unit_nbytes) * n


def _few(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    size = DTYPE_BY_NAME[spec["dtype"]].unit_nbytes
    values = rng.integers(0, 256, (6, size), np.uint8)
    return values[np.minimum(rng.geometric(0.5, n) - 1, 5)].tobytes()


def _phrases(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    size = DTYPE_BY_NAME[spec["dtype"]].unit_nbytes
    block = rng.integers(0, 256, (int(rng.integers(2, 90)), size), np.uint8)
    return np.resize(block, (n, size)).tobytes() if n else b""


def _weights(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    return _as(spec, rng.normal(0, 0.02, n))


def _moments(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    """Squares whose size follows from row and column, as in an optimizer."""
    n_columns = spec["shape"][-1] if spec["shape"] else 1
    n_rows = n // n_columns if n_columns else 0
    if n_rows * n_columns != n:
        return b""
    logs = rng.normal(-9, 3, (n_rows, 1)) + rng.normal(0, 3, n_columns)
    return _as(spec, np.exp(logs) * rng.normal(1, 0.2, (n_rows, n_columns)) ** 2)


def _sparse(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    return _as(spec, rng.normal(0, 1, n) * (rng.random(n) < 0.03))


def _floors(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    """Long runs of one value, in which samples see constants."""
    return _as(spec, np.floor(np.arange(n) / int(rng.integers(1, 9000))))


def _nans(rng: np.random.Generator, spec: Spec, n: int) -> bytes:
    """Infinities, NaNs with payloads, signed zeros, subnormals, among random bits."""
    size = DTYPE_BY_NAME[spec["dtype"]].unit_nbytes
    units = rng.integers(0, 256, (n, size), np.uint8)
    units[:, -1] = rng.choice(np.uint8([0x7F, 0xFF, 0x80, 0, 0x7C, 0xFC]), n)
    if size > 1:
        units[:, -2] |= rng.choice(np.uint8([0x80, 0xF0, 0]), n)
        units[rng.random(n) < 0.3, :-1] = 0
    return units.tobytes()


def _as(spec: Spec, values: np.ndarray) -> bytes:
    """Values in a tensor's dtype; no bytes for a dtype that cannot hold them."""
    row = DTYPE_BY_NAME[spec["dtype"]]
    if row.name in _ONLY_IN_FILES or row.name == "C64":
        return b""
    if Split.FLOAT not in row.splits and row.name != "F8_E8M0":
        values = np.abs(np.round(values * 100)) % 128
    array = NUMPY.empty(row.name, values.shape)
    with np.errstate(all="ignore"):
        array[...] = values.astype(array.dtype)
    return bytes(array.tobytes())


_MAKERS: dict[str, Callable[[np.random.Generator, Spec, int], bytes]] = {
    "bits": _bits,
    "zeros": _zeros,
    "constant": _constant,
    "few": _few,
    "phrases": _phrases,
    "weights": _weights,
    "moments": _moments,
    "sparse": _sparse,
    "floors": _floors,
    "nans": _nans,
}
