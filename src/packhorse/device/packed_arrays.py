"""Packs matrices to the arrays of packed weights, a block of rows at a time, and checks arrays that
come from elsewhere.

The core packs a block on the host, and the block's arrays go to their device at once. So memory
holds only one block beside the packed weight, and never a second matrix, packed or plain.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.arguments import resolve_threads
from packhorse.codecs import weights
from packhorse.errors import CorruptionError, blaming
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS, WeightFormat

__all__ = [
    "BLOCK_NBYTES",
    "RowSource",
    "check_arrays",
    "check_source",
    "count_exceptions",
    "empty_arrays",
    "format_of",
    "pack_arrays",
    "resolve_format",
]

BLOCK_NBYTES = 16 << 20  # plain rows that are packed at once
_MAX_EXCEPTIONS = (1 << 31) - 1


class RowSource(Protocol):
    """A slice of a packed file, as `packhorse.open_file(..., framework="pt").get_slice(name)`
    returns it."""

    def get_shape(self) -> list[int]:
        """Dimensions of the whole tensor."""

    def get_dtype(self) -> str:
        """safetensors' name of its dtype."""

    def __getitem__(self, index: Any, /) -> Any:
        """Some rows, as a tensor."""


def resolve_format(format: WeightFormat | str) -> WeightFormat:
    """The format that an argument names; an argument that is a format is returned as it is.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(format, WeightFormat):
        return format
    if not isinstance(format, str) or format not in WEIGHT_FORMATS:
        raise ValueError(f"the format is {format!r}; it must be one of {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[format]


def check_source(source: Tensor | RowSource) -> tuple[int, int]:
    """Rows and columns of a matrix that can be packed.

    Raises:
        TypeError: the source is neither a tensor nor a slice, or not BF16.
        ValueError: the source is not a matrix of 1 to 65536 columns.
    """
    is_tensor = isinstance(source, Tensor)
    if not is_tensor and not hasattr(source, "get_shape"):
        what = type(source).__name__
        raise TypeError(f"only a tensor or a slice of a packed file can be packed, not {what}")
    shape = list(source.shape) if is_tensor else source.get_shape()  # type: ignore[union-attr]
    dtype = source.dtype if isinstance(source, Tensor) else source.get_dtype()
    if dtype not in (torch.bfloat16, "BF16"):
        raise TypeError(f"packed weights are BF16, not {dtype}; others stay plain")
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_WEIGHT_COLUMNS:
        raise ValueError(
            f"a packed weight has rows, and 1 to {MAX_WEIGHT_COLUMNS} columns; not shape {shape}"
        )
    return shape[0], shape[1]


def pack_arrays(
    source: Tensor | RowSource,
    format: WeightFormat,
    device: torch.device | str | None = None,
) -> WeightTensors:
    """Packs a matrix; it is only read.

    Args:
        source: BF16, n_rows x n_columns: a plain tensor on any device, or a slice of a packed file.
        format: the format.
        device: where to put the arrays; None for the tensor's device, or for the host.

    Raises:
        TypeError, ValueError: as `check_source`; or the matrix has too many exceptions to count.
        CorruptionError, CompatibilityError: as for reading the file.
    """
    n_rows, n_columns = check_source(source)
    home = source.device if isinstance(source, Tensor) else torch.device("cpu")
    device = home if device is None else torch.device(device)
    if device.type == "meta" or home.type == "meta":
        return empty_arrays(n_rows, n_columns, format, device="meta")
    pack = _pack_on_host if device.type == "cpu" else _pack_to_device
    return pack(source, n_rows, n_columns, format, device)


def _blocks(source: Tensor | RowSource, n_rows: int, n_columns: int) -> Iterator[tuple[int, Any]]:
    """The first row of each block, and the bits of its elements in host memory."""
    step = max(BLOCK_NBYTES // (2 * n_columns), 1)
    for start in range(0, n_rows, step):
        block: Tensor = source[start : min(start + step, n_rows)]
        plain = block.detach().cpu().contiguous()
        yield start, plain.view(torch.uint16).numpy()


def _pack_on_host(
    source: Tensor | RowSource, n_rows: int, n_columns: int, format: WeightFormat, _: torch.device
) -> WeightTensors:
    packer = weights.WeightPacker(n_rows, n_columns, format, threads=resolve_threads(None))
    for _start, block in _blocks(source, n_rows, n_columns):
        packer.add(block)
    return WeightTensors(*map(torch.from_numpy, packer.finish()))


def _pack_to_device(
    source: Tensor | RowSource,
    n_rows: int,
    n_columns: int,
    format: WeightFormat,
    device: torch.device,
) -> WeightTensors:
    arrays = empty_arrays(n_rows, n_columns, format, device=device)
    exceptions, n_exceptions = [arrays.exceptions], 0
    for start, block in _blocks(source, n_rows, n_columns):
        stop = start + len(block)
        packed = WeightTensors(
            *map(torch.from_numpy, weights.pack(block, format, threads=resolve_threads(None)))
        )
        n_after = n_exceptions + packed.exceptions.numel()
        if n_after > _MAX_EXCEPTIONS:
            raise ValueError(f"the matrix has at least {n_after} exceptions; leave it plain")
        for whole, part in zip(arrays[:3], packed[:3], strict=True):
            whole[start:stop].copy_(part)
        arrays.exception_starts[start + 1 : stop + 1].copy_(
            packed.exception_starts[1:] + n_exceptions
        )
        exceptions.append(packed.exceptions.to(device))
        n_exceptions = n_after
    return arrays._replace(exceptions=torch.cat(exceptions))


def count_exceptions(weight: Tensor, format: WeightFormat) -> int:
    """The number of exceptions that a matrix has in a format, counted block by block.

    Args:
        weight: BF16, n_rows x n_columns, on any device.
        format: the format.

    Raises:
        TypeError, ValueError: as `check_source`.
    """
    n_rows, n_columns = check_source(weight)
    threads = resolve_threads(None)
    return sum(
        weights.count_exceptions(block, format, threads=threads)
        for _, block in _blocks(weight, n_rows, n_columns)
    )


def empty_arrays(
    n_rows: int,
    n_columns: int,
    format: WeightFormat,
    *,
    device: torch.device | str | None = None,
) -> WeightTensors:
    """Valid arrays without exceptions, for the caller to overwrite.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns, 1 to 65536.
        format: the format.
        device: where to put them; None for the host.

    Raises:
        ValueError: a size is out of range.
    """
    if n_rows < 0 or not 1 <= n_columns <= MAX_WEIGHT_COLUMNS:
        raise ValueError(
            f"a packed weight has 1 to {MAX_WEIGHT_COLUMNS} columns, and no negative number of "
            f"rows; asked for {n_rows} x {n_columns}"
        )

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return WeightTensors(
        zeros(n_rows, format.n_padded(n_columns)),
        zeros(n_rows, format.n_high_bytes(n_columns)),
        zeros(n_rows) + format.min_first,
        zeros(n_rows + 1, dtype=torch.int32),
        zeros(0, dtype=torch.int32),
    )


def format_of(arrays: WeightTensors) -> WeightFormat | None:
    """The format of arrays, found from their widths; None if the widths fit no format."""
    if arrays.low_bytes.dim() == arrays.high_bits.dim() == 2:
        n_padded, n_high_bytes = arrays.low_bytes.shape[1], arrays.high_bits.shape[1]
        for format in WEIGHT_FORMATS.values():
            if n_padded and n_high_bytes == format.n_high_bytes(n_padded):
                return format
    return None


def check_arrays(arrays: WeightTensors, format: WeightFormat, n_columns: int, *, name: str) -> None:
    """Checks arrays against every rule of the format.

    Arrays on a device are copied to the host for this. Arrays on the meta device are not checked.

    Args:
        arrays: from a file or another process.
        format: their format.
        n_columns: columns of the matrix.
        name: the weight's name, for messages.

    Raises:
        CorruptionError: a rule is broken.
        ValueError: the arrays are on several devices, or not contiguous.

    Example:
        >>> import torch
        >>> from packhorse.device import check_arrays, pack_weight
        >>> weight = pack_weight(torch.randn(256, 512, dtype=torch.bfloat16))

        >>> check_arrays(weight.arrays, weight.format, 512, name="layers.0")
    """
    devices = {array.device for array in arrays}
    if len(devices) > 1:
        raise ValueError(f"{name}: arrays of one packed weight are on {sorted(map(str, devices))}")
    if arrays.device.type == "meta":
        return
    with blaming(name):
        for field, array in zip(WeightTensors._fields, arrays, strict=True):
            if array.dtype not in (torch.uint8, torch.int32):
                raise CorruptionError(f"packed weight: {field} has dtype {array.dtype}")
            # Kernels ignore strides.
            if not array.is_contiguous():
                raise ValueError(f"{name}: {field} is not contiguous; take its contiguous()")
        on_host = (array.detach().cpu().numpy() for array in arrays)
        weights.check(weights.WeightArrays(*on_host), format, n_columns)
