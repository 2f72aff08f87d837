"""Where each id of a batch finds its row, in a small matrix of the rows that the batch needs."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Places", "require_integers"]


def require_integers(ids: Tensor, what: str = "ids") -> None:
    """Refuses what is no tensor of integers.

    Args:
        ids: anything.
        what: what it is called.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} must be a tensor of integers, not {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{what} must be integers, not {ids.dtype}")


class Places:
    """The rows that a batch of ids needs, and where each id finds its own.

    Attributes:
        numbers: int64, (n,): rows of the table. With a padding index, its row is among them:
            PyTorch's function sums in another way if there is one.
        places: int64, of the shape of the ids: rows of the small matrix.
        padding: the place of the row `padding_idx`; None if there is no such index.

    Raises:
        TypeError: ids are not integers.
    """

    def __init__(self, ids: Tensor, padding_idx: int | None, *, distinct: bool) -> None:
        require_integers(ids)
        flat = ids.reshape(-1).long()
        n = len(flat)
        numbers = flat if padding_idx is None else F.pad(flat, (0, 1), value=padding_idx)
        if distinct:
            self.numbers, places = torch.unique(numbers, return_inverse=True)
        else:
            self.numbers, places = numbers, torch.arange(len(numbers), device=flat.device)
            if padding_idx is not None:
                places[:n].masked_fill_(flat == padding_idx, n)
        self.padding = None if padding_idx is None else int(places[n])
        self.places = places[:n].reshape(ids.shape)
