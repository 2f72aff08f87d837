"""PTX text as instructions, for the emulator.

Registers get numbers; a name that is declared in a block of inline assembly belongs to that block.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tests.ptx.faults import UnknownInstruction

NBYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
PARAMETER_BASE = 1 << 58  # addresses of parameters begin here, one for each
PARAMETER_LOG = 16
SHARED_BASE = 1024  # Hopper keeps the first bytes of shared memory for itself


class Register(NamedTuple):
    number: int
    kind: str  # "pred", or the letter and bits of its declaration, such as "b32"
    name: str


class Constant(NamedTuple):
    bits: int
    is_float: bool = False  # bits of an FP32 number


class Special(NamedTuple):
    name: str


class Group(NamedTuple):
    parts: tuple


class Address(NamedTuple):
    base: object  # a Register or a Constant
    offset: int


class Coordinates(NamedTuple):
    base: object  # the address of a tensor's map
    parts: tuple


class Negated(NamedTuple):
    register: Register


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction.

    Attributes:
        number: its place in the program.
        guard: the predicate's register; None if there is none.
        is_negated: whether it is done where the predicate is false.
        opcode: its parts: ("ld", "global", "b32").
        operands: parsed operands.
        target: for branches, the number of the instruction they go to.
        text: as it was written, without the guard.
    """

    number: int
    guard: Register | None
    is_negated: bool
    opcode: tuple[str, ...]
    operands: tuple
    target: int | None
    text: str

    def __str__(self) -> str:
        return f"instruction {self.number}: {self.text[:90]}"


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        name: of the kernel.
        parameters: number and size in bytes, by their names.
        instructions: its instructions.
        registers: how many registers there are.
        shared_nbytes: bytes of shared memory that the text itself declares.
    """

    name: str
    parameters: dict[str, tuple[int, int]]
    instructions: tuple[Instruction, ...]
    registers: int
    shared_nbytes: int


@dataclass
class _Scope:
    names: dict[str, Register]
    labels: dict[str, int]
    outer: "_Scope | None"

    def find(self, table: str, name: str) -> object:
        scope: _Scope | None = self
        while scope is not None:
            if name in (found := getattr(scope, table)):
                return found[name]
            scope = scope.outer
        return None


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python from looking for garbage while many objects are made that all stay: it would
    look through all others again and again, which takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_TOKEN = re.compile(r"\s*(?:([{}])|(\$?[\w$]+):(?!:)|([^;{}][^;]*);)")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.\w(\d+)\b[^,()]*?([\w$]+)(?:\[(\d+)\])?\s*(?=[,)]|$)"
)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")


def parse(ptx: str, name: str | None = None) -> Program:
    """Reads PTX.

    Args:
        ptx: the text.
        name: the kernel; by default the only one.
    """
    text = re.sub(r"/\*.*?\*/", " ", ptx, flags=re.S)
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b[^\n]*", "", text, flags=re.M)
    wanted = re.escape(name) if name else r"[\w$]+"
    found = re.search(rf"\.entry\s+({wanted})\s*\(", text)
    if found is None:
        raise ValueError(f"there is no kernel {name or ''} in this PTX")
    head, rest = text[found.end() :].split("{", 1)
    parameters = {}
    declared = re.finditer(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.\w(\d+)\b[^,()]*?([\w$]+)(?:\[\d+\])?\s*(?=[,)]|$)", head
    )
    for i, part in enumerate(declared):
        parameters[part[2]] = (i, NBYTES[part[1]])
    body = rest[: _end_of_block(rest)]
    symbols, nbytes = _lay_out(text[: found.start()] + body)
    reader = _Reader(parameters, symbols)
    with uncollected():
        reader.read(body)
        instructions = tuple(reader.finish())
    return Program(found[1], parameters, instructions, reader.n_registers, nbytes)


def _end_of_block(text: str) -> int:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i
    raise ValueError("the kernel has no end")


def _lay_out(text: str) -> tuple[dict[str, int], int]:
    """Addresses of the arrays in shared memory, and the bytes that they take; the array without a
    size comes last."""
    addresses, end = {}, SHARED_BASE
    unsized = []
    for align, bits, name, size in _SHARED.findall(text):
        if re.search(rf"\.extern\s+\.shared[^;]*\b{re.escape(name)}\[\]", text):
            unsized.append((name, int(align or 1)))
            continue
        step = int(align or int(bits) // 8)
        end = -(-end // step) * step
        addresses[name] = end
        end += int(size or 1) * int(bits) // 8
    for name, align in unsized:
        addresses[name] = -(-end // max(align, 16)) * max(align, 16)
    return addresses, end - SHARED_BASE


class _Reader:
    def __init__(self, parameters: dict, symbols: dict[str, int]) -> None:
        self.parameters, self.symbols = parameters, symbols
        self.n_registers = 0
        self.scope = _Scope({}, {}, None)
        self.found: list[tuple[_Scope, str]] = []

    def read(self, body: str) -> None:
        at = 0
        while match := _TOKEN.match(body, at):
            at = match.end()
            brace, label, statement = match.groups()
            if brace == "{":
                self.scope = _Scope({}, {}, self.scope)
            elif brace == "}":
                assert self.scope.outer is not None
                self.scope = self.scope.outer
            elif label:
                self.scope.labels[label] = len(self.found)
            elif declared := _DECLARED.match(statement):
                self._declare(declared[1], declared[2])
            elif not statement.startswith("."):
                self.found.append((self.scope, " ".join(statement.split())))
        if body[at:].strip():
            raise ValueError(f"this is not PTX: {body[at : at + 80]!r}")

    def _declare(self, kind: str, names: str) -> None:
        for name in names.replace(" ", "").split(","):
            numbered = re.fullmatch(r"(.+)<(\d+)>", name)
            each = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
            for one in each:
                self.scope.names[one] = Register(self.n_registers, kind, one)
                self.n_registers += 1

    def finish(self) -> list[Instruction]:
        return [self._instruction(i, scope, text) for i, (scope, text) in enumerate(self.found)]

    def _instruction(self, number: int, scope: _Scope, text: str) -> Instruction:
        guard, is_negated = None, False
        if found := re.match(r"@(!?)([%\w$]+)\s+", text):
            guard, is_negated = scope.find("names", found[2]), bool(found[1])
            assert guard is not None, text
            text = text[found.end() :]
        opcode, _, rest = text.partition(" ")
        parts = tuple(opcode.replace("::", "_").split("."))
        target = None
        operands: tuple = ()
        if parts[0] == "bra":
            target = scope.find("labels", rest.strip())
            assert target is not None, text
        else:
            operands = tuple(self._operand(scope, part) for part in _split(rest))
        return Instruction(number, guard, is_negated, parts, operands, target, text)

    def _operand(self, scope: _Scope, text: str) -> object:
        if text.startswith("{"):
            return Group(tuple(self._operand(scope, part) for part in _split(text[1:-1])))
        if text.startswith("["):
            if "{" in text:
                base, numbers = re.fullmatch(r"\[\s*([%\w$]+)\s*,\s*\{(.*)\}\s*\]", text).groups()
                parts = tuple(self._operand(scope, part) for part in _split(numbers))
                return Coordinates(self._operand(scope, base), parts)
            base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text).groups()
            if base in self.parameters:
                return Special(f"{base}+{offset or 0}")
            return Address(self._operand(scope, base), int(offset or "0", 0))
        if "|" in text:  # two results
            return Group(tuple(self._operand(scope, part) for part in text.split("|")))
        if text.startswith("!"):
            return Negated(self._operand(scope, text[1:].strip()))
        register = scope.find("names", text)
        if register is not None:
            return register
        if text in self.parameters:
            return Constant(PARAMETER_BASE + (self.parameters[text][0] << PARAMETER_LOG))
        if text in self.symbols:
            return Constant(self.symbols[text])
        if text[:2] in ("0f", "0F"):
            return Constant(int(text[2:], 16), True)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Constant(int(text.rstrip("U"), 0))
        if text.startswith("%") or text in ("_", "WARP_SZ"):
            return Special(text)
        raise UnknownInstruction(f"operand {text!r}")


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]
