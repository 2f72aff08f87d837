"""Instructions that use memory, other lanes or barriers; and the table of all instructions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.arithmetic import compile_arithmetic
from tests.ptx.barriers import CLUSTER_LOG, _PhaseWait
from tests.ptx.bulk import compile_bulk, compile_send
from tests.ptx.faults import UnknownInstruction
from tests.ptx.memory import WARP, from_generic, is_shared, to_generic
from tests.ptx.program import (
    PARAMETER_BASE,
    PARAMETER_LOG,
    Address,
    Constant,
    Group,
    Instruction,
    Special,
)
from tests.ptx.tensor import compile_tensor
from tests.ptx.values import TYPES, addresses, reader, size_of, writer

if TYPE_CHECKING:
    from tests.ptx.barriers import _NamedWait
    from tests.ptx.machine import Warp

    Run = Callable[[Warp, "np.ndarray | None"], object]

# What needs nothing here: hints, and fences whose order the emulator keeps anyway.
_NOTHING = {"prefetch", "prefetchu", "setmaxnreg", "nanosleep", "pragma", "applypriority", "membar"}


def compile_instruction(x: Instruction) -> "tuple[Run | None, bool]":
    """A function that does an instruction, and whether lanes may go elsewhere or wait there."""
    op = x.opcode[0]
    if op in ("bra", "ret", "exit"):
        return None, True
    if op == "barrier" and "cluster" in x.opcode:
        if "arrive" in x.opcode:
            return (lambda warp, mask: warp.machine.barriers.arrive_cluster(warp, mask)), False
        return (lambda warp, mask: warp.machine.barriers.wait_cluster(warp)), True
    if op in ("bar", "barrier") and x.opcode[1:3] != ("warp", "sync"):
        if "sync" in x.opcode:
            return _bar_sync(x), True
        return _bar_arrive(x), False
    if op == "mbarrier" and x.opcode[1] in ("try_wait", "test_wait"):
        return _try_wait(x), True
    for compile_some in (compile_arithmetic, compile_tensor, _compile_other):
        run = compile_some(x)
        if run is not None:
            return run, False
    raise UnknownInstruction(f"{x}")


def _compile_other(x: Instruction) -> "Run | None":
    op, second = x.opcode[0], x.opcode[1] if len(x.opcode) > 1 else ""
    if op in _NOTHING:
        return lambda warp, mask: None
    if op == "cp":
        return compile_bulk(x) if "bulk" in x.opcode else _cp_async(x)
    if op == "bar":
        return lambda warp, mask: warp.machine.shared.sync_lanes(
            warp.number, warp.machine.whole_programs(mask)
        )
    if op in ("ld", "ldu"):
        return _ld_param(x) if second == "param" else _ld(x)
    if op == "st" and second == "async":
        return compile_send(x)
    makers = {
        "st": _st, "shfl": _shfl, "redux": _redux, "vote": _vote, "elect": _elect, "cvta": _cvta,
        "fence": _fence, "mbarrier": _mbarrier, "griddepcontrol": _griddepcontrol,
        "activemask": _activemask, "mapa": _mapa,
    }  # fmt: skip
    return makers[op](x) if op in makers else None


def _space_of(x: Instruction) -> str:
    for part in x.opcode[1:]:
        if part in ("global", "shared", "shared_cta", "shared_cluster", "const", "local", "param"):
            return part.partition("_")[0]
    return "generic"


def _registers(operand: object) -> list:
    return list(operand.parts) if isinstance(operand, Group) else [operand]


def _ld_param(x: Instruction) -> "Run":
    type_name = x.opcode[-1]
    writes = [writer(part) for part in _registers(x.operands[0])]
    if isinstance(x.operands[1], Address):
        return _ld_param_at(x, type_name, writes)
    names = []
    for i in range(len(writes)):
        base, _, offset = x.operands[1].name.partition("+")
        names.append(Special(f"{base}+{int(offset) + i * size_of(type_name)}"))
    reads = [reader(name, "u64") for name in names]

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        for read, write in zip(reads, writes, strict=True):
            unsigned = f"u{size_of(type_name)}"
            write(warp, read(warp).astype(unsigned).view(TYPES[type_name]), mask)

    return run


def _ld_param_at(x: Instruction, type_name: str, writes: list) -> "Run":
    """A part of a parameter whose address is in a register; the same for all lanes."""
    address, size = addresses(x.operands[1]), size_of(type_name)

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        places = np.unique(address(warp, warp.machine.lanes(mask)))
        if places.size != 1:
            raise UnknownInstruction(f"{x}: lanes load different parameters")
        number, offset = divmod(int(places[0]) - PARAMETER_BASE, 1 << PARAMETER_LOG)
        for i, write in enumerate(writes):
            bits = warp.parameter(number, offset + i * size)
            write(warp, bits.astype(f"u{size}").view(TYPES[type_name]), mask)

    return run


def _ld(x: Instruction) -> "Run":
    type_name, space = x.opcode[-1], _space_of(x)
    writes = [writer(part) for part in _registers(x.operands[0])]
    # An address of 32 bits is read as such from a register of 64.
    address = addresses(x.operands[1], "u64")
    size = size_of(type_name)

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        lanes = machine.lanes(mask)
        where = address(warp, lanes)
        n = size * len(writes)
        if space == "shared" or (space == "generic" and is_shared(where)):
            where = where if space == "shared" else from_generic(where)
            data = machine.shared.load(warp.number, lanes, where, n)
        else:
            data = machine.memory.load(where, n, warp.has_waited[lanes])
            machine.follow(warp.number, lanes, where, n, None)
        for i, write in enumerate(writes):
            values = np.zeros(warp.n_lanes, TYPES[type_name])
            part = np.ascontiguousarray(data[:, i * size : (i + 1) * size])
            values[lanes] = part.view(TYPES[type_name]).reshape(-1)
            write(warp, values, mask)

    return run


def _st(x: Instruction) -> "Run":
    type_name, space = x.opcode[-1], _space_of(x)
    reads = [reader(part, type_name) for part in _registers(x.operands[1])]
    address = addresses(x.operands[0], "u64")

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        lanes = machine.lanes(mask)
        where = address(warp, lanes)
        parts = [np.broadcast_to(read(warp), (warp.n_lanes,))[lanes] for read in reads]
        data = np.stack(parts, axis=1).view(np.uint8)
        if space == "shared" or (space == "generic" and is_shared(where)):
            where = where if space == "shared" else from_generic(where)
            machine.shared.store(warp.number, lanes, where, data)
        else:
            machine.memory.store(where, data, warp.has_waited[lanes])
            machine.follow(warp.number, lanes, where, data.shape[1], data)

    return run


def _mapa(x: Instruction) -> "Run":
    write = writer(x.operands[0])
    address, rank = (reader(part, "u32") for part in x.operands[1:])

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        write(warp, address(warp) + ((rank(warp) + 1) << np.uint32(CLUSTER_LOG)), mask)

    return run


def _cvta(x: Instruction) -> "Run":
    write, read = writer(x.operands[0]), reader(x.operands[1], "u64")
    moves = {"shared": from_generic if "to" in x.opcode else to_generic, "global": lambda a: a}
    moves["param"] = moves["global"]
    move = moves[_space_of(x)]
    return lambda warp, mask: write(warp, move(read(warp).view(np.int64)).view(np.uint64), mask)


# Copies.


def _cp_async(x: Instruction) -> "Run":
    kind = x.opcode[2]
    if kind in ("commit_group", "wait_group", "wait_all"):
        n_left = x.operands[0].bits if x.operands else 0

        def group(warp: "Warp", mask: np.ndarray | None) -> None:
            lanes = warp.machine.lanes(mask)
            if kind == "wait_group":
                warp.copies.wait(lanes, n_left)
            else:
                (warp.copies.commit if kind == "commit_group" else warp.copies.wait_all)(lanes)

        return group
    if kind not in ("ca", "cg"):
        raise UnknownInstruction(x.text)
    target, source = addresses(x.operands[0], "u32"), addresses(x.operands[1])
    n = x.operands[2].bits
    filled = reader(x.operands[3], "u32") if len(x.operands) > 3 else None

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        lanes = warp.machine.lanes(mask)
        data = np.zeros((lanes.size, n), np.uint8)
        sizes = np.full(lanes.size, n, np.int64)
        if filled is not None:
            sizes = np.broadcast_to(filled(warp), (warp.n_lanes,))[lanes].astype(np.int64)
        if ((sizes != 0) & (sizes != n)).any():
            raise UnknownInstruction(f"{x}: a copy of some of the bytes")
        full = sizes == n
        if full.any():
            where = source(warp, lanes)[full]
            data[full] = warp.machine.memory.load(where, n, warp.has_waited[lanes][full])
        warp.copies.begin(lanes, target(warp, lanes), data)

    return run


# Barriers.


def _bar_operands(x: Instruction) -> "Callable[[Warp, np.ndarray], tuple[int, int | None]]":
    reads = [reader(part, "u32") for part in x.operands]

    def read(warp: "Warp", lanes: np.ndarray) -> tuple[int, int | None]:
        values = [np.unique(np.broadcast_to(one(warp), (warp.n_lanes,))[lanes]) for one in reads]
        if any(value.size != 1 for value in values):
            raise UnknownInstruction(f"{x}: lanes name different barriers")
        numbers = [int(value[0]) for value in values]
        return numbers[0], numbers[1] if len(numbers) > 1 else None

    return read


def _bar_sync(x: Instruction) -> "Run":
    operands = _bar_operands(x)

    def run(warp: "Warp", mask: np.ndarray) -> "_NamedWait":
        number, n_threads = operands(warp, warp.machine.lanes(mask))
        return warp.machine.barriers.sync(warp, number, n_threads, mask)

    return run


def _bar_arrive(x: Instruction) -> "Run":
    operands = _bar_operands(x)

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        number, n_threads = operands(warp, warp.machine.lanes(mask))
        warp.machine.barriers.arrive_named(warp, number, n_threads, mask)

    return run


def _try_wait(x: Instruction) -> "Run":
    if "parity" not in x.opcode:
        raise UnknownInstruction(x.text)
    truth = writer(x.operands[0])
    address, parity = addresses(x.operands[1], "u32"), reader(x.operands[2], "u32")

    def run(warp: "Warp", mask: np.ndarray) -> "_PhaseWait":
        lanes = warp.machine.lanes(mask)
        where, wanted = address(warp, lanes), np.broadcast_to(parity(warp), (warp.n_lanes,))
        found: dict[int, tuple[int, int]] = {}
        for program in np.unique(lanes // WARP):
            which = lanes // WARP == program
            parities = (wanted[lanes[which]] & 1).tolist()
            pairs = set(zip(where[which].tolist(), parities, strict=True))
            if len(pairs) > 1:
                raise UnknownInstruction(f"{x}: lanes wait for different phases")
            found[int(program)] = pairs.pop()
        return _PhaseWait(warp.machine, warp, found, truth)

    return run


def _mbarrier(x: Instruction) -> "Run":
    kind = x.opcode[1]
    if kind not in ("init", "arrive", "expect_tx", "inval"):
        raise UnknownInstruction(x.text)
    has_state = kind == "arrive" and not isinstance(x.operands[0], Address)
    operands = x.operands[1:] if has_state else x.operands
    address = addresses(operands[0], "u32")
    count = reader(operands[1] if len(operands) > 1 else Constant(1), "u32")

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        barriers = warp.machine.barriers
        lanes = warp.machine.lanes(mask)
        counts = np.broadcast_to(count(warp), (warp.n_lanes,))[lanes]
        for lane, where, n in zip(lanes, address(warp, lanes), counts, strict=True):
            program, number = int(lane) // WARP, int(n)
            if kind == "init":
                barriers.make(warp, program, int(where), number)
            elif kind == "arrive" and "expect_tx" in x.opcode:
                barriers.arrive(warp, program, int(where), 1, number)
            elif kind == "arrive":
                barriers.arrive(warp, program, int(where), number, 0)
            elif kind == "expect_tx":
                barriers.arrive(warp, program, int(where), 0, number)

    return run


def _fence(x: Instruction) -> "Run":
    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        programs = np.unique(warp.machine.lanes(mask) // WARP)
        if x.opcode[1] == "mbarrier_init" or x.opcode[1:3] == ("proxy", "async"):
            warp.machine.barriers.fence(warp, programs)
        if x.opcode[1:3] == ("proxy", "async"):
            warp.machine.shared.fence(warp.number, programs)

    return run


def _griddepcontrol(x: Instruction) -> "Run":
    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        if x.opcode[1] == "wait":
            warp.has_waited[warp.machine.lanes(mask)] = True

    return run


# Other lanes.


def _shfl(x: Instruction) -> "Run":
    results = _registers(x.operands[0])
    writes = [writer(part) for part in results]
    value, step, clamp = (reader(part, "b32") for part in x.operands[1:4])
    kind = x.opcode[2]

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        warp.machine.whole_programs(mask)
        words = np.broadcast_to(value(warp), (warp.n_lanes,)).reshape(-1, WARP)
        lane = np.arange(WARP)
        by = np.broadcast_to(step(warp), (warp.n_lanes,)).reshape(-1, WARP).astype(np.int64)
        limits = int(np.unique(clamp(warp))[0])
        segment = (limits >> 8) & 31
        low, high = lane & segment, (lane & segment) | (limits & 31 & ~segment)
        source = {
            "bfly": lambda: lane ^ by, "down": lambda: lane + by, "up": lambda: lane - by,
            "idx": lambda: low | (by & ~segment & 31),
        }[kind]()  # fmt: skip
        inside = source >= high if kind == "up" else source <= high
        source = np.where(inside, source, lane)
        found = np.take_along_axis(words, np.broadcast_to(source, words.shape), 1)
        for write, values in zip(
            writes, (found, np.broadcast_to(inside, words.shape)), strict=False
        ):
            write(warp, np.ascontiguousarray(values).reshape(-1), mask)

    return run


def _by_program(warp: "Warp", values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(values, (warp.n_lanes,)).reshape(-1, WARP)


def _here(warp: "Warp", mask: np.ndarray | None) -> np.ndarray:
    """The mask by programs."""
    return _by_program(warp, np.ones(1, bool) if mask is None else mask)


def _redux(x: Instruction) -> "Run":
    write, read = writer(x.operands[0]), reader(x.operands[1], x.opcode[-1])
    reduce = {
        "add": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce,
        "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
    }[x.opcode[2]]  # fmt: skip

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        warp.machine.whole_programs(mask)
        values = _by_program(warp, read(warp))
        write(warp, reduce(values, axis=1).astype(values.dtype).repeat(WARP), mask)

    return run


def _vote(x: Instruction) -> "Run":
    write, read, kind = writer(x.operands[0]), reader(x.operands[1], "pred"), x.opcode[2]

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        truth = _by_program(warp, read(warp))
        here = _here(warp, mask)
        if kind == "ballot":
            bits = (truth & here).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
            found = bits.sum(1).astype(np.uint32)
        else:
            found = (truth & here).any(1) if kind == "any" else (truth | ~here).all(1)
        write(warp, found.repeat(WARP), mask)

    return run


def _activemask(x: Instruction) -> "Run":
    write = writer(x.operands[0])

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        here = (
            np.ones((warp.n_lanes // WARP, WARP), bool) if mask is None else mask.reshape(-1, WARP)
        )
        bits = here.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
        write(warp, bits.sum(1).astype(np.uint32).repeat(WARP), mask)

    return run


def _elect(x: Instruction) -> "Run":
    leader, truth = (writer(part) for part in _registers(x.operands[0]))

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        here = (
            np.ones((warp.n_lanes // WARP, WARP), bool) if mask is None else mask.reshape(-1, WARP)
        )
        first = here.argmax(1).repeat(WARP)
        leader(warp, first.astype(np.uint32), mask)
        truth(warp, np.arange(warp.n_lanes) % WARP == first, mask)

    return run
