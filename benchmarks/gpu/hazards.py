"""Look for registers that are overwritten while a product may still read them:
`python benchmarks/gpu.py hazards`.

Hopper's products (HGMMA) run on while the warp goes on. Until the warp has waited for a product, it
must not write to the registers from which the product takes its operand A, nor touch the ones that
it adds to. Nothing in the hardware or the assembler sees to it; compilers have got it wrong.
The result then depends on how quick the tensor cores are.

The check follows all paths through the machine code, with the products that may be running on each.
A product belongs to the group that the next HGMMA with the mark `gsb0` ends, and
`WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups are running.

Only the kernels in CUDA C++ have such products, with more than 32 tokens. NVRTC compiles them for
sm_90a, in all divisions that the tuner may choose. To prove that the check would notice, it also
reads each kernel as if its waits let products run on.

The kept table has the hash of each kernel's source and options. The command compiles only what has
changed since the table was written.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.machine_code import Instruction, MachineCode, disassemble, parse_listing
from packhorse.device.stream_cost import stream_candidates
from packhorse.errors import MissingBackendError
from packhorse.gpu.nvrtc import compiler
from packhorse.gpu.stream_kernels import stream_source
from packhorse.kernels.stream_product import MAX_STREAM_TOKENS, StreamConfig, stream_options
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu" / "hazards.json"
_MAX_GROUPS = 16  # that are followed; the assembler lets fewer run
_TOKENS = (64, 128, MAX_STREAM_TOKENS)
_SIZE = 4096, 4096, 132  # rows, columns and multiprocessors; divisions hardly depend on them


@dataclass(frozen=True)
class Hazard:
    """An instruction that comes too early.

    Attributes:
        product: address of the product that may still run, in bytes.
        address: address of the instruction.
        kind: "operand A is written", "sums are written" or "sums are read".
        registers: the registers.
    """

    product: int
    address: int
    kind: str
    registers: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.address:#06x}: {self.kind} ({', '.join(self.registers)}) while the product at "
            f"{self.product:#06x} may run"
        )


@dataclass(frozen=True)
class Row:
    """A kernel that was checked.

    Attributes:
        kernel: its division.
        source: hash of its source and options.
        products: Hopper's products in it.
        from_registers: those that take operand A from registers.
        hazards: instructions that come too early.
        without_waits: the same, if its waits let products run on.
    """

    kernel: str
    source: str
    products: int
    from_registers: int
    hazards: int
    without_waits: int


class Case(NamedTuple):
    """A kernel to check.

    Attributes:
        format: of the weight.
        config: the division; splits need no machine code of their own.
    """

    format: WeightFormat
    config: StreamConfig

    @property
    def name(self) -> str:
        x = self.config
        stages = f"{x.n_weight_stages}/{x.n_token_stages}"
        return f"{self.format.name} {x.block_rows}/{x.block_tokens}/{stages}/{x.cluster}"


_Groups = tuple[tuple[int, ...], ...]  # numbers of products; the last group is not ended yet


def find_hazards(code: MachineCode) -> list[Hazard]:
    """The instructions of a kernel that come too early, in the order of their addresses."""
    found: set[Hazard] = set()
    work: list[tuple[int, _Groups]] = [(0, ((),))]
    seen = set(work)
    while work:
        i, groups = work.pop()
        x = code.instructions[i]
        for running in {j for group in groups for j in group}:
            found.update(_conflicts(code.instructions[running], x))
        after = _step(i, x, groups)
        for following in code.followers(i):
            if (following, after) not in seen:
                seen.add((following, after))
                work.append((following, after))
    return sorted(found, key=lambda hazard: (hazard.address, hazard.product, hazard.kind))


def _step(i: int, x: Instruction, groups: _Groups) -> _Groups:
    """What may be running after an instruction."""
    if x.operation == "HGMMA":
        groups = (*groups[:-1], (*groups[-1], i))
        return (*groups, ())[-_MAX_GROUPS:] if "gsb0" in x.operands else groups
    if x.opcode.startswith("WARPGROUP.DEPBAR"):
        n_left = int(x.operands[-1], 0)
        return (*groups[:-1][len(groups) - 1 - n_left if n_left < len(groups) else 0 :], groups[-1])
    return groups


@cache
def _registers(product: Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The registers of operand A, and of the sums."""
    first = re.fullmatch(r"R(\d+)(?:\.reuse)?", product.operands[1])
    a = {f"R{int(first[1]) + k}" for k in range(4)} if first else set()
    return frozenset(a), product.writes


