"""Measure the wire: `python benchmarks/run.py wire`.

Each rank is a process in a network namespace of its own, on a link that `tc tbf` holds to a rate
(links.py). Arms take turns round by round, and each result is compared bit for bit after every run
and before the first timed one. The short form has two ranks, two rates and small tensors and takes
less than three minutes; `--full` has all. Without root, or without `ip` and `tc`, the ranks use the
loopback interface, unshaped, and the output says so.

With `--write` the figures are kept in `benchmarks/results/wire.json` and make
`docs/benchmarks_wire.md` and its picture; `--render` only makes the documents again.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.codecs import peers
from benchmarks.common import figures
from benchmarks.common.process import clean_up_at_sigterm, code_path, restart
from benchmarks.wire import arms_collectives, arms_updates, dlrm_arms, fsdp, report
from benchmarks.wire.links import RATES, Links, connect, loopback, obstacle
from benchmarks.wire.scenarios import SCENARIOS, Settings, measure
from benchmarks.wire.update_data import STAND_INS

__all__ = ["MODE", "main"]

MODE = "wire"
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "wire.json"
DOCUMENT = ROOT / "docs" / "benchmarks_wire.md"
PICTURE = ROOT / "docs" / report.PICTURE
PACKAGES = ("packhorse", "numpy", "torch", "zstandard", "zipnn")
WORLDS = (2, 4)
TIMEOUT = 1800.0
SLOW_ROUNDS = 3
# A step of a DLRM has many arms of nearly the same bytes, so its medians need more rounds.
ROUNDS_TIMES = {"dlrm": 3}
SHORT: dict[str, Any] = {
    "ranks": [2],
    "rate": ["100M", "1G"],
    "density": ["0.5", "3.3"],
    "mib": 4,
    "rounds": 3,
}
FULL: dict[str, Any] = {
    "ranks": [*WORLDS],
    "rate": [*RATES],
    "density": [*STAND_INS],
    "mib": 16,
    "rounds": 5,
}


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
        prog=f"run.py {MODE}", description="Measure collectives and weight updates on links."
    )
    parser.add_argument("--full", action="store_true", help="all ranks, rates and densities")
    parser.add_argument("--ranks", nargs="+", type=int, choices=WORLDS, metavar="N", help="2, 4")
    parser.add_argument("--rate", nargs="+", choices=RATES, metavar="RATE", help=", ".join(RATES))
    parser.add_argument(
        "--density", nargs="+", choices=STAND_INS, metavar="PERCENT", help=", ".join(STAND_INS)
    )
    parser.add_argument(
        "--scenario", nargs="+", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS)
    )
    parser.add_argument("--arm", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--mib", type=int, metavar="N", help="MiB of the weights")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="of `make rl-trace`")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if args.write and (not args.full or args.scenario or args.arm):
        parser.error("--write needs a whole run: --full --write")
    for name, value in (FULL if args.full else SHORT).items():
        setattr(args, name, getattr(args, name) or value)
    args.scenario = args.scenario or list(SCENARIOS)
    return args


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    restart(recycle=True)
    clean_up_at_sigterm()  # removes ranks and namespaces
    reason = obstacle()
    if reason:
        print(f"the links are not shaped, all ranks use the loopback interface: {reason}\n")
    result: dict[str, Any] = {
        "kind": MODE,
        "date": time.strftime("%Y-%m-%d"),
        "path": code_path(),
        "versions": peers.versions(PACKAGES),
        "arms": {
            "updates": {name: arm.how for name, arm in arms_updates.ARMS.items()},
            "collectives": {name: arm.how for name, arm in arms_collectives.ARMS.items()},
            "fsdp": {name: arm.how for name, arm in fsdp.ARMS.items()},
            "dlrm": dlrm_arms.HOW,
        },
        "rounds": args.rounds,
        "not_shaped": reason,
        **figures.begin(),
        "runs": list(_runs(args, shaped=reason is None)),
    }
    figures.end(result)
    print(f"\n{report.body(result)}")
    return result


def _runs(args: argparse.Namespace, *, shaped: bool) -> Iterator[dict[str, Any]]:
    for world in args.ranks:
        for rate in args.rate if shaped else ["unshaped"]:
            with _links(world, rate, shaped=shaped) as links:
                for name in args.scenario:
                    settings = _settings(args, rate, name)
                    begun = time.perf_counter()
                    found = measure(name, links, world, settings, timeout=TIMEOUT)
                    seconds = time.perf_counter() - begun
                    print(f"{world} ranks, {rate}: {name} took {seconds:.0f} s", flush=True)
                    known = {"world": world, "rate": rate, "bits": links.rate.bits}
                    known["dropped"] = links.dropped()
                    yield known | {"scenario": name, "result": found}


def _settings(args: argparse.Namespace, rate: str, scenario: str) -> Settings:
    rounds = args.rounds * ROUNDS_TIMES.get(scenario, 1)
    return Settings(
        # A round takes long where times hardly differ from round to round.
        rounds=min(args.rounds, SLOW_ROUNDS) if rate == "100M" else rounds,
        nbytes=args.mib << 20,
        threads=len(os.sched_getaffinity(0)),
        densities=tuple(args.density),
        trace=str(args.trace) if args.trace else None,
        arms=tuple(args.arm) if args.arm else None,
    )


@contextmanager
def _links(world: int, rate: str, *, shaped: bool) -> Iterator[Links]:
    with connect(world, RATES[rate]) if shaped else loopback() as links:
        yield links


def _write_document(result: dict[str, Any]) -> None:
    DOCUMENT.write_text(report.document(result))
    PICTURE.write_text(report.picture(result))
    print(f"\nwrote {DOCUMENT} and its picture")
