"""Data sets whose items are packed, for the workers of a data loader.

They have a module of their own, because a spawned worker imports what it needs by name.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

import packhorse
from packhorse import torch as ph_torch
from packhorse.disk import PackedFile, SnapshotStore

__all__ = ["OpenRows", "PackedRows", "PackedTensors"]


class PackedRows(Dataset):
    """Keeps its items packed in memory, and unpacks one at each access."""

    def __init__(self, n_items: int) -> None:
        self.frames = [
            ph_torch.compress(torch.full((50, 40), i, dtype=torch.bfloat16)).to_bytes()
            for i in range(n_items)
        ]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int) -> torch.Tensor:
        return ph_torch.decompress(self.frames[i], threads=2)


class PackedTensors(Dataset):
    """Reads its items from a packed file, which each process opens once."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.names = names
        self.file: PackedFile | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.file is None:
            self.file = packhorse.open_file(self.path, framework="pt", threads=2)
        return self.file.get_slice(self.names[i])[10:20]


class OpenRows(Dataset):
    """Reads its items from a file that is already open, from a slice of it, and from a store."""

    def __init__(self, file: PackedFile, name: str, store: SnapshotStore) -> None:
        self.file = file
        self.slice = file.get_slice(name)
        self.store = store

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 2:
            return self.store.restore(self.store.names()[0], framework="pt")["rows"][:2]
        source = self.slice if i else self.file.get_tensor(self.file.keys()[0])
        return source[:2]
