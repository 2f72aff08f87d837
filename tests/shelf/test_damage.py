"""A damaged shelf: what is damaged is named, the rest stays readable, and nothing wrong is
returned.

Damage is done in two ways: to a record, through LMDB, and to the bytes of the file, where LMDB's
own pages have no checksums.
"""

import multiprocessing
import os
import random
import shutil
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from shelf_workload import ModelTensor

from packhorse.disk import Shelf
from packhorse.errors import PackhorseError

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["shelf_workload"])
N_FLIPS = int(os.environ.get("PACKHORSE_FLIPS", "24"))


def content() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weights": rng.standard_normal((300, 64)).astype(np.float32),
        "noise": rng.integers(0, 256, (40, 1000)).astype(np.uint8),
        "row": np.arange(7),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shelf with tensors, one of deltas, and a tag of an older state."""
    folder = tmp_path_factory.mktemp("made") / "data.shelf"
    with Shelf(folder) as shelf:
        for name, array in content().items():
            tensor = shelf.create(name, (0, *array.shape[1:]), array.dtype, chunk_nbytes=4096)
            tensor.append(array)
        shelf.tag("before")
        shelf["weights"][3] = 0
        deltas = shelf.create("deltas", (0, 500), "float32", base="previous", keyframe_every=4)
        deltas.append(np.linspace(0, 1, 6000, dtype=np.float32).reshape(12, 500))
    return folder


def read_all(shelf: Shelf) -> dict[str, str]:
    """The digest of each tensor, also of tags; or its error."""
    found = {}
    views = {"": shelf} | {f"{tag}: ": shelf.at(tag) for tag in shelf.tags()}
    for prefix, view in views.items():
        for name in view:
            try:
                found[prefix + name] = ModelTensor(np.asarray(view[name])).digest()
            except PackhorseError as error:
                found[prefix + name] = f"{type(error).__name__}: {error}"
    return found


def read_in_child(folder: str, connection: Connection) -> None:
    try:
        with Shelf(folder, "r") as shelf:
            connection.send(read_all(shelf))
    except (PackhorseError, OSError) as error:
        connection.send(f"{type(error).__name__}: {error}")


def outcome_of(folder: Path, expected: dict[str, str]) -> str:
    """What comes of reading a damaged shelf."""
    ours, theirs = PROCESSES.Pipe()
    child = PROCESSES.Process(target=read_in_child, args=(str(folder), theirs))
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        child.join()
        return f"exit {child.exitcode}"
    child.join()
    if isinstance(found, str):
        return "refused"
    if found == expected:
        return "right"
    wrong = [
        name for name in found if found[name] != expected.get(name) and "Error" not in found[name]
    ]
    return f"wrong: {wrong}" if wrong or found.keys() != expected.keys() else "named"


def test_any_byte_of_the_file_flips(made: Path, tmp_path: Path) -> None:
    with Shelf(made, "r") as shelf:
        expected = read_all(shelf)
    rng, outcomes = random.Random(0), Counter[str]()
    file = next(made.glob("*.mdb")).name
    for number in range(N_FLIPS):
        folder = tmp_path / f"{number}"
        shutil.copytree(made, folder)
        data = bytearray((folder / file).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / file).write_bytes(data)
        outcomes[outcome_of(folder, expected)] += 1
    print(dict(outcomes))
    assert not [outcome for outcome in outcomes if outcome.startswith("wrong")], outcomes


def test_the_file_is_cut(made: Path, tmp_path: Path) -> None:
    """Each length gives an error or what is right; never SIGBUS, by which LMDB's map ends."""
    with Shelf(made, "r") as shelf:
        expected = read_all(shelf)
    file = next(made.glob("*.mdb"))
    length, outcomes = file.stat().st_size, {}
    for cut in (0, 1, 4096, 8192, 12288, length // 3, length // 2, length - 4096, length - 1):
        folder = tmp_path / f"{cut}"
        shutil.copytree(made, folder)
        os.truncate(folder / file.name, cut)
        outcomes[cut] = outcome_of(folder, expected)
    print(outcomes)
    assert set(outcomes.values()) <= {"refused", "named", "right"}, outcomes
