"""Pages of keys or of values of one layer, packed in memory of the host (docs/host.md).

A page holds some tokens of one sequence: (heads, tokens, size of a head). Each page lies in a slot,
and all slots have the same size, so memory for a number of tokens is known before they come. The
first pages decide how all are packed: rows of a dense table (docs/format.md, section 14), and room
for a fixed number of exceptions. A page with more exceptions is refused by its slot, and is kept
in the plain pool, which is small.

Pages never change, and several sequences may hold one page: that is why beams that share a
beginning share its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packhorse.arguments import resolve_threads
from packhorse.codecs.table_plan import list_ways
from packhorse.codecs.tables import TableArrays, TablePacker, gather_into
from packhorse.gpu.host_memory import HostMemory, host_memory
from packhorse.table_layout import TableFormat, TableMode

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLE_ELEMENTS", "PackedPages", "PageFormat", "PageRoom", "choose_page_format"]

_Words = NDArray[np.unsignedinteger[Any]]
_Numbers = NDArray[np.int64]

_ROW_COLUMNS = 1024  # of a packed row, about; longer ones are not decoded faster
SAMPLE_ELEMENTS = 1 << 15  # a packed row never has more
# A slot has room for half as many exceptions again as the sample has, for this share of all
# elements, and for some more, because later tokens are not like the first ones.
_TIMES_SAMPLE = 1.5
_SPARE_SHARE = 1 / 512
_SPARE_PLACES = 8
_MOST_MISSED = 0.01  # of the elements; more exceptions take longer to put back than they save
_MOST_SHARE = 0.92  # of the plain bytes: a slot that saves less is not worth the decoding
# Memory that is full grows by a sixteenth, so that little of it is unused; if it is small, by a
# quarter, but not by more than 8 pages. Each time, the slots are copied, and a GPU is told.
_GROWTH, _GROWTH_SMALL, _GROWTH_PAGES = 16, 4, 8


class PageFormat(NamedTuple):
    """How the pages of a store are packed.

    Attributes:
        rows: how the rows are packed; raw if slots would save too little.
        n_rows: rows of a page.
        n_exceptions: exceptions that a slot has room for.
    """

    rows: TableFormat
    n_rows: int
    n_exceptions: int

    @property
    def plain_nbytes(self) -> int:
        """Bytes of a plain page."""
        return self.n_rows * self.rows.row_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot: rows, then exceptions: their elements, and their places in the page."""
        each = self.rows.element_nbytes + self.place_type.itemsize
        return self.n_rows * self.rows.stride + self.n_exceptions * each

    @property
    def place_type(self) -> np.dtype[Any]:
        """Of the place of an exception in a page."""
        fits = self.n_rows * self.rows.n_columns <= 1 << 16
        return np.dtype(np.uint16 if fits else np.uint32)


class PageRoom(NamedTuple):
    """What a store has room for, without growing.

    Attributes:
        n_slots: free slots.
        n_plain: free places for pages that no slot takes.
    """

    n_slots: int
    n_plain: int


def choose_page_format(sample: _Words, dtype: str, shape: tuple[int, int, int]) -> PageFormat:
    """The format with the smallest slots.

    Args:
        sample: tokens and heads by chance, since heads and sequences differ: (any number, size of
            a head), `SAMPLE_ELEMENTS` elements or more, as unsigned integers.
        dtype: safetensors' name of their dtype.
        shape: of a page: heads, tokens, size of a head.
    """
    n_heads, n_tokens, head_dim = shape
    n_columns = head_dim * _tokens_of_row(n_tokens, head_dim)
    n_rows = n_heads * n_tokens * head_dim // n_columns
    n_sampled = sample.size // n_columns * n_columns
    rows = sample.reshape(-1)[:n_sampled].reshape(-1, n_columns)
    ways = [
        way for way in list_ways(rows, dtype) if way.format.mode in (TableMode.RAW, TableMode.DENSE)
    ]
    n_spare = _SPARE_PLACES + int(n_rows * n_columns * _SPARE_SHARE)
    formats = [PageFormat(ways[0].format, n_rows, 0)]
    for way in ways[1:]:
        mean = way.fast_nbytes / (2 + way.format.element_nbytes) * n_rows
        if mean > _MOST_MISSED * n_rows * n_columns:
            continue
        formats.append(PageFormat(way.format, n_rows, int(_TIMES_SAMPLE * mean) + n_spare))
    best = min(formats, key=lambda format: format.slot_nbytes)
    return best if best.slot_nbytes < _MOST_SHARE * best.plain_nbytes else formats[0]


