"""Runs the Python tests of safetensors against Packhorse: `make compat`

The tests come from the source distribution of the version that is installed; pip fetches it into
`build/compat/`. In copies of the tests, the names that they import are replaced by ours, where we
have them. Every test must then pass, or fail for the reason that `EXPECTED` gives. A test that is
expected to fail and passes is an error too, so that the table stays true.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

__all__ = [
    "EXPECTED",
    "OTHER_FRAMEWORKS",
    "VERSION",
    "Reason",
    "differences",
    "fetch",
    "substitute",
    "table",
]

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.8.0"  # the version that the table is about


class Reason(StrEnum):
    """Why a test of safetensors fails."""

    BYTES = "compares the bytes of a file literally; ours is packed"
    PRIVATE = "reads our file with a private function of safetensors"
    LIBRARY = "tests parts of safetensors that Packhorse does not replace: TensorSpec, serialize"
    WORDS = "expects the literal words of an error, and in part its type; ours are others"
    MORE = "expects a refusal of what ours takes: any index of NumPy, tensors in any memory order"


_PT, _SIMPLE = "test_pt_comparison.py::TorchTestCase::", "test_simple.py::TestCase::"
_README = "test_simple.py::ReadmeTestCase::"
EXPECTED = {
    f"{_PT}test_serialization": Reason.BYTES,
    f"{_PT}test_complex": Reason.BYTES,
    f"{_PT}test_in_memory": Reason.BYTES,
    "test_pt_model.py::TorchModelTestCase::test_save": Reason.BYTES,
    f"{_SIMPLE}test_serialization": Reason.BYTES,
    f"{_SIMPLE}test_serialization_forces_alignment": Reason.BYTES,
    f"{_SIMPLE}test_serialization_metadata": Reason.BYTES,
    f"{_SIMPLE}test_serialization_no_big_endian": Reason.BYTES,
    "test_handle.py::ReadmeTestCase::test_fsspec": Reason.PRIVATE,
    "test_handle.py::ReadmeTestCase::test_numpy_example": Reason.PRIVATE,
    f"{_README}test_exception": Reason.LIBRARY,
    f"{_PT}test_bogus": Reason.WORDS,
    f"{_PT}test_meta_tensor": Reason.WORDS,
    f"{_PT}test_sparse": Reason.WORDS,
    "test_simple.py::ErrorsTestCase::test_file_not_found": Reason.WORDS,
    f"{_README}test_numpy_slice": Reason.MORE,
    "test_pt_comparison.py::SliceTestCase::test_cannot_serialize_a_non_contiguous_tensor": (
        Reason.MORE
    ),
}

OTHER_FRAMEWORKS = {
    "test_flax_comparison.py": "JAX",
    "test_mlx_comparison.py": "MLX",
    "test_paddle_comparison.py": "PaddlePaddle",
    "test_tf_comparison.py": "TensorFlow",
}

# Our names for those of safetensors. Names that we lack, such as its private functions, stay.
_OURS = {
    ("safetensors", "safe_open"): ("packhorse", "open_file"),
    ("safetensors", "SafetensorError"): ("packhorse", "PackhorseError"),
}
_SAME_NAMES = {"safetensors.numpy": "packhorse.numpy", "safetensors.torch": "packhorse.torch"}


def substitute(source: str) -> str:
    """A test file that imports our names in place of those of safetensors."""
    tree = ast.parse(source)
    _Substitution().visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Substitution(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        return [_import(node.module or "", alias) for alias in node.names]


def _import(module: str, alias: ast.alias) -> ast.ImportFrom:
    name, known_as = alias.name, alias.asname or alias.name
    ours = _SAME_NAMES.get(module)
    if ours is not None and name in import_module(ours).__all__:
        module = ours
    module, name = _OURS.get((module, name), (module, name))
    found = ast.alias(name, None if name == known_as else known_as)
    return ast.ImportFrom(module, [found], 0)


def differences(found: Mapping[str, bool], expected: Mapping[str, object]) -> Iterator[str]:
    """What is not as expected.

    Args:
        found: whether each test passed, by its name.
        expected: tests that should fail.
    """
    for name, passed in sorted(found.items()):
        if passed and name in expected:
            yield f"{name} passes, but the table says that it {expected[name]}"
        if not passed and name not in expected:
            yield f"{name} fails, and the table gives no reason"
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is in the table, but did not run"


class _Outcomes:
    """A plugin of pytest that records which tests passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self.passed[name] = False
        elif report.when == "call" and report.passed:
            self.passed.setdefault(name, True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.passed[report.nodeid] = False


def fetch(release: str, folder: Path) -> Path:
    """The source distribution of safetensors, fetched if it is not there yet."""
    archive = folder / f"safetensors-{release}.tar.gz"
    if not archive.exists():
        paths = [str(ROOT / "tests" / "compat" / "backend"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "pip", "download", f"safetensors=={release}", "--no-deps"]
        command += ["--no-binary", "safetensors", "--no-build-isolation", "--dest", str(folder)]
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode or not archive.exists():
            raise SystemExit(
                f"{done.stdout}\n*** the tests of safetensors {release} DID NOT RUN: its source "
                "distribution could not be fetched ***"
            )
    return archive


def table() -> str:
    """The tests that fail, by reason, as a table for docs/compatibility.md."""
    lines = ["| reason | tests |", "|---|---|"]
    for reason in Reason:
        names = [name for name, found in EXPECTED.items() if found is reason]
        files = sorted({name.partition("::")[0] for name in names})
        cells = []
        for file in files:
            own = (name.rpartition("::")[2] for name in names if name.startswith(f"{file}::"))
            cells.append(f"`{file}`: {', '.join(f'`{test}`' for test in own)}")
        lines.append(f"| {reason} | {'; '.join(cells)} |")
    return "\n".join(lines)


def _write_tests(archive: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tests" / "data").mkdir(parents=True)
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            path = Path(member.name)
            if path.parts[-3:-1] != ("python", "tests") or not path.match("test_*.py"):
                continue
            text = opened.extractfile(member).read().decode()  # type: ignore[union-attr]
            if path.name not in OTHER_FRAMEWORKS:
                (folder / "tests" / path.name).write_text(substitute(text))
    (folder / "pytest.ini").write_text("[pytest]\n")


def main() -> int:
    """Run the tests, and say what is not as expected."""
    words = sys.argv[1:]  # more arguments for pytest
    release, folder = version("safetensors"), ROOT / "build" / "compat"
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "work"
    _write_tests(fetch(release, folder), work)
    os.chdir(work)  # the tests write to the working folder
    outcomes = _Outcomes()
    # Without a summary: its lines would look like faults, and `differences` judges what failed.
    options = ["-qq", "-rN", "--tb=no", "--no-header", "-c", "pytest.ini", "-p", "no:cacheprovider"]
    pytest.main(["tests", *options, *words], plugins=[outcomes])
    told = list(differences(outcomes.passed, EXPECTED))
    n_failed = sum(not passed for passed in outcomes.passed.values())
    n, name = len(outcomes.passed), "docs/compatibility.md"
    print(f"\nsafetensors {release}: {n - n_failed} of {n} tests passed; {name} has the others")
    print("not run, because Packhorse has NumPy and PyTorch only:", *OTHER_FRAMEWORKS.values())
    if told and release != VERSION:
        print(f"the table is about safetensors {VERSION}; bring it up to date")
    print(*(f"*** {line} ***" for line in told), sep="\n")
    return bool(told or not outcomes.passed)


if __name__ == "__main__":
    sys.exit(main())
