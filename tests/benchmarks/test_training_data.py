"""The training run of the benchmark data, with a tiny model, and the data sets made from it."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_modules import import_afresh

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("training", "common.machine", "data.sets", "data.language_model", "data.vocabulary")
LAST = 24
STEPS = {
    "w32": {2, 4, 8, 16, 17, 18, 20, 23, 24},
    "w16": {2, 4, 8, 16, 17, 18, 20, 23, 24},
    "m32": {2, 4, 8, 16, 23, 24},
    "v32": {2, 4, 8, 16, 23, 24},
    "p16": {28, 29, 30, 32},
    "pm16": {28, 29, 30, 32},
    "pv16": {28, 29, 30, 32},
}
HISTORY = range(LAST + 8, LAST + 89, 8)  # after the last step, which is its first checkpoint
WHOLE = ("w32", "w16", "m32", "v32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def modules(cache: Path) -> Iterator[dict[str, ModuleType]]:
    """The modules of `benchmarks` that these tests use, with their own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKHORSE_BENCH_DATA", str(cache))
        with import_afresh(*MODULES) as found:
            yield found


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.fixture(scope="module")
def recipe(modules: dict[str, ModuleType]) -> Any:
    shape = modules["data.language_model"].ModelShape(512, 32, 64, 2, 2)
    return modules["training"].Recipe(
        shape,
        context=32,
        first_kept=2,
        full_steps=16,
        cool_down=8,
        warm_up=4,
        peak_rate=5e-3,
        save_every=5,
    )


@pytest.fixture(scope="module")
def run(modules: dict[str, ModuleType], recipe: Any, texts: list[bytes], cache: Path) -> Path:
    """The folder of a complete run."""
    modules["training"].train(recipe, cache / "training", texts)
    return cache / "training"


def _load(run: Path, kind: str, step: int) -> dict[str, Any]:
    return safetensors_torch.load_file(run / f"{kind}_{step:06}.safetensors")


def _manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())


def test_manifest_names_every_file_with_its_hash(run: Path) -> None:
    manifest = _manifest(run)
    files, history = manifest["files"], manifest["history"]["files"]
    assert files.keys() == {f"{k}_{s:06}.safetensors" for k, steps in STEPS.items() for s in steps}
    assert history.keys() == {f"{kind}_{s:06}.safetensors" for kind in WHOLE for s in HISTORY}
    assert manifest["history"]["steps"] == [LAST, *HISTORY]
    assert files.keys() | history.keys() | {"manifest.json"} == {p.name for p in run.iterdir()}
    for name, described in (files | history).items():
        raw = (run / name).read_bytes()
        assert described == {"nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def test_model_learns(run: Path) -> None:
    losses = _manifest(run)["losses"]
    assert len(losses) == 32
    assert losses[0] == pytest.approx(np.log(512), rel=0.02)  # knows nothing yet
    assert np.mean(losses[-8:]) < 0.95 * np.mean(losses[:8])


def test_each_kind_has_its_type_and_all_parameters(run: Path) -> None:
    shapes = _manifest(run)["parameters"]
    for kind, steps in STEPS.items():
        for step in steps:
            tensors = _load(run, kind, step)
            assert {name: list(t.shape) for name, t in tensors.items()} == shapes
            wanted = torch.float32 if kind.endswith("32") else torch.bfloat16
            assert {t.dtype for t in tensors.values()} == {wanted}


def test_bf16_copies_are_the_rounded_masters(run: Path) -> None:
    for step in STEPS["w16"]:
        masters = _load(run, "w32", step)
        for name, copy in _load(run, "w16", step).items():
            assert torch.equal(copy, masters[name].bfloat16())


def test_files_of_neighbouring_steps_are_one_step_of_adamw_apart(run: Path) -> None:
    weights, first, second = (_load(run, kind, LAST - 1) for kind in ("w32", "m32", "v32"))
    rate = 5e-4  # a tenth of the peak
    for name, after in _load(run, "w32", LAST).items():
        m, v = (_load(run, kind, LAST)[name] for kind in ("m32", "v32"))
        gradient = (m - 0.9 * first[name]) / 0.1
        wanted_v = 0.95 * second[name] + 0.05 * gradient**2
        torch.testing.assert_close(v, wanted_v, rtol=1e-3, atol=1e-10)
        update = (m / (1 - 0.9**LAST)) / ((v / (1 - 0.95**LAST)).sqrt() + 1e-8)
        decay = 0.1 if after.dim() > 1 else 0.0
        wanted = weights[name] * (1 - rate * decay) - rate * update
        torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-7)


def test_tail_goes_on_in_bf16_from_the_last_full_step(run: Path) -> None:
    masters, tail = _load(run, "w16", LAST), _load(run, "p16", LAST + 8)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(masters[name], tail[name])
    # Eight steps at the lowest rate: the values are near each other, and some are too large to
    # change in bf16.
    torch.testing.assert_close(masters[name], tail[name], rtol=0, atol=0.02)
    assert all((t >= 0).all() for t in _load(run, "pv16", LAST + 8).values())


