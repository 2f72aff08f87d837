"""Runs programs (blocks of threads) of a kernel: warps in turn, each until it must wait.

A warp here is one warp of all emulated programs: its lanes are the 32 lanes of the first program,
then those of the second, and so on. So one NumPy operation does an instruction for all programs.
Where lanes go different ways, the warp has several places in the code, each with a mask of lanes;
the lowest place runs first, and places that meet become one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from tests.ptx.faults import Fault
from tests.ptx.memory import SHARED_BASE, WARP, GlobalMemory, SharedMemory
from tests.ptx.program import Group, Instruction, Program, Register, uncollected
from tests.ptx.values import TYPES, writer

if TYPE_CHECKING:
    from tests.ptx.bulk import TensorMap

_MAX_STEPS = 20_000_000


class Wait(Protocol):
    """What keeps lanes from going on."""

    def ready(self, mask: np.ndarray) -> np.ndarray:
        """Which lanes of a mask may go on; they do, at once."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    Attributes:
        arguments: values of the parameters, as integers.
        grid: programs in three directions.
        n_warps: warps of a program.
        shared_nbytes: shared memory of a program besides what the text declares.
        late: asynchronous work is done when it is waited for, not at once.
        backwards: the last warp runs first.
        track: look for accesses without an order.
        dependent: the kernel is started before the one that writes its dependent arrays has ended.
        cluster: programs of a cluster, neighbours in the grid.
        maps: maps of tensors, by the names of the parameters that hold them.
        passes: if given, loads of shared memory are counted here: for each number of bytes that a
            lane loads, the passes they take, and would take without bank conflicts.
        exchanged: address and bytes for each program of device memory by which its warps pass
            values: their order is followed there, too.
    """

    arguments: Sequence[int]
    grid: tuple[int, int, int]
    n_warps: int
    shared_nbytes: int
    late: bool = True
    backwards: bool = False
    track: bool = True
    dependent: bool = False
    cluster: int = 1
    maps: Mapping[str, "TensorMap"] = field(default_factory=dict)
    passes: dict[int, list[int]] | None = None
    exchanged: tuple[int, int] | None = None


class Warp:
    """One warp of all programs."""

    def __init__(self, machine: "Machine", number: int) -> None:
        self.machine, self.number = machine, number
        self.n_lanes = machine.n_lanes
        self.registers: list[np.ndarray | None] = [None] * machine.program.registers
        self.places: dict[int, np.ndarray] = {0: np.ones(self.n_lanes, bool)}
        self.waiting: list[tuple[int, np.ndarray, Wait]] = []
        self.in_flight: set[int] = set()  # registers of products under way
        self.copies = machine.new_copies(self)
        self.products = machine.new_products(self)
        self.cluster_ticket = np.zeros(machine.n_programs, np.int64)
        self.has_waited = np.full(self.n_lanes, not machine.launch.dependent)

    def special(self, name: str) -> np.ndarray:
        """The values of a special register, or of a parameter."""
        machine, lane = self.machine, np.arange(self.n_lanes) % WARP
        if name.startswith("%"):
            base = name.partition(".")[0]
            if base in ("%ctaid", "%clusterid"):
                numbers = machine.places[:, "xyz".index(name[-1])].repeat(WARP)
                by = machine.launch.cluster if name == "%clusterid.x" else 1
                return numbers // by
            values = {
                "%cluster_ctarank": np.arange(self.n_lanes) // WARP % machine.launch.cluster,
                "%cluster_nctarank": np.array([machine.launch.cluster]),
                "%tid.x": self.number * WARP + lane,
                "%laneid": lane,
                "%warpid": np.array([self.number]),
                "%ntid.x": np.array([machine.launch.n_warps * WARP]),
                "%ntid.y": np.array([1]),
                "%ntid.z": np.array([1]),
                "%nctaid.x": np.array([machine.launch.grid[0]]),
                "%nctaid.y": np.array([machine.launch.grid[1]]),
                "%nctaid.z": np.array([machine.launch.grid[2]]),
            }
            return values.get(name, np.zeros(1, np.int64))
        base, _, offset = name.partition("+")
        return self.parameter(machine.program.parameters[base][0], int(offset))

    def parameter(self, number: int, offset: int) -> np.ndarray:
        """Eight bytes of a parameter from an offset on."""
        bits = (self.machine.launch.arguments[number] & ((1 << 4096) - 1)) >> 8 * offset
        return np.array([bits & ((1 << 64) - 1)], np.uint64)

    @property
    def is_done(self) -> bool:
        return not self.places and not self.waiting


class Machine:
    """The programs of one launch that run together.

    Args:
        program: the kernel.
        memory: global memory.
        launch: how it is run.
        places: number of each program in the grid, in three directions.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, launch: Launch, places: np.ndarray
    ) -> None:
        from tests.ptx.barriers import Barriers
        from tests.ptx.copies import Copies
        from tests.ptx.tensor import Products

        self.program, self.memory, self.launch, self.places = program, memory, launch, places
        self.n_programs = len(places)
        self.n_lanes = self.n_programs * WARP
        self.new_copies, self.new_products = Copies, Products
        nbytes = program.shared_nbytes + launch.shared_nbytes
        self.shared = SharedMemory(
            self.n_programs, launch.n_warps, nbytes,
            cluster=launch.cluster, track=launch.track, passes=launch.passes,
        )  # fmt: skip
        self.exchanged = self.shared.beside(launch.exchanged[1]) if launch.exchanged else None
        self.barriers = Barriers(self)
        self.all_lanes = np.arange(self.n_lanes)
        self.steps = 0
        self.warps = [Warp(self, i) for i in range(launch.n_warps)]
        self.code = compiled(program)

    def lanes(self, mask: np.ndarray | None) -> np.ndarray:
        """Numbers of the lanes in a mask."""
        return self.all_lanes if mask is None else mask.nonzero()[0]

    def follow(
        self, warp: int, lanes: np.ndarray, where: np.ndarray, n: int, data: np.ndarray | None
    ) -> None:
        """Looks for the order of loads, or of stores of data, in device memory that warps share."""
        if self.exchanged is None or self.launch.exchanged is None:
            return
        base, nbytes = self.launch.exchanged
        here = (where >= base) & (where < base + nbytes * self.launch.grid[0])
        if here.any():
            local = where - base - self.places[lanes // WARP, 0] * nbytes + SHARED_BASE
            if data is None:
                self.exchanged.load(warp, lanes[here], local[here], n)
            else:
                self.exchanged.store(warp, lanes[here], local[here], data[here])

    def whole_programs(self, mask: np.ndarray | None) -> np.ndarray:
        """Numbers of the programs in a mask, all of whose lanes must be in it."""
        if mask is None:
            return np.arange(self.n_programs)
        rows = mask.reshape(-1, WARP)
        some = rows.any(1)
        if (rows.all(1) != some).any():
            raise Fault("not all lanes of the warp are here")
        return some.nonzero()[0]

    def run(self) -> None:
        """Runs all programs to their ends."""
        order = self.warps[::-1] if self.launch.backwards else self.warps
        while not all(warp.is_done for warp in self.warps):
            before = self.steps
            for warp in order:
                self._run_warp(warp)
            if self.steps == before:
                raise Fault(f"all warps wait for each other: {self._whereabouts()}")
        for warp in self.warps:
            warp.copies.require_none()
            warp.products.require_none()

    def _whereabouts(self) -> str:
        found = []
        for warp in self.warps:
            for place, mask, _ in warp.waiting:
                programs = np.unique(mask.nonzero()[0] // WARP)
                text = self.program.instructions[place].text[:60]
                found.append(f"warp {warp.number} of program {programs[0]} at {place} ({text})")
        return "; ".join(found[:6])

    def _poll(self, warp: Warp) -> None:
        """Lets lanes go on whose waits have ended."""
        still = []
        for place, mask, wait in warp.waiting:
            ready = wait.ready(mask)
            if ready.any():
                self.steps += 1
                self._arrive(warp, place + 1, ready)
                mask = mask & ~ready
            if mask.any():
                still.append((place, mask, wait))
        warp.waiting = still

    @staticmethod
    def _arrive(warp: Warp, place: int, mask: np.ndarray) -> None:
        if place in warp.places:
            mask = warp.places[place] | mask
        warp.places[place] = mask

    def _run_warp(self, warp: Warp) -> None:
        self._poll(warp)
        while warp.places:
            place = min(warp.places)
            mask = warp.places.pop(place)
            others = min(warp.places) if warp.places else len(self.code) + 1
            self._run_until(warp, place, mask, others)
            if not warp.places:
                self._poll(warp)

    def _run_until(self, warp: Warp, place: int, mask: np.ndarray, others: int) -> None:
        """Runs lanes from a place until they wait, part or reach the place of others."""
        full = None if mask.all() else mask
        code = self.code
        while place < others:
            self.steps += 1
            guard, is_negated, run, is_control, x = code[place]
            active = full
            if guard is not None:
                truth = warp.registers[guard]
                if truth is None:
                    raise Fault(f"{x}: the predicate is read before it is written")
                active = ~truth if is_negated else truth
                if full is not None:
                    active = active & full
                if active.all():
                    active = None if active.size == mask.size else active
                elif not active.any():
                    _leave_undefined(warp, x)
                    place += 1
                    continue
            try:
                if is_control:
                    return self._control(warp, place, mask, active, x, run)
                run(warp, active)
            except Fault as fault:
                if str(fault).startswith("instruction"):
                    raise
                raise Fault(f"{x}: {fault} (warp {warp.number})") from None
            place += 1
            if self.steps > _MAX_STEPS:
                raise Fault("the kernel does not end")
        self._arrive(warp, place, mask)
        return None

    def _control(
        self,
        warp: Warp,
        place: int,
        mask: np.ndarray,
        active: np.ndarray | None,
        x: Instruction,
        run: object,
    ) -> None:
        taken = mask if active is None else active
        rest = mask & ~taken
        if rest.any():
            self._arrive(warp, place + 1, rest)
        if x.opcode[0] == "bra":
            assert x.target is not None
            self._arrive(warp, x.target, taken)
        elif x.opcode[0] in ("ret", "exit"):
            self.barriers.leave(warp, taken)
        else:
            warp.waiting.append((place, taken, run(warp, taken)))


def _leave_undefined(warp: Warp, x: Instruction) -> None:
    """The results of an instruction that no lane does: what they hold is not defined, but may be
    passed on, as Triton's reductions do, where nobody uses it."""
    result = x.operands[0] if x.operands else None
    for part in result.parts if isinstance(result, Group) else (result,):
        if isinstance(part, Register) and warp.registers[part.number] is None:
            undefined = writer(part)
            undefined(warp, np.zeros(1, TYPES[part.kind]), np.zeros(warp.n_lanes, bool))


@dataclass
class _Compiled:
    code: list = field(default_factory=list)


_COMPILED: dict[int, tuple[Program, list]] = {}


def compiled(program: Program) -> list:
    """The instructions as functions, made once for a program."""
    known = _COMPILED.get(id(program))
    if known is None:
        from tests.ptx.instructions import compile_instruction

        code = []
        with uncollected():
            for x in program.instructions:
                run, is_control = compile_instruction(x)
                code.append((x.guard.number if x.guard else None, x.is_negated, run, is_control, x))
        known = _COMPILED[id(program)] = (program, code)
    return known[1]


def run_grid(program: Program, memory: GlobalMemory, launch: Launch, *, together: int = 16) -> int:
    """Runs a launch, some programs together.

    Returns:
        Instructions that were done, each for the warps of all programs that run together.
    """
    x, y, z = launch.grid
    together = -(-together // launch.cluster) * launch.cluster
    every = np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)])
    steps = 0
    with np.errstate(all="ignore"):
        for start in range(0, len(every), together):
            machine = Machine(program, memory, launch, every[start : start + together])
            machine.run()
            steps += machine.steps
    return steps
