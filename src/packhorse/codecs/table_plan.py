"""Chooses how the rows of a table are packed, from a sample of them.

A GPU fetches memory of the host in sectors of 32 bytes, or in lines of 128 where the link prefers
them: the *granule*. What a row costs is the granules that a fetch touches, so this is what the
choice minimises, and never the ratio alone: a row that is 10 % shorter and touches as many granules
gains nothing, and then raw rows are chosen, because they need no decoding.

Exceptions stay in fast memory, so a way that needs more than `MAX_FAST_SHARE` of its packed rows
there is not chosen, unless that is less than `MAX_FAST_SHARE_OF_PLAIN` of the plain ones: rows that
shrink to a hundredth may have a few exceptions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from packhorse.codecs.tables import TablePacker
from packhorse.table_layout import (
    LIST_END,
    TABLE_STRIDE_ALIGNMENT,
    TRIPLE_CODE_BITS,
    TRIPLE_CODES,
    TableFormat,
    TableMode,
)

__all__ = [
    "GRANULES",
    "MAX_FAST_SHARE",
    "MAX_FAST_SHARE_OF_PLAIN",
    "MAX_MARKED_SHARE",
    "TableWay",
    "choose_way",
    "count_exceptions",
    "list_ways",
    "packed_nbytes",
    "sample_places",
    "way_of_packed",
]

GRANULES = (32, 128)
_SAMPLE_NBYTES = 8 << 20  # of plain rows, enough for a choice
_SAMPLED_RUNS = 64  # of neighbouring rows in a sample
_BLOCK_NBYTES = 4 << 20  # of packed rows that are made to count their exceptions
MAX_FAST_SHARE = 0.02  # of the packed rows, that exceptions may take in fast memory
MAX_FAST_SHARE_OF_PLAIN = 0.005
MAX_MARKED_SHARE = 0.1  # of rows that may have exceptions, where rows will change
_FLOAT_FIELDS = {  # bits of exponent and mantissa
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F64": (11, 52),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F8_E4M3FNUZ": (4, 3),
    "F8_E5M2FNUZ": (5, 2),
}
# Numbers of codes, their bits, and whether they are in triples. Wider codes of exponents take as
# much as they save.
_CODES = (
    *((1 << bits, bits, False) for bits in range(4)),
    (TRIPLE_CODES, TRIPLE_CODE_BITS, True),
    *((1 << bits, bits, False) for bits in (4, 5)),
)
_INDICES = (*_CODES[1:], *((1 << bits, bits, False) for bits in (6, 7, 8)))  # of whole elements
_MIN_USES = 16  # of a value, in the sample, on average
_MARK_BITS = 2  # of a row's mark and rank
_Words = NDArray[np.unsignedinteger]


def sample_places(n_rows: int, row_nbytes: int) -> list[tuple[int, int]]:
    """Where the rows lie that decide how a table is packed: runs, evenly spread, of 8 MiB at most.

    Args:
        n_rows: rows of the table.
        row_nbytes: bytes of a plain row.

    Returns:
        The first row of each run, and the one after its last.
    """
    n = min(n_rows, max(1, _SAMPLE_NBYTES // row_nbytes))
    if n == n_rows:
        return [(0, n_rows)]
    n_runs = min(_SAMPLED_RUNS, n)
    length = n // n_runs
    step = (n_rows - length) / max(n_runs - 1, 1)
    return [(int(i * step), int(i * step) + length) for i in range(n_runs)]


def count_exceptions(
    rows: NDArray[np.uint8], format: TableFormat, *, threads: int = 1
) -> tuple[int, int]:
    """Rows of a table that would have exceptions, and the number of these.

    Args:
        rows: uint8, (any number, bytes of a plain row), C-contiguous.
        format: how the table would be packed.
        threads: how many threads of the core work on it.

    Raises:
        TypeError, ValueError: as for `TablePacker`.
    """
    n_marked = n_exceptions = 0
    if format.mode is TableMode.RAW:
        return n_marked, n_exceptions
    step = max(1, _BLOCK_NBYTES // format.stride)
    memory = np.empty((min(step, len(rows)), format.stride), np.uint8)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        packer = TablePacker(format, memory[: len(block)], threads=threads)
        packer.add(block)
        n_marked += int(packer.marked.sum())
        n_exceptions += packer.finish().exception_columns.size
    return n_marked, n_exceptions


def packed_nbytes(n_rows: int, n_marked: int, n_exceptions: int, format: TableFormat) -> int:
    """Bytes of all arrays of a packed table (docs/format.md, section 14).

    Args:
        n_rows: rows of the table.
        n_marked: rows with exceptions.
        n_exceptions: exceptions of all rows.
        format: how it is packed.
    """
    marks_and_ranks = 2 * 4 * -(-n_rows // 32)
    exceptions = 4 * (n_marked + 1) + (2 + format.element_nbytes) * n_exceptions
    return n_rows * format.stride + marks_and_ranks + exceptions


@dataclass(frozen=True, slots=True)
class TableWay:
    """A way to pack a table, and what it takes.

    Attributes:
        format: how rows are packed.
        words: what that is, in words.
        pulled: bytes that a fetch of a row touches, on average, by granule.
        fast_nbytes: bytes of a row's exceptions in fast memory, on average.
        marked_share: share of the rows that have exceptions.
    """

    format: TableFormat
    words: str
    pulled: dict[int, float]
    fast_nbytes: float
    marked_share: float

    @property
    def is_allowed(self) -> bool:
        """Whether its exceptions fit in fast memory."""
        packed, plain = self.format.stride, self.format.row_nbytes
        return self.fast_nbytes <= max(MAX_FAST_SHARE * packed, MAX_FAST_SHARE_OF_PLAIN * plain)


def choose_way(
    sample: _Words, dtype: str, granule: int = GRANULES[0], *, will_change: bool = False
) -> TableWay:
    """The way that touches the fewest granules.

    Args:
        sample: rows of the table, (any number, n_columns), as unsigned integers of its elements.
        dtype: safetensors' name of the dtype.
        granule: bytes that a fetch takes at once, 32 or 128.
        will_change: whether rows will be replaced. A row with exceptions is not replaced in place,
            so then few rows may have any.

    Raises:
        ValueError: there is no such granule.
    """
    if granule not in GRANULES:
        raise ValueError(f"granule is {granule!r}; it must be one of {GRANULES}")
    most = MAX_MARKED_SHARE if will_change else 1.0
    ways = [way for way in list_ways(sample, dtype) if way.is_allowed and way.marked_share <= most]

    def cost(way: TableWay) -> tuple[float, int, float]:
        is_coded = way.format.mode is not TableMode.RAW
        return (way.pulled[granule], is_coded, way.format.stride + way.fast_nbytes)

    return min(ways, key=cost)


def list_ways(sample: _Words, dtype: str) -> list[TableWay]:
    """All ways that are worth a thought for a table, raw rows first.

    Args:
        sample: as for `choose_way`.
        dtype: as for `choose_way`.
    """
    bits, n = 8 * sample.dtype.itemsize, sample.shape[1]
    ways = [_measure_dense(TableFormat(TableMode.RAW, bits, n, (0,), bits), dtype, 0.0)]
    if sample.size == 0:
        return ways
    found, counts = np.unique(sample, return_counts=True)
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    elements = found[order]
    shares = counts[order] / sample.size
    ways += _coded_ways(elements, shares, dtype, n)
    ways += _index_ways(elements, shares, dtype, n)
    ways += _sparse_ways(sample, elements, dtype)
    # A value that few elements have would be of the sample, not of the table.
    return ways[:1] + [
        way for way in ways[1:] if _MIN_USES * len(set(way.format.values)) <= sample.size
    ]


def way_of_packed(
    rows: NDArray[np.uint8],
    format: TableFormat,
    dtype: str,
    fast_nbytes: float,
    marked_share: float,
) -> TableWay:
    """The way of a table that is packed already.

    Args:
        rows: some of its rows: uint8, (any number, stride).
        format: its format.
        dtype: safetensors' name of the dtype.
        fast_nbytes: as in `TableWay`.
        marked_share: as in `TableWay`.
    """
    pulled = _pulled_dense(format)
    if format.is_sparse and len(rows):
        pulled = _pulled_sparse(format, _count_stored(rows, format))
    return TableWay(format, _words_of(format, dtype), pulled, fast_nbytes, marked_share)


def _count_stored(rows: NDArray[np.uint8], format: TableFormat) -> NDArray[np.int64]:
    """How many elements sparse rows store."""
    content = rows[:, : format.content_nbytes]
    if format.mode is TableMode.BITMAP:
        first = format.element_nbytes if format.has_row_value else 0
        bits = np.unpackbits(content[:, first : format.first_nbytes], 1)
        held: NDArray[np.int64] = bits.sum(1, dtype=np.int64)
        return np.minimum(held, format.capacity)
    entries = content[:, format.first_nbytes :].reshape(len(rows), -1, format.entry_nbytes)
    columns = np.ascontiguousarray(entries[:, :, :2]).view("<u2")[:, :, 0]
    counts: NDArray[np.int64] = np.cumprod(columns < format.n_columns, 1).sum(1, dtype=np.int64)
    return counts


def _words_of(format: TableFormat, dtype: str) -> str:
    """What a format is, in words."""
    if format.mode is TableMode.RAW:
        return "raw"
    if format.is_sparse:
        name = "bitmap" if format.mode is TableMode.BITMAP else "list"
        return f"{name} of columns and {_stored_words(format)}"
    if format.rest_bits == 0:
        if format.has_triples:
            return "three indices in 10 bits"
        return f"indices of {format.code_bits} bits"
    words = f"{format.shift} low bits dropped, " if format.shift else ""
    words += "exponents" if dtype in _FLOAT_FIELDS else f"{format.rest_bits} bits as they are"
    if format.has_triples:
        return f"{words}, three codes in 10 bits"
    return f"{words}, codes of {format.code_bits} bits" if format.code_bits else words


def _stored_words(format: TableFormat) -> str:
    if format.packed_bits == 0:
        return f"one element for {'each row' if format.has_row_value else 'the table'}"
    return "indices of 8 bits" if format.code_bits else "elements"


def _pulled_dense(format: TableFormat) -> dict[int, float]:
    return {
        granule: _mean_touched(format.stride, format.content_nbytes, granule)
        for granule in GRANULES
    }


def _measure_dense(format: TableFormat, dtype: str, missed: float) -> TableWay:
    """A way without sparse rows; `missed` is the share of elements that are exceptions."""
    n_exceptions = missed * format.n_columns  # of a row
    marked_share = -math.expm1(-n_exceptions)  # if exceptions are spread by chance
    fast_nbytes = n_exceptions * (2 + format.element_nbytes) + 4 * marked_share
    fast_nbytes += _MARK_BITS / 8 if n_exceptions else 0.0
    words = _words_of(format, dtype)
    return TableWay(format, words, _pulled_dense(format), fast_nbytes, marked_share)


def _mean_touched(stride: int, nbytes: int, granule: int) -> float:
    """Bytes of the granules that `nbytes` from the start of a row touch, mean of all rows."""
    starts = [row * stride % granule for row in range(granule // TABLE_STRIDE_ALIGNMENT)]
    touched = [-(-(start + nbytes) // granule) for start in starts]
    return granule * sum(touched) / len(touched)


# Codes for the high bits of elements.


def _coded_ways(
    elements: _Words, shares: NDArray[np.float64], dtype: str, n_columns: int
) -> Iterator[TableWay]:
    """Ways that drop constant bits, and give the bits above a rest a code."""
    bits = 8 * elements.dtype.itemsize
    used = int(np.bitwise_or.reduce(elements))
    shift = (used & -used).bit_length() - 1 if used else 0
    for rest_bits, has_sign in _rests(dtype, bits, shift, elements):
        base = TableFormat(
            *(TableMode.DENSE, bits, n_columns, (0,), rest_bits, shift, has_sign),
        )
        outside = ~elements.dtype.type(base.rest_mask)
        values, places = np.unique(elements & outside, return_inverse=True)
        of_values = np.bincount(places.reshape(-1), weights=shares)
        order = np.argsort(-of_values, kind="stable")
        for n_codes, code_bits, has_triples in _CODES:
            packed_bits = rest_bits + (10 / 3 if has_triples else code_bits)
            if not 1 <= packed_bits < bits or (has_triples and rest_bits % 8 > 4):
                continue
            kept = order[:n_codes]
            format = replace(
                base, values=_values(values[kept], code_bits), has_triples=has_triples, stride=0
            )
            missed = max(0.0, 1.0 - float(of_values[kept].sum()))
            yield _measure_dense(format, dtype, missed)
            if len(values) <= n_codes:
                break


def _rests(dtype: str, bits: int, shift: int, elements: _Words) -> Iterator[tuple[int, bool]]:
    """Bits of the rest, and whether it has a sign."""
    fields = _FLOAT_FIELDS.get(dtype)
    if fields is not None:
        signs = elements >> elements.dtype.type(bits - 1)
        has_sign = bool((signs != signs[0]).any())
        mantissa_bits = max(fields[1] - shift, 0)
        yield mantissa_bits + has_sign, has_sign
        return
    highest = int(elements.max()).bit_length()
    for rest_bits in range(max(highest - shift - 12, 1), bits - shift + 1):
        yield rest_bits, False


def _values(values: _Words, code_bits: int) -> tuple[int, ...]:
    """The values in ascending order, and the first one again for codes that are left over."""
    ascending = sorted(int(value) for value in values)
    return tuple(ascending + ascending[:1] * ((1 << code_bits) - len(ascending)))


def _index_ways(
    elements: _Words, shares: NDArray[np.float64], dtype: str, n_columns: int
) -> Iterator[TableWay]:
    """Ways in which a code stands for a whole element."""
    bits = 8 * elements.dtype.itemsize
    for n_codes, code_bits, has_triples in _INDICES:
        if code_bits >= bits:
            return
        kept = elements[:n_codes]
        format = TableFormat(
            *(TableMode.DENSE, bits, n_columns, _values(kept, code_bits)), has_triples=has_triples
        )
        missed = max(0.0, 1.0 - float(shares[: len(kept)].sum()))
        yield _measure_dense(format, dtype, missed)
        if len(elements) <= len(kept):
            return


# Sparse rows.


def _sparse_ways(sample: _Words, elements: _Words, dtype: str) -> Iterator[TableWay]:
    """Ways that store only what differs from the most frequent element."""
    bits, n = 8 * sample.dtype.itemsize, sample.shape[1]
    differs = sample != elements[0]
    counts = differs.sum(1)
    if counts.mean() > n / 1.5:
        return
    base = TableFormat(TableMode.BITMAP, bits, n, capacity=1, background=int(elements[0]))
    for held, values, rest_bits, has_row_value in _stored(sample, differs, elements, bits):
        for mode in (TableMode.BITMAP, TableMode.LIST):
            if mode is TableMode.LIST and n > LIST_END:
                continue
            format = replace(
                base, mode=mode, values=values, rest_bits=rest_bits, has_row_value=has_row_value
            )
            for capacity in _capacities(format, held):
                sized = replace(format, capacity=capacity, stride=0)
                yield _measure_sparse(sized, dtype, counts, held)


def _stored(
    sample: _Words, differs: NDArray[np.bool_], elements: _Words, bits: int
) -> Iterator[tuple[NDArray[np.int64], tuple[int, ...], int, bool]]:
    """Kinds of stored elements: how many of each row a kind can hold, its values, bits of the rest,
    and whether there is a row value."""
    others = elements[1:]
    if len(others) <= 1:
        value = int(others[0]) if len(others) else 0
        yield differs.sum(1), (value,), 0, False
        return
    first = np.take_along_axis(sample, differs.argmax(1)[:, None], 1)
    yield (differs & (sample == first)).sum(1), (0,), 0, True
    if bits > 8:
        kept = others[:256]
        held = differs if len(others) <= 256 else differs & np.isin(sample, kept)
        yield held.sum(1), _values(kept, 8), 0, False
    yield differs.sum(1), (0,), bits, False


def _capacities(format: TableFormat, held: NDArray[np.int64]) -> Iterator[int]:
    """Capacities that fill a stride: for all rows, and for all but the longest ones."""
    seen = set()
    for share in (1.0, 0.9999, 0.999, 0.99, 0.95, 0.9):
        wanted = max(int(np.quantile(held, share, method="higher")), 1)
        stride = replace(format, capacity=wanted, stride=0).stride
        room = stride - format.first_nbytes
        capacity = format.n_columns if format.entry_nbytes == 0 else room // format.entry_nbytes
        capacity = min(max(capacity, 1), format.n_columns)
        if capacity not in seen:
            seen.add(capacity)
            yield capacity


def _measure_sparse(
    format: TableFormat, dtype: str, counts: NDArray[np.int64], held: NDArray[np.int64]
) -> TableWay:
    """A way with sparse rows."""
    stored = np.minimum(held, format.capacity)
    left = counts - stored
    each = 2 + format.element_nbytes
    marked_share = float((left > 0).mean())
    fast = float(left.mean()) * each + 4 * marked_share + (_MARK_BITS / 8 if left.any() else 0.0)
    words = _words_of(format, dtype)
    return TableWay(format, words, _pulled_sparse(format, stored), fast, marked_share)


def _pulled_sparse(format: TableFormat, stored: NDArray[np.int64]) -> dict[int, float]:
    """Bytes that fetches of sparse rows touch, from the number of elements that each stores. A
    reader of a bitmap knows where the row ends, a reader of a list must see its end."""
    nbytes = format.first_nbytes + stored * format.entry_nbytes
    if format.mode is TableMode.LIST:
        nbytes = nbytes + 2 * (stored < format.capacity)
    pulled = {}
    for granule in GRANULES:
        starts = [row * format.stride % granule for row in range(granule // TABLE_STRIDE_ALIGNMENT)]
        touched = [float(np.ceil((start + nbytes) / granule).mean()) for start in starts]
        pulled[granule] = granule * sum(touched) / len(touched)
    return pulled
