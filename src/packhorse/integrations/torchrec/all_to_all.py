"""torchrec's all-to-all of pooled embeddings through `packhorse.wire.Collectives`: without loss.

Values in, values out, so messages may have any length. torchrec 1.8 has an interface for this,
`All2AllSingle`, but no argument that reaches it: `packed_all_to_all` puts ours in the place of the
default one for a while. It serves the forward pass alone, since torchrec's backward pass calls
PyTorch directly. A transfer has ended when the call returns, also if torchrec asks for one in
the background: other collectives of torchrec on the group could else overtake it on some ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from packhorse.integrations.torchrec.backend import comm_ops
from packhorse.wire import Collectives
from packhorse.wire.backend import dist, torch

__all__ = ["PackedAll2AllSingle", "packed_all_to_all"]


class PackedAll2AllSingle(comm_ops.All2AllSingle):  # type: ignore[misc]
    """An `All2AllSingle` of torchrec that packs what it sends, where that is faster.

    Args:
        collectives: over the process group of the embeddings. Its `explain()` says what was sent.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As torchrec's."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """As torchrec's.

        Raises:
            ValueError: the group is another one than that of the collectives.
        """
        found = dist.group.WORLD if group is None else group
        if found != self._collectives.group:
            raise ValueError("embeddings use another process group than these collectives")
        self._collectives.all_to_all_single(
            output_tensor, input_tensor, output_split_sizes, input_split_sizes,
            label="pooled embeddings",
        )  # fmt: skip
        return _Done() if async_op else None


class _Done:
    """The work of a transfer that has ended."""

    def wait(self) -> bool:
        """Nothing is left to wait for."""
        return True


@contextmanager
def packed_all_to_all(collectives: Collectives) -> Iterator[None]:
    """Makes torchrec's forward all-to-all run through `collectives` in the block.

    Args:
        collectives: over the process group of the embeddings.

    Yields:
        Nothing; forward passes in the block are packed.

    Example:
        >>> from packhorse.torchrec import packed_all_to_all
        >>> from packhorse.wire import Collectives
        >>> def train(model, batches):
        ...     with packed_all_to_all(Collectives()):
        ...         for batch in batches:
        ...             model(batch).sum().backward()
    """
    default = comm_ops.DefaultAll2AllSingle
    comm_ops.DefaultAll2AllSingle = lambda: PackedAll2AllSingle(collectives)
    try:
        yield
    finally:
        comm_ops.DefaultAll2AllSingle = default
