"""Section 6 of docs/format.md: the stream of a plane, decoded by its mode; palettes; Zstandard."""

import struct

import zstandard

from packhorse import layout
from packhorse.errors import CorruptionError
from packhorse.layout import Mode
from packhorse.reference.rans import Decoded, Place, decode_classed_rans, decode_rans
from packhorse.reference.symbols import (
    RawBits,
    join_raw_bits,
    read_bit_plane,
    read_escapes,
    read_raw_planes,
    resolve_escapes,
)
from packhorse.reference.words import Reader, equal, within, zero

__all__ = ["decode_stream", "decode_zstd"]


def decode_stream(reader: Reader, mode: Mode, place: Place) -> Decoded:
    """Decodes a plane, without the end that other streams carry, and the bytes that this stream
    carries."""
    if mode == Mode.RANS:
        return decode_rans(reader, place.n)
    if mode == Mode.CLASSED_RANS:
        return decode_classed_rans(reader, place)
    plane = _decode_plain(reader, mode, place)
    return Decoded(plane, plane)


def _decode_plain(reader: Reader, mode: Mode, place: Place) -> bytes:
    if mode == Mode.PALETTE:
        return _decode_palette(reader, place.n)
    if mode == Mode.ZSTD:
        return decode_zstd(reader, place.plane_nbytes, place.plane_nbytes)
    return reader.rest() * (place.n if mode == Mode.CONSTANT else 1)


def _decode_palette(reader: Reader, n: int) -> bytes:
    """Section 6.3."""
    head = reader.take(layout.PALETTE_HEADER_NBYTES, "bytes of the palette header")
    code_bits, has_escape, raw_bits, raw_mask, n_escapes, entries = struct.unpack("<BBBBI16s", head)
    within(code_bits, 0, layout.MAX_CODE_BITS, "code_bits", reader.start)
    within(has_escape, 0, min(code_bits, 1), "has_escape", reader.start + 1)
    raw = RawBits(raw_bits, raw_mask)
    raw.check(layout.MAX_PALETTE_RAW_BITS, reader.start + 2)
    if not has_escape:
        equal(n_escapes, 0, "n_escapes without has_escape", reader.start + 4)
    n_entries = (1 << code_bits) - has_escape
    palette = list(entries[:n_entries])
    within(max(palette), 0, raw.n_symbols - 1, "a symbol of the palette", reader.start + 8)
    zero(entries[n_entries:], "unused palette entries", reader.start + 8 + n_entries)
    planes = [read_bit_plane(reader, n, "bytes of a bit plane") for _ in range(code_bits)]
    low = read_raw_planes(reader, n, raw)
    escapes = read_escapes(reader, n_escapes, raw.n_symbols)
    equal(len(reader.rest()), 0, "number of bytes behind the escapes", reader.offset)
    codes = [sum(bits[i] << j for j, bits in enumerate(planes)) for i in range(n)]
    symbols: list[int | None] = [*palette, *[None] * has_escape]
    decoded = resolve_escapes([symbols[code] for code in codes], escapes, reader.start + 4)
    return join_raw_bits(decoded, low, raw)


def decode_zstd(reader: Reader, least: int, most: int) -> bytes:
    """Decodes one Zstandard frame, after a check of the content size that it declares."""
    frame = reader.rest()
    equal(frame[:4], zstandard.FRAME_HEADER, "Zstandard magic", reader.start)
    try:
        parameters = zstandard.get_frame_parameters(frame)
        equal(parameters.dict_id, 0, "Zstandard dictionary", reader.start)
        size = parameters.content_size  # 2^64 - 1 if the frame declares none
        within(size, least, most, "Zstandard content size", reader.start)
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"Zstandard frame at byte offset {reader.start}: {error}") from error
