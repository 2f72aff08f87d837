"""Frames that lie: each breaks one clause of docs/format.md, section 9.1, and no other before it.

Every checksum is right unless the lie is about it, so only the check that a row names can catch the
lie. The rows are for every decoder; the fragment is part of the slow decoder's message. Each frame
must be decoded with its base, `Lie.base()`; most frames have none.
"""

from lying_frames import deltas, headers, matches, nibbles, sparse, streams
from lying_frames.lie import DATA, LIES, Lie, set_at

__all__ = [
    "DATA",
    "LIES",
    "Lie",
    "deltas",
    "headers",
    "matches",
    "nibbles",
    "set_at",
    "sparse",
    "streams",
]
