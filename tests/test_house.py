"""The structure of the package: who imports whom, imports from outside, and whether the page about
it is true."""

import ast
import re
import sys

from cases import each
from house import (
    FILES,
    FOLDERS,
    MODULES,
    PAGE,
    ROOT,
    SHARED,
    arrows,
    between_hops,
    circles,
    core_upward,
    files_below,
    imports_of,
    layer_of,
    misnamed_avx512,
    ours,
    page_with_tables,
    process_state,
    purpose_of,
    registrars,
    upward,
)

THIRD_PARTY = {
    "bits": {"numpy"},
    "codecs": {"numpy", "xxhash", "zstandard"},
    "kernels": {"numpy", "torch", "triton"},
    "device": {"torch", "triton"},
    "frame": {"numpy"},
    "read_only_rows": {"torch"},
    "reference": {"numpy", "xxhash", "zstandard"},
    "reference.bounded": {"ml_dtypes", "numpy"},
    "gpu": {"numpy", "torch", "triton"},
    "host": {"numpy", "torch"},
    "storage": {"numpy", "xxhash"},
    "disk": {"numpy", "xxhash", "zstandard"},
    "disk.dcp": {"fsspec", "numpy", "torch"},
    "disk.dcp.values": {"ml_dtypes", "numpy", "torch"},
    "disk.shelf.dataset": {"numpy", "torch"},
    "numpy": {"numpy", "ml_dtypes"},
    "torch": {"torch"},
    "torch_dtypes": {"torch"},
    "torch_framework": {"torch"},
    "torch_models": {"torch"},
    "zarr_dtypes": {"ml_dtypes", "numpy", "zarr"},
    "integrations": {"torch"},
    "integrations.elements": {"ml_dtypes", "numpy"},
    "integrations.hdf5": {"h5py", "numpy"},
    "integrations.lmcache": {"lmcache", "numpy", "torch"},
    "integrations.numcodecs": {"numcodecs", "numpy"},
    "integrations.pyg": {"numpy", "torch", "torch_geometric"},
    "integrations.torchrec": {"numpy", "torch", "torchrec"},
    "integrations.transformers": {"accelerate", "numpy", "safetensors", "torch", "transformers"},
    "integrations.zarr": {"numpy", "zarr"},
    "learn": {"numpy", "scipy", "sklearn", "threadpoolctl"},
    "learn.swag": {"numpy", "torch"},
    "reports": {"numpy"},
    "reports.engines": {"numpy", "zstandard"},
    "wire": {"numpy", "torch"},
    "wire.updates": {"numpy", "xxhash", "zstandard"},
    "cli": {"numpy", "rich", "typer"},
}


def allowed(module: str) -> set[str]:
    """The packages that a module may import from outside, as listed for the module or for its
    package."""
    name = module.removeprefix("packhorse").removeprefix(".")
    while name not in THIRD_PARTY and name:
        name = name.rpartition(".")[0]
    return THIRD_PARTY.get(name, set())


def test_imports_point_down() -> None:
    assert upward() == []


def test_no_hop_imports_another() -> None:
    assert between_hops() == []


def test_includes_of_the_core_point_down() -> None:
    assert core_upward() == []


def test_loops_of_avx512_lie_in_files_named_so() -> None:
    assert misnamed_avx512() == []


def test_there_are_no_circles() -> None:
    assert circles(arrows()) == []


def test_circles_are_found() -> None:
    graph = {"a": "b", "b": "ca", "c": "d", "d": "e", "e": "d", "f": "f", "g": "a"}
    assert circles(graph) == [["a", "b"], ["d", "e"]]


def test_imports_are_found_however_they_are_written(tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import sys, packhorse.errors\n"
        "from packhorse import layout, _core\n"
        "from packhorse.frame.frame import Frame\n"
        "if TYPE_CHECKING:\n    from packhorse.numpy import save\n"
        "def f():\n    import packhorse.threads\n"
        "    import_module('packhorse.disk.walk')\n"
        "NAMES = {'x': 'packhorse.device', 'y': 'packhorse.no_such', 'z': 'packhorse'}\n"
        "version = sys.modules['packhorse'].__version__\n"
    )
    found = {ours(name) for name in imports_of(path, types=False)} - {None}
    assert found == {
        "packhorse", "packhorse.errors", "packhorse.layout", "packhorse._core",
        "packhorse.frame.frame", "packhorse.threads", "packhorse.disk.walk", "packhorse.device",
    }  # fmt: skip
    assert "packhorse.numpy" in {ours(name) for name in imports_of(path)}


def test_third_party_imports_are_the_expected_ones() -> None:
    ours_or_python = sys.stdlib_module_names | {"packhorse", "typing_extensions"}
    strange = {
        name: found
        for name, path in MODULES.items()
        if (
            found := {other.split(".")[0] for other in imports_of(path)}
            - ours_or_python
            - allowed(name)
        )
    }
    assert strange == {}


@each("name", [name for name in MODULES if layer_of(name) < SHARED])
def test_nothing_below_storage_does_input_or_output(name: str) -> None:
    doing = {"io", "mmap", "pathlib", "shutil", "socket", "subprocess", "tempfile", "urllib"}
    assert not doing & {other.split(".")[0] for other in imports_of(MODULES[name])}
    tree = ast.parse(MODULES[name].read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"open", "print", "exit"} & {call.id for call in calls if isinstance(call, ast.Name)}


def test_the_architecture_page_lists_all_state_of_the_process() -> None:
    text = PAGE.read_text().partition("## State of the process")[2].partition("\n## ")[0]
    listed, file = set(), ""
    for word in re.findall("`([^`]*)`", text):
        if word.endswith(".py"):
            file = word.removesuffix(".py").replace("/", ".")
        elif f"packhorse.{file}" in MODULES and word.isidentifier():
            listed.add(f"{file}.{word}")
    assert set(process_state()) <= listed


def test_only_process_registers_handlers_with_python() -> None:
    assert registrars() == ["packhorse.process"]


def test_typing_extensions_is_for_type_checkers_only() -> None:
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module != "typing_extensions", path


def test_the_architecture_page_lists_every_file() -> None:
    assert PAGE.read_text() == page_with_tables(), "run: python tests/house.py --write"


def test_every_file_says_what_it_is() -> None:
    files = [path for top in FOLDERS for path in files_below(ROOT / top)]
    assert len(files) > 300
    assert [path for path in files if not 15 < len(purpose_of(path)) < 250] == []
