"""One small frame for each mode, for the tests that damage them, and data to make more."""

import random
from collections.abc import Callable

from frame_builder.codings import Classed, Coding, Constant, Palette, Rans, Stored, Zstd
from frame_builder.frames import BuiltFrame, Side, build_frame
from packhorse.layout import ClassSource

__all__ = ["SMALL", "side_of", "units_of_values"]


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


def _bf16(*codings: Coding, side: Side | None = None) -> Callable[..., BuiltFrame]:
    split = 2 if len(codings) == 2 else 0
    given = {"codings": codings, "split": split, "side": side}
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
    "lead": _bf16(Palette(2), Classed(thresholds=(40, 150), raw_bits=4)),
    "prediction": _bf16(
        Classed(source=ClassSource.PREDICTION, raw_bits=5),
        Stored(),
        side=side_of(5, 6, coding=Palette(2)),
    ),
    "empty": lambda **kw: build_frame(b"", "F64", (0, 3), codings=[Stored()], **kw),
}
