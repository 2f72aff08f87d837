"""Rows that repeat: found, sent once, and put back; and what messages may not say of them."""

import struct

import ml_dtypes
import numpy as np
import pytest
from cases import each

from packhorse import _core
from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.layout import Level
from packhorse.wire.pieces import HEAD_NBYTES, Kind, PieceEncoder, capacity_of, decode_piece, seal
from packhorse.wire.repeats import RowFinder, RowMemory, max_tokens_nbytes

PIECE = 1 << 20


def batch(row_nbytes: int, n_rows: int, n_distinct: int, seed: int = 0) -> ByteArray:
    """Rows of BF16 that look like those of embeddings, popular ones more often than others."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, (n_distinct, row_nbytes // 2)).astype(ml_dtypes.bfloat16)
    ids = np.minimum(rng.zipf(1.3, n_rows), n_distinct) - 1
    return values.view(np.uint8)[ids].reshape(-1)


def messages_of(
    part: ByteArray, hint: int = 0, *, has_past: bool = True, piece: int = PIECE
) -> list[ByteArray]:
    finder = RowFinder(RowMemory(), [part[:0], part], hint, has_past=has_past)
    encoder = PieceEncoder("BF16", Level.DEFAULT, 1, finder)
    found = []
    for start in range(0, part.size, piece):
        stop = min(start + piece, part.size)
        memory = np.empty(capacity_of("BF16", stop - start), np.uint8)
        message = memory[: encoder.encode(part[:stop], start, memory, 1)]
        found.append(message)
    return found


def decoded(messages: list[ByteArray], nbytes: int, piece: int = PIECE) -> ByteArray:
    memory = np.full(nbytes, 0xA5, np.uint8)
    for start, message in zip(range(0, nbytes, piece), messages, strict=True):
        decode_piece(message, "BF16", memory[: start + piece], 1, start)
    return memory


def restored_slowly(
    past: bytes, literals: bytes, row_nbytes: int, skipped: int, tokens: bytes, nbytes: int
) -> bytes:
    """The piece, by what csrc/repeats/tokens.hpp says of tokens."""
    bits = int.from_bytes(tokens, "little")
    memory, at = past + literals[:skipped], skipped
    for _ in range((nbytes - skipped) // row_nbytes):
        is_repeat, bits = bits & 1, bits >> 1
        if is_repeat:
            c, bits = bits & 15, bits >> 4
            distance, bits = (1 << c) + (bits & ((1 << c) - 1)), bits >> c
            first = len(memory) - distance * row_nbytes
            memory += memory[first : first + row_nbytes]
        else:
            memory, at = memory + literals[at : at + row_nbytes], at + row_nbytes
    assert bits == 0
    return (memory + literals[at:])[len(past) :]


def found_in(
    part: ByteArray, start: int, row_nbytes: int, *, has_past: bool = True
) -> tuple[ByteArray, ByteArray]:
    """Literals and tokens of a piece."""
    slots = np.zeros(1 << 12, np.uint64)
    literals = np.empty(part.size - start, np.uint8)
    tokens = np.empty(max_tokens_nbytes(part.size), np.uint8)
    if start:
        _core.find_repeats(part[:start], 0, row_nbytes, has_past, slots, tokens, literals.repeat(9))
    n, n_tokens = _core.find_repeats(part, start, row_nbytes, has_past, slots, tokens, literals)
    return literals[:n], tokens[:n_tokens]


@pytest.mark.parametrize("row_nbytes", [16, 24, 40, 64, 130, 256, 1000, 4096])
@pytest.mark.parametrize("start", [0, 4096, 10_001])
def test_tokens_say_where_rows_come_from(row_nbytes: int, start: int) -> None:
    part = np.concatenate(
        [batch(row_nbytes, 20_000 // row_nbytes + 100, 9), np.arange(6, dtype=np.uint8)]
    )
    literals, tokens = found_in(part, start, row_nbytes)
    assert 0 < literals.size < (part.size - start) / 2
    assert tokens.size % 8 == 0
    skipped, past = -start % row_nbytes, part[:start].tobytes()
    nbytes = part.size - start
    wanted = part[start:].tobytes()
    args = (row_nbytes, skipped, tokens.tobytes(), nbytes)
    assert restored_slowly(past, literals.tobytes(), *args) == wanted
    memory = np.concatenate([part[:start], np.zeros(nbytes - literals.size, np.uint8), literals])
    assert _core.restore_rows(memory, start, literals.size, row_nbytes, skipped, tokens)
    assert memory.tobytes() == part.tobytes()


def test_each_distinct_row_is_sent_once_and_the_nearest_one_is_repeated() -> None:
    part = batch(64, 5000, 40)
    literals, tokens = found_in(part, 0, 64)
    assert literals.size == 64 * np.unique(part.reshape(-1, 64), axis=0).shape[0]
    assert tokens.size < 5000
    part = np.tile(np.arange(64, dtype=np.uint8), 800)  # distances of 1: 5 bits
    assert [one.size for one in found_in(part, 0, 64)] == [64, 504]


def test_what_lies_too_far_back_is_sent_again() -> None:
    rows = np.full((66_000, 16), 7, np.uint8)
    rows[0] = 1
    sizes = []
    for last in (65_535, 65_536):
        part = rows.copy()
        part[last] = 1
        sizes.append(found_in(part.reshape(-1), 0, 16)[0].size)
    assert sizes == [32, 48]


def test_the_search_ends_early_where_nothing_repeats() -> None:
    noise = np.frombuffer(np.random.default_rng(1).bytes(PIECE), np.uint8)
    literals = np.full(PIECE, 0xA5, np.uint8)
    slots, tokens = np.zeros(1 << 13, np.uint64), np.empty(max_tokens_nbytes(PIECE), np.uint8)
    assert _core.find_repeats(noise, 0, 64, True, slots, tokens, literals) == (0, 0)
    assert (literals[PIECE // 7 :] == 0xA5).all()
    assert _core.guess_row_nbytes(noise, 64) == 0
    assert _core.guess_row_nbytes(noise[:5], 64) == 0


@pytest.mark.parametrize(("row_nbytes", "wanted"), [(64, 64), (256, 256), (2048, 2048), (192, 64)])
def test_the_length_of_rows_is_guessed(row_nbytes: int, wanted: int) -> None:
    part = batch(row_nbytes, 600_000 // row_nbytes, 30)
    assert _core.guess_row_nbytes(part, 0) == wanted
    assert _core.guess_row_nbytes(part, row_nbytes) == row_nbytes
    assert _core.guess_row_nbytes(part, 7) == wanted  # no length that rows may have
    assert _core.guess_row_nbytes(batch(48, 9000, 30), 48) == 48


@pytest.mark.parametrize(("row_nbytes", "hint"), [(256, 0), (128, 128), (192, 192), (40, 40)])
@pytest.mark.parametrize("has_past", [False, True])
def test_rows_travel_once(row_nbytes: int, hint: int, has_past: bool) -> None:
    part = batch(row_nbytes, 3 * PIECE // row_nbytes, 1500)
    messages = messages_of(part, hint, has_past=has_past)
    assert {message[8] for message in messages} == {Kind.ROWS_FRAME}
    assert decoded(messages, part.size).tobytes() == part.tobytes()
    plain = messages_of(batch(row_nbytes, 100, 100), hint)
    assert plain[0].size * 0.9 > sum(one.size for one in messages) / part.size * 100 * row_nbytes
    if has_past:  # later pieces find most of their rows in the first one
        assert messages[1].size < messages[0].size * 0.7


def test_rows_that_cannot_be_packed_travel_as_they_are() -> None:
    rows = np.random.default_rng(2).integers(0, 256, (50, 64), dtype=np.uint8)
    part = rows[np.random.default_rng(3).integers(0, 50, 9000)].reshape(-1)
    (message,) = messages_of(part)
    assert message[8] == Kind.ROWS
    assert message.size < 3200 + 9000 * 12 / 8
    assert decoded([message], part.size).tobytes() == part.tobytes()


def test_rows_of_zeros_travel_once_without_earlier_pieces() -> None:
    part = batch(256, 12_000, 12_000).reshape(-1, 256).copy()
    part[np.random.default_rng(4).random(12_000) < 0.7] = 0
    part = part.reshape(-1)
    messages = messages_of(part, has_past=False)
    memory = np.empty(PIECE, np.uint8)
    for start, message in zip(range(0, part.size, PIECE), messages, strict=True):
        piece = memory[: min(PIECE, part.size - start)]
        decode_piece(message, "BF16", piece, 1)
        assert piece.tobytes() == part[start : start + PIECE].tobytes()
    assert sum(message.size for message in messages) < part.size * 0.3


def test_a_piece_that_was_there_before_is_tokens_alone() -> None:
    part = np.concatenate([batch(64, 16_384, 500)] * 2)
    first, second = messages_of(part)
    assert (first[8], second[8]) == (Kind.ROWS_FRAME, Kind.ROWS)
    assert second.size < 16_384 * 20 / 8
    assert decoded([first, second], part.size).tobytes() == part.tobytes()


def rows_message() -> tuple[ByteArray, ByteArray]:
    part = batch(64, 300, 20)
    (message,) = messages_of(part)
    assert message[8] == Kind.ROWS_FRAME
    return part, message


def test_every_flipped_bit_is_found() -> None:
    noise = np.random.default_rng(2).integers(0, 256, (9, 64), dtype=np.uint8)[np.arange(90) % 9]
    for message in (rows_message()[1], messages_of(noise.reshape(-1))[0]):
        assert message[8] in (Kind.ROWS, Kind.ROWS_FRAME)
        nbytes = 300 * 64 if message[8] == Kind.ROWS_FRAME else 90 * 64
        memory = np.empty(nbytes, np.uint8)
        step = max(1, message.size // 400)
        for at in [*range(HEAD_NBYTES + 64), *range(HEAD_NBYTES + 64, message.size, step)]:
            for bit in range(8):
                message[at] ^= 1 << bit
                with pytest.raises(CorruptionError):
                    decode_piece(message, "BF16", memory, 1)
                message[at] ^= 1 << bit
        for length in range(HEAD_NBYTES, message.size):
            with pytest.raises(CorruptionError):
                decode_piece(message[:length], "BF16", memory, 1)


def lying(message: ByteArray, at: int, value: bytes, kind: int | None = None) -> ByteArray:
    """A message with other bytes, and checksums that fit."""
    lie = message.copy()
    lie[at : at + len(value)] = np.frombuffer(value, np.uint8)
    if kind is not None:
        lie[8] = kind
    seal(lie)
    return lie


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (HEAD_NBYTES, b"\0\0"),  # no length of a row
        (HEAD_NBYTES, b"\x0f\0"),
        (HEAD_NBYTES, b"\xff\xff"),
        (HEAD_NBYTES, b"\x80\0"),  # other rows than the tokens are for
        (HEAD_NBYTES, b"\x20\0"),
        (HEAD_NBYTES + 2, b"\x40\0"),  # more skipped than a row
        (HEAD_NBYTES + 2, b"\x10\0"),
        (HEAD_NBYTES + 4, b"\0\0\0\0"),  # no tokens
        (HEAD_NBYTES + 4, b"\xff\xff\xff\xff"),
        (HEAD_NBYTES + 8, b"\x01"),  # the first row repeats one before
        (HEAD_NBYTES + 8, bytes(400)),  # nothing repeats
        (HEAD_NBYTES + 8, b"\xff" * 100),
    ],
)
def test_lies_with_right_checksums_are_found(at: int, value: bytes) -> None:
    part, message = rows_message()
    guard = np.full(part.size + 128, 0xA5, np.uint8)
    with pytest.raises(CorruptionError):
        decode_piece(lying(message, at, value), "BF16", guard[64:-64], 1)
    assert (guard[:64] == 0xA5).all()
    assert (guard[-64:] == 0xA5).all()


def test_a_piece_of_another_size_or_kind_is_found() -> None:
    part, message = rows_message()
    for nbytes in (part.size - 2, part.size + 2, part.size - 64, 64, 2):
        with pytest.raises(CorruptionError):
            decode_piece(message, "BF16", np.empty(nbytes, np.uint8), 1)
    with pytest.raises(CorruptionError):
        decode_piece(message, "F16", np.empty(part.size, np.uint8), 1)
    for kind in set(Kind) - {Kind.ROWS_FRAME}:
        with pytest.raises(CorruptionError):
            decode_piece(lying(message, 0, b"", kind), "BF16", np.empty(part.size, np.uint8), 1)


def test_a_repeat_of_an_earlier_piece_needs_it() -> None:
    part = np.concatenate([batch(64, 16_384, 500)] * 2)
    first, second = messages_of(part)
    memory = np.zeros(PIECE, np.uint8)
    decode_piece(first, "BF16", memory, 1)
    with pytest.raises(CorruptionError, match="do not make a piece"):
        decode_piece(second, "BF16", memory, 1)


@each("seed", range(300))
def test_random_tokens_write_nothing_beside_the_piece(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_nbytes, start = int(rng.integers(16, 80)), int(rng.integers(0, 200))
    stop = start + int(rng.integers(0, 2000))
    memory = np.full(stop + 64, 0xA5, np.uint8)
    memory[:start] = past = rng.integers(0, 256, start, dtype=np.uint8)
    tokens = rng.integers(0, 256, 8 * rng.integers(0, 9), dtype=np.uint8)
    tokens &= rng.integers(0, 256, tokens.size, dtype=np.uint8)  # fewer far repeats
    literals = int(rng.integers(0, stop - start + 100))
    skipped = int(rng.integers(0, row_nbytes + 2))
    _core.restore_rows(memory[:stop], start, literals, row_nbytes, skipped, tokens)
    assert (memory[:start] == past).all()
    assert (memory[stop:] == 0xA5).all()


def test_wrong_arguments_are_refused() -> None:
    part, slots = batch(64, 100, 9), np.zeros(16, np.uint64)
    tokens, room = np.empty(max_tokens_nbytes(part.size), np.uint8), np.empty_like(part)
    good = (part, 0, 64, True, slots, tokens, room)
    assert _core.find_repeats(*good)[0] > 0
    for i, value in ((1, part.size + 1), (2, 15), (2, 4097), (4, slots[:12]), (4, slots[:2]),
                     (5, tokens[:200]), (6, room[:-1])):  # fmt: skip
        with pytest.raises(ValueError, match=r"rows|piece|slots|tokens|literals"):
            _core.find_repeats(*good[:i], value, *good[i + 1 :])
    with pytest.raises(ValueError, match="outside"):
        _core.restore_rows(part, part.size + 1, 0, 64, 0, tokens)


def test_a_head_of_rows_must_be_whole() -> None:
    head = struct.pack("<IIB7s", 0, 0, Kind.ROWS, bytes(7))
    for kind in (Kind.ROWS, Kind.ROWS_FRAME):
        message = lying(np.frombuffer(head + bytes(7), np.uint8), 0, b"", kind)
        with pytest.raises(CorruptionError, match="too few for rows"):
            decode_piece(message, "BF16", np.empty(7, np.uint8), 1)
