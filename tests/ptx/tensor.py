"""Matrices: ldmatrix, stmatrix, mma.sync, and Hopper's wgmma."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import Fault, UnknownInstruction
from tests.ptx.memory import WARP
from tests.ptx.program import Group, Instruction
from tests.ptx.values import from_bf16, reader, writer

if TYPE_CHECKING:
    from tests.ptx.machine import Warp

_LANE = np.arange(WARP)
_ROW, _PAIR = _LANE >> 2, 2 * (_LANE & 3)  # of fragments


def _places(n_words: int, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of a fragment belong (words x lanes x 2), with the number's bit that says
    by how much a word is lower, and the bit that says by how much it is further to the right."""
    i = np.arange(n_words)[:, None, None]
    rows = _ROW[:, None] + 8 * (i >> row & 1) + np.zeros(2, np.int64)
    return rows, _PAIR[:, None] + 8 * (i >> column & 1) + np.arange(2)


_LEFT = _places(4, 0, 1)
_RIGHT = _places(2, 9, 0)[::-1]
_RESULT = tuple(place.transpose(0, 2, 1).reshape(4, WARP) for place in _places(2, 0, 9))


def compile_tensor(x: Instruction) -> Callable | None:
    """A function that does an instruction; None if it is not one of these."""
    return _MAKERS[x.opcode[0]](x) if x.opcode[0] in _MAKERS else None


def _mma(x: Instruction) -> Callable:
    if "m16n8k16" not in x.opcode or x.opcode[-4:] != ("f32", "bf16", "bf16", "f32"):
        raise UnknownInstruction(x.text)
    d, a, b, c = x.operands
    writes = [writer(part) for part in d.parts]
    reads_a, reads_b = ([reader(part, "b32") for part in group.parts] for group in (a, b))
    reads_c = [reader(part, "f32") for part in c.parts]

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        warp.machine.whole_programs(mask)
        n = warp.machine.n_programs
        left = _left([read(warp) for read in reads_a], n)
        right = np.empty((n, 16, 8), np.float32)
        right[:, *_RIGHT] = _halves([read(warp) for read in reads_b], n)
        product = np.matmul(left, right, dtype=np.float64)[:, *_RESULT]
        for i, (read, write) in enumerate(zip(reads_c, writes, strict=True)):
            part = product[:, i].reshape(-1)
            write(warp, (read(warp) + part).astype(np.float32), mask)

    return run


def _halves(words: list[np.ndarray], n: int) -> np.ndarray:
    """The two BF16 elements of each word, as FP32 (programs x words x lanes x 2)."""
    together = np.empty((n, len(words), WARP), "<u4")
    for i, word in enumerate(words):
        together[:, i] = word if word.size == 1 else word.reshape(n, WARP)
    return from_bf16(together.view("<u2").reshape(n, len(words), WARP, 2))


def _left(words: list[np.ndarray], n: int) -> np.ndarray:
    """The left operand (programs x 16 x 16) from the four registers of its fragment."""
    left = np.empty((n, 16, 16), np.float32)
    left[:, *_LEFT] = _halves(words, n)
    return left


def _ldmatrix(x: Instruction) -> Callable:
    parts = x.operands[0].parts if isinstance(x.operands[0], Group) else (x.operands[0],)
    writes, address = [writer(part) for part in parts], reader(x.operands[1].base, "u32")
    offset, is_transposed = x.operands[1].offset, "trans" in x.opcode

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        programs = machine.whole_programs(mask)
        addresses = np.broadcast_to(address(warp), (machine.n_lanes,)).astype(np.int64) + offset
        for i, write in enumerate(writes):
            rows = programs[:, None] * WARP + np.arange(8 * i, 8 * i + 8)
            # Lane 0 of a program stands for all: the instruction is for the whole warp.
            lanes = np.repeat(programs * WARP, 8)
            data = machine.shared.load(warp.number, lanes, addresses[rows.reshape(-1)], 16)
            tiles = data.view(np.uint16).reshape(-1, 8, 8)
            if is_transposed:
                tiles = np.ascontiguousarray(tiles.transpose(0, 2, 1))
            values = np.zeros(machine.n_lanes, np.uint32)
            words = tiles.view(np.uint32)[:, _ROW, _LANE & 3]
            values.reshape(-1, WARP)[programs] = words
            write(warp, values, mask)

    return run


