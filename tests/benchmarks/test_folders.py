"""The folders of benchmarks/: which folder may import which, without circles."""

import re
from pathlib import Path

import pytest
from house import circles, imports_of

ROOT = Path(__file__).resolve().parents[2]
# The folders that a folder may import besides itself. "" stands for the commands, which nothing
# imports.
ALLOWED = {
    "common": set(),
    "data": {"common"},
    "codecs": {"common", "data"},
    "snapshots": {"common", "data", "codecs"},
    "layers": {"common", "data", "codecs"},
    "gpu": {"common", "data", "codecs"},
    "shelf": {"common", "data", "codecs"},
    "host": {"common", "data", "codecs"},
    "learn": {"common", "data"},
    "wire": {"common", "data", "codecs"},
    "study": {"common", "data"},
    "": {
        *("common", "data", "codecs", "snapshots", "layers", "gpu", "shelf", "host", "learn"),
        *("wire", "study"),
    },
}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The command gpu.py has the name of the folder, which Python prefers.
MODULES = {_name(path): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
MODULES["benchmarks.gpu"] = ROOT / "benchmarks" / "gpu" / "__init__.py"


def _imports(path: Path) -> set[str]:
    """The modules of `benchmarks` that a file imports."""
    found = set()
    for name in imports_of(path, types=False):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", "benchmarks"}


def _folder(module: str) -> str:
    path = MODULES[module].relative_to(ROOT / "benchmarks")
    return path.parts[0] if len(path.parts) > 1 else ""


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_import_only_what_they_may(folder: str) -> None:
    inside = [path for name, path in MODULES.items() if _folder(name) == folder]
    assert inside
    used = {_folder(other) for path in inside for other in _imports(path)}
    assert used <= {folder, *ALLOWED[folder]}


def test_every_folder_is_named_here() -> None:
    assert set(ALLOWED) == {_folder(name) for name in MODULES}


def test_there_are_no_circles() -> None:
    graph = {name: _imports(path) - {name} for name, path in MODULES.items()}
    assert circles(graph) == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.name)
def test_a_command_says_how_it_is_run(path: Path) -> None:
    if path.name != "__init__.py":
        assert re.search(rf"`(\S+/)?python benchmarks/{path.name}", path.read_text())
        assert f"`{path.name}" in (ROOT / "benchmarks" / "README.md").read_text()
