"""Files that are cut short while they are mapped: an error names them. Without the core's handler,
SIGBUS would end a process that reads the missing part."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import packhorse
from packhorse import _core
from packhorse import numpy as ph_numpy
from packhorse.disk import batches, lazy_bytes, pack_file, unpack_file
from packhorse.disk.packed_file import PackedFile
from packhorse.errors import TruncationError
from packhorse.frame import compress_buffer
from packhorse.storage.local import LocalStorage
from packhorse.storage.source import open_source

PAGE = mmap.PAGESIZE
LARGE = 6 << 20  # large enough to be mapped by itself
LOST = "a part of it could not be read: it was cut short after it was opened"


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    small = {f"small{i}": rng.standard_normal((64, 64), np.float32) for i in range(8)}
    save_file(small | {"zlarge": rng.standard_normal(LARGE // 4, np.float32)}, tmp_path / "model")
    return tmp_path / "model"


def mapped(path: Path, *places: tuple[int, int]) -> tuple[_core.FileMapper, list[memoryview]]:
    mapper = _core.FileMapper()
    with path.open("rb") as file:
        return mapper, [mapper.map(file.fileno(), *place) for place in places]


def cut_below(path: Path, nbytes: int) -> None:
    """Cuts a file that another reader has opened and mapped before."""
    os.truncate(path, nbytes)


def test_what_is_gone_is_zeros_and_is_told(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 251)) * 200)
    mapper, (whole, part, first) = mapped(path, (0, 50_000), (5000, 40_000), (0, 100))
    other, (undisturbed,) = mapped(path, (0, PAGE))
    assert whole.readonly
    assert bytes(part) == path.read_bytes()[5000:45_000]
    cut_below(path, 2 * PAGE)
    assert bytes(first) == bytes(range(1, 101))
    assert not mapper.has_lost  # the missing part was not read
    assert bytes(part) == path.read_bytes()[5000:] + bytes(45_000 - 2 * PAGE)
    assert bytes(whole) == path.read_bytes() + bytes(50_000 - 2 * PAGE)
    assert mapper.has_lost
    assert undisturbed[-1] == path.read_bytes()[PAGE - 1]
    assert not other.has_lost


def is_in_memory(path: Path, offset: int) -> bool:
    """Whether the system has the page of a byte in its cache. Skips if it does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not tell what it has in its cache")
    with path.open("rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"this file system does not tell what is in the cache: {error}")


def forget(path: Path) -> None:
    """Removes a file from the system's cache, where its file system can do that."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_many_parts_are_those_that_single_ones_are(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(2 * LARGE))
    places = [(0, 3), (LARGE - 1, 2), (7, 0), (1, LARGE), (2 * LARGE - 5, 5)]
    with open_source(path) as source:
        parts = source.map_all(places)
        assert parts == [source.map(*place) for place in places]
        assert [bytes(part) for part in parts] == [
            path.read_bytes()[start : start + nbytes] for start, nbytes in places
        ]
        assert source.bytes_at([5, 0, 2 * LARGE - 1]) == bytes(
            [*parts[3][4:5], *parts[0][:1], *parts[4][-1:]]
        )
        cut_below(path, LARGE)
        for read in (source.map_all, lambda places: source.bytes_at([2 * LARGE - 1])):
            with pytest.raises(TruncationError, match=f"needed, but it has {LARGE} bytes"):
                read(places)


@pytest.mark.parametrize("n_mappings", [1, 2])
def test_missing_pages_are_read_at_once(tmp_path, n_mappings: int):
    path = tmp_path / "file"
    path.write_bytes(bytes(LARGE))
    forget(path)
    if is_in_memory(path, LARGE // 2):
        pytest.skip("this file system keeps what it should forget")
    forget(path)
    nbytes = LARGE // n_mappings
    _, views = mapped(path, *[(i * nbytes, nbytes) for i in range(n_mappings)])
    parts = [view[at : at + PAGE + 1] for view in views for at in range(0, nbytes, PAGE + 1)]
    _core.read_now(parts)
    assert all(is_in_memory(path, offset) for offset in range(0, LARGE, PAGE))


def test_lost_pages_are_left_to_those_who_read_them(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    mapper, views = mapped(path, (0, 4 * PAGE))
    cut_below(path, PAGE)
    _core.read_now([*views, memoryview(b""), memoryview(b"memory of somebody")])
    assert not mapper.has_lost
    assert bytes(views[0]) == bytes(4 * PAGE)
    assert mapper.has_lost


@pytest.fixture
def read_ahead(monkeypatch):
    """The number of bytes of each read."""
    read, read_now = [], _core.read_now

    def noting(views):
        read.append(sum(view.nbytes for view in views))
        read_now(views)

    monkeypatch.setattr(_core, "read_now", noting)
    return read


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def after_reads(monkeypatch, read_ahead):
    """Makes a function wait until more has been read than it takes; returns the number of reads
    before each call."""

    def watch(module, name):
        work, n_read = getattr(module, name), []

        def waiting(*args):
            wait_until(lambda: len(read_ahead) > min(len(n_read) + 1, 2))
            n_read.append(len(read_ahead))
            return work(*args)

        monkeypatch.setattr(module, name, waiting)
        return n_read

    return watch


def test_packing_reads_the_next_batch_meanwhile(tmp_path, read_ahead, after_reads):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, 10 << 20, np.uint8)
    tensors = {f"t{i}": rows for i in range(5)} | {"whole": np.resize(rows, 40 << 20)}
    save_file(tensors, tmp_path / "model")
    n_read = after_reads(batches, "_pack_batch")
    pack_file(tmp_path / "model", tmp_path / "packed")
    assert read_ahead == [30 << 20, 20 << 20, 40 << 20]
    assert n_read == [2, 3, 3]
    unpack_file(tmp_path / "packed", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "model").read_bytes()


def test_loading_reads_the_next_run_meanwhile(tmp_path, read_ahead, after_reads, monkeypatch):
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.integers(0, 256, 20 << 20, np.uint8) for i in range(3)}
    save_file(tensors, tmp_path / "model")
    pack_file(tmp_path / "model", tmp_path / "packed")
    with packhorse.open_file(tmp_path / "packed") as packed:
        frames = [packed.frame(name).nbytes for name in packed.offset_keys()]
    read_ahead.clear()
    monkeypatch.setattr(lazy_bytes, "_is_cached", lambda descriptor, nbytes: False)
    n_read = after_reads(_core, "unpack_to_views")
    loaded = ph_numpy.load_file(tmp_path / "packed")
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    assert read_ahead == frames
    assert n_read == [2, 3, 3]


def test_what_is_in_the_cache_is_loaded_at_once(tmp_path, read_ahead):
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.integers(0, 256, 20 << 20, np.uint8) for i in range(2)}
    save_file(tensors, tmp_path / "model")
    pack_file(tmp_path / "model", tmp_path / "packed")
    data = (tmp_path / "packed").read_bytes()  # now it is in the cache
    read_ahead.clear()
    ph_numpy.load_file(tmp_path / "packed")
    ph_numpy.load(data)
    assert not read_ahead
    forget(tmp_path / "packed")
    if is_in_memory(tmp_path / "packed", 10 << 20):
        pytest.skip("this file system keeps what it should forget")
    forget(tmp_path / "packed")
    loaded = ph_numpy.load_file(tmp_path / "packed")
    assert len(read_ahead) == 2
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


def test_a_mapping_ends_with_its_last_view(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE * 4))

    def n_mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    _, views = mapped(path, *((PAGE * i, 10) for i in range(4)))
    part = views[1][2:3]
    assert n_mappings() == 4
    del views
    assert n_mappings() == 1
    assert part[0] == 0
    del part
    assert n_mappings() == 0


@pytest.mark.parametrize("descriptor", [-1, 0])
def test_what_cannot_be_mapped_is_an_error_of_the_system(descriptor):
    with pytest.raises(OSError, match=r"\[Errno"):
        _core.FileMapper().map(descriptor, 0, 0 if descriptor == 0 else 10)


@pytest.mark.parametrize("nbytes", [LARGE, 50_000], ids=["by itself", "in a cell"])
def test_a_source_that_is_cut_while_it_is_encoded_is_refused(tmp_path, nbytes):
    path = tmp_path / "model"
    path.write_bytes(np.random.default_rng(0).bytes(nbytes))
    with open_source(path) as source:
        data = source.map(0, nbytes)
        cut_below(path, nbytes // 2)
        frame = compress_buffer(data, dtype="F32", shape=(nbytes // 4,))
        path.write_bytes(bytes(nbytes))
        os.utime(path, ns=(0, source.stamp.modified_ns))
        with pytest.raises(OSError, match=f"changed while it was|{LOST}"):
            source.check()
        source.stamp = source.now()  # as within one tick of the clock
        with pytest.raises(OSError, match=LOST):
            source.check()
    assert len(frame.to_bytes()) > 0


def test_the_system_itself_comes_to_a_part_that_is_gone(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(bytes(LARGE))

    def copy_while_it_is_cut() -> None:
        with (tmp_path / "out").open("wb", buffering=0) as output, open_source(path) as source:
            data = source.map(0, LARGE)
            cut_below(path, 0)
            output.write(data)

    with pytest.raises(OSError, match=r"model: .*its size went from"):
        copy_while_it_is_cut()


def read_all(file: PackedFile) -> None:
    file.get_tensors()


def read_one(file: PackedFile) -> None:
    file.get_tensor("zlarge")


def read_slice(file: PackedFile) -> None:
    file.get_slice("zlarge")[LARGE // 8 :]


@pytest.mark.parametrize("read", [read_all, read_one, read_slice])
def test_a_packed_file_that_is_cut_while_it_is_open(model, tmp_path, read):
    packed = tmp_path / "packed"
    pack_file(model, packed)
    with packhorse.open_file(packed) as file:
        before = file.get_tensor("small0")
        cut_below(packed, packed.stat().st_size // 8)
        with pytest.raises(
            TruncationError, match=f"packed: {LOST}.* open it again when it is whol"
        ):
            read(file)
        with pytest.raises(TruncationError, match=LOST):  # earlier bytes may be wrong
            file.get_tensor("small0")
    assert before.shape == (64, 64)


def test_an_object_of_a_store_that_is_cut_while_it_is_read(tmp_path):
    (tmp_path / "pack").write_bytes(b"x" * 5 * PAGE)
    found = LocalStorage(tmp_path).open("pack")
    whole = found.region(0, 5 * PAGE)
    cut_below(tmp_path / "pack", PAGE)
    assert bytes(whole) == b"x" * PAGE + bytes(4 * PAGE)
    with pytest.raises(TruncationError, match=f"pack: {LOST}"):
        found.region(0, 1)


PROGRAM = """
import faulthandler, mmap, os, signal, sys
{before}
from packhorse import _core
path = sys.argv[1]
with open(path, "r+b") as file:
    mapper = _core.FileMapper()
    ours = mapper.map(file.fileno(), 0, 100_000)
    theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
{after}
os.truncate(path, 0)
assert bytes(ours) == bytes(100_000) and mapper.has_lost
print("ours", flush=True)
{fault}
print("lived")
"""
THEIRS = "theirs[50_000]"
SENT = "os.kill(os.getpid(), signal.SIGBUS)"
WATCHED = "faulthandler.enable()"


@pytest.mark.parametrize(
    ("before", "after", "fault", "words"),
    [
        ("", "", THEIRS, ""),
        ("", "", SENT, ""),
        (WATCHED, "", THEIRS, "Fatal Python error: Bus error"),
        (WATCHED, "", SENT, "Fatal Python error: Bus error"),
        ("", f"{WATCHED}; mapper.map(os.open(path, os.O_RDONLY), 0, 1)", THEIRS, "Fatal Python"),
        ("", f"{WATCHED}; mapper.map(os.open(path, os.O_RDONLY), 0, 1)", SENT, "Fatal Python"),
    ],
)
def test_faults_that_are_not_ours_end_a_process_as_before(tmp_path, before, after, fault, words):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    program = PROGRAM.format(before=before, after=after, fault=fault)
    child = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == -signal.SIGBUS, child.stderr
    assert child.stdout == "ours\n"
    assert child.stderr.count("Fatal Python error") == (1 if words else 0)


def test_a_handler_of_somebody_else_is_called_for_its_own_faults(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    before = 'signal.signal(signal.SIGBUS, lambda *_: print("theirs", flush=True))'
    program = PROGRAM.format(before=before, after="", fault=SENT)
    child = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "ours\ntheirs\nlived\n"), child.stderr


def test_a_forked_child_reads_on(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    program = PROGRAM.format(
        before="", after="child = os.fork()", fault="if child: sys.exit(os.waitpid(child, 0)[1])"
    )
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path)], capture_output=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
