"""Calls that only some systems have: the twins for Windows, on which nothing of this is run."""

import errno
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from packhorse.storage import system, upload


@pytest.fixture(params=["here", "windows"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is here, or as it would be on Windows, whose locks are simulated."""
    if request.param == "here":
        return system
    locked: set[int] = set()

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        file = os.fstat(descriptor).st_ino
        assert nbytes == 1
        assert os.lseek(descriptor, 0, os.SEEK_CUR) >= 1 << 30
        if mode == 0:
            locked.discard(file)
        elif file in locked:
            raise OSError(errno.EACCES, "Permission denied")
        else:
            locked.add(file)

    windows = SimpleNamespace(locking=locking, LK_NBLCK=2, LK_UNLCK=0)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "fcntl", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "platform", "win32")
    for name in ("pread", "pwrite", "O_CLOEXEC", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    spec = importlib.util.spec_from_file_location("system_of_windows", system.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_written_and_read_at_offsets(calls: ModuleType, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | calls.OPEN_FLAGS)
    assert calls.write_at(descriptor, b"later", 6) == 5
    assert calls.write_at(descriptor, memoryview(b"first,"), 0) == 6
    assert calls.read_at(descriptor, 100, 6) == b"later"
    assert calls.read_at(descriptor, 5, 0) == b"first"
    os.close(descriptor)


def test_one_locks_a_file_at_a_time(calls: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "file"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    calls.lock(first)
    with pytest.raises(BlockingIOError):
        calls.lock(second)
    calls.unlock(first)
    calls.lock(second)
    assert path.stat().st_size == 0
    for descriptor in (first, second):
        os.close(descriptor)


def test_only_windows_renames_to_a_free_name_by_a_plain_rename(
    calls: ModuleType, tmp_path: Path
) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    source.touch()
    assert calls.rename_to_free_name(source, destination) == (calls is not system)
    assert destination.exists() == (calls is not system)


@pytest.mark.parametrize("descriptors", ["/proc/self/fd", "/nowhere"])
def test_a_temporary_file_has_a_path(descriptors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_DESCRIPTORS", descriptors)
    import tempfile

    with upload._temporary_file(tempfile) as (file, path):
        os.write(file.fileno(), b"content")
        assert Path(path).read_bytes() == b"content"
    assert not Path(path).exists()
