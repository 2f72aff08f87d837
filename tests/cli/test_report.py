"""`packhorse report`: what it writes and prints, and how it ends."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import each
from cli_samples import Ended, result
from real_model import real_tensors
from safetensors.numpy import save_file

import packhorse
from packhorse.disk import SnapshotStore, pack_file
from packhorse.reports.options import Options

Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    wanted = {name: t for name, t in real_tensors(1).items() if "embeddings.word" not in name}
    save_file(wanted, path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_is_written_here(run: Run, model: Path, here: Path) -> None:
    done = run("report", model, "--no-engines")
    assert (done.code, done.out, done.err) == (0, "", "")
    text = (here / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "attention.self.query.weight" in text
    assert [path.name for path in here.iterdir()] == ["report.html"]


def test_an_existing_page_is_replaced_only_by_force(run: Run, model: Path, here: Path) -> None:
    (here / "mine.html").write_text("mine")
    done = run("report", model, "-o", "mine.html")
    assert done.code == 2
    assert "mine.html: already exists" in done.error
    assert (here / "mine.html").read_text() == "mine"
    assert run("report", model, "-o", "mine.html", "--force", "--no-engines").code == 0
    assert (here / "mine.html").read_text() != "mine"


def test_json_is_the_findings_and_no_page(run: Run, model: Path, here: Path) -> None:
    found = result(run("report", model, "--no-engines", "--json"))
    made = packhorse.report(model, engines=False).to_json()
    for document in (found, made):
        document.pop("made")
        document["settings"].pop("seconds")
    assert found == json.loads(json.dumps(made))
    assert list(here.iterdir()) == []
    run("report", model, "--no-engines", "--json", "-o", "page.html")
    assert [path.name for path in here.iterdir()] == ["page.html"]


def test_the_function_and_the_command_have_the_same_defaults() -> None:
    found = inspect.signature(packhorse.report).parameters
    options = Options()
    for name in ("full", "sample_nbytes", "checkpoints_per_day", "seconds_per_step", "engines"):
        assert found[name].default == getattr(options, name), name


def test_markdown_goes_to_standard_output(run: Run, model: Path, here: Path) -> None:
    done = run("report", model, "--no-engines", "--markdown")
    assert done.code == 0
    assert done.out.startswith("# ")
    assert "| attention |" in done.out
    assert list(here.iterdir()) == []


def test_a_dry_run_says_what_would_be_read(run: Run, model: Path, here: Path) -> None:
    done = run("report", model, "--dry-run", "--sample", "1000000")
    assert done.out.startswith("a report on models (dry run, nothing is written)")
    assert str(model) in done.out
    found = result(run("report", model, "-n", "--json"))
    assert found["shape"] == "models"
    assert found["sources"][0]["n_tensors"] == len(real_tensors(1)) - 1
    assert list(here.iterdir()) == []


def test_a_store_and_a_pair(run: Run, model: Path, here: Path) -> None:
    with SnapshotStore(here / "store") as store:
        rng = np.random.default_rng(0)
        weights = rng.standard_normal((64, 64)).astype(np.float32)
        for step in range(3):
            store.take(f"step-{step}", {"w": weights + np.float32(1e-4 * step)})
    found = result(run("report", "store", "--no-engines", "--json"))
    assert [row["name"] for row in found["series"]["steps"]] == ["step-0", "step-1", "step-2"]
    tensors = {name: t.copy() for name, t in real_tensors(1).items() if "word" not in name}
    name = next(name for name in tensors if name.endswith("query.weight"))
    tensors[name].view(np.uint16)[::7] ^= 1
    save_file(tensors, here / "tuned.safetensors")
    found = result(run("report", "tuned.safetensors", "--base", model, "--no-engines", "--json"))
    changed = [row for row in found["changes"]["rows"] if row["change"] == "changed"]
    assert [row["name"] for row in changed] == [name]


def test_what_cannot_be_read_is_a_warning_and_exit_code_1(
    run: Run, model: Path, here: Path
) -> None:
    for name in "abc":
        pack_file(model, here / f"{name}.ph.safetensors")
    data = bytearray((here / "b.ph.safetensors").read_bytes())
    data[-40] ^= 1
    (here / "b.ph.safetensors").write_bytes(data)
    done = run("report", *(f"{name}.ph.safetensors" for name in "abc"), "--no-engines")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("packhorse: warning: ")
    assert "b.ph.safetensors" in line
    assert "tensor" in line
    assert "b.ph.safetensors" in (here / "report.html").read_text()


@each("words, code, message", [
    (["missing.safetensors"], 3, "missing.safetensors: no such file or folder; check the path"),
    (["run-*"], 3, "run-*: no file or folder matches this pattern"),
    (["{model}", "{model}x", "--base", "{model}"], 2, "a base goes with one model"),
    (["{model}", "--json", "--markdown"], 2, "--json and --markdown exclude each other"),
    (["{model}", "-o", "no/such/page.html"], 3, "no/such/page.html: there is no folder no/such"),
    (["{model}", "--seconds-per-step", "0"], 2, "seconds_per_step is 0.0; it must be above 0"),
])  # fmt: skip
def test_mistakes(
    run: Run, model: Path, here: Path, words: list[str], code: int, message: str
) -> None:
    done = run("report", *(word.format(model=model) for word in words))
    assert message in done.error
    assert done.code == code
    assert list(here.iterdir()) == []
