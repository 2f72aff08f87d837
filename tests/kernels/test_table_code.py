"""The machine code of the kernels that gather packed rows, and their PTX in the emulator: wide
loads, no spills, few instructions, and the right rows in every order of warps.

tests/ptx/README.md says what the emulator notices: also a missing barrier between warps that pass
each other values. Compiling takes another process, because Triton's interpreter is on in this one.
"""

from typing import Any

import numpy as np
import pytest
from table_samples import float_rows, named_tables
from tests.ptx.faults import Fault
from tests.ptx.machine import Launch, run_grid
from tests.ptx.memory import GlobalMemory
from tests.ptx.program import parse
from tests.samples.offline_kernels import compile_offline

from benchmarks.data.table_formats import FORMATS
from packhorse.host.device_cost import instructions_of
from packhorse.kernels.tables import kernel_of
from packhorse.reference.tables import encode_table
from packhorse.table_layout import TableFormat

LIMITS = {  # of Triton 3.6, too
    "BF16, codes of 4 bits": 22.0,
    "FP32, codes of 4 bits": 29.0,
    "BF16, three codes in 10 bits": 36.0,
    "bitmap and indices": 30.0,
    "list and row value": 5.0,
}
EMULATED = (
    "BF16 exponents of 4 bits",
    "BF16 exponents in triples",
    "bitmap and indices, 32 bits",
    "bitmap and row values, 16 bits",
    "list and elements, 32 bits",
)
WIDE = ("BF16, codes of 4 bits", "BF16, three codes in 10 bits")  # of 384 columns
N_ROWS, N_COLUMNS = 9, 37
SECTOR, LINE = 32, 128
PROGRAM = """
import json
from dataclasses import asdict
from benchmarks.data.table_formats import FORMATS
from benchmarks.gpu.table_code import compile_put, compile_table, counts
from tests.samples.table_samples import named_tables
tables = named_tables({n_rows}, {n_columns})
formats = [tables[name][1] for name in {names!r}] + [FORMATS[name] for name in {wide!r}]
found = [compile_table(format, True, 90) for format in formats] + [compile_put(32, 90)]
kernels = [[each.asm["ptx"], each.metadata.shared, each.metadata.num_warps] for each in found]
print(json.dumps([[asdict(row) for row in counts(brief=True)], kernels]))
"""
Kernel = tuple[str, int, int]  # PTX, bytes of shared memory, warps
Rows = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def offline() -> list[Any]:
    program = PROGRAM.format(n_rows=N_ROWS, n_columns=N_COLUMNS, names=EMULATED, wide=WIDE)
    return compile_offline(program)


@pytest.fixture
def counts(offline: list[Any]) -> list[dict[str, Any]]:
    return offline[0]  # type: ignore[no-any-return]


@pytest.fixture
def compiled(offline: list[Any]) -> dict[str, Kernel]:
    return dict(zip((*EMULATED, *WIDE, "put"), map(tuple, offline[1]), strict=True))


def test_each_kernel_takes_few_instructions_and_spills_nothing(
    counts: list[dict[str, Any]],
) -> None:
    assert [row["table"] for row in counts if row["architecture"] == 90] == list(LIMITS)
    assert [row["table"] for row in counts if row["architecture"] == 80] == list(LIMITS)[:1]
    for row in counts:
        assert 1 < row["instructions"] <= LIMITS[row["table"]], row
        assert row["spills"] == 0, row
        assert row["registers"] <= 128, row  # 512 threads have no more


def test_dense_rows_are_loaded_16_bytes_at_a_time(counts: list[dict[str, Any]]) -> None:
    for row in counts:
        if "codes of 4 bits" in row["table"]:
            # Whole rows from the host, and the planes of staged ones.
            assert row["wide_loads"] >= 4, row
            assert row["byte_loads"] == 0, row


def test_the_model_of_time_knows_the_instructions(counts: list[dict[str, Any]]) -> None:
    for row in counts:
        assert row["instructions"] <= instructions_of(FORMATS[row["table"]]), row


# In the emulator.


