"""The planes of a packed weight in host memory, and how products on a GPU get them.

The planes, `low_bytes` and `high_bits`, lie one after the other in memory that the GPU reads at the
host's address. The small arrays lie in device memory. Planes reach a product in one of two ways:

- *Views.* Kernels read the planes where they are. With few tokens, a product reads each byte once,
  so it takes about as long as a copy would, and needs no memory of the device.
- *The ring.* The copy engine brings the planes to one of two buffers, while the product of the
  layer before runs. With more tokens, kernels read weights more than once, or take longer than
  the copy.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from packhorse.arguments import resolve_threads
from packhorse.gpu.copy_ring import CopyRing
from packhorse.gpu.cuda_runtime import CudaRuntime
from packhorse.gpu.host_memory import MemoryKind, host_memory
from packhorse.kernels.arrays import WeightTensors

__all__ = ["VIEW_TOKENS", "HostPlanes", "planes_nbytes"]

VIEW_TOKENS = 16  # the default crossover between the two ways; an estimate
_ALIGNMENT = 256  # bytes; of both planes, in host memory and in the ring


def planes_nbytes(arrays: WeightTensors) -> int:
    """Bytes of host memory that the planes of a weight take."""
    return _aligned(arrays.low_bytes.numel()) + arrays.high_bits.numel()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostPlanes:
    """The planes of one packed weight.

    Attributes:
        stored: their bytes: u8, one dimension, in host memory.
        name: of the weight.
        kind: what the GPU can do with this memory.
    """

    def __init__(
        self,
        arrays: WeightTensors,
        device: torch.device,
        ring: CopyRing | None = None,
        view_tokens: int = VIEW_TOKENS,
        *,
        name: str = "a packed weight",
        runtime: CudaRuntime | None = None,
    ) -> None:
        """Copies the planes to host memory.

        Args:
            arrays: of a packed weight that has rows, on any device.
            device: the CUDA device that reads the planes; "cpu" for none.
            ring: has room for the planes; None if all products use views.
            view_tokens: products with at most so many tokens use views.
            name: of the weight, for messages.
            runtime: how to reach CUDA; for tests.

        Raises:
            MemoryError: there is not so much host memory.
            MissingBackendError: PyTorch finds no such GPU.
            ValueError: the GPU cannot be made to read the memory.
        """
        nbytes, threads = planes_nbytes(arrays), resolve_threads(None)
        memory = host_memory(nbytes, device=device, threads=threads, runtime=runtime)
        self.kind: MemoryKind = memory.kind
        self.stored = memory.tensor()
        self._shapes = arrays.low_bytes.shape, arrays.high_bits.shape
        # Each has a storage of its own: programs that save models take two tensors in one for
        # shared weights.
        low, high = self._split(self.stored)
        self._planes = torch.from_numpy(low.numpy()), torch.from_numpy(high.numpy())
        self._view = memory.tensor(device)
        self._ring, self._view_tokens, self.name = ring, view_tokens, name
        self._fill(arrays)

    def _fill(self, arrays: WeightTensors) -> None:
        for plane, source in zip(self._planes, arrays, strict=False):
            plane.copy_(source)

    def _split(self, nbytes: Tensor) -> tuple[Tensor, Tensor]:
        """Both planes in bytes that are laid out as those stored."""
        low, high = self._shapes
        start = _aligned(low.numel())
        return nbytes[: low.numel()].view(low), nbytes[start : start + high.numel()].view(high)

    @property
    def device(self) -> torch.device:
        """The device that reads the planes."""
        return self._view.device

    def use_ring(self, ring: CopyRing | None, view_tokens: int) -> None:
        """Takes another ring, or none, from the next product on.

        Args:
            ring, view_tokens: as in `__init__`.
        """
        self._ring, self._view_tokens = ring, view_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.stored.numel()

    def on_host(self, arrays: WeightTensors) -> WeightTensors:
        """The arrays of the weight, with its planes as tensors of the host."""
        return WeightTensors(*self._planes, *arrays[2:])

    def on_device(self, arrays: WeightTensors) -> WeightTensors:
        """The arrays of the weight on the device, which reads the planes where they are, and gets
        the small arrays."""
        small = (array.to(self._view.device) for array in arrays[2:])
        return WeightTensors(*self._split(self._view), *small)

    def lend(self, views: WeightTensors, n_tokens: int) -> AbstractContextManager[WeightTensors]:
        """The arrays for a product that is launched before the context ends.

        Args:
            views: arrays of `on_device`.
            n_tokens: vectors that the weight is multiplied with.

        Returns:
            A context with the arrays.
        """
        ring = self._ring
        if ring is None or n_tokens <= self._view_tokens or ring.is_capturing():
            return nullcontext(views)
        return self._lend_copies(ring, views)

    @contextmanager
    def _lend_copies(self, ring: CopyRing, views: WeightTensors) -> Iterator[WeightTensors]:
        with ring.lend(self) as copied:
            yield WeightTensors(*self._split(copied), *views[2:])

    def write(self, arrays: WeightTensors) -> None:
        """Replaces the planes, once the device no longer reads them.

        Args:
            arrays: with planes of the same shapes, on any device.
        """
        if self._ring is not None:
            self._ring.forget(self)
        if self._view.is_cuda:
            torch.cuda.synchronize(self._view.device)
        self._fill(arrays)
        if self._ring is not None:
            self._ring.forget(self)  # what another thread has copied meanwhile
