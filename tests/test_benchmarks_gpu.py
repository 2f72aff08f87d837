"""The benchmarks on GPUs: the whole command on a tiny scale, what it says without a GPU, and the
page of predictions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "benchmarks" / "gpu.py"


def run_tool(*words: object) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOL), "device", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_every_part_runs_on_a_tiny_scale(tmp_path: Path) -> None:
    done = run_tool("--smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "smoke.json").read_text())
    assert kept["card"].endswith("times mean nothing")
    assert set(kept["parts"]) == {"check", "decode", "load", "tune", "table", "model"}
    assert all(kept["parts"].values())
    forms = {row["form"] for row in kept["parts"]["check"]}
    ways = {row["way"] for row in kept["parts"]["table"]}
    weights = [row["weights"] for row in kept["parts"]["model"]]
    assert forms == {"W12", "W11"}
    assert ways == {"BF16", "W12", "W11", "W12 decoded first"}
    assert weights == ["BF16", "W12", "W11"]
    assert [row["way"] for row in kept["parts"]["load"]] == [
        "packed upload",
        "decoded on the host",
        "plain, by safetensors",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = run_tool()
    assert done.returncode == 3
    assert "--smoke" in done.stderr
    assert done.stdout == ""


def test_the_page_is_what_the_model_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_model

    written = (ROOT / "docs" / "benchmarks_gpu.md").read_text()
    assert gpu_model.document() == written
    assert "not yet measured on a GPU" in written
    assert "python benchmarks/gpu.py device" in written


def test_a_rival_that_is_missing_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_peers

    monkeypatch.setattr(gpu_peers, "SHAPE", (64, 64))
    for name in gpu_peers.PEERS:
        row = gpu_peers.measure(name, torch.device("cpu"))
        assert row.keys() & {"missing", "error"}, "no rival runs on the host"
        assert row["shape"] == "64 x 64"
