"""Memory of the host that GPUs read directly, as large as asked for and no larger.

`host_memory` maps anonymous memory in huge pages, binds it to the NUMA node of the GPU, touches all
of it, and registers it with CUDA. Why not PyTorch's pinned tensors: they round sizes up to a power
of two, and have pages of 4 KiB, so that nearly each random row costs the GPU a miss in its table of
addresses.

What the system refuses becomes a note, and the next best is taken: memory that CUDA has pinned,
then pageable memory. `HostMemory.kind` says which it is.

Files are read into this memory. A file that is mapped must never be registered: CUDA refuses some
mappings, and copies all pages of others.

A fork would copy registered memory as a whole. So a child process does not get it, unless it was
asked for with `shared=True`: `HostMemory` refuses, and old views end the child with SIGSEGV.

Shared memory is a file without a name (memfd_create(2)), so that processes that are spawned can map
it, too: a pickle for such a process has a descriptor of the file, and no bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import warnings
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from packhorse.errors import ClosedError
from packhorse.gpu.cuda_runtime import CudaRuntime, RuntimeRefusal, runtime_of
from packhorse.process import at_fork
from packhorse.threads import in_order

if TYPE_CHECKING:
    import torch

__all__ = ["HUGE_PAGE_NBYTES", "HostMemory", "MemoryKind", "host_memory"]

HUGE_PAGE_NBYTES = 1 << 21  # of x86-64, and of ARM with pages of 4 KiB
_PIECE_NBYTES = 1 << 26  # is touched in one call, between which Ctrl-C is seen
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14
_WIPE_ON_FORK = 18  # of madvise, since Linux 4.14
_NO_ACCESS = 0  # of mprotect
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_BIND_STRICTLY = 2  # MPOL_BIND: pages come from this node or not at all


class MemoryKind(StrEnum):
    """What a GPU can do with memory of the host."""

    REGISTERED = "registered"  # read it directly; exact in size, in huge pages
    PINNED = "pinned"  # read it directly; CUDA has allocated it
    PAGEABLE = "pageable"  # not read it: each transfer is copied by the host first


class _Mapping(mmap.mmap):
    """A mapping that undoes its registration before its memory goes away."""

    release: Callable[[], None] | None = None
    descriptor: int | None = None  # of its file, which other processes can map

    # At the end of the program, `os` may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.release is not None:
            self.release()
        if self.descriptor is not None:
            close(self.descriptor)


_not_inherited: WeakSet[_Mapping] = WeakSet()  # by forked processes


class HostMemory:
    """Memory of the host; `host_memory` allocates it.

    It lives as long as this object or a view of it.

    Attributes:
        nbytes: its size.
        kind: what a GPU can do with it.
        node: the NUMA node that it is bound to; None if it is bound to none.
        notes: what was refused, and what was done instead; one sentence each.

    Example:
        >>> from packhorse.host import host_memory
        >>> memory = host_memory(1 << 20)
        >>> memory.numpy().shape
        (1048576,)
    """

    def __init__(
        self,
        owner: Any,
        offset: int,
        nbytes: int,
        kind: MemoryKind,
        node: int | None,
        notes: tuple[str, ...],
        *,
        is_inherited: bool,
        readers: set[Any] | None = None,
    ) -> None:
        self.nbytes, self.kind, self.node, self.notes = nbytes, kind, node, notes
        self._bytes: NDArray[np.uint8] = np.frombuffer(owner, np.uint8, nbytes, offset)
        self._descriptor, self._offset = getattr(owner, "descriptor", None), offset
        self._pid = None if is_inherited else os.getpid()
        self._readers: set[Any] = set() if readers is None else readers

    @property
    def is_inherited(self) -> bool:
        """Whether forked processes get it."""
        return self._pid is None

    @property
    def is_shared(self) -> bool:
        """Whether other processes may have it at the same time, and see what is written to it."""
        return self._descriptor is not None

    @property
    def address(self) -> int:
        """Of the first byte, for the host and for kernels."""
        return self._bytes.ctypes.data

    def numpy(self) -> NDArray[np.uint8]:
        """All bytes: uint8, (nbytes,), writable.

        Raises:
            ClosedError: this process is a fork of the one that allocated the memory, and has not
                got it.
        """
        if self._pid is not None and self._pid != os.getpid():
            raise ClosedError(
                "this memory is registered with CUDA, so a forked process has not got it: allocate"
                " it with shared=True, or read it in the process that allocated it"
            )
        return self._bytes

    def tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """All bytes as a tensor, uint8 (nbytes,); nothing is copied.

        Args:
            device: "cpu", or a CUDA device whose kernels shall read the memory.

        Raises:
            ClosedError: as `numpy`.
            ValueError: GPUs cannot read pageable memory.
        """
        import torch

        held = self.numpy()
        target = torch.device(device)
        if target.type == "cpu":
            return torch.from_numpy(held)
        if self.kind is MemoryKind.PAGEABLE:
            raise ValueError(
                f"{target} cannot read pageable memory: {' '.join(self.notes) or 'there is no GPU'}"
            )
        view = torch.as_tensor(_DeviceView(held), device=target)
        self._readers.add(view.device)
        return view

    @property
    def huge_nbytes(self) -> int | None:
        """Bytes that lie in huge pages; None if the system does not say (it is not Linux)."""
        try:
            with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
                return _huge_nbytes(lines, self.address, self.nbytes)
        except OSError:
            return None

    def __len__(self) -> int:
        return self.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            raise TypeError(
                "memory of the host is not pickled, except for a process that is being spawned; "
                "save what it was filled from (a table: packhorse.host.save_tables)"
            )
        if self._descriptor is None:
            raise TypeError(
                "a process that is spawned does not get this memory: allocate it with shared=True "
                "(as in pack_table(..., shared=True)), or let workers fork, as in DataLoader(..., "
                "multiprocessing_context='fork')"
            )
        from multiprocessing.reduction import DupFd  # where there are descriptors

        return _attach, (DupFd(self._descriptor), self._offset, self.nbytes, self.node)

    def __repr__(self) -> str:
        place = "" if self.node is None else f", NUMA node {self.node}"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"HostMemory({self.nbytes} bytes, {self.kind}{place}{notes})"


def _attach(descriptor: Any, offset: int, nbytes: int, node: int | None) -> HostMemory:
    """Memory of the process that has spawned this one; CUDA knows nothing of it here."""
    mapping = _map_file(descriptor.detach())
    return HostMemory(mapping, offset, nbytes, MemoryKind.PAGEABLE, node, (), is_inherited=True)


class _DeviceView:
    """Tells PyTorch where memory is that a GPU reads at the host's address."""

    def __init__(self, held: NDArray[np.uint8]) -> None:
        self._held = held  # PyTorch keeps this object, and so the memory, as long as the tensor
        self.__cuda_array_interface__ = {
            "data": (held.ctypes.data, False),
            "shape": held.shape,
            "typestr": "|u1",
            "version": 2,
        }


