"""Simulate fused products from their machine code: `python benchmarks/gpu.py simulate`.

A division is compiled offline, and the busiest multiprocessor runs its instructions in
`benchmarks.gpu.issue`. Everything printed is simulated; nothing is measured. The simulation and the
model of time (`packhorse.device.cost`) share the figures of the GPU, but the model knows only a few
numbers of a division, and the simulation each instruction. So where they agree, the model has not
left out what the instructions say. Whether the hardware does what both assume, only a GPU can tell.

The command prints what is chosen untuned for the matrices of a Llama of 8B, predicted and simulated
beside each other; then the agreement of both over other divisions, with 8 tokens, to which the
model was fitted; then that over products that it was not fitted to: the matrices of a Llama of 70B,
with other numbers of tokens, too. `--write` keeps the figures. It takes some ten minutes of a core.
The GPU is an H200; with `--a100` it is an A100, with 64 to 256 tokens and without the last part.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache

import triton

from benchmarks.gpu import issue, sass
from benchmarks.gpu.kept_simulations import A100_PATH, PATH, Agreement, Kept, Row, write
from benchmarks.gpu.machine_code import MachineCode, read_kernel
from benchmarks.gpu.predictions import A100, H200, MODELS, SHARED_BATCHES, Shape
from benchmarks.gpu.stream_simulations import simulate_streams
from packhorse.device.autotune import tune
from packhorse.device.cost import (
    EXCEPTION_RATES,
    conflicts_of_copies,
    predict_fused,
    predict_plain,
    processor_bandwidth,
)
from packhorse.device.strategy import bucket_of
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.launch import ceil_div
from packhorse.kernels.matmul import MatmulConfig, shared_nbytes_of
from packhorse.layout import W11, W12, WeightFormat

__all__ = ["Compiled", "Simulated", "compile_division", "simulate", "simulate_chosen"]

BATCHES = (1, 8, 32)
SHAPES = MODELS[0].shapes
UNFITTED_SHAPES, UNFITTED_BATCHES = MODELS[1].shapes, (8, 16, 32)
_SYSTEM_NBYTES = 1024  # of shared memory that the system keeps for each program
_MAX_PROGRAMS, _MAX_WARPS, _REGISTERS = 32, 64, 65536  # of a multiprocessor
# Divisions of which predictions are compared with simulations: small and large tiles, few and many
# warps, all steps, with splits.
DIVISIONS = tuple(
    MatmulConfig(rows, 8, steps, n_warps, n_splits, n_stages, n_tiles)
    for rows, steps, n_warps, n_splits, n_stages, n_tiles in (
        (32, 64, 4, 1, 4, 1),
        (32, 128, 4, 1, 3, 1),
        (32, 32, 4, 1, 4, 1),
        (16, 64, 4, 1, 4, 1),
        (32, 64, 2, 1, 5, 1),
        (32, 64, 4, 1, 3, 2),
        (32, 32, 4, 1, 5, 2),
        (32, 64, 2, 1, 5, 2),
        (64, 64, 4, 1, 3, 1),
        (64, 32, 2, 1, 5, 1),
        (32, 64, 8, 1, 3, 1),
        (32, 64, 4, 2, 4, 1),
        (32, 32, 4, 1, 5, 3),
        (32, 32, 2, 1, 2, 4),
    )
)
# The same for an A100: divisions whose warps share the columns.
SHARED_DIVISIONS = tuple(
    MatmulConfig(rows, 64, steps, 4, n_splits, n_stages)
    for rows, steps, n_splits, n_stages in (
        (64, 32, 1, 3),
        (64, 32, 2, 3),
        (64, 32, 4, 3),
        (64, 32, 1, 4),
        (64, 64, 1, 3),
        (64, 64, 2, 3),
        (128, 32, 1, 3),
        (128, 32, 2, 3),
    )
)
# Programs of a multiprocessor that are simulated; more go on at the same pace.
_MOST = 24
# Seconds between dependent kernels of a CUDA graph. The 2.5 us of a launch in `gpu/models.py`
# include the start of programs, which is simulated here.
GAP = 1.8e-6
# The same if the later kernel starts early and waits (programmatic dependent launch). Its programs
# are there, and its first weights in L2. Assumed.
EARLY_GAP = 0.9e-6
_EARLY_CAPABILITY = 90


@dataclass(frozen=True)
class Compiled:
    """A division's machine code.

    Attributes:
        code: the instructions.
        registers: of a thread.
        shared_nbytes: of a program.
        spills: accesses to local memory.
    """

    code: MachineCode
    registers: int
    shared_nbytes: int
    spills: int


@dataclass(frozen=True)
class Simulated:
    """What a simulation gives.

    Attributes:
        seconds: of the product, with the gap before it.
        programs: how many programs the product has.
        resident: how many of them a multiprocessor runs at once.
        registers: of a thread.
        issue: instructions that a scheduler issued in a cycle, on average.
    """

    seconds: float
    programs: int
    resident: int
    registers: int
    issue: float


@cache
def compile_division(
    format: WeightFormat, config: MatmulConfig, architecture: int = 90
) -> Compiled:
    """Compiles a division as it runs on an architecture; on Hopper it may start early."""
    early = architecture >= _EARLY_CAPABILITY
    compiled = sass.compile_matmul(format, config, architecture, early=early)
    code = read_kernel(compiled.asm["cubin"])
    registers = sass.count_registers(compiled.asm["cubin"])
    return Compiled(code, registers, compiled.metadata.shared, code.count(sass.SPILL_OPS))


def resident_of(compiled: Compiled, n_warps: int, device: DeviceModel) -> int:
    """Programs that a multiprocessor runs at once."""
    registers = ceil_div(compiled.registers, 8) * 8 * 32 * n_warps  # are given out by 8 a thread
    by_shared = device.shared_nbytes // (compiled.shared_nbytes + _SYSTEM_NBYTES)
    return min(by_shared, _REGISTERS // registers, _MAX_PROGRAMS, _MAX_WARPS // n_warps)


def simulate(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    config: MatmulConfig,
    device: DeviceModel = H200,
    *,
    early: bool = False,
) -> Simulated:
    """Simulates a product.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        config: the division.
        device: the GPU; one of compute capability 8.0 or 9.0.
        early: whether the kernel starts before the one before it ends.
    """
    splits = min(config.n_splits, 2)
    compiled = compile_division(format, replace(config, n_splits=splits), device.capability)
    rows = config.n_tiles * config.block_rows
    turn = config.block_steps * config.n_parts
    n_turns = ceil_div(ceil_div(format.n_steps(n_columns), turn), config.n_splits)
    blocks = ceil_div(n_rows, rows) * ceil_div(n_tokens, config.block_tokens)
    programs = blocks * config.n_splits
    resident = resident_of(compiled, config.n_warps, device)
    if resident == 0:
        return Simulated(math.inf, programs, 0, compiled.registers, 0.0)
    busiest = ceil_div(programs, device.n_processors)
    steps = _steps_of(compiled, format, config, n_columns, n_tokens, n_turns, rows, early)
    memory = _share(programs, busiest, device)
    n_run = min(busiest, max(_MOST, 2 * resident))
    cycles, issued = issue.run(steps, config.n_warps, n_run, resident, memory)
    if n_run < busiest:
        half = n_run // 2
        fewer, _ = issue.run(steps, config.n_warps, half, resident, memory)
        cycles += (cycles - fewer) / (n_run - half) * (busiest - n_run)
    seconds = cycles / device.clock + (EARLY_GAP if early else GAP)
    if config.n_splits > 1:
        seconds += 8 * config.n_splits * n_tokens * n_rows / device.l2_bandwidth
        seconds += EARLY_GAP if early else GAP
    rate = issued / cycles / issue.N_SCHEDULERS
    return Simulated(seconds, programs, resident, compiled.registers, rate)


def _share(programs: int, busiest: int, device: DeviceModel) -> issue.Memory:
    """The busiest multiprocessor's share of the memory: that of its programs, up to what one
    multiprocessor can draw."""
    share = busiest / programs
    one = min(device.bandwidth * share, processor_bandwidth(device)) / device.clock
    from_l2 = min(device.l2_bandwidth * share / device.clock, 64.0)
    return issue.Memory(one, from_l2)


def _steps_of(
    compiled: Compiled,
    format: WeightFormat,
    config: MatmulConfig,
    n_columns: int,
    n_tokens: int,
    n_turns: int,
    rows: int,
    early: bool,
) -> list[issue.Step]:
    code = compiled.code
    main = issue.main_loop(code)
    body = code.instructions[slice(*main)]
    n_copies = sum(x.operation == "LDGSTS" for x in body) * config.n_warps
    turn = config.block_steps * config.n_parts
    weights = rows * turn * format.n_slices * format.bits / 8
    # Tokens that do not exist are not fetched, but their places are filled with zeros.
    real = min(n_tokens, config.block_tokens) / config.block_tokens
    tokens = 2 * format.n_slices * config.block_tokens * turn * real
    # Where the first block of exceptions begins is chance.
    depth = 32 if config.shares else 16
    blocks = EXCEPTION_RATES[format.name] * n_columns * rows / depth + 1 - 1 / depth
    turns = math.ceil(blocks / (config.n_parts * config.n_splits))
    trips = dict.fromkeys(code.loops, turns)
    trips[main] = n_turns
    return issue.make_steps(
        code,
        trips,
        copy_passes=4 * conflicts_of_copies(format, config),
        # Token blocks share weights in L2.
        copy_nbytes=weights / n_copies / ceil_div(n_tokens, config.block_tokens),
        copy_l2_nbytes=(weights + tokens) / n_copies,
        early=early,
    )


def simulate_chosen(
    shape: Shape, n_tokens: int, format: WeightFormat = W12, device: DeviceModel = H200
) -> Row | None:
    """What is chosen untuned for a matrix, predicted and simulated; None if it is decoded first."""
    size = shape.n_rows, shape.n_columns
    bucket = bucket_of(n_tokens)
    config = tune(*size, format, device, buckets=[bucket])[bucket].choice.config
    return _row(shape, n_tokens, format, config, device) if config else None


def _row(
    shape: Shape, n_tokens: int, format: WeightFormat, config: MatmulConfig, device: DeviceModel
) -> Row:
    product = shape.n_rows, shape.n_columns, n_tokens
    late = early = simulate(*product, format, config, device)
    if device.capability >= _EARLY_CAPABILITY:
        early = simulate(*product, format, config, device, early=True)
    return Row(
        matrix=shape.name,
        n_rows=shape.n_rows,
        n_columns=shape.n_columns,
        n_tokens=n_tokens,
        format=format.name,
        division=list(astuple(config)),
        plain=predict_plain(*product, device),
        predicted=predict_fused(*product, format, config, device),
        simulated=late.seconds,
        early=early.seconds,
        programs=late.programs,
        resident=late.resident,
        registers=late.registers,
        issue=late.issue,
    )


def compare(shapes: Iterable[Shape], n_tokens: int, stride: int = 1) -> Iterator[Row]:
    """Predicted and simulated times of many divisions that the model knows, good and bad."""
    for config in DIVISIONS[::stride]:
        division = replace(config, block_tokens=max(n_tokens, 8))
        if shared_nbytes_of(division, W12) > sass.SHARED_NBYTES[90]:
            continue
        for shape in shapes:
            row = _row(shape, n_tokens, W12, division, H200)
            if row.predicted < math.inf:
                yield row


def compare_unfitted() -> list[Row]:
    """The same for products to which the model was not fitted: every other division, and what is
    chosen untuned."""
    found = (simulate_chosen(shape, n) for n in UNFITTED_BATCHES for shape in UNFITTED_SHAPES)
    rows = [row for row in found if row is not None]
    chosen = {(row.matrix, row.n_tokens, *row.division) for row in rows}
    others = (row for n in UNFITTED_BATCHES for row in compare(UNFITTED_SHAPES, n, stride=2))
    return rows + [r for r in others if (r.matrix, r.n_tokens, *r.division) not in chosen]


def compare_shared(shapes: Iterable[Shape]) -> Iterator[Row]:
    """The same of divisions whose warps share the columns, on an A100."""
    for config in SHARED_DIVISIONS:
        for shape in shapes:
            yield _row(shape, config.block_tokens, W12, config, A100)


def main(argv: list[str]) -> int:
    """Simulate, print, and keep the figures.

    Args:
        argv: the arguments after `simulate`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep the figures")
    parser.add_argument("--tokens", type=int, nargs="*", help="numbers of tokens")
    parser.add_argument("--a100", action="store_true", help="an A100 instead of an H200")
    parser.add_argument(
        "--stream", action="store_true", help="only the kernels with warps that fetch"
    )
    parser.add_argument("--w11", action="store_true", help="only W11, instead of everything")
    args = parser.parse_args(argv)
    if args.stream:
        return simulate_streams(args.write)
    print(
        "| matrix | tokens | division | BF16 us | predicted us | simulated us | started early us |"
    )
    print("|---|--:|---|--:|--:|--:|--:|", flush=True)
    rows = []
    for shape in SHAPES:
        for n_tokens in args.tokens or (SHARED_BATCHES if args.a100 else BATCHES):
            format = W11 if args.w11 else W12
            row = simulate_chosen(shape, n_tokens, format, A100 if args.a100 else H200)
            if row is not None:
                rows.append(row)
                print(row, flush=True)
    if args.w11:
        return 0
    # The head is like gate and up, and takes long.
    compared = list(compare_shared(SHAPES[:-1]) if args.a100 else compare(SHAPES, 8))
    agreement = Agreement.of(compared)
    print(f"\n{agreement}", flush=True)
    unfitted = [] if args.a100 else compare_unfitted()
    of_unfitted = Agreement.of(unfitted) if unfitted else None
    if of_unfitted:
        print(f"\nNot fitted: {of_unfitted}", flush=True)
    if args.write:
        path = A100_PATH if args.a100 else PATH
        write(Kept(triton.__version__, rows, compared, agreement, unfitted, of_unfitted), path)
    return 0
