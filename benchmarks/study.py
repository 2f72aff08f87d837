"""What is compressible in training, and why: `python benchmarks/study.py [--write] [--out DIR]`."""

import argparse
import sys
import time
from pathlib import Path

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data import sets
from benchmarks.study.runs import LAST, RUNS, StudyRun, expected_nbytes, train_run

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Train six small models.")
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "build" / "study")
    args = parser.parse_args(argv)
    try:
        _train_all(args.out)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _train_all(folder: Path) -> None:
    nbytes = sum(map(expected_nbytes, RUNS))
    print(f"{len(RUNS)} training runs take {nbytes / 1e9:.1f} GB in {folder}")
    texts = [text.encode() for text in sets.library_sources()]
    for run in RUNS:
        train_run(run, folder / run.name, texts, on_step=_Progress(run))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
