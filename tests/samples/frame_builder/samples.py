"""One small frame for each mode, for the tests that damage them, and data to make more.

The samples of `DELTAS` have a base, which the built frame keeps.
"""

import random
import struct
from collections.abc import Callable

from frame_builder.codings import Classed, Coding, Constant, Palette, Rans, Stored, Zstd
from frame_builder.deltas import Base, Delta, DeltaEqual
from frame_builder.frames import BuiltFrame, Side, build_frame
from frame_builder.matches import Matches
from frame_builder.nibbles import Nibbles
from frame_builder.sparse import Sparse
from packhorse.layout import DTYPE_BY_NAME, ClassSource

__all__ = ["DELTAS", "SMALL", "side_of", "units_of_values"]


def units_of_values(n: int, unit_nbytes: int, n_values: int, seed: int = 0) -> bytes:
    """`n` units of at most `n_values` values, the first ones far more often than the last."""
    rng = random.Random(seed)
    values = [rng.randbytes(unit_nbytes) for _ in range(n_values)]
    return b"".join(values[min(int(rng.expovariate(0.4)), n_values - 1)] for _ in range(n))


def side_of(
    n_rows: int, n_columns: int, n_row_dims: int = 1, *, coding: Coding | None = None
) -> Side:
    """Side data that predict nothing: any are legal for any tensor."""
    rng = random.Random(n_rows)
    rows, columns = (bytes(rng.choices((9, 70, 71, 200), k=n)) for n in (n_rows, n_columns))
    return Side(rows, columns, n_row_dims, coding or Stored())


_SAMPLE = units_of_values(30, 2, 9)


