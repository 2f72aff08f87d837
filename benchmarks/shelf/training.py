"""What keeping every iterate costs a training run.

The same run goes on in turns: some steps alone, as many with `packhorse.learn.SWAG`, which packs
and writes each iterate in the background, and as many that write each iterate to a memmap and wait
for the disk. A turn ends when all its iterates are on the disk, so nothing is left to the next one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import nbytes_on_disk
from benchmarks.shelf.contenders import summary
from benchmarks.shelf.iterates import WIDTH, Training

__all__ = ["measure_training"]

STEPS, ROUNDS, WARM_UP = 60, 5, 10


def measure_training(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Time training alone and with every iterate kept.

    Args:
        folder: for what is kept.
        steps: of each turn.

    Returns:
        The figures of report.py: milliseconds of a step in each turn.

    Raises:
        ImportError: a package is not installed.
    """
    from packhorse.disk import Shelf
    from packhorse.learn import SWAG

    training = Training()
    kept = np.memmap(folder / "rows.bin", np.float32, "w+", shape=(steps, WIDTH))

    def write(i: int) -> None:
        kept[i] = training.row()
        kept.flush()

    for _ in range(WARM_UP):
        training.step()
    seconds: dict[str, list[tuple[float, float]]] = {}
    with Shelf(folder / "shelf") as shelf, SWAG(training.model, shelf) as swag:
        turns: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
            "alone": (lambda i: None, lambda: None),
            "packhorse": (lambda i: swag.collect(), swag.flush),
            "memmap": (write, lambda: None),
        }
        names = list(turns)
        for i in range(ROUNDS):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                seconds.setdefault(name, []).append(_turn(training, steps, *turns[name]))
    return {
        "steps": steps,
        "turns": {name: summary(found) for name, found in seconds.items()},
        "nbytes_per_row": nbytes_on_disk(folder / "shelf") // (steps * ROUNDS),
    }


def _turn(
    training: Training, steps: int, keep: Callable[[int], object], finish: Callable[[], object]
) -> tuple[float, float]:
    """Processor and wall seconds of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(steps):
        training.step()
        keep(i)
    finish()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / steps, wall / steps
