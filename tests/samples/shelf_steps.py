"""Ends a process, or lets a call fail, at a chosen one of the calls to the system that Python makes
below a folder: opening, renaming, removing and listing.

`python shelf_steps.py WHAT FOLDER N` does something to a shelf in a child that is killed at call N,
and then commits to it; it prints whether the child was killed.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from disk_record import mark

from packhorse.disk import Shelf

__all__ = ["INTERRUPTER", "create", "end_at", "fail", "interrupt"]

EVENTS = {"open", "os.rename", "os.remove", "os.listdir", "os.mkdir", "os.truncate"}


class Interrupter:
    """Counts calls, and does something at one of them; one for the whole process, because what
    listens to calls cannot be taken away again."""

    def __init__(self) -> None:
        self._left = -1
        self._act: Callable[[], object] = lambda: None
        self._folder = ""
        sys.addaudithook(self._hear)

    def at(self, n: int, folder: str, act: Callable[[], object]) -> None:
        """Act at call `n`, counted from now, once."""
        self._left, self._folder, self._act = n, folder, act

    def end(self) -> bool:
        """Act no more. Returns whether there was a call to act at."""
        left, self._left = self._left, -1
        return left < 0

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._left < 0 or event not in EVENTS or not arguments:
            return
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike) and self._folder in os.fsdecode(path):
            self._left -= 1
            if self._left < 0:
                self._act()


INTERRUPTER = Interrupter()


def fail() -> None:
    """Fail as a disk does that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt() -> None:
    raise KeyboardInterrupt


def create(folder: str) -> None:
    with Shelf(folder) as shelf:
        shelf["x"] = [1]


def compact(folder: str) -> None:
    with Shelf(folder) as shelf:
        shelf.compact()


def write(folder: str) -> None:
    """Says `done` when a commit is reported."""
    with Shelf(folder) as shelf:
        shelf["y"] = [2]
        mark("done")


WORK = {"create": create, "compact": compact, "write": write}


def end_at(what: str, folder: str, n: int) -> None:
    """Ends this process at call `n`, with code 9, or after its work."""
    INTERRUPTER.at(n, folder, lambda: os._exit(9))
    WORK[what](folder)
    os._exit(0)


def killed_at(what: str, folder: str, n: int) -> bool:
    """Whether a process was killed at call `n`; False if it had fewer calls, and is done."""
    child = os.fork()
    if not child:
        end_at(what, folder, n)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


if __name__ == "__main__":
    main_what, main_folder = sys.argv[1:3]
    if main_what != "create":
        create(main_folder)
    print(killed_at(main_what, main_folder, int(sys.argv[3])))
    write(main_folder)
