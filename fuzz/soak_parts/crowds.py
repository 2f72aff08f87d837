"""Many processes at once: two that pack to one output, writers of one store, readers and a prune.

Of two processes that may not replace an existing output, exactly one wins and the other gets
an error. A writer gets an error if another is writing. A reader finds a state whole, or not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from snapshot_child import make_state
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore, verify_file, verify_folder
from soak_parts.case import Case, Part, Place, claim
from soak_parts.children import Child, Ended, start_child
from soak_parts.samples import digest, draw_tensors, write_file, write_folder

__all__ = ["PART"]

_LIMIT_S = 40.0
_WON, _TOLD = 0, 2
_BUSY = 3


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(("outputs", "outputs", "writers", "readers"))
    return {"kind": kind, **_DRAWN[kind](rng)}


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)


def _start_at_once(works: list[Callable[[], Any]], place: Place) -> list[Ended]:
    """Run children that begin together, once all are ready."""
    start = time.monotonic() + 0.01

    def at_start(work: Callable[[], Any]) -> Any:
        while time.monotonic() < start:
            pass
        return work()

    def begin(work: Callable[[], Any]) -> Child:
        return start_child(lambda: at_start(work), place.folder)

    children = [begin(work) for work in works]
    return [child.wait(_LIMIT_S) for child in children]


# One output.


def _draw_outputs(rng: Random) -> Case:
    shards = [draw_tensors(rng, rng.randint(1, 3), most=3000) for _ in range(2)]
    verb = rng.choice(("pack", "pack", "unpack"))
    return {"sources": shards, "verb": verb, "n": rng.choice((2, 3)),
            "folder": rng.random() < 0.4, "force": rng.random() < 0.2}  # fmt: skip


def _outputs(case: Case, place: Place) -> None:
    """Several processes write one output: one wins, and the others get an error that the output
    exists."""
    sources = [_make_source(case, i, place) for i in range(case["n"])]
    name = "out" if case["verb"] == "unpack" or case["folder"] else "out.ph.safetensors"
    output = place.folder / "place" / name
    output.parent.mkdir()
    force = ["--force"] * case["force"]

    def write(source: Path) -> Callable[[], int]:
        args = [case["verb"], str(source), "-o", str(output), *force]
        return lambda: place.operations.command(args)

    all_ended = _start_at_once([write(source) for source in sources], place)
    codes = sorted(ended.code for ended in all_ended)
    said = [ended.last_line for ended in all_ended]
    if case["force"]:
        claim(set(codes) <= {_WON, _TOLD, _BUSY} and _WON in codes, f"exit codes {codes}: {said}")
    else:
        wanted = [_WON, *[_TOLD] * (case["n"] - 1)]
        claim(
            codes == wanted, f"exit codes {codes} of {case['verb']}, and {wanted} are due: {said}"
        )
    winners = [i for i, ended in enumerate(all_ended) if ended.is_good]
    claim(_content(case, output, place) in [_wanted(case, i, place) for i in winners], "a mixture")
    left = sorted(os.listdir(output.parent))
    claim(left == [name], f"beside the output there is {left}")
    place.accept()


def _make_source(case: Case, i: int, place: Place) -> Path:
    """The source of a contender; for unpacking it is packed first."""
    folder = place.folder / f"{i}"
    folder.mkdir()
    specs = case["sources"][i % len(case["sources"])]
    source = folder / ("llama" if case["folder"] else "a.safetensors")
    if case["folder"]:
        write_folder({"shards": [specs], "index": True, "below": False}, source)
    else:
        write_file(source, specs)
    if case["verb"] == "pack":
        return source
    packed = folder / ("packed" if case["folder"] else "a.ph.safetensors")
    place.operations.command(["pack", str(source), "-o", str(packed)])
    return packed


def _wanted(case: Case, i: int, place: Place) -> Any:
    return digest(place.folder / f"{i}" / ("llama" if case["folder"] else "a.safetensors"))


def _content(case: Case, output: Path, place: Place) -> Any:
    """The unpacked content of the output."""
    if case["verb"] == "unpack":
        return digest(output)
    back = place.folder / "back"
    verify, unpack = (
        (verify_folder, place.operations.unpack_folder)
        if case["folder"]
        else (verify_file, place.operations.unpack_file)
    )
    claim(verify(output, threads=1) == [], "the output is not whole")
    unpack(output, back, threads=1)
    return digest(back)


# One store.


def _draw_writers(rng: Random) -> Case:
    return {"n": rng.randint(2, 4), "takes": rng.randint(2, 5), "seed": rng.getrandbits(16),
            "prune": rng.random() < 0.5}  # fmt: skip


def _writers(case: Case, place: Place) -> None:
    """Writers of one store: each takes its snapshot, or gets an error that another process is
    writing."""
    folder, log = place.folder / "store", place.folder / "taken"
    log.mkdir()
    place.operations.take(SnapshotStore(folder, threads=1), "first", make_state(0))

    def write(i: int) -> Callable[[], None]:
        return lambda: _write(case, place, folder, log, i)

    for ended in _start_at_once([write(i) for i in range(case["n"])], place):
        claim(ended.is_good, f"a writer: {ended.last_line}", ended.err)
    reader = SnapshotStore(folder, threads=1)
    taken = {path.name for path in log.iterdir()}
    claim(taken | {"first"} == set(reader.names()), f"taken: {taken}, there: {reader.names()}")
    for name in taken:
        assert_same(place.operations.restore(reader, name), make_state(int(name)))
    claim(reader.verify() == [], "verify finds something")
    place.accept()


def _write(case: Case, place: Place, folder: Path, log: Path, i: int) -> None:
    store = SnapshotStore(folder, threads=1, max_chain=2)
    for n in range(case["takes"]):
        seed = case["seed"] + 100 * i + n + 1
        try:
            place.operations.take(store, str(seed), make_state(seed))
            (log / str(seed)).mkdir()
            if case["prune"]:
                store.prune(keep=lambda info: True)
        except BlockingIOError:
            time.sleep(0.002)


# Readers.


def _draw_readers(rng: Random) -> Case:
    return {"n": rng.randint(1, 2), "takes": rng.randint(3, 8), "keep": rng.randint(1, 3)}


def _readers(case: Case, place: Place) -> None:
    """Readers while snapshots are taken and pruned: each state is whole, or gone."""
    folder, done = place.folder / "store", place.folder / "done"
    place.operations.take(SnapshotStore(folder, threads=1), "0", make_state(0))

    def write() -> None:
        store = SnapshotStore(folder, threads=1, max_chain=2)
        try:
            for n in range(1, case["takes"]):
                place.operations.take(store, str(n), make_state(n))
                place.operations.prune(store, keep=case["keep"])
        finally:
            done.touch()

    def read() -> None:
        store = SnapshotStore(folder, threads=1)
        while not done.exists():
            for name in store.names():
                try:
                    state = place.operations.restore(store, name)
                except ValueError as error:
                    claim("no snapshot is named" in str(error), f"{error!r}")
                    continue
                assert_same(state, make_state(int(name)))

    for ended in _start_at_once([write, *[read] * case["n"]], place):
        claim(ended.is_good, f"one of a writer and its readers: {ended.last_line}", ended.err)
    place.accept()


_DRAWN: dict[str, Callable[[Random], Case]] = {
    "outputs": _draw_outputs,
    "writers": _draw_writers,
    "readers": _draw_readers,
}
_RUN: dict[str, Callable[[Case, Place], None]] = {
    "outputs": _outputs,
    "writers": _writers,
    "readers": _readers,
}
PART = Part(
    "crowds", "two that pack to one output, several writers, readers during a prune", draw, run,
    limit_s=120.0, is_exact=False,
)  # fmt: skip
