"""Tensors that live on disk: `Shelf` and `ShelfTensor` (docs/shelf.md).

`shelf` and `tensor` are what users call, with `elements` and `indexing` for NumPy's indices, and
`values` for what goes in and out. `session` knows which state a thread sees. `changes` holds what
a transaction has changed, in `slots`, beside the `committed` state; `commits` writes it. `rows`
reads and writes rows through the chunks of `grid`, which `chunks` packs and keeps in memory;
`blocks` reads ahead. `versions` finds the records of a state, `records` has their bytes, `store` is
the folder with its one writer, and `engine` is LMDB, which `environment` opens. `upkeep` verifies
and compacts. `exchange` and its modules read and write other formats, and `dataset` is for loaders
of PyTorch.
"""

from packhorse.disk.shelf.results import (
    ReaderInfo,
    ShelfInfo,
    ShelfProblem,
    TagInfo,
    TensorInfo,
)
from packhorse.disk.shelf.shelf import Shelf, ShelfView
from packhorse.disk.shelf.tensor import ShelfTensor

__all__ = [
    "ReaderInfo",
    "Shelf",
    "ShelfInfo",
    "ShelfProblem",
    "ShelfTensor",
    "ShelfView",
    "TagInfo",
    "TensorInfo",
]
