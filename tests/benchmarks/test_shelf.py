"""The benchmarks of arrays that live on disk: their stores, their measurements on a few short rows,
and the document of their figures."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_modules import import_afresh

ROOT = Path(__file__).resolve().parents[2]
STORES = (
    *("packhorse", "packhorse-plain", "packhorse-small", "memmap (K, n)", "memmap (n, K)"),
    *("lmdb-row", "lmdb-chunk", "lmdb-xor", "zarr", "blosc2"),
    *("tensorstore", "tensorstore-ocdbt", "h5py"),
)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def shelf() -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/shelf, and what they know of files."""
    names = ("measure", "report", "rows", "store", "stores", "table", "training")
    with import_afresh("common.files", *(f"shelf.{name}" for name in names)) as modules:
        yield {name.partition(".")[2]: module for name, module in modules.items()}


def _make(shelf: dict[str, ModuleType], name: str, folder: Path, layout: Any) -> Any:
    folder.mkdir(exist_ok=True)
    try:
        return shelf["stores"].STORES[name].make(folder, layout)
    except ImportError as reason:
        pytest.skip(str(reason))


def test_stores_are_those_of_the_tables(shelf: dict[str, ModuleType]) -> None:
    assert tuple(shelf["stores"].STORES) == STORES


@pytest.mark.parametrize("name", STORES)
def test_long_rows_come_back(shelf: dict[str, ModuleType], name: str, tmp_path: Path) -> None:
    if "rows" not in shelf["stores"].STORES[name].works:
        pytest.skip("not for long rows")
    rows = RNG.standard_normal((18, 300_000), np.float32)
    layout = shelf["store"].Layout(rows.shape[1], len(rows), 1, 1 << 24)
    store = _make(shelf, name, tmp_path / "a", layout)
    for row in rows:
        store.append(row[None])
    for _ in range(2):
        found = np.concatenate([block.copy() for block in store.blocks()])
        assert np.array_equal(found, rows)
        weights = np.arange(len(rows), dtype=np.float32)
        assert np.allclose(store.weighted_sum(weights), weights @ rows, rtol=1e-4, atol=1e-2)
        store.close()
        store = _make(shelf, name, tmp_path / "a", layout)
    store.close()


@pytest.mark.parametrize("name", STORES)
def test_short_rows_are_gathered_and_overwritten(
    shelf: dict[str, ModuleType], name: str, tmp_path: Path
) -> None:
    if "table" not in shelf["stores"].STORES[name].works:
        pytest.skip("not for short rows")
    rows = RNG.standard_normal((72, 20), np.float32)
    layout = shelf["store"].Layout(rows.shape[1], len(rows), 8, 1 << 20)
    store = _make(shelf, name, tmp_path / "a", layout)
    store.append(rows[:64])
    store.append(rows[64:])
    index = np.array([71, 3, 3, 0, 40])
    assert np.array_equal(store.take(index), rows[index])
    rows[[70, 2, 9]] = store.take(np.array([5, 6, 7]))
    store.overwrite(np.array([70, 2, 9]), rows[[70, 2, 9]])
    store.close()
    store = _make(shelf, name, tmp_path / "a", layout)
    assert np.array_equal(np.concatenate([block.copy() for block in store.blocks()]), rows)
    store.close()


def test_rows_are_grouped_by_chunk(shelf: dict[str, ModuleType]) -> None:
    index = np.array([17, 2, 16, 3, 2])
    groups = list(shelf["store"].by_chunk(index, 4))
    assert [chunk for chunk, _, _ in groups] == [0, 4]
    assert [places.tolist() for _, places, _ in groups] == [[1, 3, 4], [0, 2]]
    assert [inside.tolist() for _, _, inside in groups] == [[2, 3, 2], [1, 0]]


def test_eviction_takes_files_out_of_the_cache_and_loses_nothing(
    shelf: dict[str, ModuleType], tmp_path: Path
) -> None:
    files, path = shelf["files"], tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5000:5004] = b"kept"
        before = files.cached_nbytes(tmp_path)
        files.evict(tmp_path)
        after = files.cached_nbytes(tmp_path)
        assert mapped[5000:5004] == b"kept"
    if before == after:
        pytest.skip("this file system is memory")
    assert (before, after) == (1 << 20, 0)


def test_holes_take_no_disk(shelf: dict[str, ModuleType], tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 30)
    assert shelf["files"].nbytes_on_disk(tmp_path) < 1 << 20


