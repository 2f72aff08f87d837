"""Packed chunks in the real LMCache: its memory, its serde processors, its storage in files."""

import inspect
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import (
    Deserializer,
    SerdeConfig,
    Serializer,
    create_serde_processor,
    get_registered_serde_types,
)

from packhorse.errors import CorruptionError
from packhorse.lmcache import PackhorseDeserializer, PackhorseSerializer, register

LAYOUT = MemoryLayoutDesc(
    [torch.Size([2, 4, 64, 256]), torch.Size([2, 1, 64, 32])], [torch.bfloat16, torch.float32]
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


@pytest.fixture
def memory() -> Iterator[L1Manager]:
    """LMCache's own memory for chunks."""
    config = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
    manager = L1Manager(L1ManagerConfig(config))
    yield manager
    manager.close()


def key(number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "model", 0)


def reserve(manager: L1Manager, number: int, layout: MemoryLayoutDesc = LAYOUT) -> Any:
    error, found = manager.reserve_write([key(number)], [False], layout, tag="test")[key(number)]
    assert found is not None, error
    return found


def fill(chunk: Any, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(LAYOUT.shapes)):
        chunk.get_tensor(i).copy_(torch.randn(LAYOUT.shapes[i], generator=generator))
    return bytes(chunk.byte_array)


def bytes_layout(nbytes: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([nbytes])], [torch.uint8])


def wait(fd: int, query: Any) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        select.select([fd], [], [], 0.1)
        found = query()
        if found:
            return found
    raise TimeoutError


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(PackhorseSerializer, Serializer), (PackhorseDeserializer, Deserializer)],
)
def test_our_classes_have_the_methods_of_theirs(ours: type, theirs: type) -> None:
    for name in theirs.__abstractmethods__:  # type: ignore[attr-defined]
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == wanted


@pytest.mark.parametrize("level", ["fast", "default"])
def test_chunks_of_several_layouts_come_back(memory: L1Manager, level: str) -> None:
    chunk, back = reserve(memory, 1), reserve(memory, 2)
    wanted = fill(chunk, 0)
    serializer = PackhorseSerializer(level=level, share=0.75)
    nbytes = serializer.estimate_serialized_size(LAYOUT)
    packed = reserve(memory, 3, bytes_layout(nbytes))
    assert nbytes < 0.76 * len(wanted)
    assert serializer.serialize(chunk, packed, key(1)) == nbytes
    packed.set_used_size(nbytes)
    PackhorseDeserializer().deserialize(packed, back, key(1))
    assert bytes(back.byte_array) == wanted
    assert bytes(chunk.byte_array) == wanted


def test_chunks_that_do_not_fit_and_other_layouts_are_refused(memory: L1Manager) -> None:
    chunk, serializer = reserve(memory, 1), PackhorseSerializer(share=0.5)
    fill(chunk, 0)
    small = reserve(memory, 2, bytes_layout(serializer.estimate_serialized_size(LAYOUT)))
    with pytest.raises(ValueError, match="not stored"):
        serializer.serialize(chunk, small, key(1))
    serializer = PackhorseSerializer()
    packed = reserve(memory, 3, bytes_layout(serializer.estimate_serialized_size(LAYOUT)))
    serializer.serialize(chunk, packed, key(1))
    other = MemoryLayoutDesc([torch.Size([2, 4, 64, 256])], [torch.float16])
    with pytest.raises(CorruptionError, match="F16"):
        PackhorseDeserializer().deserialize(packed, reserve(memory, 4, other), key(1))
    packed.raw_data[100_000] ^= 1
    with pytest.raises(CorruptionError):
        PackhorseDeserializer().deserialize(packed, reserve(memory, 5), key(1))


def test_chunks_are_stored_in_files_and_found_again(memory: L1Manager, tmp_path: Path) -> None:
    """LMCache's whole path to a file and back. A damaged file is a miss."""
    assert "packhorse" in get_registered_serde_types()
    serde = create_serde_processor(SerdeConfig("packhorse", {"max_workers": 2}))
    files = FSL2Adapter(FSL2AdapterConfig(str(tmp_path)))
    storage = SerdeL2AdapterWrapper(files, serde, memory)
    try:
        chunks = [reserve(memory, number) for number in (1, 2)]
        wanted = [fill(chunk, number) for number, chunk in enumerate(chunks)]
        task = storage.submit_store_task([key(1), key(2)], chunks)
        done = wait(storage.get_store_event_fd(), storage.pop_completed_store_tasks)
        assert done[task].is_successful()
        stored = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        assert len(stored) == 2
        assert all(path.stat().st_size < 0.74 * len(wanted[0]) for path in stored)

        def load(first: int) -> tuple[list[int], list[bytes]]:
            back = [reserve(memory, first + i) for i in range(2)]
            number = storage.submit_load_task([key(1), key(2)], back)
            fd = storage.get_load_event_fd()
            bitmap = wait(fd, lambda: storage.query_load_result(number))
            return bitmap.get_indices_list(), [bytes(chunk.byte_array) for chunk in back]

        found, contents = load(10)
        assert found == [0, 1]
        assert contents == wanted
        data = bytearray(stored[0].read_bytes())
        data[50_000] ^= 1
        stored[0].write_bytes(data)
        found, contents = load(20)
        assert len(found) < 2
    finally:
        storage.close()
