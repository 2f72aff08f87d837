"""The parts of a GPU that `warp_runner` runs PTX on: programs with their memory, barriers, copies.

Memory is checked: bounds, alignment, and shared memory that nothing wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

__all__ = [
    "ALL_LANES",
    "CLUSTER_SHIFT",
    "GLOBAL_SHIFT",
    "LANE",
    "PARAMETERS",
    "Barrier",
    "Block",
    "Cluster",
    "Instruction",
    "Lanes",
    "MachineError",
    "Memory",
    "Program",
    "TensorMap",
    "Warp",
    "dtype_of",
    "finish_copy",
    "narrow",
    "widen",
]

Lanes = Any  # a NumPy vector of 32
LANE = np.arange(32)
ALL_LANES = np.ones(32, bool)
GLOBAL_SHIFT = 36  # each array has an address space of its own
PARAMETERS = 1 << 60
CLUSTER_SHIFT = 24  # of shared addresses of another program


class MachineError(Exception):
    """The program does what a GPU would not do, or not reliably."""


@cache
def dtype_of(kind: str) -> np.dtype[Any]:
    if kind == "pred":
        return np.dtype(bool)
    letter = {"f": "f", "s": "i"}.get(kind[0], "u")
    return np.dtype(f"{letter}{int(kind.lstrip('bufsx')) // 8}")


def widen(bits: Lanes) -> Lanes:
    """BF16 as bits to FP32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: Lanes) -> Lanes:
    """FP32 to the nearest BF16 as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint32)


@dataclass
class TensorMap:
    """A tensor of bytes that boxes are copied from, as `cuTensorMapEncodeTiled` describes it."""

    array: np.ndarray[Any, Any]
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    swizzle: bool

    def read(self, start: tuple[int, int, int]) -> tuple[Lanes, Lanes]:
        """Bytes of a box and their places in shared memory."""
        at = [np.arange(n) + s for n, s in zip(self.box, start, strict=True)]
        z, y, x = np.meshgrid(at[2], at[1], at[0], indexing="ij")
        inside = (x < self.sizes[0]) & (y < self.sizes[1]) & (z < self.sizes[2])
        offsets = x + y * self.strides[0] + z * self.strides[1]
        flat = self.array.reshape(-1)
        data = np.where(inside, flat[np.where(inside, offsets, 0)], 0).astype(np.uint8)
        place = np.arange(data.size)
        if self.swizzle:
            place = place ^ (place >> 7 & 7) << 4
        return data.reshape(-1), place


class Memory:
    """Arrays of device memory, each with an address."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []

    def add(self, array: np.ndarray[Any, Any]) -> int:
        """The address of an array, which programs then read and write."""
        self.arrays.append(array.reshape(-1).view(np.uint8))
        return len(self.arrays) << GLOBAL_SHIFT

    def find(self, addresses: Lanes, nbytes: int, what: str) -> tuple[Lanes, Lanes]:
        """The array that addresses lie in, and the index of each byte."""
        number = addresses >> GLOBAL_SHIFT
        if (number != number[0]).any() or not 0 < number[0] <= len(self.arrays):
            raise MachineError(f"{what}: no array at {int(addresses[0]):#x}")
        array = self.arrays[int(number[0]) - 1]
        at = addresses & (1 << GLOBAL_SHIFT) - 1
        if (at + nbytes > array.size).any():
            raise MachineError(f"{what}: {int(at.max())} + {nbytes} is beyond {array.size}")
        if (at % min(nbytes, 16)).any():
            raise MachineError(f"{what}: not aligned")
        return array, at[:, None] + np.arange(nbytes)


@dataclass
class Instruction:
    """One instruction: its predicate, the parts of its name, its operands."""

    predicate: str
    parts: list[str]
    operands: list[str]
    text: str
    label: str = ""


def _split(operands: str) -> list[str]:
    """Operands between commas that no brackets hold."""
    found, depth, start = [], 0, 0
    for at, letter in enumerate(operands + ","):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append(operands[start:at].strip())
            start = at + 1
    return [operand for operand in found if operand]


