"""The soak: tries every promise of the package at random, for as long as you like: `make soak`.

Parts (`--list`) draw cases from a seed and run them in processes that are watched. An undocumented
error is a finding, and so are wrong bytes, a crash, a hang, and too much memory. Each finding is
kept as a file in `build/soak/`, which `--replay FILE` runs again; the exit status is 1 if there is
one. When a finding is fixed, its file goes to `tests/fuzz/soak_cases/`, where a test runs it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "samples"))
from soak_parts import PARTS
from soak_parts.case import Case, Part
from soak_parts.findings import Found, load_finding, save_finding, signature
from soak_parts.operations import Breaks
from soak_parts.worker import Report, Worker

__all__ = ["Soak", "draw_case", "main", "replay"]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "soak"
_JOBS = 2
_MAX_ALIKE = 3  # files that are kept for one fault
_TIMES = 20  # how often a case is run again if its outcome depends on timing
_LIVE_S = 0.5  # seconds between lines on a terminal


def main(argv: list[str]) -> int:
    """Run the soak.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Try all promises of the package at random.")
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="how long")
    parser.add_argument("--seed", type=int, metavar="N", help="of all cases; random by default")
    parser.add_argument("--parts", nargs="+", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="list the parts and what they try")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a finding again")
    args = parser.parse_args(argv)
    if unknown := set(args.parts or ()) - PARTS.keys():
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.list:
        print(*(f"{part.name:12} {part.title}" for part in PARTS.values()), sep="\n")
        return 0
    if args.replay is not None:
        return replay(args.replay)
    seed = random.randrange(10**9) if args.seed is None else args.seed
    soak = Soak([PARTS[name] for name in args.parts or PARTS], seed)
    print(f"seed {seed}", flush=True)
    soak.run(60 * args.minutes)
    return soak.summarize()


def draw_case(part: Part, seed: int, number: int) -> Case:
    """A case of a part; the same numbers always give the same case."""
    return part.draw(random.Random(f"{seed} {part.name} {number}"))


def replay(path: Path) -> int:
    """Run a finding again; returns 1 if it occurs again."""
    found = load_finding(path)
    part = PARTS[found.part]
    for _ in range(1 if part.is_exact else _TIMES):
        report = run_alone(part, found.case)
        if report.seen is not None:
            print(
                f"{found.part}: {report.seen.kind}: {report.seen.text}", report.seen.trace, sep="\n"
            )
            return 1
    print(f"{found.part}: nothing found")
    return 0


def run_alone(part: Part, case: Case) -> Report:
    """Run a case in a process of its own."""
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        worker = Worker(part, Path(scratch))
        try:
            return worker.run(case)
        finally:
            worker.close()


@dataclass
class _Done:
    """The outcome of a part.

    Attributes:
        n_cases: how many were drawn.
        seconds: how long they took, over all processes.
        tally: how often something was accepted, refused or killed.
        n_found: how many findings there were.
    """

    n_cases: int = 0
    seconds: float = 0.0
    tally: Counter[str] = field(default_factory=Counter)
    n_found: int = 0


class Soak:
    """A run over some parts, two cases at once, each part for its share of the time."""

    def __init__(
        self, parts: list[Part], seed: int, folder: Path = BUILD, breaks: Breaks | None = None
    ) -> None:
        """
        Args:
            parts: the parts to run.
            seed: the seed of all cases.
            folder: where findings go.
            breaks: a function that breaks operations, for a test.
        """
        self._parts = parts
        self._seed = seed
        self._folder = folder
        self._breaks = breaks
        self._done = {part.name: _Done() for part in parts}
        self._alike: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._shown = 0.0
        self._until = 0.0

    def run(self, seconds: float) -> None:
        """Run for this long, and wait for cases that have begun."""
        self._until = time.monotonic() + seconds
        scratch = Path(tempfile.mkdtemp(prefix="packhorse-soak-", dir=_memory()))
        try:
            with ThreadPoolExecutor(_JOBS) as pool:
                jobs = [pool.submit(self._work, scratch) for _ in range(_JOBS)]
                try:
                    for job in jobs:
                        job.result()
                finally:
                    self._until = 0.0
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _work(self, scratch: Path) -> None:
        workers: dict[str, Worker] = {}
        try:
            while time.monotonic() < self._until:
                part, number = self._next()
                worker = workers.setdefault(part.name, Worker(part, scratch, self._breaks))
                case, begun = draw_case(part, self._seed, number), time.monotonic()
                report = worker.run(case)
                self._note(part, number, case, report, time.monotonic() - begun)
        finally:
            for worker in workers.values():
                worker.close()

    def _next(self) -> tuple[Part, int]:
        """The part that is furthest behind its share, and the number of its next case."""
        with self._lock:
            part = min(self._parts, key=lambda part: self._done[part.name].seconds / part.share)
            done = self._done[part.name]
            done.n_cases += 1
            done.seconds += 1e-3  # so that the other process begins with another part
            return part, done.n_cases

    def _note(self, part: Part, number: int, case: Case, report: Report, seconds: float) -> None:
        with self._lock:
            done = self._done[part.name]
            done.seconds += seconds
            done.tally.update(report.tally)
            if report.seen is not None:
                done.n_found += 1
                self._keep(Found(part.name, self._seed, number, case, report.seen))
            self._show()

    def _keep(self, found: Found) -> None:
        mark = signature(found)
        self._alike[mark] += 1
        if self._alike[mark] > _MAX_ALIKE:
            return
        path = save_finding(found, self._folder)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        print(f"{clear}{found.part} {found.number}: {found.seen.kind}: {found.seen.text}")
        print(f"  replay: python fuzz/soak.py --replay {shown}", flush=True)

    def _show(self) -> None:
        """Print a line that replaces the one before on a terminal."""
        if sys.stdout.isatty() and time.monotonic() - self._shown > _LIVE_S:
            self._shown = time.monotonic()
            words = ", ".join(f"{name} {done.n_cases}" for name, done in self._done.items())
            columns = shutil.get_terminal_size().columns
            print(f"\r\033[K{words[: columns - 1]}", end="", flush=True)

    def summarize(self) -> int:
        """Print what was done; returns the exit status."""
        if sys.stdout.isatty():
            print("\r\033[K", end="")
        for name, done in self._done.items():
            counts = ", ".join(f"{done.tally[k]} {k}" for k in ("accepted", "refused", "killed"))
            print(f"{name}: {done.n_cases} cases, {counts}, {done.n_found} findings")
        n_found = sum(done.n_found for done in self._done.values())
        if n_found:
            print(
                f"{n_found} findings of {len(self._alike)} kinds: python fuzz/soak.py --replay FILE"
            )
        return int(n_found > 0)


def _memory() -> str | None:
    """The folder for files that many processes write again and again."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
