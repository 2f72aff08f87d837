"""The public surface: exported names, imports between modules, the cost of an import, and the
README's code."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors
from cases import each
from serving_stubs import installed

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


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """Stand-ins for the servers whose plug-ins are imported here."""
    with installed("vllm"), installed("sglang"):
        yield


# Exported names.


@each("name", PUBLIC)
def test_all_names_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for export in module.__all__:
        assert hasattr(module, export), export


@each("name", LIBRARY)
def test_all_is_complete(name: str) -> None:
    """This holds for the library; the command is a program, and nobody imports it."""
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
    verbs |= {"load_model", "save_model"} if framework == "torch" else set()
    assert verbs < set(module.__all__)
    ours = importlib.import_module(f"safetensors.{framework}")
    assert {verb for verb in verbs if hasattr(ours, verb)} == verbs - own


# `packhorse.torch.save` and `load` take the place of PyTorch's too. The first has other names, and
# takes metadata in the place of the file; the second has another name for the bytes.
OTHER_NAMES = {("save", "tensors"), ("save", "metadata"), ("load", "data")}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_verbs_take_the_arguments_of_safetensors(framework: str) -> None:
    """With the same names, in the same order, and with the same defaults."""
    module = importlib.import_module(f"packhorse.{framework}")
    library = importlib.import_module(f"safetensors.{framework}")
    pairs = [
        (getattr(library, name), getattr(module, name))
        for name in module.__all__
        if hasattr(library, name)
    ]
    for theirs, ours in [*pairs, (safetensors.safe_open, packhorse.open_file)]:
        have = [*inspect.signature(ours).parameters.values()]
        for i, wanted in enumerate(inspect.signature(theirs).parameters.values()):
            at_place = have[i] if wanted.kind is not wanted.KEYWORD_ONLY else None
            found = at_place or next(item for item in have if item.name == wanted.name)
            if framework == "numpy" or (theirs.__name__, wanted.name) not in OTHER_NAMES:
                assert found.name == wanted.name, theirs
            if wanted.default not in (wanted.empty, ...):
                assert found.default == wanted.default, (theirs, wanted)
            assert (found.default is found.empty) <= (wanted.default is wanted.empty)


@each("name", PUBLIC)
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


# The cost of an import.


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
    assert "torch" not in run_python(f"import packhorse.device, packhorse.host; {LIST_MODULES}")
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
        "try: from packhorse.host import PackedEmbedding\n"
        "except packhorse.MissingBackendError as error: print(error)\n"
    )
    words = " ".join(run_python(code))
    assert words.count("pip install 'packhorse[torch]'") == 5


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


def test_the_extra_for_all_names_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for_developers = {"bench", "dev", "docs", "fuzz", "lint", "test"}
    servers = {"lmcache", "sglang", "vllm"}  # each of them wants a PyTorch of its own
    for_gpus = {"torchrec"}  # brings an fbgemm that needs CUDA
    users = ",".join(sorted(extras.keys() - for_developers - servers - for_gpus - {"all"}))
    assert extras["all"] == [f"packhorse[{users}]"]


def test_a_tool_has_one_version_in_all_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {pin for name in ("docs", "lint") for pin in extras[name]}
    assert len(pins) == len({pin.partition("==")[0] for pin in pins})


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", packhorse.__version__)
    assert packhorse.__version__ in (ROOT / "docs" / "format.md").read_text()
