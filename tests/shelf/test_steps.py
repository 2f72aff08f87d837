"""Creating and compacting a shelf end at each of their steps: by a kill, an error of the system, or
Ctrl-C. Afterwards the shelf is as before or as it was to be, and nothing that is written to it is
lost."""

import itertools
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import shelf_steps
from disk_record import compile_recorder, images, read_record, recorded
from forked import fork_context
from shelf_steps import INTERRUPTER, create, end_at, fail, interrupt

from packhorse.disk import Shelf

EVERY = int(os.environ.get("PACKHORSE_EVERY_STEP", "4"))  # 1 tries all in test_power_goes


def make(folder: Path) -> None:
    with Shelf(folder) as shelf:
        shelf["x"] = np.arange(50)
        shelf.tag("tag")
        shelf["z"] = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
        del shelf["z"]


def check(folder: Path) -> None:
    """The shelf has all it had, and keeps what is written to it."""
    with Shelf(folder, "r") as shelf:
        assert shelf["x"][...].tolist() == list(range(50))
    with Shelf(folder) as shelf, Shelf(folder, "r") as reader:
        assert shelf["x"][...].tolist() == list(range(50))
        shelf["y"] = [1]
        assert reader["y"][...].tolist() == [1]
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3, names
    with Shelf(folder, "r") as shelf:
        assert shelf["y"][...].tolist() == [1]
        assert shelf.at("tag").keys() == ["x"]
        assert not shelf.verify()


def killed_at(what: str, folder: Path, n: int) -> bool:
    """Whether a process was killed at call `n`; False if it had fewer calls, and is done. It is
    forked from a small process, which takes a fraction of the time."""
    process = fork_context().Process(target=end_at, args=(what, str(folder), n))
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def test_compact_is_killed(tmp_path: Path) -> None:
    make(tmp_path / "made")
    for n in itertools.count():
        folder = tmp_path / f"{n}"
        shutil.copytree(tmp_path / "made", folder)
        was_killed = killed_at("compact", folder, n)
        check(folder)
        if not was_killed:
            break
    assert n > 10


@pytest.mark.parametrize("act", [fail, interrupt])
def test_compact_fails(tmp_path: Path, act: object) -> None:
    """The session goes on, and so do others that read."""
    outcomes = Counter[str]()
    make(tmp_path / "made")
    for n in itertools.count():
        folder = tmp_path / f"{n}"
        shutil.copytree(tmp_path / "made", folder)
        with Shelf(folder) as shelf, Shelf(folder, "r") as reader:
            INTERRUPTER.at(n, str(folder), act)
            try:
                shelf.compact()
                outcomes["done"] += 1
            except (OSError, KeyboardInterrupt) as error:
                outcomes[type(error).__name__] += 1
            ended = INTERRUPTER.end()
            for written in range(3):
                shelf["y"] = [written]
                assert reader["y"][...].tolist() == [written]
            if n % 2:
                shelf.compact()
        with Shelf(folder, "r") as shelf:
            assert shelf["y"][...].tolist() == [2]
        check(folder)
        if not ended:
            break
    assert len(outcomes) == 2, outcomes
    assert n > 8


@pytest.mark.parametrize("act", [fail, interrupt])
def test_creating_fails(tmp_path: Path, act: object) -> None:
    """The second try makes the shelf, in the same process."""
    for n in itertools.count():
        folder = tmp_path / f"{n}" / "a" / "data.shelf"
        INTERRUPTER.at(n, str(tmp_path), act)
        try:
            Shelf(folder).close()
        except (OSError, KeyboardInterrupt):
            assert INTERRUPTER.end()
        else:
            if not INTERRUPTER.end():
                break
        create(str(folder))
        with Shelf(folder, "r") as shelf:
            assert shelf["x"][...].tolist() == [1]
        assert len(list(folder.iterdir())) == 3
    assert n > 8


def test_creating_is_killed(tmp_path: Path) -> None:
    for n in itertools.count():
        folder = tmp_path / f"{n}" / "data.shelf"
        if not killed_at("create", folder, n):
            break
        create(str(folder))
        with Shelf(folder, "r") as shelf:
            assert shelf["x"][...].tolist() == [1]
            assert not shelf.verify()
    assert n > 8


@pytest.mark.parametrize("what", ["create", "compact"])
def test_power_goes_after_a_kill(tmp_path: Path, images_folder: Path, what: str) -> None:
    """A writer is killed at each step, and the next one commits. From then on a power loss takes
    nothing, also where the first one had not flushed the names that it made."""
    library = compile_recorder(tmp_path)
    n_images = 0
    for n in itertools.count(0, EVERY):
        watched, record = tmp_path / f"{n}", tmp_path / f"{n}.record"
        watched.mkdir()
        arguments = [what, str(watched / "a" / "data.shelf"), str(n)]
        command = [sys.executable, shelf_steps.__file__, *arguments]
        was_killed = recorded(library, watched, record, command)
        for image in images(read_record(record, watched), n_random=0):
            if image.marks:
                n_images += 1
                image.disk.write_to(images_folder / "image")
                with Shelf(images_folder / "image" / "a" / "data.shelf", "r") as shelf:
                    assert shelf["y"][...].tolist() == [2], (n, image.what)
                shutil.rmtree(images_folder / "image")
        if was_killed == "False\n":
            break
    assert n_images > 8
