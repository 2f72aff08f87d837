"""A driver whose GPU is the machine of `warp_runner`: it takes the launches of
`packhorse.gpu.stream_kernels` as they are, and computes in host memory."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from warp_machine import Lanes, Memory, Program, TensorMap
from warp_runner import run

from packhorse.device import stream
from packhorse.gpu import stream_kernels
from packhorse.gpu.nvrtc import compiler

__all__ = ["EmulatedDriver", "install"]


class _HostMemory(Memory):
    """All memory of the process, by its own addresses. Bounds are tested elsewhere."""

    def find(self, addresses: Lanes, nbytes: int, what: str) -> tuple[Lanes, Lanes]:
        first, last = int(addresses.min()), int(addresses.max()) + nbytes
        array = np.frombuffer((ctypes.c_uint8 * (last - first)).from_address(first), np.uint8)
        return array, (addresses - first)[:, None] + np.arange(nbytes)


class _Map(NamedTuple):
    address: int
    tensor: TensorMap


class _Kernel(NamedTuple):
    program: Program
    name: str
    n_threads: int
    shared_nbytes: int
    cluster: int
    launches: list[tuple[str, int, bool]]

    def n_resident(self, cluster: int, n_processors: int) -> int:
        return 2

    def __call__(
        self, n_programs: int, stream: int, arguments: Sequence[Any], *, early: bool
    ) -> None:
        self.launches.append((self.name, n_programs, early))
        maps = {
            f"multiply_param_{i}": each.tensor
            for i, each in enumerate(arguments)
            if isinstance(each, _Map)
        }
        record = [
            ("V128", 0) if isinstance(each, _Map) else (f"S{ctypes.sizeof(each)}", bytes(each))
            for each in arguments
        ]
        run(
            self.program, _HostMemory(), record, n_programs=n_programs, n_threads=self.n_threads,
            cluster=self.cluster, shared_nbytes=self.shared_nbytes, maps=maps,
        )  # fmt: skip


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
        found = module.split(".reqnctapercluster ")
        cluster = int(found[1].split(",")[0]) if len(found) > 1 and name == "multiply" else 1
        program = Program(module, name)
        return _Kernel(program, name, n_threads, shared_nbytes, cluster, self.launches)

    def describe(
        self,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: bool,
    ) -> _Map:
        extent = sizes[0] + (sizes[1] - 1) * strides[0] + (sizes[2] - 1) * strides[1]
        array = np.frombuffer((ctypes.c_uint8 * extent).from_address(address), np.uint8)
        tensor = TensorMap(array, tuple(sizes), tuple(strides), tuple(box), swizzle)  # type: ignore[arg-type]
        return _Map(address, tensor)


class _PtxCompiler:
    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
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