def host_memory(
    nbytes: int,
    *,
    device: torch.device | str | None = None,
    node: int | None = None,
    huge_pages: bool = True,
    shared: bool = False,
    threads: int = 1,
    runtime: CudaRuntime | None = None,
) -> HostMemory:
    """Allocates memory of the host for tensors that a GPU reads; its bytes are zero.

    If the GPU cannot be given the best kind, a `RuntimeWarning` says so and the memory is of the
    next kind. Without a GPU the memory is pageable, without a warning.

    Args:
        nbytes: how many bytes, at least 1.
        device: the CUDA device that will read the memory; "cpu" for none. None for PyTorch's
            current device, if the program has imported PyTorch and there is a GPU.
        node: the NUMA node to bind the memory to; None for that of the GPU.
        huge_pages: whether to ask for pages of 2 MiB.
        shared: whether forked and spawned processes, such as workers of a DataLoader, share the
            memory. Linux gives shared memory huge pages only if `shmem_enabled` allows it.
        threads: threads that touch the pages.
        runtime: how to reach CUDA; for tests.

    Raises:
        MemoryError: there is not so much memory. Nothing stays allocated.
        MissingBackendError: `device` names a GPU, and PyTorch finds none.
        ValueError: `nbytes` is not positive, or there is no such node or kind of device.

    Example:
        >>> from packhorse.host import host_memory
        >>> memory = host_memory(6 << 20, device="cpu")
        >>> memory.kind, memory.nbytes
        (<MemoryKind.PAGEABLE: 'pageable'>, 6291456)
    """
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}; it must be at least 1")
    if node is not None and not _has_node(node):
        raise ValueError(f"this machine has no NUMA node {node}; node=None takes that of the GPU")
    if runtime is None:
        runtime = runtime_of(device)
    _require_available(nbytes)
    notes: list[str] = []
    if node is None and runtime is not None:
        node = runtime.node()
    offset, mapping, bound = _map(nbytes, node, huge_pages, shared, threads, notes)
    kind, readers = MemoryKind.PAGEABLE, set[Any]()
    if runtime is not None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping, offset))
        try:
            _register(runtime, mapping, start, nbytes, shared, readers)
            kind = MemoryKind.REGISTERED
        except RuntimeRefusal as error:
            notes.append(f"the memory could not be registered ({error})")
            if not shared:  # forks do not share what CUDA allocates
                mapping.close()
                return _pinned_or_pageable(runtime, nbytes, node, huge_pages, threads, notes)
            notes.append("it is pageable, because forked processes do not share pinned memory")
            _warn(notes)
    is_inherited = shared or kind is MemoryKind.PAGEABLE
    return HostMemory(
        *(mapping, offset, nbytes, kind, bound, tuple(notes)),
        is_inherited=is_inherited,
        readers=readers,
    )