def _tokens_of_row(n_tokens: int, head_dim: int) -> int:
    """Tokens of one head that a packed row holds: a divisor of the page's tokens."""
    fitting = [
        n for n in range(1, n_tokens + 1) if n_tokens % n == 0 and n * head_dim <= SAMPLE_ELEMENTS
    ]
    return min(fitting, key=lambda n: abs(n * head_dim - _ROW_COLUMNS))


def _enlarged(n: int, n_missing: int) -> int:
    """How many places there will be, of n that are too few."""
    return n + max(n_missing, n // _GROWTH, min(n // _GROWTH_SMALL, _GROWTH_PAGES))


class _Slots:
    """Slots of one format, in memory that may grow."""

    def __init__(self, format: PageFormat, device: torch.device | str | None) -> None:
        self.format, self._device = format, device
        self.n = 0
        self.rows: NDArray[np.uint8] = np.empty((0, format.rows.stride), np.uint8)
        self.elements: _Words = np.empty((0, format.n_exceptions), _word_type(format))
        self.places: _Words = np.empty((0, format.n_exceptions), format.place_type)
        self.counts: NDArray[np.int64] = np.empty(0, np.int64)
        self.memory: HostMemory | None = None

    def resize(self, n: int) -> None:
        """Has room for n slots from now on; what is there is copied."""
        format = self.format
        n_bytes = [
            n * format.n_rows * format.rows.stride,
            n * format.n_exceptions * format.rows.element_nbytes,
            n * format.n_exceptions * format.place_type.itemsize,
        ]
        memory = host_memory(max(sum(n_bytes), 1), device=self._device)
        starts = [0, *np.cumsum(n_bytes).tolist()]
        parts = [memory.numpy()[starts[i] : starts[i + 1]] for i in range(3)]
        rows = parts[0].reshape(n * format.n_rows, format.rows.stride)
        elements = parts[1].view(_word_type(format)).reshape(n, format.n_exceptions)
        places = parts[2].view(format.place_type).reshape(n, format.n_exceptions)
        rows[: len(self.rows)] = self.rows
        places[: self.n] = self.places
        elements[: self.n] = self.elements
        self.rows, self.places, self.elements, self.memory = rows, places, elements, memory
        self.counts = np.concatenate([self.counts, np.zeros(n - self.n, np.int64)])
        self.n = n


class _PlainPool:
    """Places for plain pages, in blocks of memory that stay where they are."""

    def __init__(self, page_nbytes: int, device: torch.device | str | None) -> None:
        self._page_nbytes, self._device = page_nbytes, device
        self._places: list[tuple[HostMemory, slice]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> tuple[HostMemory, slice]:
        """The memory of a place, and which of its bytes the place has."""
        return self._places[place]

    def resize(self, n: int) -> None:
        """Has n places from now on."""
        size, n_new = self._page_nbytes, n - len(self)
        memory = host_memory(max(n_new * size, 1), device=self._device)
        self._places += [(memory, slice(i * size, (i + 1) * size)) for i in range(n_new)]


def _word_type(format: PageFormat) -> np.dtype[Any]:
    return np.dtype(f"u{format.rows.element_nbytes}")


class PackedPages:
    """Pages of equal shape and dtype, in slots and in a plain pool.

    A page has a number: 0 and more for slots, negative for the plain pool.

    Args:
        format: how pages are packed.
        shape: of a page: heads, tokens, size of a head.
        room: how many pages there is memory for; None to let the memory grow.
        device: the GPU that will read the memory; "cpu" for none.
        threads: threads to use; None for one per core, at most 8.

    Raises:
        MemoryError: there is not so much memory.
    """

    def __init__(
        self,
        format: PageFormat,
        shape: tuple[int, int, int],
        *,
        room: PageRoom | None = None,
        device: torch.device | str | None = "cpu",
        threads: int | None = None,
    ) -> None:
        self.format, self.shape, self._threads = format, shape, resolve_threads(threads)
        self._grows = room is None
        self._slots = _Slots(format, device)
        self._plain = _PlainPool(format.plain_nbytes, device)
        self._free_slots: list[int] = []  # the next one last
        self._free_plain: list[int] = []
        self._holders: Counter[int] = Counter()
        if room is not None:
            self._slots.resize(room.n_slots)
            self._free_slots = list(range(room.n_slots))[::-1]
            self._plain.resize(room.n_plain)
            self._free_plain = list(range(room.n_plain))[::-1]

    @property
    def room(self) -> PageRoom:
        """Pages that still have memory, without growing."""
        return PageRoom(len(self._free_slots), len(self._free_plain))

    @property
    def n_slots(self) -> int:
        """Slots, free or not."""
        return self._slots.n

    @property
    def n_pages(self) -> int:
        """Pages that are held by someone."""
        return len(self._holders)

    @property
    def n_refused(self) -> int:
        """Pages of the plain pool that are held by someone."""
        return sum(number < 0 for number in self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, whether it is used or not."""
        format = self.format
        return self._slots.n * format.slot_nbytes + len(self._plain) * format.plain_nbytes

    @property
    def memory(self) -> HostMemory | None:
        """Where the slots lie; None before the first one."""
        return self._slots.memory

    def reserve(self, n: int) -> None:
        """Lets memory that may grow grow at once, for n slots more."""
        n_missing = n - len(self._free_slots)
        if self._grows and n_missing > 0:
            first = self._slots.n
            self._slots.resize(_enlarged(first, n_missing))
            self._free_slots[:0] = range(first, self._slots.n)[::-1]

    def add(self, pages: _Words) -> _Numbers:
        """Stores pages, each with one holder.

        Args:
            pages: (n, heads, tokens, size of a head), C-contiguous.

        Returns:
            Their numbers, int64 (n,).

        Raises:
            MemoryError: there is no memory left. Nothing was stored.
        """
        format = self.format
        plain = pages.reshape(len(pages) * format.n_rows, -1).view(np.uint8)
        packed = np.empty((len(plain), format.rows.stride), np.uint8)
        packer = TablePacker(format.rows, packed, threads=self._threads_for(plain.nbytes))
        packer.add(plain)
        arrays = packer.finish()
        places, counts = _places_of(packer.marked, arrays, format)
        fits = counts <= format.n_exceptions
        numbers = self._take(fits)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        elements = arrays.exception_elements.view(_word_type(format))
        by_page = packed.reshape(len(pages), format.n_rows, -1)
        slots = self._slots
        for i, number in enumerate(numbers.tolist()):
            if number < 0:
                self._plain_words(-1 - number)[...] = pages[i]
                continue
            part, n = slice(bounds[i], bounds[i + 1]), int(counts[i])
            slots.rows[number * format.n_rows : (number + 1) * format.n_rows] = by_page[i]
            slots.places[number, :n] = places[part]
            slots.elements[number, :n] = elements[part]
            slots.counts[number] = n
        return numbers

    def _take(self, fits: NDArray[np.bool_]) -> _Numbers:
        """Numbers for new pages; a page that fits goes to the plain pool if no slot is left."""
        n_slots = int(np.count_nonzero(fits))
        self.reserve(n_slots)
        if self._grows:
            self._grow_plain(len(fits) - n_slots)
        n_slots = min(n_slots, len(self._free_slots))
        n_plain = len(fits) - n_slots
        if n_plain > len(self._free_plain):
            raise MemoryError(
                f"{len(fits)} pages of {self.format.plain_nbytes} bytes do not fit: {n_slots} of"
                f" {self.room.n_slots} free slots take one, and {self.room.n_plain} places for"
                " plain pages are left; give the store more tokens, or end some sequences"
            )
        numbers = []
        for fit in fits.tolist():
            if fit and self._free_slots:
                numbers.append(self._free_slots.pop())
            else:
                numbers.append(-1 - self._free_plain.pop())
        self._holders.update(numbers)
        return np.array(numbers, np.int64)

    def _grow_plain(self, n_plain: int) -> None:
        n_missing = n_plain - len(self._free_plain)
        if n_missing > 0:
            first = len(self._plain)
            self._plain.resize(_enlarged(first, n_missing))
            self._free_plain[:0] = range(first, len(self._plain))[::-1]

    def _plain_words(self, place: int) -> _Words:
        memory, part = self._plain[place]
        words: _Words = memory.numpy()[part].view(_word_type(self.format)).reshape(self.shape)
        return words

    def share(self, numbers: Iterable[int]) -> None:
        """Counts one holder more of each page."""
        self._holders.update(numbers)

    def release(self, numbers: Iterable[int]) -> None:
        """Counts one holder less; the memory of a page without holders is free for others."""
        for number in numbers:
            self._holders[number] -= 1
            if self._holders[number]:
                continue
            del self._holders[number]
            if number >= 0:
                self._free_slots.append(number)
            else:
                self._free_plain.append(-1 - number)

    def read_into(self, numbers: _Numbers, dst: _Words) -> None:
        """Unpacks pages, bit for bit.

        Args:
            numbers: int64, (sequences, pages).
            dst: C-contiguous, (sequences, heads, tokens, size of a head), with room for more tokens
                than the pages have, a multiple of a page's. The tokens after the pages get any
                content.
        """
        ids = self.row_ids(numbers, dst.shape[2] // self.shape[1])
        format = self.format
        if ids is not None:
            rows = dst.reshape(len(ids), -1).view(np.uint8)
            none = np.zeros(-(-len(self._slots.rows) // 32), np.uint32)
            arrays = TableArrays(
                self._slots.rows,
                none,
                none,
                none[:1],
                np.empty(0, np.uint16),
                np.empty(0, np.uint8),
            )
            threads = self._threads_for(rows.nbytes)
            gather_into(arrays, format.rows, ids, rows, threads=threads)
            places, elements = self.exceptions(numbers, dst.shape)
            dst.reshape(-1)[places] = elements
        for sequence, page, place in self._plain_places(numbers):
            start = page * self.shape[1]
            dst[sequence, :, start : start + self.shape[1]] = self._plain_words(place)

    def row_ids(self, numbers: _Numbers, capacity: int) -> _Numbers | None:
        """The packed row of each row of a destination for `capacity` pages of each sequence: 0 for
        places that no slot fills. None if no slot fills any."""
        if not (numbers >= 0).any():
            return None
        n_heads, n = self.shape[0], self.format.n_rows
        firsts = np.zeros((len(numbers), capacity), np.int64)
        firsts[:, : numbers.shape[1]] = np.maximum(numbers, 0) * n
        rows = np.arange(n).reshape(1, n_heads, 1, n // n_heads)
        return np.ascontiguousarray((firsts[:, None, :, None] + rows).reshape(-1))

    def exceptions(self, numbers: _Numbers, shape: tuple[int, ...]) -> tuple[_Numbers, _Words]:
        """The places in a flat destination of a shape, and the elements that belong there."""
        n_heads, n_tokens, head_dim = self.shape
        sequence, page = np.nonzero(numbers >= 0)
        slots = numbers[sequence, page]
        counts: _Numbers = self._slots.counts[slots]
        held = np.arange(self.format.n_exceptions) < counts[:, None]
        places = self._slots.places[slots][held].astype(np.int64)
        head, rest = np.divmod(places, n_tokens * head_dim)
        first: _Numbers = (sequence * n_heads * shape[2] + page * n_tokens) * head_dim
        return (
            np.repeat(first, counts) + head * (shape[2] * head_dim) + rest,
            self._slots.elements[slots][held],
        )

    def plain_pages(self, numbers: _Numbers) -> list[tuple[int, int, HostMemory, slice]]:
        """The pages of the plain pool: sequence, place in it, memory, and bytes of the memory."""
        return [(i, j, *self._plain[place]) for i, j, place in self._plain_places(numbers)]

    @staticmethod
    def _plain_places(numbers: _Numbers) -> list[tuple[int, int, int]]:
        found = np.argwhere(numbers < 0).tolist()
        return [(i, j, -1 - int(numbers[i, j])) for i, j in found]

    def _threads_for(self, nbytes: int) -> int:
        """One for each piece that takes longer than to start a thread."""
        return max(1, min(self._threads, nbytes >> 18))


def _places_of(
    marked: NDArray[np.bool_], arrays: TableArrays, format: PageFormat
) -> tuple[_Words, _Numbers]:
    """The places of exceptions in their pages, page by page, and how many each page has."""
    rows = np.flatnonzero(marked)
    starts = arrays.exception_starts.astype(np.int64)
    of_rows = starts[1:] - starts[:-1]
    pages, inner = np.divmod(rows, format.n_rows)
    places = np.repeat(inner * format.rows.n_columns, of_rows) + arrays.exception_columns
    counts = np.bincount(pages, of_rows, len(marked) // format.n_rows).astype(np.int64)
    return places.astype(format.place_type), counts
