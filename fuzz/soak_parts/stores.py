"""Stores and checkpoints in which files were edited, lost or added.

A snapshot that was acknowledged and is not damaged stays restorable. Listing, verifying, taking and
pruning raise only documented errors. No stray file makes a prune remove a good snapshot.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from edits import edit_json, sealed, sealed_checkpoint
from snapshot_child import make_state
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore
from packhorse.errors import PackhorseError
from soak_parts.case import Case, Part, Place, claim
from soak_parts.children import run_child
from soak_parts.commands import run_command

__all__ = ["PART"]

_OLDEST = "n0"
_ORDERS = (0, 1, 2, 10**6, 10**12 - 2, 10**12 - 1)
_GENERATIONS = (0, 1, 2, 10**6 - 1)
_STRAYS = (b"", b"{}", b'{"crc32c":"00000000",}', b"\0" * 100, b"[]", b"\xff\xfe")
_SEAL = b'{"crc32c":"00000000",'
_KINDS = (
    *("drop", "cut", "flip", "sealed", "copy", "stray", "stray", "stray", "rename"),
    *("drop pack", "cut pack", "flip pack", "stray pack", "stray file", "folder", "fifo"),
    *("drop catalog", "cut catalog", "flip catalog", "stray catalog"),  # repeats manifests
)
_LITTLE = 24 << 20  # bytes in addition to the memory of a process
_LIMIT_S = 20.0


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(["store"] * 8 + ["checkpoint"] * 3 + ["little memory"])
    return {"kind": kind, **_DRAWN[kind](rng)}


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)


# Snapshot stores.


def _draw_store(rng: Random) -> Case:
    edits = [_draw_edit(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
    return {"n": rng.randint(2, 6), "edits": edits, "keep": rng.randint(1, 3),
            "command": rng.random() < 0.15, "prune first": rng.random() < 0.3}  # fmt: skip


def _draw_edit(rng: Random) -> Case:
    return {"what": rng.choice(_KINDS), "on": rng.getrandbits(16), "at": rng.random(),
            "bit": rng.randrange(8), "order": rng.choice(_ORDERS), "seed": rng.getrandbits(32),
            "generation": rng.choice(_GENERATIONS), "text": rng.randrange(len(_STRAYS)),
            "elsewhere": rng.random() < 0.5}  # fmt: skip


@dataclass
class _Edited:
    """A store, and what was done to it.

    Attributes:
        folder: of the store.
        manifests: the original manifest of each snapshot, by name, the oldest first.
        packs: the packs that each snapshot needs, in the order in which they were written.
        touched: files that have changed.
        may_lie: whether a readable file may contain something false.
    """

    folder: Path
    manifests: dict[str, Path | None]
    packs: dict[str, list[Path]]
    touched: set[Path] = field(default_factory=set)
    may_lie: bool = False

    def named(self) -> list[str]:
        """The snapshots that have their manifest, the oldest first."""
        return [name for name, path in self.manifests.items() if path not in self.touched]

    def good(self) -> list[str]:
        """The snapshots that have their manifest and are not damaged."""
        return [name for name in self.named() if not self.touched & {*self.packs[name]}]

    def files(self, what: str) -> list[Path]:
        """The manifests or packs that exist, in an order that does not depend on their random
        names."""
        if what.endswith("pack"):
            found = [pack for name in self.manifests for pack in self.packs[name]]
        else:
            kind = "catalog/*" if what.endswith("catalog") else "snapshots/*/*.json"
            found = sorted(self.folder.glob(kind))
        return [path for path in dict.fromkeys(found) if path.is_file() and path.stat().st_size]

    def forget(self, gone: set[str]) -> None:
        """Account for a prune, which rewrites the snapshots that it keeps. Damaged snapshots stay
        damaged."""
        for name in self.manifests.keys() & gone:
            del self.manifests[name]
        good = self.good()
        self.packs = {name: [] if name in good else [*self.touched] for name in self.named()}
        self.manifests = dict.fromkeys(self.packs)


def _store(case: Case, place: Place) -> None:
    folder = place.folder / "store"
    store = SnapshotStore(folder, threads=1, max_chain=3)
    for n in range(case["n"]):
        place.operations.take(store, f"n{n}", make_state(n))
    edited = _Edited(folder, *_files_of(folder))
    for edit in case["edits"]:
        _edit_store(edit, edited)
    if case["command"]:
        _by_command(case, edited, place)
        return
    if case["prune first"]:
        _prune(case, edited, place)
    _read_all(edited, place)
    _take_one(edited, place)
    _prune(case, edited, place)
    _read_all(edited, place)


def _files_of(folder: Path) -> tuple[dict[str, Path | None], dict[str, list[Path]]]:
    """Manifest and packs of each snapshot, in the order in which they were taken."""
    paths = sorted(folder.glob("snapshots/*/*.json"), key=lambda path: path.name)
    packs = {
        path.parent.name: [
            folder / "packs" / f"{pack}.ph.safetensors"
            for pack in json.loads(path.read_bytes())["packs"]
        ]
        for path in paths
    }
    return {path.parent.name: path for path in paths}, packs


def _edit_store(edit: Case, edited: _Edited) -> None:
    """Do one thing to the files of a store."""
    what = edit["what"]
    there = edited.files(what)
    if not there:
        return
    path = there[edit["on"] % len(there)]
    other = there[edit["seed"] % len(there)]
    new = _new_path(edit, path, other, edited)
    if what.startswith(("drop", "cut", "flip", "folder", "fifo")):
        edited.touched.add(path)
        _damage(edit, path)
    elif what == "sealed":
        _lie(edit, path)
        edited.touched.add(path)
        edited.may_lie = True
    elif what == "rename":
        edited.touched.add(path)
        path.rename(new)
    elif what == "copy":
        shutil.copy(path, new)
    elif what == "stray":
        new.write_bytes(_STRAYS[edit["text"]])
    else:
        (path.parent / f"stray-{edit['seed']}").write_bytes(_STRAYS[edit["text"]])


def _new_path(edit: Case, path: Path, other: Path, edited: _Edited) -> Path:
    """The name of a manifest that nobody wrote."""
    name = f"{edit['order']:012d}-{edit['generation']:06d}-{edit['seed']:016x}.json"
    parent = (other if edit["elsewhere"] else path).parent
    if edit["elsewhere"] and edit["bit"] < 3:
        parent = edited.folder / "snapshots" / f"stray-{edit['bit']}"
        parent.mkdir(exist_ok=True)
    return parent / name


def _lie(edit: Case, path: Path) -> None:
    """Change the content of a manifest, and correct its checksum."""
    try:
        document = json.loads(_SEAL[:1] + path.read_bytes()[len(_SEAL) :])
        text = edit_json(document, Random(edit["seed"]))
    except ValueError:  # an earlier edit has broken the file, or this one makes a circle
        return
    path.write_bytes(sealed(text))


def _damage(edit: Case, path: Path) -> None:
    data = bytearray(path.read_bytes())
    at, what = int(edit["at"] * len(data)), edit["what"].split()[0]
    if what == "cut":
        path.write_bytes(data[:at])
    elif what == "flip":
        data[at] ^= 1 << edit["bit"]
        path.write_bytes(data)
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path)


def _read_all(edited: _Edited, place: Place) -> None:
    """Read in every way, with a store object that has read nothing yet."""
    store = SnapshotStore(edited.folder, threads=1)
    good = edited.good()
    for name in good:
        try:
            state = place.operations.restore(store, name)
        except PackhorseError:
            # A readable manifest that lies may have the same name, and come before the snapshot's
            # own.
            claim(edited.may_lie, f"{name} is not damaged, and is not restored")
            continue
        claim(state["seed"] == int(name[1:]) or edited.may_lie, f"{name} is another")
        if state["seed"] == int(name[1:]):
            assert_same(state, make_state(state["seed"]))
    names = place.outcome(store.names)
    for name in names if isinstance(names, list) else ():
        place.outcome(lambda name=name: store.info(name))
        place.outcome(lambda name=name: store.restore(name, max_nbytes=1 << 24))
    place.outcome(store.verify)
    place.outcome(store.stored_nbytes)


def _take_one(edited: _Edited, place: Place) -> None:
    """Take a new snapshot, whatever other files there are, and restore it."""
    store = SnapshotStore(edited.folder, threads=1, max_chain=3)
    n = len(edited.manifests) + 100
    try:
        place.operations.take(store, f"n{n}", make_state(n))
    except (PackhorseError, ValueError, OSError):
        # A file may already have the last possible number.
        claim(edited.may_lie or _has_last_number(edited), "nothing can be taken any more")
        place.refuse()
        return
    found = place.outcome(lambda: place.operations.restore(store, f"n{n}"))
    if isinstance(found, PackhorseError):
        # Tensors that the store has already are not packed again, nor decoded to check them.
        harmed = any(path.parent.name == "packs" for path in edited.touched)
        claim(harmed, f"what was taken is not restored: {found}")
        edited.manifests[f"n{n}"], edited.packs[f"n{n}"] = None, [*edited.touched]
        return
    assert_same(found, make_state(n))
    edited.manifests[f"n{n}"], edited.packs[f"n{n}"] = None, []
    place.accept()


def _has_last_number(edited: _Edited) -> bool:
    return any(path.name.startswith("9" * 11) for path in edited.folder.glob("snapshots/*/*"))


def _prune(case: Case, edited: _Edited, place: Place) -> None:
    """Pruning must keep the newest snapshots, or say why it does not prune."""
    store = SnapshotStore(edited.folder, threads=1)
    newest, there = edited.named()[-case["keep"] :], set(edited.manifests)
    result = place.outcome(lambda: place.operations.prune(store, keep=case["keep"]))
    if isinstance(result, PackhorseError):
        return  # nothing was done
    # A manifest that was copied or renamed to a larger number, and is whole, may count as newer.
    if not edited.may_lie and not any(edit["what"] in ("copy", "rename") for edit in case["edits"]):
        gone = set(newest) - set(store.names())
        claim(not gone, f"prune removed {gone}, which are of the newest {case['keep']}: {result}")
    removed = there - set(newest) if isinstance(result, BaseException) else {*result.removed}
    edited.forget(removed)


def _by_command(case: Case, edited: _Edited, place: Place) -> None:
    """The same with the command, which must report in one line."""
    store = str(edited.folder)
    for args in (["list", store], ["show", store], ["verify", store], ["list", store, "--json"]):
        run_command(place, ["snapshot", *args])
    keep = ["prune", store, "--keep", str(case["keep"]), "--yes"]
    ended = run_command(place, ["snapshot", *keep, "--dry-run"])
    good = edited.good()
    if ended.is_good and not edited.may_lie:
        _read_all(edited, place)
    ended = run_command(place, ["snapshot", *keep])
    if good and not ended.is_good:
        _read_all(edited, place)


# Checkpoints of PyTorch.


def _draw_checkpoint(rng: Random) -> Case:
    return {"n": rng.randint(1, 3), "edits": [_draw_edit(rng) for _ in range(rng.choice((1, 2)))]}


def _checkpoint(case: Case, place: Place) -> None:
    """Edited checkpoints that build on one another: each must be loaded, or refused with a
    documented error."""
    from dcp_samples import MANIFEST, save

    folders = [place.folder / f"{n}" for n in range(case["n"])]
    for n, folder in enumerate(folders):
        base = folders[n - 1] if n else None
        save(_torch_state(n), folder, base=None if base is None else str(base), threads=1)
    needed = [_needed_by(folder / MANIFEST) for folder in folders]
    touched: set[Path] = set()
    for edit in case["edits"]:
        touched |= _edit_checkpoint(edit, folders)
    for n, folder in enumerate(folders):
        is_whole = not needed[n] & touched
        found = _load(n, folder, place)
        claim(found or not is_whole, f"checkpoint {n} is not damaged, and is not loaded")
    new = place.folder / "new"
    saved = _caught(lambda: save(_torch_state(9), new, base=str(folders[-1]), threads=1), place)
    if saved:
        claim(_load(9, new, place) or touched, "what was saved is not loaded")
    _caught(lambda: save(_torch_state(8), folders[-1], overwrite=True, threads=1), place)
    claim(_load(8, folders[-1], place) or touched, "what was saved again is not loaded")


def _torch_state(n: int) -> dict[str, Any]:
    import torch

    state = make_state(n)
    tensors = {key: state[key] for key in ("weights", "half", "frozen")}
    return {"n": n, **{key: torch.from_numpy(array) for key, array in tensors.items()}}


def _needed_by(manifest: Path) -> set[Path]:
    files = json.loads(manifest.read_bytes())["manifest"]["files"]
    return {manifest, *((manifest.parent / file["path"]).resolve() for file in files)}


def _edit_checkpoint(edit: Case, folders: list[Path]) -> set[Path]:
    """Do one thing to the files of checkpoints; returns the files that have changed."""
    there = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    path, what = there[edit["on"] % len(there)], edit["what"]
    if what.startswith(("drop", "cut", "flip", "folder", "fifo")):
        _damage(edit, path)
    elif what == "sealed" and path.suffix == ".json":
        with suppress(ValueError):  # the edit makes a circle
            document = json.loads(path.read_bytes())["manifest"]
            path.write_bytes(sealed_checkpoint(edit_json(document, Random(edit["seed"]))))
    elif what == "rename":
        path.rename(path.with_name(f"renamed-{path.name}"))
    else:
        (path.parent / f"shards-{edit['seed']:016x}-0-0.safetensors").write_bytes(
            _STRAYS[edit["text"]]
        )
        return set()
    return {path}


def _load(n: int, folder: Path, place: Place) -> bool:
    """Whether a checkpoint is loaded, bit for bit, or with other values because of a lie."""
    from dcp_samples import blank, load

    found = blank(_torch_state(n))
    if not _caught(lambda: load(found, folder, threads=1, max_nbytes=1 << 24), place):
        return False
    if found["n"] == n:
        assert_same(found, _torch_state(n))
    return True


def _caught(work: Callable[[], Any], place: Place) -> bool:
    """Whether a save or load succeeds; if not, every rank must report a documented error."""
    from torch.distributed.checkpoint.api import CheckpointException

    result = place.outcome(work, CheckpointException)
    if isinstance(result, CheckpointException):
        for error, _ in result.failures.values():
            kinds = (PackhorseError, OSError, AssertionError)  # PyTorch raises the last one
            claim(
                isinstance(error, kinds) or type(error) in (ValueError, RuntimeError),
                f"a rank fails with {type(error).__name__}: {error}",
            )
    return not isinstance(result, BaseException)


# Little memory.


def _draw_little_memory(rng: Random) -> Case:
    nbytes = rng.randrange(0, _LITTLE)
    return {"nbytes": nbytes, "numel": rng.choice((1000, 2_000_000, 4_000_000))}


def _little_memory(case: Case, place: Place) -> None:
    """Check that a good store is never called bad for lack of memory."""
    folder = place.folder / "store"
    array = np.random.default_rng(0).standard_normal(case["numel"]).astype(np.float32)
    store = SnapshotStore(folder, threads=1)
    store.take("a", {"x": array})
    store.take("b", {"x": array + np.float32(1e-4)})

    def verify() -> int:
        SnapshotStore(folder, threads=1).names()
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + case["nbytes"],) * 2)
        try:
            return int(SnapshotStore(folder, threads=1).verify() != [])
        except (MemoryError, OSError):
            return 3

    ended = run_child(verify, place.folder, limit_s=_LIMIT_S)
    claim(ended.code in (0, 3), f"verify of a good store with little memory: {ended}")
    place.accept()


_DRAWN: dict[str, Callable[[Random], Case]] = {
    "store": _draw_store,
    "checkpoint": _draw_checkpoint,
    "little memory": _draw_little_memory,
}
_RUN: dict[str, Callable[[Case, Place], None]] = {
    "store": _store,
    "checkpoint": _checkpoint,
    "little memory": _little_memory,
}
PART = Part("stores", "stores and checkpoints with edited, lost and stray files", draw, run)
