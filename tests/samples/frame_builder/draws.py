"""Random frames with a base, or of mode matches: some that the encoder could make, and many that it
never would."""

import random
import struct

from frame_builder.codings import Classed, Coding, Palette, Rans, Stored
from frame_builder.deltas import Base, Delta, DeltaEqual
from frame_builder.frames import BuiltFrame, build_frame
from frame_builder.matches import Matches
from frame_builder.nibbles import Nibbles
from frame_builder.samples import units_of_values
from frame_builder.sparse import Sparse
from packhorse.layout import DTYPES, DType, Mode

__all__ = [
    "draw_delta",
    "draw_delta_frame",
    "draw_matches_frame",
    "draw_nibbles_frame",
    "draw_sparse",
    "odd_floats",
]

N_CODES = (1, 2, 31, 32, 33, 62, 63, 64)
N_UNITS = (0, 1, 2, 30, 63, 64, 65, 100, 128, 200)


def odd_floats(rng: random.Random, n: int) -> bytes:
    """F32: NaNs, infinities, subnormals of all three dtypes, ties, and their neighbours."""
    exponents = (0, 1, 101, 102, 103, 112, 113, 127, 141, 142, 143, 254, 255)
    low = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    high = (0, 1, 0x3F, 0x40, 0x7E, 0x7F)
    values = [
        rng.getrandbits(1) << 31 | rng.choice(exponents) << 23 | rng.choice(high) << 16
        | rng.choice((*low, rng.getrandbits(16)))
        for _ in range(n)
    ]  # fmt: skip
    return struct.pack(f"<{n}I", *values)


def draw_delta(rng: random.Random, w: int) -> Delta:
    """Any legal stream of units of `w` bits."""
    n_classes = rng.randint(1, 8)
    most = rng.choice((8, w, 255))
    how: dict[str, object] = {
        "lanes_log": rng.randint(2, 7),
        "thresholds": tuple(sorted(rng.choices(range(most + 1), k=n_classes - 1))),
        "shifts": tuple(rng.choice((0, rng.randrange(w))) for _ in range(n_classes)),
        "always_full": rng.random() < 0.2,
        "turns": rng.choice((0, 0, 0, 1, -1)),
    }
    if rng.random() < 0.5:
        mapped = sorted(rng.sample(range(64), rng.choice(N_CODES)))
        how["mapped"] = tuple(mapped)
        how["margin"] = (rng.randint(0, mapped[0]), rng.randint(0, 63 - mapped[-1]))
        if len(mapped) < 64:
            how["escape_frequency"] = rng.choice((1, 50, 900, 3000))
    return Delta(**how)


def draw_sparse(rng: random.Random, w: int) -> Sparse:
    """Any legal stream of units of `w` bits, with sizes."""
    n_classes = rng.randint(1, 8)
    bits = [rng.randrange(w) for _ in range(n_classes - 1)]

    def shifts(*allowed: int) -> tuple[int, ...]:
        return tuple(rng.choice(allowed) for _ in range(n_classes))

    return Sparse(
        thresholds=tuple(sorted(rng.getrandbits(n) if n else 0 for n in bits)),
        gap_shifts=shifts(0, 1, rng.randrange(22), 21),
        run_shifts=shifts(0, 1, rng.randrange(22), 21, 255),
        size_shifts=shifts(0, rng.randrange(min(w, 59)), min(w - 1, 58)),
        always_full=rng.random() < 0.2,
    )


def _draw_units(rng: random.Random, row: DType, n: int) -> bytes:
    """A base's bytes."""
    if row.name in ("F32", "C64") and rng.random() < 0.5:
        return odd_floats(rng, n)
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(n * row.unit_nbytes)
    n_values = rng.choice((1, 9, 200))
    return units_of_values(n, row.unit_nbytes, n_values, seed=rng.getrandbits(32))


def _changed(rng: random.Random, data: bytes, size: int) -> bytes:
    """Units near those given, or equal, or any at all, as every 64 of them will have it."""
    most, out = 1 << 8 * size, b""
    for i in range(0, len(data), size):
        if i % (64 * size) == 0:
            spread = rng.choice((0, 1, 3, 12, 200, 1 << 20, 1 << 36, 1 << 62))
        unit = int.from_bytes(data[i : i + size], "little") + round(rng.gauss(0, spread))
        out += (unit % most).to_bytes(size, "little")
    return out


def _draw_codings(rng: random.Random, row: DType, split: int, equal: bool) -> list[Coding]:
    """The codings of one chunk."""
    if equal and rng.random() < 0.7:
        return [DeltaEqual()]
    if rng.random() < 0.3:
        return [draw_sparse(rng, 8 * row.unit_nbytes)]
    if rng.random() < 0.8:
        return [draw_delta(rng, 8 * row.unit_nbytes)]
    n_planes = row.unit_nbytes if split else 1
    one_byte = split or row.unit_nbytes == 1
    return [rng.choice((Stored(), Rans(), Palette())) if one_byte else Stored()] * n_planes


