"""`RowWeight`: what a packed embedding shows as its weight, which is nowhere as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowWeight"]

_ATEN = torch.ops.aten


class RowWeight(Tensor):
    """A tensor with the shape, dtype and device of a matrix, and without elements.

    Models ask a weight for its dtype or device. `torch.nn.functional.embedding` looks up rows.
    Every other operation would need the whole matrix, and is an error.

    Args:
        shape: of the matrix.
        dtype: of the matrix.
        device: where rows come out.
        fetch: called with ids; returns their rows.
    """

    fetch: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        fetch: Callable[[Tensor], Tensor],
    ) -> RowWeight:
        made: RowWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.fetch = fetch
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return args[0]
        if func is _ATEN.embedding.default and isinstance(args[0], RowWeight):
            return args[0].fetch(args[1])
        raise TypeError(
            f"{func} needs the whole matrix, which is packed in memory of the host: call the"
            " module, or unpacked() for the plain matrix, or update_ to change rows"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowWeight({self.shape[0]} x {self.shape[1]}, {self.dtype}, {self.device})"
