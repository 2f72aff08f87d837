"""Methods of machine learning for data larger than memory: `GMRA` (docs/gmra.md) and `SWAG`
(docs/posterior.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packhorse.late_import import import_late

if TYPE_CHECKING:
    from packhorse.learn.coding import LeafCodes
    from packhorse.learn.gmra import GMRA
    from packhorse.learn.swag import SWAG

__all__ = ["GMRA", "SWAG", "LeafCodes"]

# Each method needs another package, which is loaded when the method is asked for.
_MODULES = {
    "GMRA": "packhorse.learn.gmra",
    "LeafCodes": "packhorse.learn.gmra",
    "SWAG": "packhorse.learn.swag",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_late(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
