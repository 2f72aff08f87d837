"""Measure tables in host memory: `python benchmarks/run.py host`.

For each table: what packing takes and what a fetch of a row touches, beside Invariant Bit Packing;
how fast rows are gathered on the CPU, beside PyTorch and NumPy; how fast they are packed; and the
keys and values of real models. It takes some minutes, and needs `make data`.

With `--write` the figures are kept in `benchmarks/results/host.json` and make
`docs/benchmarks_host.md`; `--render` only makes the document again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.codecs import peers
from benchmarks.common import figures
from benchmarks.common.process import code_path
from benchmarks.host import gathers, kv, packing, ratios, report, tables

__all__ = ["MODE", "main"]

MODE = "host"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "host.json"
DOCUMENT = ROOT / "docs" / "benchmarks_host.md"
PARTS = ("ratios", "gathers", "packing", "kv")
THREADS = (1, 2)
PACKAGES = ("packhorse", "numpy", "torch")


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after the mode.

    Returns:
        The exit status.
    """
    args = _parse(argv)
    if args.render:
        _write_document(json.loads(RESULT.read_text()))
        return 0
    figures.finish(_measure(args), args, RESULT, _write_document)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run.py {MODE}", description="Measure tables in host memory."
    )
    parser.add_argument("--table", nargs="+", choices=tables.TABLES, metavar="TABLE")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.write and (args.table or args.part):
        parser.error("--write needs a whole run")
    args.table = tuple(args.table or tables.TABLES)
    args.part = args.part or PARTS
    return args


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": MODE,
        "date": time.strftime("%Y-%m-%d"),
        "path": code_path(),
        "versions": peers.versions(PACKAGES),
        **figures.begin(),
        **{part: [] for part in args.part},
    }
    for table in tables.make(args.table) if set(args.part) - {"kv"} else ():
        if "ratios" in args.part:
            result["ratios"].append(ratios.measure(table))
        if "gathers" in args.part:
            for threads in THREADS:
                result["gathers"] += gathers.measure(table, threads)
        if "packing" in args.part:
            result["packing"].append(packing.measure(table))
        print(f"measured: {table.name}", flush=True)
    if "kv" in args.part:
        result["kv"] = kv.measure()
    figures.end(result)
    for part in args.part:
        print(f"\n{report.part(result, part)}\n")
    print(report.targets(result))
    return result


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    print(f"\nwrote {DOCUMENT}")
