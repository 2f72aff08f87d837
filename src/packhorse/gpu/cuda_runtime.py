"""The calls of CUDA's runtime that host memory needs, behind an interface that tests can fake.

PyTorch reaches the runtime; without PyTorch or without a GPU there is none. A call that CUDA
refuses raises `RuntimeRefusal`, with CUDA's own words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from packhorse.errors import MissingBackendError
from packhorse.late_import import import_late

__all__ = ["CudaRuntime", "RuntimeRefusal", "node_of_pci", "runtime_of"]

_PORTABLE = 1  # flags of cudaHostRegister: all contexts of the process see the memory,
_MAPPED = 2  # and kernels can read it


class RuntimeRefusal(RuntimeError):
    """CUDA refuses a call."""


class CudaRuntime(Protocol):
    """What host memory asks of CUDA, for one GPU."""

    def register(self, address: int, nbytes: int) -> None:
        """Locks pages in memory and lets the GPU read them at the same address.

        Raises:
            RuntimeRefusal: CUDA cannot.
        """

    def unregister(self, address: int) -> None:
        """Ends what `register` began. No GPU may read the memory any more.

        Raises:
            RuntimeRefusal: CUDA cannot, for example because the program is ending.
        """

    def wait(self, others: Iterable[Any]) -> None:
        """Waits until the GPU, and other CUDA devices of PyTorch, have done all that was launched.

        Raises:
            RuntimeRefusal: CUDA cannot, for example because the program is ending.
        """

    def pinned(self, nbytes: int) -> Any:
        """Memory that CUDA allocates and has locked: a buffer of at least so many bytes.

        Raises:
            RuntimeRefusal: CUDA cannot.
        """

    def node(self) -> int | None:
        """The NUMA node that the GPU is attached to; None if it is unknown or does not matter."""


class _TorchRuntime:
    """The runtime that PyTorch has loaded."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device

    def register(self, address: int, nbytes: int) -> None:
        with self._torch.cuda.device(self._device):
            result = self._torch.cuda.cudart().cudaHostRegister(
                address, nbytes, _PORTABLE | _MAPPED
            )
        self._check(result)

    def wait(self, others: Iterable[Any]) -> None:
        try:
            for device in {self._device, *others}:
                self._torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise RuntimeRefusal(str(error)) from error

    def unregister(self, address: int) -> None:
        self._check(self._torch.cuda.cudart().cudaHostUnregister(address))

    def pinned(self, nbytes: int) -> Any:
        torch = self._torch
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise RuntimeRefusal(str(error)) from error

    def node(self) -> int | None:
        found = self._torch.cuda.get_device_properties(self._device)
        if not hasattr(found, "pci_bus_id"):  # an older PyTorch
            return None
        domain, bus, device = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
        return node_of_pci(f"{domain:04x}:{bus:02x}:{device:02x}.0")

    def _check(self, result: Any) -> None:
        if int(result) != 0:
            words = self._torch.cuda.cudart().cudaGetErrorString(result)
            raise RuntimeRefusal(f"CUDA reports: {words} ({int(result)})")


def node_of_pci(place: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a device on the PCI bus; None if the system does not say.

    Args:
        place: such as "0000:3b:00.0".
        root: where Linux describes devices.
    """
    try:
        node = int((root / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def runtime_of(device: Any = None) -> CudaRuntime | None:
    """The runtime for a GPU.

    Args:
        device: a CUDA device as PyTorch names them; "cpu" for no GPU. None for PyTorch's current
            one, if there is one. PyTorch is not imported for None: a program that has not imported
            it does not use a GPU.

    Returns:
        The runtime; None for no GPU.

    Raises:
        MissingBackendError: a CUDA device is named, and this program cannot use any.
        ValueError: another kind of device is named.
    """
    if device == "cpu" or (device is None and "torch" not in sys.modules):
        return None
    torch = import_late("torch")
    if device is not None and torch.device(device).type == "cpu":
        return None
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"the device is {chosen}; it must be a CUDA device, or cpu")
    if not torch.cuda.is_available() or torch.version.hip:
        if device is None:
            return None
        raise MissingBackendError(
            f"{chosen} cannot be used: PyTorch finds no NVIDIA GPU; device='cpu' needs none"
        )
    if chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return _TorchRuntime(torch, chosen)
