"""A shelf meets a limit of the system: `python shelf_limits.py WHAT FOLDER`, and prints the error.

`disk` fills the file system until it is full; `length` has a limit on the length of files, `memory`
on the address space. Afterwards the shelf has the last state that was committed, and when the limit
is gone, it goes on.
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


@contextmanager
def limited(what: str, folder: str) -> Iterator[None]:
    """Set the limit, and take it back."""
    if what == "disk":
        yield
        grow = ["mount", "-o", "remount,size=64m", Path(folder).parent]
        subprocess.run(grow, check=True)
        return
    kind = resource.RLIMIT_FSIZE if what == "length" else resource.RLIMIT_AS
    before = resource.getrlimit(kind)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(kind, (4 << 20 if what == "length" else used + (8 << 20), before[1]))
    yield
    resource.setrlimit(kind, before)


def fill(shelf: Shelf) -> int:
    """Append until there is an error. Returns how many rows were committed."""
    n_rows = 0
    try:
        while n_rows < 10_000:
            shelf["x"].append(ROWS)
            n_rows += len(ROWS)
    except (OSError, MemoryError) as error:
        print(f"{type(error).__name__} {getattr(error, 'errno', 0)}: {error}")
        return n_rows
    raise AssertionError("the limit was never met")


def check(shelf: Shelf, n_rows: int) -> None:
    x = shelf["x"][...]
    assert x.shape == (n_rows, ROWS.shape[1])
    assert (x.reshape(-1, *ROWS.shape) == ROWS).all()


def main(what: str, folder: str) -> None:
    with Shelf(folder, cache_nbytes=0, threads=1) as shelf:
        shelf.create("x", (0, ROWS.shape[1]), "uint8")
        shelf["before"] = np.arange(10)
        with limited(what, folder):
            n_rows = fill(shelf)
        check(shelf, n_rows)
        shelf["x"].append(ROWS)
        check(shelf, n_rows + len(ROWS))
    with Shelf(folder) as shelf:
        check(shelf, n_rows + len(ROWS))
        assert (shelf["before"][...] == np.arange(10)).all()
        assert not shelf.verify()
    print(f"{n_rows} rows")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