def emulate(
    kernel: Kernel,
    rows: Rows,
    format: TableFormat,
    *,
    text: str = "",
    memory: GlobalMemory | None = None,
    **how: bool,
) -> Rows:
    """Gathers rows, some twice, by one program; the packed rows are the first array."""
    arrays = encode_table(rows, format)
    ids = np.array([*range(len(rows))[::-1], 3, 3], np.int64)
    memory, found = memory or GlobalMemory(), kernel_of(format, True)
    elements = np.frombuffer(arrays.exception_elements.tobytes(), rows.dtype)
    held = (*arrays[:5], elements, np.array(format.values, rows.dtype))
    pointers = [memory.add(str(i), np.asarray(array)) for i, array in enumerate(held)]
    pointers.append(memory.add("ids", ids, offset=8))
    out = np.full((len(ids), format.n_columns), 0x5A, rows.dtype)
    pointers.append(memory.add("out", out))
    arguments = [*pointers, len(ids), 0, *(number & 0xFFFFFFFF for number in found.numbers)]
    exchanged = pointers[-1], out.nbytes
    if "STAGED" in found.constants:
        nbytes = 4 * found.constants["BLOCK_ROWS"] * max(found.constants["STAGED"], 1)
        arguments.append(memory.add("scratch", np.zeros(nbytes, np.uint8)))
        exchanged = arguments[-1], nbytes
    launch = Launch([*arguments, 0, 0], (1, 1, 1), kernel[2], kernel[1], exchanged=exchanged, **how)
    run_grid(parse(text or kernel[0]), memory, launch)
    assert (memory.read("out", rows.dtype.type).reshape(out.shape) == rows[ids]).all()
    return ids


@pytest.mark.parametrize("name", EMULATED)
def test_rows_are_right_in_every_order_of_warps(compiled: dict[str, Kernel], name: str) -> None:
    rows, format = named_tables(N_ROWS, N_COLUMNS)[name]
    for backwards in (False, True):
        emulate(compiled[name], rows, format, backwards=backwards)


def test_missing_barriers_are_noticed(compiled: dict[str, Kernel]) -> None:
    name = "bitmap and indices, 32 bits"
    rows, format = named_tables(N_ROWS, N_COLUMNS)[name]
    text = compiled[name][0]
    before, place, after = text.partition("st.global")  # of the rows that travelled as a whole
    assert place
    head, barrier, rest = (place + after).partition("bar.sync")
    with pytest.raises(Fault, match="that nothing wrote"):
        emulate(compiled[name], rows, format, text=before + head + "// " + barrier + rest)


class CountingMemory(GlobalMemory):
    """Counts what warps ask of the first array: sectors, and lines, each of which is a request."""

    def __init__(self) -> None:
        super().__init__()
        self.n_sectors = self.n_lines = 0

    def load(self, address: Rows, n: int, waited: Rows | None) -> Rows:
        mine = address[address >> 36 == 1]
        self.n_sectors += len(np.unique(mine // SECTOR))
        self.n_lines += len(np.unique(mine // LINE))
        return super().load(address, n, waited)


@pytest.mark.parametrize(("name", "n_again", "least"), [(WIDE[0], 0, 100), (WIDE[1], 1, 75)])
def test_each_sector_is_asked_for_once_in_wide_requests(
    compiled: dict[str, Kernel], name: str, n_again: int, least: int
) -> None:
    """Otherwise a link would carry bytes twice, or many small packets. The sector with the highest
    bits of triples is asked for by two loads; the second one finds it in the cache."""
    format, memory = FORMATS[name], CountingMemory()
    ids = emulate(compiled[name], float_rows("BF16", 20, 384), format, memory=memory)
    assert memory.n_sectors <= len(ids) * (format.stride // SECTOR + n_again)
    assert memory.n_sectors * SECTOR / memory.n_lines > least


def test_changed_rows_are_put_where_a_header_says(compiled: dict[str, Kernel]) -> None:
    ptx, shared_nbytes, n_warps = compiled["put"]
    numbers = np.array([0, 3, 4, 11, 70], np.int64)
    rows = np.arange(5 * N_COLUMNS, dtype=np.int32).reshape(5, N_COLUMNS) + 1000
    ids = np.array([4, 5, 70, 0, 71, 11, 4, 3, 2], np.int64)
    for n_changed in (5, 2, 0):
        memory = GlobalMemory()
        places = memory.add("numbers", numbers), memory.add("rows", rows)
        head = memory.add("head", np.array([n_changed, *places], np.int64))
        out = np.zeros((len(ids), N_COLUMNS), np.int32)
        arguments = [head, memory.add("ids", ids, offset=8), memory.add("out", out)]
        arguments += [len(ids), N_COLUMNS, 0, 0]
        run_grid(parse(ptx), memory, Launch(arguments, (1, 1, 1), n_warps, shared_nbytes))
        for row, number in enumerate(ids):
            if number in numbers[:n_changed]:
                out[row] = rows[list(numbers).index(number)]
        assert (memory.read("out", np.int32).reshape(out.shape) == out).all()
