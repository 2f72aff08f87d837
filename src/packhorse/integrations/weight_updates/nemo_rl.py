"""A checkpoint engine for NeMo-RL, which takes it by its name:

    backend: packhorse.integrations.weight_updates.nemo_rl:DeltaCheckpointEngine
    engine_kwargs:
      "packhorse.integrations.weight_updates.nemo_rl:DeltaCheckpointEngine":
        url: tcp://10.0.0.1:7777       # of the first policy worker, or a folder that all can reach
        release_after_refit: false     # NeMo-RL reads this one

NeMo-RL tells a worker its rank only after all have said what others must know. So the URL is given,
and its port is not 0. No class of NeMo-RL is a base.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from packhorse.integrations.weight_updates.checkpoint_engine import DeltaEngine

__all__ = ["DeltaCheckpointEngine"]


class DeltaCheckpointEngine:
    """NeMo-RL's `CheckpointEngine`, in a policy or a rollout worker.

    Attributes:
        cleanup_after_load: whether NeMo-RL frees memory after a load.
        shard_expert_weights: whether rollouts get parts of experts; they do not.
    """

    cleanup_after_load = True
    shard_expert_weights = False

    def __init__(
        self,
        bucket_size: int,
        *,
        url: str,
        only_changed: bool = False,
        timeout: float = 300.0,
        options: dict[str, Any] | None = None,
        sender: dict[str, Any] | None = None,
        release_after_refit: bool = False,
        **more: Any,
    ) -> None:
        """
        Args:
            bucket_size: the most bytes of tensors in a batch, unless one is larger.
            url: where updates travel: `tcp://host:port` of the first policy worker, a folder, or a
                URL that fsspec knows.
            only_changed: yield only tensors with changes, for an engine whose loader leaves others
                alone.
            timeout: seconds that a rollout waits for a version.
            options: options for fsspec's file system.
            sender: options of `DeltaSender`.
            release_after_refit: must be False, because the next update starts from this one.
            more: other keywords of NeMo-RL, which are ignored.

        Raises:
            ValueError: `release_after_refit` is True.
        """
        if release_after_refit:
            raise ValueError(
                "release_after_refit is set; differences need what was sent before, so unset it"
            )
        self._engine = DeltaEngine(
            url=url, bucket_size=bucket_size, only_changed=only_changed, timeout=timeout,
            options=options, sender=sender,
        )  # fmt: skip
        self._url = url

    def prepare(self) -> dict[str, Any]:
        """What other workers must know; only what the first policy worker says is used."""
        return self._engine.told(self._url)

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Lets the first policy worker serve updates."""
        if worker_rank == 0:
            self._engine.open_publisher()

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Any],
    ) -> None:
        """Connects a rollout worker with the first policy worker."""
        self._engine.follow(metadata[:train_world_size])

    def finalize(self) -> None:
        """Does nothing: the next update starts from what both sides hold."""

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Packs and publishes the weights; policy workers other than the first only iterate
        them."""
        await self._engine.send(weights)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, Any]]]:
        """Yields the tensors of the next version in batches."""
        async for batch in self._engine.receive():
            yield batch

    def close(self) -> None:
        """Closes connections."""
        self._engine.close()
