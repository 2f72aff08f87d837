"""`KVStore`: keys and values of one layer, packed in memory of the host as tokens come.

Only new tokens go down, and once: the newest ones stay plain where the model computes until they
fill a page; then the page is packed, and never moves again. `read` unpacks all pages to working
memory, which the stores of all layers share.

Sequences are reordered, repeated and dropped by changing who holds which page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packhorse.host.kv_pages import SAMPLE_ELEMENTS, PackedPages, PageRoom, choose_page_format
from packhorse.late_import import import_late
from packhorse.torch_dtypes import NAMES

if TYPE_CHECKING:
    from packhorse.host.kv_device import DevicePages

__all__ = ["KVStore", "StoreSize", "WorkingMemory"]

_Words = NDArray[np.unsignedinteger[Any]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_SHARE = 16  # of the slots: so many more places are for pages that no slot takes
_SPARE = 8  # working memory is allocated larger by this part, since sequences grow
_ALIGNMENT = 64  # bytes
_PIECE_ELEMENTS = 1 << 20  # are packed at once, so that they stay in the cache


class StoreSize(NamedTuple):
    """What a store takes, in bytes and pages; a page is one of keys or of values.

    Attributes:
        plain_nbytes: of all tokens, if they were plain and nothing were shared.
        host_nbytes: of memory of the host, whether used or not.
        tail_nbytes: of the newest tokens, which are plain.
        n_pages: pages that are held.
        n_refused: those of them that are plain, because no slot takes them.
    """

    plain_nbytes: int = 0
    host_nbytes: int = 0
    tail_nbytes: int = 0
    n_pages: int = 0
    n_refused: int = 0


class WorkingMemory:
    """Buffers that the layers of a cache use in turn.

    What was returned for a layer is overwritten when as many other layers are read.

    Attributes:
        n_buffers: two if one layer is unpacked while another computes, otherwise one.
        n_taken: how often a buffer was taken.
    """

    def __init__(self, n_buffers: int = 1) -> None:
        self._buffers: list[Tensor] = []  # the next one first
        self.n_buffers, self.n_taken = n_buffers, 0

    def __deepcopy__(self, memo: object) -> WorkingMemory:
        return WorkingMemory(self.n_buffers)  # the content of working memory is nobody's

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """The buffer whose turn it is: uint8, (nbytes,), of any content."""
        held = self._buffers.pop(0) if len(self._buffers) == self.n_buffers else None
        if held is None or held.nbytes < nbytes or held.device != device:
            held = None  # before the larger one is there
            with torch.inference_mode(False):  # or it could not be written to outside of that mode
                held = torch.empty(nbytes + nbytes // _SPARE, dtype=torch.uint8, device=device)
        if held.is_cuda:  # two streams write to it in turns
            held.record_stream(torch.cuda.current_stream(device))
        self._buffers.append(held)
        self.n_taken += 1
        return held[:nbytes]

    def holds(self, turn: int) -> bool:
        """Whether what was written at a turn is still there: at the time when `n_taken` was so."""
        return self.n_taken - turn < len(self._buffers)


class KVStore:
    """Keys and values of one layer, for sequences of equal length.

    Args:
        page_tokens: tokens of a page.
        room_tokens: tokens of all sequences together that memory is allocated for when the first
            page is full. Beyond them `append` fails. None lets the memory grow with the tokens.
        threads: threads that pack and unpack; None for one per core, at most 8.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> import torch
        >>> from packhorse.host.kv import KVStore, WorkingMemory
        >>> store = KVStore(page_tokens=16)
        >>> store.append(torch.randn(2, 4, 40, 64), torch.randn(2, 4, 40, 64))
        >>> keys, values = store.read(WorkingMemory())
        >>> keys.shape
        torch.Size([2, 4, 40, 64])
    """

    def __init__(
        self,
        *,
        page_tokens: int = 64,
        room_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        for name, number in (("page_tokens", page_tokens), ("room_tokens", room_tokens)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        self.page_tokens = page_tokens
        self._room: PageRoom | None = None
        if room_tokens is not None:
            n_slots = -(-room_tokens // page_tokens)
            self._room = PageRoom(n_slots, -(-n_slots // _PLAIN_SHARE))
        self._threads = threads
        self._sides: list[_States] = []  # keys and values, from the first token on

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence."""
        return self._sides[0].n_tokens if self._sides else 0

    @property
    def n_sequences(self) -> int:
        """Sequences; 0 before the first token."""
        return len(self._sides[0].tail) if self._sides else 0

    @property
    def room(self) -> PageRoom | None:
        """The least room that keys or values have, without growing; None before the first page is
        full."""
        rooms = [side.pages.room for side in self._sides if side.pages is not None]
        return PageRoom(*map(min, zip(*rooms, strict=True))) if rooms else None

    @property
    def size(self) -> StoreSize:
        """What the store takes."""
        sizes = [side.size for side in self._sides]
        return StoreSize(*map(sum, zip(*sizes, strict=True))) if sizes else StoreSize()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds tokens to each sequence; they are only read.

        Args:
            keys: (sequences, heads, new tokens, size of a head), of elements of 8, 16, 32 or 64
                bits, on any device.
            values: the same; the size of a head may be another.

        Raises:
            MemoryError: there is no room for a page. The store is as it was.
            TypeError, ValueError: the tensors do not fit those before, or each other.
        """
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "keys and values must be (sequences, heads, tokens, size of a head), with equal"
                f" sequences, heads and tokens; they are {tuple(keys.shape)} and"
                f" {tuple(values.shape)}"
            )
        for states in (keys, values):
            if states.dtype not in NAMES or states.itemsize not in _WORDS:
                raise TypeError(f"keys and values must not be {states.dtype}")
        keys, values = keys.detach(), values.detach()
        sides = self._sides or [
            _States(states, self.page_tokens, self._room, self._threads)
            for states in (keys, values)
        ]
        for side, states in zip(sides, (keys, values), strict=True):
            side.check(states)
        n_before = self.n_tokens
        sides[0].append(keys)
        try:
            sides[1].append(values)
        except BaseException:  # also Ctrl-C, and a GPU without memory
            sides[0].crop(sides[0].n_tokens - n_before)
            raise
        self._sides = sides

    def read(self, memory: WorkingMemory, n_more: int = 0) -> tuple[Tensor, Tensor]:
        """All keys and values, bit for bit, where the model computes.

        Args:
            memory: where they are unpacked to.
            n_more: tokens for which space is left at the end; it has any content.

        Returns:
            Keys and values, (sequences, heads, tokens + n_more, size of a head). They are views of
            `memory`, which others overwrite.

        Raises:
            ValueError: the store is empty.
        """
        if self.n_tokens == 0:
            raise ValueError("the store has no tokens; append some first")
        shapes = [side.shape_for(n_more) for side in self._sides]
        dtypes = [side.tail.dtype for side in self._sides]
        nbytes = [
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        first = -(-nbytes[0] // _ALIGNMENT) * _ALIGNMENT
        buffer = memory.take(first + nbytes[1], self._sides[0].tail.device)
        parts = buffer[: nbytes[0]], buffer[first:]
        outs = [
            part.view(dtype).view(shape)
            for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)
        ]
        for side, out in zip(self._sides, outs, strict=True):
            side.read_into(out)
        n = self.n_tokens + n_more
        return outs[0][:, :, :n], outs[1][:, :, :n]

    def select(self, sequences: Tensor, on_host: Tensor | None = None) -> None:
        """Keeps the sequences with these numbers, in this order, each as often as it is named.

        Args:
            sequences: integers, (n,), on any device.
            on_host: the same in memory of the host; None to fetch them, which waits for the device.

        Raises:
            IndexError: there is no such sequence. The store is as it was.
        """
        if self.n_tokens:
            on_host = sequences.cpu() if on_host is None else on_host
            sequences = sequences.to(self._sides[0].tail.device)
            for side in self._sides:
                side.select(sequences, on_host.numpy())

    def crop(self, n: int) -> None:
        """Forgets the last n tokens of each sequence.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 <= n <= self.n_tokens:
            raise ValueError(f"{n} tokens cannot be removed: there are {self.n_tokens}")
        for side in self._sides:
            side.crop(n)


