"""The arrays of a packed weight as tensors, which kernels take and layers hold.

This module does not need Triton, so that layers work without it.
"""

from typing import NamedTuple

from torch import Tensor, device

__all__ = ["ALIGNMENT", "WeightTensors"]

# Bytes. Kernels are compiled for memory that begins at a multiple of it, and load as much at once.
ALIGNMENT = 16


class WeightTensors(NamedTuple):
    """The arrays of docs/format.md, section 12, as contiguous tensors of one device.

    Attributes:
        low_bytes: uint8, n_rows x n_padded.
        high_bits: uint8, n_rows x bytes of high bits.
        first_exponents: uint8, n_rows.
        exception_starts: int32, n_rows + 1.
        exceptions: int32, as many as there are.
    """

    low_bytes: Tensor
    high_bits: Tensor
    first_exponents: Tensor
    exception_starts: Tensor
    exceptions: Tensor

    @property
    def n_rows(self) -> int:
        """Rows of the matrix."""
        return self.first_exponents.shape[0]

    @property
    def device(self) -> device:
        """The device of the arrays."""
        return self.low_bytes.device

    def misaligned(self) -> list[str]:
        """Names of the arrays that do not begin at a multiple of `ALIGNMENT`."""
        pairs = zip(self._fields, self, strict=True)
        return [name for name, array in pairs if array.data_ptr() % ALIGNMENT]
