"""Packhorse for PyTorch Geometric: a feature store whose matrices stay packed (docs/host.md)."""

from packhorse.integrations.pyg import PackedFeatureStore

__all__ = ["PackedFeatureStore"]
