"""What the checkpoint engines of verl and NeMo-RL have in common.

Both frameworks make an engine in every process, let one trainer rank send names and tensors, and
load what the engines of the rollout processes yield. Here the trainer's first rank packs and
publishes updates, and each rollout process keeps a mirror.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from packhorse.integrations.weight_updates.links import (
    Follower,
    Publisher,
    open_publisher,
    this_host,
)
from packhorse.integrations.weight_updates.mirror import Mirror, Trainer

__all__ = ["DeltaEngine"]

_KEY = "packhorse"
_MAX_BATCH_NBYTES = 512 << 20


class DeltaEngine:
    """One process's side of the updates."""

    def __init__(
        self,
        *,
        url: str | None,
        bucket_size: int,
        only_changed: bool,
        timeout: float,
        options: dict[str, Any] | None,
        sender: dict[str, Any] | None,
    ) -> None:
        """
        Args:
            url: where updates travel; None for a free port of the trainer's machine.
            bucket_size: the most bytes of tensors that are yielded at once, unless one is larger.
            only_changed: whether only tensors with changes are yielded. That needs an engine whose
                loader leaves other weights alone.
            timeout: seconds to wait for a version.
            options: options for fsspec's file system.
            sender: options of `DeltaSender`.
        """
        self._url = url
        self._bucket_size = bucket_size or _MAX_BATCH_NBYTES
        self._only_changed = only_changed
        self._timeout = timeout
        self._options = options
        self._trainer = Trainer(**(sender or {}))
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None
        self._mirror = Mirror()
        self._is_loaded = False  # whether the engine took all that the mirror has
        self.next_version = 1
        self._stream = b""

    def open_publisher(self) -> dict[str, Any]:
        """Opens the trainer's side at the first call; returns what the others must know."""
        if self._publisher is None:
            url = self._url or f"tcp://{this_host()}:0"
            self._publisher, self._url = open_publisher(url, self._options)
        return self.told(self._url)

    def told(self, url: str | None) -> dict[str, Any]:
        """What a rollout must know of this process, if it sends."""
        version, stream = self._trainer.next_version, self._trainer.stream_id.hex()
        return {_KEY: {"url": url, "version": version, "stream": stream}}

    def follow(self, metadata: Sequence[Any]) -> None:
        """Opens a rollout's side, from what the engines of all processes returned.

        Raises:
            ValueError: no trainer is among them.
        """
        told = self.find(metadata)
        self.next_version, self._stream = int(told["version"]), bytes.fromhex(told["stream"])
        if self._follower is None or told["url"] != self._url:
            self.close()
            self._url = told["url"]
            self._follower = Follower(told["url"], timeout=self._timeout, options=self._options)

    @staticmethod
    def find(metadata: Sequence[Any]) -> dict[str, Any]:
        """What the trainer's engine has told.

        Raises:
            ValueError: there is none.
        """
        for each in metadata:
            if isinstance(each, dict) and isinstance(each.get(_KEY), dict):
                return dict(each[_KEY])
        raise ValueError("no trainer has told where updates come from; is its backend another one?")

    async def send(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Packs and publishes names and tensors; a process that does not send iterates only."""
        if self._publisher is None:
            for _ in weights:
                pass
            return
        update = self._trainer.pack(weights)
        await asyncio.to_thread(self._publisher.publish, update)

    async def receive(self) -> AsyncIterator[list[tuple[str, Any]]]:
        """Waits for the next version, and yields its tensors in batches.

        Raises:
            ValueError: `follow` was not called.
            PackhorseError: as `DeltaReceiver.stage`. Nothing was yielded.
        """
        if self._follower is None:
            raise ValueError("the engine was not connected to a trainer")
        version, names = self.next_version, None
        if not self._mirror.holds(self._stream, version):
            staged = await asyncio.to_thread(
                self._follower.stage, self._mirror.receiver, self._stream, version
            )
            changed = self._mirror.commit(staged)
            names = changed if self._only_changed and self._is_loaded else None
        self._is_loaded = False
        for batch in self._batches(names):
            yield batch
        self._is_loaded = True
        self.next_version = version + 1

    def _batches(self, names: list[str] | None) -> Iterable[list[tuple[str, Any]]]:
        batch: list[tuple[str, Any]] = []
        nbytes = 0
        for name, tensor in self._mirror.tensors(names):
            if batch and nbytes + tensor.nbytes > self._bucket_size:
                yield batch
                batch, nbytes = [], 0
            batch.append((name, tensor))
            nbytes += tensor.nbytes
        if batch:
            yield batch

    def close(self) -> None:
        """Closes connections."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        close = getattr(self._publisher, "close", None)
        if close is not None:
            close()
        self._publisher = None
