"""A model of time: what a product with a weight takes on a GPU, from bytes, instructions, tensor
throughput and launches.

The model is used where nothing was measured: it orders the autotuner's candidates, and chooses
kernels for users who have not tuned. Its results are predictions. Each figure has its source beside
it; figures called "assumed" follow from arithmetic alone, and await measurements.
`packhorse.gpu.models` says what each GPU can do.

The time of a fused product is that of the busiest multiprocessor: the start of its
programs, the slowest of six things, and the end of a program. Five things go on at once in all of
its programs: reading weights from device memory, reading weights and tokens from L2, issuing
instructions, moving data through shared memory, and multiplying. The sixth is what each program
does one after the other. `benchmarks/gpu/simulations.py` simulates the same programs instruction by
instruction; docs/decisions.md, section 29, tells how far the two agree.

A plain product is modelled by throughput alone, as the best division of a kernel that decodes
nothing. `stream_cost.py` has the model of the kernels in CUDA C++.
"""

import math
from itertools import product
from typing import TYPE_CHECKING

from packhorse.device.counts import INSTRUCTIONS, Counted
from packhorse.gpu.models import DeviceModel
from packhorse.kernels.vendor import has_waiting_products
from packhorse.layout import WeightFormat

if TYPE_CHECKING:
    from packhorse.kernels.matmul import MatmulConfig

__all__ = [
    "EXCEPTION_RATES",
    "conflicts_of_copies",
    "packed_nbytes",
    "predict_decode",
    "predict_decoding",
    "predict_fused",
    "predict_plain",
    "processor_bandwidth",
    "resident_programs",
]

_WARP = 32
# Measured on synthetic rows with log-normal scales, windows by row: docs/decisions.md.
EXCEPTION_RATES = {"W12": 0.0003, "W11": 0.013}
_BF16_NBYTES = 2
# Shares of the rate at which cuBLAS multiplies: mma.sync reaches 63 % of the rate of Hopper's own
# instructions (Luo et al., "Dissecting the NVIDIA Hopper architecture", 2024). Ampere has no faster
# instruction.
_HOPPER_MMA_SHARE = 0.63
_PORT_NBYTES = 64  # from L2 to a multiprocessor, a cycle; assumed for all GPUs
_PLAIN_ROWS = (64, 128, 256)  # of cuBLAS's tiles, and their tokens
_PLAIN_TOKENS = (16, 32, 64, 128, 256)
_PLAIN_SPLITS = (1, 2, 4, 8)
_CLUSTER = 2  # tiles of cuBLAS that read tokens together, on Hopper; assumed
_COUNTED_WARPS = 4  # of the divisions whose machine code was counted
_REGISTERS = 65536  # of a multiprocessor
# Bytes a second of device memory that one multiprocessor can draw, however much it asks for: some
# 40 saturate an H100 of 2 TB/s (BulletServe, 2025, partitions of multiprocessors). So an H200 needs
# programs on 96 of 132. The same is assumed for all GPUs.
_PROCESSOR_BANDWIDTH = 45e9
# Instructions that a scheduler issues in a cycle, by its resident warps, as multiples of what it
# issues with one warp (`Counted.alone`): simulated from the control codes of loops
# (benchmarks/gpu/issue.py), where memory makes no warp wait: 0.35, 0.49, 0.66 and 0.9 for warps
# that reach 0.35 alone.
_ISSUE_RATES = (1.0, 1.4, 1.9, 2.6)
_MAX_ISSUE_RATE = 0.9
_SCHEDULERS = 4
_SHARED_LINE = 128  # bytes that shared memory takes or gives in a cycle (CUDA programming guide)
# Cycles. The first two are assumed; the latency of loads from L2 and memory under load is between
# 500 and 1400 (Luo et al., 2024, without load: 260 and 480).
_START = 300  # until the first instruction of a program is issued
_SUMS = 500  # adding the sums of a program's warps, in shared memory with barriers
_LOAD = 650  # a load to registers
_COPY = 900  # a copy to shared memory
_GAP = (
    1.8e-6  # seconds between dependent kernels of a graph, without the start of programs; assumed
)
_SHARPNESS = 4
_SHOWN_ENDS = 0.8  # of the ends of programs that others follow; fitted to the simulation, too
_DEPTH = 16  # exceptions that a warp takes at once
_SHARED_DEPTH = 32  # the same of warps that share the columns
_ROWS_AHEAD = 64  # of a program whose warps share the columns and fetch exceptions ahead
_SHOWN_GATHERS = 0.5  # of their gathers, that nothing hides; fitted to the simulation
_GATHERS_PER_CYCLE = 4  # elements from different lines that L1 gives a multiprocessor; assumed
_SECTOR = 32  # bytes that L2 sends for an element
_DECODE_SHARE = 0.9  # of the bandwidth, as reads and writes mix; assumed


