"""What each kind of warp of the kernels in CUDA C++ executes for a unit of work, read from their
machine code: the instructions as steps of `benchmarks.gpu.issue`, and where warps wait for each
other at barriers in shared memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.gpu import issue
from benchmarks.gpu.issue import Step
from benchmarks.gpu.machine_code import Instruction, MachineCode, disassemble, parse_listing
from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source
from packhorse.kernels.stream_product import (
    StreamConfig,
    stream_options,
    stream_shared_nbytes,
)
from packhorse.layout import W12, WeightFormat

__all__ = ["Ways", "compile_stream", "count", "loops_of", "walk", "ways_of"]

_REST = ("full weights", "empty weights", "full tokens", "empty tokens", "full sums", "empty sums")


@dataclass(frozen=True)
class Ways:
    """The instructions of a unit, by kind of warp."""

    even: Sequence[Step]
    odd: Sequence[Step]
    weights: Sequence[Step]
    tokens: Sequence[Step]
    last_tokens: Sequence[Step]  # after all units
    finish: Sequence[Step]


@cache
def compile_stream(format: WeightFormat, config: StreamConfig) -> dict[str, MachineCode]:
    binary = compiler().compile(stream_source(), stream_options(config, format))
    return parse_listing(disassemble(binary))


def loops_of(code: MachineCode) -> list[tuple[int, int]]:
    """The loops, without those jumps back from code that waits at a barrier."""
    ends = ((span, code.instructions[span[1] - 1]) for span in code.loops)
    return [span for span, x in ends if x.predicate or len(x.operands) > 1]


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _around(code: MachineCode, span: tuple[int, int]) -> tuple[int, int]:
    """The loop over units that a loop stands in."""
    return max((s for s in loops_of(code) if _inside(span, s)), key=lambda s: s[1] - s[0])


def _loop_with(code: MachineCode, operations: set[str]) -> tuple[int, int]:
    """The smallest loop with all instructions of some kind that waits at a barrier, too."""
    found = [i for i, x in enumerate(code.instructions) if x.operation in operations]
    spans = [
        s
        for s in loops_of(code)
        if all(s[0] <= i < s[1] for i in found)
        and any(x.operation == "SYNCS" for x in code.instructions[slice(*s)])
    ]
    return min(spans, key=lambda s: s[1] - s[0])


def _multiplies(code: MachineCode, begin: int, end: int) -> bool:
    return any(x.operation == "HMMA" for x in code.instructions[begin:end])


def walk(
    code: MachineCode,
    span: tuple[int, int],
    trips: Mapping[tuple[int, int], int],
    other: range,
    is_past: Callable[[Sequence[Instruction]], bool] = lambda passed: False,
) -> Iterator[Instruction]:
    """The instructions from the beginning of a loop to its end, once. Forward branches with a
    condition are not taken, but those past products in the part `other`, and those for whose passed
    instructions `is_past` says so."""
    loops = {end - 1: (start, end) for start, end in loops_of(code)}
    left: dict[tuple[int, int], int] = {}
    i = span[0]
    while i < span[1]:
        x = code.instructions[i]
        yield x
        there = None if x.target is None or x.operation != "BRA" else code.index_of[x.target]
        conditional = bool(x.predicate) or len(x.operands) > 1
        if there is None or i == span[1] - 1:
            i += 1
        elif i in loops and there <= i:
            n = left.get(loops[i], trips.get(loops[i], 1)) - 1
            left[loops[i]] = n
            if n == 0:
                del left[loops[i]]
            i = there if n > 0 else i + 1
        elif (
            not conditional
            or (
                i in other
                and there in other
                and _multiplies(code, i, there)
                and _multiplies(code, there, other.stop)
            )
            or (i < there and is_past(code.instructions[i + 1 : there]))
        ):
            i = there
        else:
            i += 1


def _steps(
    path: Iterator[Instruction], format: WeightFormat, config: StreamConfig
) -> tuple[Step, ...]:
    few = config.block_tokens <= 32
    barriers = 2 * config.n_weight_stages + 2 * config.n_token_stages + 2
    first = stream_shared_nbytes(config, format) - 1024 - 8 * barriers
    sizes = (config.n_weight_stages,) * 2 + (config.n_token_stages,) * 2 + (1, 1)
    places = {
        first + 8 * (sum(sizes[:i]) + stage): name
        for i, name in enumerate(_REST)
        for stage in range(sizes[i])
    }
    done = []
    for x in path:
        (step,) = issue.steps_of([x], copy_passes=1.0)
        if x.operation == "SYNCS":
            _, _, place = x.operands[1].strip("[]").rpartition("+")
            if place.startswith("0x"):
                name = places[int(place, 16)]
            elif not few or ".RED" in x.opcode:  # an arrival at all programs of a cluster
                name = "empty sums" if few else "empty tokens"
            else:
                name = "full tokens"
            if "PHASECHK" in x.opcode:
                step = step._replace(kind=f"wait {name}")
            elif not name.startswith("full") or name == ("full tokens" if few else "full sums"):
                step = step._replace(kind=f"arrive {name}")
        elif x.operation == "UTMALDG":
            step = step._replace(kind="arrive full weights")
        elif x.operation == "UBLKCP":
            step = step._replace(kind="arrive full tokens")
        elif x.operation == "LDGSTS":
            step = step._replace(busy=4.0, l2_nbytes=512.0)
        elif x.operation == "STAS":  # out of this program's memory, and into another's
            step = step._replace(kind="arrive full sums", pipe="lsu", busy=4.0)
        elif x.operation == "HGMMA":
            width = int(x.opcode.split(".")[1].split("x")[1]) / 64
            ends = float(x.operands[-1].startswith("gsb"))  # a group that can be waited for
            step = step._replace(kind="product", pipe="issue", busy=width, nbytes=ends)
        elif x.opcode.startswith("WARPGROUP.DEPBAR"):
            step = step._replace(kind="wait products", nbytes=float(int(x.operands[-1], 16)))
        done.append(step)
    return tuple(done)


def _most(mean: float, n_rows: int) -> int:
    """Exceptions of the row with most of them: what half of all groups of rows stay below."""
    term = total = math.exp(-mean)
    k = 0
    while total**n_rows < 0.5:
        k += 1
        term *= mean / k
        total += term
    return k


@cache
def ways_of(
    format: WeightFormat, config: StreamConfig, turns: int, exceptions: float, n_tokens: int
) -> Ways:
    of_some = _ways_of_few if config.block_tokens <= 32 else _ways_of_many
    return of_some(format, config, turns, exceptions, n_tokens)


def _ways_of_few(
    format: WeightFormat, config: StreamConfig, turns: int, exceptions: float, n_tokens: int
) -> Ways:
    code = compile_stream(format, config)["multiply"]
    main, weights, tokens = (_loop_with(code, {x}) for x in ("HMMA", "UTMALDG", "LDGSTS"))
    unit, fetching = _around(code, main), _around(code, tokens)

    def steps(
        span: tuple[int, int], n: Mapping[tuple[int, int], int], other: range = range(0)
    ) -> Sequence[Step]:
        return _steps(walk(code, span, n, other), format, config)

    rows = {
        s: max(1, n_tokens // count(code, s, "LDGSTS"))
        for s in loops_of(code)
        if _inside(s, tokens)
    }
    end = fetching[1]
    while code.instructions[end].operation != "SYNCS":
        end += 1
    taken = (unit, _around(code, weights), fetching)
    finish = max(
        (s for s in loops_of(code) if s not in taken and count(code, s, "STG")),
        key=lambda s: s[1] - s[0],
    )
    blocks = -(-_most(exceptions, 32) // _at_once(format, config))
    gathers = {
        s: max(blocks, 1) for s in loops_of(code) if _inside(s, finish) and count(code, s, "LDG")
    }
    return Ways(
        steps(unit, {main: turns}),
        steps(unit, {main: turns}, range(*main)),
        steps(_around(code, weights), {weights: turns}),
        steps(fetching, rows | {tokens: turns * 4 // config.cluster}),
        steps((fetching[1], end + 1), {}),
        steps(finish, gathers),
    )


def _ways_of_many(
    format: WeightFormat, config: StreamConfig, turns: int, exceptions: float, n_tokens: int
) -> Ways:
    code = compile_stream(format, config)["multiply"]
    main, weights, tokens = (_loop_with(code, {x}) for x in ("HGMMA", "UTMALDG", "UBLKCP"))
    unit = _around(code, main)

    def is_past(passed: Sequence[Instruction]) -> bool:
        """Other ways to store results, and what extreme exponents or a bias need."""
        names = Counter(x.opcode for x in passed)
        operations = {x.operation for x in passed}
        if operations & {"HGMMA", "SYNCS"}:
            return False
        if config.n_splits > 1:
            return "STSM" in operations
        is_part = names["STG.E.128"] >= config.block_tokens / 8
        is_odd = names["STG.E.U16"] > 0 and not names["STG.E.128"]
        added = operations in ({"FMUL"}, {"FADD"})
        return "STSM" not in operations and (is_part or is_odd or added)

    def steps(span: tuple[int, int], n: Mapping[tuple[int, int], int]) -> Sequence[Step]:
        return _steps(walk(code, span, n, range(0), is_past), format, config)

    taken = (unit, _around(code, weights), _around(code, tokens))
    outer, *inner = sorted(
        (
            s
            for s in loops_of(code)
            if not any(_inside(s, t) or s == t for t in taken)
            and count(code, s, "LDG") + count(code, s, "STG")
        ),
        key=lambda s: s[0] - s[1],
    )
    rows = config.block_rows // config.n_splits // 2  # whose exceptions a warp sums up
    stages = math.ceil(rows * exceptions * config.n_splits / 8)
    way = steps(unit, {main: turns})
    # A unit's first turn has no tokens to release.
    first = [step.kind for step in way].index("arrive empty tokens")
    way = (*way[:first], *way[first + 1 :])
    return Ways(
        way,
        way,
        steps(_around(code, weights), {weights: turns}),
        steps(_around(code, tokens), {tokens: turns * format.n_slices}),
        (),
        steps(outer, dict(zip(inner, (stages, rows // 8), strict=True))),
    )


def _at_once(format: WeightFormat, config: StreamConfig) -> int:
    """Exceptions that a thread of stream_few.cu has under way."""
    if format is W12:
        return min(8, 128 // config.block_tokens)
    return min(16, 256 // config.block_tokens)


def count(code: MachineCode, span: tuple[int, int], operation: str) -> int:
    return sum(x.operation == operation for x in code.instructions[slice(*span)])
