"""Safetensors files for the tests of the disk hop: from the real library, or wrong on purpose.

`file_of_samples` holds the small frames that `frame_builder` builds, so every mode there is.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import frame_builder as fb
import numpy as np

from packhorse.frame import Frame

__all__ = [
    "entry",
    "file_bytes",
    "file_of_samples",
    "leftovers",
    "sample_tensors",
    "small_packed_file",
    "write_sample",
]


def file_bytes(
    header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None
) -> bytes:
    """A safetensors file, right or wrong: any header, any data, any declared length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    declared = len(text) if length is None else length
    return declared.to_bytes(8, "little") + text + data


def entry(
    start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None
) -> dict[str, Any]:
    """One tensor's entry of a header; by default, the tensor is a run of bytes."""
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def sample_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of all kinds: weights of several chunks, a scalar, an empty tensor, odd sizes,
    constants."""
    rng = np.random.default_rng(seed)
    return {
        "layers.0.weight": rng.standard_normal((300, 20, 50)).astype(np.float32) * 0.02,
        "layers.0.bias": rng.standard_normal(301).astype(np.float16),
        "embed é": rng.integers(0, 1000, (70, 90)),
        "scalar": np.array(3.25, np.float32),
        "nothing": np.zeros((0, 4), np.float64),
        "zeros": np.zeros((33, 7), np.float64),
        "noise": rng.integers(0, 256, 5001).astype(np.uint8),
    }


def write_sample(
    path: Path, seed: int = 0, metadata: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Write `sample_tensors` with the safetensors library."""
    from safetensors.numpy import save_file

    tensors = sample_tensors(seed)
    save_file(tensors, path, metadata={"format": "np"} if metadata is None else metadata)
    return tensors


def leftovers(folder: Path, *expected: str) -> set[str]:
    """Names in a folder beyond the expected ones."""
    return set(os.listdir(folder)) - set(expected)


def file_of_samples(*names: str) -> tuple[bytes, bytes]:
    """A packed file of small frames by name, all of them if none is named, and its original."""
    metadata = {"format": "np", "note": 'é "\\" \x1b'}
    built = {name: fb.SMALL[name]() for name in names or fb.SMALL}
    frames = {name: bytes(frame) for name, frame in built.items()}
    tensors = {}
    for name, frame in built.items():
        opened = Frame.from_buffer(frames[name])
        tensors[name] = (opened.dtype, opened.shape, frame.source)
    original = fb.original_file(tensors, metadata)
    return fb.build_file(original, frames, metadata=metadata), original


def small_packed_file(folder: Path) -> bytes:
    """A small packed file with frames of several modes, made in a folder."""
    from safetensors.numpy import save_file

    from packhorse.disk import pack_file

    rng = np.random.default_rng(7)
    tensors = {
        "weight": (rng.standard_normal((60, 50)) * 0.02).astype(np.float32),
        "zeros": np.zeros(100, np.float16),
        "none": np.zeros((0, 3), np.int8),
    }
    save_file(tensors, folder / "a", {"format": "np", "note": "é"})
    pack_file(folder / "a", folder / "b")
    return (folder / "b").read_bytes()
