"""Packhorse for Lightning: `Trainer(plugins=[PackhorseCheckpointIO()])` (docs/training.md)."""

from packhorse.integrations.lightning import PackhorseCheckpointIO

__all__ = ["PackhorseCheckpointIO"]
