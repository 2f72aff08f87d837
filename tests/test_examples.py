"""The examples: training and filling a shelf in killed processes, serving a packed model,
training on two processes."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from packhorse.device import PackedLinear
from packhorse.disk import Shelf, SnapshotStore, pack_folder

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "train_with_snapshots.py"


def run(example: Path, output: Path, *options: object) -> tuple[int, str]:
    """Run an example in processes that need not import PyTorch again. Returns its exit code and
    what it printed. Users' processes start one another by "spawn", which imports the example: that
    must do nothing."""
    runpy.run_path(str(example), run_name="__mp_main__")
    return run_forked(example, output, *options), output.read_text()


def losses_of(printed: str) -> dict[int, str]:
    """The loss of each step as printed."""
    return {int(n): loss for n, loss in re.findall(r"^step (\d+): loss (\S+)$", printed, re.M)}


def test_a_killed_run_goes_on_to_the_identical_losses(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    options, output = ("--steps", 60, "--every", 5), tmp_path / "printed"
    code, printed = run(EXAMPLE, output, tmp_path / "whole", *options)
    whole = losses_of(printed)
    assert code == 0
    assert list(whole) == list(range(1, 61))

    code, printed = run(EXAMPLE, output, tmp_path / "killed", *options, "--kill-at", 38)
    first = losses_of(printed)
    assert code == -9
    assert list(first) == list(range(1, 39))
    taken = SnapshotStore(tmp_path / "killed").names()
    code, printed = run(EXAMPLE, output, tmp_path / "killed", *options)
    line, second = printed.partition("\n")[0], losses_of(printed)
    assert code == 0
    assert line == f"resumed from {taken[-1]} of {len(taken)} snapshots"
    assert list(second)[-1] == 60
    assert first == {n: whole[n] for n in first}
    assert second == {n: whole[n] for n in second}
    store = SnapshotStore(tmp_path / "killed")
    assert store.names() == [f"step-{n}" for n in range(5, 61, 5)]
    assert store.verify() == []


def test_a_killed_process_leaves_a_shelf_that_goes_on(tmp_path: Path) -> None:
    example = EXAMPLES / "shelf.py"
    assert len(example.read_text().splitlines()) < 60

    def collect(name: str, *options: object) -> tuple[int, list[str]]:
        words = [example, tmp_path / name, "--rows", 400, "--batch", 50, *options]
        done = subprocess.run(
            [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout.splitlines()

    code, whole = collect("whole")
    assert (code, whole[0]) == (0, "0 of 400 rows are there")
    assert collect("killed", "--kill-at", 250) == (-9, ["0 of 400 rows are there"])
    code, lines = collect("killed")
    assert (code, lines[0], lines[1:]) == (0, "250 of 400 rows are there", whole[1:])
    with Shelf(tmp_path / "killed", "r") as killed, Shelf(tmp_path / "whole", "r") as never:
        assert list(killed) == list(never) == ["clean", "raw", "sum"]
        for name in never:
            assert killed[name][:].tobytes() == never[name][:].tobytes()
        assert abs(np.float32(killed["clean"][:]).std() - 1) < 0.01


def test_the_guide_to_packed_weights_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the page's blocks of code as they are printed, on the host."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model = runpy.run_path(str(EXAMPLES / "serve_packed.py"))["make_tiny_model"]
    make_tiny_model(tmp_path / "model")
    pack_folder("model", "model.ph")
    os.link("model.ph/model.ph.safetensors", "model.ph.safetensors")
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[1, 5, 9]]), "max_new_tokens": 8}
    names: dict[str, Any] = {"model": model, "inputs": inputs, "path": "model"}
    page = (EXAMPLES.parent / "docs" / "device.md").read_text()
    guide = page.partition("## Uploading packed files to a GPU")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block.replace('"cuda"', '"cpu"'), "device.md", "exec"), names)
    assert capsys.readouterr().out.count("16 packed, 0 left") == 3
    assert torch.equal(names["model"].generate(**inputs), names["tokens"])
    assert isinstance(names["layer"], PackedLinear)


def test_ddp_with_packed_gradients_has_the_same_losses(tmp_path: Path) -> None:
    example = EXAMPLES / "wire_ddp.py"
    assert len(example.read_text().splitlines()) < 60
    code, printed = run(example, tmp_path / "printed", "--steps", 12, "--choice", "packed")
    assert code == 0
    first, last = map(float, re.findall(r"\d\.\d+", printed.splitlines()[0]))
    assert last < first
    assert "the losses are the same: True" in printed
    words = r"^all_reduce float32 to 2 MiB ddp  packed .* choice is packed$"
    assert re.search(words, printed, re.M)


def test_a_graph_with_packed_features_has_the_same_losses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example, threads = EXAMPLES / "gnn_features.py", torch.get_num_threads()
    assert len(example.read_text().splitlines()) < 60
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    first, last = map(float, re.findall(r"\d\.\d+", shown.splitlines()[0]))
    assert last < first
    assert "the same bits: True" in shown


def test_gmra_describes_a_surface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "gmra.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(example), "--points", "5000", "--memory", "1"])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    errors = [float(error) for error in re.findall(r"^scale .* error (\S+)$", shown, re.MULTILINE)]
    assert len(errors) > 5
    assert errors[-1] < errors[0] / 50


def test_a_packed_model_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "serve_packed.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(example)])
    names = runpy.run_path(str(example), run_name="__main__")
    tiny = capsys.readouterr().out
    assert "16 packed, 0 left; whole model: 3.23 MiB before" in tiny
    assert re.search(r"^32 tokens in .* s on ", tiny, re.MULTILINE)

    names["make_tiny_model"](tmp_path)
    words = {word: i for i, word in enumerate(["?", "A", "packhorse", "carries"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    assert "\nA packhorse carries" in capsys.readouterr().out


def test_a_packed_table_trains_as_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "embedding_table.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(example), "--rows", "5000"])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    first, last = map(float, re.findall(r"loss (\S+) -> ([\d.]+)", shown)[0])
    assert last < first
    assert "the losses are the same: True" in shown
    assert "1.14 times smaller" in shown
    assert re.search(r"hot rows has \d\d%", shown)


def test_tables_of_ngrams_lie_in_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "ngram_embeddings.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(example), "--rows", "2000"])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "5 packed, 0 left" in shown
    assert "in memory of the host" in shown
    assert "the tokens are the same: True" in shown


def test_keys_and_values_stay_packed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "kv_cache.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(example), "--new", "30"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^4 packed layers: .* \(1\.\d+ times smaller\)", printed)
    assert "the same tokens: True" in printed


def test_layers_run_from_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES / "offloaded_layers.py"
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.syspath_prepend(EXAMPLES)
    make_tiny_model = runpy.run_path(str(example))["make_tiny_model"]
    make_tiny_model(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    prompt = torch.tensor([[1, 5, 9, 2]])
    expected = plain.generate(prompt, max_new_tokens=16, do_sample=False)[0].tolist()
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path), "--keep-gb", "0.001"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"^\d+ in host memory, \d.\d\d MiB; [1-9]\d* on ", printed, re.MULTILINE)
    assert f"\n{expected}\n" in printed


def test_an_engine_follows_a_trainer(tmp_path: Path) -> None:
    example = EXAMPLES / "weight_updates.py"
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, example, tmp_path / "updates", "--steps", "3"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    packed = re.findall(r"^Update\((\d), (.+), nbytes=", done.stdout, re.MULTILINE)
    assert packed == [("1", "anchor"), ("2", "from 1"), ("3", "from 2")]
    served = re.findall(r"^version (\d): pause .+ ms, answer (\S+)$", done.stdout, re.MULTILINE)
    trained = re.search(r"^the trainer's answer: (\S+)$", done.stdout, re.MULTILINE)
    assert trained is not None
    assert served[-1] == ("3", trained[1])


@pytest.mark.slow
def test_embeddings_on_two_processes_learn(tmp_path: Path) -> None:
    example = EXAMPLES / "dlrm_exchange.py"
    assert len(example.read_text().splitlines()) < 60

    found = []
    for options in ([], ["--bounded"]):
        code, printed = run(example, tmp_path / "printed", *options)
        assert code == 0
        (nbytes,) = re.findall(r"^([\d,]+) B sent in a step$", printed, re.MULTILINE)
        found.append((float(losses_of(printed)[60]), int(nbytes.replace(",", ""))))
    (loss, nbytes), (bounded_loss, bounded_nbytes) = found
    assert loss < 0.2
    assert abs(bounded_loss - loss) < 0.02
    assert bounded_nbytes < nbytes / 2.5
