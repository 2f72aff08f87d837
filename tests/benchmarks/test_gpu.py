"""The benchmarks on GPUs: the whole commands on a tiny scale, its message without a GPU, and the
page of predictions."""

import argparse
import json
import math
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import fork_context

from benchmarks.common import figures
from benchmarks.gpu import (
    checks,
    collectives,
    command,
    device,
    host,
    host_layers,
    parts,
    peers,
    predictions,
    repeats,
    workers,
)
from packhorse.device.autotune import predictor, tune
from packhorse.gpu.models import PRESETS
from packhorse.gpu.search import Search
from packhorse.host import table as table_module
from packhorse.layout import W12

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "benchmarks" / "gpu.py"


interpreted = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] != "1", reason="needs Triton's interpreter"
)


@pytest.fixture
def run_form(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in this process, which has loaded PyTorch; gives its exit status."""
    # A smoke run makes the host a device; other tests need what was there before.
    monkeypatch.setattr(table_module, "is_on_device", table_module.is_on_device)

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        device.describe.cache_clear()  # it has the command
        return int(runpy.run_path(str(TOOL))["main"](sys.argv[1:]))

    return call


@interpreted
def test_every_part_runs_on_a_tiny_scale(tmp_path: Path, run_form: Callable[..., int]) -> None:
    assert run_form("device", "--smoke", "--out", tmp_path) == 0
    kept = json.loads((tmp_path / "smoke.json").read_text())
    assert kept["card"].endswith("times mean nothing")
    assert list(kept["parts"]) == list(device.PARTS)  # proofs come before what is timed
    assert [part for part in device.PARTS if not kept["parts"][part]] == ["rivals"]
    assert [row["n_runs"] for row in kept["parts"]["repeat"]] == [repeats.N_RUNS_SMALL] * 4
    formats = {row["form"] for row in kept["parts"]["check"]}
    ways = {row["way"] for row in kept["parts"]["table"]}
    weights = [row["weights"] for row in kept["parts"]["model"]]
    assert formats == {"W12", "W11"}
    assert ways == {"BF16", "W12", "W11", "W12 decoded first"}
    assert weights == ["BF16", "W12", "W11"]
    assert [row["way"] for row in kept["parts"]["load"]] == [
        "packed upload",
        "decoded on the host",
        "plain, by safetensors",
    ]


@interpreted
def test_collectives_run_on_a_tiny_scale(
    tmp_path: Path, run_form: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_context()  # its processes have imported PyTorch
    spawn = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    out = tmp_path / "kept.json"
    assert run_form("collectives", "--smoke", "--rounds", 1, "--out", out) == 0
    kept = json.loads(out.read_text())
    assert kept["card"] == "none: interpreted"
    assert kept["command"].startswith("benchmarks/gpu.py collectives --smoke")
    assert [(row["codec"], row["dtype"]) for row in kept["codecs"]] == [
        (codec, dtype) for dtype in ("bfloat16", "float32") for codec in ("exponents", "bounded")
    ]
    assert [row["operation"] for row in kept["rows"]] == [*collectives.OPERATIONS] * 2
    assert all(row["same_bits"] and row["ratio"] > 1.1 for row in kept["rows"])


@interpreted
def test_gathers_from_the_host_run_on_a_tiny_scale(
    tmp_path: Path, run_form: Callable[..., int]
) -> None:
    assert run_form("host", "--smoke", "--out", tmp_path) == 0
    kept = json.loads((tmp_path / "host-smoke.json").read_text())
    assert kept["card"].endswith("times mean nothing")
    assert kept["command"].startswith("gpu.py host --smoke")
    assert list(kept["parts"]) == list(host.PARTS)
    assert all(kept["parts"][part] for part in host.PARTS)
    ways = {row["way"] for row in kept["parts"]["rows"]}
    assert {"plain, in place", "plain, CPU and copy", "packed", "packed, each row once"} <= ways
    assert any("bitmap" in row["way"] for row in kept["parts"]["decode"])


def test_figures_are_kept_as_the_arguments_say(tmp_path: Path) -> None:
    place, chosen, written = tmp_path / "kept.json", tmp_path / "chosen.json", []

    def run(*argv: str) -> None:
        parser = argparse.ArgumentParser()
        figures.add_outputs(parser)
        args = parser.parse_args(argv)
        assert figures.run(args, place, lambda _: {"n": len(argv)}, written.append) == 0

    run("--json", str(chosen))
    assert json.loads(chosen.read_text()) == {"n": 2}
    assert not place.exists()
    run("--write")
    run("--render")
    assert json.loads(place.read_text()) == {"n": 1}
    assert written == [{"n": 1}, {"n": 1}]


def test_layers_in_host_memory_run_on_a_tiny_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and what the command sets does not stay
    out = tmp_path / "layers.json"
    assert host_layers.main(["--smoke", "--rounds", "1", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["card"] == "none: interpreted"
    assert {row["way"]: row["nbytes"] for row in kept["rows"]} == {
        "device": 0, "views": 2304, "ring": 2304, "plain views": 3072, "plain ring": 3072,
    }  # fmt: skip
    assert "plain ring" in capsys.readouterr().out
    monkeypatch.setattr(command, "RESULTS", tmp_path)  # is for figures of a GPU
    out.unlink()
    assert host_layers.main(["--smoke", "--rounds", "1"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_to_do(run_form: Callable[..., int]) -> None:
    assert [run_form(form) for form in ("collectives", "host", "layers")] == [3, 3, 3]
    command = [sys.executable, str(TOOL), "device"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert "--smoke" in done.stderr
    assert done.stdout == ""


def test_work_is_shared_out_and_late_work_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one process
    run = SimpleNamespace(smoke=False, ends=time.monotonic() + 200)
    found = dict(workers.spread(run, math.sqrt, [4.0, -1.0]))
    assert found[4.0] == 2.0
    assert found[-1.0].error.startswith("ValueError: ")
    run.ends = time.monotonic()
    assert list(workers.spread(run, time.sleep, [300.0])) == []


def test_jobs_of_a_process_that_has_lost_the_gpu_go_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes that are threads here: the first round loses the GPU at job 1."""
    monkeypatch.setattr(workers, "_PAUSE", 0.0)
    monkeypatch.setattr(workers, "_lost", [False])
    monkeypatch.setattr(workers, "gpu_answers", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rounds: list[int] = []

    class Context:
        def Pool(self, n: int) -> Any:
            rounds.append(n)
            workers._lost[0] = False
            return ThreadPool(1)

    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda kind: Context())
    run = SimpleNamespace(smoke=False, ends=time.monotonic() + 200)
    found = dict(workers.spread(run, math.sqrt, [4.0, -1.0, 9.0, 16.0]))
    assert found[-1.0].error.startswith("ValueError: ")
    assert [found[job] for job in (4.0, 9.0, 16.0)] == [2.0, 3.0, 4.0]
    assert len(rounds) == 2


def test_what_a_search_measures_was_likely() -> None:
    shape, buckets = workers.Shape("up", 28672, 4096, 1), (1, 8, 64)
    likely = workers.likely_products(shape, W12, PRESETS[0], buckets, None, False)
    expected = {product.code for product in likely}
    taken = set()
    search = Search(on_measured=lambda choice, n, _: taken.add((choice, n)))
    predict = predictor(28672, 4096, W12, PRESETS[0])
    tune(28672, 4096, W12, PRESETS[0], predict, buckets=buckets, search=search)
    codes = {workers.Product(choice, "W12", 4096, n).code for choice, n in taken}
    assert len(codes & expected) > 0.6 * len(codes)


def test_what_is_wrong_ends_a_run_and_what_fails_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(case: Any) -> None:
        raise (checks.WrongError if case.format in wrong else OSError)("a sum")

    run = SimpleNamespace(smoke=True, keep=lambda rows: None)
    monkeypatch.setattr(checks, "check_case", refuse)
    wrong: list[str] = []
    with pytest.raises(RuntimeError, match="patterns in order, W12: OSError: a sum; "):
        checks.check(run)
    wrong.append("W11")
    with pytest.raises(checks.WrongError, match="W11: WrongError: a sum"):
        checks.check(run)


def test_a_lost_gpu_does_not_take_the_figures_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(run: device.Run) -> None:
        run.keep([{"way": "BF16"}])
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(parts, "decode", lambda run: [{"form": "W12"}])
    monkeypatch.setattr(parts, "table", fail)
    calls: list[list[str]] = []
    monkeypatch.setattr(workers, "gpu_answers", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "device"])
    monkeypatch.setattr(device, "describe", lambda smoke: {"slug": "a"})
    names = ["decode", "table", "model"]
    args = SimpleNamespace(
        part=names, budget=100, smoke=False, cache=None, again=False, out=tmp_path
    )
    device.run_parts(args, time.monotonic())
    kept = json.loads((tmp_path / "a.json").read_text())["parts"]
    assert kept["decode"] == [{"form": "W12"}]
    assert kept["table"] == {"failed": "RuntimeError: CUDA error", "rows": [{"way": "BF16"}]}
    assert calls[-1][1:5] == ["gpu.py", "device", "--part", "model"]


def test_the_page_is_what_the_model_gives() -> None:
    written = (ROOT / "docs" / "benchmarks_gpu.md").read_text()
    assert predictions.document() == written
    assert "not yet measured on a GPU" in written
    assert "python benchmarks/gpu.py device" in written


def test_a_rival_that_is_missing_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SHAPE", (64, 64))
    for name in peers.PEERS:
        row = peers.measure(name, torch.device("cpu"))
        assert row.keys() & {"missing", "error"}, "no rival runs on the host"
        assert row["shape"] == "64 x 64"
