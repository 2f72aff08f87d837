"""Frames that lie: each breaks one clause of docs/format.md, section 9.1, and no other before it.

Every checksum is right unless the lie is about it, so that the check which a row names is the one
that must catch it. The rows are for every decoder; the fragment is of the slow one's message.
"""

from lying_frames import headers, streams
from lying_frames.lie import DATA, LIES, Lie, set_at

__all__ = ["DATA", "LIES", "Lie", "headers", "set_at", "streams"]
