"""Findings of models: which sources are found, how far samples go, and what cannot be read."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from cli_samples import result
from real_model import model_path, real_tensors
from safetensors.numpy import save_file

import packhorse
from packhorse.disk import SnapshotStore, pack_file, pack_folder
from packhorse.errors import CorruptionError
from packhorse.reports import build
from packhorse.reports.build import make_findings, plan_report
from packhorse.reports.options import Options
from packhorse.reports.sources import find_sources

WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture(autouse=True)
def _quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines get no more of a sample than each gets at least. test_engines.py is about
    them."""
    monkeypatch.setattr(build, "_ENGINE_SECONDS", 0.01)


def model_tensors() -> dict[str, np.ndarray]:
    """A layer, and embeddings of some words: all 30,522 are nine tenths of the bytes."""
    return {n: t[:6000] if n == WORDS else t for n, t in real_tensors(1).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(model_tensors(), path)
    return path


def small(path: Path, **values: float) -> Path:
    """A checkpoint with two tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": np.full((8, 8), values.get("a", 1.0), np.float32),
               "b.bias": np.arange(8, dtype=np.float16)}, path)  # fmt: skip
    return path


def test_findings_of_a_model(model: Path) -> None:
    found = make_findings([model])
    tensors = model_tensors()
    assert found.shape == "models"
    assert found.title == "model.safetensors"
    assert {row.name for row in found.tensors} == set(tensors)
    assert sum(row.nbytes for row in found.tensors) == sum(t.nbytes for t in tensors.values())
    assert found.sources[0].nbytes == sum(t.nbytes for t in tensors.values())
    assert {row.kind for row in found.tensors} >= {"embedding", "attention", "norm", "bias"}
    assert {row.layer for row in found.tensors} == {None, 0}
    assert not found.problems
    rows = [row for row in found.exponents if row.kind == "attention"]
    exponents = np.concatenate([
        np.floor(np.log2(np.abs(t.astype(np.float64)))).reshape(-1)
        for n, t in tensors.items() if "attention" in n and n.endswith("weight") and "Norm" not in n
    ])  # fmt: skip
    assert rows[0].first == exponents.min()
    shares = [np.mean(exponents == rows[0].first + i) for i in range(len(rows[0].shares))]
    assert rows[0].shares == pytest.approx(shares, abs=1e-6)


def test_a_packed_file_and_a_folder_have_the_sizes_that_inspect_says(
    model: Path, tmp_path: Path, run: Any
) -> None:
    packed = tmp_path / "m.ph.safetensors"
    pack_file(model, packed)
    (tmp_path / "folder").mkdir()
    save_file(model_tensors(), tmp_path / "folder" / "model.safetensors")
    pack_folder(tmp_path / "folder", tmp_path / "folder.ph")
    for path in (packed, tmp_path / "folder.ph"):
        found = make_findings([path])
        inspected = result(run("inspect", path, "--json"))
        assert found.sources[0].packed_nbytes == inspected["packed_nbytes"]
        assert found.sources[0].nbytes == inspected["nbytes"]
        rows = {row.name: row for row in found.tensors}
        for tensor in inspected["tensors"]:
            row = rows[tensor["name"]]
            assert row.packed_nbytes == row.levels["default"].nbytes == tensor["packed_nbytes"]
            assert row.split == tensor["split"]
            assert [plane.modes for plane in row.planes] == [p["modes"] for p in tensor["planes"]]
            assert [plane.name for plane in row.planes] == [p["name"] for p in tensor["planes"]]


def test_samples_and_all(model: Path) -> None:
    options = Options(sample_nbytes=1 << 21)
    sampled, full = make_findings([model], options=options), make_findings(
        [model], options=Options(full=True)
    )  # fmt: skip
    looked_at = sum(row.sampled_nbytes for row in sampled.tensors)
    assert looked_at < 4 << 20 < full.sources[0].nbytes
    assert all(row.sampled_nbytes == row.nbytes for row in full.tensors)
    a, b = (sum(row.levels["default"].nbytes for row in each.tensors) for each in (sampled, full))
    assert a == pytest.approx(b, rel=0.01)


def test_progress_counts_what_is_looked_at(model: Path) -> None:
    shown: list[tuple[str, int | None]] = []
    done: list[int] = []

    @contextmanager
    def watch(title: str, total: int | None) -> Any:
        shown.append((title, total))
        yield done.append

    make_findings([model], options=Options(sample_nbytes=1 << 20), watch=watch)
    assert shown[0][0] == "look at model.safetensors"
    assert sum(total for _, total in shown if total) == sum(done)


def test_sources_of_a_series_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (1000, 200, 50):
        small(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    found = find_sources([str(tmp_path / "checkpoint-*")])
    assert [source.step for source in found] == [50, 200, 1000]
    assert [source.name for source in found] == [f"checkpoint-{n}" for n in (50, 200, 1000)]
    found = find_sources([tmp_path / f"checkpoint-{n}/model.safetensors" for n in (1000, 50)])
    assert [source.name for source in found] == [
        f"checkpoint-{n}/model.safetensors" for n in (50, 1000)
    ]


def test_two_models_are_a_pair_and_the_base_comes_first(tmp_path: Path) -> None:
    tuned, base = small(tmp_path / "a" / "tuned.safetensors"), small(tmp_path / "base.safetensors")
    assert make_findings([base, tuned]).title == "tuned.safetensors against base.safetensors"
    assert make_findings([tuned], base=base).title == "tuned.safetensors against base.safetensors"
    first, second = small(tmp_path / "v1.safetensors"), small(tmp_path / "v2.safetensors")
    assert make_findings([first, second]).shape == "series"
    assert make_findings([first], base=second).title == "v1.safetensors against v2.safetensors"
    with pytest.raises(ValueError, match="a base goes with one model, but there are 2 sources"):
        make_findings([first, tuned], base=base)


def test_shards_are_neither_a_series_nor_a_pair(tmp_path: Path) -> None:
    small(tmp_path / "m-00001-of-00002.safetensors")
    small(tmp_path / "m-00002-of-00002.safetensors")
    shape, planned = plan_report([str(tmp_path / "m-*")])
    assert shape == "models"
    assert [row.name for row in planned] == [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_a_store_is_a_series_of_its_snapshots(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path / "store") as store:
        for name in ("step-5", "step-10"):
            store.take(name, {"w": np.arange(64, dtype=np.float32)})
        store.take("best", {"w": np.arange(64, dtype=np.float32)})
    found = find_sources([tmp_path / "store"])
    assert [(source.name, source.step) for source in found] == [
        ("step-5", 0), ("step-10", 1), ("best", 2)
    ]  # fmt: skip
    shape, planned = plan_report([tmp_path / "store"])
    assert shape == "series"
    assert [row.sampled_nbytes for row in planned] == [256] * 3


def damage(path: Path) -> None:
    """Change a byte of the last tensor of a packed file."""
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_among_many_is_reported_and_the_rest_goes_on(
    model: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.ph.safetensors" for name in ("one", "two", "three")]
    for path in paths:
        pack_file(model, path)
    damage(paths[1])
    (tmp_path / "cut.safetensors").write_bytes(model.read_bytes()[:5000])
    found = make_findings([*paths, tmp_path / "cut.safetensors", tmp_path / "missing"])
    n_tensors = len(model_tensors())
    assert [row.name for row in found.sources] == [path.name for path in paths]
    assert len(found.tensors) == 3 * n_tensors - 1
    bad, cut, missing = found.problems
    assert bad.source == "two.ph.safetensors"
    assert bad.tensor is not None
    assert "chunk" in bad.message
    assert bad.tensor in bad.line
    assert "cut.safetensors" in cut.line
    assert "no such file" in missing.line


def test_a_file_that_needs_a_base_says_so(model: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in model_tensors().items()}
    tensors[WORDS].view(np.uint16)[::100] ^= 1
    save_file(tensors, tmp_path / "tuned.safetensors")
    pack_file(tmp_path / "tuned.safetensors", tmp_path / "d.ph.safetensors", base=model)
    found = make_findings([tmp_path / "d.ph.safetensors"])
    problem = next(each for each in found.problems if each.tensor == WORDS)
    assert "packed against a base" in problem.message
    assert "unpack the file" in problem.message


@each("words, error, message", [
    (["nothing-*.safetensors"], FileNotFoundError, "nothing-.*no file or folder matches"),
    (["nothing.safetensors"], FileNotFoundError, "nothing.safetensors: no such file or folder"),
    ([], ValueError, "no source: name model files"),
])  # fmt: skip
def test_nothing_to_report_on(
    words: list[str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        make_findings([tmp_path / word for word in words])


@each("options, message", [
    ({"sample_nbytes": 0}, "sample_nbytes is 0; it must be at least 1"),
    ({"checkpoints_per_day": -1}, "checkpoints_per_day is -1; it must be 0 or more"),
    ({"checkpoints_per_day": float("nan")}, "checkpoints_per_day is nan"),
    ({"seconds_per_step": 0}, "seconds_per_step is 0; it must be above 0"),
    ({"threads": 0}, "threads"),
])  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_pickles_and_empty_stores_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match="pickle"):
        make_findings([tmp_path / "model.pt"])
    with SnapshotStore(tmp_path / "store") as store:
        store.take("a", {})
        store.delete("a")
    with pytest.raises(FileNotFoundError, match="this store has no snapshot yet"):
        make_findings([tmp_path / "store"])


def test_a_damaged_model_alone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(model_path().read_bytes()[:100])
    with pytest.raises(CorruptionError, match="cut"):
        make_findings([path])


def test_sources_are_not_changed(model: Path) -> None:
    before = model.read_bytes()
    make_findings([model])
    assert model.read_bytes() == before
    assert packhorse.__version__ == make_findings([model]).version
