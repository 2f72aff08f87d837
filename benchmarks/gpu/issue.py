"""Simulate how a multiprocessor issues machine code, in order, from the control codes.

Four schedulers issue one instruction a cycle each, of the warp that issued last or else of the
oldest one that is ready. A warp is ready when the stall count of its last instruction has passed,
when the barriers that the instruction waits for are open, and when a pipe is free. Instructions of
shared memory queue for one data path; loads queue for this multiprocessor's share of device memory
and of L2. What each instruction takes is in the tables below. They are assumptions: from NVIDIA's
rates of instructions for each multiprocessor (CUDA C++ programming guide, arithmetic instructions,
capability 9.0) and from published microbenchmarks of latencies (Luo et al., "Dissecting the NVIDIA
Hopper architecture", 2024); none was measured by us.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.gpu.machine_code import Instruction, MachineCode

__all__ = ["Memory", "Step", "issue_rate", "main_loop", "make_steps", "run", "steps_of"]

N_SCHEDULERS = 4
_N_BARRIERS = 6
_LSU_QUEUE = 24  # cycles of work that may wait for the data path of shared memory
_RELEASE = 12  # cycles from the last warp at a barrier until all go on
_GATHER_PASSES = 8.0  # of a load of less than four bytes a thread, from different lines
_START = 300  # cycles until the first instruction of a program is issued

# Pipes of a scheduler: cycles that one instruction of 32 threads keeps them busy.
_PIPES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("LOP3", "PRMT", "SHF", "IADD3", "ISETP", "SEL", "LEA", "VIADD"), ("alu", 2)),
    **dict.fromkeys(("IMNMX", "VIMNMX", "IABS", "PLOP3", "SGXT", "BMSK", "POPC"), ("alu", 2)),
    **dict.fromkeys(("IMAD", "HMUL2", "HFMA2", "HADD2", "FFMA", "FMUL", "FADD"), ("fma", 2)),
    **dict.fromkeys(("UIADD3", "ULEA", "USEL", "UISETP", "USHF", "ULOP3", "UIMAD"), ("uni", 2)),
    "HMMA": ("tensor", 8),
}
_LSU = {"LDSM", "LDS", "LDGSTS", "STS", "STSM", "LDG", "STG", "ATOMS", "SHFL", "UBLKPF"}
# Cycles until results are there, of instructions that open a barrier.
_LATENCY = {
    "LDSM": 33,
    "LDS": 30,
    "STS": 30,
    "SHFL": 25,
    "HMMA": 33,
    "R2UR": 12,
    "S2R": 30,
    "LDC": 40,
    "S2UR": 30,
    "MUFU": 30,
    "BAR": 20,
    "LDGDEPBAR": 20,
    "DEPBAR": 10,
}
_OTHER_LATENCY = 20
_READ = 12  # cycles until operands have been read


class Memory(NamedTuple):
    """The memory as one multiprocessor sees it.

    Attributes:
        share: bytes of device memory that it gets a cycle.
        l2_share: bytes of L2 that it gets a cycle.
        latency: cycles from a copy to shared memory until the data are there, without queues.
        load_latency: the same of loads to registers, which mostly find their data in L2.
    """

    share: float
    l2_share: float
    latency: float = 900.0
    load_latency: float = 650.0


class Step(NamedTuple):
    """An instruction as a warp issues it.

    Attributes:
        kind: "pipe", "lsu", "copy" (to shared memory), "commit" (a group of copies), "wait" (for
            such groups), "load", "barrier" or "nothing" (a copy that is switched off).
        pipe: the pipe of the scheduler.
        busy: cycles that the pipe, or the data path of shared memory, is busy.
        latency: cycles until the results are there.
        stall: cycles until the warp's next instruction.
        write, read: numbers of the barriers that open; -1 for none.
        waits: the barriers that it waits for.
        nbytes: bytes from device memory; for "wait", the groups that may be under way.
        l2_nbytes: bytes from L2.
    """

    kind: str
    pipe: str
    busy: float
    latency: float
    stall: int
    write: int
    read: int
    waits: tuple[int, ...]
    nbytes: float
    l2_nbytes: float


@dataclass(eq=False, slots=True)
class _Warp:
    program: "_Program"
    scheduler: int
    number: int
    ready: float
    steps: Sequence[Step]
    at: int = 0
    barriers: list[float] = field(default_factory=lambda: [0.0] * _N_BARRIERS)
    groups: deque[float] = field(default_factory=deque)
    copied: float = 0.0  # when the copies of the group that is still open are there
    waits: bool = False


@dataclass(eq=False, slots=True)
class _Program:
    warps: list[_Warp] = field(default_factory=list)
    arrived: int = 0
    left: int = 0


def make_steps(
    code: MachineCode,
    trips: Mapping[tuple[int, int], int],
    *,
    copy_passes: float,
    copy_nbytes: float,
    copy_l2_nbytes: float,
    early: bool = False,
) -> list[Step]:
    """The instructions of a warp from the beginning of a kernel to its end.

    Forward branches with a condition are not taken. Copies of the loop's last turns are switched
    off, as many as the kernel makes before the loop.

    Args:
        code: the kernel.
        trips: how often each loop runs, by its range; once if it is not named.
        copy_passes: passes through shared memory that a copy takes, with its bank conflicts.
        copy_nbytes: bytes of a copy that come from device memory, of 512 at most.
        copy_l2_nbytes: bytes of a copy that come from L2, these included.
        early: whether the copies before the loop find their data in L2.
    """
    main = main_loop(code)
    loops = {end - 1: (start, end) for start, end in code.loops}
    steps = [_step(x, copy_passes, copy_nbytes, copy_l2_nbytes) for x in code.instructions]
    if early:
        steps[: main[0]] = [step._replace(nbytes=0.0) for step in steps[: main[0]]]
    ahead = sum(s.kind == "copy" for s in steps[: main[0]])
    each = sum(s.kind == "copy" for s in steps[slice(*main)])
    n_off = round(ahead / each) if each else 0
    done: list[Step] = []
    left = {span: trips.get(span, 1) for span in loops.values()}
    i = 0
    while i < len(steps):
        x, step = code.instructions[i], steps[i]
        is_off = step.kind == "copy" and main[0] <= i < main[1] and left[main] <= n_off
        done.append(step._replace(kind="nothing") if is_off else step)
        if x.operation == "EXIT" and not x.predicate:
            break
        if i in loops:
            left[loops[i]] -= 1
            i = loops[i][0] if left[loops[i]] > 0 else i + 1
        elif x.operation == "BRA" and x.target is not None and not _has_condition(x):
            i = code.index_of[x.target]
        else:
            i += 1
    return done


def steps_of(instructions: Iterable[Instruction], *, copy_passes: float) -> list[Step]:
    """Instructions as a warp issues them, one after the other, with nothing from memory."""
    return [_step(x, copy_passes, 0.0, 0.0) for x in instructions]


def _has_condition(x: Instruction) -> bool:
    return bool(x.predicate) or len(x.operands) > 1


def main_loop(code: MachineCode) -> tuple[int, int]:
    """The loop that copies to shared memory; of several, the one with most products."""

    def weight(span: tuple[int, int]) -> tuple[bool, int, int]:
        body = code.instructions[slice(*span)]
        n_products = sum(x.operation in ("HMMA", "HGMMA") for x in body)
        return any(x.operation == "LDGSTS" for x in body), n_products, len(body)

    return max(code.loops, key=weight)


def _step(x: Instruction, copy_passes: float, copy_nbytes: float, copy_l2_nbytes: float) -> Step:
    c, name = x.control, x.operation
    pipe, busy = _PIPES.get(name, ("misc", 1))
    kind, nbytes, l2_nbytes = "pipe", 0.0, 0.0
    latency = float(_LATENCY.get(name, _OTHER_LATENCY))
    passes = float(busy)
    if x.predicate == "!PT":
        kind = "nothing"
    elif name == "LDGSTS":
        kind, pipe, passes, latency = "copy", "lsu", copy_passes, 60.0
        nbytes, l2_nbytes = copy_nbytes, copy_l2_nbytes
    elif name == "LDG":
        is_narrow = any(part in x.opcode for part in (".U16", ".U8", ".S8", ".S16"))
        kind, pipe, passes = "load", "lsu", _GATHER_PASSES if is_narrow else 2.0
        l2_nbytes = 128.0
    elif name in _LSU:
        wide = 4.0 if "128" in x.opcode or name == "LDSM" else 2.0 if "64" in x.opcode else 1.0
        kind, pipe, passes = "lsu", "lsu", wide
    elif name == "LDGDEPBAR":
        kind = "commit"
    elif name == "DEPBAR":
        kind, nbytes = "wait", float(int(x.operands[-1], 16))
    elif name == "BAR":
        kind = "barrier"
    write = -1 if c.write_barrier is None else c.write_barrier
    read = -1 if c.read_barrier is None else c.read_barrier
    stall = max(c.stall, 1)
    return Step(kind, pipe, passes, latency, stall, write, read, c.waits, nbytes, l2_nbytes)


class _Multiprocessor:
    """The state of a multiprocessor, and what an instruction does to it."""

    def __init__(self, steps: Sequence[Step], n_warps: int, memory: Memory) -> None:
        self.steps, self.n_warps, self.memory = steps, n_warps, memory
        self.lsu_free = self.memory_free = self.l2_free = 0.0
        self.pipes: list[dict[str, float]] = [{} for _ in range(N_SCHEDULERS)]
        self.warps: list[list[_Warp]] = [[] for _ in range(N_SCHEDULERS)]
        self.last: list[_Warp | None] = [None] * N_SCHEDULERS
        self.asleep: set[int] = set(range(N_SCHEDULERS))
        self.queue: list[tuple[float, int]] = []
        self.n_issued = self.n_started = 0

    def start(self, now: float) -> None:
        program = _Program(left=self.n_warps)
        for _ in range(self.n_warps):
            scheduler = self.n_started % N_SCHEDULERS
            warp = _Warp(program, scheduler, self.n_started, now + _START, self.steps)
            program.warps.append(warp)
            self.warps[scheduler].append(warp)
            self.n_started += 1
        self.wake(now + _START)

    def wake(self, now: float) -> None:
        for scheduler in self.asleep:
            heapq.heappush(self.queue, (now, scheduler))
        self.asleep.clear()

    def earliest(self, warp: _Warp) -> float:
        """When the warp can issue its next instruction, as far as is known now."""
        if warp.waits:
            return math.inf
        step = warp.steps[warp.at]
        at = warp.ready
        for barrier in step.waits:
            at = max(at, warp.barriers[barrier])
        if step.kind == "nothing":
            return at
        at = max(at, self.pipes[warp.scheduler].get(step.pipe, 0.0))
        if step.pipe == "lsu":
            return max(at, self.lsu_free - _LSU_QUEUE)
        if step.kind == "wait":
            for done in list(warp.groups)[: len(warp.groups) - int(step.nbytes)]:
                at = max(at, done)
        return at

    def issue(self, warp: _Warp, now: float) -> bool:
        """Issues the warp's next instruction; returns whether it was the last of its program."""
        step = warp.steps[warp.at]
        warp.ready = now + step.stall
        warp.at += 1
        self.n_issued += 1
        done, read = now + step.latency, now + _READ
        if step.pipe == "lsu" and step.kind != "nothing":
            self.pipes[warp.scheduler]["lsu"] = now + 2
            begin = max(self.lsu_free, now)
            self.lsu_free = begin + step.busy
            done, read = self.lsu_free + step.latency, self.lsu_free + 8
            if step.kind in ("copy", "load"):
                done = self._fetch(warp, step, now, done)
        elif step.kind != "nothing":
            self.pipes[warp.scheduler][step.pipe] = now + step.busy
        if step.kind == "commit":
            warp.groups.append(warp.copied)
            warp.copied = 0.0
        elif step.kind == "wait":
            while len(warp.groups) > step.nbytes:
                warp.groups.popleft()
        elif step.kind == "barrier":
            self._arrive(warp, now)
        if step.write >= 0:
            warp.barriers[step.write] = max(warp.barriers[step.write], done)
        if step.read >= 0:
            warp.barriers[step.read] = max(warp.barriers[step.read], read)
        if warp.at < len(warp.steps):
            return False
        self.warps[warp.scheduler].remove(warp)
        warp.program.left -= 1
        return warp.program.left == 0

    def _fetch(self, warp: _Warp, step: Step, now: float, done: float) -> float:
        """When data that are loaded are there; for copies, when the instruction is done."""
        self.l2_free = max(self.l2_free, now) + step.l2_nbytes / self.memory.l2_share
        there = self.l2_free
        if step.nbytes:
            self.memory_free = max(self.memory_free, now) + step.nbytes / self.memory.share
            there = max(there, self.memory_free)
        if step.kind == "load":
            return max(done, there + self.memory.load_latency)
        warp.copied = max(warp.copied, there + self.memory.latency)
        return done

    def _arrive(self, warp: _Warp, now: float) -> None:
        program = warp.program
        program.arrived += 1
        warp.waits = True
        if program.arrived == self.n_warps:
            program.arrived = 0
            for other in program.warps:
                other.waits = False
                other.ready = max(other.ready, now + _RELEASE)
            self.wake(now)


