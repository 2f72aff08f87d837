"""The kernels that gather rows of packed tables against the slow coder, in Triton's interpreter (or
on a GPU, with TRITON_INTERPRET=0)."""

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from table_samples import dense_formats, named_tables, noise

from packhorse.kernels.tables import TableTensors, gather_rows, kernel_of, upload_table
from packhorse.reference.tables import encode_table
from packhorse.table_layout import TableFormat

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
TABLES = named_tables(9, 37)
SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
Rows = NDArray[np.unsignedinteger]


def tensors_of(rows: Rows, format: TableFormat) -> TableTensors:
    arrays = encode_table(rows, format)
    return upload_table(torch.from_numpy(arrays.rows.copy()).to(DEVICE), arrays[1:], format)


def check(rows: Rows, format: TableFormat, *, n_programs: int | None = None) -> None:
    """Rows come back in any order, with repetitions, whatever was in the output."""
    ids = np.array([len(rows) - 1, 0, 0, *range(len(rows))])
    kind = SIGNED[format.element_bits]
    out = torch.full((len(ids), format.n_columns), 0x5A, dtype=torch.from_numpy(kind([0])).dtype)
    out = out.to(DEVICE)
    wanted = torch.from_numpy(ids).to(DEVICE)
    gather_rows(tensors_of(rows, format), format, wanted, out, n_programs=n_programs)
    np.testing.assert_array_equal(out.cpu().numpy(), rows.view(kind)[ids])


@pytest.mark.parametrize("name", TABLES)
def test_rows_come_back(name: str) -> None:
    check(*TABLES[name])


@pytest.mark.parametrize("n_columns", [1, 8, 9, 130])
@pytest.mark.parametrize(
    "name",
    [
        "BF16 exponents of 4 bits",
        "F32 exponents of 3 bits",
        "raw, 8 bits",
        "bitmap and indices, 32 bits",
        "list and row values, 16 bits",
    ],
)
def test_odd_numbers_of_columns(name: str, n_columns: int) -> None:
    check(*named_tables(3, n_columns)[name])


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_all_packed_sizes(bits: int) -> None:
    rows = noise(bits, 2, 11)
    for format in list(dense_formats(bits, 11, 2))[::3]:
        check(rows, format)


def test_one_program_does_the_work_of_many() -> None:
    check(*named_tables(100, 37)["BF16 exponents of 3 bits"], n_programs=1)
    check(*named_tables(100, 37)["list and indices, 32 bits"], n_programs=3)


@pytest.mark.parametrize("n_columns", [12000, 24000])
def test_rows_too_long_to_travel_as_a_whole(n_columns: int) -> None:
    name = "BF16 exponents of 4 bits"
    rows, format = named_tables(3, n_columns)[name]
    staged = kernel_of(format, has_exceptions=True).constants["STAGED"]
    assert staged == (8192 if n_columns == 12000 else 0)
    check(rows, format, n_programs=2)


def test_exceptions_of_more_rows_than_are_put_at_once() -> None:
    rows, format = named_tables(1300, 37)["BF16 exponents of 3 bits"]
    assert kernel_of(format, has_exceptions=True).constants["BLOCK_ROWS"] < 512
    check(rows, format, n_programs=2)


def test_no_ids_need_no_launch() -> None:
    rows, format = TABLES["raw, 16 bits"]
    ids = torch.empty(0, dtype=torch.int64, device=DEVICE)
    out = torch.empty((0, 37), dtype=torch.int16, device=DEVICE)
    gather_rows(tensors_of(rows, format), format, ids, out)


def test_wrong_outputs_are_refused() -> None:
    rows, format = TABLES["raw, 16 bits"]
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="out has shape"):
        gather_rows(tensors_of(rows, format), format, ids, torch.empty(2, 36, dtype=torch.int16))
    with pytest.raises(TypeError, match="out has dtype"):
        gather_rows(tensors_of(rows, format), format, ids, torch.empty(2, 37))
    with pytest.raises(TypeError, match="ids has dtype"):
        gather_rows(tensors_of(rows, format), format, ids.int(), torch.empty(2, 37))
