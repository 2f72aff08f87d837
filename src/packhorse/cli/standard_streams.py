"""Standard output and error as they come: closed, full, read by nobody, or of an encoding without
our glyphs.

Whoever started the program may have closed them, and then an opened file would get their number.
What standard output refuses is told apart here from what a source or a server does, whoever writes
to it: our tables, or the libraries that print help and versions.
"""

import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, cast

__all__ = ["OutputClosed", "safe_streams"]


class OutputClosed(BaseException):
    """Nobody reads standard output any more: the reader of the pipe has ended.

    No `OSError`, because libraries have answers of their own to that of a closed pipe.
    """


@contextmanager
def safe_streams() -> Iterator[None]:
    """Make standard output and error fit to be written to while the block runs.

    What their encoding cannot write becomes an escape. Standard output that is closed or full is an
    error that says so; standard error that is has no other place to tell it.
    """
    before = sys.stdout, sys.stderr
    errors = [(stream, getattr(stream, "errors", None)) for stream in before]
    _occupy_closed_descriptors()
    sys.stdout = cast(Any, _Output(_Closed() if before[0] is None else before[0]))
    sys.stderr = cast(Any, _Errors(io.StringIO() if before[1] is None else before[1]))
    try:
        for stream, _ in errors:
            _reconfigure(stream, "backslashreplace")
        yield
    finally:
        for stream, old in errors:
            _reconfigure(stream, old)
        sys.stdout, sys.stderr = before


def _reconfigure(stream: Any, errors: str | None) -> None:
    with suppress(AttributeError, OSError, ValueError):
        if errors is not None:
            stream.reconfigure(errors=errors)


def _occupy_closed_descriptors() -> None:
    """Open something on the numbers of closed streams, so that no file of ours gets them."""
    with suppress(OSError):  # no file at all may be opened: the first that is needed tells
        while True:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor > 2:
                os.close(descriptor)
                return


class _Output:
    """Standard output that says what refuses."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._refusals():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._refusals():
            self._stream.flush()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            raise OutputClosed from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            is_closed = error.errno == errno.EBADF
            found = " is closed" if is_closed else f": {reason}"
            raise OSError(f"standard output{found}; print to somewhere else") from error


class _Errors(_Output):
    """Standard error: what it refuses is lost."""

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        with suppress(OSError):
            yield


class _Closed(io.StringIO):
    """Standard output that is closed."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
