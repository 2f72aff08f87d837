"""Barriers of a block, mbarriers, and the bulk copies that mbarriers count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import Fault
from tests.ptx.memory import WARP

CLUSTER_LOG = 24  # an address of another program of the cluster has its number, plus 1, from here

if TYPE_CHECKING:
    from tests.ptx.machine import Machine, Warp


class _Named:
    """A barrier of the block (bar.sync), for all programs."""

    def __init__(self, machine: "Machine") -> None:
        self.arrived = np.zeros((machine.n_programs, machine.launch.n_warps), bool)
        self.passed = np.zeros(machine.n_programs, np.int64)
        # What those who arrive bring, and what those who go on after all arrived learn.
        self.known = np.zeros((machine.n_programs, machine.shared.n_numbers), np.int16)
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
    by: int  # number of the warp that made it
    made: int  # the clock of that warp then
    pending: int
    known: np.ndarray  # of the phase that is under way
    is_fenced: bool = False
    nbytes: int = 0  # that are still expected
    phase: int = 0
    has_waited: bool = False  # somebody who arrived had waited for the kernel before
    released: np.ndarray | None = None  # what the last phase brings to those who wait for it
    copies: list["Bulk"] = field(default_factory=list)
    # By program and warp: the phase when it last went on.
    seen: dict[tuple[int, int], int] = field(default_factory=dict)

    def require_news(self, program: int, warp: int) -> None:
        """A warp goes on at once, because the last phase had the parity that it waits for. While a
        phase is under way, this must be one that it has not seen: else it waits for the one under
        way, or for a later one, and has left out others. A barrier that counts no bytes may be
        free at first: others may have arrived before a warp that is late waits."""
        brings = bool(self.copies or self.nbytes)
        is_begun = brings or self.pending < self.count
        seen = self.seen.get((program, warp), 0 if brings else -1)
        if is_begun and self.phase == seen:
            raise Fault("waits for a phase of an mbarrier by its parity, and takes an older one")


@dataclass
class Bulk:
    """A bulk copy that is under way.

    Attributes:
        warp, lane: who began it.
        rows: places in shared memory.
        data: the bytes for each of them.
    """

    warp: int
    lane: int
    rows: np.ndarray
    data: np.ndarray


@dataclass
class _PhaseWait:
    machine: "Machine"
    warp: "Warp"
    addresses: dict[int, tuple[int, int]]  # address and parity for each program
    set_truth: Callable

    def ready(self, mask: np.ndarray) -> np.ndarray:
        by_program = mask.reshape(-1, WARP)
        result = np.zeros_like(by_program)
        for program in by_program.any(1).nonzero()[0]:
            address, parity = self.addresses[program]
            barrier = self.machine.barriers.find(self.warp, program, program, address)
            if self.machine.launch.track and barrier.phase & 1 != parity:
                barrier.require_news(int(program), self.warp.number)
            if self.machine.launch.late and barrier.pending == 0:
                self.machine.barriers.bring(barrier)
            if barrier.phase & 1 != parity:
                barrier.seen[int(program), self.warp.number] = barrier.phase
                result[program] = by_program[program]
                self.warp.has_waited.reshape(-1, WARP)[program] |= barrier.has_waited
                if barrier.released is not None:
                    one = np.array([program])
                    self.machine.shared.acquire(self.warp.number, one, barrier.released)
        flat = result.reshape(-1)
        if flat.any():
            self.set_truth(self.warp, np.ones(1, bool), flat)
        return flat


class Barriers:
    """All barriers of the programs of a machine."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.named: dict[int, _Named] = {}
        self.cluster = _Named(machine)
        self.phased: dict[tuple[int, int], _MBarrier] = {}
        self.left = np.zeros((machine.n_programs, machine.launch.n_warps), bool)
        machine.block_waited = np.full(machine.n_programs, not machine.launch.dependent)

    # bar.sync, bar.arrive, and barriers of clusters

    def arrive_named(
        self, warp: "Warp", number: int, n_threads: int | None, mask: np.ndarray | None
    ) -> None:
        barrier = self.named.setdefault(number, _Named(self.machine))
        self._arrive(warp, barrier, f"barrier {number}", mask)
        self._pass(number, barrier, n_threads)

    def _arrive(
        self, warp: "Warp", barrier: _Named, name: str, mask: np.ndarray | None
    ) -> np.ndarray:
        machine = self.machine
        programs = machine.whole_programs(mask)
        if barrier.arrived[programs, warp.number].any():
            raise Fault(f"the warp arrives at {name} twice")
        known = machine.shared.release(warp.number, programs)
        barrier.known[programs] = np.maximum(barrier.known[programs], known)
        barrier.arrived[programs, warp.number] = True
        machine.block_waited |= warp.has_waited.reshape(-1, WARP).all(1)
        return programs

    def _pass(self, number: int, barrier: _Named, n_threads: int | None) -> None:
        n_arrived = barrier.arrived.sum(1)
        if n_threads is None:
            full = (n_arrived > 0) & (barrier.arrived | self.left).all(1)
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

    def arrive_cluster(self, warp: "Warp", mask: np.ndarray | None) -> None:
        barrier, size = self.cluster, self.machine.launch.cluster
        programs = self._arrive(warp, barrier, "the cluster's barrier", mask)
        warp.cluster_ticket[programs] = barrier.passed[programs]
        self._pass_cluster(barrier, size)

    def _pass_cluster(self, barrier: _Named, size: int) -> None:
        here = (barrier.arrived | self.left).all(1).reshape(-1, size).all(1)
        full = (here & barrier.arrived.any(1).reshape(-1, size).any(1)).repeat(size)
        if full.any():
            barrier.passed[full] += 1
            barrier.arrived[full] = False
            joint = barrier.known.reshape(-1, size, barrier.known.shape[1]).max(1)
            barrier.released[full] = joint.repeat(size, 0)[full]

    def wait_cluster(self, warp: "Warp") -> _NamedWait:
        return _NamedWait(self.machine, warp, self.cluster, warp.cluster_ticket.copy())

    def leave(self, warp: "Warp", mask: np.ndarray) -> None:
        """Lanes end. Barriers of the whole block do not wait for warps that have ended."""
        for program in np.unique(mask.nonzero()[0] // WARP):
            self.left[program, warp.number] = True
        if 0 in self.named:
            self._pass(0, self.named[0], None)
        self._pass_cluster(self.cluster, self.machine.launch.cluster)

    # mbarriers

    def find(self, warp: "Warp", program: int, owner: int, address: int) -> _MBarrier:
        """The mbarrier of program `owner` that a warp of `program` uses."""
        barrier = self.phased.get((owner, address))
        if barrier is None:
            raise Fault(f"there is no mbarrier at {address:#x}")
        known = self.machine.shared.clocks[program, warp.number, barrier.by]
        if self.machine.launch.track and known < barrier.made:
            raise Fault("uses an mbarrier that another warp made, with nothing between them")
        return barrier

    def make(self, warp: "Warp", program: int, address: int, count: int) -> None:
        if address % 8:
            raise Fault("an mbarrier's address is not a multiple of 8")
        shared, one = self.machine.shared, np.array([program])
        shared.places(one * WARP, np.array([address]), 8)
        number, made = shared.number(warp.number, one)[0], shared.own_clock(warp.number, one)[0]
        known = np.zeros(shared.n_numbers, np.int16)
        self.phased[program, address] = _MBarrier(count, int(number), int(made), count, known)

    def fence(self, warp: "Warp", programs: np.ndarray) -> None:
        """Bulk copies may now count on the mbarriers that the warp has made."""
        for (program, _), barrier in self.phased.items():
            number = self.machine.shared.number(warp.number, np.array([program]))[0]
            if barrier.by == number and program in programs:
                barrier.is_fenced = True

    def owner_of(self, program: int, address: int) -> tuple[int, int]:
        """The program of the cluster that an address is of, and the address there."""
        rank = address >> CLUSTER_LOG
        if not rank:
            return program, address
        size = self.machine.launch.cluster
        if rank > size:
            raise Fault(f"an address of program {rank - 1} of a cluster of {size}")
        return program // size * size + rank - 1, address & ((1 << CLUSTER_LOG) - 1)

    def arrive(self, warp: "Warp", program: int, address: int, n: int, nbytes: int) -> None:
        """A lane arrives `n` times, and says how many bytes more will come."""
        owner, address = self.owner_of(program, address)
        self._require_running(owner)
        barrier = self.find(warp, program, owner, address)
        if n:
            one = np.array([program])
            known = self.machine.shared.release(warp.number, one, by_all_lanes=False)[0]
            barrier.known = np.maximum(barrier.known, known)
        barrier.has_waited |= bool(warp.has_waited.reshape(-1, WARP)[program].all())
        barrier.nbytes += nbytes
        barrier.pending -= n
        if barrier.pending < 0:
            raise Fault(f"more arrivals at an mbarrier than the {barrier.count} of a phase")
        self._complete(barrier)

    def _require_running(self, owner: int) -> None:
        if self.left[owner].all():
            raise Fault("uses shared memory of a program of the cluster that has ended")

    def _complete(self, barrier: _MBarrier) -> None:
        if barrier.pending == 0 and barrier.nbytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            before, known = barrier.released, barrier.known
            barrier.released = known if before is None else np.maximum(before, known)
            barrier.known = np.zeros_like(known)
            self.machine.steps += 1

    # bulk copies

    def begin_bulk(self, warp: "Warp", job: Bulk, owner: int, address: int) -> None:
        """Begins a bulk copy to shared memory, which an mbarrier of program `owner` counts."""
        machine = self.machine
        self._require_running(owner)
        barrier = self.find(warp, job.lane // WARP, owner, address)
        if machine.launch.track and not barrier.is_fenced:
            raise Fault("a bulk copy counts on an mbarrier without fence.mbarrier_init after it")
        lanes = np.full(job.rows.size, job.lane)
        n = job.data.shape[1]
        machine.shared.begin_copy(warp.number, lanes, job.rows, n, by_proxy=True)
        barrier.has_waited |= bool(warp.has_waited[job.lane])
        barrier.copies.append(job)
        if not machine.launch.late:
            self.bring(barrier)

    def bring(self, barrier: _MBarrier) -> None:
        """Ends the copies that an mbarrier counts."""
        shared = self.machine.shared
        jobs, barrier.copies = barrier.copies, []
        for job in jobs:
            lanes, one = np.full(job.rows.size, job.lane), np.array([job.lane // WARP])
            shared.put(job.rows, job.data)
            # Written at the clock of the warp that copies; whoever waits for the phase learns it.
            shared.end_copy(job.warp, lanes, job.rows, job.data, by_proxy=True)
            number = shared.number(job.warp, one)[0]
            clock = shared.release(job.warp, one)[0][number]
            barrier.known[number] = max(barrier.known[number], clock)
            barrier.nbytes -= job.data.size
        if jobs:
            self._complete(barrier)
