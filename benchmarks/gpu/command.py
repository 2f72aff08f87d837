"""The command of a benchmark on GPUs that keeps its figures in one file of
`benchmarks/results/gpu`: its arguments, and what it does around the measuring."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["lacks_gpu", "make_parser", "run"]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu"


def make_parser(form: str, description: str | None, n_rounds: int) -> argparse.ArgumentParser:
    """The arguments of every such command: `--rounds`, `--out` and `--smoke`.

    Args:
        form: of `gpu.py`.
        description: of the command.
        n_rounds: what `--rounds` is if it is not given.
    """
    parser = argparse.ArgumentParser(
        prog=f"gpu.py {form}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=n_rounds, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of the usual file")
    parser.add_argument("--smoke", action="store_true", help="without a GPU, on a tiny scale")
    return parser


def lacks_gpu(*, smoke: bool) -> bool:
    """Prepares for Triton's interpreter or looks for a GPU, and says so if there is none."""
    if smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        return False
    import torch

    if torch.cuda.is_available():
        return False
    print("no CUDA GPU is here; --smoke tries the command without one", file=sys.stderr)
    return True


def run(
    form: str,
    argv: list[str],
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
) -> int:
    """Measures, and writes the figures with date, card and command. Those of a smoke run go only to
    `--out`.

    Args:
        form: of `gpu.py`; the usual file has this name.
        argv: the arguments after the form.
        args: the same, parsed.
        measure: prints and returns the figures.

    Returns:
        The exit status: 3 without a GPU.
    """
    if lacks_gpu(smoke=args.smoke):
        return 3
    import torch

    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": "none: interpreted" if args.smoke else torch.cuda.get_device_name(0),
        "command": " ".join(["benchmarks/gpu.py", form, *argv]),
        "torch": torch.__version__,
        **measure(args),
    }
    out = args.out or (None if args.smoke else RESULTS / f"{form}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    return 0
