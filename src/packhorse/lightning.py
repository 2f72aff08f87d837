"""Packhorse for Lightning: `Trainer(plugins=[PackhorseCheckpointIO()])` (docs/training.md)."""

from packhorse.integrations.lightning import (
    PackhorseCheckpointIO,
    PackhorseLoading,
    load_from_checkpoint,
)

__all__ = ["PackhorseCheckpointIO", "PackhorseLoading", "load_from_checkpoint"]
