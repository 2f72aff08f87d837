"""Pipes, sockets, devices and folders instead of files are refused, without waiting for them."""

import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import Ended, run_command, write_model

import packhorse
from packhorse.disk import SnapshotStore, pack_folder, plan_folder
from packhorse.storage.opening import open_regular

Run = Callable[..., Ended]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the full name may be too long


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = {
    "pipe": (make_pipe, "a named pipe"),
    "socket": (make_socket, "a socket"),
    "device": (make_link_to_a_device, "a device"),
}
odd_things = pytest.mark.parametrize(("make", "words"), ODD.values(), ids=ODD)

VERBS = {
    "pack": ["pack"],
    "unpack": ["unpack"],
    "inspect": ["inspect"],
    "verify": ["verify"],
    "bench": ["bench"],
    "take": ["snapshot", "take", "store", "a"],
    "tune": ["tune", "--dry-run", "--gpu", "H200"],
}


@odd_things
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_no_verb_waits_for_what_is_no_file(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None],
    words: str, verb: list[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "odd.ph.safetensors"
    make(path)
    done = run(*verb, path)
    assert done.code == 2
    assert f"{path}: " in done.error
    assert "neither a file nor a folder" in done.error or words in done.error


@odd_things
@pytest.mark.parametrize("verb", ["pack", "verify", "bench"])
def test_nor_where_a_base_is_asked_for(
    tmp_path: Path, packed: Path, run: Run, make: Callable[[Path], None], words: str, verb: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base.safetensors"
    make(base)
    source = packed if verb == "verify" else write_model(tmp_path / "new.safetensors")
    done = run(verb, source, "--base", base)
    assert done.code == 2
    assert str(base) in done.error
    with pytest.raises(ValueError, match=words):
        packhorse.open_file(packed, base=base)


@odd_things
@pytest.mark.parametrize("verb", ["pack", "restore"])
def test_nor_in_the_place_of_an_output(
    tmp_path: Path, model: Path, run: Run, make: Callable[[Path], None], words: str, verb: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run("snapshot", "take", "store", "a", model).code == 0
    target = tmp_path / "out.ph.safetensors"
    make(target)
    before = target.stat()
    start = ["pack", model] if verb == "pack" else ["snapshot", "restore", "store", "a"]
    done = run(*start, "-o", target, "--force")
    assert done.code == 2
    assert f"{target}: not a regular file" in done.error
    assert target.stat().st_ino == before.st_ino


@odd_things
@pytest.mark.parametrize("verb", ["pack", "verify", "inspect", "unpack", "take", "base", "tune"])
def test_nor_inside_of_a_folder(
    tmp_path: Path, folder: Path, run: Run, make: Callable[[Path], None], words: str, verb: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    assert run("pack", folder).code == 0
    if verb in {"verify", "inspect", "unpack"}:
        folder = folder.with_name("llama.ph")
    monkeypatch.chdir(folder)
    make(folder / "odd.ph.safetensors")
    monkeypatch.chdir(tmp_path)
    words_of = {
        "take": ["snapshot", "take", "store", "a", folder],
        "unpack": ["unpack", folder, "-o", "back"],
        "base": ["bench", write_model(tmp_path / "new.safetensors"), "--base", folder],
        "tune": ["tune", folder, "--dry-run", "--gpu", "H200"],
        "pack": ["pack", folder, "-o", "again"],
    }
    done = run(*words_of.get(verb, [verb, folder]))
    assert done.code == 2
    assert "odd.ph.safetensors: " in done.error
    assert words in done.error
    assert not (tmp_path / "store" / "snapshots").exists()


def test_functions_of_python_refuse_too(tmp_path: Path):
    from packhorse.numpy import load_file

    path = tmp_path / "model.ph.safetensors"
    os.mkfifo(path)
    for use in (
        lambda: packhorse.open_file(path),
        lambda: load_file(path),
        lambda: SnapshotStore(tmp_path / "s").take_files("a", [path]),
        lambda: pack_folder(tmp_path, tmp_path.with_name("out")),
        lambda: plan_folder(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"model\.ph\.safetensors: .*a named pipe"):
            use()


def test_a_folder_where_a_file_is_asked_for(tmp_path: Path, run: Run):
    with pytest.raises(IsADirectoryError, match="a folder, but a file is needed"):
        packhorse.open_file(tmp_path)
    done = run("bench", tmp_path)
    assert (done.code, done.error) == (
        2,
        f"{tmp_path}: this is a folder, but bench needs a file; name one of its files",
    )


def test_a_pipe_that_takes_the_place_of_a_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pipe replaces the file after the check and before the opening."""
    path = tmp_path / "x"
    path.write_bytes(b"a file")
    real = os.open

    def swapped(*args: object) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(*args)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ValueError, match="x: not a regular file, but a named pipe"):
        open_regular(path)


def test_an_open_file_is_as_any_other(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"bytes")
    with open_regular(path) as file:
        assert os.get_inheritable(file.fileno()) is False
        assert file.read() == b"bytes"
    (tmp_path / "link").symlink_to(path)
    with open_regular(tmp_path / "link") as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def test_input_from_the_shell_is_named(tmp_path: Path):
    """`packhorse inspect /dev/stdin < file` gets a file, and `cat file | packhorse ...` gets a
    pipe."""
    model = write_model(tmp_path / "model.safetensors")
    packed = tmp_path / "model.ph.safetensors"
    assert run_command("pack", model).code == 0
    with packed.open("rb") as file:
        assert run_command("verify", "/dev/stdin", stdin=file).code == 0
    refused = run_command("verify", "/dev/stdin", stdin=subprocess.PIPE)
    assert refused.code == 2
    assert "a named pipe" in refused.error