def _conflicts(running: Instruction, x: Instruction) -> Iterator[Hazard]:
    if x.predicate in ("!PT", "!UPT"):
        return
    a, sums = _registers(running)
    reads = x.reads
    if x.operation == "HGMMA" and x.writes == sums:
        reads = _registers(x)[0]  # products that add to the same sums follow each other
        written: frozenset[str] = frozenset()
    else:
        written = x.writes & sums
    for kind, registers in (
        ("operand A is written", x.writes & a),
        ("sums are written", written),
        ("sums are read", reads & sums),
    ):
        if registers:
            names = sorted(registers, key=lambda name: int(name[1:]))
            yield Hazard(running.address, x.address, kind, tuple(names))


def source_hash(case: Case) -> str:
    """The hash of a kernel's source, without comments, and of what the compiler is told."""
    text = " ".join(re.sub(r"//.*", "", stream_source()).split())
    options = stream_options(case.config, case.format)
    return hashlib.sha256("\n".join([text, *options]).encode()).hexdigest()[:16]


def cases() -> Iterator[Case]:
    """All divisions with Hopper's products."""
    seen = set()
    for format in WEIGHT_FORMATS.values():
        for n_tokens in _TOKENS:
            n_rows, n_columns, n_processors = _SIZE
            for config in stream_candidates(n_rows, n_columns, n_tokens, format, n_processors):
                case = Case(format, replace(config, n_splits=1))
                if case not in seen:
                    seen.add(case)
                    yield case


def compile_case(case: Case) -> MachineCode:
    """The machine code of a kernel.

    Raises:
        MissingBackendError: there is no NVRTC.
    """
    binary = compiler().compile(stream_source(), stream_options(case.config, case.format))
    return parse_listing(disassemble(binary))["multiply"]


def check(case: Case) -> tuple[Row, list[Hazard]]:
    """Compiles and checks a kernel."""
    code = compile_case(case)
    found, without = find_hazards(code), find_hazards(without_waits(code))
    products = [x for x in code.instructions if x.operation == "HGMMA"]
    from_registers = sum(bool(_registers(x)[0]) for x in products)
    numbers = len(products), from_registers, len(found), len(without)
    return Row(case.name, source_hash(case), *numbers), found


def without_waits(code: MachineCode) -> MachineCode:
    """A kernel whose waits let many products run on: the check must find hazards in it."""
    changed = (
        replace(x, operands=(*x.operands[:-1], "0x7"))
        if x.opcode.startswith("WARPGROUP.DEPBAR")
        else x
        for x in code.instructions
    )
    return MachineCode(code.name, tuple(changed))


def read_rows(path: Path = KEPT) -> dict[str, Row]:
    """The rows of the kept table by the kernels' names; none if there is no such file."""
    if not path.exists():
        return {}
    return {row["kernel"]: Row(**row) for row in json.loads(path.read_text())["kernels"]}


def _write(rows: list[Row]) -> None:
    version = ".".join(map(str, compiler().version))
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    KEPT.write_text(f'{{\n "nvrtc": "{version}",\n "kernels": [\n{lines}\n ]\n}}\n')


def main(argv: list[str]) -> int:
    """Check the kernels, and print what was found.

    Args:
        argv: the arguments after `hazards`.

    Returns:
        The exit status: 1 if there is a hazard, or if the check would miss one; 3 without NVRTC.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py hazards", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="renew the kept table")
    parser.add_argument("--only", help="only kernels whose name contains this", default="")
    parser.add_argument("--all", action="store_true", help="also what is in the kept table already")
    arguments = parser.parse_args(argv)
    try:
        compiler()
    except MissingBackendError as error:
        print(error, file=sys.stderr)
        return 3
    kept = {} if arguments.all else read_rows()
    rows: list[Row] = []
    tally: Counter[str] = Counter()
    for case in cases():
        row = kept.get(case.name)
        if arguments.only in case.name and (row is None or row.source != source_hash(case)):
            row, found = check(case)
            tally["compiled"] += 1
            said = f"{row.hazards} hazards; without its waits: {row.without_waits}"
            print(f"{row.kernel}: {row.products} products, {said}", flush=True)
            for hazard in found[:4]:
                print(f"    {hazard}")
        if row is not None:
            rows.append(row)
            tally["hazards"] += row.hazards
            tally["blind"] += not row.without_waits
    if arguments.json:
        _write(rows)
    print(f"{len(rows)} kernels, {tally['compiled']} compiled now: {tally['hazards']} hazards")
    return 1 if tally["hazards"] or tally["blind"] else 0
