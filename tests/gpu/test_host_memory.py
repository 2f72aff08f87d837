"""Host memory: exact in size, registered with CUDA (a fake one here), refused with words."""

import gc
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from packhorse.errors import MissingBackendError
from packhorse.gpu import host_memory as module
from packhorse.gpu.cuda_runtime import RuntimeRefusal, node_of_pci, runtime_of
from packhorse.gpu.host_memory import HUGE_PAGE_NBYTES, HostMemory, MemoryKind, host_memory

ON_LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="asks Linux")


class FakeRuntime:
    """CUDA's runtime as it behaves: it knows what is registered, and refuses on request."""

    def __init__(self, *refused: str, node: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.waits: list[set[object]] = []
        self.refused, self._node = refused, node

    def register(self, address: int, nbytes: int) -> None:
        self._refuse("register")
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._refuse("unregister")
        del self.registered[address]

    def wait(self, others: Iterable[object]) -> None:
        self._refuse("wait")
        self.waits.append({"own", *others})

    def pinned(self, nbytes: int) -> np.ndarray:
        self._refuse("pinned")
        return np.full(1 << (nbytes - 1).bit_length(), 0xAA, np.uint8)  # as PyTorch rounds

    def node(self) -> int | None:
        return self._node

    def _refuse(self, call: str) -> None:
        if call in self.refused:
            raise RuntimeRefusal(f"CUDA reports: out of memory for {call} (2)")


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, HUGE_PAGE_NBYTES, (5 << 20) + 3])
@pytest.mark.parametrize("shared", [False, True])
def test_memory_has_the_size_asked_for_and_is_zero(nbytes: int, shared: bool) -> None:
    memory = host_memory(nbytes, device="cpu", shared=shared)
    held = memory.numpy()
    assert held.shape == (nbytes,) == (len(memory),)
    assert not held.any()
    held[:] = 0xFF
    assert held.all()
    assert memory.kind is MemoryKind.PAGEABLE
    assert memory.notes == ()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_memory_is_touched_whole(threads: int) -> None:
    memory = host_memory((130 << 20) + 7, device="cpu", threads=threads)
    assert not memory.numpy()[:: 1 << 12].any()


@ON_LINUX
def test_large_memory_begins_at_a_huge_page_and_lies_in_huge_pages() -> None:
    memory = host_memory(3 * HUGE_PAGE_NBYTES, device="cpu")
    assert memory.address % HUGE_PAGE_NBYTES == 0
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in mode:
        pytest.skip("this system gives no huge pages")
    assert memory.huge_nbytes == 3 * HUGE_PAGE_NBYTES
    assert host_memory(3 * HUGE_PAGE_NBYTES, device="cpu", huge_pages=False).huge_nbytes == 0


def test_huge_pages_of_other_mappings_do_not_count() -> None:
    text = """7f0000000000-7f0000400000 rw-p 00000000 00:00 0
AnonHugePages:      4096 kB
7f0000400000-7f0000800000 rw-s 00000000 00:01 9 /dev/zero (deleted)
AnonHugePages:         0 kB
ShmemPmdMapped:     2048 kB
7f0000800000-7f0000900000 rw-p 00000000 00:00 0
AnonHugePages:      1024 kB
"""
    count = module._huge_nbytes
    assert count(text.splitlines(), 0x7F0000000000, 0x400000) == 4 << 20
    assert count(text.splitlines(), 0x7F0000400000, 0x400000) == 2 << 20
    assert count(text.splitlines(), 0x7F0000200000, 0x400000) == 6 << 20


def test_registered_memory_is_exact_and_lives_as_long_as_a_view() -> None:
    runtime = FakeRuntime()
    memory = host_memory((5 << 20) + 3, runtime=runtime)
    assert memory.kind is MemoryKind.REGISTERED
    assert runtime.registered == {memory.address: (5 << 20) + 3}
    view = memory.numpy()[7:9]
    tensor = memory.tensor()
    del memory
    gc.collect()
    view[:] = 3
    assert tensor[7:9].tolist() == [3, 3]
    assert runtime.registered
    del view, tensor
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_registered_is_pinned_and_says_so() -> None:
    runtime = FakeRuntime("register")
    with pytest.warns(RuntimeWarning, match="could not be registered .*out of memory for register"):
        memory = host_memory(5 << 20, runtime=runtime)
    assert memory.kind is MemoryKind.PINNED
    assert memory.numpy().shape == (5 << 20,)
    assert not memory.numpy().any()
    assert "CUDA has allocated it" in repr(memory)


