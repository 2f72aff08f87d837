"""Parts of gpu.py that start other programs, and what it carries to a machine without a network.

The tools of CUDA need a GPU, so small programs with their names print what the tools would.
"""

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from benchmarks.gpu import device, kept_simulations, parts, products, reading, tools, wheels
from benchmarks.gpu.checks import WrongError
from benchmarks.gpu.predictions import H200
from packhorse.device.product_check import ExactProduct, WrongProductWarning
from packhorse.device.strategy import Choice, Strategy
from packhorse.gpu.models import GENERIC
from packhorse.kernels.matmul import MatmulConfig
from packhorse.kernels.stream_product import StreamConfig
from packhorse.layout import W11, W12

ROOT = Path(__file__).resolve().parents[2]
RIGHT = "256x1024x8 fused right\n256x1024x8 decode right\n"
NONE = "========= ERROR SUMMARY: 0 errors\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
PROFILE = """==PROF== Connected to process 77
256x1024x8 chosen right
==PROF== Disconnected from process 77
"ID","Kernel Name","Grid Size","dram__throughput.avg.pct","smsp__issue_active.avg.pct","other"
"","","","%","%",""
"0","multiply_weights_kernel","(256, 1, 1)","81.2","33.1","7"
"1","multiply_weights_kernel","(128, 1, 1)","62.5","",""
"""


