"""A shelf meets a limit of the system: `python shelf_limits.py WHAT FOLDER`, and prints the error.

`disk` fills the file system until it is full, `compact` until there is no room for a second file,
and `length` has a limit on the length of files. `memory` has a limit on the address space when the
shelf is opened, so that its map is short and must grow; for `new`, also when it is made. Afterwards
the shelf has the last state that was committed, and when the limit is gone, it goes on.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from packhorse.disk import Shelf

__all__: list[str] = []

ROWS = np.random.default_rng(0).integers(0, 256, (4, 50_000), np.uint8)
KINDS = {"length": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS, "new": resource.RLIMIT_AS}


def used_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def limited(what: str, folder: str, nbytes: int) -> Iterator[None]:
    """Set the limit, and take it back."""
    if what in ("disk", "compact"):
        yield
        grow = ["mount", "-o", "remount,size=64m", Path(folder).parent]
        subprocess.run(grow, check=True)
        return
    before = resource.getrlimit(KINDS[what])
    resource.setrlimit(KINDS[what], (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(KINDS[what], before)


def fill(shelf: Shelf) -> int:
    """Append until there is an error. Returns how many rows were committed."""
    n_rows = len(shelf["x"])
    try:
        while n_rows < 10_000:
            shelf["x"].append(ROWS)
            n_rows += len(ROWS)
    except (OSError, MemoryError) as error:
        say(error)
        return n_rows
    raise AssertionError("the limit was never met")


def say(error: BaseException) -> None:
    print(f"{type(error).__name__} {getattr(error, 'errno', 0)}: {error}")


def fill_and_compact(shelf: Shelf) -> int:
    """Write more than half of the file system, and compact. Returns how many rows there are."""
    for _ in range(13):
        shelf["x"].append(ROWS)
    try:
        shelf.compact()
    except OSError as error:
        say(error)
        assert len(list(shelf.path.glob("*.mdb"))) == 1
        assert not list(shelf.path.glob("*.new*"))
        return len(shelf["x"])
    raise AssertionError("there was room")


def check(shelf: Shelf, n_rows: int) -> None:
    x = shelf["x"][...]
    assert x.shape == (n_rows, ROWS.shape[1])
    assert (x.reshape(-1, *ROWS.shape) == ROWS).all()


def begin(shelf: Shelf) -> None:
    shelf.create("x", (0, ROWS.shape[1]), "uint8")
    shelf["before"] = np.arange(10)


def go_on(shelf: Shelf, n_rows: int) -> int:
    check(shelf, n_rows)
    shelf["x"].append(ROWS)
    check(shelf, n_rows + len(ROWS))
    return n_rows + len(ROWS)


def meet_memory(what: str, folder: str) -> int:
    """The map is short from the start, and grows until the system refuses."""
    if what == "memory":
        with Shelf(folder) as shelf:
            begin(shelf)
    with (
        limited(what, folder, used_memory() + (60 << 20)),
        Shelf(folder, cache_nbytes=0, threads=1) as shelf,
    ):
        if what == "new":
            begin(shelf)
        n_rows = fill(shelf)
        assert len(shelf["x"]) == n_rows
        assert (shelf["x"][-1] == ROWS[-1]).all()
    with Shelf(folder) as shelf:
        return go_on(shelf, n_rows)


def meet(what: str, folder: str) -> int:
    if what in ("memory", "new"):
        return meet_memory(what, folder)
    with Shelf(folder, cache_nbytes=0, threads=1) as shelf:
        begin(shelf)
        with limited(what, folder, 4 << 20):
            n_rows = fill_and_compact(shelf) if what == "compact" else fill(shelf)
        n_rows = go_on(shelf, n_rows)
        if what == "compact":
            shelf.compact()
    return n_rows


def main(what: str, folder: str) -> None:
    n_rows = meet(what, folder)
    with Shelf(folder) as shelf:
        check(shelf, n_rows)
        assert (shelf["before"][...] == np.arange(10)).all()
        assert not shelf.verify()
    print(f"{n_rows} rows")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
