"""A checkpoint engine for verl: only changes travel from the trainer to the rollouts.

A module of your own registers it, and `custom_backend_module` of verl's configuration names the
module:

    from packhorse.integrations.weight_updates.verl import register
    register()

    actor_rollout_ref.rollout.checkpoint_engine.backend=packhorse
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=my_module

The keywords of `DeltaCheckpointEngine` go into verl's `engine_kwargs.packhorse`. Written against
verl 0.9.1; no class of verl is a base, so earlier releases fit as far as their calls do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from packhorse.integrations.weight_updates.checkpoint_engine import DeltaEngine
from packhorse.late_import import import_late

__all__ = ["BACKEND", "DeltaCheckpointEngine", "register"]

BACKEND = "packhorse"


class DeltaCheckpointEngine:
    """verl's `CheckpointEngine`, in a trainer or a rollout process.

    Attributes:
        wire_format: what `receive_weights` yields, in verl's terms.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        is_master: bool = False,
        url: str | None = None,
        only_changed: bool = False,
        timeout: float = 300.0,
        options: dict[str, Any] | None = None,
        sender: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            bucket_size: not needed: tensors are yielded one by one.
            is_master: whether this is the trainer's first rank.
            url: where updates travel: `tcp://host:port`, a folder, or a URL that fsspec knows; None
                for a free port of the first rank's machine.
            only_changed: yield only tensors with changes, for a rollout whose loader leaves others
                alone.
            timeout: seconds that a rollout waits for a version.
            options: options for fsspec's file system.
            sender: options of `DeltaSender`.
        """
        self.is_master = is_master
        self._engine = DeltaEngine(
            url=url, bucket_size=bucket_size, only_changed=only_changed, timeout=timeout,
            options=options, sender=sender,
        )  # fmt: skip

    def prepare(self) -> dict[str, Any]:
        """What other processes must know, before each update."""
        return self._engine.open_publisher() if self.is_master else {}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group` for all trainers and for all rollouts."""
        told = {"packhorse": DeltaEngine.find(metadata)}
        return (
            {"metadata": [None] * trainer_world_size},
            {"metadata": [told] * rollout_world_size},
        )

    def init_process_group(self, metadata: Any = None, **more: Any) -> None:
        """Connects a rollout with the trainer."""
        if metadata is not None:
            self._engine.follow([metadata])

    def finalize(self) -> None:
        """Does nothing: the next update starts from what both sides hold."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> None:
        """Packs and publishes the weights; ranks other than the first only iterate them."""
        await self._engine.send(weights)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Any]]:
        """Yields names and tensors of the version that the trainer sends."""
        async for batch in self._engine.receive():
            for pair in batch:
                yield pair

    def close(self) -> None:
        """Closes connections."""
        self._engine.close()


def register() -> None:
    """Adds the engine to verl's registry as "packhorse".

    Raises:
        ImportError: verl is not installed.
    """
    base = import_late("verl.checkpoint_engine")
    base.CheckpointEngineRegistry.register(BACKEND)(DeltaCheckpointEngine)
