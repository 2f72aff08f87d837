"""A disk that is full or broken: the caller gets the system's error, and the shelf keeps what was
committed and works on."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shelf_faults
import shelf_limits
from disk_record import compile_recorder, recorded

SEED = os.environ.get("PACKHORSE_SEED", "0")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.mark.parametrize(
    ("kinds", "error", "times", "late"),
    [
        ("w", errno.ENOSPC, -1, "late"),
        ("wmtn", errno.ENOSPC, -1, "early"),
        ("wm", errno.EIO, 1, "early"),
        ("s", errno.EIO, 1, "early"),
        ("m", errno.EIO, 1, "late"),
    ],
    ids=["full after half a write", "full", "write", "sync", "durable write"],
)
def test_a_call_fails(
    library: Path, tmp_path: Path, kinds: str, error: int, times: int, late: str
) -> None:
    folder = str(tmp_path / "data.shelf")
    arguments = [folder, SEED, kinds, str(error), str(times), late]
    command = [sys.executable, shelf_faults.__file__, *arguments]
    outcomes = json.loads(recorded(library, tmp_path, None, command))
    print("\n".join(f"{n:4} {outcome}" for outcome, n in sorted(outcomes.items())))
    assert sum(n for outcome, n in outcomes.items() if "Error: " in outcome) > 6


def meet(what: str, folder: Path) -> str:
    """Meet a limit, and return the error."""
    command = [sys.executable, shelf_limits.__file__, what, str(folder / "data.shelf")]
    if what in ("disk", "compact"):
        mount = 'mount -t tmpfs -o size=4m none "$1"'
        if subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount, "-", folder], check=False
        ).returncode:
            pytest.skip("this system does not let a test mount a small file system")
        shell = f'{mount} && shift && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", shell, "-", str(folder), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("disk", os.strerror(errno.ENOSPC)),
        ("compact", os.strerror(errno.ENOSPC)),
        ("length", os.strerror(errno.EFBIG)),
        ("memory", "address space, and the system refuses (ulimit -v); nothing was committed"),
        ("new", "address space, and the system refuses (ulimit -v); nothing was committed"),
    ],
)
def test_a_limit_is_met(tmp_path: Path, what: str, error: str) -> None:
    """A file system that is full, files that may not grow, a map that the system refuses."""
    assert error in meet(what, tmp_path)
