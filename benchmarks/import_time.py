"""Measure the cost of `import packhorse`: `python benchmarks/import_time.py`.

Fresh processes run in turn, one that imports NumPy and one that imports Packhorse. Each is timed
as a whole by the wall clock, and the figure is the difference of the medians. The command exits 1
if that reaches `LIMIT_S`, or if torch was loaded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs import report

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "import_time.json"
DOCUMENT = HERE.parent / "docs" / "benchmarks_codecs.md"
LIMIT_S = 0.15
NUMPY = "import numpy"
PACKHORSE = "import packhorse, sys; sys.exit('torch' in sys.modules)"


def main(argv: list[str]) -> int:
    """Measure and print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if importing takes too long or loads torch.
    """
    parser = argparse.ArgumentParser(description="Cost of importing Packhorse.")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args(argv)
    if subprocess.run([sys.executable, "-c", PACKHORSE], check=False).returncode:
        print("import packhorse loads torch, or fails")
        return 1
    above = _above_numpy(args.rounds)
    print(f"import packhorse: {above * 1e3:.0f} ms more than import numpy; torch is not loaded")
    if args.write:
        result = {"kind": "import_time", "rounds": args.rounds, "above_numpy_s": above}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        DOCUMENT.write_text(report.document(RESULT.parent))
    return int(above >= LIMIT_S)


def _above_numpy(rounds: int) -> float:
    """Difference of the medians in seconds. The runs alternate, so that a disturbance affects
    both."""
    seconds: dict[str, list[float]] = {NUMPY: [], PACKHORSE: []}
    for _ in range(rounds):
        for code, taken in seconds.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            taken.append(time.perf_counter() - begun)
    return statistics.median(seconds[PACKHORSE]) - statistics.median(seconds[NUMPY])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
