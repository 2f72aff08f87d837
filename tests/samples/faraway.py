"""A device whose memory the host cannot read, like a GPU's. It implements PyTorch's key for other
backends in Python. It is registered for the whole process, so tests use it in a separate
process."""

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["Far"]

_setup_privateuseone_for_python_backend("faraway")
_LIBRARY = torch.library.Library("aten", "IMPL")


class Far(torch.Tensor):
    """A tensor on the device `faraway`; `host` holds its data."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "Far":
        made = torch._C._acc.create_empty_tensor(tuple(host.shape), host.dtype)
        made.__class__ = cls
        made.host = host
        return made  # type: ignore[no-any-return]


def _copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
    data = source.host if isinstance(source, Far) else source
    (target.host if isinstance(target, Far) else target).copy_(data)
    return target


def _to_copy(source: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    data = source.host if isinstance(source, Far) else source
    data = data.to(dtype=dtype or data.dtype, copy=True)
    is_host = device is not None and torch.device(device).type == "cpu"
    return data if is_host else Far(data)


def _implement(name: str) -> None:
    packet, _, overload = name.partition(".")
    on_host = getattr(getattr(torch.ops.aten, packet), overload or "default")
    _LIBRARY.impl(name, lambda t, *a, **k: Far(on_host(t.host, *a, **k)), "PrivateUse1")


_LIBRARY.impl("_copy_from", _copy, "PrivateUse1")
_LIBRARY.impl("_to_copy", _to_copy, "PrivateUse1")
for operator in ("detach", "alias", "as_strided", "slice.Tensor", "select.int", "view"):
    _implement(operator)