def test_memory_that_cannot_be_pinned_is_pageable_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="nor could CUDA allocate it .*so it is pageable"):
        memory = host_memory(5 << 20, runtime=FakeRuntime("register", "pinned"))
    assert memory.kind is MemoryKind.PAGEABLE
    assert len(memory.notes) == 2
    with pytest.raises(ValueError, match="cannot read pageable memory: the memory could not be"):
        memory.tensor("cuda")


def test_shared_memory_is_never_pinned_by_cuda() -> None:
    with pytest.warns(RuntimeWarning, match="forked processes do not share pinned memory"):
        memory = host_memory(5000, runtime=FakeRuntime("register"), shared=True)
    assert memory.kind is MemoryKind.PAGEABLE


def test_a_registration_that_cannot_end_is_told() -> None:
    runtime = FakeRuntime("unregister")
    held = [host_memory(5000, runtime=runtime)]
    with pytest.warns(RuntimeWarning, match="host memory stays registered"):
        held.clear()


@pytest.mark.parametrize("refused", ["", "register"])
@pytest.mark.filterwarnings("ignore:host memory. the memory could not be registered:RuntimeWarning")
def test_memory_is_freed_once_all_gpus_that_saw_it_are_idle(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(refused)
    memory = host_memory(5000, runtime=runtime)
    monkeypatch.setattr(torch, "as_tensor", lambda _, device: SimpleNamespace(device=device))
    memory.tensor("cuda:1")
    memory.tensor("cuda:3")
    view = memory.numpy()[7:]
    del memory
    gc.collect()
    assert not runtime.waits
    del view
    gc.collect()
    assert runtime.waits == [{"own", torch.device("cuda:1"), torch.device("cuda:3")}]
    assert not runtime.registered


def test_pinned_memory_that_a_gpu_may_still_read_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="could not be registered"):
        held = [host_memory(5000, runtime=FakeRuntime("register", "wait"))]
    with pytest.warns(RuntimeWarning, match="a GPU may still read host memory that is freed"):
        held.clear()


def test_gpus_find_registered_memory_at_the_address_of_the_host() -> None:
    memory = host_memory(6000, runtime=FakeRuntime())
    said = module._DeviceView(memory.numpy()).__cuda_array_interface__
    assert said == {
        "data": (memory.address, False),
        "shape": (6000,),
        "typestr": "|u1",
        "version": 2,
    }


@ON_LINUX
def test_memory_is_bound_to_the_node_of_the_gpu() -> None:
    memory = host_memory(3 << 20, runtime=FakeRuntime(node=0))
    if memory.notes:
        pytest.skip(memory.notes[0])
    assert memory.node == 0
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    ours = [line for line in lines if line.startswith(f"{memory.address:x} ")]
    assert [line.split()[1] for line in ours] == ["bind:0"]


