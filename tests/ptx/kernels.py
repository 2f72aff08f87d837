"""The kernels of packed weights in the emulator: which are compiled, how they are run, and what
their results must be.

Compiling needs a process without Triton's interpreter: `python -m tests.ptx compile FOLDER`. This
module reads what that process wrote.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from tests.ptx.machine import Launch, run_grid
from tests.ptx.memory import GlobalMemory
from tests.ptx.program import Program, parse
from tests.ptx.values import from_bf16, to_bf16
from tests.samples.offline_kernels import run_offline

from packhorse.codecs import weights as codec
from packhorse.layout import WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"few": 90, "many": 80, "decode": 90}
DECODE_BLOCK = 2048


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX.

    Attributes:
        program: the kernel.
        shared_nbytes: shared memory of a program.
        n_warps: warps of a program.
        ptx: the text.
    """

    program: Program
    shared_nbytes: int
    n_warps: int
    ptx: str


@dataclass(frozen=True)
class Case:
    """A kernel on some data.

    Attributes:
        kind: "few"; "many", whose warps share the columns; or "decode".
        format: name of the format.
        division: fields of the division; none for "decode".
        n_rows, n_columns, n_tokens: sizes. For "decode" of some rows, tokens are rows.
        bias: whether there is a bias.
        early: whether the kernel starts before the one before it has ended.
        by_column: whether exceptions gather tokens that lie by columns.
        patterns: the weight has all 65,536 patterns of bits; it must be 64 x 1024.
    """

    kind: str
    format: str
    division: tuple[int, ...]
    n_rows: int
    n_columns: int
    n_tokens: int
    bias: bool = False
    early: bool = False
    by_column: bool = False
    patterns: bool = False

    @property
    def name(self) -> str:
        shape = f"{self.n_rows}x{self.n_columns} {self.n_tokens} tokens"
        names = ("bias", "early", "by_column", "patterns")
        extra = "".join(f" {name}" for name in names if getattr(self, name))
        return f"{self.kind} {self.format} {'/'.join(map(str, self.division))} {shape}{extra}"

    @property
    def n_steps(self) -> int:
        return WEIGHT_FORMATS[self.format].n_steps(self.n_columns)

    @property
    def is_even(self) -> bool:
        format = WEIGHT_FORMATS[self.format]
        turn = self.division[2] * (1 if self.kind == "many" else self.division[3])
        return self.n_steps % turn == 0 and self.n_columns == format.n_padded(self.n_columns)

    @property
    def loose(self) -> tuple[str, ...]:
        """Arguments that are not multiples of 16."""
        named = {"n_rows": self.n_rows, "n_columns": self.n_columns}
        always = {"n_tokens", "rows_ptr"} | ({"n_rows"} if self.kind == "decode" else set())
        return tuple(sorted(always | {name for name, n in named.items() if n % 16}))

    @property
    def block_steps(self) -> int:
        """Of the kernel that decodes."""
        return min(1 << (self.n_steps - 1).bit_length(), 512)

    def key(self) -> str:
        """What is compiled for it; other cases may share it."""
        if self.kind == "decode":
            sizes = (self.block_steps, self.n_tokens > 0)
        else:
            sizes = (*self.division, self.is_even, self.bias, self.early, self.by_column)
        return json.dumps([self.kind, self.format, *sizes, self.loose])


def compile_cases(cases: list[Case], folder: Path) -> None:
    """Compiles the kernels of some cases in another process, and writes their PTX to a folder."""
    path = folder / "cases.json"
    path.write_text(json.dumps([asdict(case) for case in cases]))
    run_offline(ROOT / "tests" / "ptx" / "compile_child.py", path)


@dataclass(frozen=True)
class Data:
    """The operands of a case.

    Attributes:
        elements: the weight's bits, rows x columns, uint16.
        arrays: the packed weight.
        tokens: bits, tokens x columns, uint16.
        bias: bits, rows, uint16.
    """

    elements: np.ndarray
    arrays: codec.WeightArrays
    tokens: np.ndarray
    bias: np.ndarray


def data_of(case: Case) -> Data:
    """The operands of a case."""
    return _data(case.format, case.n_rows, case.n_columns, max(case.n_tokens, 1), case.patterns)


@cache
def _data(format: str, n_rows: int, n_columns: int, n_tokens: int, patterns: bool) -> Data:
    """Weights as models have them, with some elements that are exceptions; or all patterns."""
    random = np.random.default_rng(n_rows * 7 + n_columns)
    scales = 0.02 * np.exp(0.4 * random.standard_normal((n_rows, 1)))
    values = (random.standard_normal((n_rows, n_columns)) * scales).astype(np.float32)
    elements = to_bf16(values)
    odd = [0x0000, 0x8000, 0x0001, 0x7000, 0x8080, 0x4000]
    places = random.integers(0, elements.size, len(odd))
    elements.reshape(-1)[places] = odd
    elements[n_rows - 1, n_columns - 1] = 0x4000
    elements[5 % n_rows, : min(7, n_columns)] = 0x3F80
    if patterns:
        # Rows of eight exponents with both signs, most of which one window holds; in the last rows,
        # elements of all exponents, most of which are exceptions.
        bits = np.arange(1 << 16, dtype=np.uint16)
        elements = (bits >> 1 | bits << 15).reshape(n_rows, n_columns)
        elements[-4:] = random.permuted(elements[::16].reshape(-1)).reshape(4, -1)
    tokens = to_bf16(random.standard_normal((n_tokens, n_columns)).astype(np.float32))
    bias = to_bf16(random.standard_normal(n_rows).astype(np.float32))
    arrays = codec.pack(elements, WEIGHT_FORMATS[format], threads=1)
    return Data(elements, arrays, tokens, bias)


