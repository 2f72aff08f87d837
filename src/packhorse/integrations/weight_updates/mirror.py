"""A trainer's weights on the host, under their names in the checkpoint, beside an engine that has
them in another form.

Engines join, split, pad and quantise weights, so a difference cannot be applied to theirs. They can
load named tensors. A mirror holds the weights as the trainer names them, applies updates to them,
and hands tensors to the engine's own loader. It costs a copy of the weights in host memory for each
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from packhorse.late_import import import_late
from packhorse.wire.updates import DeltaReceiver, DeltaSender, StagedUpdate, Update

__all__ = ["Mirror", "Trainer"]


class Mirror:
    """The weights as the trainer names them.

    Attributes:
        receiver: what applies updates to them.
    """

    def __init__(self, *, threads: int | None = None) -> None:
        """
        Args:
            threads: the number of threads; None for one per core, at most 8.
        """
        self.receiver = DeltaReceiver(framework="pt", threads=threads)

    def holds(self, stream: bytes, version: int) -> bool:
        """Whether this version of a stream is held."""
        return (self.receiver.stream_id, self.receiver.version) == (stream, version)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Names and tensors in host memory, which are valid until the next `commit`.

        Args:
            names: those that are wanted; None for all.
        """
        state = self.receiver.state
        for name in state if names is None else names:
            yield name, state[name]

    def commit(self, staged: StagedUpdate) -> list[str]:
        """Applies an update; returns the names of the tensors that it may have changed, with those
        that the trainer ties to them."""
        self.receiver.commit(staged)
        changed = set(staged.names)
        ties = staged.binding.contents.aliases.items()
        return sorted(changed | {alias for alias, name in ties if name in changed})


class Trainer:
    """The sending side: makes a sender of the first weights that it is given.

    Attributes:
        stream_id: 16 bytes that all its updates share.
    """

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: of `DeltaSender`.
        """
        self.stream_id = os.urandom(16)
        self._options = {**options, "stream_id": self.stream_id}
        self._sender: DeltaSender | None = None

    @property
    def next_version(self) -> int:
        """The version that the next `pack` leads to."""
        return 1 if self._sender is None else self._sender.version + 1

    def pack(self, weights: Iterable[tuple[str, Any]]) -> Update:
        """Packs the next version.

        Args:
            weights: names and tensors, on any device. Each tensor may be overwritten when the next
                is asked for, so it is copied to host memory.

        Raises:
            PackhorseError, TypeError, ValueError: as `DeltaSender.pack`.
        """
        torch = import_late("torch")
        state = {
            name: tensor.detach().to(torch.device("cpu"), copy=True) for name, tensor in weights
        }
        if self._sender is None:
            self._sender = DeltaSender(state, **self._options)
        return self._sender.pack(state)
