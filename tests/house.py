"""Who imports whom: the modules of the package, their layers, arrows that point up, and circles.

    python tests/house.py           # what there is, counted
    python tests/house.py --paths   # and how deep the calls of three verbs go
    python tests/house.py --write   # writes the tables of files in docs/architecture.md

An import counts wherever it is in a file: at the top, in a function, or as a string with the full
name of one of our modules, by which it is imported later.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "packhorse"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """`packhorse.storage.atomic` for a file; a package's name for its `__init__.py`."""
    parts = ("packhorse", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def imports_of(path: Path, *, types: bool = True) -> tuple[str, ...]:
    """Full names of what a file imports: modules, or names in them, ours and others'.

    Args:
        path: the file.
        types: whether imports that only type checkers see count.
    """
    return tuple(_imports_of(path, types))


def _imports_of(path: Path, types: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    skipped = set() if types else {id(node) for node in _for_checkers(tree)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in MODULES and node.value != "packhorse":
                yield node.value
        elif _is_loaded_by_name(node):
            yield "packhorse"


def _for_checkers(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


def _is_loaded_by_name(node: ast.AST) -> bool:
    """`sys.modules["packhorse"]`, `import_module("packhorse")` and the like."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node) in ("sys.modules['packhorse']", "modules['packhorse']")
    if not isinstance(node, ast.Call) or not node.args:
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    return name in ("import_module", "import_late") and ast.unparse(node.args[0]) == "'packhorse'"


def ours(name: str) -> str | None:
    """The module of ours that has an imported name, or is it."""
    if name.split(".")[0] != "packhorse":
        return None
    if name.startswith("packhorse._core"):
        return "packhorse._core"
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@cache
def arrows() -> Mapping[str, frozenset[str]]:
    """What each module imports of ours when the program runs."""
    found = {}
    for name, path in MODULES.items():
        targets = {ours(other) for other in imports_of(path, types=False)}
        found[name] = frozenset(target for target in targets if target not in (None, name))
    return found  # type: ignore[return-value]


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def upward() -> list[tuple[str, str]]:
    """Imports from a higher layer: the importing module, and the imported one."""
    return sorted(
        (name, other)
        for name, others in arrows().items()
        for other in others
        if layer_of(other) > layer_of(name)
    )


# Layers: an arrow may point down or stay where it is, but not from one hop to another.

LAYERS = {
    "_version": 0,
    "errors": 0,
    "late_import": 0,
    "layout": 0,
    "table_layout": 0,
    "process": 0,
    "threads": 0,
    "_core": 1,
    "bits": 2,
    "codecs": 2,
    "kernels": 2,
    "arguments": 3,
    "frame": 3,
    "framework": 3,
    "huge_pages": 3,
    "read_only_rows": 3,
    "reference": 3,
    "torch_dtypes": 3,
    "torch_framework": 3,
    "zarr_dtypes": 3,
    "storage": 4,
    "disk": 5,
    "host": 5,
    "device": 5,
    "gpu": 4,
    "wire": 5,
    "cli": 6,
    "integrations": 6,
    "learn": 6,
    "reports": 6,
    "numpy": 6,
    "torch": 6,
    "torch_models": 6,
    "h5py": 6,
    "lightning": 6,
    "pyg": 6,
    "torchrec": 6,
    "lmcache": 6,
    "numcodecs": 6,
    "transformers": 6,
    "zarr": 6,
    "": 6,
    "__main__": 6,
}
SHARED, HOPS = 4, 5


def part_of(module: str) -> str:
    """The first name below the package; "" for the package itself."""
    return "".join(module.split(".")[1:2])


def layer_of(module: str) -> int:
    """The layer that a module lies in."""
    return LAYERS[part_of(module)]


def between_hops() -> list[tuple[str, str]]:
    """Arrows from one hop to another."""
    return sorted(
        (name, other)
        for name, others in arrows().items()
        for other in others
        if layer_of(name) == layer_of(other) == HOPS and part_of(name) != part_of(other)
    )


# State of the process: names in modules whose values change, and results that functions keep.

_STATE_TYPES = {
    *("set", "deque", "defaultdict", "Counter", "WeakSet", "WeakKeyDictionary"),
    *("WeakValueDictionary", "Lock", "RLock", "Condition", "Event", "local", "ContextVar"),
}


def process_state() -> list[str]:
    """State that outlives a call: `late_import._importing` is an example of a variable,
    `storage.rename._system_call` of a function that keeps its results."""
    found = set()
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        locals_ = {node.name for node in tree.body if _is_local(node)}  # type: ignore[attr-defined]
        names = {name for node in ast.walk(tree) for name in _rebound(node)}
        names |= {name for node in tree.body for name in _kept(node, locals_)}
        found |= {f"{module.removeprefix('packhorse.')}.{name}" for name in names}
    return sorted(found)


def _is_local(node: ast.stmt) -> bool:
    """Whether a statement makes a class of variables that each thread has for itself."""
    return isinstance(node, ast.ClassDef) and "local" in map(_last_name, node.bases)


def _rebound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Global):
        yield from node.names
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
        if {"cache", "lru_cache"} & set(map(_last_name, decorators)):
            yield node.name


def _kept(node: ast.stmt, local_types: set[str]) -> Iterator[str]:
    """The variable that a statement of a module sets to something that can change."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return
    name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    value = node.value
    if isinstance(value, ast.Call):
        callee = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        can_change = _last_name(callee) in _STATE_TYPES | local_types
    else:
        can_change = isinstance(value, ast.List) or (isinstance(value, ast.Dict) and not value.keys)
    if can_change and name != "__all__":
        yield name


def _last_name(node: ast.expr) -> str:
    """`local` for `threading.local`."""
    return ast.unparse(node).rpartition(".")[2]


def registrars() -> list[str]:
    """Modules that ask Python to call them when the process forks or ends."""
    wanted = ("os.register_at_fork", "atexit.register", "atexit")
    return [name for name, path in MODULES.items() if set(wanted) & set(_uses(path))]


def _uses(path: Path) -> Iterator[str]:
    yield from imports_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


# The C++ core: a folder may include those before it, and itself.

CORE_FOLDERS = (
    *(
        "common",
        "planes",
        "rans",
        "chunk",
        "delta",
        "matches",
        "nibbles",
        "tensor",
        "frame",
        "rows",
    ),
    *("tables", "bounded", "repeats", "bags", "bind"),
)
_INCLUDE = re.compile(r'^#include "([a-z_0-9]+)/', re.M)


def core_upward() -> list[tuple[str, str]]:
    """Files of the core that include from a folder after their own in the order, and that
    folder."""
    return sorted(
        (str(path.relative_to(ROOT)), other)
        for path in files_below(ROOT / "csrc")
        for other in _INCLUDE.findall(path.read_text())
        if CORE_FOLDERS.index(other) > CORE_FOLDERS.index(path.parent.name)
    )


def misnamed_avx512() -> list[str]:
    """Files of the core that have loops of AVX-512 but no name that says so."""
    return [
        str(path.relative_to(ROOT))
        for path in files_below(ROOT / "csrc")
        if "m512" in path.read_text() and not path.stem.endswith("_avx512")
    ]


# The table of files in docs/architecture.md: the first sentence of each file.

PAGE = ROOT / "docs" / "architecture.md"
_MARKS = ("<!-- files: python tests/house.py --write -->", "<!-- end of files -->")
FOLDERS = ("src/packhorse", "csrc", "tests", "benchmarks", "fuzz", "examples")
_SENTENCE = re.compile(r"(.*?[^.])(?:\.(?=\s+[A-Z`])|\.?$)", re.S)


@cache
def purpose_of(path: Path) -> str:
    """The first sentence of a file, without its full stop."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = takewhile(lambda line: line.startswith("//"), text.splitlines())
        text = "\n".join(line[2:].strip() for line in lines)
    found = _SENTENCE.match(text.split("\n\n")[0].strip())
    return " ".join(found[1].split()) if found else ""


def tables() -> str:
    """A table for each folder that holds code."""
    return "\n".join(text for top in FOLDERS for text in _tables_below(ROOT / top))


def files_below(top: Path) -> list[Path]:
    """Files of code in a folder and those below it."""
    return sorted(path for path in top.rglob("*") if path.suffix in (".py", ".hpp", ".cpp", ".cu"))


def _tables_below(top: Path) -> Iterator[str]:
    files = files_below(top)
    for folder in sorted({path.parent for path in files}):
        yield f"### `{folder.relative_to(ROOT)}/`\n\n| file | what it is |\n|---|---|"
        for path in (path for path in files if path.parent == folder):
            yield f"| `{path.name}` | {purpose_of(path)} |"
        yield ""


def page_with_tables() -> str:
    """docs/architecture.md as it should be."""
    before, _, rest = PAGE.read_text().partition(_MARKS[0])
    return f"{before}{_MARKS[0]}\n\n{tables()}\n{_MARKS[1]}{rest.partition(_MARKS[1])[2]}"


# How deep calls go.


def longest_path(call: Callable[[], object]) -> list[str]:
    """The deepest way of calls through functions of the package, of this thread."""
    way: list[str] = []
    longest: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal longest
        del argument
        module = frame.f_globals.get("__name__", "")
        if event not in ("call", "return") or not module.startswith("packhorse."):
            return
        if event == "call":
            way.append(f"{module.removeprefix('packhorse.')}:{frame.f_code.co_qualname}")
            longest = max(longest, list(way), key=len)
        elif way:
            way.pop()

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return longest


def measured_paths() -> dict[str, list[str]]:
    """The deepest ways of three verbs, each called a second time."""
    import numpy as np
    import torch

    from packhorse.device import pack_model_
    from packhorse.disk import SnapshotStore
    from packhorse.numpy import save_file

    found = {}
    tensors = {"w": np.random.default_rng(0).standard_normal((256, 256), np.float32)}
    with TemporaryDirectory() as folder, SnapshotStore(Path(folder) / "store") as store:
        save_file(tensors, Path(folder) / "file", threads=1)
        store.take("0", tensors)
        verbs = {
            "save_file": lambda: save_file(tensors, Path(folder) / "file", threads=1),
            "SnapshotStore.take": lambda: store.take("1", {"w": tensors["w"] + 1}),
        }
        found = {name: longest_path(verb) for name, verb in verbs.items()}
    model = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
    pack_model_(model)
    tokens = torch.zeros(1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        model(tokens)
        return found | {"a packed product": longest_path(lambda: model(tokens))}


def counts() -> dict[str, int]:
    """The structure of the package in numbers."""
    return {
        "modules": len(MODULES),
        "lines of Python": sum(len(path.read_text().splitlines()) for path in FILES),
        "imports of our own": sum(map(len, arrows().values())),
        "imports that point up": len(upward()),
        "imports between hops": len(between_hops()),
        "includes of the core that point up": len(core_upward()),
        "circles": len(circles(arrows())),
    }


def main() -> None:
    """Count, or write the tables of files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--paths", action="store_true", help="measure how deep calls go, too")
    parser.add_argument("--write", action="store_true", help="write the table of files")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page_with_tables())
        return
    for name, number in counts().items():
        print(f"{number:6,} {name}")
    for circle in circles(arrows()):
        print("circle:", *circle)
    for name, other in (*upward(), *between_hops()):
        print(f"{name} -> {other}")
    for name, way in measured_paths().items() if options.paths else ():
        print(f"{len(way):6} calls deep: {name}\n       " + " > ".join(way))


_Formatter = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
