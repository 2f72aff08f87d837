"""Messages of pieces: each comes back as it was, and a damaged one is found."""

import ml_dtypes
import numpy as np
import pytest

from packhorse.codecs.base import ByteArray
from packhorse.errors import CorruptionError
from packhorse.layout import DTYPES, Level
from packhorse.wire.pieces import (
    HEAD_NBYTES,
    Kind,
    PieceEncoder,
    capacity_of,
    decode_piece,
    message_in,
)

WHOLE = [dtype.name for dtype in DTYPES if dtype.bits % 8 == 0]


def message_of(piece: ByteArray, dtype: str, level: Level | None = Level.DEFAULT) -> ByteArray:
    memory = np.empty(capacity_of(dtype, piece.size), np.uint8)
    length = PieceEncoder(dtype, level, 1).encode(piece, 0, memory)
    return memory[:length]


def weights(n: int) -> ByteArray:
    values = np.random.default_rng(n).normal(0, 0.02, n).astype(ml_dtypes.bfloat16)
    return values.view(np.uint8)


def noise(nbytes: int) -> ByteArray:
    return np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("nbytes", [16, 4096, 100_000, 1 << 20])
def test_a_piece_comes_back(dtype: str, nbytes: int) -> None:
    nbytes -= nbytes % 16
    for piece in (noise(nbytes), weights(nbytes // 2), np.zeros(nbytes, np.uint8)):
        for level in (None, Level.FAST, Level.DEFAULT):
            message = message_of(piece, dtype, level)
            assert message.size <= HEAD_NBYTES + nbytes
            longer = np.concatenate([message, noise(64)])
            assert message_in(longer, nbytes).tobytes() == message.tobytes()
            found = np.full(nbytes, 170, np.uint8)
            decode_piece(message, dtype, found, 1)
            assert found.tobytes() == piece.tobytes()


def test_kinds_are_chosen_by_what_they_save() -> None:
    assert message_of(noise(5000), "BF16")[8] == Kind.RAW
    assert message_of(weights(5000), "BF16")[8] == Kind.FRAME
    assert message_of(weights(5000), "BF16", None)[8] == Kind.UNCHECKED
    encoder, memory = PieceEncoder("BF16", Level.DEFAULT, 1), np.empty(20_000, np.uint8)
    kinds = []
    for piece in [noise(9000)] + [weights(4500)] * 9:
        encoder.encode(piece, 0, memory)
        kinds.append(Kind(memory[8]))
    assert kinds == [Kind.RAW] * 8 + [Kind.FRAME] * 2  # seven are not tried
    assert encoder.nbytes == 90_000
    assert encoder.encoded_nbytes < 90_000


@pytest.mark.parametrize("piece", [weights(1000), noise(200)], ids=["frame", "raw"])
def test_every_flipped_bit_is_found(piece: ByteArray) -> None:
    message, found = message_of(piece, "BF16"), np.empty(piece.size, np.uint8)
    step = max(1, message.size // 400)
    for at in [*range(HEAD_NBYTES + 64), *range(HEAD_NBYTES + 64, message.size, step)]:
        if at >= message.size:
            break
        for bit in range(8):
            message[at] ^= 1 << bit
            with pytest.raises(CorruptionError):
                decode_piece(message, "BF16", found, 1)
            message[at] ^= 1 << bit


@pytest.mark.parametrize("piece", [weights(1000), noise(200)], ids=["frame", "raw"])
def test_a_message_of_another_length_is_found(piece: ByteArray) -> None:
    message, found = message_of(piece, "BF16"), np.empty(piece.size, np.uint8)
    for length in range(HEAD_NBYTES, message.size):
        with pytest.raises(CorruptionError):
            decode_piece(message[:length], "BF16", found, 1)
    for longer in (np.concatenate([message, np.zeros(64, np.uint8)]),):
        with pytest.raises(CorruptionError):
            decode_piece(longer, "BF16", found, 1)


@pytest.mark.parametrize("length", [0, HEAD_NBYTES, HEAD_NBYTES + 401, 0xFFFFFFFF])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    message = message_of(noise(400), "BF16")
    message[4:8] = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
    with pytest.raises(CorruptionError, match=f"has {length} bytes, for a piece of 400 bytes"):
        message_in(message, 400)


def test_a_message_of_another_tensor_is_found() -> None:
    message = message_of(weights(1000), "BF16")
    for dtype, nbytes in (("F16", 2000), ("BF16", 1998), ("BF16", 2002)):
        with pytest.raises(CorruptionError):
            decode_piece(message, dtype, np.empty(nbytes, np.uint8), 1)


@pytest.mark.parametrize("seed", range(50))
def test_random_bytes_are_refused(seed: int) -> None:
    data = np.frombuffer(np.random.default_rng(seed).bytes(300), np.uint8).copy()
    data[9:16] = 0
    data[8] = seed % 2
    with pytest.raises(CorruptionError):
        decode_piece(data, "U8", np.empty(284, np.uint8), 1)
