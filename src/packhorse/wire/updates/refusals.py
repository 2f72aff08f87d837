"""Why a receiver refuses a good update: it does not follow what the receiver holds.

The update itself is sound, so the remedy is another one. The error says which version is there and
which is needed, in words and as attributes, so that a transport can fetch the missing versions.
"""

from __future__ import annotations

from enum import Enum

from packhorse.errors import BaseMismatchError

__all__ = ["Refusal", "UpdateMismatchError"]


class Refusal(Enum):
    """Why an update does not follow what a receiver holds."""

    REPEATED = "repeated"  # the receiver holds this version, or a later one
    MISSED = "missed"  # versions between the receiver's and the update's base are missing
    FOREIGN = "foreign"  # the receiver's weights are not the base, whatever their version
    TORN = "torn"  # an earlier commit failed half-way, so the weights are of no version


class UpdateMismatchError(BaseMismatchError):
    """An update does not follow what a receiver holds. Nothing was changed.

    Attributes:
        reason: why; None only if the error was made without it.
        held: the version that the receiver holds; None if it holds none of this stream.
        needed: the version that the update needs; None for an anchor, which needs none.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Refusal | None = None,
        held: int | None = None,
        needed: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.held = held
        self.needed = needed
