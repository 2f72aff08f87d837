"""The memories of the emulator: arrays in global memory, and the shared memory of some programs.

Each byte of shared memory remembers who wrote it and who read it last. Two accesses are in order if
something of the kernel puts them in order: a barrier of the block, an mbarrier, or, within a warp,
`bar.warp.sync`. Accesses that nothing orders are a fault, whatever the values are. Work that runs
on (cp.async, bulk copies, Hopper's products) counts as an access that lasts until it is waited for.

All addresses come as int64 arrays with an element for each active lane, with the number of the lane
among all lanes of the emulated programs.
"""

from collections.abc import Iterable

import numpy as np
from tests.ptx.faults import Fault
from tests.ptx.program import SHARED_BASE

WARP = 32
_BANKS = 32  # of shared memory
_REGION_LOG = 36
_SHARED_REGION = 1 << 60  # of generic addresses
_POISON = 0xCB


class GlobalMemory:
    """Arrays at addresses far from each other, so that no access beyond one meets another."""

    def __init__(self) -> None:
        self.regions: list[tuple[str, np.ndarray, int, np.ndarray, bool]] = []

    def add(self, name: str, array: np.ndarray, *, offset: int = 0, dependent: bool = False) -> int:
        """Copies an array to this memory.

        Args:
            name: of the array, for messages.
            array: its content.
            offset: bytes by which it begins after an aligned address.
            dependent: whether the kernel before writes it.

        Returns:
            Its address.
        """
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        store = np.full(-(-(content.size + offset) // 16) * 16 + 16, _POISON, np.uint8)
        store[offset : offset + content.size] = content
        self.regions.append((name, store, content.size, np.array(offset), dependent))
        return (len(self.regions) << _REGION_LOG) + offset

    def read(self, name: str, dtype: type) -> np.ndarray:
        """The content of an array."""
        for found, store, nbytes, offset, _ in self.regions:
            if found == name:
                return store[int(offset) : int(offset) + nbytes].view(dtype)
        raise KeyError(name)

    def content(self, name: str, *, waited: bool) -> np.ndarray:
        """The bytes of an array, for a copy of a box."""
        (dependent,) = (region[4] for region in self.regions if region[0] == name)
        if dependent and not waited:
            raise Fault(f"array {name} is used before griddepcontrol.wait")
        return self.read(name, np.uint8)

    def _places(
        self, address: np.ndarray, n: int, waited: np.ndarray | None
    ) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        regions = address >> _REGION_LOG
        low = address & ((1 << _REGION_LOG) - 1)
        if (address % min(n, 16)).any():
            raise Fault(f"a global address is not a multiple of {n}")
        for region in np.unique(regions):
            if not 1 <= region <= len(self.regions):
                raise Fault(f"a global address is in no array: {int(address[0]):#x}")
            name, store, nbytes, offset, dependent = self.regions[region - 1]
            which = regions == region
            place = low[which]
            begin = int(offset)
            if place.min() < begin or place.max() + n > begin + nbytes:
                at = place[(place < begin) | (place + n > begin + nbytes)][0] - begin
                raise Fault(f"beyond array {name} of {nbytes} bytes: bytes {at} to {at + n}")
            if dependent and waited is not None and not waited[which].all():
                raise Fault(f"array {name} is used before griddepcontrol.wait")
            yield store, which, place

    def load(self, address: np.ndarray, n: int, waited: np.ndarray | None) -> np.ndarray:
        """Bytes (lanes x n)."""
        result = np.empty((address.size, n), np.uint8)
        for store, which, place in self._places(address, n, waited):
            result[which] = _rows(store, n)[place // n] if n <= 16 else _span(store, place, n)
        return result

    def store(self, address: np.ndarray, data: np.ndarray, waited: np.ndarray | None) -> None:
        n = data.shape[1]
        for store, which, place in self._places(address, n, waited):
            _rows(store, n)[place // n] = data[which]


def _rows(store: np.ndarray, n: int) -> np.ndarray:
    return store[: store.size // n * n].reshape(-1, n)


def _add(store: np.ndarray, n: int, row: np.ndarray, number: int) -> None:
    """Adds a number to `n` bytes of each row; rows may come twice."""
    for column in _rows(store, n).T:  # NumPy is slow at adding to whole rows
        np.add.at(column, row, np.int16(number))


def _span(store: np.ndarray, place: np.ndarray, n: int) -> np.ndarray:
    return store[place[:, None] + np.arange(n)]


def is_shared(address: np.ndarray) -> bool:
    """Whether generic addresses are of shared memory."""
    return bool((address >= _SHARED_REGION).all())


def to_generic(address: np.ndarray) -> np.ndarray:
    return address + _SHARED_REGION


def from_generic(address: np.ndarray) -> np.ndarray:
    return address - _SHARED_REGION


class SharedMemory:
    """Shared memory of programs, one after the other.

    Args:
        n_programs: programs.
        n_warps: warps of a program.
        nbytes: bytes of a program.
        cluster: programs that reach each other's shared memory. Each warp of a cluster has a number
            of its own: first those of its first program.
        track: whether accesses without an order are looked for.
        passes: as `Launch.passes`.
    """

    def __init__(
        self,
        n_programs: int,
        n_warps: int,
        nbytes: int,
        *,
        cluster: int = 1,
        track: bool,
        passes: dict[int, list[int]] | None = None,
    ) -> None:
        self.passes = passes
        self.n_warps, self.nbytes, self.track, self.cluster = n_warps, nbytes, track, cluster
        self.n_numbers = cluster * n_warps
        self.span = -(-(nbytes + SHARED_BASE) // 1024) * 1024
        total = n_programs * self.span
        self.bytes = np.full(total, _POISON, np.uint8)
        self.written = np.zeros(total, bool)
        # clocks[p, w, v]: how much of the work of number v is in order before the next access of
        # warp w of program p.
        self.clocks = np.zeros((n_programs, n_warps, self.n_numbers), np.int16)
        # Up to which of its own clocks all lanes of a warp are in order.
        self.joint = np.zeros((n_programs, n_warps), np.int16)
        programs = np.arange(n_programs)
        for w in range(n_warps):
            self.clocks[programs, w, self.number(w, programs)] = 1
        if track:
            self.writer = np.zeros(total, np.int8)
            self.write_clock = np.zeros(total, np.int16)
            self.write_lane = np.zeros(total, np.int8)
            self.write_sync = np.full(total, -1, np.int16)
            self.read_clock = np.zeros((self.n_numbers, total), np.int16)
            self.loading = np.zeros(total, np.int16)  # copies to it that are under way
            self.product = np.zeros(total, np.int16)  # products under way that read it
            self.unfenced = np.zeros(total, bool)
            # Bits of the warps that have read a byte, with no fence.proxy.async since then.
            assert self.n_numbers <= 64
            self.unfenced_readers = np.zeros(total, np.uint64)
            self.syncs = np.zeros((n_programs, n_warps), np.int16)  # of each warp's lanes

    def beside(self, nbytes: int) -> "SharedMemory":
        """More memory of the same programs, whose accesses have one order with those here."""
        other = SharedMemory(
            len(self.clocks), self.n_warps, nbytes, cluster=self.cluster, track=self.track
        )
        other.clocks, other.joint = self.clocks, self.joint
        if self.track:
            other.syncs = self.syncs
        return other

    def number(self, warp: int, programs: np.ndarray) -> np.ndarray:
        """Numbers of a warp of some programs in their clusters."""
        return programs % self.cluster * self.n_warps + warp

    def own_clock(self, warp: int, programs: np.ndarray) -> np.ndarray:
        return self.clocks[programs, warp, self.number(warp, programs)]

    def places(self, lanes: np.ndarray, address: np.ndarray, n: int) -> np.ndarray:
        """Checks addresses; places of their first bytes."""
        low, high = int(address.min()), int(address.max()) + n
        if low < SHARED_BASE or high > SHARED_BASE + self.nbytes:
            raise Fault(
                f"beyond shared memory of {self.nbytes} bytes: "
                f"bytes {low - SHARED_BASE} to {high - SHARED_BASE}"
            )
        if (address % min(n, 16)).any():
            raise Fault(f"a shared address is not a multiple of {min(n, 16)}")
        return lanes // WARP * self.span + address

    def load(self, warp: int, lanes: np.ndarray, address: np.ndarray, n: int) -> np.ndarray:
        """Bytes (lanes x n)."""
        place = self.places(lanes, address, n)
        row = place // n
        if not _rows(self.written, n)[row].all():
            raise Fault("reads shared memory that nothing wrote")
        if self.track:
            self._note_read(warp, lanes, row, n)
        if self.passes is not None:
            self._count_passes(lanes, address, n)
        return _rows(self.bytes, n)[row]

    def store(self, warp: int, lanes: np.ndarray, address: np.ndarray, data: np.ndarray) -> None:
        n = data.shape[1]
        row = self.places(lanes, address, n) // n
        if self.track:
            # Warps that hold copies of one result all write it: what changes nothing harms nobody.
            is_new = (_rows(self.bytes, n)[row] != data) | ~_rows(self.written, n)[row]
            self._check_order(warp, lanes, row, n, is_new)
            self._note_write(warp, lanes, row, n)
            _rows(self.unfenced, n)[row] = True
        _rows(self.bytes, n)[row] = data
        _rows(self.written, n)[row] = True

    def _count_passes(self, lanes: np.ndarray, address: np.ndarray, n: int) -> None:
        """Lanes are served together as far as they read 128 bytes; each of 32 banks gives 4."""
        together = lanes // min(WARP, 128 // n)
        words = address[:, None] // 4 + np.arange(-(-n // 4))
        # Lanes that read the same word get it at once.
        groups, words = np.unique(
            np.stack([np.broadcast_to(together[:, None], words.shape), words]).reshape(2, -1),
            axis=1,
        )
        _, groups = np.unique(groups, return_inverse=True)
        of_bank = np.bincount(
            groups * _BANKS + words % _BANKS, minlength=(groups.max() + 1) * _BANKS
        )
        found = self.passes.setdefault(n, [0, 0])
        found[0] += int(of_bank.reshape(-1, _BANKS).max(1).sum())
        found[1] += int(groups.max()) + 1

    def _note_write(self, warp: int, lanes: np.ndarray, row: np.ndarray, n: int) -> None:
        programs = lanes // WARP
        _rows(self.writer, n)[row] = self.number(warp, programs)[:, None]
        _rows(self.write_clock, n)[row] = self.own_clock(warp, programs)[:, None]
        _rows(self.write_lane, n)[row] = (lanes % WARP)[:, None]
        _rows(self.write_sync, n)[row] = self.syncs[programs, warp][:, None]

    def _note_read(self, warp: int, lanes: np.ndarray, row: np.ndarray, n: int) -> None:
        self._check_order(warp, lanes, row, n)
        programs = lanes // WARP
        self._set_read(warp, programs, row, n)
        _rows(self.unfenced_readers, n)[row] |= self._bit(warp, programs)[:, None]

    def _bit(self, warp: int, programs: np.ndarray) -> np.ndarray:
        return np.uint64(1) << self.number(warp, programs).astype(np.uint64)

    def _set_read(self, warp: int, programs: np.ndarray, row: np.ndarray, n: int) -> None:
        clock, numbers = self.own_clock(warp, programs), self.number(warp, programs)
        for number in np.unique(numbers):
            which = numbers == number
            _rows(self.read_clock[number], n)[row[which]] = clock[which, None]

    def _check_order(
        self,
        warp: int,
        lanes: np.ndarray,
        row: np.ndarray,
        n: int,
        is_new: np.ndarray | None = None,
    ) -> None:
        """Raises a fault if an access to `n` bytes of each row is not in order with earlier ones.

        `is_new` is for writes: which of the bytes change.
        """
        programs = lanes // WARP
        known = self.clocks[programs, warp]  # lanes x numbers
        own = self.number(warp, programs)[:, None]
        writer = _rows(self.writer, n)[row].astype(np.int64)
        late = _rows(self.write_clock, n)[row] > np.take_along_axis(known, writer, 1)
        if (late if is_new is None else late & is_new).any():
            what = "reads" if is_new is None else "overwrites"
            raise Fault(f"{what} shared memory that another warp wrote, with nothing between them")
        if (_rows(self.loading, n)[row] != 0).any():
            raise Fault("uses shared memory to which a copy is under way")
        if is_new is None:
            other_lane = _rows(self.write_lane, n)[row] != (lanes % WARP)[:, None]
            sync = _rows(self.write_sync, n)[row] == self.syncs[programs, warp][:, None]
            if ((writer == own) & other_lane & sync).any():
                raise Fault("reads what another lane wrote, without bar.warp.sync between them")
            return
        if (_rows(self.product, n)[row] != 0).any():
            raise Fault("overwrites shared memory that a product under way may still read")
        for other in range(self.n_numbers):
            late = _rows(self.read_clock[other], n)[row] > known[:, other, None]
            if (late & is_new & (own != other)).any():
                raise Fault("overwrites shared memory that another warp reads, unordered")

    # Work that runs on.

    def begin_copy(
        self, warp: int, lanes: np.ndarray, place: np.ndarray, n: int, *, by_proxy: bool
    ) -> None:
        """Notes a copy to `n` bytes from each place, which runs on."""
        if self.track and place.size:
            if by_proxy and _rows(self.unfenced_readers, n)[place // n].any():
                raise Fault(
                    "a bulk copy overwrites what a warp has read, without fence.proxy.async in "
                    "that warp: its loads may still be under way"
                )
            self._check_order(warp, lanes, place // n, n, np.ones((place.size, n), bool))
            _add(self.loading, n, place // n, 1)

    def end_copy(
        self, warp: int, lanes: np.ndarray, place: np.ndarray, data: np.ndarray, *, by_proxy: bool
    ) -> None:
        """The end of a copy, which `warp` has waited for; the data may have been there before."""
        n = data.shape[1]
        if self.track and place.size:
            _add(self.loading, n, place // n, -1)
            self._note_write(warp, lanes, place // n, n)
            _rows(self.unfenced, n)[place // n] = not by_proxy

    def put(self, place: np.ndarray, data: np.ndarray) -> None:
        """Writes what a copy brought."""
        n = data.shape[1]
        _rows(self.bytes, n)[place // n] = data
        _rows(self.written, n)[place // n] = True

    def begin_product(self, warp: int, lanes: np.ndarray, place: np.ndarray) -> None:
        """Notes a product that reads pairs of bytes, and runs on."""
        if not self.track:
            return
        if _rows(self.unfenced, 2)[place // 2].any():
            raise Fault("a product reads what was written without fence.proxy.async")
        self._check_order(warp, lanes, place // 2, 2)
        _add(self.product, 2, place // 2, 1)

    def end_product(self, warp: int, lanes: np.ndarray, place: np.ndarray) -> None:
        if self.track:
            _add(self.product, 2, place // 2, -1)
            self._set_read(warp, lanes // WARP, place // 2, 2)

    def read_for_product(self, place: np.ndarray) -> np.ndarray:
        """Pairs of bytes as uint16."""
        if not self.written[place].all():
            raise Fault("a product reads shared memory that nothing wrote")
        return self.bytes.view(np.uint16)[place // 2]

    # Order.

    def fence(self, warp: int, programs: np.ndarray) -> None:
        """fence.proxy.async: what the warp knows to be written may now be read by products, and
        what it has read may now be overwritten by bulk copies."""
        if not self.track:
            return
        for p in programs:
            here = slice(p * self.span, (p + 1) * self.span)
            known = self.clocks[p, warp][self.writer[here]] >= self.write_clock[here]
            self.unfenced[here] &= ~known
            self.unfenced_readers[here] &= ~self._bit(warp, np.array([p]))[0]

    def sync_lanes(self, warp: int, programs: np.ndarray) -> None:
        """All lanes of a warp come together, as by bar.warp.sync."""
        if self.track:
            self.syncs[programs, warp] += 1
        self.joint[programs, warp] = self.own_clock(warp, programs)
        self.clocks[programs, warp, self.number(warp, programs)] += 1

    def release(self, warp: int, programs: np.ndarray, *, by_all_lanes: bool = True) -> np.ndarray:
        """What the warp has done until now, for others to learn; later work is not part of it.

        One lane speaks for all only as far as they have come together.
        """
        known = self.clocks[programs, warp].copy()
        numbers = self.number(warp, programs)
        if not by_all_lanes:
            known[np.arange(programs.size), numbers] = self.joint[programs, warp]
        self.clocks[programs, warp, numbers] += 1
        return known

    def acquire(self, warp: int, programs: np.ndarray, known: np.ndarray) -> None:
        """Learns what others have released."""
        self.clocks[programs, warp] = np.maximum(self.clocks[programs, warp], known)
        self.sync_lanes(warp, programs)
