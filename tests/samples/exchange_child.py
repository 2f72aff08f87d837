"""A process that exports or imports a shelf and stops in the middle, to be killed there."""

import time
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

from packhorse.disk import Shelf

__all__ = ["exchange"]


def exchange(
    path: Path, verb: str, target: Path, stop: int, here: Event, *, resume: bool = False
) -> None:
    """Do it, and wait for the end of this process amid it.

    Args:
        path: of the shelf.
        verb: the name of its method.
        target: what it exports to or imports from.
        stop: after how many blocks it waits.
        here: is set then.
        resume: whether an import goes on with an earlier one.
    """
    calls = count(1)

    def progress(done: int, total: int) -> None:
        if next(calls) == stop:
            here.set()
            time.sleep(600)

    with Shelf(path) as shelf:
        options = {"resume": resume} if verb.startswith("import") else {}
        places = ("in", target) if verb == "import_npy" else (target,)
        getattr(shelf, verb)(*places, progress=progress, **options)
