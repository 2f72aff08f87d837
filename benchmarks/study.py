"""What compresses in training, and why: `python benchmarks/study.py [--write] [--out DIR]`.

Trains one small model in six ways on one thread: AdamW with fp32 masters, the same in pure bf16,
with a tenth of the learning rate, and without weight decay, then Muon, and SGD with momentum. Then
it measures, for each run, how weights, masters and moments pack, alone and as differences from
earlier steps; which bits are to blame; how far a step moves values; and what other engines reach,
with and without grouped bytes and XOR. Last come the weights of a published sentence model.

The runs take half an hour of one core, and 5.5 GB in `build/study`; a run that was stopped goes on,
and a complete one is not repeated. `--write` keeps the figures in `benchmarks/results/study.json`
and writes `docs/compressibility.md` and its pictures; `--render` only writes the page again.
"""

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import figures
from benchmarks.data import sets
from benchmarks.study import report
from benchmarks.study.measure import Tensors, alone, engines_of, measure_run
from benchmarks.study.runs import LAST, RUNS, StudyRun, expected_nbytes, train_run
from benchmarks.study.states import States
from packhorse.codecs.base import Isa, choose_isa

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "study.json"
PACKAGES = ("packhorse", "torch", "numpy", "zstandard", "lz4", "zipnn", "openzl")
SECONDS = 30  # of processor time for each comparison of engines
# The part of the first run's state that engines pack, its step, and the steps back to its base.
ENGINE_CASES = (
    *(("weights", LAST, 0), ("masters", LAST, 0)),
    *(("first moments", LAST, 0), ("second moments", LAST, 0)),
    *(("weights", 512, gap) for gap in (1, 16, 128)),
    *(("masters", 512, 1), ("second moments", 512, 1), ("weights", LAST, 1)),
)
# Matrices of one width, so that they can lie one above the other.
ENGINE_MATRICES = re.compile(r"layers\.[12]\..*(q|k|v|o|gate|up)_proj")
MODEL_MATRICES = re.compile(r"layer\.2\.(attention\..*dense|attention\.self|intermediate)")


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        description="Train six small models, and measure what compresses in them."
    )
    folder = ROOT / "build" / "study"
    parser.add_argument("--out", type=Path, metavar="DIR", default=folder, help="where runs are")
    parser.add_argument("--train-only", action="store_true", help="measure nothing")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    try:
        if not args.render:
            _train_all(args.out)
        return 0 if args.train_only else figures.run(args, RESULT, _measure, _write)
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _train_all(folder: Path) -> None:
    nbytes = sum(map(expected_nbytes, RUNS))
    print(f"{len(RUNS)} training runs take {nbytes / 1e9:.1f} GB in {folder}")
    texts = [text.encode() for text in sets.library_sources()]
    for run in RUNS:
        if not train_run(run, folder / run.name, texts, on_step=_Progress(run)):
            print(f"{run.name:8}  complete")


class _Progress:
    """One line every 32 steps."""

    def __init__(self, run: StudyRun) -> None:
        self._name = run.name
        self._losses: list[float] = []
        self._begun = time.monotonic()
        self._n_done = 0

    def __call__(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        self._n_done += 1
        if step % 32 == 0:
            mean = sum(self._losses) / len(self._losses)
            left = (time.monotonic() - self._begun) / self._n_done * (LAST - step)
            print(
                f"{self._name:8}  step {step:4} of {LAST}  loss {mean:.3f}  {left:.0f} s left",
                flush=True,
            )
            self._losses.clear()


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": "study",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "path": Isa(choose_isa()).name.lower(),
        **figures.begin(),
        "runs": {},
    }
    for run in RUNS:
        print(f"measuring {run.name}", flush=True)
        states = States(run, args.out / run.name)
        result["runs"][run.name] = _described(states) | measure_run(
            states, in_detail=run is RUNS[0]
        )
    print("measuring the sentence model", flush=True)
    models = _models()
    result["models"] = {dtype: alone(tensors, dtype) for dtype, tensors in models.items()}
    result["engines"] = [*_engines_of_run(States(RUNS[0], args.out / RUNS[0].name))]
    for dtype, tensors in models.items():
        print(f"engines: {dtype} sentence model", flush=True)
        chosen = {n: t for n, t in tensors.items() if t.ndim == 2 and MODEL_MATRICES.search(n)}
        part = f"{dtype} sentence model"
        case = {"part": part, "step": None, "gap": 0, "dtype": dtype}
        table = engines_of(chosen, dtype, None, title=part, seconds=SECONDS)
        result["engines"].append(case | table)
    figures.end(result)
    return result


def _described(states: States) -> dict[str, Any]:
    run, manifest = states.run, states.manifest
    losses = manifest["losses"]
    return {
        "title": run.title,
        "peak_rate": run.peak_rate,
        "weight_decay": run.weight_decay,
        "n_parameters": sum(int(np.prod(shape)) for shape in manifest["parameters"].values()),
        "n_seen": LAST * run.batch * run.context,
        "cpu_seconds": manifest["cpu_seconds"],
        "losses": {str(n): round(sum(losses[n - 16 : n]) / 16, 3) for n in (64, 512, LAST)},
        "sha256": manifest["tokens_sha256"],
    }


def _models() -> dict[str, Tensors]:
    """The tensors of the sentence model, as published and rounded to bf16."""
    plain, rounded = sets.make("model_fp32").tensors, sets.make("model_bf16").tensors
    return {"F32": dict(plain), "BF16": dict(rounded)}


def _engines_of_run(states: States) -> Any:
    for part, step, gap in ENGINE_CASES:
        dtype = states.dtype(part)
        title = f"{part}, {dtype}, step {step}" + (f" against step {step - gap}" if gap else "")
        print(f"engines: {title}", flush=True)
        new, old = (
            {n: t for n, t in states.tensors(at, part).items() if ENGINE_MATRICES.search(n)}
            for at in (step, step - gap)
        )
        table = engines_of(new, dtype, old if gap else None, title=title, seconds=SECONDS)
        yield {"part": part, "step": step, "gap": gap, "dtype": dtype} | table


def _write(result: dict[str, Any]) -> None:
    for name, text in report.documents(result).items():
        (ROOT / "docs" / name).write_text(text)
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
