"""Barriers of a block, mbarriers, and the bulk copies that mbarriers count."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import Fault
from tests.ptx.memory import WARP

if TYPE_CHECKING:
    from tests.ptx.machine import Machine, Warp


class _Named:
    """A barrier of the block (bar.sync), for all programs."""

    def __init__(self, machine: "Machine") -> None:
        self.arrived = np.zeros((machine.n_programs, machine.launch.n_warps), bool)
        self.passed = np.zeros(machine.n_programs, np.int64)
        # What those who arrive bring, and what those who go on after all arrived learn.
        self.known = np.zeros((machine.n_programs, machine.launch.n_warps), np.int16)
        self.released = np.zeros_like(self.known)


@dataclass
class _NamedWait:
    machine: "Machine"
    warp: "Warp"
    barrier: _Named
    ticket: np.ndarray  # how often the barrier had been passed, for each program

    def ready(self, mask: np.ndarray) -> np.ndarray:
        passed = (self.barrier.passed > self.ticket).repeat(WARP) & mask
        if passed.any():
            programs = self.machine.whole_programs(passed)
            released = self.barrier.released[programs]
            self.machine.shared.acquire(self.warp.number, programs, released)
            waited = self.machine.block_waited[programs].repeat(WARP)
            self.warp.has_waited[passed] |= waited
        return passed


@dataclass
class _MBarrier:
    """An mbarrier of one program."""

    count: int
    by: int  # the warp that made it
    made: int  # the clock of that warp then
    pending: int
    known: np.ndarray  # of the phase that is under way
    is_fenced: bool = False
    nbytes: int = 0  # that are still expected
    phase: int = 0
    released: np.ndarray | None = None  # what the last phase brings to those who wait for it
    copies: list["_Bulk"] = field(default_factory=list)


@dataclass
class _Bulk:
    warp: int
    lane: int
    place: int
    data: np.ndarray


@dataclass
class _PhaseWait:
    machine: "Machine"
    warp: "Warp"
    keys: dict[int, tuple[int, int]]  # program and address for each lane
    parity: np.ndarray
    set_truth: object

    def ready(self, mask: np.ndarray) -> np.ndarray:
        result = np.zeros_like(mask)
        for lane in mask.nonzero()[0]:
            barrier = self.machine.barriers.find(self.warp, *self.keys[lane])
            if self.machine.launch.late and barrier.pending == 0:
                self.machine.barriers.bring(self.keys[lane][0], barrier)
            if barrier.phase & 1 != self.parity[lane]:
                result[lane] = True
                program = np.array([self.keys[lane][0]])
                assert barrier.released is not None or barrier.phase == 0
                if barrier.released is not None:
                    self.machine.shared.acquire(self.warp.number, program, barrier.released)
        if result.any():
            self.set_truth(self.warp, np.ones(1, bool), result)
        return result


class Barriers:
    """All barriers of the programs of a machine."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.named: dict[int, _Named] = {}
        self.phased: dict[tuple[int, int], _MBarrier] = {}
        self.left = np.zeros((machine.n_programs, machine.launch.n_warps), bool)
        machine.block_waited = np.full(machine.n_programs, not machine.launch.dependent)

    # bar.sync and bar.arrive

    def arrive_named(
        self, warp: "Warp", number: int, n_threads: int | None, mask: np.ndarray | None
    ) -> _Named:
        machine = self.machine
        barrier = self.named.setdefault(number, _Named(machine))
        programs = machine.whole_programs(mask)
        if barrier.arrived[programs, warp.number].any():
            raise Fault(f"the warp arrives at barrier {number} twice")
        known = machine.shared.release(warp.number, programs)
        barrier.known[programs] = np.maximum(barrier.known[programs], known)
        barrier.arrived[programs, warp.number] = True
        waited = warp.has_waited.reshape(-1, WARP).all(1)
        machine.block_waited |= waited
        self._pass(number, barrier, n_threads)
        return barrier

    def _pass(self, number: int, barrier: _Named, n_threads: int | None) -> None:
        n_arrived = barrier.arrived.sum(1)
        if n_threads is None:
            needed = (~self.left).sum(1)
            full = (n_arrived > 0) & ((barrier.arrived | self.left).all(1)) & (needed > 0)
        else:
            if n_threads % WARP:
                raise Fault(f"barrier {number} expects {n_threads} threads: not whole warps")
            full = n_arrived * WARP == n_threads
        barrier.passed[full] += 1
        barrier.arrived[full] = False
        barrier.released[full] = barrier.known[full]

    def sync(
        self, warp: "Warp", number: int, n_threads: int | None, mask: np.ndarray
    ) -> _NamedWait:
        barrier = self.named.setdefault(number, _Named(self.machine))
        ticket = barrier.passed.copy()
        self.arrive_named(warp, number, n_threads, mask)
        return _NamedWait(self.machine, warp, barrier, ticket)

    def leave(self, warp: "Warp", mask: np.ndarray) -> None:
        """Lanes end. Barriers of the whole block do not wait for warps that have ended."""
        for program in np.unique(mask.nonzero()[0] // WARP):
            self.left[program, warp.number] = True
        if 0 in self.named:
            self._pass(0, self.named[0], None)

    # mbarriers

    def find(self, warp: "Warp", program: int, address: int) -> _MBarrier:
        barrier = self.phased.get((program, address))
        if barrier is None:
            raise Fault(f"there is no mbarrier at {address:#x}")
        known = self.machine.shared.clocks[program, warp.number, barrier.by]
        if self.machine.launch.track and known < barrier.made:
            raise Fault("uses an mbarrier that another warp made, with nothing between them")
        return barrier

    def make(self, warp: "Warp", program: int, address: int, count: int) -> None:
        if address % 8:
            raise Fault("an mbarrier's address is not a multiple of 8")
        n_warps = self.machine.launch.n_warps
        made = int(self.machine.shared.clocks[program, warp.number, warp.number])
        known = np.zeros(n_warps, np.int16)
        self.phased[program, address] = _MBarrier(count, warp.number, made, count, known)

    def fence(self, warp: "Warp", programs: np.ndarray) -> None:
        """Bulk copies may now count on the mbarriers that the warp has made."""
        for (program, _), barrier in self.phased.items():
            if barrier.by == warp.number and program in programs:
                barrier.is_fenced = True

    def arrive(self, warp: "Warp", program: int, address: int, n: int, nbytes: int) -> None:
        barrier = self.find(warp, program, address)
        one = np.array([program])
        if n:
            known = self.machine.shared.release(warp.number, one)[0]
            barrier.known = np.maximum(barrier.known, known)
        barrier.nbytes += nbytes
        barrier.pending -= n
        if barrier.pending < 0:
            raise Fault(f"more arrivals at an mbarrier than the {barrier.count} of a phase")
        self._complete(barrier)

    def _complete(self, barrier: _MBarrier) -> None:
        if barrier.pending == 0 and barrier.nbytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            before = barrier.released
            known = barrier.known
            barrier.released = known if before is None else np.maximum(before, known)
            barrier.known = np.zeros_like(known)
            self.machine.steps += 1

    # bulk copies

    def copy(
        self, warp: "Warp", lane: int, target: int, data: np.ndarray, program: int, address: int
    ) -> None:
        """Begins a bulk copy to shared memory, which an mbarrier counts."""
        machine = self.machine
        barrier = self.find(warp, program, address)
        if machine.launch.track and not barrier.is_fenced:
            raise Fault("a bulk copy counts on an mbarrier without fence.mbarrier_init after it")
        if data.size % 16 or target % 16:
            raise Fault("a bulk copy of bytes or to an address that 16 does not divide")
        lanes = np.array([lane])
        place = machine.shared.places(lanes, np.array([target]), data.size)
        rows = place + np.arange(0, data.size, 16)
        machine.shared.begin_copy(warp.number, np.repeat(lanes, rows.size), rows, 16)
        job = _Bulk(warp.number, lane, int(place[0]), data)
        barrier.copies.append(job)
        if not machine.launch.late:
            machine.shared.put(rows, data.reshape(-1, 16))
            # The bytes count at once, too; but the copy is over only for those who wait.
            self.bring(program, barrier)

    def bring(self, program: int, barrier: _MBarrier) -> None:
        """Ends the copies that an mbarrier counts."""
        jobs, barrier.copies = barrier.copies, []
        for job in jobs:
            rows = job.place + np.arange(0, job.data.size, 16)
            lanes = np.full(rows.size, job.lane)
            data = job.data.reshape(-1, 16)
            if self.machine.launch.late:
                self.machine.shared.put(rows, data)
            # Written at the clock of the warp that copies; whoever waits for the phase learns it.
            self.machine.shared.end_copy(job.warp, lanes, rows, data, by_proxy=True)
            known = self.machine.shared.release(job.warp, np.array([program]))[0]
            own = np.zeros_like(known)
            own[job.warp] = known[job.warp]
            barrier.known = np.maximum(barrier.known, own)
            barrier.nbytes -= job.data.size
        if jobs:
            self._complete(barrier)
