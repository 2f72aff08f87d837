"""Formats of packed tables by chance, valid and invalid, and rows for them."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse.table_layout import LIST_END, MAX_TABLE_COLUMNS, TableFormat, TableMode

__all__ = ["random_fields", "random_format", "random_rows"]

_WIDTHS = (8, 16, 32, 64)


def random_format(rng: Random, most_columns: int = 300) -> TableFormat:
    """A valid format: every field has any value that the page allows."""
    mode, bits = rng.choice(list(TableMode)), rng.choice(_WIDTHS)
    n_columns = rng.choice([rng.randint(1, 24), rng.randint(60, 68), rng.randint(1, most_columns)])
    if mode is TableMode.RAW:
        return _with_stride(TableFormat(mode, bits, n_columns, rest_bits=bits), rng)
    if mode is TableMode.DENSE:
        code_bits = rng.randint(0, 8)
        has_sign, has_triples = rng.random() < 0.5, code_bits == 4 and rng.random() < 0.5
        least = max(int(has_sign), int(code_bits == 0))
        rests = [
            rest_bits
            for rest_bits in range(least, bits - code_bits + 1)
            if not has_triples or rest_bits % 8 <= 4
        ]
        if not rests:
            return random_format(rng, most_columns)
        rest_bits, others = rng.choice(rests), {"has_sign": has_sign, "has_triples": has_triples}
    else:
        packed_bits = rng.choice([0, 8, bits])
        code_bits = rng.randint(0, min(8, packed_bits))
        rest_bits = packed_bits - code_bits
        others = {
            "capacity": rng.choice([1, rng.randint(1, n_columns), n_columns]),
            "background": rng.choice([0, rng.getrandbits(bits)]),
            "has_row_value": packed_bits == 0 and rng.random() < 0.5,
        }
    shift = rng.choice([0, rng.randint(0, bits - rest_bits)])
    format = TableFormat(mode, bits, n_columns, (0,), rest_bits, shift, **others)
    values = [rng.getrandbits(bits) & ~format.rest_mask for _ in range(1 << code_bits)]
    if format.has_triples:
        values[10:] = values[:1] * 6
    return _with_stride(replace(format, values=tuple(values), stride=0), rng)


def _with_stride(format: TableFormat, rng: Random) -> TableFormat:
    return replace(format, stride=format.stride + 32 * rng.choice([0, 0, 0, 1, 5]))


def random_rows(rng: Random, format: TableFormat, n_rows: int) -> NDArray[Any]:
    """Rows of what the format can hold, and, in some tables, of what it cannot."""
    bits, shape = format.element_bits, (n_rows, format.n_columns)
    draw = np.random.default_rng(rng.getrandbits(32))
    kind = np.dtype(f"u{format.element_nbytes}")
    noise = draw.integers(0, (1 << bits) - 1, shape, kind, endpoint=True)
    values = np.array(format.values, kind)[draw.integers(0, len(format.values), shape)]
    rows = values | noise & kind.type(format.rest_mask)
    if format.is_sparse:
        rows = np.where(draw.random(shape) < rng.choice([0.02, 0.4, 1.0]), rows, format.background)
        rows = rows.astype(kind)
    if format.has_row_value:
        rows = np.where(rows == format.background, rows, noise[:, :1])
    return np.where(draw.random(shape) < rng.choice([0.0, 0.01, 0.5]), noise, rows)


def random_fields(rng: Random) -> TableFormat:
    """A format of which one or two fields were changed to any small number, so that most are
    invalid. Its rows are at most some kibibytes, whatever the fields say."""
    format = random_format(rng, 70)
    wild: dict[str, Any] = {
        "mode": rng.choice(list(TableMode)),
        "element_bits": rng.choice([*_WIDTHS, 24, 128]),
        "n_columns": rng.choice([0, 1, LIST_END, MAX_TABLE_COLUMNS, MAX_TABLE_COLUMNS + 1]),
        "values": tuple(rng.getrandbits(8) for _ in range(rng.choice([0, 1, 2, 3, 16, 256, 512]))),
        "rest_bits": rng.randint(0, 72),
        "shift": rng.randint(0, 72),
        "has_sign": rng.random() < 0.5,
        "capacity": rng.choice([0, 1, format.n_columns, format.n_columns + 1]),
        "background": rng.getrandbits(rng.choice([1, 8, 64])),
        "has_row_value": rng.random() < 0.5,
        "has_triples": rng.random() < 0.5,
        "stride": 32 * rng.randint(1, 80) + rng.choice([0, 0, 16]),
    }
    names = rng.sample(sorted(wild), rng.choice([0, 1, 1, 2]))
    return replace(format, **{name: wild[name] for name in names})
