"""Files that change while they are read: an error names them, and nothing is written."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk_samples import leftovers, sample_tensors, write_sample
from safetensors.numpy import load_file as load_plain
from safetensors.numpy import save_file

import packhorse
from packhorse import threads
from packhorse.cli import main
from packhorse.cli.measure import Settings, bench_file
from packhorse.codecs.content import content_hash
from packhorse.disk import (
    SnapshotStore,
    pack_file,
    pack_folder,
    plan_file,
    plan_folder,
    unpack_file,
    unpack_folder,
    verify_file,
)
from packhorse.disk.base_files import Lender, open_bases
from packhorse.errors import BaseMismatchError, ChangedError, CorruptionError
from packhorse.frame import base as frame_base
from packhorse.numpy import load_file
from packhorse.storage.safetensors_header import read_header

LONG_AGO = 1_600_000_000


def age(*paths: Path) -> None:
    """Changes within one tick of the clock get the same timestamp."""
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"changed")


def write_and_set_the_time_back(path: Path) -> None:
    write_in_place(path)
    age(path)


def replace(path: Path) -> None:
    other = path.with_name("another")
    other.write_bytes(path.read_bytes())
    age(other)
    other.rename(path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "written": (write_in_place, "it was written to"),
    "written, and its time set back": (
        write_and_set_the_time_back,
        "its content, name, links or perm",
    ),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "its size went from"),
    "shorter": (lambda path: os.truncate(path, 3000), r"its size went from \d+ to 3000 bytes"),
    "replaced": (replace, "it was replaced by another file"),
    "removed": (lambda path: path.unlink(), "it was moved or removed"),
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file that is read in many batches."""
    monkeypatch.setattr(threads, "_BATCH_NBYTES", 1000)
    write_sample(tmp_path / "model")
    age(tmp_path / "model")
    return tmp_path / "model"


def once(change: Callable[[Path], None], path: Path) -> Callable[[int], None]:
    """A progress function that changes the file at its first call."""
    is_done = False

    def progress(nbytes: int) -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            change(path)

    return progress


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_is_not_packed(model, tmp_path, how):
    change, words = CHANGES[how]
    with pytest.raises(
        OSError, match=f"{model}: changed while it was being read .{words}"
    ) as caught:
        pack_file(model, tmp_path / "out", progress=once(change, model))
    assert "so nothing was written; try again when nothing writes to it" in str(caught.value)
    assert not leftovers(tmp_path, "model")


@pytest.mark.parametrize("how", CHANGES)
def test_a_packed_file_that_changes_is_not_unpacked(model, tmp_path, how):
    change, words = CHANGES[how]
    packed = tmp_path / "packed"
    pack_file(model, packed)
    age(packed)
    with pytest.raises(OSError, match=f"{packed}: changed while it was being read .{words}"):
        unpack_file(packed, tmp_path / "out", progress=once(change, packed))
    assert not leftovers(tmp_path, "model", "packed")


def test_a_base_that_changes_is_not_packed_against(model, tmp_path):
    base = tmp_path / "base"
    write_sample(base, 1)
    age(base)
    with pytest.raises(OSError, match=f"{base}: changed while it was being read"):
        pack_file(model, tmp_path / "out", base=base, progress=once(write_in_place, base))
    assert not leftovers(tmp_path, "model", "base")


def test_a_file_that_changes_is_not_planned(model, tmp_path):
    class Writing(dict):
        def __getitem__(self, name):
            write_in_place(model)
            return super().__getitem__(name)

    with pytest.raises(OSError, match=f"{model}: changed while it was being read"):
        plan_file(model, base=Writing(sample_tensors(1)))
    (tmp_path / "folder").mkdir()
    model = model.rename(tmp_path / "folder" / "model.safetensors")
    age(model)
    with pytest.raises(OSError, match=f"{model}: changed while it was being read"):
        plan_folder(tmp_path / "folder", base=Writing(sample_tensors(1)))


