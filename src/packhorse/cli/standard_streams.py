"""Makes standard output and error safe to write to, even if they are closed or full, if a pipe has
no reader, or if their encoding lacks our glyphs.

If the program was started with a stream closed, a file that it opens would get the stream's number.
An error of standard output must not be mistaken for an error of a source or a server, no matter
whether our tables are printed or a library prints help and versions.
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
    """The reader of the pipe that is standard output has ended.

    It is not an `OSError`, because some libraries handle BrokenPipeError in their own way.
    """


@contextmanager
def safe_streams() -> Iterator[None]:
    """Make standard output and error safe to write to while the block runs.

    Characters that their encoding lacks are escaped. If standard output is closed or full, writing
    to it raises an error that says so. If standard error is, the text is lost.
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
    """Open /dev/null on the descriptors of closed streams, so that no other file gets them."""
    with suppress(OSError):  # no file can be opened at all: the first source reports that
        while True:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor > 2:
                os.close(descriptor)
                return


class _Output:
    """Standard output, whose errors say that it is standard output that failed."""

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
            raise OSError(f"standard output{found}; write it elsewhere") from error


class _Errors(_Output):
    """Standard error; text that it refuses is lost."""

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        with suppress(OSError):
            yield


class _Closed(io.StringIO):
    """Standard output that is closed."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
