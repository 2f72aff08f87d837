"""Packhorse for numcodecs, and so for zarr's format 2: the codec `packhorse` (docs/arrays.md)."""

from packhorse.integrations.numcodecs import Packhorse

__all__ = ["Packhorse"]
