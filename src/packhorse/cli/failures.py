"""Exit codes, and every failure as one line that names the file, the place and the remedy.

A failure is wherever an expected exception meets the path it is about. Exceptions that are not
expected here are bugs: their traceback is printed before the line. Messages of `packhorse.errors`
already carry the tensor and the byte offset; what the operating system says gets its remedy here.
"""

import errno
from enum import IntEnum
from pathlib import Path

from packhorse.errors import ChangedError, MissingBackendError, PackhorseError

__all__ = [
    "EXPECTED",
    "ExitCode",
    "OutputClosed",
    "Stopped",
    "UsageError",
    "describe",
    "describe_bug",
    "exit_code",
]


class ExitCode(IntEnum):
    """What the process returns; part of the public interface. A signal gives 128 + its number."""

    OK = 0
    BAD_DATA = 1
    USAGE = 2
    IO = 3
    MISSING_PACKAGE = 4
    BUG = 5


class UsageError(ValueError):
    """The command line asks for something that Packhorse does not do; nothing was started."""


class Stopped(BaseException):
    """The process was asked to end by a signal; like KeyboardInterrupt, only clean-up may catch it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OutputClosed(BaseException):
    """Nobody reads standard output any more: the reader of the pipe has ended."""


EXPECTED = (PackhorseError, OSError, ValueError, TypeError, MemoryError)

_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere with -o",
    errno.EDQUOT: "free some of your quota, or write elsewhere with -o",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write elsewhere with -o",
    errno.EACCES: "check the permissions, or write elsewhere with -o",
    errno.EPERM: "check the permissions, or write elsewhere with -o",
    errno.EROFS: "write elsewhere with -o",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENOMEM: "use a machine with more memory",
    errno.ENFILE: "close what else runs here",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


# What Python says where it has lost the exception that it should raise.
_LOST = ("without setting an exception", "without exception set", "without error")


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that an exception leads to."""
    if isinstance(error, MissingBackendError):
        return ExitCode.MISSING_PACKAGE
    if isinstance(error, ChangedError):  # nothing is wrong with the data but the moment
        return ExitCode.IO
    if isinstance(error, PackhorseError):
        return ExitCode.BAD_DATA
    if isinstance(error, FileExistsError):
        return ExitCode.USAGE
    if isinstance(error, OSError | MemoryError) or _is_lack_of_memory(error):
        return ExitCode.IO
    return ExitCode.USAGE if isinstance(error, EXPECTED) else ExitCode.BUG


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory ended where nobody says so: a module of C cannot be loaded, which is an import
    error like others, or Python loses the error on its way."""
    if isinstance(error, SystemError):
        return any(words in str(error) for words in _LOST)
    return isinstance(error, ImportError) and "failed to map segment" in str(error)


def describe(error: BaseException, path: Path | str | None = None) -> str:
    """One line for a failure.

    Args:
        error: what was raised.
        path: the file or store that was being worked on, named in front unless the message names it
            already.

    Returns:
        The line, without the program's name and without a line break.
    """
    text = " ".join(_text(error).split())
    named = getattr(error, "filename", None) or path
    return text if named is None or str(named) in text else f"{named}: {text}"


def describe_bug(error: BaseException) -> str:
    """One line for an exception that nobody expected."""
    if _is_lack_of_memory(error):
        return describe(error)
    text = " ".join(str(error).split())
    return (
        f"a fault of Packhorse itself: {type(error).__name__}: {text}; please report it, with the "
        "lines above"
    )


def _text(error: BaseException) -> str:
    if isinstance(error, MemoryError) or _is_lack_of_memory(error):
        return "not enough memory for its largest tensor; use a machine with more"
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno)
    reason = (error.strerror or "the system refused").lower()
    return f"{reason}; {remedy}" if remedy else reason
