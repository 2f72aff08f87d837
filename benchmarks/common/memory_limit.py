"""A limit on the memory of a process, by a control group of Linux: its own pages and those of files
in the system's cache count, as in a container or on a small machine."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryGroup", "memory_limit", "obstacle"]

_MOUNT = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Files of a group, by the version of control groups."""

    limit: str
    swap: str
    peak: str


_FIRST = _Names("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes")
_SECOND = _Names("memory.max", "memory.swap.max", "memory.peak")


class MemoryGroup(NamedTuple):
    """A group of processes with a limit.

    Attributes:
        entrance: a process joins by writing "0" to this file; then what it allocates counts.
        peak: a file with the most bytes that were used at a time; older systems have none.
    """

    entrance: Path
    peak: Path

    def peak_nbytes(self) -> int | None:
        """The most bytes that were used at a time."""
        return int(self.peak.read_text()) if self.peak.exists() else None


@contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryGroup]:
    """A group whose processes may use so many bytes together. One that needs more is killed, once
    the system has no pages of files left to take back.

    Args:
        nbytes: the limit.

    Raises:
        OSError: this process may not make groups.
    """
    parent, names = _parent()
    group = parent / f"packhorse-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        if not (group / names.limit).exists():
            raise OSError(f"{group} has no {names.limit}: its parent does not limit memory")
        (group / names.limit).write_text(str(nbytes))
        if (group / names.swap).exists():
            (group / names.swap).write_text("0" if names is _SECOND else str(nbytes))
        yield MemoryGroup(group / "cgroup.procs", group / names.peak)
    finally:
        _remove(group)


def _parent() -> tuple[Path, _Names]:
    """The group of this process, and the names of its files."""
    text = Path("/proc/self/cgroup").read_text()
    first = re.search(r"^\d+:(?:\S+,)?memory(?:,\S+)?:(\S+)$", text, re.M)
    found = first or re.search(r"^0::(\S+)$", text, re.M)
    if found is None:
        raise OSError("this process is in no control group")
    mount, names = (_MOUNT / "memory", _FIRST) if first else (_MOUNT, _SECOND)
    place = mount / found[1].lstrip("/")
    return (place if place.is_dir() else mount), names  # a container may see its own group as root


def _remove(group: Path) -> None:
    """Removes a group, which the system allows a moment after its last process has ended."""
    for _ in range(100):
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


def obstacle() -> str | None:
    """Why memory cannot be limited here; None if it can."""
    try:
        with memory_limit(1 << 30):
            return None
    except OSError as error:
        return str(error)