class Program:
    """A kernel's PTX, parsed."""

    def __init__(self, ptx: str, kernel: str) -> None:
        start = ptx.index(f".entry {kernel}(")
        head, body = ptx[start:].split("\n{\n", 1)
        body = body.split("\n}\n", 1)[0]
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        self.parameters_nbytes = 0
        for align, kind, name, size in re.findall(
            r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?", head
        ):
            nbytes = int(size) if size else dtype_of(kind).itemsize
            self._place(name, nbytes, int(align or nbytes))
        for line in body.splitlines():
            self._read(line.split("//")[0].strip())

    def _place(self, name: str, nbytes: int, align: int) -> None:
        offset = -(-self.parameters_nbytes // align) * align
        self.offsets[name], self.parameters_nbytes = offset, offset + nbytes

    def _read(self, line: str) -> None:
        label = re.match(r"(\$\w+):", line)
        if label:
            self.labels[label[1]] = len(self.instructions)
            line = line[label.end() :]
        for piece in line.split(";"):
            text = re.sub(r"^\{(?=\s*\.reg)|^\}$", "", piece.strip()).strip()
            if not text or text.startswith("."):
                continue
            found = re.match(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*)$", text, re.DOTALL)
            assert found, text
            operands = _split(found[3])
            self.instructions.append(
                Instruction(found[1] or "", re.split(r"\.|::", found[2]), operands, text)
            )


@dataclass
class Barrier:
    count: int
    pending: int
    nbytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending < 0:
            raise MachineError("more warps arrive at a barrier than it counts")
        if self.pending == 0 and self.nbytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Warp:
    block: Block
    number: int
    registers: dict[str, Lanes] = field(default_factory=dict)
    groups: list[tuple[int, Lanes]] = field(default_factory=list)  # where lanes are
    products: list[tuple[Instruction, list[Lanes]]] = field(default_factory=list)
    waits: tuple[str, int] | None = None  # for a barrier of all threads, and its turn

    def __post_init__(self) -> None:
        self.groups = [(0, ALL_LANES)]


class Block:
    """A program: its shared memory and barriers."""

    def __init__(self, cluster: Cluster, rank: int, number: int, n_threads: int) -> None:
        nbytes = cluster.shared_nbytes
        self.cluster, self.rank, self.number, self.n_threads = cluster, rank, number, n_threads
        self.shared = np.full(nbytes, 0xCB, np.uint8)
        self.written = np.zeros(nbytes, bool)
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.warps = [Warp(self, i) for i in range(n_threads // 32)]

    def places(self, addresses: Lanes, nbytes: int, what: str) -> Lanes:
        at = np.asarray(addresses).astype(np.int64)
        if (at < 0).any() or (at + nbytes > self.shared.size).any():
            raise MachineError(f"{what}: beyond shared memory")
        if (at % min(nbytes, 16)).any():
            raise MachineError(f"{what}: not aligned in shared memory")
        return at[:, None] + np.arange(nbytes)

    def read(self, addresses: Lanes, nbytes: int, what: str) -> Lanes:
        at = self.places(addresses, nbytes, what)
        if not self.written[at].all():
            raise MachineError(f"{what}: reads shared memory that nothing wrote")
        return self.shared[at]

    def write(self, at: Lanes, data: Lanes) -> None:
        self.shared[at] = data
        self.written[at] = True

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise MachineError(f"no barrier at {address}")
        return self.barriers[address]


@dataclass
class Cluster:
    program: Program
    memory: Memory
    parameters: bytes
    maps: dict[str, TensorMap]
    shared_nbytes: int
    n_programs: int
    mode: str
    copies: list[Callable[[], None]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    conflicts: dict[str, list[int]] = field(default_factory=dict)


def finish_copy(block: Block, at: Lanes, data: Lanes, barrier: int) -> None:
    block.write(at, data)
    state = block.barrier(barrier)
    state.nbytes -= len(data)
    state.settle()
