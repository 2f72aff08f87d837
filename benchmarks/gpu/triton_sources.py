"""The source of the Triton kernels of packed weights, as a hash: kept figures of their machine code
have it, and tests notice if the kernels have changed since."""

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from packhorse import kernels

__all__ = ["source_hash"]

_MODULES = ("early_launch", "exception_sums", "matmul", "weights")


def source_hash(folder: Path | None = None) -> str:
    """The hash of all that is compiled: kernels and constants, without comments and docstrings.

    Args:
        folder: of the modules; None for those that are installed.
    """
    folder = folder or Path(kernels.__file__).parent
    texts = (text for name in _MODULES for text in _compiled(folder / f"{name}.py"))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _compiled(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.parse(text).body:
        is_constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__all__"
        is_kernel = isinstance(node, ast.FunctionDef) and "jit" in map(_name, node.decorator_list)
        if is_constant or is_kernel:
            # As it is written: versions of Python print a tree in different ways.
            found = ast.get_source_segment(text, node) or ""
            docstring = ast.get_docstring(node, clean=False) if is_kernel else None
            yield " ".join(re.sub(r"#.*", "", found.replace(docstring or "\0", "")).split())


def _name(decorator: ast.expr) -> str:
    """The last part of a decorator's name."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2]
