"""Fixtures that several test files share, and Triton's interpreter for all kernels.

Triton decides when it is imported whether kernels are interpreted, so this file sets the variable
before anything else can import Triton. On a machine with a GPU, TRITON_INTERPRET=0 runs the kernels
there. Tests that compile offline need a child process without the variable.
"""

import atexit
import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from cli_samples import Ended, write_folder, write_model
from disk_samples import write_sample
from quick_interpreter import make_interpreter_quick
from s3_server import Server

# A shell lets jobs in its background ignore Ctrl-C; so would all processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LEAST_MEMORY_NBYTES = 1 << 30  # containers may have 64 MB


def pytest_collection(session: pytest.Session) -> None:
    """Collecting imports much and leaves little: the garbage collector would look at it in vain."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector need not look again at all that collecting has imported: each of its
    full turns took a good part of a second, and each test that leaves cycles adds some."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # Nothing stays frozen when Python ends, or nanobind reports its own functions as leaked. Before
    # that, pytest makes five full turns.
    atexit.register(gc.unfreeze)
    make_interpreter_quick()


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    """What a test file leaves behind (imported modules, caches) is there to stay: after some
    hundred files it was a million objects, and each full turn of the garbage collector took a
    second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command line in this process."""
    from packhorse.cli import main

    def call(*args: object) -> Ended:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ended(int(code), captured.out, captured.err)

    return call


@pytest.fixture
def images_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for states that a disk may have after a power loss: in memory, where there is room.
    Such a state is made of a record, opened once and removed, so a disk would only make it slow."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < _LEAST_MEMORY_NBYTES:
        yield tmp_path
        return
    with TemporaryDirectory(prefix="packhorse-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small safetensors file."""
    return write_model(tmp_path / "model.safetensors")


@pytest.fixture
def packed(model: Path, run: Callable[..., Ended]) -> Path:
    """The small file, packed beside it."""
    assert run("pack", model).code == 0
    return model.with_name("model.ph.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder."""
    return write_folder(tmp_path / "llama")


@pytest.fixture
def sample(tmp_path: Path) -> tuple[Path, Path]:
    """A safetensors file and its packed form."""
    from packhorse.disk import pack_file

    source, packed = tmp_path / "model.safetensors", tmp_path / "model.ph.safetensors"
    write_sample(source, metadata={"format": "np"})
    pack_file(source, packed)
    return source, packed


@pytest.fixture
def decoded_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the core has decoded, for calls that take many."""
    from packhorse import _core

    found: list[int] = []
    real = _core.unpack_to_views

    def counted(frames: Any, dsts: Any, threads: int) -> Any:
        result = real(frames, dsts, threads)
        found.append(len(frames) - len(result[3]))
        return result

    monkeypatch.setattr(_core, "unpack_to_views", counted)
    return found


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """A server of S3; one for all tests of a process."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from s3_server import serving

    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server with an empty bucket, which the environment names."""
    s3_server.before = None
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.forget()
    yield s3_server
    s3_server.before = None
    s3_server.empty()
