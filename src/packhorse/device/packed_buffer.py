"""The five arrays of a packed weight in one tensor of bytes, and operators on it.

Servers of models know a layer's weight as one parameter. They move it, share it and record it by
its name, and compile the layers of a model once if their weights have the same shapes. One buffer
fits all of that, which five arrays of different lengths do not.

Each array begins at a multiple of 256 bytes. Exceptions come last, and have room for some more than
there are, so that weights of one shape nearly always have buffers of one size. Bytes that no array
uses are 0. Buffers live in memory alone; files hold arrays (docs/format.md, section 12).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.device.operators import check_operands, look_up, multiply, unpack
from packhorse.kernels.arrays import WeightTensors
from packhorse.layout import MAX_WEIGHT_COLUMNS, WEIGHT_FORMATS, WeightFormat

__all__ = ["BufferShape", "arrays_of", "room_for", "to_buffer"]

_ALIGNMENT = 256  # bytes; of every array, so of all that kernels want
_LEAST_ROOM = 1024  # exceptions; 4 KiB, and more than most small matrices have
_STEPS = 8  # in each doubling of the room, so that at most an eighth of it is unused


class BufferShape(NamedTuple):
    """What the bytes of a buffer are.

    Attributes:
        format: name of the format, "W12" or "W11".
        n_rows: rows of the matrix.
        n_columns: its columns.
    """

    format: str
    n_rows: int
    n_columns: int


def room_for(n_exceptions: int) -> int:
    """The number of exceptions for which a buffer has room: at least as many as asked for."""
    step = max((1 << max(n_exceptions - 1, 0).bit_length()) // (2 * _STEPS), 1)
    return max(-(-n_exceptions // step) * step, _LEAST_ROOM)


def _sections(shape: BufferShape) -> tuple[list[tuple[int, int]], int]:
    """Start and stop of the first four arrays in bytes, and the start of the exceptions."""
    format = WEIGHT_FORMATS[shape.format]
    n_rows, n_columns = shape.n_rows, shape.n_columns
    sizes = (
        n_rows * format.n_padded(n_columns),
        n_rows * format.n_high_bytes(n_columns),
        n_rows,
        4 * (n_rows + 1),
    )
    found, start = [], 0
    for size in sizes:
        found.append((start, start + size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found, start


def to_buffer(
    arrays: WeightTensors, format: WeightFormat, n_columns: int, room: int | None = None
) -> Tensor:
    """Copies arrays to one buffer.

    Args:
        arrays: of a packed weight, on any device; trusted.
        format: their format.
        n_columns: columns of the matrix, 1 to 65536.
        room: the number of exceptions for which there is room; None for what `room_for` says.

    Returns:
        uint8, one dimension, on the device of the arrays.

    Raises:
        ValueError: there are more exceptions than room, or the number of columns is wrong.

    Example:
        >>> import torch
        >>> from packhorse.device import pack_weight
        >>> from packhorse.device.packed_buffer import BufferShape, arrays_of, to_buffer
        >>> weight = pack_weight(torch.randn(256, 512, dtype=torch.bfloat16))
        >>> buffer = to_buffer(weight.arrays, weight.format, 512)
        >>> found = arrays_of(buffer, BufferShape("W12", 256, 512))
        >>> torch.equal(found.low_bytes, weight.low_bytes)
        True
    """
    if not 1 <= n_columns <= MAX_WEIGHT_COLUMNS:
        raise ValueError(f"a packed weight has 1 to {MAX_WEIGHT_COLUMNS} columns, not {n_columns}")
    n_exceptions = arrays.exceptions.numel()
    room = room_for(n_exceptions) if room is None else room
    if n_exceptions > room:
        raise ValueError(f"the weight has {n_exceptions} exceptions, but there is room for {room}")
    sections, start = _sections(BufferShape(format.name, arrays.n_rows, n_columns))
    buffer = torch.zeros(start + 4 * room, dtype=torch.uint8, device=arrays.device)
    sections.append((start, start + 4 * n_exceptions))
    for (first, last), array in zip(sections, arrays, strict=True):
        buffer[first:last].view(array.dtype).copy_(array.reshape(-1))
    return buffer


def arrays_of(buffer: Tensor, shape: BufferShape) -> WeightTensors:
    """The arrays in a buffer; nothing is copied, and the room after the last exception counts as
    exceptions.

    Args:
        buffer: of `to_buffer`; trusted.
        shape: what it holds.

    Raises:
        ValueError: the buffer is too small for that, or is not one of bytes.
    """
    sections, start = _sections(shape)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < start:
        raise ValueError(
            f"the weight has dtype {buffer.dtype} and shape {list(buffer.shape)}; a packed "
            f"{shape.n_rows} x {shape.n_columns} has torch.uint8 and at least [{start}]"
        )
    low, high, firsts, starts = (buffer[first:last] for first, last in sections)
    format = WEIGHT_FORMATS[shape.format]
    return WeightTensors(
        low.view(shape.n_rows, format.n_padded(shape.n_columns)),
        high.view(shape.n_rows, format.n_high_bytes(shape.n_columns)),
        firsts,
        starts.view(torch.int32),
        buffer[start:].view(torch.int32),
    )


@torch.library.custom_op("packhorse::multiply_buffer", mutates_args=())
def _multiply_buffer(
    x: Tensor, buffer: Tensor, bias: Tensor | None, format: str, n_rows: int, n_columns: int
) -> Tensor:
    arrays = arrays_of(buffer, BufferShape(format, n_rows, n_columns))
    return multiply(x, arrays, bias, WEIGHT_FORMATS[format], n_columns)


@_multiply_buffer.register_fake
def _(
    x: Tensor, buffer: Tensor, bias: Tensor | None, format: str, n_rows: int, n_columns: int
) -> Tensor:
    arrays = arrays_of(buffer, BufferShape(format, n_rows, n_columns))
    check_operands(x, arrays, bias, n_columns)
    return x.new_empty((*x.shape[:-1], n_rows))


@torch.library.custom_op("packhorse::embed_buffer", mutates_args=())
def _embed_buffer(rows: Tensor, buffer: Tensor, format: str, n_rows: int, n_columns: int) -> Tensor:
    arrays = arrays_of(buffer, BufferShape(format, n_rows, n_columns))
    flat = rows.reshape(-1).to(torch.int64)
    most = n_columns
    if (
        flat.numel() and flat.device.type == "cpu"
    ):  # elsewhere, finding it would wait for the device
        starts = arrays.exception_starts
        most = int((starts[flat + 1] - starts[flat]).max())
    found = look_up(arrays, WEIGHT_FORMATS[format], n_columns, flat, most)
    return found.view(*rows.shape, n_columns)


@_embed_buffer.register_fake
def _(rows: Tensor, buffer: Tensor, format: str, n_rows: int, n_columns: int) -> Tensor:
    return rows.new_empty((*rows.shape, n_columns), dtype=torch.bfloat16)


@torch.library.custom_op("packhorse::unpack_buffer", mutates_args=())
def _unpack_buffer(buffer: Tensor, format: str, n_rows: int, n_columns: int) -> Tensor:
    arrays = arrays_of(buffer, BufferShape(format, n_rows, n_columns))
    return unpack(arrays, WEIGHT_FORMATS[format], n_columns)


@_unpack_buffer.register_fake
def _(buffer: Tensor, format: str, n_rows: int, n_columns: int) -> Tensor:
    return buffer.new_empty((n_rows, n_columns), dtype=torch.bfloat16)
