"""Bounded messages of any elements, segments and bounds: the error bound holds, the slow coder
agrees to the bit, and what is damaged or lost is never taken for something else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from bounded_samples import NUMPY, assert_within, raw
from codec_battery import ISAS, forced

from packhorse.codecs.bounded import Segment, encode_bounded, encode_fixed, read_segments
from packhorse.codecs.bounded_models import CodeModel
from packhorse.errors import BaseMismatchError, PackhorseError
from packhorse.layout import BOUNDED_CRC_OFFSET, BoundedForm, Rounding
from packhorse.reference.bounded import Entry, decode_message, encode_message
from packhorse.reference.coded import decode_coded
from packhorse.reference.words import crc32c
from soak_parts.case import Case, Part, Place, claim
from soak_parts.samples import make_array

__all__ = ["PART"]

# Elements are like these, or any bits.
_KINDS = ("weights", "weights", "moments", "sparse", "few", "floors", "zeros", "nans", "bits")
_LENGTHS = (0, 1, 15, 16, 17, 511, 512, 513, 1030)
_MOST = 2500  # elements of a segment: the slow coder takes milliseconds for them
_N_FLIPS = 12
_CANNOT = ("reach no value but the center", "no step of")  # bounds that nobody can keep


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(("plain", "plain", "fixed", "coded"))
    n_segments = 1 if kind == "fixed" else rng.choice((0, 1, 1, 2, 5))
    return {"kind": kind, "dtype": rng.choice(list(NUMPY)), "data": rng.choice(_KINDS),
            "segments": [_draw_segment(rng) for _ in range(n_segments)],
            "stochastic": rng.random() < 0.5, "seed": rng.getrandbits(64), "isa": rng.choice(ISAS),
            "threads": rng.randint(1, 3), "lost": [rng.random() < 0.2 for _ in range(4)],
            "flips": [[rng.random(), rng.randrange(8)] for _ in range(_N_FLIPS)]}  # fmt: skip


def _draw_segment(rng: Random) -> list[Any]:
    n = rng.choice(_LENGTHS) if rng.random() < 0.5 else rng.randrange(_MOST)
    bound = 2.0 ** rng.uniform(-14, 2) if rng.random() < 0.8 else 2.0 ** rng.uniform(-160, 130)
    bound = 2.0 ** round(np.log2(bound)) if rng.random() < 0.4 else bound
    center = rng.choice((0.0, 0.0, 0.0, rng.gauss(0, 0.02), rng.gauss(0, 100)))
    return [n, bound, rng.randint(1, 16), center]


def run(case: Case, place: Place) -> None:
    """Run a case."""
    segments = [Segment(*fields) for fields in case["segments"]]
    n = sum(segment.n for segment in segments)
    spec = {"dtype": case["dtype"], "shape": [n], "kind": case["data"], "seed": case["seed"]}
    elements = make_array(spec)
    with forced(case["isa"]):
        _RUN[case["kind"]](case, place, elements, segments)


def _plain(case: Case, place: Place, elements: Any, segments: list[Segment]) -> None:
    message = _encode(case, place, elements, segments)
    if message is None:
        return
    asked = [Entry(*segment) for segment in segments]
    _check_message(case, place, elements, message, asked, BoundedForm.PLAIN)
    _check_flips(case, place, message)


def _fixed(case: Case, place: Place, elements: Any, segments: list[Segment]) -> None:
    """The fixed form, whose bound may have been doubled."""
    (segment,) = segments
    how = {"rounding": _rounding(case), "seed": case["seed"], "threads": case["threads"]}
    found = place.outcome(lambda: encode_fixed(raw(elements), case["dtype"], segment, **how))
    if isinstance(found, BaseException):
        return
    claim(found.bound == segment.bound * 2.0**found.doublings, f"a bound of {found.bound}")
    n, _, bits, center = segment
    asked = [Entry(n, found.bound, bits, center, doublings=found.doublings)]
    message = found.data.tobytes()
    _check_message(case, place, elements, message, asked, BoundedForm.FIXED)
    _check_flips(case, place, message)


def _coded(case: Case, place: Place, elements: Any, segments: list[Segment]) -> None:
    """A link whose messages may get lost: a receiver without the models must say so."""
    sender, receiver, models = CodeModel(refresh=3), CodeModel(), b""
    for i, is_lost in enumerate(case["lost"]):
        values = np.roll(elements, 37 * i)
        message = _encode(case, place, values, segments)
        if message is None:
            return
        coded = sender.encode(message, threads=case["threads"])
        if is_lost:
            continue
        try:
            slow, models = decode_coded(coded, models)
        except BaseMismatchError:
            slow = None
        decode = partial(receiver.decode, coded, max_nbytes=len(message))
        found = place.outcome(decode)
        if slow is None:
            claim(isinstance(found, BaseMismatchError), "models are missing, and nobody says so")
            continue
        claim(not isinstance(found, BaseException), f"a coded message is refused: {found}")
        claim(found.tobytes() == message == slow, "a coded message gives another message")


def _rounding(case: Case) -> Rounding:
    return Rounding.STOCHASTIC if case["stochastic"] else Rounding.NEAREST


def _encode(case: Case, place: Place, elements: Any, segments: list[Segment]) -> bytes | None:
    """The message; None if a bound cannot be kept, which the error must say."""
    how: dict[str, Any] = {"rounding": _rounding(case), "seed": case["seed"]}
    before = raw(elements).tobytes()
    try:
        message = encode_bounded(
            raw(elements), case["dtype"], segments, threads=case["threads"], **how
        )
    except ValueError as error:
        claim(any(words in str(error) for words in _CANNOT), f"refused: {error}")
        place.refuse()
        return None
    claim(raw(elements).tobytes() == before, "encoding changed its input")
    place.accept()
    return message.tobytes()


def _check_message(
    case: Case, place: Place, elements: Any, message: bytes, asked: list[Entry], form: BoundedForm
) -> None:
    """Check the bound, and every byte of the message and of what it decodes to."""
    out = np.full(raw(elements).size, 0xA5, np.uint8)
    place.operations.decode_bounded(message, out, dtype=case["dtype"], threads=case["threads"])
    decoded, at = out.view(elements.dtype), 0
    for segment, entry in zip(asked, read_segments(message), strict=True):
        claim((entry.n, entry.bits) == (segment.n, segment.bits), "the table says something else")
        claim(entry.bound == segment.bound, f"the table has a bound of {entry.bound}")
        part = slice(at, at + entry.n)
        _check_within(elements[part], decoded[part], entry.bound)
        at += entry.n
    dtype, _, slow = decode_message(message)
    is_same = dtype == case["dtype"] and raw(slow).tobytes() == out.tobytes()
    claim(is_same, "the slow decoder gives other elements")
    again = encode_message(case["dtype"], elements, asked, _rounding(case), case["seed"], form)
    claim(again == message, "the slow coder writes another message")


def _check_within(elements: Any, decoded: Any, bound: float) -> None:
    try:
        assert_within(elements, decoded, bound)
    except AssertionError as error:
        claim(False, f"elements are not within {bound}: {error}")


def _check_flips(case: Case, place: Place, message: bytes) -> None:
    """Flipped bits are found, or, under a right checksum, mean the same to both decoders."""
    n = sum(segment[0] for segment in case["segments"])
    for at, bit in case["flips"]:
        flipped = bytearray(message)
        flipped[int(at * len(flipped))] ^= 1 << bit
        found = _decode_fast(case, place, bytes(flipped), n)
        claim(found is None, "a flipped bit is not found")
        flipped[BOUNDED_CRC_OFFSET : BOUNDED_CRC_OFFSET + 4] = bytes(4)
        flipped[BOUNDED_CRC_OFFSET : BOUNDED_CRC_OFFSET + 4] = struct.pack(
            "<I", crc32c(bytes(flipped))
        )
        found = _decode_fast(case, place, bytes(flipped), n)
        try:
            dtype, _, slow = decode_message(bytes(flipped))
        except PackhorseError:
            claim(found is None, "a message that the slow decoder refuses is decoded")
            continue
        if dtype == case["dtype"] and slow.size == n:
            claim(found == raw(slow).tobytes(), "a changed message means something else")


def _decode_fast(case: Case, place: Place, message: bytes, n: int) -> bytes | None:
    out = np.empty(n * np.dtype(NUMPY[case["dtype"]]).itemsize, np.uint8)
    how = {"dtype": case["dtype"], "threads": case["threads"]}
    result = place.outcome(lambda: place.operations.decode_bounded(message, out, **how))
    return None if isinstance(result, BaseException) else out.tobytes()


_RUN: dict[str, Callable[[Case, Place, Any, list[Segment]], None]] = {
    "plain": _plain,
    "fixed": _fixed,
    "coded": _coded,
}
PART = Part("bounded", "bounded messages: bounds hold, and damage is found", draw, run)