def run_of(*, smoke: bool = False) -> Any:
    return SimpleNamespace(smoke=smoke, left=lambda: 60.0, keep=lambda rows: None)


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing changes where packages are found, here for one test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the tools print a text."""

    def make(text: str) -> None:
        (tmp_path / "text").write_text(text)
        for name in ("compute-sanitizer", "ncu"):
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\ncat '{tmp_path}/text'\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


@pytest.mark.parametrize("summary", [NONE, NO_RACES])
def test_the_sanitizer_finds_nothing(summary: str, tool: Any) -> None:
    tool(RIGHT + summary)
    rows = tools.sanitize(run_of())
    assert [row["tool"] for row in rows] == ["memcheck", "racecheck"]
    assert all("2 products right" in row["summary"] for row in rows)


RACE = """========= Error: Race reported between Write access at {}+0x3d70
=========     and Read access at {}+0x60c0 [2048 hazards]
"""


def test_races_of_copies_that_mbarriers_order_stop_nothing(tool: Any) -> None:
    summary = NO_RACES.replace("0 hazards", "12 hazards")
    tool(RIGHT + RACE.replace("{}", "multiply") + summary)
    assert "racecheck does not follow" in tools.sanitize(run_of())[1]["summary"]
    tool(RIGHT + RACE.replace("{}", "multiply") + RACE.replace("{}", "decode_kernel") + summary)
    with pytest.raises(WrongError, match="12 hazards"):
        tools.sanitize(run_of())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (RIGHT + NONE.replace("0 errors", "3 errors"), "memcheck: ERROR SUMMARY: 3 errors"),
        (RIGHT + NO_RACES.replace("0 hazards", "12 hazards"), "12 hazards"),
        (RIGHT.replace("decode right", "decode WRONG") + NONE, "256x1024x8 decode WRONG"),
    ],
)
def test_what_the_sanitizer_finds_stops_the_run(text: str, match: str, tool: Any) -> None:
    tool(text)
    with pytest.raises(WrongError, match=match):
        tools.sanitize(run_of())


def test_a_tool_that_is_refused_or_missing_is_told(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("========= Error: Device not supported\n")
    assert {row["summary"] for row in tools.sanitize(run_of())} == {
        "not run: ========= Error: Device not supported"
    }
    tool("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n")
    assert "LibraryNotLoaded" in tools.profile(run_of())[0]["summary"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(tools, "CUDA_BIN", tmp_path / "empty")
    assert tools.sanitize(run_of()) == [{"tool": "compute-sanitizer", "summary": "missing"}]
    assert tools.profile(run_of()) == [{"tool": "ncu", "summary": "missing"}]


def test_a_profile_is_read(tool: Any) -> None:
    tool(PROFILE)
    first, second = tools.profile(run_of())
    assert first["kernel"] == "multiply_weights_kernel"
    assert first["metrics"] == {
        "dram__throughput.avg.pct (%)": "81.2",
        "smsp__issue_active.avg.pct (%)": "33.1",
    }
    assert (second["grid"], list(second["metrics"])) == (
        "(128, 1, 1)",
        ["dram__throughput.avg.pct (%)"],
    )
    tool(PROFILE.replace("chosen right", "chosen WRONG"))
    with pytest.raises(WrongError, match="chosen WRONG"):
        tools.profile(run_of())


def test_tests_that_fail_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n")
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setattr(tools, "TESTS", ("test_it.py",))
    with pytest.raises(RuntimeError, match="1 failed"):
        tools.tests(run_of())
    monkeypatch.setattr(tools, "TESTS", ("test_it.py", "test_gone.py"))
    with pytest.raises(RuntimeError, match="there is no test_gone"):
        tools.tests(run_of())


def test_a_program_that_is_late_is_stopped() -> None:
    done = tools._run(["sh", "-c", "echo so far; exec sleep 60"], timeout=0.5)
    assert (done.returncode, done.stdout) == (124, "so far\n")


def test_the_ptxas_that_runs_is_named() -> None:
    found = {row["of"]: row["version"] for row in tools.versions(run_of(smoke=True))}
    assert "release" in found["ptxas"]
    assert found["torch"] == torch.__version__
    assert "this card is not known" in found["model of time"]


def test_products_are_compared_with_fp64(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert products.main(["24x70x3", "--way", "decode", "--smoke"]) == 0
    monkeypatch.setattr(ExactProduct, "allows", lambda *_: False)
    assert products.main(["24x70x3", "--way", "decode", "--smoke"]) == 1
    assert capsys.readouterr().out == "24x70x3 decode right\n24x70x3 decode WRONG\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_products_without_a_gpu_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["24x70x3"]) == 3
    assert "--smoke" in capsys.readouterr().err


def test_a_product_that_is_not_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        products.main(["24x70"])
    assert "'24x70' is no product" in capsys.readouterr().err


def test_reading_that_leaves_something_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(smoke=True)
    assert reading.ceilings(run) == [{"ceiling": "reading", "programs": 3}]
    read = reading.read_all
    monkeypatch.setattr(
        reading, "read_all", lambda src, n, sums: read(src[: -reading._BLOCK], n, sums)
    )
    with pytest.raises(WrongError, match="3 programs"):
        reading.ceilings(run)


def test_a_wrong_product_that_the_tuner_meets_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(run: Any) -> None:
        warnings.warn("a division gives a WRONG PRODUCT", WrongProductWarning, stacklevel=1)

    monkeypatch.setattr(parts, "tune", tune)
    monkeypatch.setattr(parts, "table", None)
    args = SimpleNamespace(
        part=["tune", "table"], budget=9, smoke=True, cache=None, again=False, out=tmp_path
    )
    found = device.run_parts(args, 0.0)
    assert found == {"tune": {"wrong": "a division gives a WRONG PRODUCT", "rows": []}}
    assert "WRONG: a division" in capsys.readouterr().out


def test_simulated_times_stand_beside_measured_ones_on_the_simulated_card_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, stream = kept_simulations.read().rows[0], kept_simulations.read_streams()[0]
    fused = Choice(Strategy.FUSED, MatmulConfig(*kept.division))
    streamed = Choice(Strategy.STREAM, StreamConfig(*stream.division))
    a_slice = dataclasses.replace(H200, n_processors=18)
    for model, row, format, choice, seconds in (
        (H200, kept, W12, fused, kept.early),
        (H200, kept, W11, fused, None),
        (H200, kept, W12, Choice(Strategy.DECODE), None),
        (H200, stream, W12, streamed, stream.early),
        (a_slice, kept, W12, fused, None),
        (GENERIC, kept, W12, fused, None),
    ):
        monkeypatch.setattr(parts, "describe_device", lambda _, model=model: model)
        shape = parts.Shape("any", row.n_rows, row.n_columns, 1)
        device = torch.device("cuda", 0)
        assert parts.simulate(shape, row.n_tokens, format, choice, device) == seconds
    found = parts.table_row(shape, 8, "W12", "fused", 4e-6, 3e-6, 5e-6, 1.5, 2e-6)
    assert found["simulated"] == 2e-6
    assert " | 3.0 | 2.0 | " in capsys.readouterr().out


# Packages for a machine without a network.


def make_wheel(folder: Path) -> None:
    name = "packhorse_trial-1.0"
    with ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
        file.writestr("packhorse_trial.py", "ANSWER = 42\n")
        file.writestr(
            f"{name}.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: packhorse-trial\nVersion: 1.0\n",
        )
        file.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{name}.dist-info/RECORD", "")


def test_missing_packages_are_installed_from_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path)
    monkeypatch.delitem(sys.modules, "packhorse_trial", raising=False)
    wheels.install(tmp_path)
    command = [sys.executable, "-c", "import packhorse_trial; print(packhorse_trial.ANSWER)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "42\n"
    monkeypatch.setattr(wheels, "_pip", None)  # what is there is not installed again
    wheels.install(tmp_path)


def test_a_folder_without_wheels_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device.main(["--wheels", str(tmp_path)]) == 3
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    error = capsys.readouterr().err
    assert f"{tmp_path} has no wheels" in error
    assert f"gpu.py wheels {tmp_path.name} --python {version}`" in error
    assert device.main(["--wheels", str(tmp_path / "none")]) == 3
    assert "none is not a folder" in capsys.readouterr().err
    (tmp_path / "bad-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    with pytest.raises(wheels.WheelError, match="pip install failed"):
        wheels.install(tmp_path)


def test_a_missing_package_names_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "packhorse", None)
    assert device.main([]) == 3
    assert "gpu.py device --wheels FOLDER" in capsys.readouterr().err


def test_wheels_are_those_of_the_other_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(wheels, "_pip", lambda *words: calls.append(words))
    folder = tmp_path / "new"
    assert wheels.main([str(folder), "--python", "3.13", "--package", "nvidia-nvcomp-cu13"]) == 0
    (words,) = calls
    assert words[words.index("--python-version") + 1] == "3.13"
    assert {"--no-deps", "--only-binary=:all:", "zstandard", "nvidia-nvcomp-cu13"} <= set(words)
    assert "0 wheels" in capsys.readouterr().out


def test_wheels_that_cannot_be_downloaded_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: str) -> None:
        raise wheels.WheelError("pip download failed: no network")

    monkeypatch.setattr(wheels, "_pip", fail)
    assert wheels.main([str(tmp_path)]) == 1
    assert "Not all wheels for Python 3.12 were downloaded" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert wheels.main([str(tmp_path / "file")]) == 1
    assert "file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wheels.main([str(tmp_path), "--python", "banana"])
    assert "--python is 'banana'" in capsys.readouterr().err
