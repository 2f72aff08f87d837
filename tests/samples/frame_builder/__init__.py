"""A slow encoder that builds any legal frame by hand, and any illegal one.

A test states how each plane is coded; the builder chooses nothing. It shares no code with the
package's encoder or with `packhorse.reference`: it is based only on docs/format.md and the
constants of `packhorse.layout`. An `edit` hook changes a stream before lengths and checksums are
made, so that every CRC is right although the stream lies. `lie` and `patch` change a finished
frame, and can seal it again.
"""

from frame_builder.codings import (
    Around,
    Classed,
    Coding,
    Constant,
    Palette,
    Rans,
    Raw,
    Stored,
    Zstd,
)
from frame_builder.deltas import Base, Delta, DeltaEqual, narrowed
from frame_builder.draws import (
    draw_delta,
    draw_delta_frame,
    draw_matches_frame,
    draw_nibbles_frame,
    draw_sparse,
    odd_floats,
)
from frame_builder.files import build_file, hexdump, original_file, record_crc
from frame_builder.frames import (
    SIDE,
    BuiltFrame,
    Edit,
    Side,
    build_frame,
    content_hash,
    crc32c,
)
from frame_builder.matches import Match, Matches
from frame_builder.nibbles import Nibbles
from frame_builder.planes import split_planes
from frame_builder.samples import DELTAS, SMALL, side_of, units_of_values
from frame_builder.sparse import Sparse

__all__ = [
    "DELTAS",
    "SIDE",
    "SMALL",
    "Around",
    "Base",
    "BuiltFrame",
    "Classed",
    "Coding",
    "Constant",
    "Delta",
    "DeltaEqual",
    "Edit",
    "Match",
    "Matches",
    "Nibbles",
    "Palette",
    "Rans",
    "Raw",
    "Side",
    "Sparse",
    "Stored",
    "Zstd",
    "build_file",
    "build_frame",
    "content_hash",
    "crc32c",
    "draw_delta",
    "draw_delta_frame",
    "draw_matches_frame",
    "draw_nibbles_frame",
    "draw_sparse",
    "hexdump",
    "narrowed",
    "odd_floats",
    "original_file",
    "record_crc",
    "side_of",
    "split_planes",
    "units_of_values",
]