def test_no_snapshot_is_made_of_files_that_change(model, tmp_path):
    second = tmp_path / "second"
    save_file({"other": np.arange(5000)}, second)
    age(second)
    with SnapshotStore(tmp_path / "store") as store:
        for path in (model, second):
            progress = once(write_in_place, path)
            with pytest.raises(OSError, match=f"{path}: changed while it was being read"):
                store.take_files("one", [model, second], progress=progress)
            age(path)
        assert store.names() == []
        store.take_files("one", [model, second])
        assert store.verify() == []


def test_no_speed_is_told_of_a_file_that_changes(model):
    with pytest.raises(OSError, match=f"{model}: changed while it was being read"):
        bench_file(model, Settings("fast", 1, 1), once(write_in_place, model))


def test_verify_tells_of_a_packed_file_that_changes(model, tmp_path):
    packed = tmp_path / "packed"
    pack_file(model, packed)
    age(packed)
    other = tmp_path / "packed too"
    other.write_bytes(packed.read_bytes())
    age(other)
    problems = verify_file(packed, progress=once(lambda path: other.rename(path), packed))
    assert [problem.message.partition(",")[0] for problem in problems] == [
        f"{packed}: changed while it was being read (it was replaced by another file)"
    ]


FOLDER_CHANGES = {
    "a model file that is packed already": ("a.safetensors", write_in_place),
    "a model file that is packed next": ("z.safetensors", write_in_place),
    "an index": ("m.safetensors.index.json", write_in_place),
    "a file that is copied": ("config.json", write_in_place),
    "a file that comes": ("sub/new", lambda path: path.write_text("new")),
    "a file that goes": ("config.json", lambda path: path.unlink()),
}


@pytest.mark.parametrize("work", ["pack", "unpack"])
@pytest.mark.parametrize("what", FOLDER_CHANGES)
def test_a_folder_that_changes_is_refused(tmp_path, what, work):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for seed, name in enumerate(("a.safetensors", "z.safetensors")):
        write_sample(source / name, seed)
    index = '{"metadata": {"padding": "%s"}, "weight_map": {"x": "a.safetensors"}}'
    (source / "m.safetensors.index.json").write_text(index % ("-" * 200))
    (source / "config.json").write_text("{}" + " " * 200)
    name, change = FOLDER_CHANGES[what]
    run = pack_folder
    if work == "unpack":
        pack_folder(source, tmp_path / "packed")
        source, run, name = tmp_path / "packed", unpack_folder, name.replace(".s", ".ph.s")
        name = name.replace("m.ph.", "m.")
    age(*(path for path in source.rglob("*") if path.is_file()))
    with pytest.raises(OSError, match=f"{source / name}: (changed|added or removed) while"):
        run(source, tmp_path / "out", progress=once(change, source / name))
    assert not leftovers(tmp_path, "source", "packed")


