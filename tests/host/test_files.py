"""Files of packed tables: rows come back, damage is named, and nothing half-written stays."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from table_samples import named_tables

import packhorse
from packhorse.codecs.table_plan import TableWay
from packhorse.errors import (
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.host import PackedTable, load_table, load_tables, pack_table, save_tables

KINDS = {8: np.uint8, 16: np.uint16, 32: np.float32, 64: np.int64}
ALL = {
    name: (rows.view(KINDS[format.element_bits]), TableWay(format, name, {}, 0.0, 0.0))
    for name, (rows, format) in named_tables(50, 41).items()
}


def bf16_rows(n_rows: int = 3000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (0.05 * torch.randn(n_rows, 384, generator=generator)).bfloat16()


def same(found: NDArray[np.generic], expected: NDArray[np.generic]) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def all_tables() -> dict[str, PackedTable]:
    return {name: pack_table(rows, way=way) for name, (rows, way) in ALL.items()}


def test_tables_of_every_mode_come_back(all_tables: dict[str, PackedTable], tmp_path: Path) -> None:
    path = tmp_path / "tables.safetensors"
    save_tables(all_tables, path, metadata={"model": "x"})
    ids = np.arange(50)[::-1]
    found = load_tables(path)
    assert list(found) == sorted(ALL)
    for name, (rows, _) in ALL.items():
        assert same(found[name].gather(ids), rows[ids]), name
        assert found[name].way.format == all_tables[name].way.format
    with safe_open(path, "np") as file:  # the safetensors library reads it
        assert file.metadata() == {"model": "x"}
        assert len(list(file.keys())) == 7 * len(ALL)


def test_a_loaded_table_says_what_it_is(tmp_path: Path) -> None:
    words = np.zeros((500, 900), np.float32)
    rng = np.random.default_rng(1)
    for row in words:
        row[rng.choice(900, 1 + rng.poisson(4), replace=False)] = 0.25
    tables = {"bf16": pack_table(bf16_rows()), "words": pack_table(words)}
    save_tables(tables, tmp_path / "a.safetensors")
    for name, table in load_tables(tmp_path / "a.safetensors").items():
        expected = tables[name].way
        assert table.way.words == expected.words
        assert table.way.pulled == pytest.approx(expected.pulled, rel=0.01)
        assert table.way.marked_share == pytest.approx(expected.marked_share, abs=0.02)
        assert repr(table) == repr(tables[name])


@pytest.mark.parametrize("threads", [1, 3])
def test_changed_rows_are_packed_when_a_table_is_saved(tmp_path: Path, threads: int) -> None:
    rows = bf16_rows()
    table = pack_table(rows)
    new = bf16_rows(400).flip(0)
    new[7, 3] = 1e30
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:400]
    table.update_(ids, new)
    rows = rows.clone()
    rows[ids] = new
    kept = table.n_unpacked_rows
    assert kept > 100
    seen: list[tuple[int, int]] = []
    save_tables({"t": table}, tmp_path / "a.safetensors", progress=lambda *at: seen.append(at))
    assert seen[-1] == (3000 * 544, 3000 * 544)
    assert table.n_unpacked_rows == kept
    back = load_table(tmp_path / "a.safetensors", threads=threads)
    table.repack_()
    assert back.n_unpacked_rows == table.n_unpacked_rows == 0
    every = torch.arange(3000)
    for found in (back, table):
        assert torch.equal(found.gather(every).view(torch.int16), rows.view(torch.int16))
    for one, other in zip(back.arrays, table.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    again = pack_table(rows, way=table.way)
    for one, other in zip(back.arrays, again.arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_at_urls(tmp_path: Path) -> None:
    table = pack_table(bf16_rows(100))
    save_tables({"t": table}, "memory://tables/a.safetensors")
    back = load_table("memory://tables/a.safetensors", "t", shared=True)
    assert torch.equal(back.gather(torch.arange(100)), bf16_rows(100))


def test_other_tensors_may_lie_beside_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tables({"a": pack_table(bf16_rows(50))}, path)
    tensors = load_file(path)
    save_file(tensors | {"bias": np.ones(3, np.float32), "b.rows": np.ones(3, np.uint8)}, path)
    assert list(load_tables(path)) == ["a"]
    with pytest.raises(KeyError, match="has no packed table 'bias'; it has"):
        load_table(path, "bias")
    save_file({"bias": np.ones(3, np.float32)}, path)
    assert load_tables(path) == {}
    with pytest.raises(ValueError, match="has 0 tables"):
        load_table(path)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, dict[str, NDArray[np.generic]]]:
    """A file of a table with exceptions, and its tensors."""
    path = tmp_path / "t.safetensors"
    rows = bf16_rows(4000)
    save_tables({"t": pack_table(rows)}, path)
    return path, dict(load_file(path))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("rows", r"table 't': packed table: rows 1927 to 3853 do not match their checksum"),
        ("marks", "table 't': packed table: marks does not match"),
        ("exception_starts", "table 't': packed table: exception_starts does not match"),
        ("exception_columns", "table 't': packed table: exception_columns does not match"),
        ("exception_elements", "table 't': packed table: exception_elements does not match"),
        ("crcs", "table 't': packed table: .* match"),
        ("table", "table 't': table header: does not match its checksum"),
    ],
)
def test_damage_is_named(
    parts: tuple[Path, dict[str, NDArray[np.generic]]], part: str, words: str
) -> None:
    path, tensors = parts
    data = tensors[f"t.{part}"].copy()
    flat = data.reshape(-1).view(np.uint8)
    flat[len(flat) // 2 if part != "table" else 30] ^= 4
    save_file(tensors | {f"t.{part}": data}, path)
    with pytest.raises(CorruptionError, match=f"{path}: {words}"):
        load_table(path)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    rows = np.arange(300, dtype=np.uint16).reshape(20, 15)
    save_tables({"t": pack_table(rows)}, path)
    data = path.read_bytes()
    rng = np.random.default_rng(2)
    for bit in rng.choice(8 * len(data), 400, replace=False):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        try:
            table = load_table(path, "t")
        except (PackhorseError, KeyError):  # KeyError: the name is damaged
            continue
        assert same(table.gather(np.arange(20)), rows)  # a bit of metadata or padding


def test_exceptions_of_no_dimension_are_refused(tmp_path: Path) -> None:
    rows = np.full((4, 37), 0x3D4D, np.uint16)
    rows[1, 2] = 0x7F80  # infinity
    format = named_tables(4, 37)["BF16 exponents of 4 bits"][1]
    path = tmp_path / "t.safetensors"
    save_tables({"t": pack_table(rows, way=TableWay(format, "", {}, 0.0, 0.0))}, path)
    tensors = dict(load_file(path))
    assert tensors["t.exception_elements"].shape == (1,)
    save_file(tensors | {"t.exception_elements": tensors["t.exception_elements"].reshape(())}, path)
    with pytest.raises(CorruptionError, match="exception_elements is no vector of uint16"):
        load_table(path)


def test_parts_that_are_missing_or_do_not_fit_are_named(
    parts: tuple[Path, dict[str, NDArray[np.generic]]],
) -> None:
    path, tensors = parts
    for missing in tensors:
        others = {name: tensor for name, tensor in tensors.items() if name != missing}
        save_file(others, path)
        words = f"^{path}: table 't': the file has no tensor '{missing}'"
        for load in (load_tables, load_table, partial(load_table, name="t")):
            with pytest.raises(CorruptionError, match=words):
                load(path)
    save_file(tensors | {"t.marks": tensors["t.marks"].view(np.int32)}, path)
    with pytest.raises(CorruptionError, match=r"tensor 't.marks' is I32; it must be U32"):
        load_tables(path)
    save_file(tensors | {"t.rows": tensors["t.rows"][:-1]}, path)
    with pytest.raises(CorruptionError, match=r"rows have shape \[3999, 544\]; its header says"):
        load_tables(path)
    save_file(tensors | {"t.table": tensors["t.table"][:70]}, path)
    with pytest.raises(TruncationError, match=r"table 't': table header: 70 bytes"):
        load_tables(path)
    header = tensors["t.table"].copy()
    header[4] = 2
    save_file(tensors | {"t.table": header}, path)
    with pytest.raises(CompatibilityError, match=r"table 't': table header: has version 2"):
        load_tables(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TruncationError, match="cut short"):
        load_tables(path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    table = pack_table(bf16_rows(10))
    path = tmp_path / "a.safetensors"
    with pytest.raises(TypeError, match="dict of names, not PackedTable"):
        save_tables(table, path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a string, not 1"):
        save_tables({1: table}, path)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="'t' must be a PackedTable, not Tensor"):
        save_tables({"t": bf16_rows(10)}, path)  # type: ignore[dict-item]
    assert not path.exists()
    save_tables({"t": table}, path)
    with pytest.raises(FileExistsError):
        save_tables({"t": table}, path)
    save_tables({"t": table, "u": table}, path, force=True)
    with pytest.raises(ValueError, match=r"has 2 tables; name one of \['t', 'u'\]"):
        load_table(path)
    with pytest.raises(FileNotFoundError):
        load_tables(tmp_path / "b.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert packhorse.open_file(path, framework="np").keys()
