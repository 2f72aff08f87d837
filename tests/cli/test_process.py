"""The installed command as a process: terminals, pipes, signals, limits and permissions."""

import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_samples import (
    COMMAND,
    contents,
    default_signals,
    obey_permissions,
    run_command,
    write_folder,
    write_large_model,
    write_model,
)

LARGE_NBYTES = 1 << 26  # which take a second at the level "max"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.safetensors", rows=2048)


def run_on_terminal(*args: object, out: int | None = None) -> tuple[int, str]:
    """Run the command on a terminal of 100 columns; its output can go elsewhere."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [COMMAND, *map(str, args)], stdin=theirs, stdout=out or theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        text = _read_all(ours)
    os.close(ours)
    return process.returncode, text.decode()


def _read_all(descriptor: int) -> bytes:
    pieces = []
    while select.select([descriptor], [], [], 60)[0]:
        try:
            piece = os.read(descriptor, 1 << 16)
        except OSError:  # Linux's error when the other side is closed
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces)


def test_whole_round_by_the_installed_command(tmp_path: Path, model: Path):
    packed, back = tmp_path / "model.ph.safetensors", tmp_path / "back.safetensors"
    for args in (["pack", model], ["verify", packed], ["unpack", packed, "-o", back]):
        done = run_command(*args)
        assert (done.code, done.err) == (0, "")
    assert back.read_bytes() == model.read_bytes()


def test_pipe_gets_nothing_but_what_was_asked(model: Path):
    done = run_command("pack", model)
    assert (done.code, done.out, done.err) == (0, "", "")


def test_terminal_gets_progress_and_a_line(model: Path):
    code, text = run_on_terminal("pack", model)
    assert code == 0
    for part in ("pack model.safetensors", "━", "100%", "GB/s", " MB of "):
        assert part in text
    last = text.splitlines()[-1]
    assert re.search(r"model\.ph\.safetensors: .* MB -> .* MB, ratio \d\.\d{3}, .* GB/s", last)


def test_progress_is_kept_out_of_a_pipe(tmp_path: Path, model: Path):
    with (tmp_path / "out").open("wb") as out:
        code, text = run_on_terminal("pack", model, "--json", out=out.fileno())
    assert code == 0
    assert "100%" in text
    assert (tmp_path / "out").read_text().startswith("{")


def test_error_on_a_terminal_is_one_line_too(tmp_path: Path):
    code, text = run_on_terminal("pack", tmp_path / ("long" * 50) / "model.safetensors")
    assert code == 3
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_in_mid_pack_leaves_nothing_behind(tmp_path: Path, number: signal.Signals):
    model = write_large_model(tmp_path / "model.safetensors", LARGE_NBYTES)
    packed = tmp_path / "model.ph.safetensors"
    packed.write_bytes(b"older")
    with subprocess.Popen(
        [COMMAND, "pack", model, "--force", "--threads", "1", "--level", "max"],
        stderr=subprocess.PIPE, text=True, preexec_fn=default_signals,
    ) as process:  # fmt: skip
        _wait_for_output(tmp_path, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    words = "finished output was kept, unfinished output was removed"
    assert err == f"packhorse: error: stopped by {number.name}; {words}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([packed.name, model.name])
    assert packed.read_bytes() == b"older"
    assert model.stat().st_size > LARGE_NBYTES


def test_signal_in_mid_folder_leaves_nothing_behind(tmp_path: Path):
    folder = write_folder(tmp_path / "llama")
    write_large_model(folder / "more.safetensors", LARGE_NBYTES)
    names = sorted(path.name for path in folder.iterdir())
    with subprocess.Popen(
        [COMMAND, "pack", folder, "--level", "max"],
        stderr=subprocess.DEVNULL,
        preexec_fn=default_signals,
    ) as process:
        _wait_for_output(tmp_path, process)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
    assert sorted(path.name for path in folder.iterdir()) == names


def _wait_for_output(folder: Path, process: subprocess.Popen[str]) -> None:
    """Return as soon as the process has begun to write its temporary output."""
    end = time.monotonic() + 60
    while not any(folder.glob(".packhorse-*")):
        assert process.poll() is None, "ended before it could be stopped"
        assert time.monotonic() < end, "never began"
        time.sleep(0.001)


def test_closed_pipe_ends_quietly(tmp_path: Path):
    packed = tmp_path / "model.ph.safetensors"
    assert run_command("pack", write_model(tmp_path / "model.safetensors")).code == 0
    with subprocess.Popen(
        [COMMAND, "inspect", *[packed] * 50], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_file_size_limit_in_mid_write(tmp_path: Path, model: Path, verb: str):
    source = model
    if verb == "unpack":
        assert run_command("pack", model).code == 0
        source = tmp_path / "model.ph.safetensors"
    before = contents(tmp_path)
    target = tmp_path / "limited.ph.safetensors"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    done = run_command(verb, source, "-o", target, preexec_fn=limit)
    assert done.code == 3
    assert done.error.startswith(f"{target}: file too large; ")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_full_disk_in_mid_write(tmp_path: Path, kind: str):
    disk = tmp_path / "disk"
    disk.mkdir()
    source = (
        write_model(tmp_path / "model.safetensors", rows=2048)
        if kind == "file"
        else write_folder(tmp_path / "llama")
    )
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        done = run_command("pack", source, "-o", disk / "out.ph.safetensors")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.code == 3
    assert done.error.startswith(f"{disk / 'out.ph.safetensors'}")
    assert "no space left on device; free some space" in done.error


def test_folder_that_may_not_be_written(tmp_path: Path, model: Path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    target = closed / "out.ph.safetensors"
    done = run_command("pack", model, "-o", target, preexec_fn=obey_permissions)
    assert done.code == 3
    assert done.error.startswith(f"{target}: permission denied; check the permissions")
    assert list(closed.iterdir()) == []


def test_source_that_may_not_be_read(tmp_path: Path, model: Path):
    model.chmod(0)
    done = run_command("pack", model, preexec_fn=obey_permissions)
    assert done.code == 3
    assert done.error.startswith(f"{model}: permission denied; check the permissions")
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_extra_is_told_in_one_line(package: str):
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from packhorse.cli import main; sys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert f"needs {package}" in line
    assert "pip install packhorse[cli]" in line


def test_running_as_a_module(tmp_path: Path, model: Path):
    done = subprocess.run(
        [sys.executable, "-m", "packhorse", "pack", model], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "model.ph.safetensors").exists()


# Names that Python does not have on Windows, as far as Linux can do without them.
WITHOUT = """
import mmap, os, select, signal, sys
for module, names in (
    (os, "fork forkpty fchmod chown lchown posix_fadvise posix_fallocate preadv pwritev RWF_NOWAIT "
         "O_DIRECT O_NONBLOCK sched_getaffinity register_at_fork sysconf"),
    (signal, "SIGHUP SIGPIPE SIGCHLD SIGALRM pthread_sigmask"),
    (mmap, "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
from packhorse.cli.start import main
sys.exit(main())
"""


def test_the_command_does_without_what_windows_lacks(tmp_path: Path, model: Path):
    packed, back = tmp_path / "p.ph.safetensors", tmp_path / "back.safetensors"

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    model.chmod(0o640)
    for args in (("pack", model, "-o", packed), ("verify", packed), ("unpack", packed, "-o", back)):
        done = run(*args)
        assert done.returncode == 0, done.stderr
    assert back.read_bytes() == model.read_bytes()
    assert run("verify", tmp_path / "absent.ph.safetensors").returncode == 3