def draw_delta_frame(rng: random.Random) -> BuiltFrame:
    """A frame with a base, and chunks of both modes of differences and others."""
    row = rng.choice(DTYPES)
    split, n = int(rng.choice(row.splits)), rng.choice(N_UNITS)
    n -= n % (3 if row.bits == 6 else row.bits // 8 // row.unit_nbytes or 1)
    narrow = row.name in ("BF16", "F16") and rng.random() < 0.6
    base_row = next(other for other in DTYPES if other.name == "F32") if narrow else row
    base = Base(_draw_units(rng, base_row, n), base_row.name)
    units = base.units(row.name)
    data = _changed(rng, units, row.unit_nbytes)
    chunk_log = rng.choice((6, 6, 6, 7, 9))
    step = row.unit_nbytes << chunk_log
    chunks = range(0, len(data), step)
    codings = [
        _draw_codings(rng, row, split, data[i : i + step] == units[i : i + step]) for i in chunks
    ]
    how = {"split": split, "chunk_log": chunk_log, "base": base}
    return build_frame(data, row.name, codings=lambda chunk: codings[chunk], **how)


def draw_matches(rng: random.Random, size: int, n: int) -> tuple[bytes, Matches]:
    """Any legal chunk of `n` units of `size` bytes, and how it is coded."""
    number_nbytes = rng.choice([k for k in (1, 2, 4, 8) if k <= size])
    modulus, differences = 1 << 8 * size, rng.random() < 0.3
    base, before = rng.getrandbits(8 * size), rng.getrandbits(8 * size) if differences else 0
    values = [rng.getrandbits(8 * number_nbytes) for _ in range(rng.choice((1, 4, 60)))]
    units, unit = b"", before
    for _ in range(n):
        unit = (rng.choice(values) + base + differences * unit) % modulus
        units += unit.to_bytes(size, "little")
    bytewise = (Stored(), Rans(lanes_log=2), Rans(lanes_log=3), Palette(), Palette(2, raw_bits=3))
    codings = [[rng.choice(bytewise) for _ in range(planes)] for planes in (number_nbytes, 4, 1, 1)]
    if number_nbytes > 1 and codings[0][0].mode != Mode.STORED:
        codings[0][1] = Classed(thresholds=(40, 150), raw_bits=4)
    matches = rng.choice((None, None, ()))
    return units, Matches(number_nbytes, differences, base, before, matches, codings)


def draw_matches_frame(rng: random.Random) -> BuiltFrame:
    """A frame of whole units, some chunks of which have mode matches."""
    row = rng.choice([row for row in DTYPES if row.bits == 8 * row.unit_nbytes])
    chunk_log = rng.choice((6, 6, 7, 9))
    data, codings = b"", []
    for n in [1 << chunk_log] * rng.choice((0, 0, 1, 2)) + [rng.randint(1, 1 << chunk_log)]:
        units, coding = draw_matches(rng, row.unit_nbytes, n)
        data += units
        codings.append([coding if rng.random() < 0.9 else Stored()])
    how = {"split": 0, "chunk_log": chunk_log}
    return build_frame(data, row.name, codings=lambda chunk: codings[chunk], **how)


def _draw_nibbles(rng: random.Random) -> Nibbles:
    """Any legal model: of all halves that occur or of some, with a wider range, for any lanes."""
    lanes_log = rng.choice((2, 2, 3, 4, 5, 6, 7))
    if rng.random() < 0.4:
        return Nibbles(lanes_log)
    mapped = tuple(sorted(rng.sample(range(16), rng.randint(2, 9))))
    room = (rng.randint(0, mapped[0]), rng.randint(0, 15 - mapped[-1]))
    return Nibbles(
        lanes_log, mapped=mapped, escape_frequency=rng.choice((1, 90, 2000)), margin=room
    )


def draw_nibbles_frame(rng: random.Random) -> BuiltFrame:
    """A frame of whole units, most chunks of which have mode nibbles."""
    row = rng.choice([row for row in DTYPES if row.bits == 8 * row.unit_nbytes])
    chunk_log = rng.choice((6, 6, 7, 9))
    data, codings = b"", []
    for n in [1 << chunk_log] * rng.choice((0, 0, 1, 2)) + [rng.randint(1, 1 << chunk_log)]:
        halves = [min(15, int(rng.expovariate(rng.choice((0.2, 1))))) for _ in range(2)]
        halves += rng.choices(range(16), k=2 * n * row.unit_nbytes - 2)
        data += bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
        codings.append([_draw_nibbles(rng) if rng.random() < 0.9 else Stored()])
    how = {"split": 0, "chunk_log": chunk_log}
    return build_frame(data, row.name, codings=lambda chunk: codings[chunk], **how)
