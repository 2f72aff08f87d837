"""Look for registers that are overwritten while a product may still read them:
`python benchmarks/gpu.py hazards`.

Hopper's products (HGMMA) run on while the warp goes on. Until the warp has waited for a product, it
must not write to the registers from which the product takes its operand A, nor touch the ones that
it adds to. Nothing in the hardware or the assembler sees to it; Triton 3.6 to 3.8 got it wrong
where a loop leaves products running. The result then depends on how quick the tensor cores are.

The check follows all paths through the machine code, with the products that may be running on each.
A product belongs to the group that the next HGMMA with the mark `gsb0` ends, and
`WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups are running. Kernels are compiled for
sm_90, for all divisions that the tuner may choose. The kernels for few tokens and for decoding have
no such products; the table shows it.

The kept tables have the hash of each kernel's source. The command compiles only what has changed
since its table was written.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.gpu.machine_code import Instruction, MachineCode, read_kernel
from packhorse.device.counts import MANY_INSTRUCTIONS
from packhorse.layout import WEIGHT_FORMATS

if TYPE_CHECKING:
    from packhorse.kernels.matmul_many import ManyConfig

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "src" / "packhorse" / "kernels"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
ARCHITECTURE = 90
_MAX_GROUPS = 16  # that are followed; the assembler lets fewer run
_STAGES = (2, 3, 4)
_FRESH = ("W12 many 128/64/64/8/3", "W12 many 256/64/32/8/3 odd, split", "W12 few 8")


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
        kernel: the kernel and its division.
        source: hash of its source.
        products: Hopper's products in it.
        from_registers: those that take operand A from registers.
        hazards: instructions that come too early.
    """

    kernel: str
    source: str
    products: int
    from_registers: int
    hazards: int


@dataclass(frozen=True)
class _Case:
    kernel: str  # the function's name
    name: str
    config: "ManyConfig | None" = None
    even: bool = True


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


def source_hash(kernel: str) -> str:
    """The hash of a kernel's code: its function, and all functions and constants that it names.

    Comments, docstrings and what launches kernels do not count.
    """
    parts = _parts()
    names, found = [kernel], {}
    while names:
        name = names.pop()
        if name in found or name not in parts:
            continue
        found[name] = ast.dump(parts[name])
        names += {node.id for node in ast.walk(parts[name]) if isinstance(node, ast.Name)}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


