"""Sections 6.4, 6.5 and 6.9 of docs/format.md: rANS, with one model or with a model for each class,
and of half bytes.

One model is the same as a single class, so one loop decodes both: `_decode_classes` takes the model
and the units of each class, in the order of decoding. `delta` uses the same coder.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import ClassSource
from packhorse.reference.symbols import (
    Model,
    RawBits,
    join_raw_bits,
    read_escapes,
    read_model,
    read_raw_planes,
    resolve_escapes,
)
from packhorse.reference.words import Reader, equal, within, zero

__all__ = [
    "Decoded",
    "Place",
    "check_coder",
    "decode_classed_rans",
    "decode_nibbles",
    "decode_rans",
    "decode_words",
    "read_states",
]


class Place(NamedTuple):
    """The place of a stream in its chunk, and the other data that the stream may depend on."""

    plane: int
    n: int  # units of the plane
    plane_nbytes: int
    predictions: Callable[[], list[int]] | None = None  # `q` of each unit; None: no side data
    lead: bytes | None = None  # what plane 0's stream yields; None in plane 0 or if it is stored


class Decoded(NamedTuple):
    """What a stream holds."""

    plane: bytes
    yielded: bytes  # the same before a prediction is added
    carried: bytes = b""  # bytes of another plane


class _Head(NamedTuple):
    n_lanes: int
    raw: RawBits
    n_escapes: int


def decode_rans(reader: Reader, n: int) -> Decoded:
    """Section 6.4."""
    head = _read_head(reader)
    model = read_model(reader, head.raw.n_symbols)
    yielded, carried = _decode_classes(reader, head, [model], [list(range(n))])
    return Decoded(yielded, yielded, carried)


def decode_classed_rans(reader: Reader, place: Place) -> Decoded:
    """Section 6.5."""
    head = _read_head(reader)
    source, n_classes, thresholds = _read_classes(reader)
    models = [read_model(reader, head.raw.n_symbols) for _ in range(n_classes)]
    predictions: list[int] = []
    if source == ClassSource.PREDICTION:
        predictions = _predictions(place, reader.start)
        class_of = [q % layout.PREDICTION_CLASSES for q in predictions]
    else:
        class_of = [sum(t <= y for t in thresholds) for y in _lead(place, reader.start)]
    units = [[u for u in range(place.n) if class_of[u] == c] for c in range(n_classes)]
    yielded, carried = _decode_classes(reader, head, models, units)
    if source == ClassSource.LEAD:
        return Decoded(yielded, yielded, carried)
    pairs = zip(yielded, predictions, strict=True)
    plane = bytes((y - layout.PREDICTION_BIAS + q // 4) % 256 for y, q in pairs)
    return Decoded(plane, yielded, carried)


def decode_nibbles(reader: Reader, nbytes: int) -> bytes:
    """Section 6.9: decodes a chunk of `nbytes` bytes."""
    head = _read_head(reader)
    equal(head.raw.n_bits, layout.NIBBLE_BITS, "raw_bits", reader.start + 2)
    equal(head.raw.mask, 0, "raw_mask", reader.start + 3)
    model = read_model(reader, head.raw.n_symbols)
    units, carried = _decode_classes(reader, head, [model], [list(range(2 * nbytes))])
    equal(carried, bytes(len(carried)), "lower halves of the last states", reader.start)
    return bytes(low // 16 + high for low, high in zip(units[::2], units[1::2], strict=True))


def _read_head(reader: Reader) -> _Head:
    fields = struct.unpack("<BBBBI", reader.take(layout.MODEL_OFFSET, "bytes of the rANS header"))
    lanes_log, prob_bits, raw_bits, raw_mask, n_escapes = fields
    check_coder(lanes_log, prob_bits, reader.start)
    raw = RawBits(raw_bits, raw_mask)
    raw.check(layout.MAX_RANS_RAW_BITS, reader.start + 2)
    return _Head(1 << lanes_log, raw, n_escapes)


def _read_classes(reader: Reader) -> tuple[ClassSource, int, tuple[int, ...]]:
    """Returns the source, the number of classes, and the thresholds between them."""
    at = reader.offset
    source, n_classes, t, reserved = struct.unpack("<BB3s3s", reader.take(8, "bytes of classes"))
    within(source, ClassSource.PREDICTION, ClassSource.LEAD, "source of the classes", at)
    if source == ClassSource.PREDICTION:
        equal(n_classes, layout.PREDICTION_CLASSES, "n_classes", at + 1)
    within(n_classes, 1, layout.MAX_CLASSES, "n_classes", at + 1)
    n_thresholds = n_classes - 1 if source == ClassSource.LEAD else 0
    thresholds = tuple(t[:n_thresholds])
    equal(thresholds, tuple(sorted(thresholds)), "thresholds", at + 2)
    zero(t[n_thresholds:], "unused thresholds", at + 2 + n_thresholds)
    zero(reserved, "reserved bytes of the classes", at + 5)
    return ClassSource(source), n_classes, thresholds


def _predictions(place: Place, offset: int) -> list[int]:
    if place.predictions is None or place.plane > 0:
        where = f"plane {place.plane} of the stream at byte offset {offset}"
        raise CorruptionError(f"{where} uses predictions: allowed in plane 0, with side data")
    return place.predictions()


def _lead(place: Place, offset: int) -> bytes:
    if place.lead is None:
        where = f"plane {place.plane} of the stream at byte offset {offset}"
        raise CorruptionError(f"{where} follows plane 0: allowed behind it, where it is not stored")
    return place.lead


def check_coder(lanes_log: int, prob_bits: int, at: int) -> None:
    """Checks the first two bytes of every stream that rANS codes."""
    within(lanes_log, layout.MIN_LANES_LOG, layout.MAX_LANES_LOG, "lanes_log", at)
    equal(prob_bits, layout.PROB_BITS, "prob_bits", at + 1)


def _decode_classes(
    reader: Reader, head: _Head, models: list[Model], units: list[list[int]]
) -> tuple[bytes, bytes]:
    """Returns the bytes that the stream yields, in the order of units, and the carried bytes."""
    n = sum(map(len, units))
    states = read_states(reader, head.n_lanes)
    low = read_raw_planes(reader, n, head.raw)
    escapes = read_escapes(reader, head.n_escapes, head.raw.n_symbols)
    at = reader.offset
    decoded = decode_words(reader, models, [len(members) for members in units], states)
    high_states = [state for state in states if state >= 2 * layout.STATE_LOWER_BOUND]
    equal(high_states, [], "list of last states of 2^17 or more", at)
    resolved = resolve_escapes(decoded, escapes, reader.start + 4)
    order = [unit for members in units for unit in members]
    symbols = [symbol for _, symbol in sorted(zip(order, resolved, strict=True))]
    last_halves = [state - layout.STATE_LOWER_BOUND for state in states]
    carried = struct.pack(f"<{head.n_lanes}H", *last_halves)
    return join_raw_bits(symbols, low, head.raw), carried


def read_states(reader: Reader, n_lanes: int) -> list[int]:
    """Reads the state that each lane starts from."""
    at = reader.offset
    states = list(struct.unpack(f"<{n_lanes}I", reader.take(4 * n_lanes, "states")))
    low_states = [state for state in states if state < layout.STATE_LOWER_BOUND]
    equal(low_states, [], "list of states below 2^16", at)
    return states


def decode_words(
    reader: Reader, models: list[Model], sizes: list[int], states: list[int]
) -> list[int | None]:
    """Decodes class after class, in the order of decoding. The words are the rest of the stream.

    Returns the symbols, with None for an escape. `states` receives the last states.
    """
    at = reader.offset
    words = _read_words(reader)
    decoded: list[int | None] = []
    for model, n in zip(models, sizes, strict=True):
        decoded += _decode_class(model, n, states, words, at)
    equal(len(list(words)), 0, "number of unused words of those", at)
    return decoded


def _read_words(reader: Reader) -> Iterator[int]:
    at = reader.offset
    words = reader.rest()
    equal(len(words) % 2, 0, "half a word behind the words", at)
    return iter(struct.unpack(f"<{len(words) // 2}H", words))


def _decode_class(
    model: Model, n: int, states: list[int], words: Iterator[int], at: int
) -> list[int | None]:
    """Decodes the `n` units of a class to symbols; `states` is updated for the next class."""
    n_lanes, q = len(states), len(states) // 4
    positions = [4 * (lane % q) + lane // q for lane in range(n_lanes)]
    symbols: list[int | None] = [None] * n
    for start in range(0, n, n_lanes):
        for lane, position in enumerate(positions):
            if start + position >= n:
                continue
            x = states[lane]
            slot = x & (layout.PROB_SUM - 1)
            code = model.owners[slot]
            symbols[start + position] = model.symbols[code]
            x = model.frequencies[code] * (x >> layout.PROB_BITS) + model.ranks[slot]
            if x < layout.STATE_LOWER_BOUND:
                x = x << 16 | _next_word(words, at)
            states[lane] = x
    return symbols


def _next_word(words: Iterator[int], at: int) -> int:
    word = next(words, None)
    if word is None:
        raise CorruptionError(f"no word is left of those at byte offset {at}")
    return word
