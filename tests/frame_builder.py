"""A slow encoder that builds any legal frame by hand, and any illegal one.

A test states how each plane is to be coded; nothing is chosen for it. No code is shared with the
package's encoder nor with `packhorse.reference`: there are only docs/format.md and the constants of
`packhorse.layout`. An `edit` hook changes a stream before lengths and checksums are made, so that a
lie survives every CRC; `lie` and `patch` change a finished frame and seal it again, or not.
"""

import base64
import json
import math
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash
import zstandard

from packhorse.layout import DTYPE_BY_NAME, DType, Mode, Split

__all__ = [
    "SMALL",
    "BuiltFrame",
    "Constant",
    "Palette",
    "Rans",
    "Raw",
    "Stored",
    "Zstd",
    "build_file",
    "build_frame",
    "crc32c",
    "hexdump",
    "original_file",
    "units_of_values",
]

FIELDS = {
    "magic": (0, "4s"),
    "version": (4, "B"),
    "dtype_code": (5, "B"),
    "n_dims": (6, "B"),
    "split": (7, "B"),
    "flags": (8, "H"),
    "level": (10, "B"),
    "chunk_log": (11, "B"),
    "header_nbytes": (12, "I"),
    "frame_nbytes": (16, "Q"),
    "content_hash": (24, "16s"),
    "n_chunks": (40, "I"),
    "header_crc": (44, "I"),
}


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


