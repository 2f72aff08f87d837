"""The surface: exported names, who imports whom, what an import costs, and the README's code."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import packhorse

PACKAGE = Path(packhorse.__file__).parent
ROOT = Path(__file__).parent.parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(PACKAGE)], "packhorse.")
    if not info.name.endswith(("._core", ".__main__"))
)
PUBLIC = ["packhorse", *MODULES]
LIBRARY = [name for name in PUBLIC if not name.startswith("packhorse.cli")]


# Exported names.


@pytest.mark.parametrize("name", PUBLIC)
def test_all_names_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for export in module.__all__:
        assert hasattr(module, export), export


@pytest.mark.parametrize("name", LIBRARY)
def test_all_is_complete(name: str) -> None:
    """Of the library; the command is a program, and imported by nobody."""
    module = importlib.import_module(name)
    forgotten = {d for d in defined_names(module) if not d.startswith("_")} - set(module.__all__)
    assert not forgotten


def defined_names(module: ModuleType) -> Iterator[str]:
    """Names that the module's own top-level statements define."""
    for node in source_tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def source_tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text())


def test_the_package_shows_its_names_and_modules_only() -> None:
    shown = {name for name in dir(packhorse) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(packhorse, name), ModuleType)}
    own = {path.stem for path in PACKAGE.iterdir()}
    allowed = {"TYPE_CHECKING", "Any", "annotations", "import_late", "os"}
    assert shown - modules - allowed == set(packhorse.__all__) - {"__version__"}
    assert modules - {"os"} <= own


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_frameworks_have_the_same_verbs(framework: str) -> None:
    module = importlib.import_module(f"packhorse.{framework}")
    own = {"compress", "compress_all", "decompress", "decompress_all"}
    verbs = own | {"load", "load_file", "save", "save_file"}
    assert verbs < set(module.__all__)
    ours = importlib.import_module(f"safetensors.{framework}")
    assert {verb for verb in verbs if hasattr(ours, verb)} == verbs - own


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    undocumented = [what for what, thing in public_things(module) if not documented(thing)]
    assert not undocumented


def public_things(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        yield name, thing
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property | classmethod)
            ):
                yield f"{name}.{member}", value


def documented(thing: object) -> bool:
    text = thing.__doc__ or ""
    automatic = inspect.isclass(thing) and text.startswith(f"{thing.__name__}(")
    return bool(text.strip()) and not automatic


@pytest.mark.parametrize("name", ["packhorse.numpy", "packhorse.torch"])
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, raise_on_error=True)
    assert results.attempted >= 3


# Who imports whom.

