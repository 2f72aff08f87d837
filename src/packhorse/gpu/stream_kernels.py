"""The source of the kernels in CUDA C++ of `packhorse.kernels.stream_product`, as the compiler takes
it."""

from functools import cache
from pathlib import Path

import packhorse.kernels

__all__ = ["stream_source"]


@cache
def stream_source() -> str:
    """The source of both kernels."""
    folder = Path(packhorse.kernels.__file__).parent
    names = ("stream_common.cu", "stream_tokens.cu", "stream_product.cu")
    return "\n".join((folder / name).read_text() for name in names)