def _map(
    nbytes: int,
    node: int | None,
    huge_pages: bool,
    shared: bool,
    threads: int,
    notes: list[str],
) -> tuple[int, _Mapping, int | None]:
    """Maps memory and touches it: its offset in the mapping, the mapping, and the node that it is
    bound to."""
    slack = HUGE_PAGE_NBYTES if huge_pages and nbytes >= HUGE_PAGE_NBYTES else 0
    try:
        mapping = _new_mapping(nbytes + slack, shared)
    except OSError as error:
        raise MemoryError(
            f"{nbytes} bytes of host memory cannot be mapped ({error.strerror}): free memory,"
            " or keep a smaller part of the tensor"
        ) from error
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    offset = -start % HUGE_PAGE_NBYTES if slack else 0
    bound = _bind(start + offset, nbytes, node, notes)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        # The system rounds the length up to whole pages, and the mapping has a huge page more.
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, offset, nbytes)
        except OSError as error:
            notes.append(f"the system refuses huge pages ({error.strerror})")
    _touch(mapping, start, offset, nbytes, threads)
    return offset, mapping, bound


def _new_mapping(nbytes: int, shared: bool) -> _Mapping:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows, where no process forks
        return _Mapping(-1, nbytes)
    if shared and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("packhorse")
        try:
            os.ftruncate(descriptor, nbytes)
            return _map_file(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    return _Mapping(-1, nbytes, flags=kind | mmap.MAP_ANONYMOUS)


def _map_file(descriptor: int) -> _Mapping:
    mapping = _Mapping(descriptor, 0)
    mapping.descriptor = descriptor
    return mapping


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _bind(start: int, nbytes: int, node: int | None, notes: list[str]) -> int | None:
    """Binds memory that was not touched yet; the node, or None if it is bound to none."""
    if node is None:
        return None
    number = _MBIND.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        notes.append("memory cannot be bound to a NUMA node on this system")
        return None
    n_words = node // 64 + 1
    mask = (ctypes.c_uint64 * n_words)()
    mask[node // 64] = 1 << node % 64
    page = mmap.PAGESIZE
    first, stop = start // page * page, -(-(start + nbytes) // page) * page
    result = _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(first),
        ctypes.c_ulong(stop - first),
        ctypes.c_int(_BIND_STRICTLY),
        mask,
        ctypes.c_ulong(64 * n_words + 1),  # the kernel subtracts 1
        ctypes.c_uint(0),
    )
    if result != 0:
        words = os.strerror(ctypes.get_errno())
        notes.append(f"the memory could not be bound to NUMA node {node} ({words})")
        return None
    return node


def _touch(mapping: _Mapping, start: int, offset: int, nbytes: int, threads: int) -> None:
    """Makes the system find a page for each address now, on the right node."""

    def touch(number: int) -> None:
        at = offset + number * _PIECE_NBYTES
        size = min(_PIECE_NBYTES, offset + nbytes - at)
        if platform.system() == "Linux":
            call = _libc().madvise  # ctypes releases Python's lock
            page_start = (start + at) // mmap.PAGESIZE * mmap.PAGESIZE
            length = ctypes.c_size_t(start + at + size - page_start)
            if call(ctypes.c_void_p(page_start), length, _POPULATE_WRITE) == 0:
                return
        np.frombuffer(mapping, np.uint8, size, at)[:: mmap.PAGESIZE] = 0

    for _ in in_order(touch, -(-nbytes // _PIECE_NBYTES), threads):
        pass


def _register(
    runtime: CudaRuntime,
    mapping: _Mapping,
    start: int,
    nbytes: int,
    shared: bool,
    readers: set[Any],
) -> None:
    runtime.register(start, nbytes)
    owner = os.getpid()

    def release() -> None:
        if os.getpid() != owner:  # a fork has no CUDA
            return
        try:
            runtime.wait(readers)
            runtime.unregister(start)
        except RuntimeRefusal as error:
            warnings.warn(f"host memory stays registered: {error}", RuntimeWarning, stacklevel=2)

    mapping.release = release
    if not shared and platform.system() == "Linux":
        # The address range stays taken in the child, so that unmapping it there is harmless.
        mapping.madvise(_WIPE_ON_FORK)
        _not_inherited.add(mapping)
        at_fork(in_child=_forbid_wiped)


def _forbid_wiped() -> None:
    """Makes a child's use of a view end it: the system has wiped the memory, and zeros would be
    taken for the tensor."""
    for mapping in _not_inherited:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        length = ctypes.c_size_t(len(mapping))
        _libc().mprotect(ctypes.c_void_p(start), length, ctypes.c_int(_NO_ACCESS))


def _pinned_or_pageable(
    runtime: CudaRuntime,
    nbytes: int,
    node: int | None,
    huge_pages: bool,
    threads: int,
    notes: list[str],
) -> HostMemory:
    try:
        pinned = runtime.pinned(nbytes)
    except RuntimeRefusal as error:
        notes.append(f"nor could CUDA allocate it ({error}), so it is pageable")
        _warn(notes)
        offset, mapping, bound = _map(nbytes, node, huge_pages, False, threads, notes)
        return HostMemory(
            mapping, offset, nbytes, MemoryKind.PAGEABLE, bound, tuple(notes), is_inherited=True
        )
    notes.append("CUDA has allocated it, in small pages and perhaps more than was asked for")
    _warn(notes)
    np.frombuffer(pinned, np.uint8, nbytes).fill(0)
    readers = set[Any]()
    # PyTorch gives the memory to others at once: it does not know of kernels that read it.
    finalize(pinned, _wait, runtime, readers, os.getpid()).atexit = False
    return HostMemory(
        *(pinned, 0, nbytes, MemoryKind.PINNED, None, tuple(notes)),
        is_inherited=False,
        readers=readers,
    )


def _wait(runtime: CudaRuntime, readers: set[Any], owner: int) -> None:
    """Waits for the GPUs that may read memory which is freed next."""
    if os.getpid() != owner:  # a fork has no CUDA
        return
    try:
        runtime.wait(readers)
    except RuntimeRefusal as error:
        warnings.warn(
            f"a GPU may still read host memory that is freed: {error}", RuntimeWarning, stacklevel=2
        )


def _warn(notes: list[str]) -> None:
    warnings.warn("host memory: " + "; ".join(notes), RuntimeWarning, stacklevel=4)


def _has_node(node: int, root: Path = Path("/sys/devices/system/node")) -> bool:
    return node == 0 or (node > 0 and (root / f"node{node}").is_dir())


def _require_available(nbytes: int) -> None:
    """Refuses more memory than there is: Linux would give it, and end the process at its use."""
    left = _available_nbytes()
    if left is not None and nbytes > left:
        raise MemoryError(
            f"{nbytes} bytes of host memory are asked for, and {left} are available: free memory,"
            " or keep a smaller part of the tensor"
        )


def _available_nbytes(
    meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that a process can still use, by the system and by the limit of its container."""
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit = int((group / "memory.max").read_text())  # "max" is no limit
        used = int((group / "memory.current").read_text())
        found.append(limit - used + _cached_nbytes(group))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def _cached_nbytes(group: Path) -> int:
    """Bytes of files that the container's limit counts, and that the system gives up at need."""
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _huge_nbytes(lines: Any, address: int, nbytes: int) -> int:
    """Sums up the huge pages of the mappings that hold an address range (proc_pid_smaps(5))."""
    found, is_ours = 0, False
    for line in lines:
        name = line.split(maxsplit=1)[0]
        first, dash, stop = name.partition("-")
        if dash:
            is_ours = int(first, 16) < address + nbytes and address < int(stop, 16)
        elif is_ours and name in ("AnonHugePages:", "ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found