def run(
    steps: Sequence[Step], n_warps: int, n_programs: int, resident: int, memory: Memory
) -> tuple[float, int]:
    """Runs programs on one multiprocessor.

    Args:
        steps: the instructions of each warp.
        n_warps: warps of a program.
        n_programs: programs that it runs, as the one before ends.
        resident: programs at once.
        memory: its share of the memory.

    Returns:
        Cycles until all programs have ended, and how many instructions of warps were issued.
    """
    chip = _Multiprocessor(steps, n_warps, memory)
    waiting = n_programs
    for _ in range(min(resident, n_programs)):
        chip.start(0.0)
        waiting -= 1
    end = 0.0
    while chip.queue:
        now, scheduler = heapq.heappop(chip.queue)
        warps = chip.warps[scheduler]
        best, least = None, math.inf
        last = chip.last[scheduler]
        for warp in warps:
            at = chip.earliest(warp)
            if (at < least and (at > now or least > now)) or (at <= now and warp is last):
                best, least = warp, at
        if best is None:
            chip.asleep.add(scheduler)
            continue
        if least > now:
            heapq.heappush(chip.queue, (least, scheduler))
            continue
        chip.last[scheduler] = best
        end = max(end, now)
        if chip.issue(best, now) and waiting:
            waiting -= 1
            chip.start(now)
        heapq.heappush(chip.queue, (now + 1, scheduler))
    return end, chip.n_issued


def issue_rate(steps: Iterable[Step], n_warps: int, resident: int, n_turns: int = 12) -> float:
    """Instructions that a scheduler issues in a cycle if memory never makes it wait.

    Args:
        steps: the instructions of a turn of a loop.
        n_warps: warps of a program.
        resident: programs at once.
        n_turns: turns that are run.
    """
    body = [step._replace(kind="lsu") if step.kind in ("copy", "load") else step for step in steps]
    free = Memory(math.inf, math.inf, 0.0, 0.0)
    cycles, issued = run(body * n_turns, n_warps, resident, resident, free)
    return issued / (cycles - _START) / N_SCHEDULERS
