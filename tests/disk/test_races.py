"""Two writers of the same output: neither removes the other's finished output."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from disk_samples import leftovers, write_sample

from packhorse.disk import SnapshotStore, pack_file, pack_folder, unpack_file
from packhorse.storage import atomic, rename
from packhorse.storage.local import LocalStorage


def without_renameat2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "_renameat2", lambda *_: False)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path, **_: object) -> None:
        raise OSError(1, "Operation not permitted")

    without_renameat2(monkeypatch)
    monkeypatch.setattr(os, "link", link)


SYSTEMS = {
    "renameat2": lambda monkeypatch: None,
    "links": without_renameat2,
    "neither": without_links,
}


@pytest.fixture(params=SYSTEMS)
def system(request, monkeypatch):
    """Each way to rename in turn."""
    SYSTEMS[request.param](monkeypatch)


class Meeting:
    """Two threads that pack; each waits at its last call of progress until the other arrives
    there."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.outcomes: list[object] = []

    def run(self, *works) -> list[object]:
        threads = [threading.Thread(target=self._one, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.outcomes

    def _one(self, work) -> None:
        try:
            self.outcomes.append(work(self._hold()))
        except Exception as error:
            self.outcomes.append(error)

    def _hold(self):
        waits = True

        def progress(nbytes: int) -> None:
            nonlocal waits
            if waits:  # all checks before the work are done
                waits = False
                self.barrier.wait()

        return progress


def check_one_lost(outcomes: list[object], output: Path) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert len(errors) == 1
    assert isinstance(errors[0], FileExistsError)
    assert str(errors[0]).startswith(f"{output}: already exists")
    assert "(force, --force) or name another" in str(errors[0])


def test_of_two_packs_to_one_file_one_is_refused(tmp_path, system):
    sources = [tmp_path / "a", tmp_path / "b"]
    for seed, source in enumerate(sources):
        write_sample(source, seed)
    output, meeting = tmp_path / "out", Meeting()
    works = [lambda p, s=source: pack_file(s, output, progress=p) for source in sources]
    check_one_lost(meeting.run(*works), output)
    (winner,) = [o.source for o in meeting.outcomes if not isinstance(o, Exception)]
    unpack_file(output, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == winner.read_bytes()
    assert not leftovers(tmp_path, "a", "b", "out", "back")


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_of_two_packs_to_one_folder_one_is_refused(tmp_path, system, is_there):
    sources = [tmp_path / "a", tmp_path / "b"]
    for seed, source in enumerate(sources):
        source.mkdir()
        write_sample(source / f"{source.name}.safetensors", seed)
    output, meeting = tmp_path / "out", Meeting()
    if is_there:
        output.mkdir()
    works = [lambda p, s=source: pack_folder(s, output, progress=p) for source in sources]
    check_one_lost(meeting.run(*works), output)
    (winner,) = [o.source for o in meeting.outcomes if not isinstance(o, Exception)]
    assert os.listdir(output) == [f"{winner.name}.ph.safetensors"]
    assert not leftovers(tmp_path, "a", "b", "out")


def test_a_folder_to_be_replaced_keeps_what_came_into_it_meanwhile(tmp_path, system):
    """The folder was checked at the beginning; a file that was added since must not be lost."""
    (tmp_path / "model").mkdir()
    write_sample(tmp_path / "model" / "a.safetensors")
    output = tmp_path / "out"
    pack_folder(tmp_path / "model", output)
    before = (output / "a.ph.safetensors").stat().st_ino

    def write(nbytes: int) -> None:
        (output / "precious").write_text("mine")

    with pytest.raises(FileExistsError, match="out: contains precious, .*move it away"):  # noqa: RUF043
        pack_folder(tmp_path / "model", output, force=True, progress=write)
    assert sorted(os.listdir(output)) == ["a.ph.safetensors", "precious"]
    assert (output / "a.ph.safetensors").stat().st_ino == before
    assert not leftovers(tmp_path, "model", "out")


def test_an_object_of_a_store_is_written_once(tmp_path, system):
    """Of two writers without `force`, one is refused."""
    storage = LocalStorage(tmp_path)

    def write() -> None:
        with storage.create("a") as sink:
            sink.write(b"second")
            storage.put("a", b"first")

    with pytest.raises(FileExistsError):
        write()
    assert storage.read("a", 100) == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_an_export_of_a_snapshot_replaces_nothing(tmp_path, system):
    output = tmp_path / "out.safetensors"
    with SnapshotStore(tmp_path / "store") as store:
        store.take("one", {"a": np.arange(1000)})
        with pytest.raises(FileExistsError, match="already exists"):
            store.restore_file("one", output, progress=lambda nbytes: output.write_text("mine"))
    assert output.read_text() == "mine"
    assert not leftovers(tmp_path, "store", "out.safetensors")


def test_a_file_system_without_links_leaves_no_claim_behind(tmp_path, monkeypatch):
    without_links(monkeypatch)

    def replace(source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="Input/output"), atomic.atomic_file(tmp_path / "out"):
        pass
    assert not os.listdir(tmp_path)


def test_an_interrupt_right_after_a_folder_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, n_calls = Path.mkdir, 0

    def mkdir(path: Path) -> None:
        nonlocal n_calls
        n_calls += 1
        real(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(KeyboardInterrupt), atomic.atomic_folder(tmp_path / "out", None):
        pass
    assert n_calls == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", [1, 2], ids=["first", "second"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_swap_of_folders_that_fails_half_way_leaves_the_old_one(
    tmp_path, system, monkeypatch, call, after
):
    """Any of its renames may be interrupted or refused."""
    (tmp_path / "model").mkdir()
    write_sample(tmp_path / "model" / "a.safetensors")
    output = tmp_path / "out"
    pack_folder(tmp_path / "model", output)
    old = (output / "a.ph.safetensors").stat().st_ino
    real, n_calls = os.rename, 0

    def rename_once(source: Path, target: Path) -> None:
        nonlocal n_calls
        is_swap = Path(source).is_dir() and not (Path(target) == output and n_calls == 0)
        n_calls += 1
        fails = is_swap and n_calls == call + 1
        if fails and not after:
            raise KeyboardInterrupt
        real(source, target)
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename_once)
    try:
        pack_folder(tmp_path / "model", output, force=True)
    except KeyboardInterrupt:
        assert (output / "a.ph.safetensors").stat().st_ino == old
    assert os.listdir(output) == ["a.ph.safetensors"]
    assert not leftovers(tmp_path, "model", "out")


def test_threads_pack_small_tensors_side_by_side(tmp_path):
    """Threads map and unmap at once, which once corrupted the memory of the process."""
    for name in "ab":
        (tmp_path / name).mkdir()
        write_sample(tmp_path / name / "x.safetensors", ord(name))
    failures = []

    def work(name: str) -> None:
        try:
            for i in range(40):
                pack_folder(tmp_path / name, tmp_path / f"{name}{i}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
