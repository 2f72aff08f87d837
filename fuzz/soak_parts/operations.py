"""The operations that the soak tries. Tests replace them with broken ones, which the soak must
find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import packhorse.numpy
from packhorse.codecs.bounded import decode_bounded
from packhorse.disk import SnapshotStore, pack_file, unpack_file, unpack_folder
from packhorse.wire.updates import DeltaReceiver

__all__ = ["Breaks", "Operations"]


def _command(args: list[str]) -> int:
    from packhorse.cli import main

    return main(args)


def _check_input(target: str, data: bytes) -> None:
    """Run a fuzz target on an input."""
    from importlib import import_module

    import_module(f"fuzz_{target}").main(data)


@dataclass(frozen=True)
class Operations:
    """The operations, each as the package has it."""

    compress: Callable[..., Any] = packhorse.numpy.compress
    decompress: Callable[..., Any] = packhorse.numpy.decompress
    pack_file: Callable[..., Any] = pack_file
    unpack_file: Callable[..., Any] = unpack_file
    unpack_folder: Callable[..., Any] = unpack_folder
    take: Callable[..., Any] = SnapshotStore.take
    restore: Callable[..., Any] = SnapshotStore.restore
    prune: Callable[..., Any] = SnapshotStore.prune
    decode_bounded: Callable[..., None] = decode_bounded
    commit: Callable[..., None] = DeltaReceiver.commit
    command: Callable[[list[str]], int] = _command
    check_input: Callable[[str, bytes], None] = _check_input


# Makes broken operations from good ones; a function in a module, so that other processes find it.
Breaks = Callable[[Operations], Operations]
