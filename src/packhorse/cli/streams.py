"""Standard output and error as they come: closed, or of an encoding without our glyphs.

Whoever started the program may have closed them, and then an opened file would get their number.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

__all__ = ["safe_streams"]


@contextmanager
def safe_streams() -> Iterator[None]:
    """Make standard output and error fit to be written to while the block runs.

    What their encoding cannot write becomes an escape. One that is closed is an error for what is
    written to standard output, and swallows what is written to standard error.
    """
    before = sys.stdout, sys.stderr
    errors = [(stream, getattr(stream, "errors", None)) for stream in before]
    _occupy_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    try:
        for stream, _ in errors:
            _reconfigure(stream, "backslashreplace")
        yield
    finally:
        for stream, old in errors:
            _reconfigure(stream, old)
        if before[0] is None:
            sys.stdout = before[0]
        if before[1] is None:
            sys.stderr = before[1]


def _reconfigure(stream: Any, errors: str | None) -> None:
    with suppress(AttributeError, OSError, ValueError):
        if errors is not None:
            stream.reconfigure(errors=errors)


def _occupy_closed_descriptors() -> None:
    """Open something on the numbers of closed streams, so that no file of ours gets them."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return


class _Closed(io.StringIO):
    """Standard output that is closed."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, "is closed")
