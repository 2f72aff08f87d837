"""Runs PTX of warp-specialised kernels without a GPU: programs of a cluster, warp by warp.

Lanes are a NumPy vector. Copies and products of the tensor cores that run beside the program are
done either at once ("early") or as late as the program allows ("late"): copies when no warp can go
on without them, products at the wait for them. Warps run in a given order, each until it must wait.
A kernel without races gives the same result in all of these. Registers of a product that change
before it is done are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from warp_machine import (
    ALL_LANES,
    CLUSTER_SHIFT,
    GLOBAL_SHIFT,
    LANE,
    PARAMETERS,
    Barrier,
    Block,
    Cluster,
    Instruction,
    Lanes,
    MachineError,
    Memory,
    Program,
    TensorMap,
    Warp,
    dtype_of,
    finish_copy,
    narrow,
    widen,
)

__all__ = ["run"]


def run(
    program: Program,
    memory: Memory,
    parameters: Sequence[tuple[str, Any]],
    *,
    n_programs: int,
    n_threads: int,
    cluster: int = 1,
    shared_nbytes: int = 0,
    maps: dict[str, TensorMap] | None = None,
    mode: str = "late",
    order: Callable[[int], Iterable[int]] = range,
) -> dict[str, list[int]]:
    """Runs a kernel.

    Args:
        program: its PTX.
        memory: what it may read and write.
        parameters: pairs of a NumPy dtype and a value, in the order of the memory of parameters;
            a dtype `V128` stands for a tensor map.
        n_programs: programs of the grid.
        n_threads: threads of a program.
        cluster: programs that run together.
        shared_nbytes: shared memory of a program.
        maps: tensor maps by the names of their parameters.
        mode: "early" or "late".
        order: gives the order of n warps.

    Returns:
        For each instruction that reads shared memory, the passes that it took and the least.

    Raises:
        MachineError: the program is not right.
    """
    dtype = np.dtype([(f"p{i}", kind) for i, (kind, _) in enumerate(parameters)], align=False)
    record = np.zeros(1, dtype)
    for i, (kind, value) in enumerate(parameters):
        if not kind.startswith("V"):
            record[f"p{i}"] = value
    conflicts: dict[str, list[int]] = {}
    for first in range(0, n_programs, cluster):
        group = Cluster(
            program, memory, record.tobytes(), maps or {}, shared_nbytes, n_programs, mode,
            conflicts=conflicts,
        )  # fmt: skip
        group.blocks = [Block(group, i, first + i, n_threads) for i in range(cluster)]
        with np.errstate(all="ignore"):
            _run_cluster(group, order)
    return conflicts


def _run_cluster(cluster: Cluster, order: Callable[[int], Iterable[int]]) -> None:
    warps = [warp for block in cluster.blocks for warp in block.warps]
    warps = [warps[i] for i in order(len(warps))]
    while any(warp.groups for warp in warps):
        moved = False
        for warp in warps:
            moved |= _Runner(warp).go()
        if not moved:
            if not cluster.copies:
                raise MachineError("all warps wait for each other")
            cluster.copies.pop(0)()


_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "lo": np.less, "hs": np.greater_equal,
    "hi": np.greater, "ls": np.less_equal,
}  # fmt: skip
_SIMPLE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


class _Runner:
    """Runs a warp until it must wait."""

    def __init__(self, warp: Warp) -> None:
        self.warp, self.block = warp, warp.block
        self.cluster, self.registers = warp.block.cluster, warp.registers
        self.mask = ALL_LANES

    def go(self) -> bool:
        """Whether it did anything."""
        warp, program = self.warp, self.cluster.program
        moved = False
        while warp.groups:
            pc, lanes = warp.groups[0]
            if pc >= len(program.instructions):
                warp.groups.pop(0)
                continue
            step = program.instructions[pc]
            name = step.parts[0]
            predicate = self.predicate(step.predicate) & lanes if step.predicate else lanes
            if name == "bra":
                self.branch(program.labels[step.operands[0]], pc, lanes, predicate)
            elif name == "ret":
                self.move(lanes & ~predicate, pc + 1)
            else:
                self.mask = predicate
                if (predicate is ALL_LANES or predicate.any()) and self.step(step) is False:
                    return moved
                self.move(lanes, pc + 1)
            moved = True
        return moved

    def branch(self, target: int, pc: int, lanes: Lanes, taken: Lanes) -> None:
        rest = lanes & ~taken
        self.warp.groups.pop(0)
        for where, some in ((target, taken), (pc + 1, rest)):
            if some.any():
                self.warp.groups.append((where, some))
        self.merge()

    def move(self, lanes: Lanes, pc: int) -> None:
        groups = self.warp.groups
        groups.pop(0)
        if lanes is ALL_LANES or lanes.any():
            groups.insert(0, (pc, lanes))
        if len(groups) > 1:
            self.merge()

    def merge(self) -> None:
        found: dict[int, Lanes] = {}
        for pc, lanes in self.warp.groups:
            both = found[pc] | lanes if pc in found else lanes
            found[pc] = ALL_LANES if both.all() else both
        self.warp.groups = sorted(found.items())

    def predicate(self, name: str) -> Lanes:
        return ~self.registers[name[1:]] if name[0] == "!" else self.registers[name]

    def get(self, name: str, kind: str) -> Lanes:
        dtype = dtype_of(kind)
        if name in self.registers:
            value = self.registers[name]
            if value.dtype.itemsize == dtype.itemsize:
                return value.view(dtype)
            wide = value.view(f"u{value.dtype.itemsize}").astype(f"u{dtype.itemsize}")
            return wide.view(dtype)
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint32).view(np.float32)
        special = self.special(name)
        if special is not None:
            return np.broadcast_to(special, 32).astype(np.int64).astype(dtype)
        if not re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", name):
            raise MachineError(f"register {name} is read before it is written")
        value = int(name.rstrip("U"), 0) & (1 << 8 * dtype.itemsize) - 1
        return np.full(32, value, f"u{dtype.itemsize}").view(dtype)

    def special(self, name: str) -> Lanes | int | None:
        if name == "%tid.x":
            return self.warp.number * 32 + LANE
        if name in self.cluster.program.offsets:
            return PARAMETERS + self.cluster.program.offsets[name]
        return {
            "%ctaid.x": self.block.number,
            "%nctaid.x": self.cluster.n_programs,
            "%cluster_ctarank": self.block.rank,
            "memory": 0,
        }.get(name)

    def put(self, name: str, value: Lanes) -> None:
        if name == "_":
            return
        value = np.ascontiguousarray(value)
        old = self.registers.get(name)
        if self.mask is not ALL_LANES and not self.mask.all():
            if old is None or old.dtype.itemsize != value.dtype.itemsize:
                old = np.zeros(32, value.dtype)
            value = np.where(self.mask, value, old.view(value.dtype))
        if value.dtype != bool:
            nbytes = {"%rs": 2, "%rd": 8}.get(name[:3], 4 if name[:2] in ("%r", "%f") else None)
            value = value.view(f"u{value.dtype.itemsize}")
            if nbytes and nbytes != value.dtype.itemsize:
                value = value.astype(f"u{nbytes}")
        self.registers[name] = value

    def address(self, operand: str, kind: str) -> Lanes:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.get(base.strip(), kind).astype(np.int64) + int(offset or 0)

    def scalar(self, operand: str, kind: str = "u32") -> int:
        values = self.get(operand, kind)[self.mask]
        if (values != values[0]).any():
            raise MachineError(f"{operand} differs between lanes")
        return int(values[0])

    def step(self, step: Instruction) -> bool | None:
        """Runs an instruction; False if it must wait."""
        method = getattr(self, f"do_{step.parts[0]}", None)
        name = step.parts[0]
        if method is not None:
            done: bool | None = method(step, step.parts, step.operands)
            return done
        if name not in _SIMPLE:
            raise MachineError(f"an unknown instruction: {step.text}")
        self.simple(step, _SIMPLE[name], step.parts[-1])
        return None

    def simple(self, step: Instruction, function: Callable[..., Lanes], kind: str) -> None:
        x, y = (self.get(operand, kind) for operand in step.operands[1:])
        if step.parts[1] == "wide":
            wide = dtype_of(f"{kind[0]}{2 * int(kind[1:])}")
            x, y = x.astype(wide), y.astype(wide)
        self.put(step.operands[0], function(x, y))

    # Numbers

    def do_mov(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        if a[1].startswith("{"):
            names = a[1].strip("{} ").split(",")
            bits = 8 * dtype_of(parts[-1]).itemsize // len(names)
            total = np.zeros(32, np.uint64)
            for i, name in enumerate(names):
                total |= self.get(name.strip(), f"u{bits}").astype(np.uint64) << np.uint64(bits * i)
            self.put(a[0], total.astype(f"u{bits * len(names) // 8}"))
        elif a[0].startswith("{"):
            names = a[0].strip("{} ").split(",")
            value = self.get(a[1], parts[-1]).astype(np.uint64)
            bits = 8 * dtype_of(parts[-1]).itemsize // len(names)
            for i, name in enumerate(names):
                piece = value >> np.uint64(bits * i) & np.uint64((1 << bits) - 1)
                self.put(name.strip(), piece.astype(f"u{bits // 8}"))
        else:
            self.put(a[0], self.get(a[1], parts[-1]))

    def do_cvta(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], self.get(a[1], "u64"))

    def do_cvt(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        if parts[2] == "bf16":
            self.put(a[0], narrow(self.get(a[1], "f32")).astype(np.uint16))
        elif parts[2] == "bf16x2":
            high, low = (narrow(self.get(name, "f32")) for name in a[1:])
            self.put(a[0], high << 16 | low)
        else:
            self.put(a[0], self.get(a[1], parts[-1]).astype(dtype_of(parts[-2])))

    def do_shl(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        value, by = self.get(a[1], parts[-1]), self.get(a[2], "u32").astype(np.uint64)
        bits = 8 * value.dtype.itemsize
        shifted = value.astype(np.uint64) << np.minimum(by, 63)
        self.put(a[0], np.where(by < bits, shifted, 0).astype(value.dtype))

    def do_shr(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        value, by = self.get(a[1], parts[-1]), self.get(a[2], "u32").astype(np.int64)
        bits = 8 * value.dtype.itemsize
        wide = value.astype(np.int64 if value.dtype.kind == "i" else np.uint64)
        shifted = wide >> np.minimum(by, bits - 1).astype(wide.dtype)
        zero = (by >= bits) & (value.dtype.kind == "u")
        self.put(a[0], np.where(zero, 0, shifted).astype(value.dtype))

    def do_div(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], self.get(a[1], parts[-1]) // self.get(a[2], parts[-1]))

    def do_rem(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], self.get(a[1], parts[-1]) % self.get(a[2], parts[-1]))

    def do_not(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], ~self.get(a[1], parts[-1]))

    def do_neg(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], -self.get(a[1], parts[-1]))

    def do_mad(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        kind = parts[-1]
        if parts[1] == "wide":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            x, y = (self.get(name, kind).astype(dtype_of(wide)) for name in a[1:3])
            self.put(a[0], x * y + self.get(a[3], wide))
        else:
            self.put(a[0], self.get(a[1], kind) * self.get(a[2], kind) + self.get(a[3], kind))

    def do_fma(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        x, y, z = (self.get(name, "f32").astype(np.float64) for name in a[1:])
        self.put(a[0], (x * y + z).astype(np.float32))

    def do_setp(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.put(a[0], _COMPARE[parts[1]](self.get(a[1], parts[-1]), self.get(a[2], parts[-1])))

    def do_selp(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        chosen = self.predicate(a[3])
        self.put(a[0], np.where(chosen, self.get(a[1], parts[-1]), self.get(a[2], parts[-1])))

    def do_bfe(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        by, n = int(a[2], 0), int(a[3], 0)
        self.put(a[0], self.get(a[1], "u32") >> np.uint32(by) & np.uint32((1 << n) - 1))

    def do_bfi(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        by, n = int(a[3], 0), int(a[4], 0)
        mask = np.uint32((1 << n) - 1 << by)
        value = self.get(a[1], "u32") << np.uint32(by) & mask
        self.put(a[0], self.get(a[2], "u32") & ~mask | value)

    def do_lop3(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        inputs = [self.get(name, "u32") for name in a[1:4]]
        result = np.zeros(32, np.uint32)
        for row in range(8):
            if int(a[4], 0) >> row & 1:
                terms = [v if row >> 2 - i & 1 else ~v for i, v in enumerate(inputs)]
                result |= terms[0] & terms[1] & terms[2]
        self.put(a[0], result)

    def do_prmt(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        low, high, chosen = (self.get(name, "u32").astype(np.uint64) for name in a[1:])
        both, result = low | high << np.uint64(32), np.zeros(32, np.uint64)
        for i in range(4):
            at = chosen >> np.uint64(4 * i) & np.uint64(15)
            if (at & np.uint64(8)).any():
                raise MachineError("prmt with copies of the sign")
            byte = both >> at * np.uint64(8) & np.uint64(255)
            result |= byte << np.uint64(8 * i)
        self.put(a[0], result.astype(np.uint32))

    def do_redux(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.together(step)
        values = self.get(a[1], parts[-1])
        self.put(a[0], np.full(32, {"max": np.max, "min": np.min}[parts[2]](values)))

    # Memory

    def do_ld(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        names, nbytes = self.vector(a[0], parts)
        data = np.zeros((32, nbytes * len(names)), np.uint8)
        data[self.mask] = self.load(step, parts[1], a[1], nbytes * len(names))
        for i, name in enumerate(names):
            piece = np.ascontiguousarray(data[:, i * nbytes : (i + 1) * nbytes])
            self.put(name, piece.view(f"u{nbytes}").reshape(-1))

    def load(self, step: Instruction, space: str, operand: str, nbytes: int) -> Lanes:
        if space == "param":
            at = (self.address(operand, "u64") - PARAMETERS)[self.mask]
            parameters = np.frombuffer(self.cluster.parameters, np.uint8)
            return parameters[at[:, None] + np.arange(nbytes)]
        if space == "global":
            addresses = self.address(operand, "u64")[self.mask]
            data = np.zeros((len(addresses), nbytes), np.uint8)
            for number in set((addresses >> GLOBAL_SHIFT).tolist()):
                some = addresses >> GLOBAL_SHIFT == number
                array, index = self.cluster.memory.find(addresses[some], nbytes, step.text)
                data[some] = array[index]
            return data
        addresses = self.address(operand, "u32")
        self.count_passes(step, addresses, nbytes)
        return self.block.read(addresses[self.mask], nbytes, step.text)

    def do_st(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        names, nbytes = self.vector(a[1], parts)
        values = [self.get(name, f"u{8 * nbytes}") for name in names]
        data = np.stack(values, axis=1).view(np.uint8)[self.mask]
        if parts[1] == "global":
            addresses = self.address(a[0], "u64")[self.mask]
            array, index = self.cluster.memory.find(addresses, data.shape[1], step.text)
            array[index] = data
        else:
            addresses = self.address(a[0], "u32")
            self.count_passes(step, addresses, data.shape[1])
            at = self.block.places(addresses[self.mask], data.shape[1], step.text)
            self.block.write(at, data)

    def vector(self, operand: str, parts: list[str]) -> tuple[list[str], int]:
        names = [name.strip() for name in operand.strip("{} ").split(",")]
        return names, dtype_of(parts[-1]).itemsize

    def count_passes(self, step: Instruction, addresses: Lanes, nbytes: int) -> None:
        """Lanes are served together as far as they read 128 bytes; each bank gives 4 of them."""
        together = min(32, 128 // nbytes)
        taken = least = 0
        for first in range(0, 32, together):
            some = addresses[first : first + together][self.mask[first : first + together]]
            words = {int(at) // 4 + i for at in some for i in range(-(-nbytes // 4))}
            banks = [word % 32 for word in words]
            taken += max(map(banks.count, set(banks)), default=0)
            least += 1 if words else 0
        row = self.cluster.conflicts.setdefault(step.text, [0, 0])
        row[0], row[1] = row[0] + taken, row[1] + least

    # Barriers and copies

    def do_mbarrier(self, step: Instruction, parts: list[str], a: list[str]) -> bool | None:
        if parts[1] == "init":
            count = self.scalar(a[1])
            self.block.barriers[self.one(a[0])] = Barrier(count, count)
        elif parts[1] == "try_wait":
            barrier = self.block.barrier(self.one(a[1]))
            if barrier.phase == self.scalar(a[2]) & 1:
                return False  # the loop around it would come back at once
            self.put(a[0], np.ones(32, bool))
        else:
            for address in self.address(a[1], "u32")[self.mask]:
                block = self.block
                if "cluster" in parts:
                    block = self.cluster.blocks[int(address) >> CLUSTER_SHIFT]
                state = block.barrier(int(address) & (1 << CLUSTER_SHIFT) - 1)
                state.nbytes += self.scalar(a[2]) if "expect_tx" in parts else 0
                state.pending -= 1
                state.settle()
        return None

    def one(self, operand: str) -> int:
        return int(self.address(operand, "u32")[self.mask][0])

    def do_mapa(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        rank = self.get(a[2], "u32")
        self.put(a[0], self.get(a[1], "u32") | rank << np.uint32(CLUSTER_SHIFT))

    def do_cp(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        if int(self.mask.sum()) != 1:
            raise MachineError(f"{step.text}: several lanes copy the same")
        dst = self.one(a[0])
        if "tensor" in parts:
            map_name, coordinates = a[1].strip("[] ").split(",", 1)
            at = self.address(map_name, "u64")[self.mask][0] - PARAMETERS
            offsets = self.cluster.program.offsets
            name = next(name for name, offset in offsets.items() if offset == at)
            place = [self.scalar(c.strip()) for c in coordinates.strip("{} ]").split(",")]
            data, index = self.cluster.maps[name].read((place[0], place[1], place[2]))
            if dst % (1024 if self.cluster.maps[name].swizzle else 128):
                raise MachineError(f"{step.text}: not aligned")
            blocks, barrier, index = [self.block], self.one(a[2]), dst + index
        else:
            nbytes = self.scalar(a[2])
            source = self.address(a[1], "u64")[self.mask][:1]
            array, at = self.cluster.memory.find(source, nbytes, step.text)
            if int(source[0]) % 16 or nbytes % 16 or dst % 16:
                raise MachineError(f"{step.text}: not aligned")
            data, index, barrier = array[at[0]].copy(), dst + np.arange(nbytes), self.one(a[3])
            ranks = self.scalar(a[4], "u16") if "multicast" in parts else 1 << self.block.rank
            blocks = [b for b in self.cluster.blocks if ranks >> b.rank & 1]
        if index.max() >= self.block.shared.size:
            raise MachineError(f"{step.text}: beyond shared memory")
        for block in blocks:
            if self.cluster.mode == "early":
                finish_copy(block, index, data, barrier)
            else:

                def job(block: Block = block, index: Lanes = index) -> None:
                    finish_copy(block, index, data, barrier)

                self.cluster.copies.append(job)

    def do_bar(self, step: Instruction, parts: list[str], a: list[str]) -> bool | None:
        if parts[1] == "warp":
            self.together(step)
            return None
        return self.do_barrier(step, parts, a)

    def do_barrier(self, step: Instruction, parts: list[str], a: list[str]) -> bool | None:
        self.together(step)
        if parts[1] == "cluster":
            if parts[2] == "arrive":
                return None
            blocks, name, needed = self.cluster.blocks, "cluster", 0
            needed = sum(block.n_threads for block in blocks)
        else:
            blocks, name = [self.block], a[0]
            needed = self.scalar(a[1]) if len(a) > 1 else self.block.n_threads
        owner, warp = blocks[0], self.warp
        turn = owner.turns.get(name, 0)
        if warp.waits is not None:
            if warp.waits[1] == turn:
                return False
            warp.waits = None
            return None
        owner.arrived[name] = owner.arrived.get(name, 0) + 32
        if owner.arrived[name] == needed:
            owner.arrived[name], owner.turns[name] = 0, turn + 1
            return None
        warp.waits = (name, turn)
        return False

    def together(self, step: Instruction) -> None:
        if not self.mask.all():
            raise MachineError(f"{step.text}: not all lanes of the warp")

    def do_fence(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        """Stores are seen at once here."""

    do_griddepcontrol = do_fence

    # The tensor cores

    def do_ldmatrix(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.together(step)
        addresses = self.address(a[1], "u32")
        self.count_passes(step, addresses, 16)
        for i, name in enumerate(a[0].strip("{} ").split(",")):
            rows = self.block.read(addresses[8 * i : 8 * i + 8], 16, step.text)
            self.put(name.strip(), rows.view(np.uint32)[LANE >> 2, LANE & 3])

    def tuple_of(self, operand: str, kind: str) -> list[Lanes]:
        return [self.get(name.strip(), kind) for name in operand.strip("{} ").split(",")]

    def do_mma(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.together(step)
        rows = _fragment_a(self.tuple_of(a[1], "u32"))
        columns = np.zeros((16, 8))
        for half, value in enumerate(self.tuple_of(a[2], "u32")):
            at = 2 * (LANE & 3) + 8 * half
            columns[at, LANE >> 2] = widen(value & 0xFFFF)
            columns[at + 1, LANE >> 2] = widen(value >> 16)
        self.accumulate(a[0], a[3], rows @ columns)

    def accumulate(self, target: str, source: str, product: Lanes) -> None:
        names = [name.strip() for name in target.strip("{} ").split(",")]
        for i, value in enumerate(self.tuple_of(source, "f32")):
            row = (LANE >> 2) + 8 * (i >> 1 & 1)
            column = 8 * (i >> 2) + 2 * (LANE & 3) + (i & 1)
            self.put(names[i], (value + product[row, column]).astype(np.float32))

    def do_wgmma(self, step: Instruction, parts: list[str], a: list[str]) -> None:
        self.together(step)
        if parts[1] == "mma_async":
            if not self.registers[a[3]].all():
                raise MachineError(f"{step.text}: only sums are known")
            held = [value.copy() for value in self.tuple_of(a[1], "u32")]
            self.warp.products.append((step, [*held, self.get(a[2], "u64").copy()]))
            if self.cluster.mode == "early":
                self.finish_products()
        elif parts[1] == "wait_group":
            self.finish_products()

    def finish_products(self) -> None:
        for step, held in self.warp.products:
            a = step.operands
            now = self.tuple_of(a[1], "u32")
            if not all(map(np.array_equal, held, now)):
                raise MachineError(f"{step.text}: its registers change before it is done")
            self.accumulate(a[0], a[0], _fragment_a(now) @ self.tokens_of(step, int(held[4][0])))
        self.warp.products.clear()

    def tokens_of(self, step: Instruction, descriptor: int) -> Lanes:
        found = re.search(r"m64n(\d+)k16", step.text)
        assert found
        if descriptor >> 62:
            raise MachineError(f"{step.text}: a swizzle that is not known here")
        start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        token, column = np.meshgrid(np.arange(int(found[1])), np.arange(16))
        at = start + token // 8 * stride + token % 8 * 16 + column // 8 * leading + column % 8 * 2
        pieces = self.block.read(at.reshape(-1), 2, step.text)
        return widen(pieces.view(np.uint16).reshape(at.shape)).astype(np.float64)


def _fragment_a(values: Sequence[Lanes]) -> Lanes:
    rows = np.zeros((16, 16))
    for i, value in enumerate(values):
        row, column = (LANE >> 2) + 8 * (i & 1), 2 * (LANE & 3) + 8 * (i >> 1)
        rows[row, column], rows[row, column + 1] = widen(value & 0xFFFF), widen(value >> 16)
    return rows
