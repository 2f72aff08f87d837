"""Methods of machine learning for data larger than memory: `GMRA` (docs/gmra.md) and `SWAG`
(docs/posterior.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packhorse.late_import import late_name

if TYPE_CHECKING:
    from packhorse.learn.coding import LeafCodes
    from packhorse.learn.gmra import GMRA
    from packhorse.learn.swag import SWAG

__all__ = ["GMRA", "SWAG", "LeafCodes"]

# Each method needs another package, which is loaded when the method is asked for.
_MODULES = {
    "GMRA": "gmra",
    "LeafCodes": "gmra",
    "SWAG": "swag",
}


def __getattr__(name: str) -> Any:
    return late_name(__name__, _MODULES, name)