@cache
def _parts() -> dict[str, ast.AST]:
    """Kernels, functions of kernels, and constants of the modules of kernels, by their names."""
    parts: dict[str, ast.AST] = {}
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "triton.jit" in ast.unparse(node):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
                parts[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                parts[node.targets[0].id] = node
    return parts


def cases() -> Iterator[_Case]:
    """All that is checked: each division of the product of many tokens, with three stages also for
    odd columns, splits and a bias, and the usual divisions of the other kernels."""
    from packhorse.kernels.matmul_many import ManyConfig  # late: see `main`

    for rows, tokens, steps, warps in MANY_INSTRUCTIONS:
        for n_stages, even in [*product(_STAGES, (True,)), (_STAGES[1], False)]:
            config = ManyConfig(rows, tokens, steps, warps, 1 if even else 2, n_stages)
            shape = f"{rows}/{tokens}/{steps}/{warps}/{n_stages}"
            name = f"W12 many {shape}" + ("" if even else " odd, split")
            yield _Case("multiply_many_kernel", name, config, even)
    for name, even in product(WEIGHT_FORMATS, (True, False)):
        for n_tokens in (8, 16, 32):
            label = f"{name} few {n_tokens}" + ("" if even else " odd, split")
            yield _Case("multiply_weights_kernel", label, None, even)
        yield _Case(
            "decode_weights_kernel", f"{name} decode" + ("" if even else " rows"), None, even
        )


def _compile(case: _Case) -> bytes:
    from benchmarks.gpu import compilation
    from packhorse.kernels.matmul import default_config

    format = WEIGHT_FORMATS[case.name.split()[0]]
    if case.config is not None:
        compiled = compilation.compile_many(
            case.config, ARCHITECTURE, even=case.even, bias=not case.even
        )
    elif case.kernel == "multiply_weights_kernel":
        config = default_config(14336, 4096, int(case.name.split()[2].strip(",")), format)
        config = config if case.even else replace(config, n_splits=2)
        compiled = compilation.compile_matmul(
            format, config, ARCHITECTURE, even=case.even, bias=not case.even, early=True
        )
    else:
        compiled = compilation.compile_decode(format, ARCHITECTURE, gather=not case.even)
    binary: bytes = compiled.asm["cubin"]
    return binary


def check(case: _Case) -> tuple[Row, list[Hazard]]:
    """Compiles and checks a kernel."""
    code = read_kernel(_compile(case))
    found = find_hazards(code)
    products = [x for x in code.instructions if x.operation == "HGMMA"]
    from_registers = sum(bool(_registers(x)[0]) for x in products)
    row = Row(case.name, source_hash(case.kernel), len(products), from_registers, len(found))
    return row, found


def without_waits(code: MachineCode) -> MachineCode:
    """A kernel whose waits let many products run on: the check must find hazards in it."""
    changed = (
        replace(x, operands=(*x.operands[:-1], "0x7"))
        if x.opcode.startswith("WARPGROUP.DEPBAR")
        else x
        for x in code.instructions
    )
    return MachineCode(code.name, tuple(changed))


def _compile_overlapping(config: "ManyConfig", folder: Path) -> bytes:
    """The product of many tokens without the use of the sums that makes Triton wait."""
    from benchmarks.gpu import compilation
    from packhorse.kernels import matmul_many

    source = Path(matmul_many.__file__).read_text()
    wait, n_waits = re.subn(r"= _wait_for\((tl\.dot\(.*?\)), REORDER, UPCAST\)", r"= \1", source)
    if n_waits != 2:
        raise ValueError(f"the kernel has {n_waits} uses of _wait_for, not two")
    path = folder / "overlapping.py"
    path.write_text(wait)
    spec = spec_from_file_location("overlapping", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["overlapping"] = module  # Triton looks constants up there
    spec.loader.exec_module(module)
    compiled = compilation.compile_many(config, ARCHITECTURE, kernel=module.multiply_many_kernel)
    binary: bytes = compiled.asm["cubin"]
    return binary


def check_fresh() -> int:
    """Checks a few kernels, and that the check notices what it should; prints a line for each.

    Returns:
        The exit status: 1 if there are hazards where there should be none, or the reverse.
    """
    from benchmarks.gpu.compilation import TRITON_VERSION

    wrong = False
    for case in cases():
        if case.name not in _FRESH:
            continue
        code = read_kernel(_compile(case))
        found = find_hazards(code)
        n_left = len(find_hazards(without_waits(code)))
        wrong |= bool(found) or (n_left == 0) == (case.config is not None)
        print(f"{case.name}: {len(found)} hazards; without its waits: {n_left}")
        if case.name == _FRESH[0] and case.config is not None:
            with TemporaryDirectory() as folder:
                found = find_hazards(read_kernel(_compile_overlapping(case.config, Path(folder))))
            # Triton 3.9 keeps the registers of two turns apart.
            is_old = tuple(map(int, TRITON_VERSION.split(".")[:2])) < (3, 9)
            wrong |= bool(found) != is_old
            print(f"{case.name}, not waiting (Triton {TRITON_VERSION}): {len(found)} hazards")
    return int(wrong)


def kept_path(version: str) -> Path:
    """The kept table of a version of Triton, such as "3.9.0"."""
    return RESULTS / f"hazards_triton_{'.'.join(version.split('.')[:2])}.json"


def read_rows(path: Path) -> dict[str, Row]:
    """The rows of a kept table by the kernels' names; none if there is no such file."""
    if not path.exists():
        return {}
    return {row["kernel"]: Row(**row) for row in json.loads(path.read_text())["kernels"]}


def _write(path: Path, version: str, rows: list[Row]) -> None:
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    path.write_text(f'{{\n "triton": "{version}",\n "kernels": [\n{lines}\n ]\n}}\n')


def main(argv: list[str]) -> int:
    """Check the kernels, and print what was found.

    Args:
        argv: the arguments after `hazards`.

    Returns:
        The exit status: 1 if there is a hazard.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py hazards", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="renew the kept table of this Triton")
    parser.add_argument("--only", help="only kernels whose name contains this", default="")
    parser.add_argument("--fresh", action="store_true", help="check a few kernels, and the check")
    parser.add_argument("--all", action="store_true", help="also what is in the kept table already")
    arguments = parser.parse_args(argv)
    # Late, and before any kernel: after this import, no kernel of the process can be interpreted.
    from benchmarks.gpu.compilation import TRITON_VERSION

    if arguments.fresh:
        return check_fresh()
    path = kept_path(TRITON_VERSION)
    kept = {} if arguments.all else read_rows(path)
    rows: list[Row] = []
    tally: Counter[str] = Counter()
    for case in cases():
        row = kept.get(case.name)
        if arguments.only in case.name and (row is None or row.source != source_hash(case.kernel)):
            row, found = check(case)
            tally["compiled"] += 1
            print(f"{row.kernel}: {row.products} products, {row.hazards} hazards", flush=True)
            for hazard in found[:4]:
                print(f"    {hazard}")
        if row is not None:
            rows.append(row)
            tally["hazards"] += row.hazards
    if arguments.json:
        _write(path, TRITON_VERSION, rows)
    print(
        f"Triton {TRITON_VERSION}: {len(rows)} kernels, {tally['compiled']} of them compiled now: "
        f"{tally['hazards']} hazards"
    )
    return 1 if tally["hazards"] else 0
