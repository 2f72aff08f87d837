"""Packs weights, from memory or from packed files, a block of rows at a time; checks arrays that
come from elsewhere.

A block is packed on the host by the core, and its arrays go to their device at once. So beside the
packed weight itself only a block is there: never a second matrix, packed or plain.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from packhorse.arguments import resolve_threads
from packhorse.codecs import weights
from packhorse.device.weights import PackedWeight, resolve_form
from packhorse.errors import CorruptionError, blaming
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS, WeightFormat

__all__ = [
    "BLOCK_NBYTES",
    "RowSource",
    "check_arrays",
    "count_exceptions",
    "empty_weight",
    "form_of",
    "join_arrays",
    "pack_weight",
]

BLOCK_NBYTES = 16 << 20  # of plain rows that are packed at once
_MAX_EXCEPTIONS = (1 << 31) - 1


class RowSource(Protocol):
    """What `packhorse.open_file(..., framework="pt").get_slice(name)` gives."""

    def get_shape(self) -> list[int]:
        """Dimensions of the whole tensor."""

    def get_dtype(self) -> str:
        """safetensors' name of its dtype."""

    def __getitem__(self, index: Any, /) -> Any:
        """Some rows, as a tensor."""


def pack_weight(
    source: Tensor | RowSource,
    form: WeightFormat | str = "W12",
    *,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs a matrix; it is only read.

    Args:
        source: BF16, n_rows x n_columns: a tensor on any device, or a slice of a packed file, which
            is decoded block by block.
        form: "W12" or "W11".
        device: where the packed weight shall be; None for where the tensor is, or the host.

    Returns:
        The packed weight, which unpacks to the source bit for bit.

    Raises:
        TypeError: the source is neither a tensor nor a slice, is not BF16, or is packed already.
        ValueError: it is no matrix of 1 to 65536 columns, or has too many exceptions to count.
        CorruptionError, CompatibilityError: of the file.
    """
    form = resolve_form(form)
    n_rows, n_columns = _check_source(source)
    home = source.device if isinstance(source, Tensor) else torch.device("cpu")
    device = home if device is None else torch.device(device)
    if device.type == "meta" or home.type == "meta":
        return empty_weight(n_rows, n_columns, form, device="meta")
    pack = _pack_on_host if device.type == "cpu" else _pack_to_device
    return PackedWeight(pack(source, n_rows, n_columns, form, device), form, n_columns)


def _blocks(source: Tensor | RowSource, n_rows: int, n_columns: int) -> Iterator[tuple[int, Any]]:
    """The first row of each block, and the bits of its elements in host memory."""
    step = max(BLOCK_NBYTES // (2 * n_columns), 1)
    for start in range(0, n_rows, step):
        block: Tensor = source[start : min(start + step, n_rows)]
        plain = block.detach().cpu().contiguous()
        yield start, plain.view(torch.uint16).numpy()


def _pack_on_host(
    source: Tensor | RowSource, n_rows: int, n_columns: int, form: WeightFormat, _: torch.device
) -> WeightTensors:
    packer = weights.WeightPacker(n_rows, n_columns, form, threads=resolve_threads(None))
    for _start, block in _blocks(source, n_rows, n_columns):
        packer.add(block)
    return WeightTensors(*map(torch.from_numpy, packer.finish()))


def _pack_to_device(
    source: Tensor | RowSource,
    n_rows: int,
    n_columns: int,
    form: WeightFormat,
    device: torch.device,
) -> WeightTensors:
    arrays = empty_weight(n_rows, n_columns, form, device=device).arrays
    exceptions, n_exceptions = [arrays.exceptions], 0
    for start, block in _blocks(source, n_rows, n_columns):
        stop = start + len(block)
        packed = WeightTensors(
            *map(torch.from_numpy, weights.pack(block, form, threads=resolve_threads(None)))
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


def count_exceptions(weight: Tensor, form: WeightFormat) -> int:
    """How many exceptions a matrix has in a format, block by block.

    Args:
        weight: BF16, n_rows x n_columns, on any device.
        form: the format.

    Raises:
        TypeError, ValueError: as `pack_weight`.
    """
    n_rows, n_columns = _check_source(weight)
    threads = resolve_threads(None)
    return sum(
        weights.count_exceptions(block, form, threads=threads)
        for _, block in _blocks(weight, n_rows, n_columns)
    )


def _check_source(source: Tensor | RowSource) -> tuple[int, int]:
    is_tensor = isinstance(source, Tensor)
    if isinstance(source, PackedWeight):
        raise TypeError("the weight is packed already; give its unpack() to pack it anew")
    if not is_tensor and not hasattr(source, "get_shape"):
        what = type(source).__name__
        raise TypeError(f"a tensor, or a slice of a packed file, is packed; this is {what}")
    shape = list(source.shape) if is_tensor else source.get_shape()  # type: ignore[union-attr]
    dtype = source.dtype if isinstance(source, Tensor) else source.get_dtype()
    if dtype not in (torch.bfloat16, "BF16"):
        raise TypeError(f"packed weights are BF16, not {dtype}; others stay plain")
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_WEIGHT_COLUMNS:
        raise ValueError(
            f"a packed weight has rows, and 1 to {MAX_WEIGHT_COLUMNS} columns; not shape {shape}"
        )
    return shape[0], shape[1]


def empty_weight(
    n_rows: int,
    n_columns: int,
    form: WeightFormat | str,
    *,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """A valid packed weight without exceptions, to be written over.

    Args:
        n_rows: rows of the matrix.
        n_columns: its columns, 1 to 65536.
        form: "W12" or "W11".
        device: where it shall be; None for the host.

    Raises:
        ValueError: a size or the format is wrong.
    """
    form = resolve_form(form)
    if n_rows < 0 or not 1 <= n_columns <= MAX_WEIGHT_COLUMNS:
        raise ValueError(
            f"a packed weight has 1 to {MAX_WEIGHT_COLUMNS} columns; {n_columns} and {n_rows} rows "
            "are asked for"
        )

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    arrays = WeightTensors(
        zeros(n_rows, form.n_padded(n_columns)),
        zeros(n_rows, form.n_high_bytes(n_columns)),
        zeros(n_rows) + form.min_first,
        zeros(n_rows + 1, dtype=torch.int32),
        zeros(0, dtype=torch.int32),
    )
    return PackedWeight(arrays, form, n_columns)


def form_of(arrays: WeightTensors) -> WeightFormat | None:
    """The format of arrays, by their widths, which differ between formats; None if they have those
    of no format."""
    if arrays.low_bytes.dim() == arrays.high_bits.dim() == 2:
        n_padded, n_high_bytes = arrays.low_bytes.shape[1], arrays.high_bits.shape[1]
        for form in WEIGHT_FORMATS.values():
            if n_padded and n_high_bytes == form.n_high_bytes(n_padded):
                return form
    return None


def check_arrays(arrays: WeightTensors, form: WeightFormat, n_columns: int, *, name: str) -> None:
    """Checks every rule of the format; arrays on a device are copied to the host for it, those of
    the meta device have none.

    Args:
        arrays: from a file or another process.
        form: their format.
        n_columns: columns of the matrix.
        name: whose weight it is; messages say so.

    Raises:
        CorruptionError: a rule is broken.
        ValueError: they are on several devices, or not contiguous.
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
            # Kernels read them as they lie.
            if not array.is_contiguous():
                raise ValueError(f"{name}: {field} is not contiguous; take its contiguous()")
        on_host = (array.detach().cpu().numpy() for array in arrays)
        weights.check(weights.WeightArrays(*on_host), form, n_columns)


def join_arrays(state: Mapping[str, Any], name: str, n_columns: int) -> PackedWeight | None:
    """The packed weight that a state dict or a file holds as arrays, checked.

    Args:
        state: tensors by name; `NAME.low_bytes` and the other four belong together.
        name: of the weight.
        n_columns: columns of the matrix.

    Returns:
        The weight, around the tensors of the state; None if there is none of its arrays.

    Raises:
        CorruptionError: some arrays are missing, they break a rule of the format, or there is a
            plain weight beside them.
    """
    keys = {field: f"{name}.{field}" for field in WeightTensors._fields}
    missing = [field for field, key in keys.items() if key not in state]
    if len(missing) == len(keys):
        return None
    if missing:
        raise CorruptionError(f"{name}: packed weight: {', '.join(missing)} is missing")
    if name in state:
        raise CorruptionError(f"{name}: is there packed and plain; take one of them out")
    for key in keys.values():
        if not isinstance(state[key], Tensor):
            raise CorruptionError(f"{key} is no tensor, but {type(state[key]).__name__}")
        if state[key].layout != torch.strided:
            raise CorruptionError(f"{key} is no plain tensor, but {state[key].layout}")
    arrays = WeightTensors(*(array.contiguous() for array in map(state.__getitem__, keys.values())))
    form = form_of(arrays)
    if form is None:
        shapes = f"{list(arrays.low_bytes.shape)} and {list(arrays.high_bits.shape)}"
        raise CorruptionError(f"{name}: packed weight: no format has low and high bits of {shapes}")
    check_arrays(arrays, form, n_columns, name=name)
    return PackedWeight(arrays, form, n_columns)
