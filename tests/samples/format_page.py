"""docs/format.md as the tests read it: sections, tables, and the clauses of section 9.1."""

import re
from pathlib import Path

from packhorse.errors import (
    BaseMismatchError,
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)

__all__ = ["PAGE", "clauses", "section", "table_cells"]

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
ERRORS = {
    "C": CorruptionError,
    "T": TruncationError,
    "X": CompatibilityError,
    "mismatch": BaseMismatchError,
}


def section(number: int) -> str:
    """A section with its heading and its subsections."""
    match = re.search(rf"^## {number}\..*?(?=^## \d|\Z)", PAGE, re.S | re.M)
    assert match
    return match[0]


def table_cells(text: str) -> list[list[str]]:
    """The cells of every line of every table."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def clauses() -> dict[str, set[type[PackhorseError]]]:
    """What a decoder must reject: the errors of each clause, by its number."""
    rows = [row for row in table_cells(section(9)) if re.fullmatch(r"[A-Z]\d+", row[0])]
    found = {row[0]: {ERRORS[word] for word in row[2].split(", ")} for row in rows}
    assert len(found) == len(rows), "a number stands twice"
    return found
