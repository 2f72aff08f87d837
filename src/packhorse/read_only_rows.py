"""Rows of PyTorch that were decoded from something packed, as a copy that cannot be written to.

`plain[start:stop]` is a view, so code may write to it. Rows of something packed have to be decoded,
so they are a copy, and a write to them would be lost. Therefore it is an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["DecodedRows"]

_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_WRITING_OPERATORS = {f"__i{name}__" for name in _OPERATORS.split()}
_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "rename_"}


class DecodedRows(Tensor):
    """A copy of packed rows: a plain tensor, except that writes to the copy, and to views of it,
    are errors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes_to_rows(getattr(func, "__name__", ""), args, kwargs):
            raise RuntimeError(
                "rows taken out of a packed weight or table are a copy, so a write to them would "
                "be lost: write weight[rows] = values, which packs them, or table.update_(ids, "
                "values), or clone() the rows first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            return _guard(result, [each for each in args if isinstance(each, DecodedRows)])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _writes_to_rows(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if isinstance(kwargs.get("out"), DecodedRows):
        return True
    is_method = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if not is_method and name != "__setitem__" and name not in _WRITING_OPERATORS:
        return False
    targets = args[0] if name.startswith("_foreach") else args[:1] or kwargs.values()
    return any(isinstance(target, DecodedRows) for target in targets)


def _guard(result: Any, rows: list[DecodedRows]) -> Any:
    """The result of an operation, read-only as far as it shares the memory of rows."""
    if isinstance(result, (list, tuple)):
        return type(result)([_guard(each, rows) for each in result])
    if type(result) is not Tensor:
        return result
    memory = result.untyped_storage()._cdata
    shares = any(each.untyped_storage()._cdata == memory for each in rows)
    return result.as_subclass(DecodedRows) if shares else result
