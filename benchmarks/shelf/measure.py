"""Measure arrays that live on disk: `python benchmarks/run.py shelf`.

Every iterate of a training run is appended as one long row to our shelf and to each rival (see
rows.py), without and with a limit of memory, and all rows are summed. Short rows are gathered and
overwritten at random (see table.py). All stores take turns in one process, and all show every row
bit for bit before a figure is printed. The short form appends 48 rows and takes some minutes;
`--full` appends 1,000 and needs 40 GB of disk.

With `--write` the figures are kept in `benchmarks/results/shelf.json` and make
`docs/benchmarks_shelf.md` and its picture; `--render` only makes the documents again.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from benchmarks.codecs import peers
from benchmarks.common import figures
from benchmarks.common.process import code_path
from benchmarks.shelf import report
from benchmarks.shelf.rows import COMMON_ROWS, measure_limited, measure_rows
from benchmarks.shelf.stores import STORES
from benchmarks.shelf.table import measure_table
from benchmarks.shelf.training import measure_training

__all__ = ["MODE", "main"]

MODE = "shelf"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "shelf.json"
DOCUMENT = ROOT / "docs" / "benchmarks_shelf.md"
PICTURE = ROOT / "docs" / report.PICTURE
PARTS = ("rows", "limited", "training", "table")
FULL_ROWS = 1000
PACKAGES = ("packhorse", "numpy", "torch", "lmdb", "zarr", "tensorstore", "blosc2", "h5py")


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after the mode.

    Returns:
        The exit status.
    """
    return figures.run(_parse(argv), RESULT, _measure, _write_document)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run.py {MODE}", description="Measure arrays that live on disk."
    )
    parser.add_argument("--full", action="store_true", help=f"{FULL_ROWS:,} long rows")
    parser.add_argument("--rows", type=int, metavar="N", help=f"long rows, default {COMMON_ROWS}")
    parser.add_argument(
        "--store", nargs="+", choices=STORES, metavar="STORE", help=", ".join(STORES)
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--folder", type=Path, help="on the disk to measure, default: temporary")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.write and (args.store or args.part):
        parser.error("--write needs a whole run")
    args.rows = args.rows or (FULL_ROWS if args.full else COMMON_ROWS)
    args.store = args.store or list(STORES)
    args.part = args.part or PARTS
    return args


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": MODE,
        "date": time.strftime("%Y-%m-%d"),
        "path": code_path(),
        "versions": peers.versions(PACKAGES),
        "stores": {name: STORES[name].how for name in args.store},
        **figures.begin(),
    }
    for part in args.part:
        with _folder(args) as folder:
            try:
                # The threads of NumPy's BLAS spin for some time after each sum, which takes a core
                # from whatever store is next; a sum is bound by memory, not by the processor.
                with threadpool_limits(1, "blas"):
                    result[part] = _part(part, args, Path(folder))
            except ImportError as reason:
                print(f"not measured: {part}: {reason}")
                continue
        print(f"\n{report.part(result, part)}\n", flush=True)
    figures.end(result)
    print(report.targets(result))
    return result


def _folder(args: argparse.Namespace) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="packhorse-shelf-", dir=args.folder)


def _part(part: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if part == "rows":
        return measure_rows(args.store, args.rows, folder)
    if part == "limited":
        return measure_limited(args.store, args.rows, folder)
    if part == "training":
        return measure_training(folder)
    return measure_table(args.store, folder)


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    PICTURE.write_text(report.picture(result))
    print(f"\nwrote {DOCUMENT} and its picture")
