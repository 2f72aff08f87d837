"""Claims that the target of files and the soak share."""

from typing import Any

import numpy as np

from packhorse.disk.packed_file import PackedSlice

__all__ = ["check_slice"]


def check_slice(piece: PackedSlice, tensor: np.ndarray, index: Any) -> None:
    """Check that a slice equals the tensor at the same index, or that both refuse the index."""
    # A single boolean would become true or false, whatever its byte is.
    data = tensor.view(np.uint8) if tensor.dtype == np.bool_ else tensor
    try:
        part = data[index]
    except IndexError:
        part = None
    try:
        taken = piece[index]
    except IndexError:
        assert part is None, "a slice refuses what the tensor allows"
        return
    assert part is not None, "a slice allows what the tensor refuses"
    assert taken.shape == part.shape
    assert taken.tobytes() == part.tobytes()
