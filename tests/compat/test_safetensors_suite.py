"""How the tests of safetensors are fetched, changed and judged. `make compat` runs them."""

import re
from pathlib import Path

import pytest
from compat.safetensors_suite import (
    EXPECTED,
    OTHER_FRAMEWORKS,
    ROOT,
    differences,
    fetch,
    substitute,
    table,
)


def test_names_that_we_have_are_replaced():
    changed = substitute(
        "import safetensors\n"
        "from safetensors import safe_open, SafetensorError as Error, serialize\n"
        "from safetensors.torch import _end_ptr, load_model, storage_ptr\n"
        "def test():\n    from safetensors.numpy import save_file as save\n"
    )
    assert changed.splitlines() == [
        "import safetensors",
        "from packhorse import open_file as safe_open",
        "from packhorse import PackhorseError as Error",
        "from safetensors import serialize",
        "from safetensors.torch import _end_ptr",
        "from packhorse.torch import load_model",
        "from safetensors.torch import storage_ptr",
        "",
        "def test():",
        "    from packhorse.numpy import save_file as save",
    ]


def test_every_difference_from_the_table_is_told():
    expected = {"a": "reads bytes", "b": "reads bytes", "gone": "reads bytes"}
    found = {"a": True, "b": False, "c": False, "d": True}
    assert list(differences(found, expected)) == [
        "a passes, but the table says that it reads bytes",
        "c fails, and the table gives no reason",
        "gone is in the table, but did not run",
    ]
    assert not list(differences(dict.fromkeys(EXPECTED, False), EXPECTED))


def test_tests_that_cannot_be_fetched_are_told_loudly(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"\*\*\* the tests of safetensors 0\.8\.0 DID NOT RUN"):
        fetch("0.8.0", tmp_path)


def test_continuous_integration_runs_them():
    assert re.search("^make compat", (ROOT / ".ci" / "run").read_text(), re.M)
    assert "tests/compat/safetensors_suite.py" in (ROOT / "Makefile").read_text()


def test_the_table_names_tests_of_ours_only():
    assert not [name for name in EXPECTED if name.partition("::")[0] in OTHER_FRAMEWORKS]


def test_the_page_lists_every_failure():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert table() in page
    assert f"these {len(EXPECTED)} fail" in page
