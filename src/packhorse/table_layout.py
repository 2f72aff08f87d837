"""Where the bits of packed tables lie (docs/format.md, section 14): the constants of that section,
and the lengths that follow from a header's fields."""

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "LIST_END",
    "MAX_TABLE_COLUMNS",
    "MAX_TABLE_EXCEPTIONS",
    "MAX_TABLE_ROWS",
    "NARROW_PLANES",
    "TABLE_BLOCK_NBYTES",
    "TABLE_CRC_OFFSET",
    "TABLE_HEADER",
    "TABLE_MAGIC",
    "TABLE_STRIDE_ALIGNMENT",
    "TABLE_VERSION",
    "TRIPLE_CODES",
    "TRIPLE_CODE_BITS",
    "TableFlag",
    "TableFormat",
    "TableMode",
]

TABLE_MAGIC = b"\x89PHT"
TABLE_VERSION = 1
# Magic, version, dtype code, mode, flags, code_bits, rest_bits, shift, reserved, n_columns, n_rows,
# stride, capacity, background, n_marked, n_exceptions, reserved, CRC.
TABLE_HEADER = struct.Struct("<4s8BIQIIQQQII")
TABLE_CRC_OFFSET = 60
# A GPU fetches memory of the host in sectors of 32 bytes, so a row never shares one.
TABLE_STRIDE_ALIGNMENT = 32
TABLE_BLOCK_NBYTES = 1 << 20  # rows with one checksum
MAX_TABLE_COLUMNS = 1 << 16  # a column fits 16 bits
MAX_TABLE_ROWS = 1 << 48
MAX_TABLE_EXCEPTIONS = (1 << 32) - 1
LIST_END = 0xFFFF  # the column that ends a list row
NARROW_PLANES = (4, 2, 1)  # bits of the planes for the bits above whole bytes
TRIPLE_CODES = 10  # 10 * 10 * 10 codes fit in 10 bits
TRIPLE_CODE_BITS = 4  # of such a code, once it is read


class TableMode(IntEnum):
    """What a row holds."""

    RAW = 0
    DENSE = 1
    BITMAP = 2
    LIST = 3


class TableFlag(IntEnum):
    """Bits of the flags."""

    SIGN = 1
    ROW_VALUE = 2
    TRIPLES = 4


@dataclass(frozen=True, slots=True)
class TableFormat:
    """How the rows of a table are packed: the fields of its header that all rows share.

    Attributes:
        mode: what a row holds.
        element_bits: bits of an element: 8, 16, 32 or 64.
        n_columns: elements of a row.
        values: the elements that codes stand for, 2^code_bits of them.
        rest_bits: bits of an element that are stored as they are.
        shift: the place of the lowest of them.
        has_sign: whether the highest of them is the element's highest bit.
        capacity: stored elements of a sparse row, at most.
        background: the element that a sparse row does not store.
        has_row_value: whether all stored elements of a sparse row are equal.
        has_triples: whether the codes of three columns are one number.
        stride: bytes of a row; 0 here means the least that the content needs.
    """

    mode: TableMode
    element_bits: int
    n_columns: int
    values: tuple[int, ...] = (0,)
    rest_bits: int = 0
    shift: int = 0
    has_sign: bool = False
    capacity: int = 0
    background: int = 0
    has_row_value: bool = False
    has_triples: bool = False
    stride: int = 0

    def __post_init__(self) -> None:
        if self.stride == 0:
            units = -(-self.content_nbytes // TABLE_STRIDE_ALIGNMENT)
            object.__setattr__(self, "stride", units * TABLE_STRIDE_ALIGNMENT)

    @property
    def element_nbytes(self) -> int:
        """Bytes of an element."""
        return self.element_bits // 8

    @property
    def row_nbytes(self) -> int:
        """Bytes of a plain row."""
        return self.n_columns * self.element_nbytes

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return len(self.values).bit_length() - 1

    @property
    def packed_bits(self) -> int:
        """Bits of a packed element."""
        return self.code_bits + self.rest_bits

    @property
    def plane_bits(self) -> int:
        """Bits of a packed element that are in the planes of a dense row: without its code, if
        triples have it."""
        return self.rest_bits if self.has_triples else self.packed_bits

    @property
    def n_triples(self) -> int:
        """Numbers with the codes of three columns."""
        return -(-self.n_columns // 3) if self.has_triples else 0

    @property
    def is_sparse(self) -> bool:
        """Whether rows store only what differs from the background."""
        return self.mode in (TableMode.BITMAP, TableMode.LIST)

    @property
    def narrow_planes(self) -> tuple[int, ...]:
        """Bits of the narrow planes of a dense row, in their order."""
        return tuple(bits for bits in NARROW_PLANES if self.plane_bits % 8 & bits)

    @property
    def rest_mask(self) -> int:
        """The bits of an element that a rest may have."""
        moved = max(self.rest_bits - self.has_sign, 0)
        return ((1 << moved) - 1) << self.shift | self.has_sign << self.element_bits - 1

    def narrow_nbytes(self, bits: int) -> int:
        """Bytes of a narrow plane."""
        return _narrow_nbytes(bits, self.n_columns)

    @property
    def triples_nbytes(self) -> int:
        """Bytes of the triples of a dense row."""
        return self.n_triples + _narrow_nbytes(2, self.n_triples)

    @property
    def first_nbytes(self) -> int:
        """Bytes of a sparse row before its first entry or packed element: the row value and the
        bitmap."""
        nbytes = self.element_nbytes if self.has_row_value else 0
        if self.mode is TableMode.BITMAP:
            nbytes += 8 * -(-self.n_columns // 64)
        return nbytes

    @property
    def entry_nbytes(self) -> int:
        """Bytes of a stored element of a sparse row, with its column if rows are lists."""
        return self.packed_bits // 8 + (2 if self.mode is TableMode.LIST else 0)

    @property
    def content_nbytes(self) -> int:
        """Bytes of a row without those that only fill the stride."""
        if self.mode is TableMode.RAW:
            return self.row_nbytes
        if self.is_sparse:
            return self.first_nbytes + self.capacity * self.entry_nbytes
        narrow = sum(self.narrow_nbytes(bits) for bits in self.narrow_planes)
        return self.n_columns * (self.plane_bits // 8) + narrow + self.triples_nbytes

    @property
    def block_rows(self) -> int:
        """Rows that share a checksum."""
        return max(1, TABLE_BLOCK_NBYTES // self.stride)


def _narrow_nbytes(bits: int, n_columns: int) -> int:
    return bits * -(-n_columns // 8)
