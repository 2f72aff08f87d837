"""Measure `packhorse report`: `python benchmarks/reports.py [--write]`.

The weights of the sentence model, rounded to bf16 and repeated to 1 GB under the names of layers,
are one file; 10,000 small tensors are another; eight checkpoints with an optimizer's small steps
are a series. Each report runs as a process of its own, with the options that users have by default
unless the row says otherwise. The figures are seconds of the whole process, its peak of memory
(mapped pages of files count), the size of the page, and how far the sampled total is from the true
one, beside the error that the report states.

`--write` keeps the figures in `benchmarks/results/reports.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import figures, process
from benchmarks.data import sets

RESULT = Path(__file__).resolve().parent / "results" / "reports.json"
NBYTES = 1_000_000_000
N_SMALL = 10_000
N_STEPS = 8
ROUNDS = 3
Tensors = dict[str, NDArray[Any]]

# Runs the command, and then prints its peak of memory.
CHILD = """
import sys
from pathlib import Path
from packhorse.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text().splitlines()
sys.stderr.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))
sys.exit(code)
"""


@dataclass(frozen=True)
class Row:
    """One report.

    Attributes:
        name: what it is about, and its options.
        nbytes: bytes of the sources.
        n_tensors: tensors of a source.
        seconds: of the whole process, the fastest round.
        peak_nbytes: the largest resident size of the process.
        page_nbytes: size of the page.
        ratio: what the report says, at the level "default".
        error: how far off the packed size may be, as the report says, as a share of it.
        off: how far the packed size is from the true one, as a share of it; None if that is not
            known.
    """

    name: str
    nbytes: int
    n_tensors: int
    seconds: float
    peak_nbytes: int
    page_nbytes: int
    ratio: float
    error: float
    off: float | None = None


def _weights() -> Tensors:
    """The sentence model in bf16."""
    tensors = safetensors.numpy.load_file(sets.model_path())
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float32}
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in floats.items()}


def _large(weights: Tensors) -> Tensors:
    n_copies = NBYTES // sum(tensor.nbytes for tensor in weights.values()) + 1
    return {f"model.layers.{i}.{n}": t for i in range(n_copies) for n, t in weights.items()}


def _small(weights: Tensors) -> Tensors:
    rows = weights["embeddings.word_embeddings.weight"][: N_SMALL * 3 // 2]
    pieces = rows.reshape(-1)[: N_SMALL * 512].reshape(N_SMALL, 16, 32)
    return {f"model.layers.{i // 100}.experts.{i % 100}.w": p for i, p in enumerate(pieces)}


def _steps(weights: Tensors) -> list[Tensors]:
    """Checkpoints between which each value moves by about one absolute size, as AdamW does it."""
    rng, found = np.random.default_rng(sets.SEED), []
    state = {name: tensor.astype(np.float32) for name, tensor in weights.items()}
    for _ in range(N_STEPS):
        for tensor in state.values():
            tensor += rng.standard_normal(tensor.shape, np.float32) * np.float32(1e-4)
        found.append({n: t.astype(ml_dtypes.bfloat16) for n, t in state.items()})
    return found


def _measure(name: str, words: list[str], folder: Path, truth: int | None = None) -> Row:
    page = folder / "page.html"
    seconds, peak = [], 0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", CHILD, "report", *words, "-o", str(page), "--force"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        seconds.append(time.perf_counter() - start)
        peak = max(peak, 1024 * int(done.stderr.splitlines()[-1]))
    plain = [word for word in words if not word.startswith("--")]
    full = ["--full"] if "--full" in words else []
    text = subprocess.run(
        [sys.executable, "-m", "packhorse", "report", *plain, *full, "--no-engines", "--json"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = json.loads(text)["results"][0]
    levels = [tensor["levels"]["default"] for tensor in found["tensors"]]
    packed = sum(level["nbytes"] for level in levels)
    error = sum(level["error"] for level in levels)
    nbytes = sum(tensor["nbytes"] for tensor in found["tensors"])
    return Row(
        name, sum(source["nbytes"] for source in found["sources"]), len(found["tensors"]),
        min(seconds), peak, page.stat().st_size, nbytes / packed, error / packed,
        None if truth is None else packed / truth - 1,
    )  # fmt: skip


def _frames_nbytes(path: Path, folder: Path) -> int:
    """Bytes of the frames of a file once it is really packed."""
    packed = folder / "packed.ph.safetensors"
    command = [sys.executable, "-m", "packhorse"]
    subprocess.run([*command, "pack", path, "-o", packed, "--force"], check=True)
    text = subprocess.run(
        [*command, "inspect", packed, "--json"], check=True, capture_output=True, text=True
    ).stdout
    packed.unlink()
    return sum(tensor["packed_nbytes"] for tensor in json.loads(text)["results"][0]["tensors"])


def measure() -> dict[str, Any]:
    """All figures."""
    result = figures.begin()
    weights, rows = _weights(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = folder / "large.safetensors", folder / "small.safetensors"
        safetensors.numpy.save_file(_large(weights), large)
        safetensors.numpy.save_file(_small(weights), small)
        truth = _frames_nbytes(large, folder)
        for step, tensors in enumerate(_steps(weights)):
            safetensors.numpy.save_file(tensors, folder / f"step-{step}.safetensors")
        series = str(folder / "step-*.safetensors")
        for name, source, options, true in (
            ("1 GB of bf16", large, [], truth),
            ("1 GB of bf16, without other packers", large, ["--no-engines"], truth),
            ("1 GB of bf16, --full", large, ["--no-engines", "--full"], truth),
            ("10,000 small tensors", small, ["--no-engines"], None),
            ("8 checkpoints of bf16", series, ["--no-engines"], None),
            ("8 checkpoints of bf16, --full", series, ["--no-engines", "--full"], None),
        ):
            row = _measure(name, [str(source), *options], folder, true)
            print(_line(row), flush=True)
            rows.append(asdict(row))
    figures.end(result)
    return result | {
        "kind": "reports",
        "date": datetime.now(UTC).date().isoformat(),
        "path": process.code_path(),
        "versions": {name: version(name) for name in ("packhorse", "numpy", "vl-convert-python")},
        "rows": rows,
    }


def _line(row: Row) -> str:
    off = "" if row.off is None else f", {row.off:+.3%} from the true size"
    return (
        f"{row.name}: {row.seconds:.1f} s, {row.peak_nbytes / 1e6:.0f} MB of memory, page "
        f"{row.page_nbytes / 1e6:.2f} MB, ratio {row.ratio:.3f} (error {row.error:.3%}{off})"
    )


def main(argv: list[str]) -> int:
    """Measure, and keep the figures if asked to.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Measure packhorse report.")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    result = measure()
    if args.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
