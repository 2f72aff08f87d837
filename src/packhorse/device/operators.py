"""PyTorch's operators on packed weights: `unpack_weight` and `multiply_weight`.

They take the arrays of docs/format.md, section 12, as plain tensors. Compiled graphs and CUDA
graphs can contain these operators: PyTorch can find the shapes of their results without running
them (`register_fake`), they never copy anything from a device to the host, and the choice of a
kernel is made inside of them.

On a GPU, the kernels of `packhorse.kernels` do the work. In host memory, the core decodes one tile
of rows at a time, within a memory budget. Any other device, such as a GPU without BF16, uses plain
PyTorch, which is slow.
"""

import threading
import warnings
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from packhorse.codecs import weights
from packhorse.errors import MissingBackendError
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.vendor import why_no_kernels
from packhorse.layout import W12, WEIGHT_FORMATS, WeightFormat

__all__ = [
    "TILE_NBYTES",
    "align",
    "check_operands",
    "gather_rows",
    "is_transformed",
    "look_up",
    "multiply",
    "n_tile_rows",
    "obey_autocast",
    "require_kernels",
    "unpack",
    "unpack_range",
    "unpack_rows",
]

# Bytes of decoded weights at a time in host memory, for each calling thread: few enough to stay in
# a cache until they are multiplied.
TILE_NBYTES = 4 << 20
# PyTorch's product with a tile equals its product with the whole matrix bit for bit if the tile has
# about 64 rows and more than 16 * 16 * 16 elements. With fewer elements, PyTorch does not use
# oneDNN (Matmul.cpp).
_TILE_ALIGNMENT = 64
_LEAST_TILE_NUMEL = 16 * 16 * 16 + 1
_SCRATCH = threading.local()
_NO_COMPILER: set[torch.device] = set()  # GPUs for which Triton cannot compile kernels


def unpack(arrays: WeightTensors, format: WeightFormat, n_columns: int) -> Tensor:
    """The matrix itself, decoded where the arrays are.

    Args:
        arrays: the arrays of a packed weight. They are trusted, so the caller must check arrays
            from elsewhere.
        format: their format.
        n_columns: columns of the matrix.

    Returns:
        BF16, n_rows x n_columns, equal bit for bit to what was packed.
    """
    if _has_kernels(arrays.device):
        require_kernels()
        from packhorse.kernels.weights import decode_weights

        try:
            return decode_weights(arrays, format, n_columns)
        except Exception as error:
            _require_compiler_fault(error, arrays.device)
    dst = torch.empty(arrays.n_rows, n_columns, dtype=torch.bfloat16, device=arrays.device)
    on_host = arrays.device.type == "cpu"
    step = max(arrays.n_rows, 1) if on_host else n_tile_rows(n_columns, TILE_NBYTES)
    for start in range(0, arrays.n_rows, step):
        stop = min(start + step, arrays.n_rows)
        unpack_rows(arrays, format, dst[start:stop], start)
    return dst


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device. Other devices use plain PyTorch; for a GPU, a warning
    says so once."""
    if device.type != "cuda" or device in _NO_COMPILER:
        return False
    reason = why_no_kernels(device)
    if reason is not None:
        warnings.warn(
            f"{reason}: plain PyTorch decodes packed weights there, which is exact but slow; take "
            "the plain weights back with unpack_model_, or move the model to the host",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


def _require_compiler_fault(error: Exception, device: torch.device) -> None:
    """Takes plain PyTorch from now on where Triton cannot compile kernels, and warns once. Raises
    all other errors again."""
    from packhorse.gpu.compiler_faults import compiler_fault

    fault = compiler_fault(error)
    if fault is None:
        raise error
    if device in _NO_COMPILER:
        return
    _NO_COMPILER.add(device)
    _has_kernels.cache_clear()
    warnings.warn(
        f"Triton cannot compile kernels for {device} ({fault}): plain PyTorch decodes packed "
        "weights there, which is exact but slow; install a Triton that knows this GPU and the C "
        "compiler that it needs, or take the plain weights back with unpack_model_",
        RuntimeWarning,
        stacklevel=3,
    )


def align(arrays: WeightTensors) -> WeightTensors:
    """The arrays. On a GPU, those that do not begin at a multiple of 16 bytes are copied to memory
    of their own, because kernels would load them a few bytes at a time.

    Args:
        arrays: of a packed weight.
    """
    if isinstance(arrays.low_bytes, FakeTensor) or not _has_kernels(arrays.device):
        return arrays
    return arrays._replace(**{name: getattr(arrays, name).clone() for name in arrays.misaligned()})


@cache
def require_kernels() -> None:
    """Checks that the kernels can be imported.

    Raises:
        MissingBackendError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise MissingBackendError(
            "packed weights on a GPU need Triton; install it with: "
            "pip install 'packhorse[gpu]', or move the model to the host"
        )


