"""Methods that learn from more data than memory holds, on a `packhorse.disk.Shelf`.

`SWAG` samples neural networks from the iterates of their training. It needs PyTorch, which is
imported at first use.
"""

from typing import TYPE_CHECKING, Any

from packhorse.late_import import import_late

if TYPE_CHECKING:
    from packhorse.learn.swag import SWAG

__all__ = ["SWAG"]


def __getattr__(name: str) -> Any:
    if name == "SWAG":
        return import_late("packhorse.learn.swag").SWAG
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