def packed_nbytes(n_rows: int, n_columns: int, format: WeightFormat) -> float:
    """Bytes of a packed weight with the usual number of exceptions."""
    exceptions = EXCEPTION_RATES[format.name] * n_columns * 4
    return n_rows * (format.n_padded(n_columns) * format.bits / 8 + exceptions + 5)


def _counted(config: "MatmulConfig", format: WeightFormat) -> Counted | None:
    """What was counted of a division."""
    rows, tokens, steps = config.block_rows, config.block_tokens, config.block_steps
    if config.shares and (config.n_warps != _COUNTED_WARPS or config.n_stages < 3):
        return None  # warps have other rows; or fetching stands still while they multiply
    return INSTRUCTIONS.get((format.name, rows, tokens, steps, config.n_tiles))


def _shared_nbytes(config: "MatmulConfig", format: WeightFormat) -> int:
    """Bytes of shared memory that a program needs for the tiles in flight. Compiled kernels need
    exactly as much."""
    weights = config.n_tiles * config.block_rows * format.n_slices * format.bits // 8
    tokens = _BF16_NBYTES * format.n_slices * config.block_tokens
    turn = config.block_steps * config.n_parts
    return turn * (weights + tokens) * max(config.n_stages - 1, 1)


def resident_programs(config: "MatmulConfig", format: WeightFormat, device: DeviceModel) -> int:
    """Programs that a multiprocessor runs at once; 0 if one is too large, or if its machine code
    was not counted, or if the GPU refuses it."""
    counted = _counted(config, format)
    if counted is None or (config.shares and not has_waiting_products(device.capability)):
        return 0
    registers = _ceil(counted.registers, 8) * 8  # they are given out by eight
    by_registers = _REGISTERS // (registers * _WARP * config.n_warps)
    nbytes = _shared_nbytes(config, format) + 1024  # which the system keeps for each program
    return min(by_registers, device.shared_nbytes // nbytes, 64 // config.n_warps, 32)


def predict_fused(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    config: "MatmulConfig",
    device: DeviceModel,
) -> float:
    """Seconds of a product that decodes weights in registers. All times inside are cycles of the
    busiest multiprocessor.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        config: how the product is divided.
        device: the GPU.

    Returns:
        The seconds; infinity if the model does not know the division.
    """
    counted = _counted(config, format)
    resident = resident_programs(config, format, device)
    if counted is None or resident == 0:
        return math.inf
    rows, n_warps = config.n_tiles * config.block_rows, config.n_warps
    turn = config.block_steps * config.n_parts
    n_turns = _ceil(_ceil(format.n_steps(n_columns), turn), config.n_splits)
    token_blocks = _ceil(n_tokens, config.block_tokens)
    programs = _ceil(n_rows, rows) * token_blocks * config.n_splits
    busiest = _ceil(programs, device.n_processors)
    share = busiest / programs
    resident = min(resident, busiest)

    weights = rows * turn * format.n_slices * n_turns  # of a program
    nbytes = weights * format.bits / 8
    tokens_nbytes = _BF16_NBYTES * turn * format.n_slices * n_turns * config.block_tokens
    fetched = tokens_nbytes * min(1.0, n_tokens / config.block_tokens)
    exceptions = EXCEPTION_RATES[format.name] * rows * n_columns / config.n_splits
    depth = _SHARED_DEPTH if config.shares else _DEPTH
    blocks = exceptions / depth + 1 / config.n_splits  # where the first one begins is chance
    exception_turns = math.ceil(blocks / config.n_parts)
    gathers = exceptions * config.block_tokens
    instructions = counted.per_weight * weights / _WARP  # of all warps of a program
    drawn = min(device.bandwidth * share, processor_bandwidth(device))
    # The copies of a turn are asked for when the turn before them has ended: of n_stages, one is
    # computed, and one is being emptied or filled. By Little's law, few bytes in flight draw less.
    in_flight = resident * nbytes / n_turns * (config.n_stages - 1.5)
    drawn *= -math.expm1(-in_flight * device.clock / (_COPY * drawn))
    of_memory = drawn * token_blocks / device.clock  # token blocks share weights in L2
    of_l2 = min(device.l2_bandwidth * share / device.clock, _PORT_NBYTES)
    of_tensors = device.bf16_rate * _mma_share(device) / device.n_processors / device.clock
    lines, conflicts = (nbytes + tokens_nbytes) / _SHARED_LINE, conflicts_of_copies(format, config)
    # All warps that share columns read the same tokens.
    read = lines + tokens_nbytes * (n_warps / config.n_parts - 1) / _SHARED_LINE
    work = _together(
        max(nbytes / of_memory, (nbytes + fetched + gathers * _SECTOR) / of_l2),
        (instructions + n_warps * counted.outside)
        / (_SCHEDULERS * _issue_rate(counted.alone, resident * n_warps / _SCHEDULERS)),
        lines * conflicts + read + gathers / _GATHERS_PER_CYCLE,
        2 * weights * config.block_tokens / of_tensors,
    )

    # What a program does one after the other. Its warps wait for each other in each turn, so they
    # copy at the same time, and compute at the same time.
    warps = max(n_warps / _SCHEDULERS, 1.0)
    one_turn = instructions / n_warps / n_turns * warps / _issue_rate(counted.alone, warps)
    last_turn = one_turn
    one_turn += lines / n_turns * conflicts * min(n_warps / _SCHEDULERS, 1.0)
    if config.n_stages > 2:
        one_turn = max(one_turn, _COPY / (config.n_stages - 2))
    else:
        one_turn += _COPY
    outside = counted.outside / 2 * warps / _issue_rate(counted.alone, warps)
    start = _START + outside + _COPY
    end = last_turn + outside
    if config.shares:  # all resident programs gather at the same time
        trips = 1 if rows <= _ROWS_AHEAD else 2
        gathering = depth * config.block_tokens / _GATHERS_PER_CYCLE * resident
        end += exception_turns * (trips * _LOAD + _SHOWN_GATHERS * gathering)
    else:
        end += exception_turns * _LOAD + _SUMS
    # Programs that began together end almost together, so little hides their ends.
    waves = _ceil(busiest, resident)
    shown = 1 + _SHOWN_ENDS * (waves - 1)
    cycles = max(busiest * work, waves * n_turns * one_turn) + shown * (start + end)
    return cycles / device.clock + _GAP + _splits(n_rows, n_tokens, config.n_splits, device)


def _together(*times: float) -> float:
    """The time of things that go on at once: a little more than the slowest, because each waits for
    the others now and then. The exponent is fitted to the simulation."""
    return float(sum(t**_SHARPNESS for t in times) ** (1 / _SHARPNESS))


def conflicts_of_copies(format: WeightFormat, config: "MatmulConfig") -> float:
    """How many times as long copies to shared memory take as without bank conflicts.

    Eight threads write 128 bytes at once. If a warp's part of a row is shorter, they write to the
    parts of several warps, which begin in the same bank. An emulator of the kernels counted what
    this gives: 3.5 for 32 steps and four warps, 2.0 for two, 1.75 for 64 steps, 1.0 for 128.
    Warps that share the columns have one part, without conflicts.
    """
    weights = config.n_tiles * config.block_rows * format.n_slices * format.bits / 8
    tokens = _BF16_NBYTES * format.n_slices * config.block_tokens
    line = _SHARED_LINE / config.block_steps
    ways = weights * min(max(line, 1), config.n_parts)
    ways += tokens * min(max(line / _BF16_NBYTES, 1), config.n_parts)
    return ways / (weights + tokens)


def processor_bandwidth(device: DeviceModel) -> float:
    """Bytes a second of device memory that one multiprocessor can draw."""
    return max(_PROCESSOR_BANDWIDTH, device.bandwidth / device.n_processors)


def _issue_rate(alone: float, warps: float) -> float:
    """Instructions that a scheduler issues in a cycle, by the number of its resident warps."""
    below = min(max(int(warps), 1), len(_ISSUE_RATES))
    above = min(below + 1, len(_ISSUE_RATES))
    first, second = _ISSUE_RATES[below - 1], _ISSUE_RATES[above - 1]
    rate = alone * (first + (second - first) * max(warps - below, 0))
    return min(rate, _MAX_ISSUE_RATE) * min(warps, 1.0)


def _mma_share(device: DeviceModel) -> float:
    return _HOPPER_MMA_SHARE if device.capability >= 90 else 1.0


def _balance(programs: int, device: DeviceModel) -> float:
    """The share of the multiprocessors that is busy, as the busiest one sets the pace."""
    return programs / (device.n_processors * _ceil(programs, device.n_processors))


def _from_l2(nbytes: float, balance: float, device: DeviceModel) -> float:
    """Seconds to read from L2, limited by its bandwidth, which all multiprocessors share, or by the
    busiest port."""
    ports = device.n_processors * _PORT_NBYTES * device.clock
    return nbytes / min(device.l2_bandwidth, ports * balance)


def _splits(n_rows: int, n_tokens: int, n_splits: int, device: DeviceModel) -> float:
    """Seconds of the second kernel, which adds the sums of programs with the same rows."""
    if n_splits == 1:
        return 0.0
    return 8 * n_splits * n_tokens * n_rows / device.l2_bandwidth + device.launch


def predict_decoding(
    n_rows: int, n_columns: int, format: WeightFormat, device: DeviceModel
) -> float:
    """Seconds of decoding a packed weight to BF16 in device memory."""
    moved = packed_nbytes(n_rows, n_columns, format) + n_rows * n_columns * _BF16_NBYTES
    return moved / (device.bandwidth * _DECODE_SHARE) + device.launch


def predict_plain(n_rows: int, n_columns: int, n_tokens: int, device: DeviceModel) -> float:
    """Seconds of a product with a BF16 weight, by the best of cuBLAS's tiles.

    Splits cost the time to move their sums, but no launch. The model assumes enough bytes in flight
    to keep the memory busy.
    """
    elements = n_rows * n_columns + n_tokens * (n_rows + n_columns)
    memory = elements * _BF16_NBYTES / device.bandwidth
    ways = (
        _tiled(n_rows, n_columns, n_tokens, division, device)
        for division in product(_PLAIN_ROWS, _PLAIN_TOKENS, _PLAIN_SPLITS)
    )
    return max(memory, min(ways)) + 2 * device.latency + device.launch


def _tiled(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    division: tuple[int, int, int],
    device: DeviceModel,
) -> float:
    """Seconds of a plain product with given tiles and splits, without the time of the memory."""
    rows, tokens, n_splits = division
    row_blocks, token_blocks = _ceil(n_rows, rows), _ceil(n_tokens, tokens)
    balance = _balance(row_blocks * token_blocks * n_splits, device)
    readers = row_blocks / (_CLUSTER if device.capability // 10 == 9 else 1)
    elements = n_columns * (n_rows * token_blocks + n_tokens * readers)
    work = 2 * row_blocks * rows * token_blocks * tokens * n_columns
    partial = 0.0 if n_splits == 1 else 8 * n_splits * n_tokens * n_rows / device.l2_bandwidth
    return partial + max(
        _from_l2(elements * _BF16_NBYTES, balance, device), work / (device.bf16_rate * balance)
    )


def predict_decode(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: DeviceModel
) -> float:
    """Seconds of decoding a weight to memory and multiplying with it."""
    decoding = predict_decoding(n_rows, n_columns, format, device)
    return decoding + predict_plain(n_rows, n_columns, n_tokens, device)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
