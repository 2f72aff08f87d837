"""Count the instructions of the kernels that gather packed rows, without a GPU:
`python benchmarks/gpu.py tables`.

Each kernel is compiled as its launcher calls it, for tables as docs/benchmarks_host.md has them.
Printed are: instructions for an element, over all threads, in the loop that takes most elements;
loads of 16 bytes, and loads of single bytes, in the whole kernel; registers; and accesses to local
memory, which are registers that spill.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.data.table_formats import FORMATS
from benchmarks.gpu.compilation import TRITON_VERSION, WARP, compile_kernel
from benchmarks.gpu.machine_code import MachineCode, read_kernel
from benchmarks.gpu.sass import SPILL_OPS, count_registers
from packhorse.kernels.tables import TableKernel, kernel_of, put_rows_kernel
from packhorse.table_layout import TableFormat

__all__ = ["TableCount", "compile_put", "compile_table", "count_table"]

_N_BRIEF = 5  # of the formats, in a brief count


@dataclass(frozen=True)
class TableCount:
    """What a kernel consists of.

    Attributes:
        table, architecture: the table, and what the kernel was compiled for.
        instructions: for an element.
        wide_loads: instructions that load 16 bytes for each thread.
        byte_loads: instructions that load one byte.
        registers: of a thread.
        spills: accesses to local memory.
        shared_nbytes: shared memory of a program.
    """

    table: str
    architecture: int
    instructions: float
    wide_loads: int
    byte_loads: int
    registers: int
    spills: int
    shared_nbytes: int


def compile_table(
    format: TableFormat, has_exceptions: bool, architecture: int
) -> "triton.compiler.CompiledKernel":  # noqa: F821
    """Compile the kernel for a table, as it is launched.

    Args:
        format: of the table.
        has_exceptions: whether a row has any.
        architecture: 90 for Hopper, 80 for Ampere.
    """
    found = kernel_of(format, has_exceptions)
    constants = dict(found.constants)
    n_warps = constants.pop("num_warps")
    elements = {8: "*u8", 16: "*i16", 32: "*i32", 64: "*i64"}[format.element_bits]
    words = dict.fromkeys(("marks_ptr", "ranks_ptr", "starts_ptr"), "*i32")
    types = {"rows_ptr": "*u8", "columns_ptr": "*i16", "ids_ptr": "*i64", "scratch_ptr": "*u32"}
    types |= words | dict.fromkeys(("elements_ptr", "values_ptr", "out_ptr"), elements)
    return compile_kernel(
        found.kernel, constants, architecture, n_warps, 3, types=types, loose=_loose(found)
    )


def compile_put(element_bits: int, architecture: int) -> "triton.compiler.CompiledKernel":  # noqa: F821
    """Compile the kernel that puts changed rows, of 37 columns."""
    elements = {16: "*i16", 32: "*i32"}[element_bits]
    types = {"head_ptr": "*i64", "ids_ptr": "*i64", "out_ptr": elements}
    constants = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 64}
    loose = {"ids_ptr", "n_ids", "n_columns"}
    return compile_kernel(put_rows_kernel, constants, architecture, 8, 3, types=types, loose=loose)


def _loose(found: TableKernel) -> set[str]:
    """Arguments that a launch does not know as multiples of 16."""
    names = found.kernel.arg_names
    first = names.index("first_row")
    numbers = zip(names[first + 1 :], found.numbers, strict=False)
    return {"ids_ptr", "n_ids", "first_row", *(name for name, value in numbers if value % 16)}


def count_table(name: str, architecture: int) -> TableCount:
    """Compile the kernel for a table with exceptions, and count."""
    format = FORMATS[name]
    compiled = compile_table(format, True, architecture)
    code = read_kernel(compiled.asm["cubin"])
    found = kernel_of(format, True).constants
    columns = found.get("BLOCK_COLUMNS") or 3 * found.get("BLOCK_TRIPLES", 0)
    columns = columns or 8 * found["BLOCK_STEPS"]
    numel = found["BLOCK_ROWS"] * columns // (WARP * found["num_warps"])
    widths = Counter(x.opcode for x in code.instructions)
    return TableCount(
        name,
        architecture,
        _longest(code) / numel,
        widths["LDG.E.128"],
        widths["LDG.E.U8"],
        count_registers(compiled.asm["cubin"]),
        code.count(SPILL_OPS),
        compiled.metadata.shared,
    )


def _longest(code: MachineCode) -> int:
    """Instructions of the longest loop that has no loop in it."""
    return max(
        end - start
        for start, end in code.loops
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in code.loops)
    )


def counts(*, brief: bool) -> Iterator[TableCount]:
    """Count all tables for Hopper, and for Ampere; if brief, only those that differ most."""
    names = list(FORMATS)
    for name in names[:_N_BRIEF] if brief else names:
        yield count_table(name, 90)
    for name in names[:1] if brief else names:
        yield count_table(name, 80)


def main(argv: list[str]) -> int:
    """Count, and print a table.

    Args:
        argv: the arguments after `tables`.

    Returns:
        The exit status: 0.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py tables", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file too")
    parser.add_argument("--brief", action="store_true", help="fewer kernels")
    arguments = parser.parse_args(argv)
    print(f"Triton {TRITON_VERSION}\n")
    print("| table | for | instructions an element | 16 bytes | 1 byte | registers | spills |")
    print("|---|---|--:|--:|--:|--:|--:|")
    rows = []
    for row in counts(brief=arguments.brief):
        rows.append(asdict(row))
        print(
            f"| {row.table} | sm_{row.architecture} | {row.instructions:.1f} | {row.wide_loads} "
            f"| {row.byte_loads} | {row.registers} | {row.spills} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
