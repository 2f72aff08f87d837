"""Chunks of keys and values as LMCache hands them over. tests/with_lmcache runs the real one."""

import random
import sys
from typing import NamedTuple

import pytest
import torch

from packhorse.errors import CorruptionError, MissingBackendError, PackhorseError
from packhorse.lmcache import PackhorseDeserializer, PackhorseSerializer, register

SHAPES = [torch.Size([2, 3, 32, 128]), torch.Size([5]), torch.Size([2, 0, 4])]


class Layout(NamedTuple):
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


class Memory:
    """What the serde uses of LMCache's `MemoryObj`."""

    def __init__(self, layout: Layout, content: bytes = b"") -> None:
        sizes = zip(layout.shapes, layout.dtypes, strict=True)
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
        self._layout, self.byte_array = layout, memoryview(bytearray(content or nbytes))

    def get_shapes(self) -> list[torch.Size]:
        return self._layout.shapes

    def get_dtypes(self) -> list[torch.dtype]:
        return self._layout.dtypes


def chunk_of(dtype: torch.dtype) -> Memory:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    content = b"".join(bytes(each.view(torch.uint8).numpy().tobytes()) for each in tensors)
    return Memory(Layout(SHAPES, [dtype] * len(SHAPES)), content)


def packed_of(chunk: Memory, serializer: PackhorseSerializer) -> Memory:
    layout = Layout(chunk.get_shapes(), chunk.get_dtypes())
    nbytes = serializer.estimate_serialized_size(layout)
    packed = Memory(Layout([torch.Size([nbytes])], [torch.uint8]), b"\xff" * nbytes)
    assert serializer.serialize(chunk, packed, None) == nbytes
    return packed


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.bfloat16, 0.72), (torch.float16, 0.88), (torch.float32, 0.86), (torch.uint8, 1.0)],
    ids=str,
)
def test_chunks_come_back(dtype: torch.dtype, share: float) -> None:
    chunk = chunk_of(dtype)
    serializer = PackhorseSerializer()
    packed = packed_of(chunk, serializer)
    headers = 3 * 500
    assert len(packed.byte_array) < share * len(chunk.byte_array) + headers
    back = Memory(Layout(chunk.get_shapes(), chunk.get_dtypes()))
    PackhorseDeserializer().deserialize(packed, back, None)
    assert back.byte_array == chunk.byte_array
    assert packed_of(chunk, serializer).byte_array == packed.byte_array


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.complex128], ids=str)
def test_dtypes_that_frames_do_not_know_are_packed_as_bytes(dtype: torch.dtype) -> None:
    layout = Layout(SHAPES, [dtype] * len(SHAPES))
    nbytes = len(Memory(layout).byte_array)
    chunk = Memory(layout, random.Random(0).randbytes(nbytes))
    back = Memory(layout)
    PackhorseDeserializer().deserialize(packed_of(chunk, PackhorseSerializer()), back, None)
    assert back.byte_array == chunk.byte_array


def test_chunks_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match="larger share"):
        packed_of(chunk_of(torch.bfloat16), PackhorseSerializer(share=0.6))
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        PackhorseSerializer(share=1.5)
    with pytest.raises(ValueError, match="level"):
        PackhorseSerializer(level="best")


@pytest.mark.parametrize("at", range(0, 20_000, 1171))
def test_damaged_chunks_are_refused(at: int) -> None:
    chunk = chunk_of(torch.bfloat16)
    packed = packed_of(chunk, PackhorseSerializer())
    back = Memory(Layout(chunk.get_shapes(), chunk.get_dtypes()))
    packed.byte_array[at] ^= 4
    with pytest.raises(PackhorseError):
        PackhorseDeserializer().deserialize(packed, back, None)
    packed.byte_array = packed.byte_array[:at]
    with pytest.raises(CorruptionError):
        PackhorseDeserializer().deserialize(packed, back, None)


def test_chunks_of_another_layout_are_refused() -> None:
    packed = packed_of(chunk_of(torch.bfloat16), PackhorseSerializer())
    back = Memory(Layout(SHAPES, [torch.float16] * 3))
    with pytest.raises(CorruptionError, match="F16 with shape"):
        PackhorseDeserializer().deserialize(packed, back, None)


def test_without_lmcache_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(MissingBackendError, match=r"packhorse\[lmcache\]"):
        register()
