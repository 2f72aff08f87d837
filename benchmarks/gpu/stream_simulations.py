"""Simulate the kernels with warps that fetch: `python benchmarks/gpu.py simulate --stream`.

A program of `stream_product.cu` has warps of four kinds: those that multiply, one that fetches
weights, one that fetches tokens, and two that finish results or sum up exceptions. Each runs its
own part of the machine code, in order, on the four schedulers of `benchmarks.gpu.issue`. They wait
for each other at barriers in shared memory: a stage is full when the copies have arrived, by the
multiprocessor's share of device memory and L2, and empty when all warps that multiply are done with
it. Everything printed is simulated; nothing is measured.

Left out: other programs of a cluster run at the same pace, so only the way to them costs time; the
four warps of a wgmma do not wait for each other; a multiprocessor has one program.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from benchmarks.gpu import issue
from benchmarks.gpu.issue import N_SCHEDULERS, Memory, Step
from benchmarks.gpu.kept_simulations import StreamRow, write_streams
from benchmarks.gpu.machine_code import Instruction, MachineCode
from benchmarks.gpu.predictions import H200, MODELS, Shape
from benchmarks.gpu.stream_paths import compile_stream, count, loops_of, walk, ways_of
from packhorse.device.cost import EXCEPTION_RATES, predict_plain, processor_bandwidth
from packhorse.device.stream_cost import clusters_at_once, expect_stream, predict_stream
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.stream_product import (
    StreamConfig,
    keeps_tokens,
    plan_stream,
)
from packhorse.layout import W12, WeightFormat

__all__ = ["STREAM_BATCHES", "choose_stream", "simulate_stream", "simulate_streams", "stream_row"]

STREAM_BATCHES = (1, 8, 32, 64, 128, 256)
GAP, EARLY_GAP = 1.8e-6, 0.9e-6  # between dependent kernels, as in simulations.py
_START = 700  # cycles until a program is ready: 300 as in issue.py, barriers, addresses; assumed
_PORT = 64.0  # bytes that L2 brings a multiprocessor in a cycle
_LINE = 128  # bytes that shared memory takes in a cycle
_CLUSTER_LATENCY = 200  # cycles to another multiprocessor's shared memory (Luo et al., 2024)
_WGMMA_CYCLES = 32  # of 64 rows, 64 tokens, 16 columns, at the full rate
_WGMMA_LATENCY = 32  # more cycles until its sums are there; assumed
_WGMMA_LINES = 4  # passes through shared memory to read its tokens, for each of four warps
_MOST_UNITS = 6  # that are simulated; more go on at the same pace
_COPIES = -1  # in the place of a scheduler


@dataclass(eq=False, slots=True)
class _Warp(issue._Warp):
    counts: Counter[str] = field(default_factory=Counter)
    products: deque[float] = field(default_factory=deque)  # when its groups of them are done


class _Program(issue._Multiprocessor):
    """A multiprocessor with one program."""

    def __init__(
        self,
        memory: Memory,
        format: WeightFormat,
        config: StreamConfig,
        n_consumers: int,
        sends: int,
    ) -> None:
        super().__init__((), n_consumers, memory)
        self.few = config.block_tokens <= 32
        steps = 128 if self.few and format is W12 else 64
        weights = config.block_rows * steps * format.n_slices * format.bits / 8
        self.tokens_nbytes = 4 * 16 * config.block_tokens * 2
        self.cluster, self.copies = config.cluster, 2  # copies of a stage of weights
        self.weights_nbytes = weights / self.copies
        self.behind = {
            "empty weights": config.n_weight_stages,
            "empty tokens": config.n_token_stages,
            "empty sums": 1,
        }
        takers = {"weights": 2, "tokens": 2 * config.cluster} if self.few else {}
        self.needed = {
            "full weights": self.copies,
            "full tokens": 1,
            "empty weights": takers.get("weights", n_consumers),
            "empty tokens": takers.get("tokens", n_consumers),
            "full sums": 8 * sends if self.few else 2,
            "empty sums": 2 if self.few else n_consumers,
        }
        self.sends = sends  # of a warp for a unit
        self.turns_kept = 1 << 30  # turns whose tokens stay
        self.phases: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.next = [math.inf] * N_SCHEDULERS
        self.group = issue._Program()
        self.port_free = self.shared_free = 0.0
        self.tensor_free = [0.0] * N_SCHEDULERS
        # Copies that device memory has not brought yet: when it will have, and their stage.
        self.arriving: deque[tuple[float, int]] = deque()

    def add(self, steps: Sequence[Step], ready: float) -> None:
        scheduler = self.n_started % N_SCHEDULERS
        warp = _Warp(self.group, scheduler, self.n_started, ready, steps)
        if self.n_started < self.n_warps:
            self.group.warps.append(warp)
        self.group.left += 1
        self.warps[scheduler].append(warp)
        self.n_started += 1
        self.push(scheduler, ready)

    def push(self, scheduler: int, at: float) -> None:
        self.next[scheduler] = at
        heapq.heappush(self.queue, (at, scheduler))

    def wake(self, now: float) -> None:
        for scheduler in range(N_SCHEDULERS):
            if self.next[scheduler] > now + 1:
                self.push(scheduler, now + 1)

    def earliest(self, warp: issue._Warp) -> float:
        at = super().earliest(warp)
        assert isinstance(warp, _Warp)
        kind = warp.steps[warp.at].kind
        if kind == "wait products":
            running = list(warp.products)
            return max(at, *running[: len(running) - int(warp.steps[warp.at].nbytes)], 0.0)
        if not kind.startswith("wait "):
            return at
        name = kind[5:]
        phase = self._phase(warp, kind) - self.behind.get(name, 0)
        if phase < 0:
            return at
        times = self.phases[name][phase]
        return max(at, *times) if len(times) == self.needed[name] else math.inf

    def _fetch(self, warp: issue._Warp, step: Step, now: float, done: float) -> float:
        if step.kind == "copy":
            at = self._copy(step.l2_nbytes, step.l2_nbytes, now)
            warp.copied = max(warp.copied, at)
            return done
        return super()._fetch(warp, step, now, done)

    def issue(self, warp: issue._Warp, now: float) -> bool:
        assert isinstance(warp, _Warp)
        step = warp.steps[warp.at]
        kind = step.kind
        last = super().issue(warp, now)
        if step.pipe == "lsu" and kind != "nothing":
            self._pass(step.busy, now)
        if kind == "product":
            # A warp issues a product and goes on; the tensor cores do one after the other.
            read = self._pass(step.busy * _WGMMA_LINES, now)
            begin = max(self.tensor_free[warp.scheduler], now)
            done = max(begin + step.busy * _WGMMA_CYCLES, read)
            self.tensor_free[warp.scheduler] = done
            if step.nbytes:
                warp.products.append(done + _WGMMA_LATENCY)
        elif kind == "wait products":
            while len(warp.products) > step.nbytes:
                warp.products.popleft()
        elif kind.startswith(("wait ", "arrive ")):
            if kind.startswith("arrive "):
                self._tell(kind[7:], self._phase(warp, kind), now)
            warp.counts[kind] += 1
        return last

    def _phase(self, warp: _Warp, kind: str) -> int:
        """The phase of a barrier that a warp waits for or arrives at now. Up to 32 tokens, each
        pair of warps has a stage of weights of its own in a turn, and shares one of tokens."""
        count = warp.counts[kind]
        if not self.few:
            return count
        if kind == "arrive full sums":
            return count // self.sends
        if kind == "arrive full tokens":
            return count - 1  # at first there is nothing to tell
        if warp.number >= self.n_warps:
            return count
        if kind.endswith("weights"):
            return 4 * count + warp.number // 2
        if kind.endswith("tokens"):
            count %= self.turns_kept
            return 4 // self.cluster * count + warp.number // 2 // self.cluster
        return count

    def _tell(self, name: str, count: int, now: float) -> None:
        at = now
        if name == "full weights":
            # They come from device memory first; only then do they take time of L2.
            self.memory_free = max(self.memory_free, now) + self.weights_nbytes / self.memory.share
            self.arriving.append((self.memory_free, count // self.copies))
            heapq.heappush(self.queue, (self.memory_free, _COPIES))
            return
        if name == "full tokens" and not self.few:
            at = self._copy(self.tokens_nbytes / self.cluster, self.tokens_nbytes, now)
        elif self.cluster > 1 and (name.endswith("sums") if self.few else name == "empty tokens"):
            at += _CLUSTER_LATENCY
        self._note(name, count, at, now)

    def _note(self, name: str, count: int, at: float, now: float) -> None:
        times = self.phases[name][count]
        times.append(at)
        if len(times) == self.needed[name]:
            self.wake(now)

    def _bring(self, now: float) -> None:
        """Weights have come from device memory to L2."""
        _, count = self.arriving.popleft()
        at = self._copy(self.weights_nbytes, self.weights_nbytes, now)
        at += self.memory.latency - self.memory.load_latency
        self._note("full weights", count, at, now)

    def _copy(self, l2_nbytes: float, arriving: float, now: float) -> float:
        """When a copy from L2 to shared memory is there."""
        self.l2_free = max(self.l2_free, now) + l2_nbytes / self.memory.l2_share
        self.port_free = max(self.port_free, now) + arriving / _PORT
        written = self._pass(arriving / _LINE, now)
        return max(self.l2_free, self.port_free, written) + self.memory.load_latency

    def _pass(self, passes: float, now: float) -> float:
        """When passes through shared memory are done. Copies and products wait for their turn; what
        warps load and store themselves goes before them, and delays them."""
        self.shared_free = max(self.shared_free, now) + passes
        return self.shared_free

    def drain(self) -> float:
        """Runs until all warps are done; returns the cycles."""
        end = 0.0
        while self.queue:
            now, scheduler = heapq.heappop(self.queue)
            if scheduler == _COPIES:
                self._bring(now)
                continue
            if now != self.next[scheduler]:
                continue
            self.next[scheduler] = math.inf
            best, least = None, math.inf
            for warp in self.warps[scheduler]:
                at = self.earliest(warp)
                if (at < least and (at > now or least > now)) or (
                    at <= now and warp is self.last[scheduler]
                ):
                    best, least = warp, at
            if best is None:
                continue
            if least > now:
                self.push(scheduler, least)
                continue
            self.last[scheduler] = best
            end = now
            self.next[scheduler] = now + 1
            self.issue(best, now)
            self.push(scheduler, now + 1)
        if any(self.warps):
            raise RuntimeError("warps wait for what never comes")
        return end


def arranging_cycles(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, config: StreamConfig
) -> float:
    """Cycles of the kernel that arranges tokens, its programs being there."""
    plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
    return _cycles(
        compile_stream(format, config)["arrange_tokens"], plan.n_arranging + plan.n_transposing
    )


def adding_cycles(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, config: StreamConfig
) -> float:
    """Cycles of the kernel that adds the sums of parts, its programs being there; 0 without it."""
    n_programs = plan_stream(n_rows, n_columns, n_tokens, format, config).n_adding
    if not n_programs:
        return 0.0
    code = compile_stream(format, config)["add_parts"]
    loads = [s for s in loops_of(code) if count(code, s, "LDG")]
    return _cycles(code, n_programs, dict.fromkeys(loads, config.n_splits // 2))


def _cycles(
    code: MachineCode, n_programs: int, trips: Mapping[tuple[int, int], int] | None = None
) -> float:
    """Cycles of a small kernel whose programs have four warps."""

    def is_past(passed: Sequence[Instruction]) -> bool:
        """What loads or stores rows that are not aligned."""
        moves = [x.opcode for x in passed if x.operation in ("LDG", "STG")]
        return any("U16" in x for x in moves) and not any("128" in x for x in moves)

    path = []
    for x in walk(code, (0, len(code.instructions)), trips or {}, range(0), is_past):
        path.append(x)
        if x.operation == "EXIT" and not x.predicate:
            break
    steps = issue.steps_of(path, copy_passes=1.0)
    memory = Memory(math.inf, min(_PORT, H200.l2_bandwidth / H200.n_processors / H200.clock))
    return issue.run(steps, 4, -(-n_programs // H200.n_processors), 8, memory)[0]


def simulate_stream(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    config: StreamConfig,
    device: DeviceModel = H200,
    *,
    early: bool = False,
) -> float:
    """Simulated seconds of a product, with the gap before it.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        config: the division.
        device: the GPU; one of compute capability 9.0.
        early: whether the kernel before lets it start early. Its weights are then fetched from the
            end of that kernel on.
    """
    plan = plan_stream(n_rows, n_columns, n_tokens, format, config)
    clusters = min(plan.n_units, clusters_at_once(config, device))
    busiest = -(-plan.n_units // clusters)
    share = busiest / (plan.n_units * config.cluster)
    memory = Memory(
        min(device.bandwidth * share * plan.n_token_blocks, processor_bandwidth(device))
        / device.clock,
        device.l2_bandwidth * share / device.clock,
    )
    first = 0.0 if early else GAP
    tokens_at = EARLY_GAP if early else GAP
    if plan.n_arranging + plan.n_transposing:
        arranging = arranging_cycles(n_rows, n_columns, n_tokens, format, config)
        tokens_at += arranging / device.clock + EARLY_GAP
    late = max(0.0, (tokens_at - first) * device.clock)
    turns = -(-plan.n_turns // config.n_splits)
    exceptions = EXCEPTION_RATES[format.name] * n_columns / config.n_splits
    kept = keeps_tokens(n_columns, n_tokens, format, config)

    def cycles(n_units: int) -> float:
        n_consumers = plan.n_threads // 32 - 4
        ways = ways_of(format, config, turns, exceptions, n_tokens)
        sends = sum(step.kind == "arrive full sums" for step in ways.even)
        program = _Program(memory, format, config, n_consumers, sends)
        if kept:
            program.turns_kept = turns
        for i in range(n_consumers):
            program.add((ways.even, ways.odd)[i % 2] * n_units, _START)
        program.add(ways.weights * n_units, _START)
        program.add((*ways.tokens * (1 if kept else n_units), *ways.last_tokens), max(_START, late))
        for _ in range(2):
            program.add(ways.finish * n_units, max(_START, late))
        return program.drain()

    n_run = min(busiest, _MOST_UNITS)
    total = cycles(n_run)
    if n_run < busiest:
        half = n_run // 2
        total += (total - cycles(half)) / (n_run - half) * (busiest - n_run)
    seconds = first + total / device.clock
    if plan.n_adding:  # the sums are written, and read by one more kernel
        seconds += plan.parts_nbytes / device.l2_bandwidth
        seconds += adding_cycles(n_rows, n_columns, n_tokens, format, config) / device.clock
    elif config.n_splits > 1:
        seconds += 8 * config.n_splits * n_tokens * n_rows / device.l2_bandwidth
    if config.n_splits > 1:
        seconds += EARLY_GAP if early else GAP
    return seconds


def choose_stream(n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat) -> StreamConfig:
    """The division that an H200 takes where nothing was tuned."""
    return expect_stream(n_rows, n_columns, n_tokens, format, H200)[0]


def stream_row(shape: Shape, n_tokens: int, format: WeightFormat = W12) -> StreamRow:
    """What is chosen untuned for a matrix, predicted and simulated."""
    product = shape.n_rows, shape.n_columns, n_tokens
    config = choose_stream(*product, format)
    return StreamRow(
        matrix=shape.name,
        n_rows=shape.n_rows,
        n_columns=shape.n_columns,
        n_tokens=n_tokens,
        format=format.name,
        division=list(astuple(config)),
        plain=predict_plain(*product, H200),
        predicted=predict_stream(*product, format, config, H200),
        simulated=simulate_stream(*product, format, config),
        early=simulate_stream(*product, format, config, early=True),
    )


def simulate_streams(write: bool) -> int:
    """Prints what is chosen untuned for the matrices of a Llama of 8B, and keeps it if `write`.

    Returns:
        The exit status: 0.
    """
    heads = ("matrix", "tokens", "division", "BF16 us", "predicted us", "simulated us")
    print(f"| {' | '.join(heads)} | started early us |")
    print("|---|--:|---|--:|--:|--:|--:|", flush=True)
    rows = []
    for shape in MODELS[0].shapes:
        for n_tokens in STREAM_BATCHES:
            rows.append(stream_row(shape, n_tokens))
            print(rows[-1], flush=True)
    if write:
        write_streams(rows)
    return 0
