"""The machine code (SASS) of a GPU kernel, read from what NVIDIA's disassemblers print.

This is the one parser of machine code: tools count instructions, look for hazards and simulate the
issue with what it returns. It reads the output of `nvdisasm -hex -c` and of `cuobjdump -sass`, for
binaries that Triton or NVRTC made.

Registers are names: R4, UR4 (of a warp), P0 and UP0 (predicates). RZ, URZ, PT and UPT are constants
and never listed. How many registers an operand takes does not stand in the listing; it follows from
the operation and its suffixes. The rules are in `_n_written` and `_n_read`, for Ampere and Hopper;
they cover the instructions that our kernels contain.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_CONTROL = 41  # bit of the upper half of an instruction at which its control codes begin
_NO_BARRIER = 7
_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_UPPER = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_FUNCTION = re.compile(r"(?:\.text\.([\w$]+):|\s+Function : ([\w$]+)\s*$)")
_GUARD = re.compile(r"@(!?U?P\w+)\s+")
_REGISTER = re.compile(r"(?<![\w.])(UR|R|UP|P)(\d+)(?![\w])(\.64)?")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)|\b0x([0-9a-f]+)\b")
_SPLIT = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
_PREDICATE = re.compile(r"U?P(\d|T)")
_PLAIN = re.compile(r"(U?R)(\d+|Z)(?:\.reuse)?")

_JUMPS = {"BRA", "CALL", "JMP"}
# Their first operand is not a result.
_NO_RESULT = {
    *("BAR", "BRA", "BRX", "BSSY", "BSYNC", "CALL", "CCTL", "DEPBAR", "EXIT", "FENCE", "JMP"),
    *("LDGDEPBAR", "MEMBAR", "NANOSLEEP", "NOP", "RED", "RET", "ST", "STG", "STL", "STS", "STSM"),
    *("UBLKCP", "UBLKPF", "USETMAXREG", "WARPGROUP", "WARPSYNC", "YIELD", "REDG", "LDGSTS"),
}
# After their first result, further predicates may be results: carries, or votes.
_MORE_RESULTS = {
    **dict.fromkeys(("IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VIADD", "VIADDMNMX"), 2),
    **dict.fromkeys(("VOTE", "VOTEU", "MATCH", "ATOMG", "ATOMS"), 1),
}
_STORES = {"ST", "STG", "STS", "STL", "STSM"}


@dataclass(frozen=True, slots=True)
class Control:
    """What the assembler tells the scheduler with an instruction.

    Attributes:
        stall: cycles until the next instruction of the warp may be issued.
        yields: whether another warp should get the next slot.
        write_barrier: number (0 to 5) of the barrier that opens when the results are written.
        read_barrier: number of the barrier that opens when the operands have been read.
        waits: numbers of the barriers that the instruction waits for.
        reuse: bits of the operands that stay in the cache of operands.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]
    reuse: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction.

    Attributes:
        address: bytes from the beginning of the kernel.
        predicate: the predicate that guards it, such as "P0" or "!UP1"; "" if there is none.
        opcode: with all suffixes, such as "LDG.E.128".
        operands: as they are printed.
        reads, writes: names of registers.
        target: the address that a branch goes to.
        control: its control codes.
    """

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    target: int | None
    control: Control

    @property
    def operation(self) -> str:
        """The opcode without suffixes: LDG."""
        return self.opcode.partition(".")[0]

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class MachineCode:
    """A kernel.

    Attributes:
        name: of the kernel.
        instructions: in the order of their addresses.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def index_of(self) -> dict[int, int]:
        """Numbers of instructions by their addresses."""
        return {x.address: i for i, x in enumerate(self.instructions)}

    def followers(self, i: int) -> Iterator[int]:
        """Numbers of the instructions that may come after instruction `i`."""
        x = self.instructions[i]
        always = not x.predicate and not _depends(x)
        if x.operation in _JUMPS and x.target in self.index_of:
            yield self.index_of[x.target]
        if x.operation in ("BRA", "JMP", "EXIT", "RET") and always:
            return
        if i + 1 < len(self.instructions):
            yield i + 1

    @property
    def loops(self) -> list[tuple[int, int]]:
        """The runs that end with a branch to their beginning: numbers of the first instruction and
        of the one after the last. The endless loop of one instruction after the code is not one."""
        found = []
        for i, x in enumerate(self.instructions):
            if x.operation == "BRA" and x.target is not None and x.target < x.address:
                found.append((self.index_of[x.target], i + 1))
        return found

    def count(self, operations: Iterable[str]) -> int:
        """How many instructions are of one of some operations, such as LDL."""
        wanted = set(operations)
        return sum(x.operation in wanted for x in self.instructions)


