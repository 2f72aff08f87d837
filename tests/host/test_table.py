"""Packed tables: rows come back bit for bit, from any source, and can be replaced."""

import copy
import pickle
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from host_samples import bf16_rows, equal_bits, ways_of_all_modes
from safetensors.torch import save_file
from table_samples import answer_from_table, sparse_rows

import packhorse
from packhorse.disk import Shelf
from packhorse.host import PackedTable, pack_table, plan_table
from packhorse.host.changed_rows import ChangedRows
from packhorse.table_layout import TableMode


def test_rows_come_back_in_the_framework_of_the_ids() -> None:
    rows = bf16_rows()
    table = pack_table(rows)
    ids = torch.tensor([[3, 3], [499, 0]])
    found = table.gather(ids)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.bfloat16
    assert equal_bits(found, rows[ids])
    as_array = table.gather([7, 8])
    assert as_array.dtype == ml_dtypes.bfloat16
    assert as_array.view(np.int16).tolist() == rows[7:9].view(torch.int16).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64])
def test_ids_may_have_any_integer_type(dtype: type) -> None:
    rows = bf16_rows(100)
    found = pack_table(rows).gather(np.array([5, 99], dtype))
    assert found.view(np.int16).tolist() == rows[[5, 99]].view(torch.int16).tolist()


def test_ids_may_be_what_take_and_index_select_know() -> None:
    rows = np.arange(80, dtype=np.float32).reshape(10, 8)
    table = pack_table(rows)
    for ids in (
        3,
        np.int64(3),
        [2, 9],
        (2, 9),
        range(4),
        [[1, 2], [3, 4]],
        [],
        np.arange(10)[::-2],
    ):
        np.testing.assert_array_equal(table.gather(ids), np.take(rows, np.array(ids, int), 0))
    for dtype in (torch.uint16, torch.uint64, torch.int32):
        found = table.gather(torch.tensor([[7], [0]]).to(dtype))
        np.testing.assert_array_equal(found, rows[[[7], [0]]])
    assert table.gather(torch.tensor(4)).tolist() == rows[4].tolist()
    with pytest.raises(IndexError, match="id 0 is out of range: the table has 0 rows"):
        pack_table(rows[:0]).update_([0], rows[:1])


def test_every_mode_gathers_and_updates() -> None:
    for rows, way in ways_of_all_modes():
        table = pack_table(rows, way=way)
        ids = np.random.default_rng(1).permutation(50)
        np.testing.assert_array_equal(table.gather(ids).view(np.uint8), rows[ids].view(np.uint8))
        changed = rows.copy()
        for _ in range(3):
            at = np.random.default_rng(2).choice(50, 11, replace=False)
            new = rows[np.random.default_rng(3).integers(0, 50, 11)]
            changed[at] = new
            table.update_(at, new)
            found = table.gather(np.arange(50))
            np.testing.assert_array_equal(found.view(np.uint8), changed.view(np.uint8))


def test_rows_that_do_not_fit_are_kept_plain_and_counted() -> None:
    rows = bf16_rows()
    table = pack_table(rows, will_change=True)
    assert table.way.format.mode is TableMode.DENSE
    new = torch.full((2, 384), 1e30, dtype=torch.bfloat16)
    new[1] = 0.05
    table.update_(torch.tensor([4, 5]), new)
    assert table.n_unpacked_rows == 1
    assert equal_bits(table.gather(torch.tensor([5, 4, 4])), new[[1, 0, 0]])
    assert equal_bits(table.gather(torch.tensor([3, 6])), rows[[3, 6]])
    table.update_(torch.tensor([4]), new[1:])
    assert table.n_unpacked_rows == 0
    assert equal_bits(table.gather(torch.tensor([4])), new[1:])


