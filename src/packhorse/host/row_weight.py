"""`RowWeight`: what a packed embedding shows as its weight, which is nowhere as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from packhorse.host.table_tensor import TableTensor
from packhorse.read_only_rows import DecodedRows

if TYPE_CHECKING:
    from packhorse.host.packed_module import PackedModule

__all__ = ["RowWeight", "apart"]

_aten = torch.ops.aten
# Those that a `TableTensor` answers with itself, because it is never written to.
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten._pin_memory.default)


class RowWeight(TableTensor):
    """A tensor with the shape, dtype and device of a module's matrix, and without elements.

    Models ask a weight for its dtype or device, freeze it, and take rows out of it: by
    `torch.nn.functional.embedding`, `index_select`, `weight[ids]`, `weight[3:9]`. Every other
    operation would need the whole matrix, and is an error.

    Args:
        module: the embedding.
    """

    module: PackedModule

    @staticmethod
    def __new__(cls, module: PackedModule) -> RowWeight:
        made: RowWeight = Tensor._make_wrapper_subclass(
            cls, module.table.shape, dtype=module.dtype, device=module.device
        )
        made.module, made.table = module, module.table
        return made

    @property
    def requires_grad(self) -> bool:
        """Whether the rows are trained."""
        return self.module.trains

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.module.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> RowWeight:
        """Says whether the rows are trained."""
        self.module.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """The sparse gradient that the module keeps."""
        return self.module.gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.module.gradient = value

    @property
    def data(self) -> Tensor:
        """This tensor itself; it cannot be set."""
        return self

    @data.setter
    def data(self, value: Any) -> NoReturn:
        self._refuse("weight.data = ...")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("a copy of the weight")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("a pickle of the weight")

    def _take(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        rows = self.module.fetch_untrained(ids)
        return rows if out is None else out.copy_(rows)

    def _again(self) -> RowWeight:
        return self

    def _refuse(self, what: str) -> NoReturn:
        name = self.module.name_in_model
        remedy = "unpack_embedding_ makes it plain"
        if name:
            remedy = (
                f"to leave it plain, give pack_model_ skip={name!r}, or PackhorseConfig"
                f" modules_to_not_convert=[{name!r}]"
            )
        raise TypeError(
            f"{what} needs the whole matrix of {name or type(self.module).__name__}, whose rows are"
            f" packed in memory of the host: {remedy}; or take rows, by a call of the module or"
            " weight[ids]. update_ changes rows, load_state_dict all of them, and unpacked() gives"
            " a plain matrix"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return apart(_run_apart)(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES:
            args[0]._refuse(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowWeight({self.shape[0]} x {self.shape[1]}, {self.dtype}, {self.device})"


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a compiled model calls as it is: what the host does cannot be traced.

    Args:
        function: any.
    """
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _run_apart(func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An operation for a compiled model, which gets plain rows."""
    found = TableTensor.__torch_function__(func, types, args, kwargs)
    return found.as_subclass(Tensor) if type(found) is DecodedRows else found
