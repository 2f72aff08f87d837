"""The code on a page of docs/, which runs as it is printed."""

import re
from pathlib import Path

import pytest

__all__ = ["run_page"]

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all code of a page, one block after the other, in a folder."""
    monkeypatch.chdir(folder)
    text = (DOCS / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}", "exec"), names)
