"""A model of time: what a product with a weight takes on a GPU, from bytes, instructions, tensor
throughput and launches.

The model is used where nothing was measured: it orders the autotuner's candidates, and chooses
kernels for users who have not tuned. Its results are predictions. Each figure has its source beside
it; figures called "assumed" follow from arithmetic alone, and await measurements.
`packhorse.gpu.models` says what each GPU can do.

The time of a fused product is a launch, the start and end of its programs, and the slowest of four
things that go on at once: reading weights from device memory, moving weights and tokens from L2 to
the multiprocessors, issuing instructions, and multiplying. Two more times are added: fetching the
tokens of exceptions, and arranging the tokens for the kernel for many tokens. A plain product is
modelled in the same way, as the best division of a kernel that decodes nothing.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeAlias, cast

from packhorse.device.counts import INSTRUCTIONS, MANY_INSTRUCTIONS
from packhorse.gpu.models import DeviceModel
from packhorse.layout import WeightFormat

if TYPE_CHECKING:
    from packhorse.kernels.matmul import MatmulConfig
    from packhorse.kernels.matmul_many import ManyConfig

    Config: TypeAlias = MatmulConfig | ManyConfig

__all__ = [
    "EXCEPTION_RATES",
    "is_many",
    "packed_nbytes",
    "predict_decode",
    "predict_decoding",
    "predict_fused",
    "predict_plain",
    "resident_programs",
    "shared_nbytes",
]

_WARP = 32
_ISSUE_LANES = 128  # instructions of threads that a multiprocessor issues a cycle: 4 warps
# Measured on synthetic rows with log-normal scales, windows by row: docs/decisions.md.
EXCEPTION_RATES = {"W12": 0.0003, "W11": 0.013}
_BF16_NBYTES = 2
# Shares of the rate at which cuBLAS multiplies: mma.sync reaches 63 % of the rate of Hopper's own
# instructions (Luo et al., "Dissecting the NVIDIA Hopper architecture", 2024). Ampere has no faster
# instruction.
_HOPPER_MMA_SHARE = 0.63
# Hopper's own instruction with a weight from registers: the kernel waits for each product before it
# decodes the next elements, and only another program of the multiprocessor decodes meanwhile.
# Assumed.
_WGMMA_SHARE = 0.6
_MIN_WGMMA_TOKENS = 32  # with fewer it takes as long; assumed
_PORT_NBYTES = 64  # from L2 to a multiprocessor, a cycle; assumed for all GPUs
_PLAIN_ROWS = (64, 128, 256)  # of cuBLAS's tiles, and their tokens
_PLAIN_TOKENS = (16, 32, 64, 128, 256)
_PLAIN_SPLITS = (1, 2, 4, 8)
_CLUSTER = 2  # tiles of cuBLAS that read tokens together, on Hopper; assumed
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 255  # of a thread
_OTHER_REGISTERS = 80  # of a thread of these kernels, beside its sums, within a third
_ISSUE_SHARE = 0.7  # of the issue slots that a loop with loads fills; assumed
_GATHERS_PER_CYCLE = 4  # elements from different lines that L1 gives a multiprocessor; assumed
_DECODE_SHARE = 0.9  # of the bandwidth, as reads and writes mix; assumed


def packed_nbytes(n_rows: int, n_columns: int, format: WeightFormat) -> float:
    """Bytes of a packed weight with the usual number of exceptions."""
    exceptions = EXCEPTION_RATES[format.name] * n_columns * 4
    return n_rows * (format.n_padded(n_columns) * format.bits / 8 + exceptions + 5)


@dataclass(frozen=True)
class _Division:
    """What the model needs to know about a config of either kernel.

    Attributes:
        rows: rows of a program.
        tokens: tokens of a program, or of one instruction if an instruction takes more.
        turn: columns of a slice that a program takes at once.
        accumulators: registers for sums, in each thread.
        weight_tiles: tiles of a turn's weights that shared memory holds, at most.
        token_tiles: the same of its tokens.
        per_weight: instructions for each weight; None if they were not counted.
        mma_share: the share of the tensor cores' rate that is reached.
    """

    rows: int
    tokens: int
    turn: int
    accumulators: int
    weight_tiles: int
    token_tiles: int
    per_weight: float | None
    mma_share: float


def _divide(config: "Config", format: WeightFormat, device: DeviceModel) -> _Division:
    rows, tokens, steps = config.block_rows, config.block_tokens, config.block_steps
    is_hopper = device.capability // 10 == 9
    mma_share = _HOPPER_MMA_SHARE if device.capability >= 90 else 1.0
    fetched = max(config.n_stages - 1, 1)
    if is_many(config):
        per_weight = MANY_INSTRUCTIONS.get((rows, tokens, steps, config.n_warps))
        registers = rows * tokens // (_WARP * config.n_warps)
        if not is_hopper:
            tiles = fetched + 1, fetched + 1
            return _Division(rows, tokens, steps, registers, *tiles, per_weight, mma_share)
        # The product that is still running needs its tokens.
        tiles = fetched if rows <= 128 else fetched + 1, fetched + 1
        work = max(tokens, _MIN_WGMMA_TOKENS)
        return _Division(rows, work, steps, registers, *tiles, per_weight, _WGMMA_SHARE)
    n_tiles = cast("MatmulConfig", config).n_tiles
    per_weight = INSTRUCTIONS.get((format.name, rows, tokens, steps, n_tiles))
    rows *= n_tiles
    turn, registers = steps * config.n_warps, rows * tokens // _WARP
    return _Division(rows, tokens, turn, registers, fetched, fetched, per_weight, mma_share)


def is_many(config: "Config") -> bool:
    """Whether a division is one of the kernel for many tokens."""
    return type(config).__name__ == "ManyConfig"  # its module needs Triton; this one does not


def shared_nbytes(config: "Config", format: WeightFormat, device: DeviceModel) -> int:
    """Bytes of shared memory that a program needs for the tiles in flight. Compiled kernels need
    exactly as much."""
    division = _divide(config, format, device)
    weights = division.rows * format.n_slices * format.bits // 8 * division.weight_tiles
    tokens = _BF16_NBYTES * format.n_slices * config.block_tokens * division.token_tiles
    return division.turn * (weights + tokens)


def resident_programs(config: "Config", format: WeightFormat, device: DeviceModel) -> int:
    """Programs that a multiprocessor runs at once; 0 if one is too large."""
    registers = min(_divide(config, format, device).accumulators + _OTHER_REGISTERS, _MAX_REGISTERS)
    by_registers = _REGISTERS // (registers * _WARP * config.n_warps)
    nbytes = shared_nbytes(config, format, device) + 1024  # which the system keeps for each program
    return min(by_registers, device.shared_nbytes // nbytes, 16)


def predict_fused(
    n_rows: int,
    n_columns: int,
    n_tokens: int,
    format: WeightFormat,
    config: "Config",
    device: DeviceModel,
) -> float:
    """Seconds of a product that decodes weights in registers.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        config: how the product is divided, for either kernel.
        device: the GPU.

    Returns:
        The seconds; infinity if the model does not know the division.
    """
    division = _divide(config, format, device)
    resident = resident_programs(config, format, device)
    if division.per_weight is None or resident == 0:
        return math.inf
    row_blocks = _ceil(n_rows, division.rows)
    token_blocks = _ceil(n_tokens, config.block_tokens)
    programs = row_blocks * token_blocks * config.n_splits
    n_turns = _ceil(_ceil(format.n_steps(n_columns), division.turn), config.n_splits)
    columns = n_turns * config.n_splits * division.turn * format.n_slices
    weights = row_blocks * division.rows * columns * token_blocks
    nbytes = packed_nbytes(n_rows, n_columns, format)
    tokens_nbytes = n_tokens * n_columns * _BF16_NBYTES
    tile_nbytes = division.rows * division.turn * format.n_slices * format.bits // 8
    at_once = min(programs, resident * device.n_processors)
    in_flight = at_once * tile_nbytes * max(config.n_stages - 1, 1)
    balance = _balance(programs, device)
    lanes = device.n_processors * _ISSUE_LANES * device.clock * _ISSUE_SHARE
    pace = max(
        (nbytes + tokens_nbytes) / _bandwidth(in_flight, device),
        _from_l2(nbytes * token_blocks + tokens_nbytes * row_blocks, balance, device),
        weights * division.per_weight / (lanes * balance),
        2 * weights * division.tokens / (device.bf16_rate * division.mma_share * balance),
    )
    if is_many(config):
        extra = 2 * tokens_nbytes / device.l2_bandwidth + device.launch
    else:
        extra = _exceptions(n_rows, n_columns, n_tokens, format, device)
    waves = _ceil(programs, resident * device.n_processors)
    return (
        pace
        + extra
        + 2 * waves * device.latency
        + _splits(n_rows, n_tokens, config.n_splits, device)
        + device.launch
    )


def _balance(programs: int, device: DeviceModel) -> float:
    """The share of the multiprocessors that is busy, as the busiest one sets the pace."""
    return programs / (device.n_processors * _ceil(programs, device.n_processors))


def _from_l2(nbytes: float, balance: float, device: DeviceModel) -> float:
    """Seconds to read from L2, limited by its bandwidth, which all multiprocessors share, or by the
    busiest port."""
    ports = device.n_processors * _PORT_NBYTES * device.clock
    return nbytes / min(device.l2_bandwidth, ports * balance)


def _bandwidth(in_flight: float, device: DeviceModel) -> float:
    """The bandwidth that is reached. By Little's law, it is the bytes in flight divided by the time
    that they take. Near the limit of the memory, requests wait for each other."""
    return device.bandwidth * -math.expm1(-2 * in_flight / (device.latency * device.bandwidth))


def _splits(n_rows: int, n_tokens: int, n_splits: int, device: DeviceModel) -> float:
    """Seconds of the second kernel, which adds the sums of programs with the same rows."""
    if n_splits == 1:
        return 0.0
    return 8 * n_splits * n_tokens * n_rows / device.l2_bandwidth + device.launch


def _exceptions(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, device: DeviceModel
) -> float:
    gathers = EXCEPTION_RATES[format.name] * n_rows * n_columns * n_tokens
    return gathers / (device.n_processors * _GATHERS_PER_CYCLE * device.clock)


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
