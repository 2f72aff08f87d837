"""What a fit of GMRA costs where points and cells lie: in memory or on a shelf, at two budgets.

Each fit is a process of its own, so its memory is its own, and the kinds of fits take turns. All
find the same cells as another kind with the same budget, bit for bit, or no figure is given.
`python -m benchmarks.learn.gmra_places shelf-tenth` is one fit.
"""

import hashlib
import json
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.data import fashion_mnist
from packhorse.disk import Shelf
from packhorse.learn import GMRA

__all__ = ["KINDS", "measure", "table"]

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, SEED, N_COMPONENTS = 3, 0, 16
_READY = "ready\n"
_LOOK_EVERY_S = 0.02
_WARM_UP = 2_000  # points of a first fit, which loads what a fit needs


class Kind(NamedTuple):
    """A kind of fits.

    Attributes:
        what: for the table.
        on_shelf: whether the points and the cells are on a shelf.
        is_tenth: whether the budget is a tenth of the points; otherwise it is more than all.
    """

    what: str
    on_shelf: bool
    is_tenth: bool


KINDS = {
    "memory": Kind("in memory", False, False),
    "shelf": Kind("on a shelf", True, False),
    "memory-tenth": Kind("in memory, the budget a tenth of the points", False, True),
    "shelf-tenth": Kind("on a shelf, the budget a tenth of the points", True, True),
}


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Fit all images at each place, in turns.

    Args:
        rounds: how often.

    Returns:
        For each kind its rounds: processor and wall seconds, and bytes of memory beside what there
        was before the fit, without the pages of files.

    Raises:
        RuntimeError: the cells of two fits differ that should be the same.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    names = list(KINDS)
    for i in range(rounds):
        for kind in names[i % len(names) :] + names[: i % len(names)]:
            found[kind].append(_in_process(kind))
            print(f"{kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    for is_tenth in (False, True):
        alike = [kind for kind in KINDS if KINDS[kind].is_tenth is is_tenth]
        if len({fit.pop("bits") for kind in alike for fit in found[kind]}) != 1:
            raise RuntimeError(f"the cells differ between {' and '.join(alike)}")
    return {"n_components": N_COMPONENTS, "rounds": rounds, "fits": found}


def _in_process(kind: str) -> dict[str, Any]:
    """One fit, and the most memory that it took, looked at from outside."""
    words = [sys.executable, "-m", "benchmarks.learn.gmra_places", kind]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != _READY:
            raise RuntimeError(f"the fit {kind} has not begun")
        before = most = _anonymous_nbytes(process.pid)
        ready = selectors.DefaultSelector()
        ready.register(process.stdout, selectors.EVENT_READ)
        while not ready.select(_LOOK_EVERY_S):
            most = max(most, _anonymous_nbytes(process.pid))
        found: dict[str, Any] = json.loads(process.stdout.readline())
    return found | {"nbytes": most - before}


def _anonymous_nbytes(pid: int) -> int:
    """The memory of a process without what it maps of files, which the system may take back."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def fit(kind: str) -> dict[str, Any]:
    """Fit all images once.

    Args:
        kind: one of `KINDS`.

    Returns:
        Its figures, and a checksum of all cells.
    """
    _, on_shelf, is_tenth = KINDS[kind]
    points = fashion_mnist.load().images.astype(np.float32) / 255
    budget = points.nbytes // 10 if is_tenth else 2 * points.nbytes
    with tempfile.TemporaryDirectory(prefix="packhorse-gmra-") as folder:
        cache = budget if is_tenth else 1 << 28
        with Shelf(Path(folder, "shelf"), cache_nbytes=cache) as shelf:
            GMRA(N_COMPONENTS, random_state=SEED).fit(points[:_WARM_UP], shelf=shelf, name="warm")
            source: Any = points
            if on_shelf:
                shelf["points"] = points
                source = shelf["points"]
                del points
            gmra = GMRA(N_COMPONENTS, memory_nbytes=budget, random_state=SEED)
            print(_READY, end="", flush=True)
            wall, cpu = time.perf_counter(), time.process_time()
            gmra.fit(source, shelf=shelf if on_shelf else None)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            return {
                "cpu": round(cpu, 2),
                "wall": round(wall, 2),
                "budget": budget,
                "bits": _bits(gmra),
            }


def _bits(gmra: GMRA) -> str:
    """A checksum of all cells."""
    sha = hashlib.sha256()
    for number in range(len(gmra.nodes_)):
        node = gmra.nodes_[number]
        for part in (node.centre, node.basis, node.wavelets, node.translation):
            sha.update(np.ascontiguousarray(part, dtype=np.float64).tobytes())
    return sha.hexdigest()


def table(figures: dict[str, Any]) -> str:
    """The figures as a table.

    Args:
        figures: what `measure` returned.

    Returns:
        Markdown.
    """

    def middle(kind: str, field: str) -> float:
        return sorted(fit[field] for fit in figures["fits"][kind])[figures["rounds"] // 2]

    rows = "".join(
        f"| {KINDS[kind].what} | {middle(kind, 'wall'):.1f} "
        f"| {middle(kind, 'wall') / middle('memory', 'wall'):.2f} | {middle(kind, 'cpu'):.1f} "
        f"| {middle(kind, 'budget') / 1e6:.0f} MB | {middle(kind, 'nbytes') / 1e6:.0f} MB |\n"
        for kind in figures["fits"]
    )
    return (
        f"One fit of the same images with {figures['n_components']} directions, points and cells "
        f"at the same place; medians of {figures['rounds']} processes of each kind, in turns:\n\n"
        "| points and cells | seconds | times memory | processor seconds | budget | memory that a "
        f"fit adds |\n|---|---|---|---|---|---|\n{rows}"
    )


if __name__ == "__main__":
    print(json.dumps(fit(sys.argv[1])))
