"""Frames that lie: each breaks one clause of docs/format.md, section 9.1, and no other before it.

Every checksum is right unless the lie is about it, so that the check which a row names is the one
that must catch it. The rows are for every decoder; the fragment is of the slow one's message. Each
is to be decoded with its base, `Lie.base()`, which most do not have.
"""

from lying_frames import deltas, headers, streams
from lying_frames.lie import DATA, LIES, Lie, set_at

__all__ = ["DATA", "LIES", "Lie", "deltas", "headers", "set_at", "streams"]
