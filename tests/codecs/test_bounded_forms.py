"""Bounded messages of a fixed length, and messages whose codes are coded once more with models that
are kept."""

import struct

import numpy as np
import pytest
from bounded_samples import NUMPY, all_patterns, assert_within, raw, table_rows
from codec_battery import ISAS, forced

from packhorse.codecs.bounded import (
    FixedMessage,
    Rounding,
    Segment,
    decode_bounded,
    decode_fixed,
    encode_bounded,
    encode_fixed,
    fixed_nbytes,
    read_segments,
)
from packhorse.codecs.bounded_models import CodeModel
from packhorse.errors import (
    BaseMismatchError,
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.layout import BoundedForm
from packhorse.reference.bounded import Entry, decode_message, encode_message
from packhorse.reference.words import crc32c

# The fixed form.


def fixed_trip(elements: np.ndarray, dtype: str, segment: Segment, **how: object) -> FixedMessage:
    out = np.full(fixed_nbytes(segment.n, segment.bits, dtype) + 5, 0xA5, np.uint8)
    result = encode_fixed(raw(elements), dtype, segment, out=out, **how)  # type: ignore[arg-type]
    assert np.shares_memory(result.data, out)
    assert result.data.size == out.size - 5
    assert (out[-5:] == 0xA5).all()
    assert result.bound == segment.bound * 2.0**result.doublings
    decoded = np.empty_like(elements)
    decode_fixed(result.data, raw(decoded), dtype=dtype)
    assert_within(elements, decoded, result.bound)
    (entry,) = read_segments(result.data)
    assert (entry.bound, entry.doublings) == (result.bound, result.doublings)
    assert entry.n_escapes == result.n_escapes
    return result


@pytest.mark.parametrize("dtype", NUMPY)
def test_the_length_depends_on_nothing_but_numbers(dtype: str) -> None:
    rng = np.random.default_rng(2)
    for n in (0, 1, 15, 16, 100, 511, 512, 513, 5000):
        for bits in (1, 3, 4, 8, 13, 16):
            for scale in (0.01, 1.0, 30.0):
                elements = (scale * rng.standard_normal(n)).astype(NUMPY[dtype])
                result = fixed_trip(elements, dtype, Segment(n, 0.06, bits))
                slow = encode_message(
                    dtype,
                    elements,
                    [Entry(n, result.bound, bits, 0.0, doublings=result.doublings)],
                    form=BoundedForm.FIXED,
                )
                assert result.data.tobytes() == slow
                name, _, _ = decode_message(slow)
                assert name == dtype


@pytest.mark.parametrize("isa", ISAS)
def test_the_bound_doubles_until_the_escapes_fit(isa: str) -> None:
    elements = table_rows(400, 64).reshape(-1)
    with forced(isa):
        loose = fixed_trip(elements, "F32", Segment(elements.size, 0.05, 6))
        tight = fixed_trip(elements, "F32", Segment(elements.size, 0.0002, 6), threads=3)
    assert loose.doublings == 0
    assert tight.doublings > 1
    # One doubling less would not have been enough.
    less = Segment(elements.size, tight.bound / 2, 6)
    (entry,) = read_segments(encode_bounded(elements, "F32", [less]))
    assert entry.n_escapes > 16 + elements.size // 256 >= tight.n_escapes


def test_the_widened_bound_holds_for_every_element_of_16_bits() -> None:
    for dtype in ("BF16", "F16"):
        patterns = all_patterns(dtype)
        finite = patterns[np.isfinite(patterns.astype(np.float32))]
        for rounding in Rounding:
            result = fixed_trip(
                finite, dtype, Segment(finite.size, 0.001, 8), rounding=rounding, seed=4
            )
            assert result.doublings > 10
            assert result.bound < 4 * float(np.max(finite.astype(np.float64)))


def test_too_many_elements_that_are_no_numbers_are_refused() -> None:
    elements = np.zeros(1000, np.float32)
    elements[:19] = np.nan
    fixed_trip(elements, "F32", Segment(1000, 0.1, 4))
    elements[:20] = np.inf
    with pytest.raises(ValueError, match=r"20 of 1000 elements are infinite or NaN.* at most 19"):
        encode_fixed(elements, "F32", Segment(1000, 0.1, 4))


def test_values_that_no_bound_brings_together_are_refused() -> None:
    elements = np.full(1000, 1.7e308)
    elements[::2] = -1.7e308
    with pytest.raises(ValueError, match="whatever the bound; 1 bits are too few"):
        encode_fixed(elements, "F64", Segment(1000, 1e300, 1))


def test_mistakes_with_the_fixed_form_are_refused() -> None:
    with pytest.raises(ValueError, match="codes of 17 bits"):
        fixed_nbytes(10, 17, "F32")
    with pytest.raises(ValueError, match="-1 elements"):
        fixed_nbytes(-1, 4, "F32")
    with pytest.raises(ValueError, match="dtype is 'I8'"):
        fixed_nbytes(10, 4, "I8")
    with pytest.raises(ValueError, match="out has 10 bytes"):
        encode_fixed(np.zeros(4, np.float32), "F32", Segment(4, 0.1, 4), out=bytearray(10))
    with pytest.raises(ValueError, match="segment 0 has the bound 0"):
        encode_fixed(np.zeros(4, np.float32), "F32", Segment(4, 0, 4))


# Models of codes.


def messages(n_messages: int, scale: float = 1.0) -> list[np.ndarray]:
    """Messages of three tables: codes of 6 and 8 bits that models shorten, and a short segment."""
    found = []
    for seed in range(n_messages):
        rows = scale * table_rows(2500, 32, seed).reshape(-1)
        rows[seed::9973] = 7.0
        segments = [
            Segment(60_000, 0.002, 6),
            Segment(rows.size - 60_300, 0.001, 8),
            Segment(300, 0.01, 4),
        ]
        found.append(encode_bounded(rows, "F32", segments))
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_coded_messages_come_back(isa: str) -> None:
    sender, receiver = CodeModel(refresh=3), CodeModel()
    with forced(isa):
        for i, message in enumerate(messages(5)):
            coded = sender.encode(message, threads=1 + i % 3)
            assert len(coded) < 0.8 * message.size
            assert coded[5] == (i % 3 == 0)  # new models after three messages
            decoded = receiver.decode(coded, max_nbytes=message.size, threads=1 + i % 2)
            assert decoded.tobytes() == message.tobytes()


def test_all_code_paths_write_the_same_coded_messages() -> None:
    first, second = messages(2)
    coded = []
    for isa in ISAS:
        with forced(isa):
            model = CodeModel()
            coded.append((model.encode(first), model.encode(second)))
    assert len(set(coded)) == 1


def test_large_segments_are_cut_in_pieces() -> None:
    rows = table_rows(20_000, 64).reshape(-1)
    message = encode_bounded(rows, "F32", [Segment(rows.size, 0.002, 7)])
    alone, shared = CodeModel().encode(message), CodeModel().encode(message, threads=4)
    assert alone == shared
    assert struct.unpack("<I", alone[8:12])[0] == 5
    decoded = CodeModel().decode(alone, max_nbytes=message.size, threads=3)
    assert decoded.tobytes() == message.tobytes()


def test_models_are_chosen_again_when_messages_change() -> None:
    model = CodeModel()
    assert model.encode(messages(1)[0])[5] == 1
    assert model.encode(messages(2)[1])[5] == 0
    assert model.encode(messages(1, scale=3.0)[0])[5] == 1


@pytest.mark.parametrize("bits", [1, 2, 8, 9, 16])
def test_messages_that_gain_nothing_come_back(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for values in (rng.uniform(-1, 1, 5000), np.zeros(5000), np.full(5000, np.nan), np.empty(0)):
        message = encode_bounded(values, "F64", [Segment(values.size, 0.1, bits)])
        sender, receiver = CodeModel(), CodeModel()
        for _ in range(2):
            coded = sender.encode(message)
            assert len(coded) <= message.size + 500
            decoded = receiver.decode(coded, max_nbytes=message.size)
            assert decoded.tobytes() == message.tobytes()


def test_missing_models_are_named() -> None:
    first, second = messages(2)
    sender = CodeModel()
    with_models, without = sender.encode(first), sender.encode(second)
    with pytest.raises(BaseMismatchError, match="decode all messages of the sender, in order"):
        CodeModel().decode(without, max_nbytes=second.size)
    receiver = CodeModel()
    receiver.decode(with_models, max_nbytes=first.size)
    with pytest.raises(CorruptionError, match="length"):
        receiver.decode(without, max_nbytes=second.size - 1)
    assert receiver.decode(without, max_nbytes=second.size).tobytes() == second.tobytes()


def test_mistakes_with_models_are_refused() -> None:
    with pytest.raises(ValueError, match="refresh is 0"):
        CodeModel(refresh=0)
    with pytest.raises(CorruptionError):
        CodeModel().encode(b"no message")


def small_coded() -> tuple[CodeModel, bytes, np.ndarray]:
    rows = table_rows(40, 32).reshape(-1)
    message = encode_bounded(rows, "F32", [Segment(rows.size, 0.004, 5)])
    sender, receiver = CodeModel(), CodeModel()
    receiver.decode(sender.encode(message), max_nbytes=message.size)
    return receiver, sender.encode(message), message


def test_cut_and_flipped_coded_messages_are_refused() -> None:
    receiver, coded, message = small_coded()
    for n in range(len(coded)):
        with pytest.raises(TruncationError):
            receiver.decode(coded[:n], max_nbytes=message.size)
    for place in range(len(coded)):
        flipped = bytearray(coded)
        flipped[place] ^= 1 << place % 8
        with pytest.raises((CorruptionError, CompatibilityError, BaseMismatchError)):
            receiver.decode(flipped, max_nbytes=message.size)
    assert receiver.decode(coded, max_nbytes=message.size).tobytes() == message.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_flips_under_a_true_checksum_are_found_at_last(isa: str) -> None:
    """Either the coded message is refused, or the message in it by its own checksum."""
    sender = CodeModel()
    rows = table_rows(40, 32).reshape(-1)
    message = encode_bounded(rows, "F32", [Segment(rows.size, 0.004, 5)])
    with_models = sender.encode(message)
    n_late = 0
    out = np.empty_like(rows)
    with forced(isa):
        for coded in (with_models, sender.encode(message)):
            for place in range(len(coded)):
                flipped = bytearray(coded)
                flipped[place] ^= 1 << (3 * place + 1) % 8
                flipped[12:16] = bytes(4)
                flipped[12:16] = struct.pack("<I", crc32c(bytes(flipped)))
                receiver = CodeModel()
                receiver.decode(with_models, max_nbytes=message.size)
                try:
                    found = receiver.decode(flipped, max_nbytes=message.size)
                except PackhorseError:
                    continue
                n_late += 1
                if found.tobytes() != message.tobytes():
                    with pytest.raises(PackhorseError):
                        decode_bounded(found, out, dtype="F32")
    assert n_late > 10
