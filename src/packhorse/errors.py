"""The errors of Packhorse, as one tree.

    PackhorseError
    ├── CorruptionError          the bytes break a rule of docs/format.md
    │   └── TruncationError      ... because some are missing at the end
    ├── CompatibilityError       perhaps valid, but of a version or kind this release cannot read
    ├── BaseMismatchError        a delta frame was given no base, or the wrong one
    ├── ChangedError             a tensor, base or file was written to while it was used
    ├── ClosedError              a file was used after it was closed
    ├── PeerError                another rank of a collective died, timed out or reported an error
    └── MissingBackendError      an optional package or a CPU feature is missing

Packhorse raises these for bad data, for data that changes while it is used, and for a missing
backend. A caller's mistake is a `ValueError` or a `TypeError`, and an operation that the system
refuses stays an `OSError`. A message says what was found, what is allowed and what to do, and gives
the tensor's name and the byte offset where there are any.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BaseMismatchError",
    "ChangedError",
    "ClosedError",
    "CompatibilityError",
    "CorruptionError",
    "MissingBackendError",
    "PackhorseError",
    "PeerError",
    "TruncationError",
    "blaming",
]


class PackhorseError(Exception):
    """The base class of all errors that Packhorse defines."""


class CorruptionError(PackhorseError):
    """The bytes break a rule of the format, or a checksum does not match."""


class TruncationError(CorruptionError):
    """There are fewer bytes than the data itself declares."""


class CompatibilityError(PackhorseError):
    """The data uses a version, dtype, flag or mode that this release does not know."""


class BaseMismatchError(PackhorseError):
    """A delta frame was given no base, or a base without the content hash that the frame names."""


class ChangedError(PackhorseError, RuntimeError):
    """A tensor was written to while it was packed, a base was written to while it was used, or a
    file was replaced. Try again when nothing writes to it."""


class ClosedError(PackhorseError, ValueError):
    """A file was used after it was closed."""


class PeerError(PackhorseError, ConnectionError):
    """Another rank of a collective died, timed out, or reported an error; the message names the
    rank. The processes must start again, from a checkpoint for example."""


class MissingBackendError(PackhorseError, ImportError):
    """An optional package or a CPU feature is missing; for a package, the message names the extra
    to install."""


_OF_DATA = (CorruptionError, CompatibilityError, BaseMismatchError)


@contextmanager
def blaming(culprit: str, kinds: tuple[type[Exception], ...] = _OF_DATA) -> Iterator[None]:
    """Puts the name of a file or a tensor in front of the messages of errors about it.

    Args:
        culprit: the name.
        kinds: the types of errors that get the name.

    Yields:
        Nothing; the block runs.

    Raises:
        Exception: the block's error; one of `kinds` is raised again with the name in its message.

    Example:
        >>> from packhorse.errors import CorruptionError, blaming
        >>> with blaming("model.ph.safetensors"):
        ...     raise CorruptionError("the header is cut off")
        Traceback (most recent call last):
        packhorse.errors.CorruptionError: model.ph.safetensors: the header is cut off
    """
    try:
        yield
    except kinds as error:
        raise type(error)(f"{culprit}: {error}") from error
