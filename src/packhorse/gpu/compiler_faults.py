"""Compilers that cannot make a kernel: Triton itself, ptxas for the machine code, and a C compiler
for what starts kernels."""

import re
import subprocess
from pathlib import Path

from triton import CompilationError
from triton.runtime.errors import PTXASError

__all__ = ["compiler_fault"]

_MISSING = re.compile(r"Failed to find C(\+\+)? compiler|Cannot find ptxas")
_OF_PTXAS = re.compile(r"^ptxas\b.*(fatal|error).*$", re.M)


def compiler_fault(error: Exception) -> str | None:
    """What a compiler lacks or says, in one line; None if the error is another one.

    Args:
        error: of a launch of a Triton kernel.
    """
    text = str(error).strip()
    if isinstance(error, PTXASError):
        said = _OF_PTXAS.search(text)
        return " ".join((said[0] if said else text.split("\n")[0]).split())
    if isinstance(error, CompilationError):
        return text.split("\n")[-1]
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else error.cmd[0]
        return f"{Path(command).name} ended with status {error.returncode}"
    if isinstance(error, RuntimeError) and _MISSING.search(text):
        return text.split(". ")[0]
    return None
