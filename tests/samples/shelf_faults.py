"""Steps on a shelf while calls to the disk fail: run under the recorder of disk calls, as
`python shelf_faults.py FOLDER SEED KINDS ERRNO TIMES LATE`. Prints a line of JSON.

The first call of a step fails, then the second of the next try, and so on, until a step has fewer
calls. After each failure the shelf has one of the states that it may have, and works.
"""

import ctypes
import errno
import itertools
import json
import random
import sys
from collections import Counter

from shelf_workload import Model, Step, Steps, work

from packhorse.disk import Shelf

__all__: list[str] = []

STEPS = ["append", "in_place", "several", "tag", "rollback", "delete", "rename", "compact"]
NO_FAILURE = "no call failed"


class Faults:
    """Makes the calls of this process fail."""

    def __init__(self, kinds: str, error: int, times: int, late: bool) -> None:
        self._recorder = ctypes.CDLL(None)
        self._recorder.recorder_failed.restype = ctypes.c_long
        self._set = (kinds.encode(), error, times, late)

    def begin(self, after: int) -> None:
        """The first `after` calls pass; what follows fails."""
        kinds, error, times, late = self._set
        long = ctypes.c_long
        self._recorder.recorder_fail(kinds, long(after), long(times), error, int(late))

    def end(self) -> int:
        """Nothing fails any more. Returns how many calls failed."""
        failed = int(self._recorder.recorder_failed())
        self._recorder.recorder_fail(b"", ctypes.c_long(0), ctypes.c_long(0), 0, 0)
        return failed


def digest_of(shelf: Shelf) -> str:
    return Model.read(shelf).digest()


def ready(shelf: Shelf, name: str) -> None:
    """Make the shelf one on which a kind of step can be done."""
    tags = shelf.tags()
    if name == "rollback" and not tags:
        shelf.tag("kept")
    if name == "tag":
        for tag in tags:
            shelf.untag(tag)


def attempt(step: Step, shelf: Shelf, faults: Faults, after: int, error: int) -> str:
    """Do a step whose calls fail. Returns how it ended."""
    outcome = "done"
    faults.begin(after)
    try:
        step(shelf)
    except OSError as caught:
        outcome = f"{type(caught).__name__}: {caught}"
        if caught.errno not in (error, errno.EIO):  # LMDB calls a short write EIO
            raise
    finally:
        n_failed = faults.end()
    return outcome if n_failed else NO_FAILURE


def try_step(folder: str, seed: int, name: str, faults: Faults, after: int, error: int) -> str:
    """One step whose calls fail, and what the shelf is then. Returns how it ended."""
    with Shelf(folder) as shelf:
        ready(shelf, name)
        model = Model.read(shelf)
        before = model.digest()
        step = getattr(Steps(random.Random(seed)), name)(model)
        step(model)
        outcome = attempt(step, shelf, faults, after, error)
        allowed = {model.digest()} | ({before} if "Error: " in outcome else set())
        where = f"{name}, seed {seed}, after {after}: {outcome}"
        try:
            assert digest_of(shelf) in allowed, where
        except OSError as caught:
            outcome += f"; then refused: {caught}"
    with Shelf(folder) as shelf:
        assert digest_of(shelf) in allowed, f"{where}, opened again"
        assert not shelf.verify(), where
        work(shelf, lambda line: None, seed=seed, n_steps=1)
    return outcome


def main() -> None:
    folder, kinds, late = sys.argv[1], sys.argv[3], sys.argv[6] == "late"
    seed, error, times = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    faults, outcomes = Faults(kinds, error, times, late), Counter[str]()
    with Shelf(folder) as shelf:
        work(shelf, lambda line: None, seed=seed, n_steps=6)
    for name in STEPS:
        for after in itertools.count():
            outcome = try_step(folder, seed + after, name, faults, after, error)
            outcomes[f"{name}: {outcome}"] += 1
            if outcome == NO_FAILURE:
                break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