class _Training:
    """A run whose rows are short."""

    def __init__(self) -> None:
        self._row = RNG.standard_normal(5000, np.float32)

    def step(self) -> None:
        self._row *= np.float32(1.0001)

    def row(self) -> Any:
        return self._row.copy()


@pytest.fixture
def short(shelf: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules, with rows and tables that are small."""
    monkeypatch.setattr(shelf["rows"], "Training", _Training)
    monkeypatch.setattr(shelf["rows"], "WIDTH", 5000)
    images = SimpleNamespace(load=lambda: (pixels, None))
    pixels = RNG.integers(0, 256, (300, 784), np.uint8)
    monkeypatch.setattr(shelf["table"], "fashion_mnist", images)
    return shelf


def test_a_whole_run_is_measured_and_told(short: dict[str, ModuleType], tmp_path: Path) -> None:
    for part in ("rows", "limited", "table"):
        (tmp_path / part).mkdir()
    result: dict[str, Any] = {
        "rows": short["rows"].measure_rows([*STORES], 18, tmp_path / "rows"),
        "limited": short["rows"].measure_limited([*STORES], 18, tmp_path / "limited"),
        "table": short["table"].measure_table([*STORES], tmp_path / "table"),
        "date": "2026-01-01",
        "path": "avx2",
        "machine": dict.fromkeys(("cpu", "family_model_stepping", "system", "python"), "?")
        | {"cores": 2, "memory_gib": 8},
        "versions": {},
        "stores": {name: short["stores"].STORES[name].how for name in STORES},
        "load_before": 0.0,
        "load_after": 0.0,
        "core_scaling": [2.0, 2.0],
    }
    result = json.loads(json.dumps(result))
    text = short["report"].document(result)
    absent = result["rows"]["absent"] | result["table"]["absent"]
    for name in STORES:
        assert f"- `{name}`: " in text
        assert name in absent or f"| {name} |" in text or f"**{name}**" in text
    assert short["report"].picture(result).startswith("<svg ")


def test_a_store_that_loses_a_row_is_noticed(
    short: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = type(_make(short, "lmdb-row", tmp_path / "a", short["store"].Layout(8, 8, 1, 0)))
    monkeypatch.setattr(store, "append", lambda self, rows: None)
    with pytest.raises(RuntimeError, match="lmdb-row does not return"):
        short["rows"].measure_rows(["lmdb-row"], 3, tmp_path / "rows")
    with pytest.raises(RuntimeError, match="lmdb-row returns 0 rows"):
        short["table"].measure_table(["lmdb-row"], tmp_path / "table")


def test_targets_and_losses_are_told(shelf: dict[str, ModuleType]) -> None:
    def row(store: str, ms: float) -> dict[str, Any]:
        clock = {"mean": ms, "median": ms, "greatest": ms, "cpu": ms, "least": ms}
        kinds = ("append", "append_common", "sum, cold", "sum, warm", "overwrite")
        kinds += ("gather, cold", "gather, warm")
        sizes = {"nbytes_per_row": 10 * ms, "nbytes_filled": 10 * ms, "nbytes": 10 * ms}
        return {"store": store, "fill_seconds": ms} | dict.fromkeys(kinds, clock) | sizes

    rows = [row("packhorse", 3.0), row("memmap (K, n)", 2.0), row("lmdb-row", 4.0)]
    result = {"rows": {"nbytes": 100, "stores": rows}, "table": {"stores": rows}}
    told = shelf["report"].targets(result)
    assert "| long rows: raw bytes over ours | 3.33 | >= 3.00 | met |" in told
    assert "| long rows: append, times `memmap (K, n)` | 1.50 | <= 1.00 | MISSED |" in told
    assert "| short rows: overwrite, times `lmdb-row` | 0.75 | <= 1.30 | met |" in told
    lost = shelf["report"].losses(result)
    assert "- short rows, gather, warm, times ours: memmap (K, n) 0.67." in lost
    assert "lmdb-row" not in lost


def test_document_is_what_the_kept_figures_give(shelf: dict[str, ModuleType]) -> None:
    path = ROOT / "benchmarks" / "results" / "shelf.json"
    if not path.exists():
        pytest.skip("no figures are kept yet")
    kept = json.loads(path.read_text())
    written = (ROOT / "docs" / "benchmarks_shelf.md").read_text()
    assert written == shelf["report"].document(kept)
    picture = (ROOT / "docs" / shelf["report"].PICTURE).read_text()
    assert picture == shelf["report"].picture(kept)
