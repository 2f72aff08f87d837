"""Embeddings of a model in memory of the host, as the hop to the compute units asks for them.

The hop from the host does the work. Hops do not import each other, so the package registers it
here, and it is imported when a model's embeddings are to go there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "MIN_HOST_NBYTES",
    "EmbeddingHost",
    "HostedRows",
    "embedding_host",
    "register_embedding_host",
]

MIN_HOST_NBYTES = 1 << 16  # of plain rows; less is not worth a way to the host and back


class HostedRows(NamedTuple):
    """The rows of an embedding in memory of the host.

    Attributes:
        shape: rows and columns.
        words: how rows are packed.
        nbytes: bytes that they take.
        element_nbytes: bytes of a plain element.
        dtype: PyTorch's name of their dtype.
    """

    shape: tuple[int, int]
    words: str
    nbytes: int
    element_nbytes: int
    dtype: str


class EmbeddingHost(Protocol):
    """What the hop from the host does with embeddings."""

    def plan(self, weight: Tensor) -> HostedRows:
        """What rows would take, by a sample."""
        ...

    def pack_(self, modules: Mapping[str, nn.Module]) -> HostedRows:
        """Packs the rows that embeddings share, in place, and freezes them; they are given by their
        names in the model."""
        ...

    def save_plain_(self, model: nn.Module) -> None:
        """Has the state dict of a model hold the plain rows of all its embeddings from now on."""
        ...

    def unpack_(self, model: nn.Module) -> None:
        """Gives all embeddings of a model their plain rows back."""
        ...

    def hosted(self, model: nn.Module) -> dict[str, HostedRows]:
        """The rows that are in memory of the host, by the names of their modules."""
        ...


_load: Callable[[], EmbeddingHost] | None = None


def register_embedding_host(load: Callable[[], EmbeddingHost]) -> None:
    """Registers the hop.

    Args:
        load: imports and returns it.
    """
    global _load
    _load = load


def embedding_host() -> EmbeddingHost:
    """The hop."""
    assert _load is not None  # the package registers it
    return _load()
