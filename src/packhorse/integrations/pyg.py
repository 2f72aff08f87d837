"""Packhorse for PyTorch Geometric: features of graphs that stay packed in memory of the host.

`Data(x=table.as_tensor())` needs nothing from here: loaders take rows out of it as out of any
tensor. `PackedFeatureStore` is for loaders that take a feature store and a graph store. Its rows
are gathered where the loader runs `filter_fn`: in the workers, where they are written to the memory
that workers share with the main process; or in the main process with `filter_per_worker=False`,
which a GPU needs, because a forked worker cannot use CUDA.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.errors import MissingBackendError
from packhorse.host import PackedTable, TableTensor, pack_table
from packhorse.host.table_tensor import numbers_at

try:
    from torch_geometric.data import FeatureStore, TensorAttr
    from torch_geometric.loader.utils import index_select
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "packhorse.pyg needs PyTorch Geometric; install it with: pip install 'packhorse[pyg]'"
    ) from error

__all__ = ["PackedFeatureStore"]

_ALL = slice(None)


class PackedFeatureStore(FeatureStore):  # type: ignore[misc]
    """A feature store of PyTorch Geometric that keeps matrices packed, without loss.

    What is put there without an index becomes a tensor of the store: a matrix of NumPy (also a
    memmap) or PyTorch, a slice of a file or a tensor of a shelf is packed, a `PackedTable` or its
    tensor is taken as it is, and an array with another number of dimensions, such as one of labels,
    is kept plain. With an index, rows are replaced. To get a tensor without an index gives the
    packed one, whose rows can be taken; with an index it gives rows, bit for bit.

    Args:
        device: where rows are wanted: "cpu" or a CUDA device. For the latter, give loaders
            `filter_per_worker=False`.
        shared: as for `pack_table`: whether workers that are spawned share what is packed here.
        tensor_attr_cls: another class of attributes, as for `FeatureStore`.

    Example:
        >>> import torch
        >>> from packhorse.pyg import PackedFeatureStore
        >>> store = PackedFeatureStore()
        >>> store["paper", "x", None] = torch.eye(100)
        >>> store["paper", "x", torch.tensor([7, 2])].argmax(1)
        tensor([7, 2])
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        shared: bool = False,
        tensor_attr_cls: type[Any] | None = None,
    ) -> None:
        super().__init__(tensor_attr_cls)
        self._device, self._shared = torch.device(device), shared
        self._held: dict[tuple[Any, Any], Tensor] = {}

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        key = attr.group_name, attr.attr_name
        if attr.index is None or _is_all(attr.index):
            self._held[key] = self._keep(tensor)
        elif key in self._held:
            self._held[key] = _replace(self._held[key], attr.index, tensor)
        else:
            self._held[key] = self._keep(_in_order(tensor, attr))
        return True

    def _keep(self, tensor: Any) -> Tensor:
        if isinstance(tensor, np.ndarray | Tensor) and tensor.ndim != 2:
            return torch.as_tensor(tensor)
        if isinstance(tensor, TableTensor):
            tensor = tensor.table
        if not isinstance(tensor, PackedTable):
            tensor = pack_table(tensor, device=self._device, shared=self._shared)
        packed: Tensor = tensor.as_tensor(self._device)
        return packed

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replaces a tensor, or the rows that the attributes name; the same as `put_tensor`.

        Args:
            tensor: the new rows; they are only read.
            *args: as for `TensorAttr`.
            **kwargs: as for `TensorAttr`.

        Returns:
            True.
        """
        return bool(self.put_tensor(tensor, *args, **kwargs))

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: Sequence[TensorAttr]) -> list[Tensor]:
        if self._device.type != "cpu" and torch.utils.data.get_worker_info() is not None:
            raise RuntimeError(
                f"a worker of a loader cannot gather rows on {self._device}: give the loader "
                "filter_per_worker=False"
            )
        return [self._rows(attr) for attr in attrs]

    def _rows(self, attr: TensorAttr) -> Tensor:
        held, index = self._find(attr), attr.index
        if index is None or _is_all(index):
            return held
        if not isinstance(index, Tensor) or index.dtype == torch.bool or index.dim() != 1:
            return held[index].to(self._device)
        if not isinstance(held, TableTensor):  # which checks ids where they are
            index = index.to(held.device)
        # PyTorch Geometric's own function has workers write to memory that they share.
        rows: Tensor = index_select(held, index)
        return rows.to(self._device)

    def _find(self, attr: TensorAttr) -> Tensor:
        held = self._held.get((attr.group_name, attr.attr_name))
        if held is None:
            there = ", ".join(f"{name!r} of {group!r}" for group, name in self._held) or "nothing"
            raise KeyError(
                f"there is no tensor {attr.attr_name!r} of {attr.group_name!r} in the store, but "
                f"{there}"
            )
        return held

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._held.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        if (attr.group_name, attr.attr_name) not in self._held:
            return None
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """The attributes of all tensors, without an index."""
        return [
            self._tensor_attr_cls(group_name=group, attr_name=name) for group, name in self._held
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors take."""
        return sum(
            held.packed_nbytes if isinstance(held, TableTensor) else held.nbytes
            for held in self._held.values()
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._held)} tensors, {self.nbytes:,} bytes)"


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == _ALL


def _replace(held: Tensor, index: Any, rows: Any) -> Tensor:
    """What is held with other rows: the table itself, or a copy of a plain tensor, which may be the
    caller's."""
    ids = numbers_at(index, len(held)).reshape(-1)
    if isinstance(held, TableTensor):
        one = isinstance(rows, np.ndarray | Tensor) and rows.ndim == 1
        held.table.update_(ids, rows[None] if one else rows)
        return held
    held = held.clone()
    held[ids] = torch.as_tensor(rows)
    return held


def _in_order(tensor: Any, attr: TensorAttr) -> Any:
    """Rows by number, if the index names each of them once."""
    ids = torch.as_tensor(attr.index) if isinstance(attr.index, np.ndarray | Tensor) else None
    n = len(tensor)
    if (
        ids is None
        or ids.shape != (n,)
        or not torch.equal(ids.sort()[0], torch.arange(n, device="cpu"))
    ):
        raise ValueError(
            f"{attr.attr_name!r} of {attr.group_name!r} is not in the store, so there are no rows "
            "to replace: put all rows first, with index=None"
        )
    return tensor[ids.argsort()]
