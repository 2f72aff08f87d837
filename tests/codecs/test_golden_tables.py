"""Packed tables of earlier releases (docs/format.md, section 14), which every later release must
read. Golden files are never edited.

`golden/tables/` has a file with tables of every mode and kind. `manifest.json` has the SHA-256 of
the file, and of the elements of each table. What an encoder writes for given fields is defined to
the bit, so packing the elements again must give the same file. After adding a case, name a new file
and write it with

    PYTHONPATH=tests/samples python tests/codecs/test_golden_tables.py --write-missing

which never touches an existing file, and refuses to write for an older version of the format.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from table_samples import named_tables

from packhorse.codecs.table_plan import TableWay
from packhorse.codecs.tables import decode_header, rank_marks
from packhorse.host import load_tables, pack_table, save_tables
from packhorse.reference.tables import TableArrays, decode_table
from packhorse.table_layout import TABLE_VERSION, TableFormat

FOLDER = Path(__file__).parents[1] / "golden" / "tables"
MANIFEST = FOLDER / "manifest.json"
VERSION = 1  # of tables in memory; a new one gets cases of its own, beside these
FILE = "all-kinds.safetensors"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cases() -> dict[str, tuple[NDArray[Any], TableFormat]]:
    return named_tables(9, 37)


def write_file(path: Path) -> None:
    tables = {
        name: pack_table(rows, way=TableWay(format, name, {}, 0.0, 0.0))
        for name, (rows, format) in cases().items()
    }
    save_tables(tables, path)


def write_missing() -> list[str]:
    """Writes missing files, and returns their names."""
    if TABLE_VERSION != VERSION:
        raise SystemExit(f"these cases are of version {VERSION}; add new ones for {TABLE_VERSION}")
    if (FOLDER / FILE).exists():
        return []
    FOLDER.mkdir(exist_ok=True)
    write_file(FOLDER / FILE)
    manifest = {
        "files": {FILE: sha256((FOLDER / FILE).read_bytes())},
        "tables": {name: sha256(rows.tobytes()) for name, (rows, _) in cases().items()},
    }
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return [FILE]


GOLDEN = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"files": {}, "tables": {}}


def test_no_golden_file_is_missing_changed_or_unknown() -> None:
    found = {path.name for path in FOLDER.iterdir()}
    assert found == {*GOLDEN["files"], MANIFEST.name}, "see the first lines of this file"
    for name, digest in GOLDEN["files"].items():
        assert sha256((FOLDER / name).read_bytes()) == digest, name
    assert GOLDEN["tables"].keys() == cases().keys()


@pytest.mark.parametrize("name", GOLDEN["files"])
def test_the_slow_coder_reads_every_table(name: str) -> None:
    parts = load_file(FOLDER / name)
    for table, digest in GOLDEN["tables"].items():
        part = {key: parts[f"{table}.{key}"] for key in ("table", "rows", "marks")}
        exceptions = [
            parts[f"{table}.exception_{key}"] for key in ("starts", "columns", "elements")
        ]
        header = decode_header(part["table"].tobytes())
        marks = part["marks"]
        arrays = TableArrays(part["rows"], marks, rank_marks(marks), *exceptions)
        assert sha256(decode_table(arrays, header.format).tobytes()) == digest, table


@pytest.mark.parametrize("name", GOLDEN["files"])
def test_every_table_is_loaded(name: str) -> None:
    for table, packed in load_tables(FOLDER / name).items():
        rows = packed.gather(np.arange(len(packed)))
        assert sha256(rows.tobytes()) == GOLDEN["tables"][table], table


def test_packing_again_gives_the_same_file(tmp_path: Path) -> None:
    write_file(tmp_path / FILE)
    assert sha256((tmp_path / FILE).read_bytes()) == GOLDEN["files"][FILE]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-missing", action="store_true", required=True)
    parser.parse_args()
    print("\n".join(write_missing()) or "nothing is missing")
