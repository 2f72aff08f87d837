"""docs/shelf.md: its code runs as it is printed, and it names what is there."""

import inspect
import re
from pathlib import Path

import pytest
from pages import run_page

from packhorse.disk import Shelf, ShelfTensor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "shelf.md").read_text()


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("shelf.md", tmp_path, monkeypatch)
    with Shelf("data.shelf", "r") as shelf:
        assert shelf["big"].shape == (1100, 784)
        assert shelf.verify() == []


def test_every_method_is_named() -> None:
    for thing in (Shelf, ShelfTensor):
        for name, value in vars(thing).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                assert re.search(rf"\b{name}\b", PAGE), f"{thing.__name__}.{name}"


def test_every_caveat_has_its_fix() -> None:
    (text,) = re.findall(r"^## Caveats$(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    caveats = re.findall(r"^(?=\*\*)", text, re.MULTILINE)
    assert len(caveats) == text.count("\n*Fix:* ") >= 10