def test_the_source_is_not_changed_and_not_needed() -> None:
    rows = bf16_rows()
    kept = rows.clone()
    table = pack_table(rows)
    table.update_(torch.tensor([0]), torch.ones(1, 384, dtype=torch.bfloat16))
    assert equal_bits(rows, kept)
    rows.zero_()
    assert equal_bits(table.gather(torch.tensor([1])), kept[1:2])


def test_a_table_takes_less_memory_and_says_how_much() -> None:
    rows = bf16_rows(5000)
    table = pack_table(rows)
    assert rows.nbytes / table.nbytes > 1.37
    assert table.way.pulled[32] == 544
    assert table.fast_nbytes < 0.02 * rows.nbytes
    assert "1.38 times smaller" in repr(table) or "1.39 times smaller" in repr(table)
    assert len(table) == 5000


def test_few_rows_have_exceptions_where_rows_will_change() -> None:
    rows = bf16_rows(5000)
    fixed, changing = pack_table(rows), pack_table(rows, will_change=True)
    assert fixed.way.marked_share > 0.4
    assert changing.way.marked_share < 0.1
    assert changing.way.pulled[32] > fixed.way.pulled[32]
    ids = torch.arange(1000)
    for table in (fixed, changing):
        table.update_(ids, rows[1000:2000])
        assert equal_bits(table.gather(ids), rows[1000:2000])
    assert 0 < changing.n_unpacked_rows < 200 < fixed.n_unpacked_rows


def test_sources_of_all_kinds(tmp_path: Path) -> None:
    rows = bf16_rows()
    ids = torch.arange(0, 500, 7)
    plain, packed = tmp_path / "a.safetensors", tmp_path / "a.ph.safetensors"
    save_file({"table": rows}, plain)
    packhorse.torch.save_file({"table": rows}, packed)
    array = np.memmap(tmp_path / "a.bin", np.float32, "w+", shape=(500, 384))
    array[:] = rows.float().numpy()
    sources = [rows, rows[:, :], rows.float(), array, rows.T.contiguous().T]
    for path in (plain, packed):
        with packhorse.open_file(path, framework="pt") as file:
            sources.append(file.get_slice("table"))
            assert equal_bits(pack_table(sources.pop()).gather(ids), rows[ids])
    for source in sources:
        found = pack_table(source).gather(ids)
        assert torch.equal(found.float(), rows[ids].float())


def test_a_tensor_of_a_shelf_is_a_source(tmp_path: Path) -> None:
    rows = bf16_rows().float().numpy()
    with Shelf(tmp_path / "shelf") as shelf:
        shelf["table"] = rows
        table = pack_table(shelf["table"])
    np.testing.assert_array_equal(table.gather([499, 1]), rows[[499, 1]])


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    pack_table(np.zeros((70_000, 128), np.float32), progress=lambda *step: seen.append(step))
    assert seen == [(32768, 70_000), (65536, 70_000), (70_000, 70_000)]


def test_tables_without_rows() -> None:
    table = pack_table(np.empty((0, 5), np.float32))
    assert table.gather(np.empty(0, np.int64)).shape == (0, 5)
    with pytest.raises(IndexError, match="id 0"):
        table.gather([0])
    assert pack_table(torch.zeros(3, 2)).gather([]).shape == (0, 2)


