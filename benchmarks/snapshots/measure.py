"""Measure checkpoints of one run as increments: `python benchmarks/run.py snapshots`.

Pairs of neighbouring checkpoints of the training run (see pairs.py) are packed by Packhorse with a
base, and by its rivals (see delta_peers.py), on one thread. Each round trip is proved first, and
all codecs run interleaved in one process. Then a history of twelve checkpoints goes through whole
stores (see history.py). `--part history` measures only the history, in about 4 minutes and with 20
GB of temporary files. `--part pairs` leaves it out; so does a choice of pairs or codecs.

With `--write` the figures are kept in `benchmarks/results/snapshots.json` and make
`docs/benchmarks_snapshots.md` and its picture; `--render` only makes the documents again.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.codecs import peers
from benchmarks.codecs.measure import Contender, compete, enter
from benchmarks.common import figures
from benchmarks.common.process import SIMD_VARIABLE, code_path, restart
from benchmarks.snapshots import delta_peers, history, history_report, pairs, report

__all__ = ["MODE", "main"]

MODE = "snapshots"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "snapshots.json"
DOCUMENT = ROOT / "docs" / "benchmarks_snapshots.md"
PICTURE = ROOT / "docs" / history_report.PICTURE
PARTS = ("pairs", "history")
ROUNDS = 7


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments after the mode.

    Returns:
        The exit status: 1 if the training run does not exist.
    """
    try:
        return figures.run(_parse(argv), RESULT, _measure, _write_document)
    except FileNotFoundError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"run.py {MODE}", description="Measure pairs of training checkpoints."
    )
    names, codecs = ", ".join(pairs.NAMES), ", ".join(delta_peers.CODECS)
    parser.add_argument("--pair", nargs="+", choices=pairs.NAMES, metavar="PAIR", help=names)
    parser.add_argument(
        "--codec", nargs="+", choices=delta_peers.CODECS, metavar="CODEC", help=codecs
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"timed rounds, default {ROUNDS}")
    figures.add_outputs(parser)
    parser.add_argument("--part", choices=PARTS, help="measure only these pairs, or the history")
    args = parser.parse_args(argv)
    chosen = args.pair or args.codec
    if args.write and (chosen or args.rounds or args.part):
        parser.error("--write needs a whole run")
    if chosen and args.part == "history":
        parser.error("--pair and --codec choose nothing in the history")
    args.part = args.part or ("pairs" if chosen else None)
    args.pair = args.pair or pairs.NAMES
    args.codec = args.codec or tuple(delta_peers.CODECS)
    args.rounds = args.rounds or ROUNDS
    return args


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    restart(recycle=True)
    result: dict[str, Any] = {
        "kind": MODE,
        "simd": os.environ.get(SIMD_VARIABLE, "auto"),
        "path": code_path(),
        "rounds": args.rounds,
        "limit_nbytes": None,
        "versions": peers.versions(),
        "codecs": {name: delta_peers.CODECS[name].how for name in args.codec},
        **figures.begin(),
        "data": [],
        "rows": [],
        "parts": {},
        "absent": {},
    }
    for name in args.pair if args.part != "history" else ():
        pair = pairs.make(name)
        rows = _one_pair(pair, args, result)
        result["data"].append(_described(pair))
        result["rows"] += rows
        print(f"\n{report.section(result['data'][-1], rows)}", flush=True)
    if args.part != "pairs":
        result["history"] = history.measure_history()
        print(f"\n{history_report.section(result['history'])}", flush=True)
    figures.end(result)
    if result["rows"]:
        print(f"\n{report.summary(result)}")
    return result


def _one_pair(
    pair: pairs.Pair, args: argparse.Namespace, result: dict[str, Any]
) -> list[dict[str, Any]]:
    contenders = []
    for name in delta_peers.available(pair.name):
        if name not in args.codec:
            continue
        entered = enter(name, pair, peers.Setup(), delta_peers.CODECS)
        if isinstance(entered, Contender):
            contenders.append(entered)
        else:
            result["absent"][name] = entered
    rows = compete(contenders, pair, args.rounds)
    if pair.parts:
        costs = {c.name: getattr(c.codec, "part_nbytes", None) for c in contenders}
        result["parts"] = {name: cost for name, cost in costs.items() if cost}
    return [asdict(row) for row in rows]


def _described(pair: pairs.Pair) -> dict[str, Any]:
    return {
        "name": pair.name,
        "dtype": ", ".join(part.dtype for part in pair.parts or (pair,)),
        "sha256": pair.sha256,
        "base_sha256": pair.base_sha256,
        "source": pair.source,
        "nbytes": pair.array.nbytes,
        "n_tensors": len(pair.shapes),
        "parts": [[part.name.rpartition(".")[2], part.array.nbytes] for part in pair.parts],
    }


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    if "history" in result:
        PICTURE.write_text(history_report.picture(result))
    print(f"\nwrote {DOCUMENT}")
