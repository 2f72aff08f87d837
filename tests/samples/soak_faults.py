"""Operations that are broken on purpose, for the tests of the soak: it must find each of them.

They are functions of a module, so that processes of the soak find them by name.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from soak_parts.operations import Operations

__all__ = ["crash", "explode", "flip", "forget_force", "hang", "lose", "tear"]


def flip(operations: Operations) -> Operations:
    """One bit of the decoded or restored data is wrong."""

    def decompress(*args: Any, **kwargs: Any) -> Any:
        return _flipped(operations.decompress(*args, **kwargs))

    def restore(*args: Any, **kwargs: Any) -> Any:
        state = operations.restore(*args, **kwargs)
        state["weights"] = _flipped(state["weights"])
        return state

    def decode_bounded(message: Any, out: Any, **options: Any) -> None:
        operations.decode_bounded(message, out, **options)
        _flipped(out)

    return replace(
        operations, decompress=decompress, restore=restore, decode_bounded=decode_bounded
    )


def _flipped(array: Any) -> Any:
    flat = array.reshape(-1).view(np.uint8)
    flat[:1] ^= 1
    return array


def tear(operations: Operations) -> Operations:
    """Files are cut short at the end, whoever packs them."""

    def pack_file(source: Path, output: Path, **options: Any) -> Any:
        result = operations.pack_file(source, output, **options)
        os.truncate(output, output.stat().st_size - 1)
        return result

    def command(args: list[str]) -> int:
        code = operations.command(args)
        if args[0] == "pack" and code == 0 and Path(args[3]).is_file():
            os.truncate(args[3], os.path.getsize(args[3]) - 1)
        return code

    return replace(operations, pack_file=pack_file, command=command)


def lose(operations: Operations) -> Operations:
    """A folder is unpacked whatever its index says, the newest snapshot is pruned, and staged
    updates are dropped."""

    def unpack_folder(source: Path, output: Path, **options: Any) -> None:
        output.mkdir()

    def prune(store: Any, *, keep: Any) -> Any:
        return operations.prune(store, keep=store.names()[:1])

    def commit(receiver: Any, staged: Any) -> None:
        pass

    return replace(operations, unpack_folder=unpack_folder, prune=prune, commit=commit)


def forget_force(operations: Operations) -> Operations:
    """Existing outputs are replaced."""
    return replace(operations, command=lambda args: operations.command([*args, "--force"]))


def hang(operations: Operations) -> Operations:
    """Decoding never ends."""
    return _decoding(operations, lambda: time.sleep(1000))


def crash(operations: Operations) -> Operations:
    """Decoding ends the process."""
    return _decoding(operations, os.abort)


def explode(operations: Operations) -> Operations:
    """Decoding takes all memory."""
    return _decoding(operations, lambda: bytearray(1 << 40))


def _decoding(operations: Operations, instead: Callable[[], Any]) -> Operations:
    return replace(operations, decompress=lambda *args, **kwargs: instead())