def unpack_rows(arrays: WeightTensors, format: WeightFormat, dst: Tensor, start: int) -> None:
    """Decodes rows, from row `start` on, until a contiguous BF16 tensor is full. The tensor is on
    the arrays' device, on which kernels do not run."""
    stop = start + dst.shape[0]
    if arrays.device.type == "cpu":
        _unpack_on_host(arrays, format, dst, start)
        return
    rows = torch.arange(start, stop, device=arrays.device)
    dst.copy_(gather_rows(arrays, format, dst.shape[1], rows, _most(arrays, rows)))


def _most(arrays: WeightTensors, rows: Tensor) -> int:
    """The most exceptions of a row."""
    counts = arrays.exception_starts[rows + 1] - arrays.exception_starts[rows]
    return int(counts.max()) if counts.numel() else 0


def unpack_range(
    arrays: WeightTensors, format: WeightFormat, n_columns: int, rows: range
) -> Tensor:
    """Consecutive rows of the matrix, decoded where the arrays are.

    Args:
        arrays: of a packed weight; trusted.
        format: their format.
        n_columns: columns of the matrix.
        rows: numbers of rows that exist, with step 1.

    Returns:
        BF16, a row of n_columns for each number.
    """
    if _has_kernels(arrays.device):
        numbers = torch.arange(rows.start, rows.stop, device=arrays.device)
        return look_up(arrays, format, n_columns, numbers, n_columns)
    dst = torch.empty(len(rows), n_columns, dtype=torch.bfloat16, device=arrays.device)
    unpack_rows(arrays, format, dst, rows.start)
    return dst


def _unpack_on_host(arrays: WeightTensors, format: WeightFormat, dst: Tensor, start: int) -> None:
    bits = dst.view(torch.uint16).numpy()
    on_host = weights.WeightArrays(*(array.numpy() for array in arrays))
    weights.unpack_into(
        on_host, format, dst.shape[1], bits, row_start=start, row_stop=start + dst.shape[0],
        threads=torch.get_num_threads(),
    )  # fmt: skip


def gather_rows(
    arrays: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    rows: Tensor,
    max_row_exceptions: int,
) -> Tensor:
    """Some rows of the matrix. Uses only PyTorch's own operations, which work on any device and in
    compiled graphs.

    Args:
        arrays: of a packed weight.
        format: their format.
        n_columns: columns of the matrix.
        rows: int64, one dimension; the numbers of the rows.
        max_row_exceptions: an upper limit of the exceptions of a row.

    Returns:
        BF16, a row of n_columns for each number.
    """
    # Indexing would take a negative number for a row counted from the end.
    low_bytes, high_bits, firsts = (array.index_select(0, rows) for array in arrays[:3])
    packed = _packed_elements(low_bytes, high_bits, format)[:, :n_columns]
    code = packed >> 7 & (1 << format.code_bits) - 1
    exponent = firsts.to(torch.int32)[:, None] + code
    if format.first_code:
        exponent = torch.where(code >= format.first_code, exponent, 0)
    elements = (packed >> format.bits - 1) << 15 | exponent << 7 | packed & 0x7F
    if max_row_exceptions:
        elements = _put_exceptions(arrays, elements, rows, max_row_exceptions)
    return elements.to(torch.int16).view(torch.bfloat16)


def look_up(
    arrays: WeightTensors,
    format: WeightFormat,
    n_columns: int,
    rows: Tensor,
    max_row_exceptions: int,
) -> Tensor:
    """The same as `gather_rows`, but with kernels where they run. Transforms of `torch.func` cannot
    differentiate or batch kernels."""
    if not _has_kernels(rows.device):
        return gather_rows(arrays, format, n_columns, rows, max_row_exceptions)
    found: Tensor = torch.ops.packhorse.look_up_rows(*arrays, rows, format.name, n_columns)
    return found


