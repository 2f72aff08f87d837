"""Rows for the tests of packed tables in host memory."""

import numpy as np
import torch
from table_samples import named_tables

from packhorse.codecs.table_plan import TableWay

__all__ = ["bf16_rows", "equal_bits", "ways_of_all_modes"]


def bf16_rows(n_rows: int = 500, n_columns: int = 384) -> torch.Tensor:
    """Rows like those of embeddings."""
    generator = torch.Generator().manual_seed(3)
    return (0.05 * torch.randn(n_rows, n_columns, generator=generator)).to(torch.bfloat16)


def ways_of_all_modes() -> list[tuple[np.ndarray, TableWay]]:
    found = []
    for rows, format in named_tables(50, 41).values():
        dtype = {8: np.uint8, 16: np.uint16, 32: np.float32, 64: np.int64}[format.element_bits]
        found.append((rows.view(dtype), TableWay(format, "chosen by hand", {}, 0.0, 0.0)))
    return found


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
