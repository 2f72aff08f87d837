"""A process for frame/test_bombs.py: reads files with little memory, and reports the outcomes.

The arguments are paths: names that end in `.frame` are frames, all others are packed files. After
all imports, the address space may grow by no more than `ROOM`. One JSON object goes to standard
output: for each path and reader the error's type and message (null if there was none), and the
seconds of processor time.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from packhorse import numpy as ph_numpy
from packhorse import open_file
from packhorse.disk import logical_nbytes, unpack_file, verify_file
from packhorse.errors import PackhorseError
from packhorse.frame import Frame

ROOM = 1 << 27


def read_frame(path: Path) -> None:
    ph_numpy.decompress(path.read_bytes(), threads=1)


def verify_frame(path: Path) -> None:
    Frame.from_buffer(path.read_bytes()).verify(threads=1)


def load(path: Path) -> None:
    ph_numpy.load(path.read_bytes(), threads=1)


def load_file(path: Path) -> None:
    ph_numpy.load_file(path, threads=1)


def get_tensor(path: Path) -> None:
    with open_file(path, threads=1) as file:
        for name in file:
            file.get_tensor(name)


def load_limited(path: Path) -> None:
    ph_numpy.load_file(path, threads=1, max_nbytes=1 << 20)


def unpack(path: Path) -> None:
    unpack_file(path, path.with_suffix(".out"), threads=1, force=True, max_nbytes=1 << 20)


def verify(path: Path) -> None:
    problems = verify_file(path, threads=1)
    if problems:
        raise PackhorseError(f"{len(problems)} problems, the first: {problems[0].message}")


def measure(read: Callable[[Path], object], path: Path) -> tuple[str | None, str, float]:
    """Type and message of the error, and seconds."""
    start = time.process_time()
    kind, message = None, ""
    try:
        read(path)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    return kind, message, time.process_time() - start


FRAME_READERS = (read_frame, verify_frame)
FILE_READERS = (load, load_file, get_tensor, load_limited, unpack, verify, logical_nbytes)


def main() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    report = {}
    for path in map(Path, sys.argv[1:]):
        readers = FRAME_READERS if path.suffix == ".frame" else FILE_READERS
        report[path.name] = {read.__name__: measure(read, path) for read in readers}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
