"""A fuzz target is compiled again when its sources changed, whatever the times of files say."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import run

TARGET = run.Target("one", "one.cpp", "one")
COMPILER = """#!{python}
import sys
text = "".join(open(path).read() for path in ("fuzz/one.cpp", "csrc/a/b.hpp"))
with open(sys.argv[sys.argv.index("-o") + 1], "w") as program, open(__file__ + ".log", "a") as log:
    program.write(text)
    log.write(text + " ")
sys.exit("a bad header" if "bad" in text else 0)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a source into a tree that has a compiler, which joins all sources and keeps a log."""

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable))
    compiler.chmod(0o755)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")
    monkeypatch.setattr(run, "COMPILER", str(compiler))
    write("fuzz/one.cpp", "1")
    write("csrc/a/b.hpp", "2")
    return write


def built() -> str | None:
    command = run.build(TARGET)
    return None if command is None else Path(command[0]).read_text()


def test_sources_decide_and_times_do_not(tmp_path: Path, write: Callable[[str, str], None]) -> None:
    assert built() == "12"
    os.utime(tmp_path / "csrc/a/b.hpp", (4e9, 4e9))  # as a new clone would
    assert built() == "12"
    write("csrc/a/b.hpp", "3")
    os.utime(tmp_path / "csrc/a/b.hpp", (0, 0))
    assert built() == "13"
    write("fuzz/one.cpp", "4")
    assert built() == "43"
    assert (tmp_path / "compiler.log").read_text() == "12 13 43 "


def test_other_flags_compile_again(
    tmp_path: Path, write: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    built()
    monkeypatch.setattr(run, "FLAGS", (*run.FLAGS, "-O2"))
    built()
    assert (tmp_path / "compiler.log").read_text() == "12 12 "


def test_what_does_not_compile_is_told_and_leaves_the_old_program(
    tmp_path: Path, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert built() == "12"
    write("csrc/a/b.hpp", "bad")
    assert built() is None
    assert capsys.readouterr().out == "one: it does not compile\na bad header\n\n"
    assert sorted(os.listdir(tmp_path / "build")) == ["one", "one.sha256"]
    write("csrc/a/b.hpp", "2")
    assert built() == "12"
    assert (tmp_path / "compiler.log").read_text() == "12 1bad "
