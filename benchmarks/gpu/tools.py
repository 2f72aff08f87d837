"""Parts of gpu.py that start other programs: `versions`, `tests`, `sanitize` and `profile`.

A tool that this machine lacks, or that its driver refuses, is told and stops nothing. A hazard that
compute-sanitizer finds, or a product that is wrong under it, stops the run.
"""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import products
from benchmarks.gpu.checks import WrongError

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run

__all__ = ["profile", "sanitize", "tests", "versions"]

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "benchmarks" / "gpu.py"
CUDA_BIN = Path("/usr/local/cuda/bin")
TESTS = ("tests/device/test_gpu.py", "tests/kernels/test_weights.py")
ARCHITECTURE = 90
SANITIZED = ("256x1024x8", "136x1000x40")  # of which the second fills no block
PROFILED = ("28672x4096x8", "4096x14336x8", "4096x4096x8", "4096x14336x32", "4096x14336x128")
SMALL = ("24x70x3",)
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis_Tables",
    "ComputeWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "Occupancy",
)
# The kernel in CUDA C++. A warp there copies tokens by cp.async, waits for them, meets its lanes,
# and one lane arrives at an mbarrier. On an H200, racecheck of CUDA 13.0 took these copies and the
# loads of the warps that wait at the mbarrier for races. `repeats.py` looks for real ones.
_STREAM_KERNEL = "multiply+"
# Parts of the names of ncu's metrics that are kept.
METRICS = (
    "dram_throughput.avg.pct",
    "dram__throughput.avg.pct",
    "lts__throughput.avg.pct",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg",
    "issue_stalled",
    "pipe_alu.avg.pct_of_peak_sustained_active",
    "pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    "pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "bank_conflicts_pipe_lsu_mem_shared.sum",
    "sm__warps_active.avg.pct",
    "gpu__time_duration.avg",
)


def versions(run: "Run") -> list[dict[str, Any]]:
    """What decides about machine code: Triton, and the ptxas that it really runs."""
    import torch
    import triton

    import packhorse

    ptxas, ptxas_version = _ptxas()
    found = {
        "python": sys.version.split()[0],
        "packhorse": packhorse.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "ptxas": ptxas_version,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "card": "none" if run.smoke else torch.cuda.get_device_name(),
        "model of time": _model_of_time(run),
        "compute-sanitizer": _is_there("compute-sanitizer"),
        "ncu": _is_there("ncu"),
    }
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    print(f"(Triton runs {ptxas})", flush=True)
    return [{"of": name, "version": value} for name, value in found.items()]


def _model_of_time(run: "Run") -> str:
    """The card whose figures predictions are made of."""
    import torch

    from packhorse.gpu.detect import describe_device
    from packhorse.gpu.models import GENERIC

    name = describe_device(torch.device("cpu" if run.smoke else "cuda")).name
    unknown = "an A100 in proportion: this card is not known, so predictions are rough"
    return unknown if name == GENERIC.name else name