class Mapping:
    """A file that is written to through a mapping. Only the first write to a page changes times."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        header = read_header(path)
        (entry,) = [entry for entry in header.entries if entry.name == name]
        self._at = header.data_offset + entry.start
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._memory[self._at] = self._memory[self._at]

    def write(self) -> None:
        self._memory[self._at] ^= 1


def is_right(get: Callable[[], np.ndarray], wanted: np.ndarray) -> bool:
    """Whether a tensor was read; if it was, it must be right."""
    try:
        got = get()
    except (BaseMismatchError, ChangedError):
        return False
    assert np.array_equal(got, wanted)
    return True


@pytest.fixture
def based(tmp_path):
    """A tensor packed against a base that is written to through a mapping, and the base."""
    old = {"a": np.random.default_rng(0).standard_normal((500, 100)).astype(np.float32)}
    new = old["a"].copy()
    new[::7] += 1e-3
    save_file(old, tmp_path / "old")
    save_file({"a": new}, tmp_path / "new")
    pack_file(tmp_path / "new", tmp_path / "packed", base=tmp_path / "old")
    return tmp_path / "packed", Mapping(tmp_path / "old", "a"), new


def test_a_base_whose_times_do_not_tell_gives_no_wrong_slice(based):
    packed, base, new = based
    with packhorse.open_file(packed, base=base.path) as file:
        part = file.get_slice("a")
        assert is_right(lambda: part[0], new[0])
        base.write()
        is_right(lambda: part[0], new[0])  # it is, unless the system wrote the page to the disk
        is_right(lambda: part[1:3], new[1:3])
    with packhorse.open_file(packed, base=base.path) as file:
        assert not is_right(lambda: file.get_slice("a")[0], new[0])


def write_once_compared(monkeypatch, mapping: Mapping) -> None:
    """Write to a base each time right after its hash was checked."""

    def compare(data, **options):
        digest = content_hash(data, **options)
        mapping.write()
        return digest

    monkeypatch.setattr(frame_base, "content_hash", compare)


@pytest.mark.parametrize("is_slice", [False, True])
def test_a_base_that_is_written_to_after_it_was_compared_gives_no_wrong_tensor(
    based, monkeypatch, is_slice
):
    packed, mapping, new = based
    with packhorse.open_file(packed, base=mapping.path) as file:
        write_once_compared(monkeypatch, mapping)
        for _ in range(2):
            if is_slice:
                is_right(lambda: file.get_slice("a")[0], new[0])
            else:
                is_right(lambda: file.get_tensor("a"), new)
            mapping.write()


READERS = {
    "unpack": lambda packed, base: unpack_file(packed, packed.with_name("back"), base=base),
    "verify": lambda packed, base: verify_file(packed, base=base),
    "load": lambda packed, base: load_file(packed, base=base),
    "open": lambda packed, base: packhorse.open_file(packed, base=base).get_tensor("a"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_base_that_changes_is_not_told_as_damage(based, monkeypatch, read, kind):
    """The base is right only while it is checked, and its times do not show the change."""
    packed, mapping, _ = based
    memory = load_plain(mapping.path)["a"].copy()
    base = mapping.path if kind == "file" else {"a": memory}
    where = mapping.path if kind == "file" else "the base given"

    def write():
        mapping.write()
        memory.view(np.uint8)[0] ^= 1

    def compare(data, **options):
        write()
        digest = content_hash(data, **options)
        write()
        return digest

    write()
    monkeypatch.setattr(frame_base, "content_hash", compare)
    with pytest.raises(ChangedError) as told:
        READERS[read](packed, base)
    words = "tensor 'a' changed while it was being read as a base, so nothing was written; try"
    assert str(told.value).startswith(f"{where}: {words}")
    assert not leftovers(packed.parent, "old", "new", "packed")


def test_the_command_says_so_too(based, monkeypatch, capsys):
    packed, mapping, _ = based
    write_once_compared(monkeypatch, mapping)
    for verb in (["unpack", "-o", str(packed.with_name("back"))], ["verify"]):
        assert main([*verb, str(packed), "--base", str(mapping.path)]) == 3
        assert f"{mapping.path}: tensor 'a' changed while" in capsys.readouterr().err
        mapping.write()


def test_a_base_that_is_back_when_it_is_looked_at_is_not_told_as_damage(based):
    packed, mapping, _ = based
    with (
        packhorse.open_file(packed) as file,
        open_bases(mapping.path) as bases,
        pytest.raises(ChangedError, match=f"{mapping.path}: tensor 'a' changed"),
        Lender(bases, None).lend("a", file.frame("a"), 1),
    ):
        raise CorruptionError("decoded with what the base was in between")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_damage_is_told_as_damage_where_there_is_a_base(based, read, kind):
    packed, mapping, _ = based
    base = mapping.path if kind == "file" else load_plain(mapping.path)
    data = bytearray(packed.read_bytes())
    data[-100] ^= 1
    packed.write_bytes(data)
    if read == "verify":
        (problem,) = verify_file(packed, base=base)
        assert f"{packed}: tensor 'a'" in problem.message
        return
    with pytest.raises(CorruptionError, match=f"{packed}: tensor 'a'"):
        READERS[read](packed, base)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_whole_tensor_needs_the_right_base(based, kind):
    packed, mapping, new = based
    memory = {"a": np.zeros_like(new)}
    mapping.write()
    with (
        packhorse.open_file(packed, base=mapping.path if kind == "file" else memory) as file,
        pytest.raises(BaseMismatchError, match="tensor 'a': .*content hash"),  # noqa: RUF043
    ):
        file.get_tensor("a")
