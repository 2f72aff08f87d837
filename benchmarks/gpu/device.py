"""Measure packed weights on a GPU: `python benchmarks/gpu.py device [--part PART ...]`.

The command needs a machine with a GPU, PyTorch and Triton, but no network: `--wheels` installs what
else it lacks (`gpu.py wheels`). It proves products right before it times anything, and stops at the
first wrong one. Its parts, in their order:

- versions: of Triton, the ptxas that it runs, the driver;
- tests: those that need a GPU, and those of the kernels, compiled;
- check: decoding bit for bit, products against FP64, the inline assembly against its twin;
- repeat: each division 200 times on sums that are exact, equal to the bit;
- sanitize: products under compute-sanitizer, for races and bounds;
- ceilings: a copy, a large product, and reading with few and with many programs;
- profile: a few products under ncu;
- decode, load: decoding alone, and packed files;
- tune: the autotuner, whose divisions are each checked before they are timed;
- table: each way beside BF16, measured beside predicted, and simulated where that is kept;
- rivals: DFloat11 and nvCOMP, where they are installed;
- model: a whole model.

Times are medians over CUDA graphs of products with at least four
distinct copies of a matrix, which together are larger than the caches. Weights are synthetic:
normal rows with log-normal scales, which have exponents like those of trained weights.

A run of all parts takes less than nine minutes. A part that runs alone has all that time, and
tuning continues where it ended. Figures go to `benchmarks/results/gpu/`, or to --out, together with
the predictions of the model of time. `--smoke` runs everything on a tiny scale in Triton's
interpreter, without a GPU; its times mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu import wheels
from benchmarks.gpu.run import Run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
BUDGET = 500.0  # seconds of a call
# The share of a call with all parts after which each part must end.
SHARES = {
    "versions": 0.02,
    "tests": 0.14,
    "check": 0.26,
    "repeat": 0.36,
    "sanitize": 0.44,
    "ceilings": 0.46,
    "profile": 0.54,
    "decode": 0.58,
    "load": 0.62,
    "tune": 0.84,
    "table": 0.9,
    "rivals": 0.94,
    "model": 1.0,
}
PARTS = tuple(SHARES)


def main(argv: list[str]) -> int:
    """Run the parts that the command line asks for.

    Args:
        argv: the arguments after `device`.

    Returns:
        The exit status: 1 if a part failed or found wrong results, 3 without a GPU or without a
        package.
    """
    args = _parse(argv)
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        if args.wheels:
            wheels.install(args.wheels)
        import torch

        import packhorse  # noqa: F401
    except wheels.WheelError as error:
        print(error, file=sys.stderr)
        return 3
    except ImportError as error:
        print(
            f"this machine lacks something: {error}\nPyTorch and Triton must be here. For all "
            "else, run `python benchmarks/gpu.py wheels FOLDER` on a machine with a network, carry "
            "FOLDER here, and run `python benchmarks/gpu.py device --wheels FOLDER`.",
            file=sys.stderr,
        )
        return 3

    if not args.smoke and not torch.cuda.is_available():
        print(
            "no CUDA GPU is here: run this on a machine with one (PyTorch and Triton, no network "
            "needed).\nWithout one, --smoke runs all parts on a tiny scale on the CPU, and "
            "`gpu.py predict` prints what is predicted.",
            file=sys.stderr,
        )
        return 3
    from packhorse.device.choices import use_cache

    use_cache(args.cache)
    parts = run_parts(args, time.monotonic())
    return 1 if any(isinstance(part, dict) for part in parts.values()) else 0


def run_parts(
    args: argparse.Namespace,
    started: float,
    module: str = "benchmarks.gpu.parts",
    shares: Mapping[str, float] = SHARES,
) -> dict[str, Any]:
    """Run the requested parts; a part that fails or is wrong gives a dict instead of rows.

    Args:
        args: the arguments of the command.
        started: when it began, by `time.monotonic`.
        module: that has the parts.
        shares: of the time of all parts after which each part must end.
    """
    from benchmarks.gpu.checks import WrongError
    from benchmarks.gpu.workers import gpu_answers
    from packhorse.device.product_check import WrongProductWarning

    gpu_parts = import_module(module)
    parts: dict[str, Any] = {}
    whole = max(shares[name] for name in args.part)
    for i, name in enumerate(args.part):
        share = shares[name] / whole
        note = partial(keep_part, args, parts, name)
        ends = started + share * args.budget
        strategies = getattr(args, "strategy", ())
        run = Run(args.smoke, ends, args.cache, args.again, note, strategies)
        print(f"\n## {name}\n", flush=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", WrongProductWarning)
                parts[name] = getattr(gpu_parts, name)(run)
        except (WrongError, WrongProductWarning) as error:
            print(f"WRONG: {error}\nNothing is timed with kernels that are wrong.", flush=True)
            parts[name] = {"wrong": str(error), "rows": parts.get(name, [])}
            keep(args, parts)
            break
        except Exception as error:  # the other parts may well work
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}"
            parts[name] = {"failed": failed, "rows": parts.get(name, [])}
        seconds = time.monotonic() - started
        print(f"\n({seconds:.0f} s so far)", flush=True)
        keep(args, parts)
        if isinstance(parts[name], dict) and not args.smoke and not gpu_answers():
            return parts | run_elsewhere(args.part[i + 1 :], args.budget - seconds)
    return parts


def keep_part(
    args: argparse.Namespace, parts: dict[str, Any], name: str, rows: list[dict[str, Any]]
) -> None:
    """Write the rows that a part has so far."""
    parts[name] = rows
    keep(args, parts)


def run_elsewhere(names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run parts in another process, with the other arguments of this one."""
    if not names:
        return {}
    print("the GPU does not answer this process: another one goes on", flush=True)
    command = [sys.executable, *sys.argv, "--part", *names, "--budget", f"{seconds:.0f}"]
    subprocess.run(command, check=False)
    return {}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.py device",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; all by default",
    )
    parser.add_argument("--wheels", type=Path, help="install missing packages from this folder")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds that a call may take")
    parser.add_argument("--out", type=Path, help="folder of the figures, instead of the usual one")
    parser.add_argument("--cache", type=Path, help="folder of the autotuner's cache")
    parser.add_argument("--again", action="store_true", help="tune what was tuned before, too")
    parser.add_argument(
        "--strategy", nargs="+", default=(), help="repeat only these: fused, stream, decode"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; times mean nothing")
    return parser.parse_args(argv)


def keep(args: argparse.Namespace, parts: dict[str, Any]) -> None:
    """Write the figures. Those of a smoke run go only to --out, and parts that were not run keep
    their old figures."""
    folder = args.out or (None if args.smoke else RESULTS)
    if folder is None:
        return
    document = describe(args.smoke) | getattr(args, "facts", {})
    path = folder / f"{getattr(args, 'prefix', '')}{document['slug']}.json"
    kept = json.loads(path.read_text())["parts"] if path.exists() else {}
    folder.mkdir(parents=True, exist_ok=True)
    # The machine may be taken away at any time, and must not leave half a file.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document | {"parts": kept | parts}, indent=1) + "\n")
    new.replace(path)


@cache
def describe(smoke: bool) -> dict[str, Any]:
    """The facts that a reader needs to compare the figures."""
    import torch
    import triton

    import packhorse

    card = "CPU, interpreted: times mean nothing"
    if not smoke:
        card = torch.cuda.get_device_name()
    return {
        "kind": "gpu",
        "slug": "smoke" if smoke else card.lower().replace(" ", "-").replace("/", "-"),
        "card": card,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _ask("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "packhorse": packhorse.__version__,
        "command": " ".join(["gpu.py", *sys.argv[1:]]),
        "weights": "synthetic: normal rows with log-normal scales (0.4)",
    }


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().split("\n")[0]
