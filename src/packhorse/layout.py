"""Every constant of the format, in the order of docs/format.md, which is normative. (Those of
section 14 are in table_layout.py.)

No other module of the package writes a literal size, code or limit of the format. The C++ core has
the same constants in `csrc/common/layout.hpp`. `tests/codecs/test_layout.py` compares the two, and
checks that every field can hold its maximum. At the end are the numbers that the core and Python
exchange in memory: the faults that a decoder reports, and the rows of plans for GPUs.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "BASE_BLOCK",
    "BASE_BLOCK_NBYTES",
    "BASE_MODES",
    "BOUNDED_ALIGNMENT",
    "BOUNDED_BLOCK",
    "BOUNDED_CRC_OFFSET",
    "BOUNDED_DTYPES",
    "BOUNDED_ENTRY",
    "BOUNDED_FREE_SLOTS",
    "BOUNDED_HEADER",
    "BOUNDED_LANES",
    "BOUNDED_MAGIC",
    "BOUNDED_SLOT_SHARE",
    "BOUNDED_VERSION",
    "CHUNK_CRC",
    "CHUNK_NBYTES",
    "CLASSED_CHUNK_NBYTES",
    "CLASSED_MODELS_OFFSET",
    "CODED_HEADER",
    "CODED_MAGIC",
    "CODED_PIECE",
    "CONTENT_LEAF_NBYTES",
    "CRITICAL_FLAGS",
    "CRITICAL_FLAGS_OFFSET",
    "DELTA_DIRECT_TOKENS",
    "DELTA_FULL_TOKEN",
    "DELTA_MODELS_OFFSET",
    "DELTA_TOKENS",
    "DTYPES",
    "DTYPE_BY_CODE",
    "DTYPE_BY_NAME",
    "ENTRY_RANK_SHIFT",
    "ENTRY_VALUE_SHIFT",
    "FILE_ALIGNMENT",
    "FILE_METADATA_KEY",
    "FILE_SUFFIX",
    "FILE_VERSION",
    "FIRST_STREAM",
    "FIXED_HEADER",
    "FIXED_HEADER_NBYTES",
    "FLAG_BASE",
    "FLAG_SUM",
    "FRAME_ALIGNMENT",
    "FRAME_MAGIC",
    "FRAME_NBYTES_OFFSET",
    "FRAME_VERSION",
    "HEADER_CRC_OFFSET",
    "LAST_MODES",
    "LENGTH_NBYTES",
    "MATCH_DESCRIPTORS_OFFSET",
    "MAX_BITS",
    "MAX_BOUNDED_BITS",
    "MAX_BOUNDED_LENGTH",
    "MAX_CHUNK_LOG",
    "MAX_CHUNK_NBYTES",
    "MAX_CLASSES",
    "MAX_CODED_BITS",
    "MAX_CODE_BITS",
    "MAX_DELTA_CLASSES",
    "MAX_DIMS",
    "MAX_FILE_HEADER_NBYTES",
    "MAX_LANES_LOG",
    "MAX_PALETTE_RAW_BITS",
    "MAX_RANS_RAW_BITS",
    "MAX_SIDE_NBYTES",
    "MAX_SPARSE_CLASSES",
    "MAX_SPARSE_COUNT_SHIFT",
    "MAX_SPARSE_SIZE_SHIFT",
    "MAX_SPARSE_ZEROS",
    "MAX_WEIGHT_COLUMNS",
    "METADATA_KEY",
    "MIN_CHUNK_LOG",
    "MIN_LANES_LOG",
    "MODEL_OFFSET",
    "NARROW_BUCKETS",
    "NIBBLE_BITS",
    "NIBBLE_CHUNK_NBYTES",
    "PALETTE_HEADER_NBYTES",
    "PLAN_FIELDS",
    "PREDICTION_BIAS",
    "PREDICTION_CLASSES",
    "PROB_BITS",
    "PROB_SUM",
    "RECORD_BASE_KEY",
    "RECORD_CRC_KEY",
    "RECORD_FREE_NBYTES",
    "RECORD_GROWTH",
    "RUN_BYTE_MAX",
    "SPARSE_CLASS_NBYTES",
    "SPARSE_COUNT_BITS",
    "SPARSE_EVERY_SIZE",
    "SPARSE_NO_SIZES",
    "STATE_LOWER_BOUND",
    "STREAM_NBYTES_BITS",
    "STREAM_NBYTES_MASK",
    "W11",
    "W12",
    "WEIGHT_FORMATS",
    "WEIGHT_STEP_ALIGNMENT",
    "WEIGHT_VERSION",
    "WIDE_BUCKETS",
    "WORD_BITS",
    "ZSTD_CHUNK_NBYTES",
    "BoundedFault",
    "BoundedForm",
    "ClassSource",
    "DType",
    "EscapedField",
    "HeaderFault",
    "Level",
    "Mode",
    "PaletteField",
    "PlaneField",
    "PlaneSource",
    "Rounding",
    "Split",
    "Status",
    "StreamField",
    "WeightFault",
    "WeightFormat",
]

# Section 2: the frame.
FRAME_MAGIC = b"\x89PHF"  # not ASCII, so that readers notice a transfer that strips bit 7
FRAME_VERSION = 4  # the newest one; a frame has the first one that has all of its modes
FRAME_ALIGNMENT = 64  # a cache line, and the width of the widest vector register
# magic, version, dtype, n_dims, split, flags, level, chunk_log, header_nbytes, frame_nbytes, hash,
# n_chunks, CRC, n_row_dims, reserved, side descriptor
FIXED_HEADER = struct.Struct("<4sBBBBHBBIQ16sIIB3sI")
FIXED_HEADER_NBYTES = FIXED_HEADER.size
CRITICAL_FLAGS_OFFSET = 8
FRAME_NBYTES_OFFSET = 16  # the content hash follows
HEADER_CRC_OFFSET = 44
FLAG_BASE = 1  # the frame has a base
FLAG_SUM = 2  # the content hash, also the base's, is a content sum
CRITICAL_FLAGS = FLAG_BASE | FLAG_SUM  # all flags that version 1 defines
# The base: content hash, dtype, reserved, base check
BASE_BLOCK = struct.Struct("<16sB3sI")
BASE_BLOCK_NBYTES = BASE_BLOCK.size
MAX_DIMS = 64  # NumPy's limit
MIN_CHUNK_LOG = 6
MAX_CHUNK_LOG = 21
MAX_CHUNK_NBYTES = 1 << 21
MAX_BITS = 1 << 63  # a tensor has fewer, so every size in bytes fits an i64
STREAM_NBYTES_BITS = 24
STREAM_NBYTES_MASK = (1 << STREAM_NBYTES_BITS) - 1
CHUNK_CRC = 0  # the first column of the chunk table
FIRST_STREAM = 1  # the second column; it and all later ones describe streams
MAX_SIDE_NBYTES = 1 << 21  # bytes of side data, decoded: one for each row and each column

# What this encoder writes (section 5 allows more). 256 KiB stay in L2 together with their output;
# zstd needs a longer window.
CHUNK_NBYTES = 1 << 18
CLASSED_CHUNK_NBYTES = 1 << 20  # for chunks with classes, which have more tables
NIBBLE_CHUNK_NBYTES = 1 << 19  # two symbols a byte
ZSTD_CHUNK_NBYTES = 1 << 21

# Section 6.1: symbols and raw bits.
MAX_RANS_RAW_BITS = 7
MAX_PALETTE_RAW_BITS = 8  # then every symbol is 0

# Section 6.2: models.
PROB_BITS = 12
PROB_SUM = 1 << PROB_BITS
NARROW_BUCKETS = 32  # of the alias layout, if there are no more codes than this
WIDE_BUCKETS = 64

# Section 6.3: palettes.
MAX_CODE_BITS = 4
PALETTE_HEADER_NBYTES = 24

# Section 6.4: rANS.
MIN_LANES_LOG = 2
MAX_LANES_LOG = 7
STATE_LOWER_BOUND = 1 << 16
WORD_BITS = 16  # of a word, which a state takes as a whole
MODEL_OFFSET = 8

# Section 6.5: classed rANS.
CLASSED_MODELS_OFFSET = 16
MAX_CLASSES = 4
PREDICTION_CLASSES = 4  # quarters of a step of plane 0
PREDICTION_BIAS = 128  # keeps the bytes that the stream yields away from 0 and 255

# Section 6.6: delta.
MAX_DELTA_CLASSES = 8
DELTA_MODELS_OFFSET = 32
DELTA_TOKENS = 64
DELTA_DIRECT_TOKENS = 32  # for the differences around 0
DELTA_FULL_TOKEN = 63  # for differences that are too long for all other tokens

# Section 6.7: sparse delta.
MAX_SPARSE_CLASSES = 8
SPARSE_CLASS_NBYTES = 6
MAX_SPARSE_ZEROS = 24  # in front of a number that is written in full
SPARSE_COUNT_BITS = 22  # of a gap with its sign, and of a run, in full
MAX_SPARSE_COUNT_SHIFT = 21
MAX_SPARSE_SIZE_SHIFT = 58
SPARSE_NO_SIZES = 254  # all steps have the size 1
SPARSE_EVERY_SIZE = 255  # the size of every step is written

# Section 6.8: matches.
MATCH_DESCRIPTORS_OFFSET = 40
RUN_BYTE_MAX = 255  # a byte of a run or a length that is not the last

# Section 6.9: nibbles.
NIBBLE_BITS = 4

# Section 7: the content hash.
CONTENT_LEAF_NBYTES = 1 << 18

# Section 8: the file.
FILE_SUFFIX = ".ph.safetensors"
FILE_VERSION = 1
FILE_METADATA_KEY = "packhorse"
RECORD_CRC_KEY = "crc32c"
RECORD_BASE_KEY = "base"
FILE_ALIGNMENT = 64
LENGTH_NBYTES = 8  # of a safetensors file: the u64 before its header
METADATA_KEY = "__metadata__"  # of safetensors
MAX_FILE_HEADER_NBYTES = 100_000_000  # safetensors' own cap
# A recorded text may have RECORD_GROWTH bytes for each byte of the JSON text that records it, and
# RECORD_FREE_NBYTES more. Real texts stay far below, and what is parsed stays in proportion to the
# file.
RECORD_GROWTH = 4
RECORD_FREE_NBYTES = 1 << 20

# Section 12: weights in memory.
WEIGHT_VERSION = 1
MAX_WEIGHT_COLUMNS = 1 << 16  # a column is the lower half of an exception
WEIGHT_STEP_ALIGNMENT = (
    16  # a vector load of a GPU's thread: every row of every array starts at one
)


class Level(IntEnum):
    """How hard the encoder tries. One decoder reads all levels."""

    FAST = 1
    DEFAULT = 2
    MAX = 3


class Split(IntEnum):
    """How units become planes (section 4)."""

    WHOLE = 0
    BYTES = 1
    FLOAT = 2


class Mode(IntEnum):
    """How a plane of a chunk is coded (section 6)."""

    STORED = 0
    CONSTANT = 1
    PALETTE = 2
    RANS = 3
    ZSTD = 4
    CLASSED_RANS = 5
    DELTA = 6
    SPARSE_DELTA = 7
    MATCHES = 8
    NIBBLES = 9


# The modes in which plane 0 of a chunk holds differences from the base.
BASE_MODES = (Mode.DELTA, Mode.SPARSE_DELTA)
# The last mode of each version of the frame.
LAST_MODES = {1: Mode.DELTA, 2: Mode.SPARSE_DELTA, 3: Mode.MATCHES, 4: Mode.NIBBLES}


class ClassSource(IntEnum):
    """Where the class of a unit comes from (section 6.5)."""

    PREDICTION = 1
    LEAD = 2


@dataclass(frozen=True)
class WeightFormat:
    """One row of the first table in section 12.

    Attributes:
        name: what users call it.
        bits: bits of a packed element.
        code_bits: bits of a code.
        n_slices: runs of consecutive columns that one vector of high bits serves.
        first_code: the lowest code that stands for an exponent.
        min_first: the lowest first exponent that a row may have.
        max_first: the highest one; the window's last code then still stands for a finite exponent.
    """

    name: str
    bits: int
    code_bits: int
    n_slices: int
    first_code: int
    min_first: int
    max_first: int

    def n_steps(self, n_columns: int) -> int:
        """Columns of a slice."""
        steps = -(-n_columns // self.n_slices)
        return -(-steps // WEIGHT_STEP_ALIGNMENT) * WEIGHT_STEP_ALIGNMENT

    def n_padded(self, n_columns: int) -> int:
        """Columns of a row with its padding."""
        return self.n_slices * self.n_steps(n_columns)

    def n_high_bytes(self, n_columns: int) -> int:
        """Bytes of high bits of a row."""
        return self.n_padded(n_columns) * (self.bits - 8) // 8


W12 = WeightFormat("W12", 12, 4, 2, 1, 0, 239)
W11 = WeightFormat("W11", 11, 3, 8, 0, 1, 247)
WEIGHT_FORMATS = {format.name: format for format in (W12, W11)}


@dataclass(frozen=True)
class DType:
    """One row of the table in section 3.

    Attributes:
        name: safetensors' name.
        code: the number in the frame header; never reused.
        bits: bits of one element.
        unit_nbytes: bytes of the unit that is split into planes.
        splits: the splits that a frame of this dtype may use.
    """

    name: str
    code: int
    bits: int
    unit_nbytes: int
    splits: tuple[Split, ...]


def _rows() -> tuple[DType, ...]:
    whole, integer, real = (Split.WHOLE,), (Split.WHOLE, Split.BYTES), (Split.WHOLE, Split.FLOAT)
    table = [
        ("BOOL", 8, 1, whole),
        ("U8", 8, 1, whole),
        ("I8", 8, 1, whole),
        ("U16", 16, 2, integer),
        ("I16", 16, 2, integer),
        ("U32", 32, 4, integer),
        ("I32", 32, 4, integer),
        ("U64", 64, 8, integer),
        ("I64", 64, 8, integer),
        None,  # codes 10 to 13 are reserved for integers of other widths
        None,
        None,
        None,
        ("F16", 16, 2, real),
        ("BF16", 16, 2, real),
        ("F32", 32, 4, real),
        ("F64", 64, 8, real),
        ("C64", 64, 4, real),
        ("F8_E4M3", 8, 1, real),
        ("F8_E5M2", 8, 1, real),
        ("F8_E8M0", 8, 1, whole),
        ("F8_E4M3FNUZ", 8, 1, real),
        ("F8_E5M2FNUZ", 8, 1, real),
        ("F4", 4, 1, whole),
        ("F6_E2M3", 6, 1, whole),
        ("F6_E3M2", 6, 1, whole),
    ]
    return tuple(
        DType(row[0], code, row[1], row[2], row[3]) for code, row in enumerate(table, 1) if row
    )


DTYPES = _rows()
DTYPE_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
DTYPE_BY_CODE = {dtype.code: dtype for dtype in DTYPES}


# Values that the core and Python exchange in memory. No file holds them.


class Status(IntEnum):
    """The faults that a decoder reports; `codecs.base.STATUS_WORDS` has the words."""

    OK = 0
    CHECKSUM = 1
    STREAM_LENGTH = 2
    RESERVED = 3
    BAD_FIELD = 4
    FREQUENCIES = 5
    WORDS_EXHAUSTED = 6
    WORDS_LEFT = 7
    FINAL_STATE = 8
    ESCAPE_COUNT = 9
    EXTRA_BITS = 10


class HeaderFault(IntEnum):
    """What is wrong with a header, in the order of the checks (csrc/frame/header.hpp);
    `frame.header_faults` has the words."""

    NONE = 0
    FIXED_PART = 1
    MAGIC = 2
    VERSION_ZERO = 3
    VERSION = 4
    FLAGS = 5
    DTYPE = 6
    SPLIT = 7
    DIMS = 8
    CHUNK_LOG = 9
    HEADER_LENGTH = 10
    CUT_OFF = 11
    CHECKSUM = 12
    OVERFLOW = 13
    PARTIAL_BYTE = 14
    CHUNKS = 15
    LIMIT = 16
    RESERVED = 17
    BASE_DTYPE = 18
    BASE_CAST = 19
    BASE_SUM = 20
    BASE_RESERVED = 21
    HALF_SIDE = 22
    SIDE_PLACE = 23
    SIDE_LENGTH = 24
    SIDE_STREAM = 25
    PADDING = 26
    UNKNOWN_MODE = 27
    DESCRIPTOR = 28
    FRAME_LENGTH = 29
    FRAME_CUT_OFF = 30
    TRAILING = 31


class WeightFault(IntEnum):
    """What is wrong with the arrays of a packed weight (csrc/rows/weights_unpack.hpp)."""

    NONE = 0
    FIRST_EXPONENT = 1
    ENDS = 2
    DESCEND = 3
    COLUMN = 4
    ASCEND = 5
    HOLE = 6
    MANTISSA = 7
    PADDING = 8


# Plans for GPUs (csrc/tensor/plan.hpp): tables of i64, each with `PLAN_FIELDS` columns. The enums
# name the columns; columns without a name are not used. Offsets are bytes.
PLAN_FIELDS = 8


class PlaneSource(IntEnum):
    """Where the bytes of a plane come from."""

    PAYLOAD = 0
    SCRATCH = 1
    CONSTANT = 2


class PlaneField(IntEnum):
    """A plane of a chunk, from which units are merged."""

    SOURCE = 0  # a `PlaneSource`
    OFFSET = 1  # in the source; or the constant
    N_THERE = 2  # units in the source; rANS states carry the rest
    CARRIED_AT = 3  # offset of these carried units in the scratch memory
    RAW_BITS = 4
    RAW_MASK = 5
    RAW_AT = 6  # offset of the bit planes of raw bits in the payload


class PaletteField(IntEnum):
    """A stream of mode palette."""

    CODES_AT = 0  # offset of the bit planes of codes in the payload
    CODE_BITS = 1
    N_UNITS = 2
    PLANE_AT = 3  # offset of the plane in the scratch memory


class StreamField(IntEnum):
    """A stream of mode rANS."""

    WORDS_AT = 0  # offset in the payload
    N_WORDS = 1
    QUARTER = 2  # a quarter of the number of lanes
    N_UNITS = 3
    PLANE_AT = 4  # offset of the plane in the scratch memory
    CARRIED_AT = 5  # offset of the carried bytes there; -1 if nothing may be carried


class EscapedField(IntEnum):
    """A plane in the scratch memory that has markers instead of escapes."""

    PLANE_AT = 0  # offset in the scratch memory
    N_UNITS = 1
    MARKER = 2  # the byte that stands for an escape
    ESCAPES_AT = 3  # offset in the payload
    N_ESCAPES = 4
    RAW_BITS = 5


# An entry of an rANS table in a plan, u32: from the low bits up, the frequency; the rank of a slot
# minus the slot, modulo `PROB_SUM`; and the value.
ENTRY_RANK_SHIFT = PROB_BITS
ENTRY_VALUE_SHIFT = 2 * PROB_BITS


# Section 13: bounded codes.
BOUNDED_MAGIC = b"\x89PHB"
BOUNDED_VERSION = 1
# magic, version, dtype, rounding, form, n_segments, CRC, nbytes, reserved
BOUNDED_HEADER = struct.Struct("<4sBBBBIIQ8s")
BOUNDED_CRC_OFFSET = 12
# n, n_escapes, step, center, bound, bits, reserved, doublings, reserved
BOUNDED_ENTRY = struct.Struct("<IIdddBBH4s")
# magic, version, has_models, reserved, n_pieces, CRC, nbytes, nbytes and CRC of the models
CODED_HEADER = struct.Struct("<4sBB2sIIQII")
CODED_MAGIC = b"\x89PHC"
CODED_PIECE = 1 << 18  # elements of a segment whose codes are coded together
MAX_CODED_BITS = 8  # of codes that are coded: each is a byte of a stream
BOUNDED_ALIGNMENT = 64  # of the codes: a cache line, and the width of a row of lanes
BOUNDED_LANES = 16  # words of a row: as many as the widest vector register has
BOUNDED_BLOCK = 512  # elements: then each lane has 32 codes, which fill whole words
MAX_BOUNDED_BITS = 16
MAX_BOUNDED_LENGTH = (1 << 32) - 1  # elements of a segment
BOUNDED_SLOT_SHARE = 256  # the fixed form has a slot for one element in so many
BOUNDED_FREE_SLOTS = 16  # and so many slots more
BOUNDED_DTYPES = tuple(DTYPE_BY_NAME[name] for name in ("F16", "BF16", "F32", "F64"))


class Rounding(IntEnum):
    """How a bounded encoder chooses among the values that codes stand for."""

    NEAREST = 0
    STOCHASTIC = 1


class BoundedForm(IntEnum):
    """Whether the length of a message follows from the number and the bits of its elements."""

    PLAIN = 0
    FIXED = 1


class BoundedFault(IntEnum):
    """What is wrong with segments or a message of bounded codes (csrc/bounded/quantiser.hpp)."""

    NONE = 0
    LENGTH = 1
    BITS = 2
    BOUND = 3
    CENTER = 4
    TINY_BOUND = 5
    NOTHING_FITS = 6
    ESCAPES = 7
    SHORT = 16
    MAGIC = 17
    VERSION_ZERO = 18
    VERSION = 19
    OTHER_DTYPE = 20
    FIELD = 21
    TABLE = 22
    RESERVED = 23
    SIZE = 24
    CHECKSUM = 25
    ESCAPE_COUNT = 26
    STREAM = 27
