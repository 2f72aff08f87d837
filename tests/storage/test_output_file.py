"""A file has the same bytes whatever way they take to the disk, and errors name the destination."""

import errno
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from packhorse.storage.atomic import atomic_file
from packhorse.storage.output_file import PLACING_NBYTES, OutputFile, placed

LARGE = 5 << 20
needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")


def pieces(offset=0):
    """Pieces of many lengths; the large ones lie where they can be written without a copy."""
    rng = np.random.default_rng(1)
    for nbytes in (LARGE, 3, 0, 4096, LARGE + 77, 1, LARGE - 1, 70_000, LARGE):
        memory = np.empty(nbytes + PLACING_NBYTES, np.uint8)
        piece = placed(memory, offset)[:nbytes]
        piece[:] = rng.integers(0, 256, nbytes, np.uint8)
        offset += nbytes
        yield piece


def written(path, **options):
    """Write all pieces behind a header that is patched at the end; what the file should hold."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        file = OutputFile(descriptor, path, **options)
        file.write(bytes(100))
        expected = [b"h" * 100]
        for piece in pieces(100):
            file.write_all([piece, b"between"])
            expected += [piece.tobytes(), b"between"]
        # The word between two pieces moves them to where they need a copy.
        file.write_all(pieces(file.nbytes))
        expected += [piece.tobytes() for piece in pieces()]
        file.patch(0, b"h" * 100)
        file.sync()
        assert file.nbytes == sum(map(len, expected))
    finally:
        os.close(descriptor)
    return b"".join(expected)


def in_short_steps(call):
    """A system call that writes less than it is asked to."""

    def short(descriptor, data, offset):
        if isinstance(data, list):
            views = [data[0][: max(1, len(data[0]) // 2)]]
            return call(descriptor, views, offset)
        return call(descriptor, data[: max(1, len(data) // 2)], offset)

    return short


def no_such_way(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


CHANGES = {
    "as it is": {},
    "no direct writing": {"O_DIRECT": None},
    "no hints": {"posix_fadvise": None},
    "one piece a call": {"pwritev": None},
    "direct writing fails": {"pwrite": no_such_way},
    "short calls": {"pwritev": in_short_steps(os.pwritev), "pwrite": in_short_steps(os.pwrite)},
    "hints fail": {"posix_fadvise": no_such_way},
}


@pytest.mark.parametrize("will_sync", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_the_disk_writes_the_same_bytes(tmp_path, monkeypatch, change, will_sync):
    for name, value in CHANGES[change].items():
        if value is None:
            monkeypatch.delattr(os, name)
        else:
            monkeypatch.setattr(os, name, value)
    expected = written(tmp_path / "file", will_sync=will_sync)
    assert (tmp_path / "file").read_bytes() == expected


@needs_direct
def test_long_pieces_are_written_without_a_copy(tmp_path, monkeypatch):
    calls = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.append(len(args[1])) or real(*args))
    try:
        written(tmp_path / "file", will_sync=True)
    except OSError:
        pytest.skip("this file system writes no other way than through the cache")
    assert sum(calls) > 3 * LARGE
    assert all(nbytes % PLACING_NBYTES == 0 for nbytes in calls)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system in memory")
def test_a_file_in_memory_has_the_same_bytes():
    path = Path(f"/dev/shm/packhorse-test-{os.getpid()}")
    try:
        assert written(path, will_sync=True) == path.read_bytes()
    finally:
        path.unlink()


def write_all_pieces(path):
    with atomic_file(path) as file:
        for piece in pieces():
            file.write(piece)


@contextmanager
def small_disk(tmp_path, nbytes):
    """A file system in a file, which has no room for more than some bytes."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, nbytes)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        try:
            failed = subprocess.run(command, capture_output=True).returncode
        except FileNotFoundError:
            failed = True
        if failed:
            pytest.skip(f"{command[0]} is missing or not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
def test_a_disk_that_fills_up_in_direct_writing_leaves_nothing(tmp_path):
    with small_disk(tmp_path, 16 << 20) as folder:
        before = os.listdir(folder)
        with pytest.raises(OSError, match="No space left") as caught:
            write_all_pieces(folder / "out")
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(folder / "out")
        assert os.listdir(folder) == before


@pytest.mark.parametrize("name", ["pwrite", "pwritev", "fsync"])
def test_a_failing_disk_is_reported_with_the_destination(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    if name == "pwrite" and not hasattr(os, "O_DIRECT"):
        pytest.skip("nothing calls it here")
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_all_pieces(tmp_path / "out")
    assert caught.value.filename == str(tmp_path / "out")
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no hints")
def test_the_disk_begins_before_all_pieces_are_in_the_cache(tmp_path, monkeypatch):
    """Whether the pieces come in one call or in many."""
    piece, n_pieces, hints = b"x" * 500_000, 40, []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: hints.append(args[1] + args[2]))
    for n_calls in (1, n_pieces):
        hints.clear()
        with atomic_file(tmp_path / f"{n_calls}") as file:
            for _ in range(n_calls):
                file.write_all([piece] * (n_pieces // n_calls))
        assert len(hints) == n_pieces * len(piece) >> 22
        assert hints[0] < 5 << 20