_CRC_OF_BYTE = [_crc_of_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def content_hash(data: bytes) -> bytes:
    leaves = [data[i : i + 262144] for i in range(0, len(data), 262144)]
    digests = [xxhash.xxh3_128(leaf).digest() for leaf in leaves]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128(b"".join(digests)).digest()


def pad64(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


# Codings: how one plane becomes a stream. `encode` gets the plane and the bytes to carry.


@dataclass(frozen=True)
class Stored:
    mode = Mode.STORED

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        return plane


@dataclass(frozen=True)
class Constant:
    mode = Mode.CONSTANT

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        assert plane == plane[:item_nbytes] * (len(plane) // item_nbytes)
        return plane[:item_nbytes]


@dataclass(frozen=True)
class Zstd:
    level: int = 3
    mode = Mode.ZSTD

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=self.level).compress(plane)


@dataclass(frozen=True)
class Raw:
    """A stream given as it is, legal or not."""

    mode: int
    stream: bytes

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        return self.stream


@dataclass(frozen=True)
class Palette:
    code_bits: int = 3
    has_escape: bool = True
    mode = Mode.PALETTE

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        n_entries = (1 << self.code_bits) - self.has_escape
        entries = [value for value, _ in Counter(plane).most_common(n_entries)]
        escape = n_entries
        codes = [entries.index(value) if value in entries else escape for value in plane]
        escapes = bytes(value for value in plane if value not in entries)
        assert self.has_escape or not escapes, "too many values for a palette without escape"
        head = struct.pack("<BBHI", self.code_bits, self.has_escape, 0, len(escapes))
        bits = b"".join(_bit_plane(codes, j) for j in range(self.code_bits))
        return head + bytes(entries).ljust(16, b"\0") + bits + escapes


def _bit_plane(codes: list[int], j: int) -> bytes:
    bits = sum((code >> j & 1) << i for i, code in enumerate(codes))
    return bits.to_bytes(8 * math.ceil(len(codes) / 64), "little")


@dataclass(frozen=True)
class Rans:
    """Attributes:
    lanes_log: log2 of the lanes.
    mapped: the values with codes of their own; None for all that occur.
    escape_frequency: None for 0 where no escape is needed, else about what is.
    frequencies: of the mapped values and the escape; None for about the counts.
    first_state: what every lane starts from (and a decoder ends in), without its carried bytes.
    """

    lanes_log: int = 2
    mapped: tuple[int, ...] | None = None
    escape_frequency: int | None = None
    frequencies: tuple[int, ...] | None = None
    first_state: int = 0x10000
    mode = Mode.RANS

    @property
    def n_carried(self) -> int:
        return 2 << self.lanes_log

    def encode(self, plane: bytes, item_nbytes: int, carried: bytes) -> bytes:
        symbols = sorted(set(plane) if self.mapped is None else set(self.mapped))
        escapes = bytes(value for value in plane if value not in symbols)
        frequencies = list(self.frequencies or self._fit(plane, symbols, len(escapes)))
        assert sum(frequencies) == 4096
        codes = [symbols.index(v) if v in symbols else len(symbols) for v in plane]
        states, words = _encode_codes(codes, frequencies, self, carried)
        symbol_map = sum(1 << value for value in symbols).to_bytes(32, "little")
        packed = sum(f << 12 * i for i, f in enumerate(frequencies))
        return b"".join(
            [
                struct.pack("<BBHI", self.lanes_log, 12, 0, len(escapes)),
                symbol_map,
                packed.to_bytes(math.ceil(1.5 * len(frequencies)), "little"),
                struct.pack(f"<{len(states)}I", *states),
                escapes + bytes(len(escapes) % 2),
                struct.pack(f"<{len(words)}H", *words),
            ]
        )

    def _fit(self, plane: bytes, symbols: list[int], n_escapes: int) -> list[int]:
        """Frequencies near the counts: at least 1 each, 4096 in all, two codes at least."""
        escape = self.escape_frequency
        if escape is None:
            escape = (
                0 if n_escapes == 0 and len(symbols) > 1 else max(1, n_escapes * 64 // len(plane))
            )
        counts = Counter(plane)
        total = max(1, sum(counts[symbol] for symbol in symbols))
        room = 4096 - escape - len(symbols)
        scaled = [1 + room * counts[symbol] // total for symbol in symbols]
        scaled[scaled.index(max(scaled))] += 4096 - escape - sum(scaled)
        return [*scaled, escape]


@lru_cache(maxsize=64)
def slot_lists(frequencies: tuple[int, ...]) -> list[list[int]]:
    """For each code of non-zero frequency, its slots in ascending order (docs/format.md, 6.4)."""
    present = [f for f in frequencies if f]
    if len(present) > 32:
        starts = [sum(present[:code]) for code in range(len(present))]
        return [list(range(a, a + f)) for a, f in zip(starts, present, strict=True)]
    rest = dict(enumerate(present + [0] * (32 - len(present))))
    own = dict.fromkeys(range(32), 128)
    other = {b: b for b in range(32)}
    low = [c for c in range(32) if rest[c] < 128]
    high = [c for c in range(32) if rest[c] > 128]
    while low:
        small = low.pop()
        own[small], other[small] = rest[small], high[-1]
        rest[high[-1]] -= 128 - rest[small]
        if rest[high[-1]] < 128:
            low.append(high.pop())
        elif rest[high[-1]] == 128:
            high.pop()
    slots: list[list[int]] = [[] for _ in range(32)]
    for slot in range(4096):
        bucket, o = divmod(slot, 128)
        slots[bucket if o < own[bucket] else other[bucket]].append(slot)
    return slots


def _encode_codes(
    codes: list[int], frequencies: list[int], rans: Rans, carried: bytes
) -> tuple[list[int], list[int]]:
    """The inverse of section 6.4, so from the last unit to the first; returns states and words."""
    slots = slot_lists(tuple(frequencies))
    n_lanes = 1 << rans.lanes_log
    lows = struct.unpack(f"<{n_lanes}H", carried or bytes(2 * n_lanes))
    states = [rans.first_state + low for low in lows]
    words: list[int] = []
    for start in reversed(range(0, len(codes), n_lanes)):
        for lane in reversed(range(n_lanes)):
            unit = start + 4 * (lane % (n_lanes // 4)) + lane // (n_lanes // 4)
            if unit >= len(codes):
                continue
            f, owned, x = frequencies[codes[unit]], slots[codes[unit]], states[lane]
            if x >= f << 20:  # else the new state would not fit 32 bits
                words.append(x & 0xFFFF)
                x >>= 16
            states[lane] = (x // f << 12) + owned[x % f]
    return states, words[::-1]


Coding = Stored | Constant | Palette | Rans | Zstd | Raw
Edit = Callable[[int, int, bytes], bytes]


@dataclass
class BuiltFrame:
    """A frame's bytes and where things lie in it."""

    data: bytearray
    table_offset: int
    row_nbytes: int
    chunks: list[tuple[int, int]]  # offset and padded bytes of each
    streams: dict[tuple[int, int], tuple[int, int]]  # (chunk, plane) -> offset, bytes
    source: bytes = field(repr=False)

    def lie(self, *, seal: bool = True, **fields: int | bytes) -> "BuiltFrame":
        """Overwrite header fields by name; `seal` recomputes the header's CRC."""
        for name, value in fields.items():
            offset, code = FIELDS[name]
            struct.pack_into(f"<{code}", self.data, offset, value)
        return self.seal(chunks=False) if seal else self

    def patch(self, offset: int, replacement: bytes, *, seal: bool = True) -> "BuiltFrame":
        """Overwrite bytes anywhere; `seal` recomputes every CRC."""
        self.data[offset : offset + len(replacement)] = replacement
        return self.seal() if seal else self

    def patch_stream(
        self, plane: int, at: int, replacement: bytes, *, chunk: int = 0
    ) -> "BuiltFrame":
        return self.patch(self.streams[chunk, plane][0] + at, replacement)

    def seal(self, *, chunks: bool = True) -> "BuiltFrame":
        for index, (offset, nbytes) in enumerate(self.chunks if chunks else []):
            crc = crc32c(self.data[offset : offset + nbytes])
            struct.pack_into("<I", self.data, self.table_offset + index * self.row_nbytes, crc)
        struct.pack_into("<I", self.data, 44, 0)
        header_nbytes = self.table_offset + self.row_nbytes * len(self.chunks)
        crc = crc32c(self.data[: header_nbytes + -header_nbytes % 64])
        struct.pack_into("<I", self.data, 44, crc)
        return self

    def __bytes__(self) -> bytes:
        return bytes(self.data)


def split_planes(data: bytes, dtype: DType, split: int) -> list[bytes]:
    """Section 4, from the units' values."""
    size = dtype.unit_nbytes
    if split == Split.WHOLE:
        return [data]
    planes = [data[size - 1 - i :: size] for i in range(size)]
    if split == Split.FLOAT:
        shift = 4 if dtype.name == "F64" else 7
        tops = [high << 8 | low for high, low in zip(planes[0], planes[1], strict=True)]
        planes[0] = bytes(t >> shift & 0xFF for t in tops)
        low = (1 << shift) - 1
        planes[1] = bytes((t & low) | (t >> 8 & 0xFF & ~low) for t in tops)
    return planes


def _build_chunk(
    planes: list[bytes], codings: Sequence[Coding], item_nbytes: int, carry: bool
) -> list[bytes]:
    """The streams of one chunk, in plane order."""
    rans = [p for p, coding in enumerate(codings) if isinstance(coding, Rans)]
    stored = [p for p, coding in enumerate(codings) if coding.mode == Mode.STORED]
    n_carried = sum(codings[p].n_carried for p in rans) if carry and stored else 0
    if stored and n_carried > len(planes[stored[-1]]):
        n_carried = 0
    pool = planes[stored[-1]][-n_carried:] if n_carried else b""
    streams = []
    for p, (plane, coding) in enumerate(zip(planes, codings, strict=True)):
        carried, pool = (
            (pool[: coding.n_carried], pool[coding.n_carried :]) if p in rans else (b"", pool)
        )
        streams.append(coding.encode(plane, item_nbytes, carried))
    if n_carried:
        streams[stored[-1]] = streams[stored[-1]][:-n_carried]
    return streams


def build_frame(
    data: bytes,
    dtype: str = "U8",
    shape: Sequence[int] | None = None,
    *,
    codings: Sequence[Coding],
    split: int = 0,
    chunk_log: int = 6,
    level: int = 2,
    carry: bool = True,
    edit: Edit | None = None,
) -> BuiltFrame:
    """Build a frame of `data`.

    Args:
        data: the tensor's bytes.
        dtype: safetensors' name.
        shape: one dimension if None.
        codings: one for each plane, used in every chunk.
        split: section 4.
        chunk_log: log2 of the units of a chunk.
        level: the level byte.
        carry: let the rANS streams carry the end of the last stored plane, if it is long enough.
        edit: gets chunk, plane and stream, and returns the stream to write instead.

    Returns:
        The frame, sealed.
    """
    row = DTYPE_BY_NAME[dtype]
    shape = (len(data) * 8 // row.bits,) if shape is None else shape
    step = row.unit_nbytes << chunk_log
    item_nbytes = row.unit_nbytes if split == Split.WHOLE else 1
    table, payload, chunks = b"", b"", []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for c, start in enumerate(range(0, len(data), step)):
        planes = split_planes(data[start : start + step], row, split)
        streams = _build_chunk(planes, codings, item_nbytes, carry)
        streams = [edit(c, p, stream) for p, stream in enumerate(streams)] if edit else streams
        body = b""
        for p in sorted(range(len(streams)), key=lambda p: (codings[p].mode != Mode.STORED, p)):
            places[c, p] = (len(payload) + len(body), len(streams[p]))
            body += streams[p]
        chunks.append((len(payload), len(pad64(body))))
        payload += pad64(body)
        table += bytes(4)
        for coding, stream in zip(codings, streams, strict=True):
            table += struct.pack("<I", len(stream) | coding.mode << 24)
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    header = pad64(bytes(48) + dims + table)
    base = len(header)
    built = BuiltFrame(
        bytearray(header + payload),
        48 + len(dims),
        4 + 4 * len(codings),
        [(base + offset, nbytes) for offset, nbytes in chunks],
        {key: (base + offset, nbytes) for key, (offset, nbytes) in places.items()},
        data,
    )
    return built.lie(
        seal=False,
        magic=b"\x89PHF",
        version=1,
        dtype_code=row.code,
        n_dims=len(shape),
        split=split,
        level=level,
        chunk_log=chunk_log,
        header_nbytes=base,
        frame_nbytes=base + len(payload),
        content_hash=content_hash(data),
        n_chunks=len(chunks),
    ).seal()


def units_of_values(n: int, unit_nbytes: int, n_values: int, seed: int = 0) -> bytes:
    """`n` units of at most `n_values` values, the first ones far more often than the last."""
    rng = random.Random(seed)
    values = [rng.randbytes(unit_nbytes) for _ in range(n_values)]
    return b"".join(values[min(int(rng.expovariate(0.4)), n_values - 1)] for _ in range(n))


# One small frame for each mode, for the tests that damage them.

_SAMPLE = units_of_values(30, 2, 9)
SMALL: dict[str, Callable[..., BuiltFrame]] = {
    "stored": lambda **kw: build_frame(_SAMPLE, "BF16", (5, 6), codings=[Stored()], **kw),
    "constant": lambda **kw: build_frame(bytes(60), "BF16", (5, 6), codings=[Constant()], **kw),
    "palette": lambda **kw: build_frame(
        _SAMPLE, "BF16", codings=[Palette(2), Palette(4, has_escape=False)], split=2, **kw
    ),
    "rans": lambda **kw: build_frame(
        _SAMPLE, "BF16", codings=[Rans(mapped=(1, 2, 3)), Rans()], split=2, **kw
    ),
    "rans-carry": lambda **kw: build_frame(
        _SAMPLE, "BF16", codings=[Rans(), Stored()], split=2, **kw
    ),
    "rans-plain": lambda **kw: build_frame(
        _SAMPLE[:20], codings=[Rans(mapped=tuple(range(40)), escape_frequency=2000)], **kw
    ),
    "zstd": lambda **kw: build_frame(_SAMPLE, "I16", codings=[Zstd()], **kw),
    "empty": lambda **kw: build_frame(b"", "F64", (0, 3), codings=[Stored()], **kw),
}


# Files.


def original_file(
    tensors: dict[str, tuple[str, Sequence[int], bytes]],
    metadata: dict[str, str] | None = None,
    *,
    padding: int = 3,
) -> bytes:
    """A safetensors file as another writer might have made it, with an odd padding."""
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += data
    text = json.dumps(fields).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + body


def build_file(
    original: bytes,
    frames: dict[str, bytes],
    *,
    metadata: dict[str, str] | None = None,
    edit_record: Callable[[dict[str, object]], object] | None = None,
    edit_header: Callable[[dict[str, object]], object] | None = None,
    edit_text: Callable[[bytes], bytes] | None = None,
    edit_original: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """A packed file of ready frames; the hooks lie in the record, the header or their texts."""
    text = original[8 : 8 + struct.unpack_from("<Q", original)[0]]
    text = edit_original(text) if edit_original else text
    zipped = zstandard.ZstdCompressor(write_checksum=True).compress(text)
    record: dict[str, object] = {"version": 1, "header": base64.b64encode(zipped).decode()}
    if edit_record:
        edit_record(record)
    header: dict[str, object] = {
        "__metadata__": {**(metadata or {}), "packhorse": json.dumps(record)}
    }
    offset = 0
    for name, frame in frames.items():
        offsets = [offset, offset + len(frame)]
        header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": offsets}
        offset += len(frame)
    if edit_header:
        edit_header(header)
    json_text = json.dumps(header).encode()
    json_text += b" " * (-(8 + len(json_text)) % 64)
    json_text = edit_text(json_text) if edit_text else json_text
    return struct.pack("<Q", len(json_text)) + json_text + b"".join(frames.values())


def hexdump(data: bytes) -> str:
    """Lines of 16 bytes behind their offset; `*` stands for repetitions of the line above."""
    lines: list[str] = []
    previous, skipped = b"", False
    for offset in range(0, len(data), 16):
        line = data[offset : offset + 16]
        if line == previous and offset + 16 < len(data):
            skipped = True
            continue
        lines += ["*"] if skipped else []
        lines.append(f"{offset:04x}  {line.hex(' ')}")
        previous, skipped = line, False
    return "\n".join(lines)
