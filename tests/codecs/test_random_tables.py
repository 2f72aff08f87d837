"""Tables of random formats against the slow coder; invalid formats, which the core refuses, too.

PACKHORSE_TABLE_SECONDS=600 tries new formats for ten minutes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from codec_battery import ISAS, forced
from random_tables import random_fields, random_format, random_rows

from packhorse import _core
from packhorse.codecs.table_plan import TableWay
from packhorse.codecs.tables import _fields_of, _why_invalid
from packhorse.host import load_table, pack_table, save_tables
from packhorse.reference.tables import decode_table, encode_table
from packhorse.table_layout import TableFormat

SECONDS = float(os.environ.get("PACKHORSE_TABLE_SECONDS", "0"))


def seeds(n: int) -> Iterator[int]:
    """Numbers 0 to n - 1; for longer runs others, by the clock."""
    yield from range(n)
    stop, seed = time.monotonic() + SECONDS, time.time_ns()
    while time.monotonic() < stop:
        yield (seed := seed + 1)


def check(seed: int, path: Path) -> None:
    rng = Random(seed)
    format = random_format(rng, 300 if seed % 8 else 1000)
    rows = random_rows(rng, format, rng.randint(1, 8 if len(format.values) > 64 else 40))
    slow, n = encode_table(rows, format), len(rows)
    np.testing.assert_array_equal(decode_table(slow, format), rows)
    ids = np.array([rng.randrange(n) for _ in range(n + 3)])
    at = np.array(rng.sample(range(n), rng.randint(0, n)), np.int64)
    new = random_rows(rng, format, len(at))
    for isa in ISAS:
        with forced(isa):
            table = pack_table(rows, way=TableWay(format, "", {}, 0.0, 0.0), threads=1)
            for name, array in table.arrays._asdict().items():
                assert array.tobytes() == getattr(slow, name).tobytes(), (isa, name)
            np.testing.assert_array_equal(table.gather(ids, threads=1), rows[ids], str(isa))
            table.update_(at, new)
            expected = rows.copy()
            expected[at] = new
            np.testing.assert_array_equal(table.gather(ids, threads=1), expected[ids], str(isa))
    save_tables({"t": table}, path, force=True)
    table.repack_()
    again = encode_table(expected, format)
    for each in (load_table(path), table):
        for name, array in each.arrays._asdict().items():
            assert array.tobytes() == getattr(again, name).tobytes(), name
        np.testing.assert_array_equal(each.gather(ids), expected[ids])


def test_any_valid_format(tmp_path: Path) -> None:
    for seed in seeds(24):
        try:
            check(seed, tmp_path / "t.safetensors")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {random_format(Random(seed))}") from error


def refuses(format: TableFormat) -> bool:
    """Whether the core refuses to pack two rows."""
    src = np.zeros((2, format.n_columns * format.element_bits // 8), np.uint8)
    rows, counts = np.zeros((2, format.stride), np.uint8), np.zeros(2, np.uint32)
    try:
        _core.pack_table_rows(*_fields_of(format), src, rows, counts, 1)
    except ValueError:
        return True
    return False


# The core does not look at fields that cannot make it leave a row or its output.
ONLY_PYTHON = (
    "codes or parts of elements",
    "values of more bits than elements",
    "values with a bit of the rest",
    "triples of more than 10 values",
    "a background or capacity",
    "a background of more bits than elements",
)


def test_python_and_the_core_refuse_the_same_formats() -> None:
    n_refused = 0
    for seed in seeds(1500):
        format = random_fields(Random(seed))
        words = _why_invalid(format)
        n_refused += words is not None
        if words is None or not words.endswith(ONLY_PYTHON):
            assert refuses(format) == (words is not None), (seed, words, format)
    assert n_refused > 500
