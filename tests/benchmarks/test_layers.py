"""The benchmarks of packed layers: a run on a tiny scale, and the document of the kept figures."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import import_afresh

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = ("run", "layers.measure", "layers.loading", "layers.report", "plans")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The modules of `benchmarks` that these tests use."""
    with import_afresh(*MODULES) as modules:
        yield modules


def test_document_is_what_the_kept_figures_give(scripts: dict[str, ModuleType]) -> None:
    written = (ROOT / "docs" / "benchmarks_layers.md").read_text()
    kept = json.loads((FOLDER / "results" / "layers.json").read_text())
    assert written == scripts["layers.report"].document(kept)


def test_every_part_runs_on_a_tiny_scale(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, threads = tmp_path / "figures.json", torch.get_num_threads()
    try:
        assert scripts["run"].main(["layers", "--smoke", "--json", str(kept)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    result = json.loads(kept.read_text())
    parts = result["parts"]
    assert {*parts, *result["absent"]} == set(scripts["layers.measure"].PARTS)
    assert {row["form"] for row in parts["products"]} == {"W12", "W11"}
    assert all(row["plain"] > 0 and min(row["tiles"].values()) > 0 for row in parts["products"])
    assert all(row["seconds"] > 0 for row in parts["packing"])
    assert parts["plan"]["n_chunks"] > 1
    for row in parts["memory"]:
        assert 0 < row["held_nbytes"] <= row["plain_nbytes"]
    document = scripts["layers.report"].document(result)
    for name in parts:
        assert scripts["layers.report"].section(name, result) in printed
        assert scripts["layers.report"].section(name, result) in document


def test_every_way_of_loading_gives_the_tensors(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    memory = scripts["layers.loading"]
    sizes = memory.Sizes(2, 256, 64, 128, 1, 500)
    memory._make_file(tmp_path, sizes)
    memory._make_model(tmp_path, sizes)
    held = {name: memory._held_nbytes(load(tmp_path)) for name, load in memory.LOADERS.items()}
    file, model = "packed file to ", "from_pretrained, "
    assert held[f"{file}packed weights"][0] == held[f"{file}plain tensors"][1] == 4 * 256**2
    plain = held[f"{model}plain"][1]
    for name, (logical, now) in held.items():
        if "packed" in name and file not in name:
            assert logical == plain
            assert now < 0.95 * plain


def test_memory_that_is_touched_is_counted(scripts: dict[str, ModuleType]) -> None:
    memory = scripts["layers.loading"]
    before = memory.Usage.now()
    # Memory that malloc cannot have kept from before.
    with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE) as block, memory.Watch() as watch:
        for _ in range(64):
            block.write(b"x" * (1 << 20))
    assert watch.peak.anonymous - before.anonymous > 60 << 20


def test_figures_are_kept_of_a_whole_run_only(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scripts["run"].main(["layers", "--write", "--rounds", "1"])
    assert "needs a whole run" in capsys.readouterr().err


def test_a_part_that_is_measured_by_itself_says_so(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers, kept = (
        scripts["layers.measure"],
        json.loads((FOLDER / "results/layers.json").read_text()),
    )
    part = kept["parts"]["plan"] | {"seconds": 0.001}
    run = {"load_before": 0.5, "load_after": 3.25, "machine": {"cpu": "a CPU"}, "rounds": 30}
    whole = layers._merged(kept, run | {"parts": {"plan": part}})
    assert whole["parts"] == kept["parts"] | {"plan": part}
    assert whole["load_before"] == kept["load_before"]
    section = scripts["layers.report"].section
    assert "takes 1.00 ms" in section("plan", whole)
    assert section("plan", whole).endswith(": a CPU, load 3.2.")
    assert section("memory", whole) == section("memory", kept)


def test_plans_are_timed_with_any_number_of_threads(scripts: dict[str, ModuleType]) -> None:
    found = scripts["plans"].measure([1, 2], seconds=0.01, n_windows=1)
    assert list(found) == [f"{kind} with {n} threads" for kind in ("BF16", "F32") for n in (1, 2)]
    assert min(found.values()) > 0
