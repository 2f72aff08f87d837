"""After a power loss at any moment, a shelf has the last state that was committed, or the one that
was being committed.

`PACKHORSE_POWER_STEPS=400 pytest tests/shelf/test_power_loss.py` does so with more steps, and with
more choices of what has survived at each moment.
"""

import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import shelf_workload
from disk_record import Call, Image, compile_recorder, images, read_record, recorded
from shelf_workload import Ledger, Model, work

from packhorse.disk import Shelf
from packhorse.errors import PackhorseError

N_STEPS = int(os.environ.get("PACKHORSE_POWER_STEPS", "14"))
N_RANDOM = 8 if N_STEPS > 100 else 1
SEED = int(os.environ.get("PACKHORSE_SEED", "0"))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """What a shelf asks of the disk: it is made, and steps are done."""
    folder = tmp_path_factory.mktemp("recorded")
    library, watched = compile_recorder(folder), folder / "watched"
    watched.mkdir()
    arguments = [str(watched / "data.shelf"), str(SEED), str(N_STEPS)]
    command = [sys.executable, shelf_workload.__file__, *arguments]
    recorded(library, watched, folder / "record", command)
    return read_record(folder / "record", watched)


def open_image(image: Image, folder: Path, number: int) -> Shelf:
    """Open the shelf of an image. The file of LMDB's locks may have any bytes."""
    image.disk.write_to(folder)
    for lock in folder.rglob("*.mdb-lock"):
        if number % 3 == 0:
            lock.write_bytes(random.Random(number).randbytes(lock.stat().st_size))
    writes = number % 2 == 0 or not Ledger(image.marks).n_done
    return Shelf(folder / "data.shelf", "r+" if writes else "r")


def check(image: Image, folder: Path, number: int) -> str:
    """The digest of a state that the shelf may have after a power loss."""
    ledger = Ledger(image.marks)
    where = f"call {image.n_calls}, {image.what} survived, {ledger.running}"
    with open_image(image, folder, number) as shelf:
        found = Model.read(shelf).digest()
        assert found in (ledger.allowed or {Model().digest()}), where
        if number % 8 == 0:
            assert not shelf.verify(), where
            work(shelf, lambda line: None, seed=number, n_steps=1)
    shutil.rmtree(folder)
    return found


def test_power_may_go_at_any_moment(images_folder: Path, calls: list[Call]) -> None:
    states, kinds = Counter[str](), Counter[str]()
    for number, image in enumerate(images(calls, n_random=N_RANDOM, seed=SEED)):
        states[check(image, images_folder / "image", number)] += 1
        kinds[str(Ledger(image.marks).running)] += 1
    print(f"{len(calls)} calls, {states.total()} images, {len(states)} states: {dict(kinds)}")
    assert states.total() > 10 * N_STEPS


def test_only_locks_are_written_through_a_map(calls: list[Call]) -> None:
    """The recorder does not see what is written through a map."""
    mapped = {call.name for call in calls if call.kind == "p"}
    assert mapped
    assert all(name.endswith("-lock") for name in mapped)


def test_the_record_has_all_bytes(calls: list[Call], tmp_path: Path) -> None:
    """The last image, with everything, is the shelf that the process left."""
    *_, last = (image for image in images(calls, n_random=0) if image.what == "everything")
    ledger = Ledger(last.marks)
    assert ledger.n_done == N_STEPS + 1
    last.disk.write_to(tmp_path / "image")
    with Shelf(tmp_path / "image" / "data.shelf", "r") as shelf:
        assert {Model.read(shelf).digest()} == ledger.allowed


@pytest.mark.parametrize("lost", ["syncs", "O_DSYNC"])
def test_a_missing_sync_is_found(images_folder: Path, calls: list[Call], lost: str) -> None:
    """On a disk that ignores some of its syncs, the same shelf is damaged or too old."""
    if lost == "syncs":
        worse = [call for call in calls if call.kind != "s" or call.durable]
    else:
        worse = [Call(**{**vars(call), "durable": call.kind == "s"}) for call in calls]
    assert any(has_loss(image, images_folder / "image") for image in images(worse, n_random=1))


def has_loss(image: Image, folder: Path) -> bool:
    """Whether the shelf has no state that it may have. Zeros follow the file, as LMDB would be
    killed (SIGBUS) where a page that it needs lies behind the end."""
    allowed = Ledger(image.marks).allowed
    image.disk.write_to(folder)
    for path in folder.rglob("*.mdb"):
        with path.open("r+b") as file:
            file.truncate(4 << 20)
    try:
        with Shelf(folder / "data.shelf") as shelf:
            return bool(allowed) and Model.read(shelf).digest() not in allowed
    except (PackhorseError, OSError):
        return True
    finally:
        shutil.rmtree(folder)
