"""Measure tables in host memory: `python benchmarks/run.py host`.

For each table: what packing takes and what a fetch of a row touches, beside Invariant Bit Packing;
how fast rows are gathered on the CPU, beside PyTorch and NumPy; how fast they are packed. Then
embedding bags beside those of PyTorch and fbgemm (embeddings.py), a training with packed, plain
and mapped features (training.py), and the keys and values of real models (kv.py). It takes some
twenty minutes, and needs `make data`; `--part` measures some of it.

With `--write` the figures are kept in `benchmarks/results/host.json` and make
`docs/benchmarks_host.md` and its picture; those of other parts stay. `--render` only makes the
documents again.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.codecs import peers
from benchmarks.common import figures
from benchmarks.common.process import clean_up_at_sigterm, code_path
from benchmarks.host import (
    embeddings,
    gathers,
    kv,
    packing,
    picture,
    ratios,
    report,
    tables,
    training,
)

__all__ = ["MODE", "join", "main"]

MODE = "host"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "host.json"
DOCUMENT = ROOT / "docs" / "benchmarks_host.md"
PICTURE = ROOT / "docs" / picture.NAME
TABLE_PARTS = ("ratios", "gathers", "packing")  # are measured on each table
SCENARIOS: dict[str, Callable[[], Any]] = {
    "embeddings": embeddings.measure,
    "training": training.measure,
    "kv": kv.measure,
}
PARTS = (*TABLE_PARTS, *SCENARIOS)
THREADS = (1, 2)
PACKAGES = ("packhorse", "numpy", "torch", "torch_geometric")
# What a run says of itself, and what is kept for each part that was measured apart.
CONDITIONS = ("date", "path", "versions", "machine", "load_before", "load_after", "core_scaling")


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
        prog=f"run.py {MODE}", description="Measure tables in host memory."
    )
    parser.add_argument("--table", nargs="+", choices=tables.TABLES, metavar="TABLE")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.write and args.table:
        parser.error("--write needs all tables")
    args.table = tuple(args.table or tables.TABLES)
    args.part = args.part or PARTS
    return args


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    clean_up_at_sigterm()  # removes files of features, and groups that limit memory
    result: dict[str, Any] = {
        "kind": MODE,
        "date": time.strftime("%Y-%m-%d"),
        "path": code_path(),
        "versions": peers.versions(PACKAGES),
        **figures.begin(),
        **{part: [] for part in TABLE_PARTS if part in args.part},
    }
    for name in SCENARIOS:
        if name in args.part:
            result[name] = SCENARIOS[name]()
    for table in tables.make(args.table) if set(args.part) & set(TABLE_PARTS) else ():
        if "ratios" in args.part:
            result["ratios"].append(ratios.measure(table))
        if "gathers" in args.part:
            for threads in THREADS:
                result["gathers"] += gathers.measure(table, threads)
        if "packing" in args.part:
            result["packing"].append(packing.measure(table))
        print(f"measured: {table.name}", flush=True)
    figures.end(result)
    for part in args.part:
        print(f"\n{report.part(result, part)}\n")
    print(report.targets(result))
    if args.write and set(args.part) < set(PARTS):
        return join(json.loads(RESULT.read_text()), result)
    return result


def join(kept: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The figures that are kept, with the parts of a new run in the place of older ones."""
    measured = [part for part in PARTS if part in new]
    apart = {part: {key: new[key] for key in CONDITIONS} for part in measured}
    parts = {part: new[part] for part in measured}
    return kept | parts | {"apart": kept.get("apart", {}) | apart}


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    if "ratios" in result:
        PICTURE.write_text(picture.picture(result["ratios"]))
    print(f"\nwrote {DOCUMENT} and its picture")
