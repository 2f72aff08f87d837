"""The arrays of a packed weight in one buffer of bytes, and the operators on it."""

import pytest
import torch
import torch.nn.functional as F
from device_samples import FORMATS, inputs, matrix, model_matrix, same_bits
from weight_samples import MATRICES

from packhorse.device import pack_weight
from packhorse.device.packed_buffer import BufferShape, arrays_of, room_for, to_buffer

OPERATORS = torch.ops.packhorse


def packed(plain: torch.Tensor, format: str) -> tuple[torch.Tensor, BufferShape]:
    weight = pack_weight(plain, format)
    buffer = to_buffer(weight.arrays, weight.format, plain.shape[1])
    return buffer, BufferShape(format, *plain.shape)


@FORMATS
@pytest.mark.parametrize("name", MATRICES)
def test_a_buffer_gives_the_matrix_back(name: str, format: str) -> None:
    plain = matrix(name)
    buffer, shape = packed(plain, format)
    assert same_bits(OPERATORS.unpack_buffer(buffer, *shape), plain)
    rows = torch.tensor([[0, len(plain) - 1], [len(plain) // 2, 0]]) if len(plain) else None
    if rows is not None:
        assert same_bits(OPERATORS.embed_buffer(rows, buffer, *shape), plain[rows])


@FORMATS
def test_products_are_those_of_the_plain_matrix(format: str) -> None:
    plain, bias = model_matrix(200, 300), inputs(200)
    buffer, shape = packed(plain, format)
    for x in (inputs(300), inputs(2, 3, 300), inputs(0, 300)):
        found = OPERATORS.multiply_buffer(x, buffer, bias, *shape)
        assert same_bits(found, F.linear(x, plain, bias))


def test_arrays_share_the_buffer_and_are_aligned() -> None:
    buffer, shape = packed(model_matrix(65, 333), "W11")
    arrays = arrays_of(buffer, shape)
    places = [array.data_ptr() - buffer.data_ptr() for array in arrays]
    assert places == sorted(places)
    assert all(place % 256 == 0 for place in places)
    assert arrays.exceptions.numel() == room_for(pack_weight(model_matrix(65, 333), "W11")
                                                .exceptions.numel())  # fmt: skip


def test_room_grows_in_few_steps_and_wastes_little() -> None:
    sizes = [*range(5000), *range(5000, 2_000_000, 997)]
    rooms = [room_for(n) for n in sizes]
    assert rooms == sorted(rooms)
    assert all(n <= room <= max(1024, n * 1.126 + 1) for n, room in zip(sizes, rooms, strict=True))
    assert len({room_for(n) for n in range(100_000, 200_000)}) < 10


def test_weights_of_one_shape_have_buffers_of_one_size() -> None:
    """Otherwise a server would compile each layer of a model anew."""
    sizes = set()
    for seed in range(4):
        plain = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
        sizes.add(packed(plain, "W12")[0].numel())
    assert len(sizes) == 1


def test_bytes_that_no_array_uses_are_zero() -> None:
    plain = model_matrix(33, 333)
    assert same_bits(*(packed(plain, "W12")[0].view(torch.bfloat16) for _ in range(2)))
    buffer, shape = packed(plain, "W12")
    used = sum(array.numel() * array.element_size() for array in arrays_of(buffer, shape))
    for array in arrays_of(buffer, shape):
        array.zero_()
    assert not buffer.any()
    assert used < buffer.numel()


def test_a_buffer_without_room_or_of_another_weight_is_refused() -> None:
    weight = pack_weight(matrix("specials"), "W12")
    n = weight.exceptions.numel()
    with pytest.raises(ValueError, match=f"{n} exceptions, but there is room for {n - 1}"):
        to_buffer(weight.arrays, weight.format, 611, n - 1)
    with pytest.raises(ValueError, match="1 to 65536 columns"):
        to_buffer(weight.arrays, weight.format, 0)
    buffer, shape = packed(model_matrix(64, 128), "W12")
    with pytest.raises(ValueError, match="a packed 4096 x 128 has"):
        OPERATORS.unpack_buffer(buffer, "W12", 4096, 128)
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        OPERATORS.unpack_buffer(buffer.view(torch.bfloat16), *shape)
    with pytest.raises(TypeError, match=r"multiply torch\.bfloat16"):
        OPERATORS.multiply_buffer(torch.ones(128), buffer, None, *shape)


def test_operators_can_be_traced() -> None:
    buffer, shape = packed(model_matrix(64, 128), "W12")
    rows, x = torch.tensor([[3, 5]]), inputs(7, 128)
    torch.library.opcheck(OPERATORS.multiply_buffer, (x, buffer, inputs(64), *shape))
    torch.library.opcheck(OPERATORS.embed_buffer, (rows, buffer, *shape))
    torch.library.opcheck(OPERATORS.unpack_buffer, (buffer, *shape))