class _States:
    """Keys or values: which page holds which tokens, and the tail.

    Attributes:
        pages: the packed pages; None before the first one is full.
        tail: the newest tokens, (sequences, heads, less than a page, size of a head).
    """

    def __init__(
        self, first: Tensor, page_tokens: int, room: PageRoom | None, threads: int | None
    ) -> None:
        self._page_tokens, self._room, self._threads = page_tokens, room, threads
        self.pages: PackedPages | None = None
        self._device_pages: DevicePages | None = None
        self.tail = first[:, :, :0]
        self._numbers = np.empty((len(first), 0), np.int64)

    def __deepcopy__(self, memo: object) -> _States:
        # Pages never change, so a copy holds the same ones.
        copied = _States(self.tail, self._page_tokens, self._room, self._threads)
        copied.pages, copied.tail = self.pages, self.tail.clone()
        copied._numbers = self._numbers
        copied._hold()
        return copied

    def __del__(self) -> None:
        self._release(self._numbers)

    def _hold(self) -> None:
        if self.pages is not None:
            self.pages.share(self._numbers.reshape(-1).tolist())

    def _release(self, numbers: NDArray[np.int64]) -> None:
        if self.pages is not None:
            self.pages.release(numbers.reshape(-1).tolist())

    @property
    def n_paged(self) -> int:
        """Tokens in pages."""
        return self._numbers.shape[1] * self._page_tokens

    @property
    def n_tokens(self) -> int:
        return self.n_paged + self.tail.shape[2]

    @property
    def size(self) -> StoreSize:
        n, heads, _, head_dim = self.tail.shape
        plain = n * heads * self.n_tokens * head_dim * self.tail.itemsize
        if self.pages is None:
            return StoreSize(plain, 0, self.tail.nbytes)
        pages = self.pages
        return StoreSize(plain, pages.nbytes, self.tail.nbytes, pages.n_pages, pages.n_refused)

    def check(self, states: Tensor) -> None:
        """Refuses states that do not fit those before.

        Raises:
            TypeError, ValueError: they do not.
        """
        if (states.dtype, states.device) != (self.tail.dtype, self.tail.device):
            raise TypeError(
                f"the new tokens are {states.dtype} on {states.device}; those before are"
                f" {self.tail.dtype} on {self.tail.device}"
            )
        n, heads, _, head_dim = self.tail.shape
        if states.shape != (n, heads, states.shape[2], head_dim):
            raise ValueError(
                f"the new tokens have shape {tuple(states.shape)}; those before have"
                f" {(n, heads, self.n_tokens, head_dim)}"
            )

    def append(self, states: Tensor) -> None:
        size = self._page_tokens
        n_missing = min(size - self.tail.shape[2], states.shape[2])
        if self.tail.shape[2]:
            # Only the page that the tail begins is joined; a long prompt is not copied for it.
            begun = torch.cat([self.tail, states[:, :, :n_missing]], 2)
            states = states[:, :, n_missing:]
        else:
            begun = states[:, :, :0]
        n_full = states.shape[2] // size * size
        whole = [begun] if begun.shape[2] == size else []
        whole += [states[:, :, :n_full]] if n_full else []
        if whole:
            self._numbers = np.concatenate([self._numbers, self._add_pages(whole)], 1)
        self.tail = begun if begun.shape[2] % size else states[:, :, n_full:].clone()

    def _add_pages(self, whole: list[Tensor]) -> NDArray[np.int64]:
        """The numbers of new pages of each sequence: (sequences, pages).

        Args:
            whole: tokens of whole pages.
        """
        n, heads, _, head_dim = self.tail.shape
        size = self._page_tokens
        if self.pages is None:
            self.pages = self._new_pages(whole[-1])
        self.pages.reserve(n * sum(states.shape[2] for states in whole) // size)
        step = max(_PIECE_ELEMENTS // (n * heads * head_dim * size or 1), 1) * size
        numbers: list[NDArray[np.int64]] = []
        try:
            for states, start in (
                (each, i) for each in whole for i in range(0, each.shape[2], step)
            ):
                piece = states[:, :, start : start + step]
                pages = piece.reshape(n, heads, -1, size, head_dim).transpose(1, 2)
                words = _words_of(pages.reshape(-1, heads, size, head_dim))
                numbers.append(self.pages.add(words).reshape(n, -1))
        except BaseException:
            for new in numbers:
                self._release(new)
            raise
        return np.concatenate(numbers, 1)

    def _new_pages(self, states: Tensor) -> PackedPages:
        n, heads, n_tokens, head_dim = states.shape
        shape = (heads, self._page_tokens, head_dim)
        choose = torch.Generator().manual_seed(0)
        drawn = [
            torch.randint(size, (-(-SAMPLE_ELEMENTS // head_dim),), generator=choose)
            for size in (n, heads, n_tokens)
        ]
        sample = _words_of(states[tuple(each.to(states.device) for each in drawn)])
        return PackedPages(
            choose_page_format(sample, NAMES[states.dtype], shape),
            shape,
            room=self._room,
            device=states.device,
            threads=self._threads,
        )

    def shape_for(self, n_more: int) -> tuple[int, int, int, int]:
        """The shape of memory for all tokens and some more, in whole pages."""
        n, heads, _, head_dim = self.tail.shape
        n_pages = -(-(self.n_tokens + n_more) // self._page_tokens)
        return n, heads, n_pages * self._page_tokens, head_dim

    def read_into(self, out: Tensor) -> None:
        """Writes all tokens to memory of `shape_for`."""
        self._read_pages(self._numbers, out)
        out[:, :, self.n_paged : self.n_tokens] = self.tail

    def _read_pages(self, numbers: NDArray[np.int64], out: Tensor) -> None:
        if self.pages is None or not numbers.size:
            return
        words = out.view(_WORDS[out.itemsize])
        if out.device.type == "cpu":
            dst = words.numpy()
            self.pages.read_into(numbers, dst.view(f"u{dst.itemsize}"))
            return
        held = self._device_pages
        if held is None or not held.suits(self.pages, numbers, words):
            kernels = import_late("packhorse.host.kv_device")  # needs Triton
            held = self._device_pages = kernels.DevicePages(self.pages, numbers, words)
        held.read_into(words)

    def select(self, sequences: Tensor, on_host: NDArray[np.int64]) -> None:
        tail = self.tail.index_select(0, sequences)
        before = self._numbers
        self._numbers, self.tail = before[on_host], tail
        self._hold()
        self._release(before)

    def crop(self, n: int) -> None:
        n_left = self.n_tokens - n
        if n_left >= self.n_paged:
            if n:
                self.tail = self.tail[:, :, : n_left - self.n_paged].clone()
            return
        n_whole, rest = divmod(n_left, self._page_tokens)
        dropped = self._numbers[:, n_whole:]
        n_sequences, heads, _, head_dim = self.tail.shape
        with torch.inference_mode(False):
            page = self.tail.new_empty((n_sequences, heads, self._page_tokens, head_dim))
        if rest:
            self._read_pages(dropped[:, :1], page)
        self._release(dropped)
        self._numbers, self.tail = self._numbers[:, :n_whole].copy(), page[:, :, :rest].clone()


def _words_of(states: Tensor) -> _Words:
    """Elements as unsigned integers, in memory of the host."""
    words = states.contiguous().cpu().view(_WORDS[states.itemsize]).numpy()
    return words.view(f"u{words.itemsize}")
