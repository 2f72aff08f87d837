"""`ShelfDataset`: tensors of a shelf as a dataset of PyTorch.

A loader asks for a whole batch at once (`__getitems__`), and the shelf reads its rows in ascending
order, each chunk once. Workers of a loader need nothing special: those that are forked go on to
read what was open, and those that are spawned open the shelf again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from packhorse.disk.shelf.tensor import ShelfTensor
from packhorse.errors import MissingBackendError
from packhorse.framework import framework_of

try:
    import torch
    from torch.utils.data import Dataset, default_collate
except ModuleNotFoundError as error:
    raise MissingBackendError(
        "ShelfDataset needs PyTorch; install it with: pip install 'packhorse[torch]'"
    ) from error

__all__ = ["ShelfDataset"]


class ShelfDataset(Dataset[Any]):
    """Rows of one tensor, or the rows at the same place of several, such as inputs and labels.

    A sample is a row as a tensor of PyTorch; of several tensors, it is a tuple of rows. Rows are
    copies, so a sample may be written to. The dataset has as many samples as its tensors have rows
    at the moment.

    Attributes:
        tensors: the tensors.
        transform: is applied to each sample; None for nothing.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from torch.utils.data import DataLoader
        >>> from packhorse.disk import Shelf, ShelfDataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Shelf(f"{folder.name}/data.shelf") as shelf:
        ...     shelf["x"], shelf["y"] = np.ones((10, 3), np.float32), np.arange(10)
        ...     data = ShelfDataset(shelf["x"], shelf["y"])
        ...     for x, y in DataLoader(data, batch_size=5):
        ...         print(tuple(x.shape), y.tolist())
        (5, 3) [0, 1, 2, 3, 4]
        (5, 3) [5, 6, 7, 8, 9]
    """

    def __init__(self, *tensors: Any, transform: Callable[[Any], Any] | None = None) -> None:
        """Nothing is read before a sample is asked for.

        Args:
            tensors: tensors of shelves, all with as many rows; tensors in memory may be among them.
            transform: takes a sample and returns another one. For loaders whose workers are spawned
                it must be possible to pickle it.

        Raises:
            TypeError: there is no tensor, or one has no rows.
            ValueError: the tensors have different numbers of rows.
        """
        if not tensors:
            raise TypeError("a dataset needs a tensor of a shelf: ShelfDataset(shelf['x'])")
        self.tensors = tuple(_of_torch(tensor) for tensor in tensors)
        self.transform = transform
        n_rows = [len(tensor) for tensor in self.tensors]
        if len(set(n_rows)) > 1:
            raise ValueError(f"the tensors have {n_rows} rows; they must have the same number")

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> Any:
        """A sample, or a batch of samples in the order of a slice, a list or an array of numbers.

        Raises:
            IndexError: there is no such sample.
        """
        is_one = not isinstance(index, slice | Sequence) and getattr(index, "ndim", 0) == 0
        if is_one:
            index = operator.index(index)
        elif self.transform is not None:
            return default_collate(self.__getitems__(_listed(index, len(self))))
        rows = self._read(index)
        sample = rows if len(rows) > 1 else rows[0]
        return self.transform(sample) if is_one and self.transform is not None else sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples, read together; loaders of PyTorch call this.

        Raises:
            IndexError: there is no such sample.
        """
        columns = [rows.unbind() for rows in self._read(indices)]
        samples = columns[0] if len(columns) == 1 else zip(*columns, strict=True)
        return [sample if self.transform is None else self.transform(sample) for sample in samples]

    def _read(self, index: Any) -> tuple[Any, ...]:
        """Rows of all tensors, of one state of a shelf."""
        with ExitStack() as stack:
            for tensor in self.tensors:
                if isinstance(tensor, ShelfTensor):
                    stack.enter_context(tensor.reading())
            return tuple(tensor[index] for tensor in self.tensors)


def _of_torch(tensor: Any) -> Any:
    """A tensor whose rows are tensors of PyTorch."""
    if isinstance(tensor, ShelfTensor):
        tensor = tensor.as_framework("pt")
    elif framework_of(tensor) is not None:
        tensor = torch.as_tensor(tensor)
    else:
        raise TypeError(f"a tensor of a shelf is needed, not {type(tensor).__name__}")
    if not tensor.shape:
        raise TypeError("a tensor without axes has no rows, and cannot be a dataset")
    return tensor


def _listed(index: Any, n_rows: int) -> list[int]:
    """The numbers of samples that an index selects, in order."""
    found: list[int] = np.arange(n_rows)[index].tolist()
    return found