LAYERS = {
    "errors": 0,
    "late_import": 0,
    "layout": 0,
    "threads": 0,
    "_core": 1,
    "codecs": 2,
    "kernels": 2,
    "arguments": 3,
    "frame": 3,
    "frame_base": 3,
    "frame_encode": 3,
    "frame_header": 3,
    "frame_zstd": 3,
    "many": 3,
    "torch_dtypes": 3,
    "torch_framework": 3,
    "reference": 3,
    "disk": 4,
    "disk.dcp": 5,
    "host": 4,
    "device": 4,
    "wire": 4,
    "cli": 5,
    "numpy": 5,
    "torch": 5,
    "lightning": 5,
    "transformers": 5,
    "": 5,
    "__main__": 5,
}
THIRD_PARTY = {
    "codecs": {"numpy", "xxhash", "zstandard"},
    "kernels": {"numpy", "torch", "triton"},
    "device": {"numpy", "safetensors", "torch", "transformers", "triton"},
    "frame": {"numpy"},
    "frame_base": {"numpy"},
    "frame_encode": {"numpy"},
    "frame_header": {"numpy"},
    "frame_zstd": {"numpy"},
    "reference": {"numpy", "xxhash", "zstandard"},
    "disk": {"numpy", "xxhash", "zstandard"},
    "numpy": {"numpy", "ml_dtypes"},
    "torch": {"torch"},
    "torch_dtypes": {"torch"},
    "torch_framework": {"torch"},
    "lightning": {"torch"},
    "transformers": {"accelerate", "numpy", "safetensors", "torch", "transformers"},
    "disk.dcp": {"fsspec", "numpy", "torch"},
    "cli": {"numpy", "rich", "typer"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The first name below the package that a file belongs to; "" for the package itself. The
    storage of PyTorch's checkpoints belongs to users of PyTorch, not to the hop that it lies in."""
    parts = path.relative_to(PACKAGE).parts
    first = parts[0].removesuffix(".py")
    if parts[:2] == ("disk", "dcp"):
        return "disk.dcp"
    return "" if first == "__init__" else first


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                below = (PACKAGE / alias.name).exists() or (PACKAGE / f"{alias.name}.py").exists()
                is_module = node.module == "packhorse" and (below or alias.name == "_core")
                yield f"packhorse.{alias.name}" if is_module else str(node.module)


def own_parts(path: Path) -> set[str]:
    names = {name for name in imports_of(path) if name.split(".")[0] == "packhorse"}
    return {name.split(".")[1] if "." in name else "" for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    for other in own_parts(path):
        assert LAYERS[other] <= LAYERS[part], f"{part or 'packhorse'} imports {other}"
        both_are_hops = LAYERS[other] == LAYERS[part] == 4
        assert not both_are_hops or other == part, f"hop {part} imports hop {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_imports_are_the_expected_ones(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports_of(path)}
    outside -= sys.stdlib_module_names | {"packhorse", "typing_extensions"}
    assert outside <= THIRD_PARTY.get(part_of(path), set())


@pytest.mark.parametrize("path", [path for path in FILES if LAYERS[part_of(path)] < 4], ids=str)
def test_nothing_below_the_hops_does_input_or_output(path: Path) -> None:
    doing = {"io", "mmap", "pathlib", "shutil", "socket", "subprocess", "tempfile", "urllib"}
    assert not doing & {name.split(".")[0] for name in imports_of(path)}
    calls = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    assert not {"open", "print", "exit"} & {call.id for call in calls if isinstance(call, ast.Name)}


def test_typing_extensions_is_for_type_checkers_only() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module != "typing_extensions", path


def test_the_architecture_page_lists_every_file() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `([^`]+\.(?:py|pyi|typed|hpp|cpp))` \|", page, re.M))
    files = {str(path.relative_to(PACKAGE)) for path in (*FILES, PACKAGE / "py.typed")}
    headers = {path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".hpp", ".cpp")}
    assert files | headers <= listed
    ours = {name for name in listed if (PACKAGE / name).parent.exists() and "/" in name}
    assert {
        name
        for name in ours
        if name.startswith(("codecs/", "device/", "disk/", "cli/", "reference/"))
    } <= files


# What an import costs.


def run_python(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


LIST_MODULES = "import sys; print(*{name.split('.')[0] for name in sys.modules})"


def test_importing_loads_only_what_is_needed() -> None:
    before = set(run_python(LIST_MODULES))
    loaded = set(run_python(f"import packhorse; {LIST_MODULES}")) - before
    outside = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert outside == {"packhorse"}


def test_frames_need_no_framework_but_numpy() -> None:
    before = set(run_python(LIST_MODULES))
    loaded = set(run_python(f"import packhorse; packhorse.Frame; {LIST_MODULES}")) - before
    outside = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert {"packhorse", "numpy"} <= outside
    assert outside <= {"packhorse", "numpy", "ml_dtypes", "xxhash", "zstandard", "nanobind"}


def test_numpy_users_never_load_torch() -> None:
    code = "import packhorse.numpy as n, numpy; n.decompress(n.compress(numpy.zeros(9)))"
    assert not {"torch", "typer", "rich"} & set(run_python(f"{code}; {LIST_MODULES}"))


def test_the_hop_to_disk_loads_torch_at_first_use_only() -> None:
    assert "torch" not in run_python(f"import packhorse.disk; {LIST_MODULES}")
    code = "from packhorse.disk import PackhorseReader, PackhorseWriter"
    assert "torch" in run_python(f"{code}; {LIST_MODULES}")


def test_the_hop_to_the_compute_units_loads_torch_at_first_use_only() -> None:
    assert "torch" not in run_python(f"import packhorse.device; {LIST_MODULES}")
    words = run_python(f"from packhorse.device import pack_model_; {LIST_MODULES}")
    assert "torch" in words
    assert "triton" not in words or "triton" in run_python(f"import torch; {LIST_MODULES}")


def test_importing_starts_no_thread_and_prints_nothing() -> None:
    code = "import packhorse.numpy, threading, os; print(len(os.listdir('/proc/self/task')))"
    alone = "import numpy, threading, os; print(len(os.listdir('/proc/self/task')))"
    assert run_python(code) == run_python(alone)


def test_without_torch_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import packhorse\n"
        "try: import packhorse.torch\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
        "try: packhorse.open_file('x', 'pt')\n"
        "except ImportError as error: print(error)\n"
        "try: from packhorse.disk import PackhorseWriter\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
        "try: from packhorse.device import pack_model_\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    words = " ".join(run_python(code))
    assert words.count("pip install 'packhorse[torch]'") == 4


# Errors and the README.


def test_the_error_tree() -> None:
    root = packhorse.PackhorseError
    assert issubclass(packhorse.TruncationError, packhorse.CorruptionError)
    assert issubclass(packhorse.MissingBackendError, ImportError)
    for name in ("CorruptionError", "CompatibilityError", "BaseMismatchError"):
        error = getattr(packhorse, name)
        assert error.__bases__ == (root,)
        assert not issubclass(error, ValueError | TypeError | OSError)


@pytest.mark.parametrize("wrong", ["", "tf", "jax", "NP", None, 3])
def test_a_wrong_framework_is_named(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"framework is {wrong!r}; it must be one of 'np'")
    ):
        packhorse.open_file(tmp_path / "absent", wrong)


@pytest.mark.parametrize("framework", ["np", "numpy", "pt", "torch", "pytorch"])
def test_frameworks_have_the_names_that_safetensors_gives_them(
    framework: str, tmp_path: Path
) -> None:
    from packhorse.numpy import save_file

    save_file({"x": np.arange(3)}, tmp_path / "m.ph.safetensors")
    with packhorse.open_file(tmp_path / "m.ph.safetensors", framework) as file:
        kind = type(file.get_tensor("x"))
    assert kind.__module__.split(".")[0] == ("numpy" if framework[0] == "n" else "torch")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks("README.md")
    assert blocks
    assert sum(len(block.splitlines()) for block in blocks) >= 10
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert any(tmp_path.iterdir()), "the README's code saves a file"


def test_the_example_runs(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model = tmp_path / "model.safetensors"
    save_file({"w": np.random.default_rng(0).standard_normal((64, 64), np.float32)}, model)
    script = ROOT / "examples" / "pack_model.py"
    assert len(script.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(script), str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", packhorse.__version__)
    assert packhorse.__version__ in (ROOT / "docs" / "format.md").read_text()
