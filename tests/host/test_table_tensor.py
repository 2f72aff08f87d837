"""Packed tables as tensors of PyTorch: rows come out as from the plain tensor, and everything that
would need the whole matrix is refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import packhorse
from packhorse.host import PackedTable, TableTensor, pack_table

N_ROWS, N_COLUMNS = 500, 384
IDS = torch.tensor([1, 499, 1])


@pytest.fixture(scope="module")
def plain() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (0.05 * torch.randn(N_ROWS, N_COLUMNS, generator=generator)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def x(plain: Tensor) -> TableTensor:
    return pack_table(plain).as_tensor()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_it_looks_like_the_plain_tensor(x: TableTensor, plain: Tensor) -> None:
    for name in ("shape", "dtype", "device", "layout", "nbytes", "requires_grad", "is_cuda"):
        assert getattr(x, name) == getattr(plain, name)
    assert (len(x), x.size(1), x.numel(), x.dim()) == (500, 384, 192_000, 2)
    assert x.packed_nbytes == x.table.nbytes < 0.77 * x.nbytes
    assert isinstance(x.table, PackedTable)
    assert repr(x) == str(x) == f"{x}" == f"TableTensor({x.table!r}, device='cpu')"


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, IDS),
    "index_select, int32": lambda x: torch.index_select(x, -2, IDS.int()),
    "numbers": lambda x: x[IDS],
    "numbers of two dimensions": lambda x: x[torch.tensor([[1, 2], [3, -4]])],
    "a number in a tensor": lambda x: x[torch.tensor(3)],
    "a list": lambda x: x[[5, -1]],
    "no numbers": lambda x: x[[]],
    "an array": lambda x: x[np.array([3, 4])],
    "a mask": lambda x: x[torch.arange(N_ROWS) > 490],
    "a list of a mask": lambda x: x[[True] * N_ROWS],
    "numbers, some columns": lambda x: x[IDS, 3:7],
    "a slice": lambda x: x[2:9],
    "a slice with a step": lambda x: x[:40:7],
    "a slice, some columns": lambda x: x[-3:, ::100],
    "a slice, a column": lambda x: x[2:9, 5],
    "an empty slice": lambda x: x[7:2],
    "a row": lambda x: x[-1],
    "a row by NumPy's number": lambda x: x[np.int64(7)],
    "an element": lambda x: x[3, 5],
    "embedding": lambda x: F.embedding(torch.tensor([[1, 2]]), x, padding_idx=2),
    "index by the operator": lambda x: torch.ops.aten.index(x, [IDS]),
    "after detach": lambda x: x.detach()[IDS],
    "after clone": lambda x: x.clone()[IDS],
    "after deepcopy": lambda x: copy.deepcopy(x)[IDS],
    "after to": lambda x: x.to("cpu", copy=True)[IDS],
    "after a slice of all": lambda x: x[:][IDS],
    "in inference mode": lambda x: torch.inference_mode()(lambda: x[IDS])(),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_those_of_the_plain_tensor(name: str, x: TableTensor, plain: Tensor) -> None:
    found = TAKEN[name](x)
    assert not isinstance(found, TableTensor)
    assert same_bits(found, TAKEN[name](plain))


def test_rows_are_written_to_out(x: TableTensor, plain: Tensor) -> None:
    rows = torch.zeros(3, N_COLUMNS, dtype=torch.bfloat16)
    for out in (rows, rows.T.contiguous().T, torch.empty(0, dtype=torch.bfloat16)):
        assert torch.index_select(x, 0, IDS, out=out) is out
        assert same_bits(out, plain[IDS])
    with pytest.raises(ValueError, match=r"must be torch\.bfloat16 \(3, 384\)"):
        torch.index_select(x, 0, IDS, out=rows[:2])


def test_all_rows_are_unpacked_and_compared(x: TableTensor, plain: Tensor) -> None:
    assert same_bits(x.unpack(), plain)
    assert torch.equal(x, plain)
    assert torch.equal(plain, x)
    other = plain.clone()
    other[-1, -1] += 1
    assert not torch.equal(x, other)
    assert not torch.equal(x, plain[1:])
    assert not torch.equal(x, plain.float())
    assert torch.equal(pack_table(torch.zeros(0, 3)).as_tensor(), torch.zeros(0, 3))


def test_the_default_device_does_not_matter(x: TableTensor, plain: Tensor) -> None:
    with torch.device("meta"):
        found = [x[3:5], x[3], x[[3, 4]], x.unpack()]
    for rows, expected in zip(found, (plain[3:5], plain[3], plain[3:5], plain), strict=True):
        assert same_bits(rows, expected)


def test_rows_give_gradients_to_what_they_meet(x: TableTensor) -> None:
    weight = torch.ones(N_COLUMNS, 2, requires_grad=True)
    (x[IDS].float() @ weight).sum().backward()
    assert weight.grad is not None


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a sum": (lambda x: x.sum(), r"aten\.sum"),
    "arithmetic": (lambda x: x + 1, r"aten\.add\.Tensor would need all of a packed table of 500"),
    "a product": (lambda x: x @ x.T, "384,000 bytes when it is decoded"),
    "in place": (lambda x: x.add_(1), r"x\[ids\]; x\.unpack\(\) decodes all"),
    "as output": (lambda x: torch.add(torch.ones(1), 1, out=x), "would need all"),
    "joined": (lambda x: torch.cat([torch.ones(1), x]), "would need all"),
    "another dtype": (lambda x: x.float(), r"a copy as torch\.float32 would need all"),
    "another device": (lambda x: x.to("meta"), r"stays in memory of the host: table\.as_tensor"),
    "columns": (lambda x: x.index_select(1, IDS), "a selection of columns would need all"),
    "columns by a slice": (lambda x: x[..., 3], "would need all"),
    "pairs": (lambda x: x[IDS, IDS], "named in pairs"),
    "pairs by the operator": (lambda x: torch.ops.aten.index(x, [IDS, IDS]), "named in pairs"),
    "row by row": (lambda x: next(iter(x)), "would need all"),
    "NumPy": (lambda x: np.asarray(x), "would need all"),
    "numpy()": (lambda x: x.numpy(), "would need all"),
    "tolist()": (lambda x: x.tolist(), "would need all"),
    "an address": (lambda x: x.data_ptr(), "would need all"),
    "DLPack": (lambda x: np.from_dlpack(x), "would need all"),
    "pinning": (lambda x: x.pin_memory(), r"pack_table\(\.\.\., device='cuda'\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_matrix_is_refused(name: str, x: TableTensor) -> None:
    call, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words):
        call(x)


MISTAKES: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "no such row": (lambda x: x[500], IndexError, "row 500 of a packed table of 500 rows"),
    "no such number": (lambda x: x[[3, -501]], IndexError, "id -501, number 1 of 2"),
    "negative for index_select": (lambda x: x.index_select(0, -IDS), IndexError, "id -1"),
    "fractions": (lambda x: x[torch.ones(2)], TypeError, "must be integers"),
    "a short mask": (lambda x: x[[True, False]], IndexError, r"vector of 500, not torch\.bool"),
    "a step back": (lambda x: x[5:2:-1], ValueError, "greater than zero"),
    "assignment": (lambda x: x.__setitem__(3, 1.0), TypeError, r"table\.update_\(ids, rows\)"),
    "a write to rows": (lambda x: x[2:3].zero_(), RuntimeError, r"table\.update_\(ids, values\)"),
    "gradients": (lambda x: x.requires_grad_(), RuntimeError, "takes no gradients"),
    "a parameter": (lambda x: torch.nn.Parameter(x), RuntimeError, "takes no gradients"),
    "gradients, set": (lambda x: setattr(x, "requires_grad", True), RuntimeError, "no gradients"),
    "as numbers": (lambda x: torch.ones(2)[x], TypeError, "numbers of rows must be a plain tensor"),
    "a pickle": (lambda x: pickle.dumps(x), TypeError, "is not pickled, except for a process"),
    "packing it": (lambda x: packhorse.torch.compress(x), TypeError, "no memory of its own"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, x: TableTensor) -> None:
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call(x)


def test_only_devices_and_dtypes_of_pytorch_that_gather() -> None:
    table = pack_table(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="go to the CPU or to a CUDA device, not to meta"):
        table.as_tensor("meta")
    assert table.as_tensor("cuda").is_cuda  # so loaders gather in the main process
    odd = pack_table(np.zeros((2, 2), ml_dtypes.bfloat16))
    odd.dtype = "F8_E3M4"
    with pytest.raises(packhorse.CompatibilityError, match="has no dtype for F8_E3M4"):
        odd.as_tensor()


def test_changed_rows_are_seen_by_all_tensors_of_a_table(plain: Tensor) -> None:
    table = pack_table(plain)
    first, second = table.as_tensor(), table.as_tensor().clone()
    table.update_([3], plain[7:8])
    assert same_bits(first[3], plain[7])
    assert same_bits(second[3], plain[7])


@pytest.mark.parametrize("shared", [False, True])
def test_forked_workers_take_rows(shared: bool, plain: Tensor) -> None:
    x = pack_table(plain, shared=shared).as_tensor()
    assert x.is_shared()
    assert x.share_memory_() is x
    data = TensorDataset(x, torch.arange(N_ROWS))
    loader: DataLoader[Any] = DataLoader(data, 200, num_workers=1, multiprocessing_context="fork")
    for rows, numbers in loader:
        assert same_bits(rows, plain[numbers])


def test_memory_that_workers_do_not_get_is_named(
    plain: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pack_table(plain)
    monkeypatch.setattr(table.memory, "_pid", 1)
    x = table.as_tensor()
    assert not x.is_shared()
    with pytest.raises(RuntimeError, match="shared=True"):
        x.share_memory_()


def test_tables_load_torch_at_first_use_only() -> None:
    code = (
        "import sys, numpy, packhorse.host as host\n"
        "table = host.pack_table(numpy.zeros((3, 3)))\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "for use in (table.as_tensor, lambda: host.TableTensor):\n"
        "    try: use()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'packhorse[torch]'") == 2


def test_narrow_negative_ids_count_from_the_end() -> None:
    plain = torch.arange(300, dtype=torch.float32)[:, None].repeat(1, 8)
    x = pack_table(plain).as_tensor()
    ids = np.array([-1, -100, 5], np.int8)
    assert same_bits(x[ids], plain[ids])


def test_indices_that_are_too_many_or_none() -> None:
    x = pack_table(torch.zeros(300, 8)).as_tensor()
    assert x[()].shape == (300, 8)
    with pytest.raises(IndexError, match="too many indices"):
        x[torch.tensor([1]), :2, :1]


def test_columns_of_a_large_table_are_refused() -> None:
    x = pack_table(torch.zeros(70_000, 8)).as_tensor()
    assert x[:100, 3].shape == (100,)
    with pytest.raises(NotImplementedError, match="columns of 70000 rows"):
        x[:, 3]
