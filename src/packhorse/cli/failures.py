"""Exit codes, and the line for every failure, which names the file, the place and the remedy.

An exception of an unexpected type is a bug: its traceback is printed before the line. Messages of
`packhorse.errors` already name the tensor and the byte offset. This module adds a remedy
to errors of the operating system.
"""

import errno
import os
from enum import IntEnum

from packhorse.errors import ChangedError, MissingBackendError, PackhorseError

__all__ = [
    "ExitCode",
    "Stopped",
    "UsageError",
    "describe",
    "describe_bug",
    "exit_code",
    "is_lack_of_memory",
]


class ExitCode(IntEnum):
    """The exit codes of the process, a part of the public interface. After a signal, the code is
    128 + its number."""

    OK = 0
    BAD_DATA = 1
    USAGE = 2
    IO = 3
    MISSING_PACKAGE = 4
    BUG = 5


class UsageError(ValueError):
    """The command line asks for something that Packhorse does not do; no work was started."""


class Stopped(BaseException):
    """A signal asked the process to end. As with KeyboardInterrupt, only clean-up may catch it.

    Attributes:
        number: the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some of your quota, or write elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write elsewhere",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "write elsewhere",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENFILE: "end other programs that hold files open",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


# Messages of errors that mean a lack of memory but are not a MemoryError: Python's, when a C module
# failed without setting an error; the library loader's; and OpenSSL's.
_LOST = ("without setting an exception", "without exception set", "without error")
_NOT_LOADED = ("failed to map segment", "cannot allocate memory", "cannot apply additional memory")
_OF_OPENSSL = "malloc failure"  # while it opens a connection
_NO_TLS = "static tls"  # thread-local storage, which is scarce on any machine: not a lack of memory
_MORE_MEMORY = "raise the limit on memory (ulimit -v), or use a machine with more memory"
_MORE_THREADS = "raise the limits on processes and memory (ulimit -u, ulimit -v)"


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that an exception leads to."""
    if is_lack_of_memory(error) or _is_lack_of_threads(error):
        return ExitCode.IO
    if isinstance(error, MissingBackendError):
        return ExitCode.MISSING_PACKAGE
    if isinstance(error, ChangedError):  # the data is not bad; it can be read again later
        return ExitCode.IO
    if isinstance(error, PackhorseError):
        return ExitCode.BAD_DATA
    if isinstance(error, FileExistsError):
        return ExitCode.USAGE
    if isinstance(error, OSError):
        return ExitCode.IO
    return ExitCode.USAGE if isinstance(error, ValueError | TypeError) else ExitCode.BUG


def is_lack_of_memory(error: BaseException | None) -> bool:
    """Whether an error was caused by a lack of memory.

    Few modules written in C raise MemoryError then: a library that cannot be loaded raises
    ImportError, a lost error becomes SystemError, and other errors follow from these.
    """
    while error is not None:
        words = str(error).lower()
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, OSError) and _OF_OPENSSL in words:
            return True
        if isinstance(error, SystemError) and any(lost in words for lost in _LOST):
            return True
        if isinstance(error, ImportError) and any(found in words for found in _NOT_LOADED):
            return _NO_TLS not in words
        error = error.__cause__ or error.__context__
    return False


def _is_lack_of_threads(error: BaseException) -> bool:
    """Whether Python could not start a thread; a library may raise Python's message as its own."""
    return isinstance(error, RuntimeError | OSError) and "can't start new thread" in str(error)


def describe(error: BaseException, path: object = None, *, doing: str = "go on") -> str:
    """The line for a failure.

    Args:
        error: the exception.
        path: the file or store at fault, which is put in front unless the message names it already.
        doing: what the program had no memory to do, if memory was the cause.

    Returns:
        The line, without the program's name and without a line break.
    """
    text = " ".join(_text(error, doing).split())
    named = getattr(error, "filename", None) or path
    return text if named is None or str(named) in text else f"{named}: {text}"


def describe_bug(error: BaseException) -> str:
    """The line for an exception of an unexpected type."""
    text = " ".join(str(error).split())
    return (
        f"a fault of Packhorse itself: {type(error).__name__}: {text}; please report it, with the "
        "lines above"
    )


def _text(error: BaseException, doing: str) -> str:
    if is_lack_of_memory(error):
        return f"not enough memory to {doing}; {_MORE_MEMORY}"
    if _is_lack_of_threads(error):
        return f"the system refuses to start a thread; use fewer (-t 1), or {_MORE_THREADS}"
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno)
    reason = error.strerror or "the system refused"
    if reason == os.strerror(error.errno):  # other words may have names in them
        reason = reason.lower()
    return f"{reason}; {remedy}" if remedy else reason