def _packed_elements(low_bytes: Tensor, high_bits: Tensor, format: WeightFormat) -> Tensor:
    """Packed elements of rows, in order and with their padding, as int32."""
    if format is W12:
        upper = torch.cat([high_bits & 15, high_bits >> 4], dim=1).to(torch.int32)
        return low_bytes.to(torch.int32) | upper << 8
    n_steps = high_bits.shape[1] // 3
    signs = torch.cat([high_bits[:, :n_steps] >> i & 1 for i in range(8)], dim=1)
    pairs = torch.cat([high_bits[:, n_steps:] >> 2 * i & 3 for i in range(4)], dim=1)
    return low_bytes.to(torch.int32) | pairs.to(torch.int32) << 8 | signs.to(torch.int32) << 10


def _put_exceptions(arrays: WeightTensors, elements: Tensor, rows: Tensor, most: int) -> Tensor:
    n_columns = elements.shape[1]
    index = arrays.exception_starts[rows][:, None] + torch.arange(most, device=rows.device)
    present = index < arrays.exception_starts[rows + 1][:, None]
    entries = arrays.exceptions[index.clamp(max=arrays.exceptions.shape[0] - 1)]
    # Rows with fewer exceptions write to an extra column, which is dropped.
    columns = torch.where(present, entries & 0xFFFF, n_columns).to(torch.int64)
    wider = F.pad(elements, (0, 1)).scatter(1, columns, entries >> 16 & 0xFFFF)
    return wider[:, :n_columns]