def test_history_is_the_run_going_on(run: Path) -> None:
    assert len(_manifest(run)["history"]["losses"]) == 88
    last = LAST
    for step in HISTORY:
        before, after = (_load(run, "w32", s) for s in (last, step))
        for name, tensor in _load(run, "w16", step).items():
            assert torch.equal(tensor, after[name].bfloat16())
            assert not torch.equal(after[name], before[name])
            # Each step of AdamW changes a value by no more than a few times the rate.
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=8 * 3 * 5e-4)
        last = step


class _StoppedError(Exception):
    pass


def _stop_at(last: int) -> Callable[[int, float], None]:
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise _StoppedError

    return on_step


def test_run_that_was_stopped_and_resumed_gives_the_same_files(
    modules: dict[str, ModuleType], recipe: Any, texts: list[bytes], run: Path, tmp_path: Path
) -> None:
    train = modules["training"].train
    for last in (13, 27):  # between two checkpoints, and in the tail
        with pytest.raises(_StoppedError):
            train(recipe, tmp_path, texts, resume=True, on_step=_stop_at(last))
        assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(_StoppedError):
        train(recipe, tmp_path, texts, resume=True, on_step=_stop_at(57))
    kept, wanted = _manifest(tmp_path), _manifest(run)
    assert "history" not in kept  # a run as it was before there were histories
    train(recipe, tmp_path, texts, resume=True)
    for key in ("files", "losses", "parameters"):
        assert _manifest(tmp_path)[key] == kept[key] == wanted[key]
    for key in ("files", "losses", "steps"):
        assert _manifest(tmp_path)["history"][key] == wanted["history"][key]


def test_run_is_not_begun_over_another(
    modules: dict[str, ModuleType], recipe: Any, texts: list[bytes], run: Path, tmp_path: Path
) -> None:
    train = modules["training"].train
    with pytest.raises(FileExistsError, match="is complete; remove the folder"):
        train(recipe, run, texts, resume=True)
    with pytest.raises(_StoppedError):
        train(recipe, tmp_path, texts, on_step=_stop_at(6))
    with pytest.raises(FileExistsError, match="--resume goes on with it"):
        train(recipe, tmp_path, texts)
    with pytest.raises(ValueError, match=r"made with another (tokens|vocabulary)_sha256"):
        train(recipe, tmp_path, [*texts, b"one more text"], resume=True)
    manifest = _manifest(run)
    del manifest["history"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileExistsError, match="--resume goes on with it"):
        train(recipe, tmp_path, texts)
    with pytest.raises(ValueError, match=r"made with another (tokens|vocabulary)_sha256"):
        train(recipe, tmp_path, [*texts, b"one more text"], resume=True)


@pytest.mark.parametrize(
    ("name", "file", "dtype"),
    [
        ("train_w32", "w32_000024", "F32"),
        ("train_w16", "w16_000024", "BF16"),
        ("train_m32", "m32_000024", "F32"),
        ("train_v32", "v32_000024", "F32"),
        ("train_pm16", "pm16_000032", "BF16"),
        ("train_pv16", "pv16_000032", "BF16"),
    ],
)
def test_data_set_is_the_last_file_of_its_kind(
    modules: dict[str, ModuleType], run: Path, name: str, file: str, dtype: str
) -> None:
    dataset = modules["data.sets"].make(name)
    wanted = safetensors_torch.load_file(run / f"{file}.safetensors")
    assert dataset.dtype == dtype
    assert dict(dataset.tensors).keys() == wanted.keys()
    for key, array in dataset.tensors:
        assert array.shape == tuple(wanted[key].shape)
        assert array.tobytes() == wanted[key].view(torch.uint8).numpy().tobytes()


def test_changed_file_of_a_run_is_refused(
    modules: dict[str, ModuleType], run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACKHORSE_BENCH_DATA", str(tmp_path))
    (tmp_path / "training").mkdir()
    raw = bytearray((run / "v32_000024.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "training" / "v32_000024.safetensors").write_bytes(raw)
    manifest = (run / "manifest.json").read_text()
    (tmp_path / "training" / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"v32_000024\.safetensors has sha256 .* by its manifest"):
        modules["data.sets"].make("train_v32")


def test_sets_of_a_run_that_is_missing_are_not_offered(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACKHORSE_BENCH_DATA", str(tmp_path))
    with import_afresh("data.sets") as found:
        sets = found["data.sets"]
        assert not set(sets.NAMES) & set(sets.TRAINING_NAMES)
        with pytest.raises(FileNotFoundError, match=r"python benchmarks/training\.py"):
            sets.make("train_w32")
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "manifest.json").write_text("{}")
    with import_afresh("data.sets") as found:
        assert set(found["data.sets"].NAMES) >= set(sets.TRAINING_NAMES)


def test_ids_give_back_any_text(modules: dict[str, ModuleType], texts: list[bytes]) -> None:
    vocabulary = modules["data.vocabulary"].Vocabulary.of(texts, 1000)
    assert len(set(vocabulary.words)) == len(vocabulary.words) == 1000
    unknown = [b"", bytes(range(256)), "naïve\r\n\tœuvre  12345 _x__y".encode(), b"\xff\xfe zzyzx"]
    ids = vocabulary.encode(texts + unknown)
    assert vocabulary.decode(ids) == b"".join(texts + unknown)
    assert len(vocabulary.encode(texts)) < 0.5 * len(b"".join(texts))
    again = modules["data.vocabulary"].Vocabulary.of(texts, 1000)
    assert again.words == vocabulary.words
