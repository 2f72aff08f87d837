"""A driver whose GPU is the emulator: it takes the launches of `packhorse.gpu.stream_kernels` as
they are, and computes in the memory of this process, by its own addresses."""

import ctypes
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.ptx.bulk import TensorMap
from tests.ptx.faults import Fault
from tests.ptx.machine import Launch, run_grid
from tests.ptx.memory import WARP, GlobalMemory
from tests.ptx.program import Program, parse

from packhorse.device import stream
from packhorse.gpu import stream_kernels
from packhorse.gpu.nvrtc import compiler

__all__ = ["EmulatedDriver", "install"]


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class _HostMemory(GlobalMemory):
    """All memory of the process. It has no bounds: the tests of kernels have them.

    Args:
        tensors: address and bytes of the tensors that maps name.
    """

    def __init__(self, tensors: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.tensors = tensors

    def content(self, name: str, *, waited: bool) -> np.ndarray:
        return _bytes_at(*self.tensors[name])

    def _places(
        self, address: np.ndarray, n: int, waited: np.ndarray | None
    ) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if (address % min(n, 16)).any():
            raise Fault(f"a global address is not a multiple of {n}")
        first = int(address.min())
        yield _bytes_at(first, int(address.max()) + n - first), slice(None), address - first


class _Map(NamedTuple):
    address: int
    nbytes: int
    tensor: TensorMap


class _Kernel(NamedTuple):
    program: Program
    n_threads: int
    shared_nbytes: int
    cluster: int
    launches: list[tuple[str, int, bool]]

    def n_resident(self, cluster: int, n_processors: int) -> int:
        return 2

    def __call__(
        self, n_programs: int, stream: int, arguments: Sequence[Any], *, early: bool
    ) -> None:
        self.launches.append((self.program.name, n_programs, early))
        maps = {
            name: argument
            for name, argument in zip(self.program.parameters, arguments, strict=True)
            if isinstance(argument, _Map)
        }
        values = [
            0 if isinstance(each, _Map) else int.from_bytes(bytes(each), "little")
            for each in arguments
        ]
        memory = _HostMemory({each.tensor.array: each[:2] for each in maps.values()})
        launch = Launch(
            values, (n_programs, 1, 1), self.n_threads // WARP, self.shared_nbytes,
            dependent=early, cluster=self.cluster, track=False,
            maps={name: each.tensor for name, each in maps.items()},
        )  # fmt: skip
        run_grid(self.program, memory, launch)


class EmulatedDriver:
    """Takes PTX in the place of machine code.

    Attributes:
        launches: names of kernels, programs, and whether they may start early.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, bool]] = []

    def load(self, binary: bytes) -> str:
        return binary.decode()

    def kernel(self, module: str, name: str, n_threads: int, shared_nbytes: int = 0) -> _Kernel:
        found = re.search(r"\.reqnctapercluster (\d+)", module) if name == "multiply" else None
        cluster = int(found[1]) if found else 1
        return _Kernel(parse(module, name), n_threads, shared_nbytes, cluster, self.launches)

    def describe(
        self,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: bool,
    ) -> _Map:
        nbytes = sizes[0] + (sizes[1] - 1) * strides[0] + (sizes[2] - 1) * strides[1]
        tensor = TensorMap(hex(address), tuple(sizes), tuple(strides), tuple(box), swizzle)  # type: ignore[arg-type]
        return _Map(address, nbytes, tensor)


class _PtxCompiler:
    def compile_once(self, source: str, options: tuple[str, ...]) -> bytes:
        return compiler().compile_to_ptx(source, options).encode()


class _Stream:
    cuda_stream = 0


def install(monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """Makes the host a GPU of compute capability 9.0 for products of `packhorse.device.stream`."""
    driver = EmulatedDriver()
    monkeypatch.setattr(stream_kernels, "driver", lambda: driver)
    monkeypatch.setattr(stream_kernels, "compiler", _PtxCompiler)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(stream, "_is_offered", lambda device: True)
    monkeypatch.setattr(stream, "_CHECKED_SHAPE", (20, 140))
    monkeypatch.setattr(stream, "_KERNELS", {})
    return driver
