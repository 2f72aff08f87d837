"""Models of section 6.2, and the inverse of the rANS decoder.

A model is fitted to symbols, or given number by number. Encoding lists the lanes in the order in
which the decoder serves them, and then walks the list backwards.
"""

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Model", "encode_classes", "fit", "slot_lists"]


@dataclass(frozen=True)
class Model:
    """Frequencies of the symbols `first`, `first + 1`, ... and, last of all, of the escape."""

    first: int
    frequencies: tuple[int, ...]

    def code(self, symbol: int) -> int:
        """Index of the symbol's frequency, or that of the escape's."""
        index = symbol - self.first
        inside = 0 <= index < len(self.frequencies) - 1
        return index if inside and self.frequencies[index] else len(self.frequencies) - 1

    def escapes(self, symbol: int) -> bool:
        return self.code(symbol) == len(self.frequencies) - 1

    def to_bytes(self) -> bytes:
        packed = sum(f << 12 * i for i, f in enumerate(self.frequencies))
        nbytes = math.ceil(1.5 * len(self.frequencies))
        n_symbols = len(self.frequencies) - 1
        return bytes([self.first, n_symbols - 1]) + packed.to_bytes(nbytes, "little")


def fit(
    symbols: Sequence[int],
    mapped: Sequence[int] | None,
    frequencies: Sequence[int] | None,
    escape: int | None,
    margin: tuple[int, int],
) -> Model:
    """A model of the symbols `mapped`, or of all there are, in a range wider by `margin`.

    The frequencies of the mapped symbols and of the escape are given, or near the counts: at least
    1 each, 4096 in all, two codes at least.
    """
    own = sorted(set(symbols if mapped is None else mapped)) or [0]
    values = list(frequencies or _near_counts(symbols, own, escape))
    assert sum(values) == 4096
    first, last = own[0] - margin[0], own[-1] + margin[1]
    given = dict(zip(own, values[:-1], strict=True))
    return Model(first, (*(given.get(symbol, 0) for symbol in range(first, last + 1)), values[-1]))


def _near_counts(symbols: Sequence[int], own: list[int], escape: int | None) -> list[int]:
    counts = Counter(symbols)
    n_escapes = sum(count for symbol, count in counts.items() if symbol not in own)
    if escape is None:
        needed = n_escapes > 0 or len(own) == 1
        escape = max(1, n_escapes * 64 // max(1, len(symbols))) if needed else 0
    total = max(1, len(symbols) - n_escapes)
    room = 4096 - escape - len(own)
    scaled = [1 + room * counts[symbol] // total for symbol in own]
    scaled[scaled.index(max(scaled))] += 4096 - escape - sum(scaled)
    return [*scaled, escape]


@lru_cache(maxsize=64)
def slot_lists(frequencies: tuple[int, ...]) -> dict[int, list[int]]:
    """For each index whose frequency is not 0, its slots in ascending order."""
    codes = [index for index, f in enumerate(frequencies) if f]
    present = [frequencies[index] for index in codes]
    lists = _plain_slots(present) if len(codes) > 64 else _alias_slots(present)
    return dict(zip(codes, lists, strict=False))


def _plain_slots(present: list[int]) -> list[list[int]]:
    starts = [sum(present[:code]) for code in range(len(present))]
    return [list(range(a, a + f)) for a, f in zip(starts, present, strict=True)]


def _alias_slots(present: list[int]) -> list[list[int]]:
    n_buckets = 32 if len(present) <= 32 else 64
    size = 4096 // n_buckets
    rest = dict(enumerate(present + [0] * (n_buckets - len(present))))
    own = dict.fromkeys(range(n_buckets), size)
    other = {b: b for b in range(n_buckets)}
    low = [c for c in range(n_buckets) if rest[c] < size]
    high = [c for c in range(n_buckets) if rest[c] > size]
    while low:
        small = low.pop()
        own[small], other[small] = rest[small], high[-1]
        rest[high[-1]] -= size - rest[small]
        if rest[high[-1]] < size:
            low.append(high.pop())
        elif rest[high[-1]] == size:
            high.pop()
    slots: list[list[int]] = [[] for _ in range(n_buckets)]
    for slot in range(4096):
        bucket, o = divmod(slot, size)
        is_own = o < own[bucket] if bucket % 2 == 0 else o >= size - own[bucket]
        slots[bucket if is_own else other[bucket]].append(slot)
    return slots


def encode_classes(
    symbols: Sequence[int],
    members: Sequence[Sequence[int]],
    models: Sequence[Model],
    first_states: Sequence[int],
) -> tuple[bytes, bytes]:
    """States and words of the stream whose decoder serves the members of each class in turn."""
    states, words = list(first_states), []
    for lane, model, symbol in reversed(_service(symbols, members, models, len(states))):
        code = model.code(symbol)
        f, owned, x = model.frequencies[code], slot_lists(model.frequencies)[code], states[lane]
        if x >= f << 20:  # else the new state would not fit 32 bits
            words.append(x & 0xFFFF)
            x >>= 16
        states[lane] = (x // f << 12) + owned[x % f]
    return struct.pack(f"<{len(states)}I", *states), struct.pack(f"<{len(words)}H", *words[::-1])


def _service(
    symbols: Sequence[int],
    members: Sequence[Sequence[int]],
    models: Sequence[Model],
    n_lanes: int,
) -> list[tuple[int, Model, int]]:
    """Lane, model and symbol of every step, as the decoder makes them."""
    q = n_lanes // 4
    steps = []
    for units, model in zip(members, models, strict=True):
        for start in range(0, len(units), n_lanes):
            round_ = units[start : start + n_lanes]
            places = [(lane, 4 * (lane % q) + lane // q) for lane in range(n_lanes)]
            steps += [(lane, model, symbols[round_[p]]) for lane, p in places if p < len(round_)]
    return steps
