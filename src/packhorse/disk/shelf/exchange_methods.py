"""All that exchanges tensors of shelves with other formats, block by block."""

from __future__ import annotations

from packhorse.disk.shelf.exchange import Planned
from packhorse.disk.shelf.exchange_npy import NpyExport, NpyImport
from packhorse.disk.shelf.exchange_safetensors import SafetensorsExport, SafetensorsImport
from packhorse.disk.shelf.exchange_zarr import ZarrExport, ZarrImport

__all__ = ["Exports", "ImportPlan", "Imports"]


class Exports(ZarrExport, NpyExport, SafetensorsExport):
    """The exports of a shelf, and of its state at a tag. Output is complete or absent."""


class Imports(ZarrImport, NpyImport, SafetensorsImport):
    """The imports of a shelf: in one transaction, or one for each tensor."""


class ImportPlan(Planned, Imports):
    """Takes the place of the shelf in an import, to find out what would be imported: only headers
    are read, and nothing is written."""
