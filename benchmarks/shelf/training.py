"""What keeping every iterate costs a training run.

The same run goes on in turns: some steps alone, as many with `packhorse.learn.SWAG`, which packs
and writes each iterate in the background, and as many that write each iterate to a memmap and wait
for the disk. A turn ends when all its iterates are on the disk, so nothing is left to the next one.

PyTorch's threads that wait for another one spin for some milliseconds, and take a core from whoever
has work. So the run is measured three times, each time in a process of its own: with PyTorch as it
comes, with threads that do not spin, and with a core that PyTorch leaves free.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.files import nbytes_on_disk
from benchmarks.shelf.contenders import summary
from benchmarks.shelf.iterates import WIDTH, Training

__all__ = ["measure_training"]

STEPS, ROUNDS, WARM_UP = 60, 5, 10


class _Setting(NamedTuple):
    """How PyTorch uses the processor.

    Attributes:
        name: in the table.
        environment: variables of the process.
        n_free: cores that it leaves free.
    """

    name: str
    environment: dict[str, str]
    n_free: int = 0


SETTINGS = (
    _Setting("PyTorch as it comes", {}),
    _Setting("`OMP_WAIT_POLICY=passive`", {"OMP_WAIT_POLICY": "passive"}),
    _Setting("one core left free", {}, 1),
)


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
    found = []
    for i, setting in enumerate(SETTINGS):
        place = folder / str(i)
        place.mkdir(parents=True)
        found.append(_in_a_process(setting, place, steps))
    return {"steps": steps, "settings": found}


def _in_a_process(setting: _Setting, folder: Path, steps: int) -> dict[str, Any]:
    before = {name: os.environ.get(name) for name in setting.environment}
    os.environ.update(setting.environment)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_measure, (setting, folder, steps))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _measure(setting: _Setting, folder: Path, steps: int) -> dict[str, Any]:
    import torch

    from packhorse.disk import Shelf
    from packhorse.learn import SWAG

    torch.set_num_threads(max(1, torch.get_num_threads() - setting.n_free))
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
        "setting": setting.name,
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