def _stmatrix(x: Instruction) -> Callable:
    parts = x.operands[1].parts if isinstance(x.operands[1], Group) else (x.operands[1],)
    reads, address = [reader(part, "b32") for part in parts], reader(x.operands[0].base, "u32")
    offset, is_transposed = x.operands[0].offset, "trans" in x.opcode

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        programs = machine.whole_programs(mask)
        addresses = np.broadcast_to(address(warp), (machine.n_lanes,)).astype(np.int64) + offset
        for i, read in enumerate(reads):
            words = np.broadcast_to(read(warp), (machine.n_lanes,)).reshape(-1, WARP)[programs]
            tiles = np.zeros((len(programs), 8, 4), np.uint32)
            tiles[:, _ROW, _LANE & 3] = words
            if is_transposed:
                halves = tiles.view(np.uint16).transpose(0, 2, 1)
                tiles = np.ascontiguousarray(halves).view(np.uint32)
            rows = (programs[:, None] * WARP + np.arange(8 * i, 8 * i + 8)).reshape(-1)
            data = tiles.reshape(-1, 4).view(np.uint8)
            machine.shared.store(warp.number, rows, addresses[rows], data)

    return run


# Hopper's products.


@dataclass
class _Product:
    run: Callable
    programs: np.ndarray
    places: list[np.ndarray]  # of the operands in shared memory
    registers: set[int]


