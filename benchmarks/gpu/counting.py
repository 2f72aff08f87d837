"""Count what the model of time knows of compiled kernels: `python benchmarks/gpu.py counting`.

Each division is compiled for Hopper with four warps, as it runs there: started early, and with as
many stages as usual. Those whose warps share the columns do not run there, and are compiled for
Ampere. The command writes `device/counts.py`. It takes some minutes of a core; a
kernel that Triton has compiled before comes from its cache.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import triton

from benchmarks.gpu import issue, sass
from benchmarks.gpu.machine_code import read_kernel
from benchmarks.gpu.triton_sources import source_hash
from packhorse.kernels.matmul import MAX_BLOCK_TOKENS, MatmulConfig, shared_nbytes_of
from packhorse.layout import W12, WEIGHT_FORMATS, WeightFormat

TABLE = Path(__file__).resolve().parents[2] / "src" / "packhorse" / "device" / "counts.py"
_TILES = ((1, 16), (2, 16), (3, 16), (1, 32), (1, 64), (1, 128), (2, 32), (3, 32), (4, 32), (2, 64))
_FEW_SPILLS = 64
_N_WARPS = 4
_HEAD = '''"""What the model of time knows of compiled kernels: instructions and registers.

Written by `python benchmarks/gpu.py counting`, with Triton {version}, for sm_90 and four warps
(blocks of 64 tokens: for sm_80); do not edit by hand. The hash of what was compiled is
{source}. Divisions that spill registers in the loop are left out, and those that spill
more than {few} outside, which happens once in each program. The model knows only the divisions of
this table, so no others are ever chosen or measured.
"""

from typing import NamedTuple

__all__ = ["INSTRUCTIONS", "Counted"]


class Counted(NamedTuple):
    """What was counted of a division.

    Attributes:
        per_weight: instructions in the main loop for each weight, over all threads.
        alone: instructions that a scheduler issues in a cycle in the loop, if it has one warp and
            memory never makes it wait; simulated from the control codes.
        outside: instructions of a warp before and after the loop, with one turn of exceptions.
        registers: of a thread.
    """

    per_weight: float
    alone: float
    outside: int
    registers: int


# (format, rows of a tile, tokens of a block, steps of a warp, tiles)
INSTRUCTIONS: dict[tuple[str, int, int, int, int], Counted] = {{
'''


def _divisions(format: WeightFormat) -> Iterator[MatmulConfig]:
    for (tiles, rows), tokens, steps in product(_TILES, (8, 16, 32), (32, 64, 128)):
        if rows * max(tiles * tokens, steps) > 4096 or (tiles == 4 and tokens > 8):
            continue  # they spill
        if tiles > 1 and rows == 16 and (tokens > 8 or steps < 64):
            continue
        if format is not W12 and (tiles > 1 or rows > 32 or steps > 64):
            continue  # they take too much shared memory
        for n_stages in (4, 3, 2):
            config = MatmulConfig(rows, tokens, steps, _N_WARPS, 1, n_stages, tiles)
            if shared_nbytes_of(config, format) <= sass.SHARED_NBYTES[90]:
                yield config
                break
    if format is W12:  # with its exceptions, W11 is slower than decoding first
        for rows, steps in product((64, 128), (32, 64)):
            yield MatmulConfig(rows, MAX_BLOCK_TOKENS, steps, _N_WARPS, 1, 3)


def count_one(format: WeightFormat, config: MatmulConfig) -> tuple[float, float, int, int] | None:
    """Instructions for a weight, those outside of the loop, and registers; None if too many
    registers spill.

    Raises:
        ValueError: a product runs on while the warp does (HGMMA), for which `hazards.py` would have
            to read the kernel, too.
    """
    early = not config.shares
    compiled = sass.compile_matmul(format, config, 90 if early else 80, early=early)
    code = read_kernel(compiled.asm["cubin"])
    if code.count(("HGMMA",)):
        raise ValueError(f"{config}: Triton uses Hopper's asynchronous products")
    start, end = issue.main_loop(code)
    body = Counter(x.operation for x in code.instructions[start:end])
    spills = code.count(sass.SPILL_OPS)
    weights = config.n_tiles * config.block_rows * config.block_steps * format.n_slices
    per_weight = 32 * (end - start) * _N_WARPS / (weights * config.n_parts)
    # Beyond 8, loads of single bytes.
    if any(body[op] for op in sass.SPILL_OPS) or spills > _FEW_SPILLS or per_weight > 8:
        return None
    registers = sass.count_registers(compiled.asm["cubin"])
    steps = issue.steps_of(code.instructions[start:end], copy_passes=4.0)
    alone = issue.N_SCHEDULERS * issue.issue_rate(steps, 1, 1)
    return round(per_weight, 2), round(alone, 2), len(code.instructions) - (end - start), registers


def lines() -> Iterator[str]:
    """The lines of the table."""
    for format in WEIGHT_FORMATS.values():
        for config in _divisions(format):
            found = count_one(format, config)
            if found is None:
                continue
            key = f'"{format.name}", {config.block_rows}, {config.block_tokens}'
            numbers = ", ".join(map(str, found))
            yield f"    ({key}, {config.block_steps}, {config.n_tiles}): Counted({numbers}),"


def main(argv: list[str]) -> int:
    """Count, and write the table.

    Args:
        argv: the arguments after `counting`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py counting", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args(argv)
    head = {"version": triton.__version__, "source": source_hash(), "few": _FEW_SPILLS}
    parts = [_HEAD.format(**head)]
    for line in lines():
        print(line, file=sys.stderr, flush=True)
        parts.append(line + "\n")
    TABLE.write_text("".join(parts) + "}\n")
    return 0
