"""The columns of a plan's tables as kernels read them: constants of `layout.py` that Triton knows.

A kernel may use a global variable only if it is a `constexpr`; it cannot use members of an enum.
"""

import triton.language as tl

from packhorse.layout import (
    PLAN_FIELDS,
    EscapedField,
    PaletteField,
    PlaneField,
    PlaneSource,
    StreamField,
)

__all__ = [
    "CONSTANT_SOURCE",
    "ESCAPED_ESCAPES_AT",
    "ESCAPED_MARKER",
    "ESCAPED_N_ESCAPES",
    "ESCAPED_N_UNITS",
    "ESCAPED_PLANE_AT",
    "ESCAPED_RAW_BITS",
    "FIELDS",
    "PALETTE_CODES_AT",
    "PALETTE_CODE_BITS",
    "PALETTE_N_UNITS",
    "PALETTE_PLANE_AT",
    "PLANE_CARRIED_AT",
    "PLANE_N_THERE",
    "PLANE_OFFSET",
    "PLANE_RAW_AT",
    "PLANE_RAW_BITS",
    "PLANE_RAW_MASK",
    "PLANE_SOURCE",
    "SCRATCH_SOURCE",
    "STREAM_CARRIED_AT",
    "STREAM_N_UNITS",
    "STREAM_N_WORDS",
    "STREAM_PLANE_AT",
    "STREAM_QUARTER",
    "STREAM_WORDS_AT",
]

FIELDS = tl.constexpr(PLAN_FIELDS)

PLANE_SOURCE = tl.constexpr(int(PlaneField.SOURCE))
PLANE_OFFSET = tl.constexpr(int(PlaneField.OFFSET))
PLANE_N_THERE = tl.constexpr(int(PlaneField.N_THERE))
PLANE_CARRIED_AT = tl.constexpr(int(PlaneField.CARRIED_AT))
PLANE_RAW_BITS = tl.constexpr(int(PlaneField.RAW_BITS))
PLANE_RAW_MASK = tl.constexpr(int(PlaneField.RAW_MASK))
PLANE_RAW_AT = tl.constexpr(int(PlaneField.RAW_AT))
SCRATCH_SOURCE = tl.constexpr(int(PlaneSource.SCRATCH))
CONSTANT_SOURCE = tl.constexpr(int(PlaneSource.CONSTANT))

PALETTE_CODES_AT = tl.constexpr(int(PaletteField.CODES_AT))
PALETTE_CODE_BITS = tl.constexpr(int(PaletteField.CODE_BITS))
PALETTE_N_UNITS = tl.constexpr(int(PaletteField.N_UNITS))
PALETTE_PLANE_AT = tl.constexpr(int(PaletteField.PLANE_AT))

STREAM_WORDS_AT = tl.constexpr(int(StreamField.WORDS_AT))
STREAM_N_WORDS = tl.constexpr(int(StreamField.N_WORDS))
STREAM_QUARTER = tl.constexpr(int(StreamField.QUARTER))
STREAM_N_UNITS = tl.constexpr(int(StreamField.N_UNITS))
STREAM_PLANE_AT = tl.constexpr(int(StreamField.PLANE_AT))
STREAM_CARRIED_AT = tl.constexpr(int(StreamField.CARRIED_AT))

ESCAPED_PLANE_AT = tl.constexpr(int(EscapedField.PLANE_AT))
ESCAPED_N_UNITS = tl.constexpr(int(EscapedField.N_UNITS))
ESCAPED_MARKER = tl.constexpr(int(EscapedField.MARKER))
ESCAPED_ESCAPES_AT = tl.constexpr(int(EscapedField.ESCAPES_AT))
ESCAPED_N_ESCAPES = tl.constexpr(int(EscapedField.N_ESCAPES))
ESCAPED_RAW_BITS = tl.constexpr(int(EscapedField.RAW_BITS))
