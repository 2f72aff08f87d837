"""Lying frames, files, indexes and manifests with correct checksums; sources that are not files.

The checks of the fuzz targets read frames, files and manifests: every reader gives the same bytes
as the slow decoder or a documented error, within bounds. This module adds the command and whole
folders.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from edits import edit_json, edit_pairs
from make_corpus import TARGETS

from packhorse.disk import pack_file, pack_folder, verify_folder
from soak_parts.case import Case, Part, Place, claim
from soak_parts.commands import run_command
from soak_parts.samples import digest, draw_tensors, write_file, write_folder

__all__ = ["PART"]

_LOCK = Lock()
_CORPUS = Path(__file__).parent.parent / "corpus"
_TARGETS = ("frame", "reference", "file", "manifest")
_SEEDS = {"reference": "frame"}
_N_INPUTS = 40  # of one case
_BYTES = (0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 127, 128, 254, 255)
_VERBS = ("verify", "inspect", "unpack", "bench", "pack")


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(["input"] * 8 + ["index"] * 3 + ["command"] * 2 + ["odd"])
    return {"kind": kind, **_DRAWN[kind](rng)}


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)


# Inputs of fuzz targets.


def _draw_inputs(rng: Random) -> Case:
    target = rng.choice(_TARGETS)
    seeds = _seeds(_SEEDS.get(target, target))
    inputs = [_mutated(rng, target, rng.choice(seeds)) for _ in range(_N_INPUTS)]
    return {"target": target, "inputs": [base64.b64encode(data).decode() for data in inputs]}


def _seeds(target: str) -> list[bytes]:
    """The seeds of a fuzzer. One thread at a time makes them: a store of seeds is made with parts
    of the library replaced for a moment."""
    with _LOCK:
        return _made_seeds(target)


@cache
def _made_seeds(target: str) -> list[bytes]:
    """Made seeds, and inputs that broke something once."""
    kept = sorted((_CORPUS / target).glob("found-*"))
    return [seed for _, seed in TARGETS[target]()] + [path.read_bytes() for path in kept]


def _mutated(rng: Random, target: str, data: bytes) -> bytes:
    if target in ("file", "manifest") and rng.random() < 0.6:
        return _edited(rng, target, data)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = int(rng.random() ** 2 * len(out))  # mostly near the start, where sizes are stored
        width = rng.choice((1, 1, 1, 2, 4, 8))
        what = rng.randrange(6)
        if what == 0:
            del out[at : at + width]
        elif what == 1:
            out[at:at] = rng.randbytes(width)
        elif what == 2:
            out[at : at + width] = rng.choice(((1 << 8 * width) - 1, 1 << 8 * width - 1)).to_bytes(
                width, "little"
            )
        else:
            out[at : at + 1] = bytes([rng.choice((*_BYTES, rng.randrange(256)))])
    out[:1] = bytes([rng.randrange(256)])  # the control byte: the form, and what is corrected
    return bytes(out)


def _edited(rng: Random, target: str, data: bytes) -> bytes:
    """An input with changed JSON."""
    if target == "file":
        return edit_pairs(data, rng)
    try:
        return data[:1] + edit_json(json.loads(data[1:]), rng)
    except (ValueError, RecursionError):
        return data


def _inputs(case: Case, place: Place) -> None:
    for data in case["inputs"]:
        place.operations.check_input(case["target"], base64.b64decode(data))
        place.accept()


# Folders whose index lies or is damaged.


def _draw_index(rng: Random) -> Case:
    damage = rng.choice(("flip", "flip", "cut", "swap"))
    shards = [draw_tensors(rng, 2, most=100, in_file=True) for _ in range(2)]
    return {"shards": shards, "index": True, "below": False, "damage": damage,
            "at": rng.random(), "bit": rng.randrange(8), "command": rng.random() < 0.3}  # fmt: skip


def _index(case: Case, place: Place) -> None:
    """A folder with a damaged index, which must never be unpacked to another original."""
    source, packed, back = (place.folder / name for name in ("llama", "llama.ph", "back"))
    write_folder(case, source)
    pack_folder(source, packed, threads=1)
    (index,) = packed.glob("*.index.json")
    index.write_bytes(_damaged(index.read_bytes(), case))
    if case["command"]:
        args = ["unpack", str(packed), "-o", str(back)]
        ended = run_command(place, args)
        is_done = ended.is_good
    else:
        result = place.outcome(lambda: place.operations.unpack_folder(packed, back, threads=1))
        is_done = not isinstance(result, BaseException)
    if is_done:
        claim(digest(back) == digest(source), "a damaged index was unpacked to another folder")
    else:
        claim(not back.exists(), "a folder that was refused was written")
    problems = place.outcome(lambda: verify_folder(packed, threads=1))
    claim(problems or is_done, "verify finds nothing in a folder that unpack refuses")


def _damaged(data: bytes, case: Case) -> bytes:
    at, out = int(case["at"] * len(data)), bytearray(data)
    if case["damage"] == "cut":
        return data[:at]
    if case["damage"] == "swap":
        return data.replace(b"packhorse", b"packhorsf")
    out[at] ^= 1 << case["bit"]
    return bytes(out)


# The command on damaged files.


def _draw_command(rng: Random) -> Case:
    edits = [[rng.random() ** 2, rng.randrange(256)] for _ in range(rng.choice((1, 1, 3)))]
    return {"tensors": draw_tensors(rng, 3, most=300), "verb": rng.choice(_VERBS), "edits": edits,
            "packed": rng.random() < 0.7, "json": rng.random() < 0.7,
            "keep": rng.choice((1.0, 1.0, rng.random()))}  # fmt: skip


def _command(case: Case, place: Place) -> None:
    """The command on any file: one line, a documented code, and one document for `--json`."""
    source, packed = place.folder / "a.safetensors", place.folder / "b.ph.safetensors"
    write_file(source, case["tensors"])
    pack_file(source, packed)
    path = packed if case["packed"] else source
    data = bytearray(path.read_bytes())
    for at, value in case["edits"]:
        data[int(at * len(data))] = value
    path.write_bytes(data[: int(case["keep"] * len(data))])
    before = digest(path)
    more = ["-o", str(place.folder / "out")] if case["verb"] in ("pack", "unpack") else []
    more += ["--json"] * case["json"]
    run_command(place, [case["verb"], str(path), *more])
    claim(digest(path) == before, "the source was changed")


# Sources that are not files.


def _draw_odd(rng: Random) -> Case:
    verb = rng.choice((*_VERBS, "take"))
    return {"what": rng.choice(("fifo", "device", "socket", "links", "circle")), "verb": verb}


def _odd(case: Case, place: Place) -> None:
    """Pipes, devices and folders of links, which are refused or packed in time."""
    path = _make_odd(case["what"], place.folder)
    args = [case["verb"], str(path)]
    if case["verb"] == "take":
        args = ["snapshot", "take", str(place.folder / "store"), "a", str(path)]
    elif case["verb"] in ("pack", "unpack"):
        args += ["-o", str(place.folder / "out")]
    run_command(place, args)


def _make_odd(what: str, folder: Path) -> Path:
    path = folder / "odd.safetensors"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "socket":
        before = os.getcwd()
        os.chdir(folder)  # the paths of sockets must be short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(before)
    else:
        path = _make_links(folder / "links", in_circle=what == "circle")
    return path


def _make_links(folder: Path, *, in_circle: bool) -> Path:
    """Folders that each hold two links to the next: 2 to the power of 24 paths."""
    depth = 24
    for i in range(depth):
        (folder / str(i)).mkdir(parents=True)
        if i + 1 < depth or in_circle:
            for name in "ab":
                (folder / str(i) / name).symlink_to(folder / str((i + 1) % depth))
    write_file(folder / str(depth - 1) / "a.safetensors", [])
    shutil.copy(folder / str(depth - 1) / "a.safetensors", folder / "0" / "m.safetensors")
    return folder / "0"


_DRAWN: dict[str, Callable[[Random], Case]] = {
    "input": _draw_inputs,
    "index": _draw_index,
    "command": _draw_command,
    "odd": _draw_odd,
}
_RUN: dict[str, Callable[[Case, Place], Any]] = {
    "input": _inputs,
    "index": _index,
    "command": _command,
    "odd": _odd,
}
PART = Part(
    "lies", "lying frames, files, indexes and manifests under right checksums", draw, run,
    memory_nbytes=2 << 30,
)  # fmt: skip
