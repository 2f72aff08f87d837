"""The process that measures: the environment that it needs, its code path, and the C++ compiler of
programs that it makes.

A measuring process starts itself again with a malloc that keeps freed memory, since fresh pages
cost more than most codecs and would hide the differences between them.
"""

import os
import shutil
import signal
import sys

__all__ = ["SIMD_VARIABLE", "clean_up_at_sigterm", "code_path", "find_compiler", "restart"]

SIMD_VARIABLE = "PACKHORSE_SIMD"
RECYCLING_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def restart(*, recycle: bool, simd: str | None = None) -> None:
    """Start the same command again under the environment that the measurement needs, once.

    Args:
        recycle: whether malloc keeps freed memory.
        simd: the code path to force.
    """
    wanted = {k: v for k, v in os.environ.items() if k not in RECYCLING_MALLOC}
    if recycle:
        wanted |= RECYCLING_MALLOC
    if simd:
        wanted[SIMD_VARIABLE] = simd
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)


def clean_up_at_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that what it has made is removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def code_path() -> str:
    """The name of the code path that packhorse takes here."""
    from packhorse.codecs.base import choose_isa

    return choose_isa().name.lower()


def find_compiler() -> str | None:
    """The C++ compiler: that of the variable CXX, or else g++ or clang++."""
    found = (shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
    return next((path for path in found if path), None)