def test_a_node_that_cannot_be_bound_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MBIND", {})
    memory = host_memory(5000, device="cpu", node=0)
    assert memory.node is None
    assert memory.notes == ("memory cannot be bound to a NUMA node on this system",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nbytes": 0}, "nbytes is 0; it must be at least 1"),
        ({"nbytes": -5}, "nbytes is -5"),
        ({"nbytes": 5, "node": 999}, "no NUMA node 999"),
        ({"nbytes": 5, "node": -1}, "no NUMA node -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        host_memory(device="cpu", **arguments)


@ON_LINUX
def test_more_memory_than_there_is_is_refused_before_it_is_touched() -> None:
    with pytest.raises(MemoryError, match=r"1099511627776 bytes .* are asked for, and \d+ are"):
        host_memory(1 << 40, device="cpu")


def test_available_memory_is_the_least_of_system_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    assert module._available_nbytes(meminfo, tmp_path) == 800 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    assert module._available_nbytes(meminfo, tmp_path) == 800 << 10
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 700\n")
    assert module._available_nbytes(meminfo, tmp_path) == 9000 - 5000 + 700
    assert module._available_nbytes(tmp_path / "absent", tmp_path / "absent") is None


def test_the_node_of_a_gpu_is_what_linux_says(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "0000:5e:00.0").mkdir()
    (tmp_path / "0000:5e:00.0" / "numa_node").write_text("-1\n")  # the machine has one node
    found = [node_of_pci(f"0000:{bus}:00.0", tmp_path) for bus in ("3b", "5e", "ff")]
    assert found == [1, None, None]


def test_without_a_gpu_there_is_no_runtime() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert runtime_of() is runtime_of("cpu") is runtime_of(torch.device("cpu")) is None
    assert host_memory(10).kind is MemoryKind.PAGEABLE
    with pytest.raises(MissingBackendError, match="cuda:1 cannot be used: PyTorch finds no NVIDIA"):
        host_memory(10, device="cuda:1")
    with pytest.raises(ValueError, match="the device is meta; it must be a CUDA device"):
        host_memory(10, device="meta")


_CHILD = """
import gc, os, sys
from packhorse.errors import ClosedError
from packhorse.gpu.host_memory import host_memory
class Runtime:
    def register(self, address, nbytes): pass
    def wait(self, others): pass
    def unregister(self, address): print("unregistered in", os.getpid() == parent, flush=True)
    def node(self): return None
parent = os.getpid()
memory = host_memory(5000, runtime=Runtime() if {registered} else None, device={device!r},
                     shared={shared})
view = memory.numpy()
view[:] = 7
child = os.fork()
if child == 0:
    {work}
    del view, memory
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), view[0], flush=True)
del view, memory
gc.collect()
"""


def _run_child(work: str, *, registered: bool, shared: bool) -> list[str]:
    device = None if registered else "cpu"
    script = _CHILD.format(registered=registered, shared=shared, work=work, device=device)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.stdout.splitlines()


@ON_LINUX
def test_a_forked_process_is_refused_registered_memory() -> None:
    work = """
    try: memory.numpy()
    except ClosedError as error: print("refused:", error, flush=True)"""
    lines = _run_child(work, registered=True, shared=False)
    assert re.fullmatch("refused: .*allocate it with shared=True.*", lines[0])
    assert lines[1:] == ["0 7", "unregistered in True"]


@ON_LINUX
def test_a_forked_process_cannot_take_wiped_memory_for_the_tensor() -> None:
    lines = _run_child("print(view[0], flush=True)", registered=True, shared=False)
    assert lines == [f"{-signal.SIGSEGV} 7", "unregistered in True"]


@ON_LINUX
def test_forked_processes_share_memory_that_was_asked_for_so() -> None:
    lines = _run_child("memory.numpy()[0] = 9", registered=True, shared=True)
    assert lines == ["0 9", "unregistered in True"]


@ON_LINUX
def test_a_forked_process_reads_pageable_memory() -> None:
    lines = _run_child("assert memory.numpy()[0] == 7", registered=False, shared=False)
    assert lines == ["0 7"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_what_the_host_writes() -> None:
    memory = host_memory((3 << 20) + 5, device="cuda")
    assert memory.kind is MemoryKind.REGISTERED
    values = np.arange(memory.nbytes, dtype=np.uint32).astype(np.uint8)
    memory.numpy()[:] = values
    seen = memory.tensor("cuda")
    assert seen.is_cuda
    assert seen.data_ptr() == memory.address
    assert torch.equal(seen.clone().cpu(), torch.from_numpy(values))
    del memory
    assert int(seen[5]) == 5  # the view keeps the memory


def test_memory_is_described() -> None:
    assert repr(host_memory(7, device="cpu")) == "HostMemory(7 bytes, pageable)"
    assert isinstance(host_memory(7, device="cpu"), HostMemory)
