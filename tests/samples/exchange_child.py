"""A process that exports or imports a shelf and stops in the middle, to be killed there.

    python exchange_child.py SHELF VERB PATH STOP RESUME

It prints a line when it has got through STOP blocks, and then waits for its end.
"""

import sys
import time
from itertools import count

from packhorse.disk import Shelf

__all__: list[str] = []


def main() -> None:
    """Do it."""
    path, verb, target, stop, resume = sys.argv[1:]
    calls = count(1)

    def progress(done: int, total: int) -> None:
        if next(calls) == int(stop):
            print("here", flush=True)
            time.sleep(600)

    with Shelf(path) as shelf:
        options = {"resume": resume == "1"} if verb.startswith("import") else {}
        places = ("in", target) if verb == "import_npy" else (target,)
        getattr(shelf, verb)(*places, progress=progress, **options)


if __name__ == "__main__":
    main()