def read_kernel(binary: bytes, *, tool: Path | None = None) -> MachineCode:
    """Disassembles a binary with one kernel.

    Args:
        binary: the binary (a cubin).
        tool: `nvdisasm`; by default the one that Triton carries.

    Raises:
        ValueError: there is another number of kernels in it.
    """
    kernels = parse_listing(disassemble(binary, tool=tool))
    if len(kernels) != 1:
        raise ValueError(f"the binary has {len(kernels)} kernels ({', '.join(kernels)}), not one")
    return next(iter(kernels.values()))


def disassemble(binary: bytes, *, tool: Path | None = None) -> str:
    """What `nvdisasm` prints for a binary, with the encodings of instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool or _triton_tool()), "-hex", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_listing(listing: str) -> dict[str, MachineCode]:
    """Reads the listing of a disassembler.

    Args:
        listing: what `nvdisasm -hex -c` or `cuobjdump -sass` printed.

    Returns:
        The kernels by their names.

    Raises:
        ValueError: an instruction has no encoding, or a branch no target.
    """
    kernels = {}
    for name, lines in _functions(listing.splitlines()):
        kernels[name] = MachineCode(name, tuple(_instructions(name, lines)))
    return kernels


def _triton_tool() -> Path:
    import triton  # late: a listing can be read without Triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def _functions(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [(i, found) for i, line in enumerate(lines) if (found := _FUNCTION.match(line))]
    ends = [i for i, _ in starts[1:]] + [len(lines)]
    for (start, found), end in zip(starts, ends, strict=True):
        yield found[1] or found[2], lines[start + 1 : end]


def _instructions(name: str, lines: list[str]) -> Iterator[Instruction]:
    labels: dict[str, int] = {}
    texts: list[tuple[int, str, int]] = []
    waiting: list[str] = []  # labels whose instruction comes next
    for i, line in enumerate(lines):
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif found := _LINE.match(line):
            upper = _UPPER.match(lines[i + 1]) if i + 1 < len(lines) else None
            if upper is None:
                raise ValueError(f"{name}: {found[2]!r} at 0x{found[1]} has no upper half")
            address = int(found[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            texts.append((address, found[2], int(upper[1], 16)))
    for address, text, upper_half in texts:
        yield _instruction(name, address, text, upper_half, labels)


def _instruction(
    name: str, address: int, text: str, upper: int, labels: dict[str, int]
) -> Instruction:
    guard = _GUARD.match(text)
    opcode, _, rest = text[guard.end() if guard else 0 :].strip(" {}").partition(" ")
    operands = tuple(part.strip() for part in _SPLIT.split(rest)) if rest.strip() else ()
    predicate = "" if guard is None or guard[1] in ("PT", "UPT") else guard[1]
    if guard is not None and guard[1] in ("!PT", "!UPT"):
        predicate = guard[1]  # never done
    n_results = _n_results(opcode, operands)
    writes = {r for i in range(n_results) for r in _result(opcode, operands[i])}
    reads = {r for i in range(n_results, len(operands)) for r in _source(opcode, operands, i)}
    reads.update(x[0] for x in re.finditer(r"U?P\d", predicate))
    target = None
    if opcode.partition(".")[0] in _JUMPS:
        if found := _TARGET.search(operands[-1]):
            target = labels.get(found[1]) if found[1] else int(found[2], 16)
        if target is None and opcode.startswith("BRA"):
            raise ValueError(f"{name}: {text!r} at {address:#x} goes to an unknown place")
    return Instruction(
        address,
        predicate,
        opcode,
        operands,
        frozenset(reads),
        frozenset(writes),
        target,
        _control(upper),
    )


def _control(upper: int) -> Control:
    code = upper >> _CONTROL
    write, read = (code >> 5) & 7, (code >> 8) & 7
    return Control(
        stall=code & 15,
        yields=not code >> 4 & 1,
        write_barrier=None if write == _NO_BARRIER else write,
        read_barrier=None if read == _NO_BARRIER else read,
        waits=tuple(i for i in range(6) if code >> 11 + i & 1),
        reuse=code >> 17 & 15,
    )


def _depends(x: Instruction) -> bool:
    """Whether a branch has a condition among its operands, as `BRA UP0, target` has."""
    return any(_PREDICATE.fullmatch(part.lstrip("!")) for part in x.operands)


def _n_results(opcode: str, operands: tuple[str, ...]) -> int:
    """How many of the first operands are results."""
    operation = opcode.partition(".")[0]
    if operation in _NO_RESULT:
        return 0
    n = 0
    while n < len(operands) and _PREDICATE.fullmatch(operands[n]):
        n += 1
    if "SETP" in operation or operation in ("PLOP3", "UPLOP3", "FCHK"):
        return min(n, 2)
    if n == len(operands) or not _PLAIN.fullmatch(operands[n]):
        return n
    n += 1
    for _ in range(_MORE_RESULTS.get(operation, 0)):
        n += n < len(operands) and bool(_PREDICATE.fullmatch(operands[n]))
    return n


def _result(opcode: str, operand: str) -> Iterator[str]:
    if found := re.fullmatch(r"(U?P)(\d)", operand):
        yield found[0]
    elif (found := _PLAIN.fullmatch(operand)) and found[2] != "Z":
        yield from _run(found[1], int(found[2]), _n_written(opcode))


def _source(opcode: str, operands: tuple[str, ...], i: int) -> Iterator[str]:
    operand = operands[i]
    for kind, number, pair in _REGISTER.findall(operand):
        if kind in ("P", "UP"):
            yield kind + number
            continue
        n = 2 if pair else 1
        if operand.startswith("gdesc["):
            n = 4  # descriptors of both operands
        elif operand.startswith("desc[") and kind == "UR":
            n = 2
        elif "[" not in operand:
            n = max(n, _n_read(opcode, operands, i))
        yield from _run(kind, int(number), n)


def _run(kind: str, first: int, n: int) -> Iterator[str]:
    return (f"{kind}{first + i}" for i in range(n))


def _n_of_width(suffixes: list[str]) -> int:
    return 4 if "128" in suffixes else 2 if "64" in suffixes else 1


def _n_written(opcode: str) -> int:
    """Registers of a result."""
    operation, *suffixes = opcode.split(".")
    if operation in ("LDSM", "LDSM_T"):
        return int(suffixes[-1]) if suffixes[-1] in ("2", "4") else 1
    if operation in ("HMMA", "IMMA"):
        return 2 if "F16" in suffixes[1:2] else 4
    if operation == "HGMMA":
        return _n_accumulators(suffixes)
    if operation == "CS2R":
        return 1 if "32" in suffixes else 2
    if operation in ("IMAD", "UIMAD"):
        return 2 if "WIDE" in suffixes else 1
    if operation in ("DADD", "DMUL", "DFMA"):
        return 2
    if operation in ("SHF", "USHF"):  # 64 is the width of what is shifted
        return 1
    if operation in ("F2I", "F2F", "I2F"):  # the first type is the result's
        return 2 if suffixes and suffixes[0] in ("F64", "S64", "U64", "64") else 1
    return _n_of_width(suffixes)


def _n_read(opcode: str, operands: tuple[str, ...], i: int) -> int:
    """Registers of operand `i`, which is not an address."""
    operation, *suffixes = opcode.split(".")
    if operation == "HMMA":
        wide = suffixes[0] == "16816"
        return {1: 4 if wide else 2, 2: 2 if wide else 1}.get(i, 2 if suffixes[1] == "F16" else 4)
    if operation == "HGMMA":
        return 4 if i == 1 else _n_accumulators(suffixes)
    if operation == "STSM":
        return int(suffixes[-1]) if suffixes[-1] in ("2", "4") else 1
    if operation in _STORES or operation in ("RED", "REDG", "ATOM", "ATOMG", "ATOMS", "SYNCS"):
        return _n_of_width(suffixes)
    if operation in ("UBLKCP", "UBLKPF"):
        return 2
    if operation in ("IMAD", "UIMAD") and "WIDE" in suffixes:
        plain = [k for k, part in enumerate(operands) if not _PREDICATE.fullmatch(part)]
        return 2 if plain.index(i) == 3 else 1
    if operation in ("DADD", "DMUL", "DFMA", "DSETP"):
        return 2
    if operation == "I2F":
        return 2 if suffixes[-1] in ("S64", "U64") else 1
    if operation in ("IADD", "UIADD3", "UMOV", "MOV"):
        return 2 if "64" in suffixes else 1
    return 1


def _n_accumulators(suffixes: list[str]) -> int:
    n = int(suffixes[0].split("x")[1])  # of 64 x n elements, 128 threads have a part each
    return n // 4 if "F16" in suffixes[1:2] else n // 2
