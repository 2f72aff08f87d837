"""The states that a folder may have after a power loss, by a record of what a process asked of the
disk: calls of C code are recorded too, unlike in power_loss.py.

POSIX promises little. Bytes are safe after a sync of the file, or when a write through O_DSYNC has
ended; names are safe after a sync of their folder. Until then each page of each write may be there
or not, in any order, and a file may have grown without its bytes.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["Call", "Disk", "Image", "compile_recorder", "images", "mark", "read_record", "recorded"]

_HEADER = struct.Struct("<ccHHHQqQ")
_PAGE = 4096  # what the system writes whole


@dataclass(frozen=True)
class Call:
    """One call that the recorder saw; `kind` is as in disk_recorder.c."""

    kind: str
    durable: bool
    name: str
    other: str
    inode: int
    offset: int
    data: bytes


def compile_recorder(folder: Path) -> Path:
    """Compile the recorder, or skip the test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("the recorder of disk calls needs Linux and a C compiler")
    library = folder / "disk_recorder.so"
    source = Path(__file__).with_name("disk_recorder.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", library, source], check=True)
    return library


def recorded(library: Path, folder: Path, record: Path | None, command: list[str]) -> str:
    """Run a command under the recorder. Without `record`, calls are not written down, but they may
    be made to fail.

    Returns:
        What it wrote.
    """
    environment = os.environ | {"LD_PRELOAD": str(library), "RECORDER_FOLDER": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # pytest's, for modules of the samples
    if record is not None:
        environment["RECORDER_FILE"] = str(record)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def mark(text: str) -> None:
    """Put a mark into the record of this process, if there is one."""
    recorder = ctypes.CDLL(None)
    if hasattr(recorder, "recorder_mark"):
        recorder.recorder_mark(text.encode())


def read_record(record: Path, folder: Path) -> list[Call]:
    """The calls of a record; names are relative to the folder."""
    content, at, calls = record.read_bytes(), 0, []
    while at < len(content):
        kind, durable, n_name, n_other, _, inode, offset, n_data = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        ends = at + n_name, at + n_name + n_other, at + n_name + n_other + n_data
        name, other = content[at : ends[0]].decode(), content[ends[0] : ends[1]].decode()
        names = [os.path.relpath(each, folder) if each else "" for each in (name, other)]
        data = content[ends[1] : ends[2]] if kind in b"wm" else b""
        calls.append(Call(kind.decode(), durable != b"\0", *names, inode, offset, data))
        at = ends[2] if kind in b"wm" else ends[1]
    return calls


@dataclass(frozen=True)
class _Piece:
    """A part of a call that the disk may have or not: one page of a write, or one name."""

    call: int
    kind: str  # w page of a write, g growth, t length, and the kinds of names
    key: object  # of what must be synced: an inode, or the name of a folder
    page: int
    offset: int
    data: bytes
    name: str = ""
    other: str = ""


@dataclass
class Disk:
    """Names and bytes. A name is of an inode, or of None for a folder."""

    names: dict[str, int | None] = field(default_factory=dict)
    files: dict[int, bytearray] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk(dict(self.names), {inode: bytearray(b) for inode, b in self.files.items()})

    def apply(self, piece: _Piece) -> None:
        if piece.kind in "wgt":
            self._change(piece)
        elif piece.kind in "cd":
            self.names[piece.name] = piece.offset if piece.kind == "c" else None
        elif piece.kind == "u":
            self.names.pop(piece.name, None)
        else:
            self._rename(piece)

    def _change(self, piece: _Piece) -> None:
        assert isinstance(piece.key, int)
        content = self.files.setdefault(piece.key, bytearray())
        end = piece.offset + len(piece.data)
        if piece.kind == "t":
            del content[piece.offset :]
        content.extend(bytes(max(0, end - len(content))))
        content[piece.offset : end] = piece.data

    def _rename(self, piece: _Piece) -> None:
        below = [name for name in self.names if f"{name}/".startswith(f"{piece.name}/")]
        moved = {piece.other + name[len(piece.name) :]: self.names.pop(name) for name in below}
        if piece.name not in below:  # its creation was lost: the new name leads to the inode
            moved[piece.other] = piece.offset or None
        self.names.update(moved)

    def write_to(self, folder: Path) -> None:
        """Make this state in a new folder."""
        folder.mkdir()
        for name, inode in sorted(self.names.items()):
            path = folder / name
            if path.parent.is_dir():
                if inode is None:
                    path.mkdir(exist_ok=True)
                else:
                    path.write_bytes(self.files.get(inode, b""))


@dataclass(frozen=True)
class Image:
    """One state that the disk may have, and what the process had said until then.

    Attributes:
        n_calls: how many calls had begun when the power went.
        what: which of the bytes that were not safe have survived.
        marks: of the process, until then.
        disk: the state.
    """

    n_calls: int
    what: str
    marks: list[str]
    disk: Disk


class _Replay:
    """Follows a record, and knows what is safe and what is pending."""

    def __init__(self) -> None:
        self.safe = Disk()
        self.pending: list[_Piece] = []
        self.live = Disk()  # what a program sees
        self.marks: list[str] = []
        self.n_syncs = 0
        self._unfinished: list[_Piece] = []

    def begin(self, number: int, call: Call) -> None:
        """Make a call, whose effect may be on the disk or not until the next one begins."""
        self._finish()
        if call.kind == "m":
            self.marks.append(call.data.decode())
        elif call.kind == "s":
            key = call.name if call.durable else call.inode
            self._settle([piece for piece in self.pending if piece.key == key])
        elif call.kind != "p":
            pieces = list(self._pieces(number, call))
            for piece in pieces:
                self.live.apply(piece)
            self.pending += pieces
            if call.durable:
                self._unfinished = pieces

    def _finish(self) -> None:
        """A write through O_DSYNC has ended: its pages are safe, with all that was in them."""
        pages = {(piece.key, piece.page) for piece in self._unfinished}
        if pages:
            self._settle([piece for piece in self.pending if (piece.key, piece.page) in pages])
        self._unfinished = []

    def _settle(self, pieces: list[_Piece]) -> None:
        settled = set(map(id, pieces))
        for piece in pieces:
            self.safe.apply(piece)
        self.pending = [piece for piece in self.pending if id(piece) not in settled]
        self.n_syncs += 1

    def _pieces(self, number: int, call: Call) -> Iterator[_Piece]:
        if call.kind == "w":
            end = call.offset + len(call.data)
            if end > len(self.live.files.get(call.inode, b"")):
                yield _Piece(number, "g", call.inode, -1, end, b"")
            for at in range(call.offset - call.offset % _PAGE, end, _PAGE):
                first, last = max(at, call.offset), min(at + _PAGE, end)
                data = call.data[first - call.offset : last - call.offset]
                yield _Piece(number, "w", call.inode, at // _PAGE, first, data)
        elif call.kind == "t":
            yield _Piece(number, "g", call.inode, -1, call.offset, b"")
            if call.offset < len(self.live.files.get(call.inode, b"")):
                yield _Piece(number, "t", call.inode, -1, call.offset, b"")
        else:
            inode = call.inode or self.live.names.get(call.name) or 0
            parent = os.path.dirname(call.other or call.name) or "."
            yield _Piece(number, call.kind, parent, -1, inode, b"", call.name, call.other)

    def disk(self, kept: set[int]) -> Disk:
        """The disk with some of the pending pieces. A page is written whole, so a piece brings all
        that was in its page before."""
        pending = list(enumerate(self.pending))
        last = {(p.key, p.page): i for i, p in pending if p.kind == "w" and i in kept}
        disk = self.safe.copy()
        for i, piece in pending:
            if i in kept or (piece.kind == "w" and i < last.get((piece.key, piece.page), -1)):
                disk.apply(piece)
        return disk


def images(calls: list[Call], *, n_random: int, seed: int = 0) -> Iterator[Image]:
    """All prefixes of a record, each with several choices of what has survived; none twice.

    Args:
        calls: the record.
        n_random: how many random choices to make for each prefix, besides the fixed ones.
        seed: of the random choices.
    """
    replay, rng = _Replay(), random.Random(seed)
    seen = set()
    for number, call in enumerate(calls):
        replay.begin(number, call)
        for what, kept in _choices(replay.pending, rng, n_random):
            pieces = [replay.pending[i] for i in kept]
            parts = frozenset((piece.call, piece.kind, piece.page) for piece in pieces)
            key = (replay.n_syncs, len(replay.marks), parts)
            if key not in seen:
                seen.add(key)
                yield Image(number + 1, what, list(replay.marks), replay.disk(kept))


def _choices(
    pending: list[_Piece], rng: random.Random, n_random: int
) -> Iterator[tuple[str, set[int]]]:
    everything = set(range(len(pending)))
    yield "nothing", set()
    yield "everything", everything
    if not pending:
        return
    last = [i for i in everything if pending[i].call == pending[-1].call]
    yield "only the last call", set(last)
    yield "all but the last call", everything - set(last)
    half = last[: len(last) // 2]
    yield "the first half of the last call", everything - set(last) | set(half)
    yield "the second half of the last call", everything - set(half)
    yield "lengths and names only", {i for i in everything if pending[i].kind != "w"}
    yield "no names", {i for i in everything if pending[i].kind in "wgt"}
    for call in sorted({piece.call for piece in pending}):
        own = {i for i in everything if pending[i].call == call}
        yield f"only call {call}", own
        yield f"all but call {call}", everything - own
    for _ in range(n_random):
        share = rng.random()
        yield "a random part", {i for i in everything if rng.random() < share}