class Products:
    """The products of a warp that it has not waited for. All programs are at the same place here,
    as the loops around products depend on the sizes only."""

    def __init__(self, warp: "Warp") -> None:
        self.warp = warp
        self.running: list[_Product] = []
        self.groups: list[list[_Product]] = []

    def begin(self, product: _Product) -> None:
        machine = self.warp.machine
        for place in product.places:
            lanes = np.repeat(product.programs * WARP, place.size // len(product.programs))
            machine.shared.begin_product(self.warp.number, lanes, place)
        if not machine.launch.late:
            product.run()
        self.running.append(product)
        self._update()

    def commit(self) -> None:
        self.groups.append(self.running)
        self.running = []

    def wait(self, n_left: int) -> None:
        machine = self.warp.machine
        has_ended = len(self.groups) > n_left
        while len(self.groups) > n_left:
            self.warp.in_flight = set()
            for product in self.groups.pop(0):
                if machine.launch.late:
                    product.run()
                for place in product.places:
                    lanes = np.repeat(product.programs * WARP, place.size // len(product.programs))
                    machine.shared.end_product(self.warp.number, lanes, place)
        if has_ended:  # all lanes have read together
            machine.shared.sync_lanes(self.warp.number, np.arange(machine.n_programs))
        self._update()

    def _update(self) -> None:
        every = [*self.running, *(product for group in self.groups for product in group)]
        self.warp.in_flight = set().union(*(product.registers for product in every))

    def require_none(self) -> None:
        if self.running or self.groups:
            raise Fault(f"warp {self.warp.number} ends while products are under way")


def _wgmma(x: Instruction) -> Callable:
    if x.opcode[1] == "commit_group":
        return lambda warp, mask: warp.products.commit()
    if x.opcode[1] == "wait_group":
        return lambda warp, mask: warp.products.wait(x.operands[0].bits)
    if x.opcode[1] == "fence":
        return lambda warp, mask: None
    shape = re.fullmatch(r"m64n(\d+)k16", x.opcode[4])
    if shape is None or x.opcode[5:] != ("f32", "bf16", "bf16"):
        raise UnknownInstruction(x.text)
    return _wgmma_of(x, int(shape[1]))


def _wgmma_of(x: Instruction, n_columns: int) -> Callable:
    sums, a, b, scale, *flags = x.operands
    writes = [writer(part) for part in sums.parts]
    reads = [reader(part, "f32") for part in sums.parts]
    in_registers = isinstance(a, Group)
    reads_a = [reader(part, "b32") for part in a.parts] if in_registers else []
    descriptor_a = None if in_registers else reader(a, "u64")
    descriptor_b, adds = reader(b, "u64"), reader(scale, "pred")
    transposed = [flag.bits for flag in flags[2:]]
    registers = {part.number for part in sums.parts}
    if in_registers:
        registers |= {part.number for part in a.parts}

    def begin(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        programs = machine.whole_programs(mask)
        n = len(programs)
        span = machine.shared.span
        first = programs * WARP
        bits_b = np.broadcast_to(descriptor_b(warp), (machine.n_lanes,))[first]
        place_b = _operand(bits_b, n_columns, bool(transposed[-1]), programs * span)
        places = [place_b]
        added = np.broadcast_to(adds(warp), (machine.n_lanes,))
        if descriptor_a is not None:
            bits_a = np.broadcast_to(descriptor_a(warp), (machine.n_lanes,))[first]
            all_rows = _operand(bits_a, 64, bool(transposed[0]), programs * span)
            quarter = warp.number % 4 * 16
            places.append(all_rows[:, quarter : quarter + 16])

        def run() -> None:
            right = from_bf16(machine.shared.read_for_product(place_b))  # n x columns x 16
            if descriptor_a is None:
                left = _left([read(warp) for read in reads_a], machine.n_programs)[programs]
            else:
                left = from_bf16(machine.shared.read_for_product(places[1]))
            product = np.matmul(left, right.transpose(0, 2, 1), dtype=np.float64)
            any_adds = added.any()
            for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
                j, part = divmod(i, 4)
                column = 8 * j + _PAIR + (part & 1)
                values = np.zeros((machine.n_programs, WARP))
                values[programs] = product[:, _ROW + 8 * (part >> 1), column].reshape(n, WARP)
                before = np.where(added, read(warp), np.float32(0)) if any_adds else 0
                write(warp, (before + values.reshape(-1)).astype(np.float32), mask)

        warp.in_flight = set()  # products that follow each other add to the same sums
        flat = [place.reshape(-1) for place in places]
        warp.products.begin(_Product(run, programs, flat, registers))

    return begin


_SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes of a row, bits that are exchanged


def _operand(bits: np.ndarray, n: int, is_transposed: bool, base: np.ndarray) -> np.ndarray:
    """Places of the elements of an operand (programs x n x 16), by its descriptor."""
    swizzle = int(bits[0] >> np.uint64(62))
    if (bits >> np.uint64(62) != swizzle).any() or (is_transposed and not swizzle):
        raise UnknownInstruction("a product's operand, transposed without a swizzle")
    fields = (bits[:, None] >> np.array([0, 16, 32], np.uint64)) & np.uint64(0x3FFF)
    start, leading, stride = (fields.astype(np.int64) << 4).T[:, :, None, None]
    i, k = np.arange(n)[None, :, None], np.arange(16)[None, None, :]
    if not swizzle:  # blocks of 8 x 16 bytes
        address = start + i // 8 * stride + i % 8 * 16 + k // 8 * leading + k % 8 * 2
        return base[:, None, None] + address
    row, exchanged = _SWIZZLES[swizzle]
    if is_transposed:
        per_row = row // 2
        address = start + i // per_row * leading + i % per_row * 2 + k % 8 * row + k // 8 * stride
    else:
        address = start + i // 8 * stride + i % 8 * row + k * 2
    address = address ^ (((address >> 7) & exchanged) << 4)
    return base[:, None, None] + address


_MAKERS = {"mma": _mma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "wgmma": _wgmma}
