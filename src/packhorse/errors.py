"""The errors of Packhorse: one tree, drawn here.

    PackhorseError
    ├── CorruptionError          the bytes are not what docs/format.md allows
    │   └── TruncationError      ... because some are missing at the end
    ├── CompatibilityError       valid perhaps, but of a version or kind this release cannot read
    ├── BaseMismatchError        a delta frame was given another base than its own
    ├── ChangedError             what was read, or its base, was written to meanwhile
    └── MissingBackendError      an optional package or instruction set is not there

Only bad *data*, data that does not stay what it is, and a missing backend raise these. A caller's
own mistake is a `ValueError` or a `TypeError`, and what the operating system refuses stays an
`OSError`. A message says what was found, what is allowed and what to do, with the tensor's name and
the byte offset where there are any.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BaseMismatchError",
    "ChangedError",
    "CompatibilityError",
    "CorruptionError",
    "MissingBackendError",
    "PackhorseError",
    "TruncationError",
    "blaming",
]


class PackhorseError(Exception):
    """Root of every error that Packhorse raises on its own account."""


class CorruptionError(PackhorseError):
    """The bytes break a rule of the format, or a checksum does not match."""


class TruncationError(CorruptionError):
    """Fewer bytes are there than the data itself declares."""


class CompatibilityError(PackhorseError):
    """The data asks for a version, dtype, flag or mode that this release does not know."""


class BaseMismatchError(PackhorseError):
    """A delta frame names a base by content hash and another, or none, was given."""


class ChangedError(PackhorseError, RuntimeError):
    """A tensor was written to while it was packed, or a base while it was used, or a file is not
    the one that it was; try again when nothing writes to it."""


class MissingBackendError(PackhorseError, ImportError):
    """An optional package (the message names the extra to install) or CPU feature is missing."""


_OF_DATA = (CorruptionError, CompatibilityError, BaseMismatchError)


@contextmanager
def blaming(culprit: str, kinds: tuple[type[Exception], ...] = _OF_DATA) -> Iterator[None]:
    """Puts the name of a file or a tensor before the messages of errors about it.

    Args:
        culprit: the name.
        kinds: which errors are about it.

    Yields:
        Nothing; the block runs.

    Raises:
        Exception: that of the block; one of `kinds` as a new one of its type.

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
