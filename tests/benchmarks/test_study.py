"""The study of what compresses: its runs, with a tiny model, its figures, and its page."""

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from benchmark_modules import import_afresh

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("runs", "states", "measure", "report", "lookup")
LAST = 16
ANCHORS = (4, LAST)
STEPS = [0, 1, 2, 3, 4, 7, 8, 12, 14, 15, 16]
DTYPES = {"32": torch.float32, "16": torch.bfloat16}


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    """The modules of the study, with a shorter schedule."""
    names = ("data.language_model", *(f"study.{name}" for name in NAMES))
    with pytest.MonkeyPatch.context() as patch, import_afresh(*names) as found:
        modules = {name.split(".")[1]: module for name, module in found.items()}
        schedule = {"LAST": LAST, "ANCHORS": ANCHORS, "STEPS": STEPS}
        schedule |= {"WARM_UP": 4, "COOL_DOWN": 4, "_STEPS_WITH_MOMENTS": {3, 4, 15, 16}}
        for module in (modules["runs"], modules["measure"]):
            for name in schedule.keys() & vars(module).keys():
                patch.setattr(module, name, schedule[name])
        yield modules


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


def _tiny(study: dict[str, ModuleType]) -> list[Any]:
    shape = study["language_model"].ModelShape(512, 32, 64, 2, 2)
    runs = study["runs"].RUNS
    return [dataclasses.replace(run, shape=shape, context=32, save_every=5) for run in runs]


@pytest.fixture(scope="module")
def folders(
    study: dict[str, ModuleType], texts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The folders of complete runs."""
    root = tmp_path_factory.mktemp("study")
    for run in _tiny(study):
        assert study["runs"].train_run(run, root / run.name, texts)
    return {run.name: root / run.name for run in _tiny(study)}


def _load(folder: Path, kind: str, step: int) -> dict[str, Any]:
    return safetensors_torch.load_file(folder / f"{kind}_{step:06}.safetensors")


def test_runs_keep_what_they_say_and_learn(
    study: dict[str, ModuleType], folders: dict[str, Path]
) -> None:
    for run in _tiny(study):
        folder = folders[run.name]
        manifest = json.loads((folder / "manifest.json").read_text())
        names = {path.name for path in folder.iterdir()} - {"manifest.json"}
        assert names == set(run.files()) == set(manifest["files"])
        found = sum(entry["nbytes"] for entry in manifest["files"].values())
        assert found == pytest.approx(study["runs"].expected_nbytes(run), rel=0.05)
        assert len(manifest["losses"]) == LAST
        if run.name == "base":
            assert np.mean(manifest["losses"][-4:]) < np.mean(manifest["losses"][:4])
        for name in names:
            tensors = safetensors_torch.load_file(folder / name)
            kind = name.split("_")[0]
            assert {t.dtype for t in tensors.values()} == {DTYPES[kind[-2:]]}
    weights = _load(folders["base"], "w32", 0)
    assert all(torch.equal(weights[n], t) for n, t in _load(folders["sgd"], "w32", 0).items())


def test_optimizers_take_the_steps_that_they_are_named_for(
    study: dict[str, ModuleType], folders: dict[str, Path]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    runs = {run.name: run for run in _tiny(study)}

    def moved(run: str) -> Any:
        before, after = (_load(folders[run], "w32", step)[name] for step in (LAST - 1, LAST))
        return (after - before) / runs[run].rate(LAST)

    momentum = _load(folders["sgd"], "m32", LAST)[name]
    torch.testing.assert_close(moved("sgd"), -momentum, rtol=1e-2, atol=1e-4)
    # Muon's steps are orthogonal, and scaled so that their size is that of AdamW's.
    update = moved("muon") + 0.1 * _load(folders["muon"], "w32", LAST - 1)[name]
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)
    singular = torch.linalg.svdvals(update)
    assert float(singular.max() / singular.min()) < 3


def _stop_at(last: int) -> Callable[[int, float], None]:
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize("name", ["bf16", "muon", "sgd"])
def test_run_that_was_stopped_goes_on_to_the_same_files(
    study: dict[str, ModuleType],
    folders: dict[str, Path],
    texts: list[bytes],
    tmp_path: Path,
    name: str,
) -> None:
    run = next(run for run in _tiny(study) if run.name == name)
    train_run = study["runs"].train_run
    with pytest.raises(KeyboardInterrupt):
        train_run(run, tmp_path, texts, on_step=_stop_at(12))
    with pytest.raises(FileNotFoundError, match=r"no complete run in .*make study"):
        study["states"].States(run, tmp_path)
    assert train_run(run, tmp_path, texts)
    assert not train_run(run, tmp_path, texts)
    found, wanted = (
        json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path, folders[name])
    )
    for key in ("files", "losses"):
        assert found[key] == wanted[key]
    other = dataclasses.replace(run, peak_rate=1.0)
    with pytest.raises(ValueError, match="made with another recipe"):
        train_run(other, tmp_path, texts)


def test_figures_are_those_of_the_states(
    study: dict[str, ModuleType], folders: dict[str, Path]
) -> None:
    run = _tiny(study)[0]
    states = study["states"].States(run, folders["base"])
    figures = study["measure"].measure_run(states, in_detail=True)
    masters, before = (_load(folders["base"], "w32", step) for step in (LAST, LAST - 1))
    row = next(
        r for r in figures["gaps"] if (r["anchor"], r["gap"], r["part"]) == (LAST, 1, "weights")
    )
    same = n_flipped = 0
    for name, tensor in masters.items():
        new, old = (
            t.numpy().astype(ml_dtypes.bfloat16).view(np.uint16) for t in (tensor, before[name])
        )
        same += int((new == old).sum())
        n_flipped += int(((new ^ old) & 1).sum())
    kinds = row["kinds"].values()
    numel = sum(t.numel() for t in masters.values())
    assert sum(sizes["same"] for sizes in kinds) == same
    assert sum(sizes["nbytes"] for sizes in kinds) == 2 * numel
    assert all(sizes["delta"] <= sizes["full"] for sizes in kinds)
    series = {(r["step"], r["part"]): r for r in figures["series"]}
    assert {step for step, _ in series} == {0, 1, 2, 3, 4, 8, 16}
    flips = series[LAST, "weights"]["flips"]
    assert flips[-1] == pytest.approx(n_flipped / numel, abs=1e-4)
    assert "flips" not in series[0, "weights"]
    assert {(r["anchor"], r["gap"]) for r in figures["gaps"]} == {
        *((4, gap) for gap in (1, 2)),
        *((LAST, gap) for gap in (1, 2, 4, 8)),
    }
    assert figures["step_sizes"]


def test_page_and_pictures_are_those_of_the_figures(study: dict[str, ModuleType]) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())
    documents = study["report"].documents(result)
    for name, text in documents.items():
        assert (ROOT / "docs" / name).read_text() == text
        if name.endswith(".svg"):
            ET.fromstring(text)


def test_last_paying_gap_needs_five_percent(study: dict[str, ModuleType]) -> None:
    sizes = {1: 50, 2: 95, 4: 96, 8: 100}
    rows = [
        {"part": "weights", "anchor": 9, "gap": gap, "kinds": {"a": {"full": 100, "delta": n}}}
        for gap, n in sizes.items()
    ]
    found = study["lookup"].Found({"runs": {"base": {"gaps": rows}}})
    assert found.last_paying_gap("base", "weights", 9) == 2
    assert found.last_paying_gap("base", "masters", 9) == 0