class Emulation:
    """The compiled kernels of some cases.

    Args:
        cases: the cases.
        folder: for the PTX.
    """

    def __init__(self, cases: list[Case], folder: Path) -> None:
        compile_cases(cases, folder)
        self._texts = json.loads((folder / "compiled.json").read_text())
        self._known: dict[str, Compiled] = {}

    def compiled(self, key: str) -> Compiled:
        if key not in self._known:
            found = self._texts[key]
            self._known[key] = Compiled(
                parse(found["ptx"]), found["shared"], found["n_warps"], found["ptx"]
            )
        return self._known[key]

    def run(self, case: Case, changed: Compiled | None = None, **how: bool) -> np.ndarray:
        """Runs a case.

        Args:
            case: the case.
            changed: another program in the place of the case's own.
            how: `late`, `backwards` and `track`, as for `Launch`.

        Returns:
            The result: FP32, tokens x rows; for "decode" the bits, uint16, rows x columns.
        """
        compiled = changed or self.compiled(case.key())
        data = data_of(case)
        if case.kind == "decode":
            return _decode(case, compiled, data, how)
        return _multiply(case, compiled, data, how)

    def mutated(self, case: Case, ptx: str) -> Compiled:
        """The kernel of a case with another text."""
        return replace(self.compiled(case.key()), program=parse(ptx), ptx=ptx)


_ARRAYS = ("low_bytes", "high_bits", "first_exponents", "exception_starts", "exceptions")


def _multiply(case: Case, compiled: Compiled, data: Data, how: dict) -> np.ndarray:
    rows, tokens = case.division[:2]
    n_splits, n_tiles = case.division[4], case.division[6]
    memory = GlobalMemory()
    shape = (n_splits, case.n_tokens, case.n_rows)
    out = np.full(shape, np.nan, np.float32) if n_splits > 1 else np.full(shape, 0x7FC1, np.uint16)
    pointers = [memory.add("tokens", data.tokens, dependent=True)]
    pointers += [memory.add(name, getattr(data.arrays, name)) for name in _ARRAYS]
    pointers += [memory.add("bias", data.bias), memory.add("sums", out, dependent=True)]
    arguments = [*pointers, case.n_tokens, case.n_rows, case.n_columns, case.n_steps]
    if case.by_column:
        by_column = np.ascontiguousarray(data.tokens.T)
        arguments.append(memory.add("by column", by_column, dependent=True))
    arguments += [0, 0]
    n_blocks = -(-case.n_rows // (rows * n_tiles)) * -(-case.n_tokens // tokens)
    launch = Launch(
        arguments, (n_blocks, n_splits, 1), compiled.n_warps, compiled.shared_nbytes,
        dependent=case.early, **how,
    )  # fmt: skip
    run_grid(compiled.program, memory, launch)
    if n_splits > 1:
        return memory.read("sums", np.float32).reshape(shape).sum(0)
    return from_bf16(memory.read("sums", np.uint16)).reshape(shape[1:])


def _decode(case: Case, compiled: Compiled, data: Data, how: dict) -> np.ndarray:
    memory = GlobalMemory()
    arrays = {name: getattr(data.arrays, name) for name in _ARRAYS}
    numbers = arrays["exception_starts"]
    n_rows = case.n_rows
    if case.n_tokens:
        numbers = row_numbers(case)
        n_rows = len(numbers)
        arrays["first_exponents"] = arrays["first_exponents"][numbers]
    out = np.full((n_rows, case.n_columns), 0x7FC1, np.uint16)
    pointers = [memory.add(name, array) for name, array in arrays.items()]
    # Numbers of rows may begin anywhere, as those of a part of a batch do.
    pointers += [memory.add("rows", numbers, offset=8), memory.add("out", out)]
    arguments = [*pointers, n_rows, case.n_columns, case.n_steps, 0, 0]
    grid = (-(-n_rows // (DECODE_BLOCK // case.block_steps)), 1, 1)
    launch = Launch(arguments, grid, compiled.n_warps, compiled.shared_nbytes, **how)
    run_grid(compiled.program, memory, launch)
    return memory.read("out", np.uint16).reshape(out.shape)


def row_numbers(case: Case) -> np.ndarray:
    """Numbers of the rows that a case decodes: `n_tokens`, some of them twice."""
    return np.random.default_rng(1).integers(0, case.n_rows, case.n_tokens)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The product in FP64, and the project's bound of its error."""
    data = data_of(case)
    x = from_bf16(data.tokens).astype(np.float64)
    w = from_bf16(data.elements).astype(np.float64)
    product = x @ w.T
    if case.bias:
        product = product + from_bf16(data.bias)
    return product, np.abs(product) * 2.0**-8 + np.abs(x) @ np.abs(w).T * 2.0**-16


def is_right(case: Case, result: np.ndarray) -> bool:
    """Whether a result is right: a product by the bound, decoded elements in every bit."""
    if case.kind == "decode":
        elements = data_of(case).elements
        wanted = elements[row_numbers(case)] if case.n_tokens else elements
        return bool((result == wanted).all())
    product, bound = expected(case)
    return bool((np.abs(result - product) <= bound).all())


WAYS = tuple({"late": late, "backwards": back} for late in (True, False) for back in (False, True))