def n_tile_rows(n_columns: int, tile_nbytes: int) -> int:
    """The number of BF16 rows in a tile that keeps to a memory budget: a multiple of 64, and at
    least what `_least_tile_rows` returns."""
    n_rows = max(tile_nbytes // (2 * n_columns), _least_tile_rows(n_columns) + _TILE_ALIGNMENT - 1)
    return n_rows // _TILE_ALIGNMENT * _TILE_ALIGNMENT


def _least_tile_rows(n_columns: int) -> int:
    """The smallest number of rows that PyTorch certainly multiplies in the same way as a whole
    matrix."""
    return max(_TILE_ALIGNMENT, -(-_LEAST_TILE_NUMEL // n_columns))


def multiply(
    x: Tensor, arrays: WeightTensors, bias: Tensor | None, format: WeightFormat, n_columns: int
) -> Tensor:
    """The product of `torch.nn.functional.linear` with a packed weight.

    Args:
        x: BF16, any dimensions, the last of n_columns.
        arrays: of a packed weight, on the device of x; trusted.
        bias: BF16, n_rows; None for none.
        format: their format.
        n_columns: columns of the matrix.

    Returns:
        BF16, the dimensions of x except for the last, which is n_rows. In host memory it equals the
        product with the plain weight bit for bit, as long as PyTorch multiplies a tile of at least
        64 rows in the same way as the whole matrix.

    Raises:
        TypeError: x or the bias is not BF16.
        ValueError: x or the bias is on another device, or of another shape.
    """
    check_operands(x, arrays, bias, n_columns)
    if not x.numel() or not arrays.n_rows:
        return _empty_product(x, arrays.n_rows).zero_()
    if _has_kernels(arrays.device):
        require_kernels()
        from packhorse.device import products

        try:
            return products.multiply(x, arrays, format, n_columns, bias=bias)
        except Exception as error:
            _require_compiler_fault(error, arrays.device)
    return _multiply_in_tiles(x, arrays, bias, format, n_columns, TILE_NBYTES)


def check_operands(x: Tensor, arrays: WeightTensors, bias: Tensor | None, n_columns: int) -> None:
    """Checks the operands of `multiply`.

    Raises:
        TypeError, ValueError: as `multiply`.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"the input of a packed layer is {x.dtype}; packed weights multiply torch.bfloat16: "
            "convert the input, or take the plain weight back with unpack_model_"
        )
    if x.dim() == 0 or x.shape[-1] != n_columns:
        raise ValueError(
            f"the input of a packed layer has shape {list(x.shape)}; its last dimension must be "
            f"{n_columns}"
        )
    if x.device != arrays.device:
        raise ValueError(f"the input is on {x.device}, the packed weight on {arrays.device}")
    if bias is not None:
        _check_bias(bias, arrays)


def _check_bias(bias: Tensor, arrays: WeightTensors) -> None:
    if bias.dtype != torch.bfloat16:
        raise TypeError(f"the bias of a packed layer is {bias.dtype}; it must be torch.bfloat16")
    if bias.dim() != 1 or bias.shape[0] != arrays.n_rows:
        raise ValueError(
            f"the bias of a packed layer has shape {list(bias.shape)}; it must be [{arrays.n_rows}]"
        )
    if bias.device != arrays.device:
        raise ValueError(f"the bias is on {bias.device}, the packed weight on {arrays.device}")


def _empty_product(x: Tensor, n_rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n_rows))


def _multiply_in_tiles(
    x: Tensor,
    arrays: WeightTensors,
    bias: Tensor | None,
    format: WeightFormat,
    n_columns: int,
    tile_nbytes: int,
) -> Tensor:
    n_rows = arrays.n_rows
    step = n_tile_rows(n_columns, tile_nbytes)
    # If the rest is too small for a tile of its own, it joins the tile before it.
    stops = [*range(step, n_rows - _least_tile_rows(n_columns) + 1, step), n_rows]
    starts = [0, *stops[:-1]]
    scratch = _scratch(max(n_rows - starts[-1], stops[0]) * n_columns, x.device)
    y = None if len(stops) == 1 else _empty_product(x, n_rows)
    for start, stop in zip(starts, stops, strict=True):
        tile = scratch[: (stop - start) * n_columns].view(stop - start, n_columns)
        unpack_rows(arrays, format, tile, start)
        part = F.linear(x, tile, None if bias is None else bias[start:stop])
        if y is None:
            return part
        y[..., start:stop] = part
    assert y is not None
    return y


def _scratch(numel: int, device: torch.device) -> Tensor:
    """Memory for a tile, which this thread reuses: fresh pages cost more than decoding."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=torch.bfloat16, device=device)
    held: Tensor | None = getattr(_SCRATCH, "tile", None)
    if held is None or held.numel() < numel:
        # The device is explicit: `with torch.device(...)` or set_default_device may name another.
        held = _SCRATCH.tile = torch.empty(numel, dtype=torch.bfloat16, device=device)
    return held


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active. These cannot
    differentiate or batch custom operators."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def obey_autocast(input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The operands of a product, converted as `torch.autocast` converts them: all floats except
    FP64."""
    device_type = input.device.type
    if input.is_meta or not torch.is_autocast_enabled(device_type):
        return input, bias
    dtype = torch.get_autocast_dtype(device_type)

    def convert(operand: Tensor) -> Tensor:
        converts = operand.is_floating_point() and operand.dtype != torch.float64
        return operand.to(dtype) if converts else operand

    return convert(input), None if bias is None else convert(bias)


@torch.library.custom_op("packhorse::unpack_weight", mutates_args=())
def _unpack_weight(
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    format: str,
    n_columns: int,
) -> Tensor:
    arrays = WeightTensors(low_bytes, high_bits, first_exponents, exception_starts, exceptions)
    return unpack(arrays, WEIGHT_FORMATS[format], n_columns)


@_unpack_weight.register_fake
def _(
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    format: str,
    n_columns: int,
) -> Tensor:
    shape = first_exponents.shape[0], n_columns
    return torch.empty(shape, dtype=torch.bfloat16, device=low_bytes.device)


@torch.library.custom_op("packhorse::multiply_weight", mutates_args=())
def _multiply_weight(
    x: Tensor,
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    format: str,
    n_columns: int,
) -> Tensor:
    arrays = WeightTensors(low_bytes, high_bits, first_exponents, exception_starts, exceptions)
    return multiply(x, arrays, bias, WEIGHT_FORMATS[format], n_columns)


@_multiply_weight.register_fake
def _(
    x: Tensor,
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    bias: Tensor | None,
    format: str,
    n_columns: int,
) -> Tensor:
    arrays = WeightTensors(low_bytes, high_bits, first_exponents, exception_starts, exceptions)
    check_operands(x, arrays, bias, n_columns)
    return _empty_product(x, arrays.n_rows)


@torch.library.custom_op("packhorse::look_up_rows", mutates_args=())
def _look_up_rows(
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    rows: Tensor,
    format: str,
    n_columns: int,
) -> Tensor:
    require_kernels()
    from packhorse.kernels.weights import decode_rows

    arrays = WeightTensors(low_bytes, high_bits, first_exponents, exception_starts, exceptions)
    try:
        return decode_rows(arrays, WEIGHT_FORMATS[format], n_columns, rows.contiguous())
    except Exception as error:
        _require_compiler_fault(error, arrays.device)
    return gather_rows(arrays, WEIGHT_FORMATS[format], n_columns, rows, _most(arrays, rows))


@_look_up_rows.register_fake
def _(
    low_bytes: Tensor,
    high_bits: Tensor,
    first_exponents: Tensor,
    exception_starts: Tensor,
    exceptions: Tensor,
    rows: Tensor,
    format: str,
    n_columns: int,
) -> Tensor:
    return rows.new_empty((rows.shape[0], n_columns), dtype=torch.bfloat16)
