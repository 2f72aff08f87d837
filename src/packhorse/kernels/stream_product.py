"""Products of 1 to 256 tokens with a packed weight on Hopper, by kernels in CUDA C++
(`stream_*.cu`): y = x W^T + bias.

One warp of a program does nothing but fetch weights, so the memory is busy while other warps decode
and multiply, and even while the kernel before ends. Triton cannot express that. Up to 32 tokens
are read as they are. More are written by a first small kernel in the order in which the tensor
cores read them; it also writes tokens by columns for the exceptions of W11.

This module needs neither Triton nor a GPU: it knows how a product is divided, what the compiler is
told, and what a launch gives the kernels. `packhorse.gpu.stream_kernels` runs them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from packhorse.layout import W12, WeightFormat

__all__ = [
    "ADDING_THREADS",
    "ARRANGED_THREADS",
    "FEW_TOKENS",
    "MAX_STREAM_TOKENS",
    "StreamConfig",
    "StreamPlan",
    "check_stream",
    "default_stream_config",
    "fill_stages",
    "keeps_tokens",
    "plan_stream",
    "stream_options",
    "stream_shared_nbytes",
]

MAX_STREAM_TOKENS = 256
FEW_TOKENS = 32  # up to here, the kernel uses mma.sync
_GROUP = 64  # steps of a group, the unit of arranged tokens
_CHUNK = 16  # columns of one product of the tensor cores
_CONSUMERS = 8  # warps that multiply up to 32 tokens
_PARTS = 8  # of a row's columns that are summed up apart, up to 32 tokens
_FEW_BOXES = 4  # of a turn up to 32 tokens
_FETCHERS = 4  # warps of the last group, of which two or all have work
ARRANGED_THREADS = ADDING_THREADS = 128
_EXCEPTION_STAGES = 3  # of each of two rings, of 8 exceptions, above 32 tokens
_RESULT_NBYTES = 16 * 32 * 2  # of a warp, on their way to device memory, above 32 tokens
# Sums of a program for which no registers spill: all threads have as many.
_MAX_SUMS = {64: 64 * 256, 128: 128 * 128}
_MAX_FEW_SUMS = 64 * 32
_MAX_FEW_STAGES = 16  # of weights
# Of a program on Hopper. The system keeps 1 KiB of 228 KiB for each program.
_SHARED_NBYTES = 227 << 10


@dataclass(frozen=True)
class StreamConfig:
    """How a product is divided.

    Attributes:
        block_rows: rows of the weight for a program: a multiple of 16 for up to 32 tokens; 64 or,
            up to 128 tokens, 128 for more.
        block_tokens: tokens for a program: 8, 16, 32, 64, 128 or 256.
        n_weight_stages: stages of the ring of weights; a multiple of 4 up to 32 tokens.
        n_token_stages: stages of the ring of tokens; at least 2, and a multiple of 4 / `cluster` up
            to 32 tokens.
        cluster: programs with neighbouring rows that share the tokens: 1, 2 or 4; 2 or 4 up to 32
            tokens.
        n_splits: units that share a block; a power of two, and at most a sixteenth of the rows,
            for more than 32 tokens.
    """

    block_rows: int
    block_tokens: int
    n_weight_stages: int
    n_token_stages: int
    cluster: int = 1
    n_splits: int = 1


class StreamPlan(NamedTuple):
    """What a launch of the two kernels needs, beside pointers.

    Attributes:
        n_threads: threads of a program of the product.
        n_units: units of work of the product, each for a cluster.
        shared_nbytes: shared memory of a program.
        n_steps: columns of a slice.
        n_turns: turns of the main loop in a row.
        n_boxes: boxes of a row.
        n_token_blocks: blocks of tokens.
        n_row_blocks: blocks of rows, each for a cluster.
        n_arranging: programs of the first kernel that arrange tokens: none up to 32.
        n_transposing: programs of the first kernel that write tokens by columns: none up to 32 in
            W12, and then there is no first kernel.
        arranged_nbytes: size of the arranged tokens.
        by_column_nbytes: size of the tokens by columns.
        n_adding: programs of a third kernel that adds the sums of parts; 0 if there is none.
        extra_nbytes: memory of each program of the product for sums of exceptions.
        parts_nbytes: size of the sums of all parts, for the third kernel.
        low_box: steps, rows and parts of a box of low bytes.
        high_box: the same for high bits.
        swizzle: whether boxes are swizzled by 128 bytes.
    """

    n_threads: int
    n_units: int
    shared_nbytes: int
    n_steps: int
    n_turns: int
    n_boxes: int
    n_token_blocks: int
    n_row_blocks: int
    n_arranging: int
    n_transposing: int
    arranged_nbytes: int
    by_column_nbytes: int
    n_adding: int
    extra_nbytes: int
    parts_nbytes: int
    low_box: tuple[int, int, int]
    high_box: tuple[int, int, int]
    swizzle: bool


def _is_few(config: StreamConfig) -> bool:
    return config.block_tokens <= FEW_TOKENS


def _box_steps(config: StreamConfig, format: WeightFormat) -> int:
    """Steps of a box, which is a stage of weights."""
    return 128 if _is_few(config) and format is W12 else _GROUP


def _turn_boxes(config: StreamConfig) -> int:
    """Boxes of a row in a turn."""
    return _FEW_BOXES if _is_few(config) else 1


def _stage_nbytes(config: StreamConfig, format: WeightFormat) -> tuple[int, int]:
    """Bytes of a stage of weights, and of one of tokens."""
    steps = _box_steps(config, format)
    weights = config.block_rows * steps * format.n_slices * format.bits // 8
    if _is_few(config):
        return weights, format.n_slices * config.block_tokens * (2 * steps + 16)
    return weights, 4 * _CHUNK * config.block_tokens * 2


def stream_shared_nbytes(config: StreamConfig, format: WeightFormat) -> int:
    """Shared memory of a program."""
    weights, tokens = _stage_nbytes(config, format)
    few = _is_few(config)
    sums = 4 * _PARTS * config.block_rows * (config.block_tokens + 4) if few else 0
    exceptions = 0 if few else 2 * _EXCEPTION_STAGES * 8 * (config.block_tokens * 2 + 4)
    results = 0 if few else config.block_rows // 16 * _RESULT_NBYTES
    barriers = 8 * (2 * config.n_weight_stages + 2 * config.n_token_stages + 2)
    rings = config.n_weight_stages * weights + config.n_token_stages * tokens
    return 1024 + rings + sums + exceptions + results + barriers


def plan_stream(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, config: StreamConfig
) -> StreamPlan:
    """What a launch needs.

    Args:
        n_rows: rows of the weight, at least 1.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with, at least 1.
        format: its format.
        config: how the product is divided.

    Raises:
        ValueError: the kernels cannot have the division.
    """
    few = _is_few(config)
    check_stream(config)
    n_steps = format.n_steps(n_columns)
    box = _box_steps(config, format)
    n_boxes = -(-n_steps // box)
    n_token_blocks = -(-n_tokens // config.block_tokens)
    n_row_blocks = -(-n_rows // (config.block_rows * config.cluster))
    consumers = _CONSUMERS if few else config.block_rows // 16
    arranged = 0 if few else n_token_blocks * config.block_tokens * n_boxes * format.n_slices
    transposed = n_token_blocks * config.block_tokens // 8 * n_columns
    if few and format is W12:
        transposed = 0
    # Above 32 tokens, parts are added by warps with 16 rows and 32 tokens each.
    is_split = config.n_splits > 1 and not few
    n_sums = n_token_blocks * n_row_blocks * config.cluster * config.block_rows
    n_sums *= config.block_tokens if is_split else 0
    of_program = ARRANGED_THREADS if few else 32  # tokens, each with 64 columns
    n_high = format.n_slices * (format.bits - 8) // 8
    return StreamPlan(
        n_threads=32 * (consumers + _FETCHERS),
        n_units=n_token_blocks * n_row_blocks * config.n_splits,
        shared_nbytes=stream_shared_nbytes(config, format),
        n_steps=n_steps,
        n_turns=-(-n_boxes // _turn_boxes(config)),
        n_boxes=n_boxes,
        n_token_blocks=n_token_blocks,
        n_row_blocks=n_row_blocks,
        n_arranging=-(-arranged // of_program),
        n_transposing=-(-transposed // ARRANGED_THREADS) if few else 0,
        arranged_nbytes=arranged * _GROUP * 2,
        by_column_nbytes=transposed * 16,
        n_adding=-(-n_sums // (16 * ADDING_THREADS)),
        extra_nbytes=0 if few else config.block_rows * config.block_tokens * 4,
        parts_nbytes=config.n_splits * n_sums * 4,
        low_box=(box, config.block_rows, format.n_slices),
        high_box=(box, config.block_rows, n_high),
        swizzle=box == 128,
    )


def check_stream(config: StreamConfig) -> None:
    """Checks what the fields of a division must be together.

    Raises:
        ValueError: the kernels cannot have it.
    """
    if _is_few(config):
        _check_few(config)
        return
    rows, tokens, parts = config.block_rows, config.block_tokens, config.n_splits
    if rows * tokens > _MAX_SUMS.get(rows, 0):
        raise ValueError(
            f"{rows} rows and {tokens} tokens: above {FEW_TOKENS} tokens a program has 64 rows, or "
            "128 rows with up to 128 tokens"
        )
    if parts & (parts - 1) or parts > rows // 16:
        raise ValueError(
            f"{parts} splits of {rows} rows: above {FEW_TOKENS} tokens it must be a power of two, "
            f"up to {rows // 16}"
        )


def _check_few(config: StreamConfig) -> None:
    """A stage stays with the same warps, and sums are sent within a cluster."""
    if config.cluster not in (2, 4):
        raise ValueError(
            f"the cluster is {config.cluster}: up to {FEW_TOKENS} tokens it must be 2 or 4"
        )
    own = _FEW_BOXES // config.cluster
    if config.n_weight_stages % _FEW_BOXES or config.n_token_stages % own:
        raise ValueError(
            f"{config.n_weight_stages} stages of weights and {config.n_token_stages} of tokens: up "
            f"to {FEW_TOKENS} tokens they must be multiples of {_FEW_BOXES} and {own}"
        )


def default_stream_config(
    n_rows: int, n_columns: int, n_tokens: int, format: WeightFormat, n_processors: int = 132
) -> StreamConfig:
    """A sensible division for products that were not measured.

    Up to 32 tokens, neither the stages of weights nor the number of splits depend on the tokens, so
    that a token's result is the same in a batch of any size.

    Args:
        n_rows: rows of the weight.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        format: its format.
        n_processors: multiprocessors of the GPU.
    """
    block_tokens = 8
    while block_tokens < min(n_tokens, MAX_STREAM_TOKENS):
        block_tokens *= 2
    few = block_tokens <= FEW_TOKENS
    block_rows = (
        _few_rows(n_rows, format, n_processors) if few else _many_rows(format, block_tokens)
    )
    # Programs that share the tokens fetch fewer bytes, but wait for each other, and larger clusters
    # leave multiprocessors without work.
    cluster = 4 if few and format is not W12 else 2  # 32 tokens of W11 do not fit otherwise
    n_blocks = -(-n_rows // block_rows)  # which decides on splits: few tokens have the same
    if block_rows == 48 and block_tokens == FEW_TOKENS:
        block_rows = 32  # 48 leave room for four stages of weights: an H200 took twice as long
    if n_blocks < cluster and not few:
        cluster = 1
    config = StreamConfig(block_rows, block_tokens, 2, 2, cluster)
    n_turns = -(-format.n_steps(n_columns) // (_box_steps(config, format) * _turn_boxes(config)))
    least = 1 if few else 8  # turns of a unit
    n_splits = 1
    most = n_turns // least if few else min(n_turns // least, block_rows // 16)
    while n_blocks * n_splits * 4 <= n_processors * 3 and 2 * n_splits <= most:
        n_splits *= 2
    found = fill_stages(replace(config, n_splits=n_splits), format, n_columns)
    assert found is not None, "default divisions fit"
    return found


def _few_rows(n_rows: int, format: WeightFormat, n_processors: int) -> int:
    """32 rows, or 48 (W12) or 16 if programs then have more equal work."""

    def share(rows: int) -> float:
        blocks = -(-n_rows // rows)
        return n_rows / rows / (-(-blocks // n_processors) * n_processors)

    offered = (32, 48, 16) if format is W12 else (32, 16)
    return max(offered, key=lambda rows: share(rows) * (1.05 if rows == 32 else 1))


def _many_rows(format: WeightFormat, block_tokens: int) -> int:
    return 128 if format is W12 and block_tokens <= 128 else 64


def keeps_tokens(n_columns: int, n_tokens: int, format: WeightFormat, config: StreamConfig) -> bool:
    """Whether all tokens of a program fit its stages at once, so that it fetches them once."""
    if config.block_tokens > FEW_TOKENS or config.n_splits > 1 or n_tokens > config.block_tokens:
        return False
    return _few_turns(n_columns, format, config) * _FEW_BOXES <= (
        config.n_token_stages * config.cluster
    )


def _few_turns(n_columns: int, format: WeightFormat, config: StreamConfig) -> int:
    return -(-format.n_steps(n_columns) // (_box_steps(config, format) * _FEW_BOXES))


def fill_stages(config: StreamConfig, format: WeightFormat, n_columns: int) -> StreamConfig | None:
    """A division with as many stages as fit; None if too few do."""
    if _is_few(config):
        return _fill_few(config, format, _few_turns(n_columns, format, config))
    return _fill_many(config, format)


def _fill_few(config: StreamConfig, format: WeightFormat, n_turns: int) -> StreamConfig | None:
    """Tokens of all turns, or of three, or of two; and weights of two turns, or of one at least."""
    if config.block_rows * config.block_tokens > _MAX_FEW_SUMS or config.cluster == 1:
        return None
    for turns in (n_turns, 3, 2):
        least = _FEW_BOXES if turns == 2 and format is not W12 else 2 * _FEW_BOXES
        for n_weights in range(_MAX_FEW_STAGES, least - 1, -_FEW_BOXES):
            n_tokens = max(2, turns * _FEW_BOXES // config.cluster)
            found = replace(config, n_weight_stages=n_weights, n_token_stages=n_tokens)
            if stream_shared_nbytes(found, format) <= _SHARED_NBYTES:
                return found
    return None


def _fill_many(config: StreamConfig, format: WeightFormat) -> StreamConfig | None:
    """Up to six stages of weights."""
    if config.block_rows * config.block_tokens > _MAX_SUMS[config.block_rows]:
        return None  # registers for sums
    for n_weights in (6, 5, 4, 3, 2):
        for n_tokens in (8, 6, 5, 4, 3, 2):
            found = replace(config, n_weight_stages=n_weights, n_token_stages=n_tokens)
            if stream_shared_nbytes(found, format) <= _SHARED_NBYTES and n_tokens >= min(
                n_weights, 4
            ):
                return found
    return None


def stream_options(config: StreamConfig, format: WeightFormat) -> tuple[str, ...]:
    """What the compiler is told about a division. Splits need no machine code of their own."""
    constants = {
        "BITS": format.bits,
        "TOKENS": config.block_tokens,
        "ROWS": config.block_rows,
        "WEIGHT_STAGES": config.n_weight_stages,
        "TOKEN_STAGES": config.n_token_stages,
        "CLUSTER": config.cluster,
        "SHARED_NBYTES": stream_shared_nbytes(config, format),
    }
    defined = tuple(f"-D{name}={value}" for name, value in constants.items())
    return ("--gpu-architecture=sm_90a", "--std=c++17", *defined)
