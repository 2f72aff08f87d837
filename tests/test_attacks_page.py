"""Every attack of docs/attacks.md is a test, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

from cases import each

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "attacks.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| attack |")
]


@each("row", ROWS)
def test_an_attack_names_tests_that_are_there(row: list[str]) -> None:
    assert len(row) == 4
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", row[3])
    assert ", ".join(f"`{file}::{name}`" for file, name in named) == row[3].rstrip(" |")
    for file, name in named:
        assert name in functions(file)


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_every_part() -> None:
    assert len(ROWS) > 40
    for heading in ("Damage", "False headers", "Bombs", "Memory", "Threads and processes"):
        assert f"## {heading}\n" in PAGE.read_text()