_IDS = struct.pack("<40q", *[7, 900, 31, 900, 31, 900, 31, 7, -100, 12] * 4)
_PAIRS = bytes(b % 11 << 4 | b // 11 % 7 for b in units_of_values(40, 1, 20))
_SORTED = struct.pack("<40I", *[10_000_000 + 3 * i + i % 7 // 6 for i in range(40)])


def _bf16(*codings: Coding, **more: object) -> Callable[..., BuiltFrame]:
    split = 2 if len(codings) == 2 else 0
    given = {"codings": codings, "split": split, **more}
    return lambda **kwargs: build_frame(_SAMPLE, "BF16", (5, 6), **{**given, **kwargs})


SMALL: dict[str, Callable[..., BuiltFrame]] = {
    "stored": _bf16(Stored()),
    "constant": lambda **kw: build_frame(bytes(60), "BF16", (5, 6), codings=[Constant()], **kw),
    "palette": _bf16(Palette(2), Palette(4, has_escape=False)),
    "palette-raw": _bf16(Palette(1, raw_bits=5), Palette(0, has_escape=False, raw_bits=8)),
    "rans": _bf16(Rans(mapped=(1, 2, 3)), Rans(mapped=(7, 9))),
    "rans-carry": _bf16(Rans(mapped=(100, 101, 102), margin=(2, 0)), Stored()),
    "rans-raw": _bf16(Rans(raw_bits=3), Rans(raw_bits=7, raw_mask=0x7F)),
    "rans-wide": lambda **kw: build_frame(
        _SAMPLE[:20], codings=[Rans(mapped=tuple(range(40)), escape_frequency=2000)], **kw
    ),
    "rans-plain": lambda **kw: build_frame(
        _SAMPLE[:20], codings=[Rans(mapped=tuple(range(80)), escape_frequency=2000)], **kw
    ),
    "zstd": lambda **kw: build_frame(_SAMPLE, "I16", codings=[Zstd()], **kw),
    "matches": lambda **kw: build_frame(
        _IDS,
        "I64",
        codings=[Matches(2, base=(1 << 64) - 100, codings=[(Rans(), Palette(3))])],
        **kw,
    ),
    "matches-differences": lambda **kw: build_frame(
        _SORTED, "U32", codings=[Matches(1, True, base=2, before=9_999_998)], **kw
    ),
    "nibbles": lambda **kw: build_frame(_PAIRS, codings=[Nibbles()], **kw),
    "nibbles-of-words": lambda **kw: build_frame(
        _PAIRS, "I32", codings=[Nibbles(3, mapped=(2, 3, 4, 5), margin=(1, 2))], **kw
    ),
    "lead": _bf16(Palette(2), Classed(thresholds=(40, 150), raw_bits=4)),
    "prediction": _bf16(
        Classed(source=ClassSource.PREDICTION, raw_bits=5),
        Stored(),
        side=side_of(5, 6, coding=Palette(2)),
    ),
    "empty": lambda **kw: build_frame(b"", "F64", (0, 3), codings=[Stored()], **kw),
}


def _near(data: bytes, unit_nbytes: int, seed: int = 0) -> bytes:
    """Units close to those of `data`, except for a few that are far away."""
    rng = random.Random(seed)
    units = [data[i : i + unit_nbytes] for i in range(0, len(data), unit_nbytes)]
    most = 1 << 8 * unit_nbytes
    near = []
    for unit in units:
        step = rng.getrandbits(8 * unit_nbytes) if rng.random() < 0.1 else int(rng.gauss(0, 9))
        near.append((int.from_bytes(unit, "little") + step) % most)
    return b"".join(value.to_bytes(unit_nbytes, "little") for value in near)


def _delta(dtype: str, *, split: int, n: int = 30, **given: object) -> Callable[..., BuiltFrame]:
    """A frame of `n` units beside its base."""
    data = units_of_values(n, DTYPE_BY_NAME[dtype].unit_nbytes, 9)
    base = _near(data, DTYPE_BY_NAME[dtype].unit_nbytes)
    given = {"split": split, "base": Base(base, dtype), **given}
    return lambda **kwargs: build_frame(data, dtype, **{**given, **kwargs})


def _of_f32(dtype: str) -> Callable[..., BuiltFrame]:
    """Thirty values, and an F32 base near them."""
    rng = random.Random(1)
    base = struct.pack("<30f", *[rng.gauss(0, 1) for _ in range(30)])
    data = _near(Base(base, "F32").units(dtype), 2)
    given = {"codings": [Delta(thresholds=(124,))], "split": 2, "base": Base(base, "F32")}
    return lambda **kwargs: build_frame(data, dtype, (5, 6), **{**given, **kwargs})


def _few_changed(data: bytes, unit_nbytes: int) -> bytes:
    """Units that are those of `data`, except for one in three, which are near them."""
    near = _near(data, unit_nbytes)
    steps = range(0, len(data), unit_nbytes)
    return b"".join((data if i // unit_nbytes % 3 else near)[i : i + unit_nbytes] for i in steps)


def _sparse(
    dtype: str, *codings: Coding, split: int, n: int = 30, base: str | None = None
) -> Callable[..., BuiltFrame]:
    """A frame of `n` units that differs from its base in few of them."""
    row = DTYPE_BY_NAME[base or dtype]
    given_base = Base(units_of_values(n, row.unit_nbytes, 9), row.name)
    units, size = given_base.units(dtype), DTYPE_BY_NAME[dtype].unit_nbytes
    given = {"split": split, "base": given_base, "codings": codings}
    return lambda **kwargs: build_frame(_few_changed(units, size), dtype, **{**given, **kwargs})


_CHUNKS = ([Delta(3)], [Stored(), Rans()], [Delta(shifts=(9,))])

DELTAS: dict[str, Callable[..., BuiltFrame]] = {
    "delta": _delta("BF16", split=2, codings=[Delta(thresholds=(100, 200), shifts=(2, 0, 3))]),
    "delta-whole": _delta("F32", split=0, codings=[Delta(mapped=(15, 16, 17), shifts=(11,))]),
    "delta-integers": _delta("I64", split=1, codings=[Delta(thresholds=(40, 62, 62))]),
    "delta-of-f32": _of_f32("F16"),
    "delta-equal": _bf16(DeltaEqual(), split=2, base=Base(_SAMPLE, "BF16")),
    "delta-beside-others": _delta("I16", split=1, n=150, codings=lambda chunk: _CHUNKS[chunk]),
    "sparse": _sparse("BF16", Sparse(thresholds=(9000, 20000), run_shifts=(0, 2, 255)), split=2),
    "sparse-whole": _sparse("F32", Sparse(gap_shifts=(1,), size_shifts=(7,)), split=0, n=200),
    "sparse-integers": _sparse("I64", Sparse(thresholds=(40, 1 << 62)), split=1),
    "sparse-full": _sparse("U8", Sparse(always_full=True), split=0, n=150),
    "sparse-of-f32": _sparse("F16", Sparse(thresholds=(9000,)), split=2, base="F32"),
}
