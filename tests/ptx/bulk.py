"""Bulk copies: of consecutive bytes, of boxes of tensors, and to all programs of a cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.barriers import Bulk
from tests.ptx.faults import Fault, UnknownInstruction
from tests.ptx.memory import WARP
from tests.ptx.program import PARAMETER_BASE, PARAMETER_LOG, Coordinates, Group, Instruction
from tests.ptx.values import addresses, reader

if TYPE_CHECKING:
    from tests.ptx.machine import Warp

_ROW = 16


@dataclass(frozen=True)
class TensorMap:
    """A tensor of bytes with three dimensions.

    Attributes:
        array: the name of its array in global memory.
        sizes: elements of the dimensions, the one of consecutive bytes first.
        strides: bytes from one element to the next of the second and the third dimension.
        box: elements that a copy takes of each dimension.
        swizzle: whether rows of 128 bytes in shared memory have their parts of 16 bytes exchanged.
    """

    array: str
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    swizzle: bool


def compile_bulk(x: Instruction) -> Callable:
    """A function that does `cp.async.bulk`."""
    if "prefetch" in x.opcode:
        return lambda warp, mask: None
    if not {"global", "mbarrier_complete_tx_bytes"} <= set(x.opcode):
        raise UnknownInstruction(x.text)
    return _tensor(x) if "tensor" in x.opcode else _bytes(x)


def _multicast(x: Instruction, place: int) -> Callable | None:
    return reader(x.operands[place], "u16") if "multicast_cluster" in x.opcode else None


def _bytes(x: Instruction) -> Callable:
    target, barrier = addresses(x.operands[0], "u32"), addresses(x.operands[3], "u32")
    source, count = addresses(x.operands[1]), reader(x.operands[2], "u32")
    others = _multicast(x, 4)

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        memory, lanes = warp.machine.memory, warp.machine.lanes(mask)
        sizes = np.broadcast_to(count(warp), (warp.n_lanes,))[lanes]
        targets, sources, places = (read(warp, lanes) for read in (target, source, barrier))
        for i, lane in enumerate(lanes):
            nbytes = int(sizes[i])
            if sources[i] % _ROW or nbytes % _ROW or targets[i] % _ROW:
                raise Fault("a bulk copy with an address or a size that 16 does not divide")
            waited = warp.has_waited[lanes[i : i + 1]]
            data = memory.load(sources[i : i + 1], nbytes, waited).reshape(-1, _ROW)
            rows = int(targets[i]) + np.arange(0, nbytes, _ROW)
            _begin(warp, int(lane), rows, data, int(places[i]), others)

    return run


def _tensor(x: Instruction) -> Callable:
    target, barrier = addresses(x.operands[0], "u32"), addresses(x.operands[2], "u32")
    where = x.operands[1]
    if not isinstance(where, Coordinates) or len(where.parts) != 3:
        raise UnknownInstruction(x.text)
    base = reader(where.base, "u64")
    reads = [reader(part, "s32") for part in where.parts]
    others = _multicast(x, 3)

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        lanes = machine.lanes(mask)
        targets, places = target(warp, lanes), barrier(warp, lanes)
        maps = np.broadcast_to(base(warp), (warp.n_lanes,))[lanes]
        corners = [np.broadcast_to(read(warp), (warp.n_lanes,))[lanes] for read in reads]
        for i, lane in enumerate(lanes):
            number = int(maps[i]) - PARAMETER_BASE >> PARAMETER_LOG
            found = [m for name, m in machine.launch.maps.items()
                     if machine.program.parameters[name][0] == number]  # fmt: skip
            if not found:
                raise Fault("a copy of a box without a map of a tensor")
            data = _box(warp, int(lane), found[0], [int(corner[i]) for corner in corners])
            rows = int(targets[i]) + np.arange(0, data.size, _ROW)
            if targets[i] % 128:
                raise Fault("a copy of a box to an address that 128 does not divide")
            if found[0].swizzle:
                if found[0].box[0] != 128:
                    raise UnknownInstruction(f"{x}: rows of a box are swizzled, not of 128 bytes")
                rows ^= (rows >> 7 & 7) << 4
            _begin(warp, int(lane), rows, data.reshape(-1, _ROW), int(places[i]), others)

    return run


def _box(warp: "Warp", lane: int, tensor: TensorMap, corner: list[int]) -> np.ndarray:
    """The bytes of a box; zeros outside of the tensor."""
    memory = warp.machine.memory
    content = memory.content(tensor.array, waited=bool(warp.has_waited[lane]))
    i, j, k = (at + np.arange(n) for at, n in zip(corner, tensor.box, strict=True))
    inside = (
        ((k >= 0) & (k < tensor.sizes[2]))[:, None, None]
        & ((j >= 0) & (j < tensor.sizes[1]))[:, None]
        & ((i >= 0) & (i < tensor.sizes[0]))
    )
    place = k[:, None, None] * tensor.strides[1] + j[:, None] * tensor.strides[0] + i
    return np.where(inside, content[np.where(inside, place, 0)], 0).astype(np.uint8).reshape(-1)


def compile_send(x: Instruction) -> Callable:
    """A function that does `st.async`: lanes of a warp write to one program of the cluster."""
    type_name = x.opcode[-1]
    operand = x.operands[1]
    parts = operand.parts if isinstance(operand, Group) else (operand,)
    reads = [reader(part, type_name) for part in parts]
    target, barrier = addresses(x.operands[0], "u32"), addresses(x.operands[2], "u32")

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        machine = warp.machine
        if machine.launch.cluster == 1:
            raise Fault("st.async without a cluster: a GPU reports an illegal instruction")
        lanes = machine.lanes(mask)
        values = [np.broadcast_to(read(warp), (warp.n_lanes,))[lanes] for read in reads]
        data = np.stack(values, axis=1).view(np.uint8)
        targets, places = target(warp, lanes), barrier(warp, lanes)
        for program in np.unique(lanes // WARP):
            which = lanes // WARP == program
            pairs = [machine.barriers.owner_of(int(program), int(a)) for a in targets[which]]
            counted = {machine.barriers.owner_of(int(program), int(a)) for a in places[which]}
            owners = {owner for owner, _ in pairs}
            if len(counted) != 1 or owners != {owner for owner, _ in counted}:
                raise UnknownInstruction(f"{x}: lanes write to different programs or barriers")
            ((owner, where),) = counted
            rows = np.array([address for _, address in pairs])
            rows = machine.shared.places(np.full(rows.size, owner * WARP), rows, data.shape[1])
            job = Bulk(warp.number, int(lanes[which][0]), rows, data[which])
            machine.barriers.begin_bulk(warp, job, owner, where)

    return run


def _begin(
    warp: "Warp",
    lane: int,
    rows: np.ndarray,
    data: np.ndarray,
    barrier: int,
    others: Callable | None,
) -> None:
    """Begins a copy to the program of a lane, or to the programs of its cluster that bits name."""
    machine = warp.machine
    program, size = lane // WARP, machine.launch.cluster
    first = program // size * size
    owners = [program]
    if others is not None:
        bits = int(np.broadcast_to(others(warp), (warp.n_lanes,))[lane])
        owners = [first + rank for rank in range(16) if bits >> rank & 1]
        if not owners or owners[-1] >= first + size:
            raise Fault(f"a copy to programs {bits:#b} of a cluster of {size}")
    for owner in owners:
        place = machine.shared.places(np.full(rows.size, owner * WARP), rows, _ROW)
        machine.barriers.begin_bulk(warp, Bulk(warp.number, lane, place, data), owner, barrier)
