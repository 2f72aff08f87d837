"""Compiles a program unless it was compiled by the same command from the same sources.

Times of files say too little: a clone gives old sources new times, and a build folder may come from
elsewhere. So a digest lies beside each program. Processes may compile one program at once.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["compile_once"]


def compile_once(
    command: Sequence[str], program: Path, sources: Iterable[Path], root: Path
) -> None:
    """Compiles a program if that is needed.

    Args:
        command: the compiler and its arguments, without the output; it runs in `root`.
        program: where the program goes.
        sources: all files that it is compiled from.
        root: the folder of the sources.

    Raises:
        subprocess.CalledProcessError: it does not compile; `stderr` says why.
    """
    stamp, digest = program.with_name(f"{program.name}.sha256"), _digest(command, sources, root)
    if program.exists() and stamp.exists() and stamp.read_text() == digest:
        return
    program.parent.mkdir(parents=True, exist_ok=True)
    new = program.with_name(f"{program.name}.{os.getpid()}")
    try:
        subprocess.run(
            [*command, "-o", str(new)], cwd=root, check=True, capture_output=True, text=True
        )
        stamp.unlink(missing_ok=True)  # it is of the old program
        new.replace(program)
    finally:
        new.unlink(missing_ok=True)
    stamp.write_text(digest)


def _digest(command: Sequence[str], sources: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    for path in sorted(sources):
        name, text = path.relative_to(root).as_posix(), path.read_bytes()
        digest.update(f"\0{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()
