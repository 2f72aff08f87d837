"""Section 13.2 of docs/format.md: coded messages, decoded the slow way.

Like `bounded`, this module is written from the page alone. The streams of the pieces are those of
section 6.4, which `rans` decodes once a piece has its model put back.
"""

import struct
from typing import NamedTuple

import numpy as np

from packhorse import layout
from packhorse.errors import (
    BaseMismatchError,
    CompatibilityError,
    CorruptionError,
    TruncationError,
)
from packhorse.layout import (
    BOUNDED_ALIGNMENT,
    BOUNDED_CRC_OFFSET,
    BOUNDED_ENTRY,
    BOUNDED_HEADER,
    BOUNDED_VERSION,
    CODED_HEADER,
    CODED_MAGIC,
    CODED_PIECE,
    MAX_BOUNDED_BITS,
    MAX_CODED_BITS,
)
from packhorse.reference.bounded import codes_nbytes, pack_codes
from packhorse.reference.rans import decode_rans
from packhorse.reference.symbols import read_model
from packhorse.reference.words import Reader, crc32c, equal, within, zero

__all__ = ["decode_coded"]


class _CodeModel(NamedTuple):
    """The model of a segment: no bytes if it has none."""

    data: bytes = b""
    raw_bits: int = 0


class _Piece(NamedTuple):
    segment: int
    n: int
    bits: int


def decode_coded(coded: bytes, models: bytes = b"") -> tuple[bytes, bytes]:
    """The inner message, and the models that the next coded message may need.

    Args:
        coded: exactly the bytes of a coded message.
        models: those after the message before it; nothing before the first.

    Raises:
        TruncationError: bytes are missing at the end.
        CompatibilityError: the message is of a later version.
        BaseMismatchError: it needs other models than these.
        CorruptionError: it breaks another rule of the page.
    """
    has_models, n_pieces, models_nbytes, models_crc = _read_header(coded)
    reader = Reader(coded[CODED_HEADER.size :], CODED_HEADER.size)
    if has_models:
        models = reader.take(models_nbytes, "models")
        equal(crc32c(models), models_crc, "CRC of the models", CODED_HEADER.size - 4)
    elif (len(models), crc32c(models)) != (models_nbytes, models_crc):
        raise BaseMismatchError("coded message: it needs other models")
    sizes = struct.unpack(f"<{n_pieces}I", reader.take(4 * n_pieces, "lengths of pieces"))
    head, pieces = _read_head(reader)
    equal(n_pieces, len(pieces), "n_pieces", 8)
    inner_nbytes = BOUNDED_HEADER.unpack(head[: BOUNDED_HEADER.size])[7]
    n_tail = inner_nbytes - len(head) - sum(codes_nbytes(piece.n, piece.bits) for piece in pieces)
    within(n_tail, 0, len(coded), "length of the tail", reader.offset)
    tail = reader.take(n_tail, "bytes of the tail")
    by_segment = _read_models(models)
    codes = b"".join(
        _read_piece(reader, piece, size, by_segment)
        for piece, size in zip(pieces, sizes, strict=True)
    )
    equal(len(reader.rest()), 0, "number of bytes behind the pieces", reader.offset)
    return head + codes + tail, models


def _read_header(coded: bytes) -> tuple[bool, int, int, int]:
    """Whether there are models, the number of pieces, and length and CRC of the models."""
    if len(coded) < CODED_HEADER.size:
        raise TruncationError("coded message: it ends before its header does")
    fields = CODED_HEADER.unpack(coded[: CODED_HEADER.size])
    magic, version, has_models, reserved, n_pieces, crc, nbytes, models_nbytes, models_crc = fields
    equal(magic, CODED_MAGIC, "magic", 0)
    within(version, 1, 255, "version", 4)
    if version > BOUNDED_VERSION:
        raise CompatibilityError(f"coded message: version {version}")
    if len(coded) < nbytes:
        raise TruncationError("coded message: it is shorter than it declares")
    equal(len(coded), nbytes, "coded_nbytes", 16)
    within(has_models, 0, 1, "has_models", 5)
    zero(reserved, "reserved bytes", 6)
    zeroed = coded[:BOUNDED_CRC_OFFSET] + bytes(4) + coded[BOUNDED_CRC_OFFSET + 4 :]
    equal(crc32c(zeroed), crc, "CRC", BOUNDED_CRC_OFFSET)
    return bool(has_models), n_pieces, models_nbytes, models_crc


def _read_head(reader: Reader) -> tuple[bytes, list[_Piece]]:
    """The inner message up to its codes, and the pieces of these."""
    head = reader.take(BOUNDED_HEADER.size, "bytes of the inner header")
    n_segments = BOUNDED_HEADER.unpack(head)[5]
    table = reader.take(n_segments * BOUNDED_ENTRY.size, "bytes of the inner table")
    pieces = []
    for j, (n, *_, bits, _, _, _) in enumerate(BOUNDED_ENTRY.iter_unpack(table)):
        within(bits, 1, MAX_BOUNDED_BITS, "bits", reader.offset)
        starts = range(0, n, CODED_PIECE)
        pieces += [_Piece(j, min(CODED_PIECE, n - start), bits) for start in starts]
    padding = -(len(head) + len(table)) % BOUNDED_ALIGNMENT
    return head + table + reader.take(padding, "bytes of padding"), pieces


def _read_models(models: bytes) -> list[_CodeModel]:
    reader, found = Reader(models, 0), []
    while not reader.is_empty:
        nbytes, raw_bits, reserved = struct.unpack(
            "<HB1s", reader.take(4, "bytes of a model's head")
        )
        zero(reserved, "reserved bytes", reader.offset - 1)
        within(
            raw_bits, 0, layout.MAX_RANS_RAW_BITS if nbytes else 0, "raw_bits", reader.offset - 2
        )
        model = Reader(reader.take(nbytes, "bytes of a model"), 0)
        if nbytes:
            read_model(model, 1 << 8 - raw_bits)
            equal(len(model.rest()), 0, "number of bytes behind a model", reader.offset)
        found.append(_CodeModel(models[reader.offset - nbytes : reader.offset], raw_bits))
    return found


def _read_piece(reader: Reader, piece: _Piece, size: int, models: list[_CodeModel]) -> bytes:
    """The codes of a piece, as the inner message has them."""
    if size == 0:
        return reader.take(codes_nbytes(piece.n, piece.bits), "codes of a piece")
    at = reader.offset
    stream = reader.take(size, "bytes of a piece")
    model = models[piece.segment] if piece.segment < len(models) else _CodeModel()
    if not model.data or piece.bits > MAX_CODED_BITS:
        raise CorruptionError(f"the piece at byte offset {at} is coded, but has no model")
    within(len(stream), layout.MODEL_OFFSET, size, "length of a piece", at)
    equal(stream[2], model.raw_bits, "raw_bits of a piece", at + 2)
    front, rest = stream[: layout.MODEL_OFFSET], stream[layout.MODEL_OFFSET :]
    decoded = decode_rans(Reader(front + model.data + rest, at), piece.n)
    zero(decoded.carried, "carried bytes", at)
    within(max(decoded.plane), 0, (1 << piece.bits) - 1, "a code", at)
    return pack_codes(np.frombuffer(decoded.plane, np.uint8).astype(np.uint32), piece.bits)
