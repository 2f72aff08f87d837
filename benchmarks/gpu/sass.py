"""Count the instructions of GPU kernels, without a GPU: `python benchmarks/gpu.py sass`.

Kernels are compiled for an architecture with the assembler that Triton includes, and disassembled.
Only the loop over the weights counts: its instructions for each weight, over all threads; its
instructions of the integer pipe; whether it uses the tensor cores; and whether registers spill to
memory. The counts are exact, but times do not follow from them exactly: see docs/decisions.md,
section 19.
"""

import argparse
import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.gpu.compilation import (
    TRITON_VERSION,
    WARP,
    compile_decode,
    compile_matmul,
)
from benchmarks.gpu.machine_code import disassemble, read_kernel
from benchmarks.gpu.triton_sources import source_hash
from packhorse.kernels.matmul import MatmulConfig, default_config
from packhorse.layout import W12, WEIGHT_FORMATS, WeightFormat

ARCHITECTURES = (90, 80)
SHARED_NBYTES = {90: 227 << 10, 80: 163 << 10}  # of a program, by NVIDIA's tables
SHARED_DIVISION = MatmulConfig(128, 64, 32, 4, 1, 3)  # its warps share the columns; not for Hopper
TENSOR_OPS = ("HMMA", "HGMMA")
SPILL_OPS = ("LDL", "STL")
_ATTRIBUTES = 0x70000000  # the kind of a section of an ELF file
_REGISTER_COUNT = bytes((0x04, 0x2F, 8, 0))  # an attribute of eight bytes
# Operations of the pipe of integers and logic, which has half the rate of the others.
INTEGER_OPS = {
    *("LOP3", "SHF", "PRMT", "IADD3", "ISETP", "SEL", "LEA", "VIADD", "IMNMX", "VIMNMX", "IABS"),
    *("BMSK", "SGXT", "POPC", "PLOP3"),
}


@dataclass(frozen=True)
class Count:
    """Instructions of the loop of a kernel.

    Attributes:
        kernel, architecture: the kernel, and the architecture that it was compiled for.
        instructions: of all kinds, for a weight.
        integer: those of the integer pipe.
        tensor: instructions of the tensor cores in the loop.
        hopper: asynchronous instructions of Hopper's tensor cores in the whole kernel.
        spills: accesses to local memory in the whole kernel.
        loop_spills: those in the loop.
        shared_nbytes: shared memory of a program.
        unfused: whether the machine code is the same if products and sums may not be fused; None if
            this was not checked.
        top: the most frequent instructions of the loop.
    """

    kernel: str
    architecture: int
    instructions: float
    integer: float
    tensor: int
    hopper: int
    spills: int
    loop_spills: int
    shared_nbytes: int
    top: dict[str, int]
    unfused: bool | None = None


def n_tensor(body: Counter[str]) -> int:
    return sum(body[op] for op in TENSOR_OPS)


def count(name: str, compiled: object, architecture: int, n_weights: int, n_warps: int) -> Count:
    """The operations of the loop that uses the tensor cores most, or of the longest one."""
    code = read_kernel(compiled.asm["cubin"])
    operations = [x.operation for x in code.instructions]
    bodies = (Counter(operations[start:end]) for start, end in code.loops)
    tally = max(bodies, key=lambda body: (n_tensor(body), body.total()))
    threads = WARP * n_warps
    return Count(
        name,
        architecture,
        tally.total() * threads / n_weights,
        sum(tally[op] for op in INTEGER_OPS) * threads / n_weights,
        n_tensor(tally),
        code.count(("HGMMA",)),
        code.count(SPILL_OPS),
        sum(tally[op] for op in SPILL_OPS),
        compiled.metadata.shared,
        dict(tally.most_common(8)),
    )


def count_registers(binary: bytes) -> int:
    """Registers of a thread, from the attributes of the only kernel in a binary (ELF)."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, number = struct.unpack_from("<HH", binary, 0x3A)
    for at in range(table, table + size * number, size):
        (kind,) = struct.unpack_from("<I", binary, at + 4)
        start, length = struct.unpack_from("<QQ", binary, at + 24)
        found = binary.find(_REGISTER_COUNT, start, start + length) if kind == _ATTRIBUTES else -1
        if found >= 0:
            (n_registers,) = struct.unpack_from("<I", binary, found + 8)  # behind a symbol's number
            return int(n_registers)
    raise ValueError("the binary has no attributes of a kernel")


def count_matmul(
    format: WeightFormat, config: MatmulConfig, architecture: int, *, even: bool = True
) -> Count:
    compiled = compile_matmul(
        format,
        config if even else replace(config, n_splits=2),
        architecture,
        even=even,
        bias=not even,
    )
    n_rows = config.n_tiles * config.block_rows
    n_weights = n_rows * config.block_steps * config.n_parts * format.n_slices
    name = f"{format.name} N={config.block_tokens}" + ("" if even else " odd columns")
    return count(name, compiled, architecture, n_weights, config.n_warps)


def count_decode(format: WeightFormat, architecture: int) -> Count:
    fused, unfused = (compile_decode(format, architecture, fuse=fuse) for fuse in (True, False))
    found = count(f"{format.name} decode", fused, architecture, 4 * 512 * format.n_slices, 4)
    return replace(found, unfused=_is_same(fused, unfused))


def _is_same(first: object, second: object) -> bool:
    binaries = [each.asm["cubin"] for each in (first, second)]
    return binaries[0] == binaries[1] or disassemble(binaries[0]) == disassemble(binaries[1])


def counts(*, brief: bool) -> Iterator[Count]:
    """Count all kernels; if brief, only a few for older GPUs, and no products of 16 tokens."""
    for architecture in ARCHITECTURES:
        shared = SHARED_NBYTES[architecture]
        for format in WEIGHT_FORMATS.values():
            sizes = (8, 16, 32) if format is W12 else (8, 16)
            if brief:
                sizes = sizes[:1] if architecture < 90 else tuple(n for n in sizes if n != 16)
            for n in sizes:
                config = default_config(14336, 4096, n, format, shared_nbytes=shared)
                yield count_matmul(format, config, architecture)
            if format is W12 and architecture < 90:
                yield count_matmul(format, SHARED_DIVISION, architecture)
            if not brief or architecture == 90:
                yield count_decode(format, architecture)
        if not brief or architecture == 90:
            for format in WEIGHT_FORMATS.values():
                config = default_config(14336, 4096, 8, format, shared_nbytes=shared)
                yield count_matmul(format, config, architecture, even=False)


def main(argv: list[str]) -> int:
    """Count the instructions, and print them as a table.

    Args:
        argv: the arguments after `sass`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py sass", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file too")
    parser.add_argument("--brief", action="store_true", help="fewer kernels")
    arguments = parser.parse_args(argv)
    path = arguments.json
    print(f"Triton {TRITON_VERSION}\n")
    print("| kernel | for | instructions a weight | integer pipe | tensor | spills | shared KiB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for row in counts(brief=arguments.brief):
        rows.append(asdict(row))
        print(
            f"| {row.kernel} | sm_{row.architecture} | {row.instructions:.2f} | {row.integer:.2f} "
            f"| {row.tensor} | {row.spills} | {row.shared_nbytes / 1024:.0f} |",
            flush=True,
        )
    if path:
        kept = {"triton": TRITON_VERSION, "source": source_hash(), "counts": rows}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return 0