def _ptxas() -> tuple[str, str]:
    """The path and the version of the ptxas that Triton runs for Hopper."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = str(get_ptxas(ARCHITECTURE).path)
    lines = _run([path, "--version"], timeout=30).stdout.splitlines()
    return path, next((line for line in lines if "release" in line), "unknown")


def tests(run: "Run") -> list[dict[str, Any]]:
    """Run the tests that need a GPU, and those of the kernels, compiled and not interpreted.

    Raises:
        RuntimeError: a test fails, or none could be run. Part `check`, which follows, tells whether
            products are wrong.
    """
    missing = [name for name in TESTS if not (ROOT / name).is_file()]
    if missing:
        raise RuntimeError(f"there is no {', '.join(missing)}")
    if run.smoke:
        return [{"tests": name, "summary": "not run"} for name in TESTS]
    # conftest.py would need packages of the other tests.
    options = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-W", "default"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    done = _run(command, timeout=run.left(), TRITON_INTERPRET="0")
    summary = _last_line(done.stdout) or _last_line(done.stderr)
    print(summary, flush=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        raise RuntimeError(f"tests: {summary}")
    return [{"tests": " ".join(TESTS), "summary": summary}]


def sanitize(run: "Run") -> list[dict[str, Any]]:
    """Run a product of each kind under compute-sanitizer: races in shared memory, and accesses
    outside of tensors.

    Raises:
        WrongError: it finds a hazard, or a product is wrong.
    """
    if run.smoke:
        return _without_a_tool("fused", "decode")
    watched = _products(SANITIZED, "fused", "stream", "decode")
    tool = _path_of("compute-sanitizer")
    if tool is None:
        return _missing("compute-sanitizer")
    rows = []
    for name in ("memcheck", "racecheck"):
        # PyTorch's own allocator would hide what lies beyond a tensor.
        command = [tool, "--tool", name, *watched]
        done = _run(command, timeout=run.left(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        rows.append({"tool": name, "summary": _sanitized(name, done)})
        print(f"{name}: {rows[-1]['summary']}", flush=True)
        run.keep(rows)
    return rows


def _sanitized(name: str, done: "subprocess.CompletedProcess[str]") -> str:
    """The summary of compute-sanitizer; what it says instead if it could not run.

    Raises:
        WrongError: it has found something.
    """
    text = done.stdout + done.stderr
    summary = next((line for line in text.splitlines() if "SUMMARY:" in line), None)
    if summary is None:  # the driver or the machine refuses it
        return f"not run: {_last_line(text)}"
    summary = summary.strip("= ")
    count = next((word for word in summary.partition(":")[2].split() if word.isdigit()), None)
    races = [line for line in text.splitlines() if "Race reported between" in line]
    if races and all(_STREAM_KERNEL in line for line in races):
        known = "all in the kernel in CUDA C++, whose order of copies racecheck does not follow"
        return f"{summary}; {known}; {_outcome(done, name)}"
    if count != "0":
        print(text[-8000:], flush=True)
        raise WrongError(f"{name}: {summary}")
    return f"{summary}; {_outcome(done, name)}"


def profile(run: "Run") -> list[dict[str, Any]]:
    """Profile products with ncu: throughput of memory, issue slots, what warps wait for, conflicts
    of shared memory, occupancy.

    Raises:
        WrongError: a product is wrong.
    """
    if run.smoke:
        return _without_a_tool("chosen")
    watched = _products(PROFILED, "chosen")
    tool = _path_of("ncu")
    if tool is None:
        return _missing("ncu")
    sections = [word for name in SECTIONS for word in ("--section", name)]
    kernels = ["--kernel-name", "regex:multiply|stream"]
    # The clocks stay as they are: others measure here, too.
    command = [tool, "--clock-control", "none", "--csv", "--page", "raw", *sections, *kernels]
    done = _run([*command, *watched], timeout=run.left())
    rows = list(read_profile(done.stdout))
    if not rows:
        print(f"ncu: not run: {_last_line(done.stdout + done.stderr)}", flush=True)
        return [{"tool": "ncu", "summary": f"not run: {_last_line(done.stdout + done.stderr)}"}]
    _outcome(done, "ncu")
    for row in rows:
        print(row["kernel"], row["grid"])
        for metric, value in row["metrics"].items():
            print(f"    {metric}: {value}")
    return rows


def read_profile(text: str) -> Iterator[dict[str, Any]]:
    """The kernels in ncu's CSV, with the metrics of `METRICS`; other lines of its output are
    skipped."""
    lines = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    head, units = next(lines, None), next(lines, None)
    if head is None or units is None or "Kernel Name" not in head:
        return
    for line in lines:
        cells = dict(zip(head, line, strict=False))
        metrics = {
            name if not unit else f"{name} ({unit})": cells[name]
            for name, unit in zip(head, units, strict=False)
            if any(part in name for part in METRICS) and cells.get(name)
        }
        yield {
            "kernel": cells["Kernel Name"], "grid": cells.get("Grid Size", ""), "metrics": metrics
        }  # fmt: skip


def _products(sizes: Sequence[str], *ways: str) -> list[str]:
    """The command that runs products in each way."""
    words = [word for way in ways for word in ("--way", way)]
    return [sys.executable, str(TOOL), "products", *sizes, *words]


def _without_a_tool(*ways: str) -> list[dict[str, Any]]:
    """Run tiny products in this process, for a smoke run."""
    words = _products(SMALL, *ways)
    if products.main([*words[words.index("products") + 1 :], "--smoke"]):
        raise WrongError("a product is wrong")
    return [{"tool": "none", "summary": f"{len(ways)} products right"}]


def _outcome(done: "subprocess.CompletedProcess[str]", name: str) -> str:
    """How many products were right.

    Raises:
        WrongError: one was wrong.
        RuntimeError: they could not be run.
    """
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.endswith(" WRONG")]
    if wrong:
        raise WrongError(f"{name}: {'; '.join(wrong)}")
    n_right = sum(line.endswith(" right") for line in lines)
    if done.returncode or not n_right:
        print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
        raise RuntimeError(f"{name}: {_last_line(done.stderr) or 'nothing was run'}")
    return f"{n_right} products right"


def _missing(name: str) -> list[dict[str, Any]]:
    print(f"{name} is not on this machine: not run", flush=True)
    return [{"tool": name, "summary": "missing"}]


def _is_there(name: str) -> str:
    return "missing" if _path_of(name) is None else "here"


def _path_of(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=CUDA_BIN)


def _run(
    command: Sequence[str], *, timeout: float, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program; one that is late gives what it has printed, and the status 124."""
    environment = os.environ | variables
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        return subprocess.CompletedProcess(command, 124, out, f"stopped after {timeout:.0f} s")


def _first_line(*command: str) -> str:
    try:
        return _run(command, timeout=30).stdout.split("\n")[0].strip() or "unknown"
    except OSError:
        return "unknown"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
