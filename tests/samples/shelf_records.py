"""Changes records of a shelf behind its back, through LMDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

__all__ = ["TABLES", "change_record", "flip", "records_of", "with_tables"]

TABLES = ("meta", "names", "pointers", "chunks", "shares", "tags")


@contextmanager
def with_tables(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A write transaction, and the tables by name."""
    (path,) = folder.glob("*.mdb")
    env = lmdb.open(str(path), subdir=False, max_dbs=len(TABLES), map_size=1 << 30)
    try:
        tables = {name: env.open_db(name.encode(), create=False) for name in TABLES}
        with env.begin(write=True) as txn:
            yield txn, tables
    finally:
        env.close()


def records_of(folder: Path, table: str) -> list[tuple[bytes, bytes]]:
    """All records of a table."""
    with with_tables(folder) as (txn, tables):
        return [(bytes(key), bytes(value)) for key, value in txn.cursor(db=tables[table])]


def change_record(
    folder: Path, table: str, key: bytes, change: Callable[[bytes], bytes | None]
) -> None:
    """Change the value of a record, or remove the record."""
    with with_tables(folder) as (txn, tables):
        value = change(bytes(txn.get(key, db=tables[table])))
        if value is None:
            txn.delete(key, db=tables[table])
        else:
            txn.put(key, value, db=tables[table])


def flip(value: bytes, bit: int) -> bytes:
    """Flip one bit."""
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