def test_out_receives_the_rows() -> None:
    rows = bf16_rows()
    table = pack_table(rows)
    out = torch.zeros(2, 384, dtype=torch.bfloat16)
    assert table.gather(torch.tensor([1, 2]), out) is out
    assert equal_bits(out, rows[1:3])
    with pytest.raises(ValueError, match="it must be"):
        table.gather(torch.tensor([1]), out)
    with pytest.raises(TypeError, match="contiguous"):
        table.gather(torch.tensor([1, 2]), torch.zeros(384, 2, dtype=torch.bfloat16).T)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([500], IndexError, "id 500, number 0 of 1, is out of range: the table has 500 rows"),
        ([3, -1], IndexError, "id -1, number 1 of 2"),
        (np.array([1 << 63], np.uint64), IndexError, "out of range"),
        (np.array([1.0]), TypeError, "ids must be integers, not float64"),
        (torch.tensor([True]), TypeError, "ids must be integers, not bool"),
        ([1, 1 << 70], IndexError, "id 1180591620717411303424 is out of range"),
        ([1, 1 << 63], IndexError, "id 9223372036854775808 is out of range"),
        ([True, False], TypeError, r"not bool; mask\.nonzero\(\) has the numbers of a mask"),
        (slice(0, 3), TypeError, "ids must be integers, not slice"),
        ([[1], [2, 3]], TypeError, "lists of different lengths"),
        (np.array([1, 2], object), TypeError, "ids must be integers, not object"),
        (["a"], TypeError, "ids must be integers"),
    ],
)
def test_wrong_ids_are_refused(ids: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pack_table(bf16_rows()).gather(ids)


@pytest.mark.parametrize(
    ("ids", "rows", "error", "words"),
    [
        ([500], bf16_rows(1), IndexError, "id 500 is out of range"),
        ([-1], bf16_rows(1), IndexError, "id -1 is out of range"),
        ([1, 1], bf16_rows(2), ValueError, "an id is there twice"),
        ([1], bf16_rows(2), ValueError, r"shape \(2, 384\); for these ids it must be \(1, 384\)"),
        ([1], bf16_rows(1, 5), ValueError, r"shape \(1, 5\)"),
        ([1], bf16_rows(1).float(), TypeError, "rows are F32; the table is BF16"),
        ([1], [1.0] * 384, TypeError, "not from list"),
    ],
)
def test_wrong_updates_are_refused(
    ids: object, rows: object, error: type[Exception], words: str
) -> None:
    table = pack_table(bf16_rows())
    with pytest.raises(error, match=words):
        table.update_(ids, rows)
    assert equal_bits(table.gather(torch.arange(500)), bf16_rows())


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (5, TypeError, "not from int"),
        (np.zeros(5), TypeError, r"rows and columns, not shape \(5,\)"),
        (np.zeros((5, 0)), ValueError, "1 to 65536 columns, not 0"),
        (np.zeros((2, 65537), np.uint8), ValueError, "not 65537"),
        (np.zeros((2, 2), complex), TypeError, "no dtype for complex128"),
        (np.zeros((2, 2), ml_dtypes.float4_e2m1fn), TypeError, "8, 16, 32 or 64 bits, not F4"),
    ],
)
def test_wrong_sources_are_refused(source: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pack_table(source)


def test_a_way_of_another_table_is_refused() -> None:
    with pytest.raises(ValueError, match="other columns or elements"):
        pack_table(bf16_rows(), way=plan_table(bf16_rows(5, 7))[0])
    with pytest.raises(TypeError, match="way must be one of those of plan_table, not str"):
        pack_table(bf16_rows(), way="raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="granule is 64"):
        pack_table(bf16_rows(), granule=64)


@pytest.mark.parametrize("shared", [False, True])
def test_a_deep_copy_is_a_table_of_its_own(shared: bool) -> None:
    rows, big = bf16_rows(), torch.full((1, 384), 1e30, dtype=torch.bfloat16)
    table = pack_table(rows, shared=shared)
    table.update_([7], big)
    copied = copy.deepcopy([table, table])
    assert copied[0] is copied[1]
    table.update_([7, 8], rows[:2])
    rows[7] = big
    assert equal_bits(copied[0].gather(torch.arange(500)), rows)
    assert copied[0].memory.is_shared == table.memory.is_shared


def test_a_forked_worker_gathers() -> None:
    script = """
import os, numpy as np
from packhorse.host import pack_table
rows = np.tile(np.arange(64, dtype=np.float32), (100, 1))
table = pack_table(rows, shared={shared})
child = os.fork()
if child == 0:
    assert (table.gather(np.arange(50)) == rows[:50]).all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    for shared in (False, True):
        subprocess.run([sys.executable, "-c", script.format(shared=shared)], check=True, timeout=60)


def test_a_spawned_worker_maps_the_memory() -> None:
    """It sees rows that are replaced in place, and those that lay beside the table before."""
    rows = bf16_rows().view(torch.int16).numpy()
    table, context = pack_table(rows.view(ml_dtypes.bfloat16), shared=True), get_context("spawn")
    rows[3] = 0x7000  # does not fit
    table.update_([3], rows[3:4].view(ml_dtypes.bfloat16))
    ours, theirs = context.Pipe()
    worker = context.Process(target=answer_from_table, args=(theirs, table))
    worker.start()
    one, other = np.flatnonzero(~table._is_marked(np.arange(500)))[-2:]
    for _ in range(2):
        ours.send(np.arange(500))
        np.testing.assert_array_equal(ours.recv(), rows)
        rows[one] = rows[other]
        table.update_([one], rows[[other]].view(ml_dtypes.bfloat16))
        assert table.n_unpacked_rows == 1
    ours.send(None)
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize("shared", [False, True])
def test_tables_are_pickled_for_spawned_workers_only(shared: bool) -> None:
    table = pack_table(bf16_rows(), shared=shared)
    with pytest.raises(TypeError, match="is not pickled, except for a process that is being"):
        pickle.dumps(table)
    if not shared:
        worker = get_context("spawn").Process(target=len, args=(table,))
        with pytest.raises(TypeError, match=r"pack_table\(\.\.\., shared=True\)"):
            worker.start()


def test_tables_are_described() -> None:
    assert "raw" in repr(pack_table(np.random.default_rng(0).random((9, 9))))
    assert isinstance(pack_table(sparse_rows(32, 90, 500).view(np.float32)), PackedTable)


def test_a_table_that_others_share_is_not_packed_again_in_place() -> None:
    table = pack_table(bf16_rows(), shared=True)
    table.repack_()
    table.update_(torch.tensor([4]), torch.full((1, 384), 1e30, dtype=torch.bfloat16))
    if table.memory.is_shared:
        with pytest.raises(ValueError, match="other processes may share the packed rows"):
            table.repack_()


def test_changed_rows_are_those_kept_last() -> None:
    """Against a dict, while they become many and few again."""
    rng = np.random.default_rng(5)
    kept, expected = ChangedRows(300, 3), dict[int, bytes]()
    for step in range(200):
        at = rng.choice(300, rng.integers(0, 12), replace=False)
        if step % 50 < 35:
            rows = rng.integers(0, 256, (len(at), 3), np.uint8)
            kept.keep(at, rows)
            expected |= dict(zip(at.tolist(), map(bytes, rows), strict=True))
        else:
            gone = [expected.pop(number, b"") for number in at.tolist()]
            assert kept.drop(at) == any(gone)
        numbers, rows = kept.in_order()
        assert numbers.tolist() == sorted(expected)
        assert [bytes(row) for row in rows] == [expected[number] for number in sorted(expected)]
        found = np.zeros((300, 3), np.uint8)
        kept.put_into(np.arange(300), found)
        assert found.tobytes() == b"".join(expected.get(i, bytes(3)) for i in range(300))
        assert kept.fast_nbytes == 11 * len(kept) == 11 * len(expected)
        assert kept.nbytes <= 4 * kept.fast_nbytes + 600 * (len(kept) > 0)
    kept.drop(np.arange(300))
    assert kept.nbytes == 0


def test_a_table_may_take_over_another_one() -> None:
    table, other = pack_table(bf16_rows()), pack_table(bf16_rows() * 2)
    held = table
    table.become_(other)
    assert equal_bits(held.gather(torch.arange(500)), bf16_rows() * 2)
    assert held.n_updates == 1
    with pytest.raises(ValueError, match=r"the other table is \(500, 384\) F32"):
        table.become_(pack_table(bf16_rows().float()))
