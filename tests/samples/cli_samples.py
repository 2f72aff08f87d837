"""Model files for the tests of the command line, made by safetensors, and ways to run it."""

import ctypes
import json
import os
import pty
import signal
import subprocess
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMAND = Path(sysconfig.get_path("scripts")) / "packhorse"
METADATA = {"format": "pt", "author": "a test"}

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a failed run must print."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("packhorse: error: "), self.err
        return lines[0].removeprefix("packhorse: error: ")


def run_command(*args: object, **options: object) -> Ended:
    """Run the installed command in a process of its own."""
    done = subprocess.run(
        [COMMAND, *map(str, args)], capture_output=True, text=True, timeout=120, **options
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def result(done: Ended) -> Any:
    """The only result of a successful run with --json."""
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["errors"] == []
    (row,) = document["results"]
    return row


def run_on_terminal(
    *args: object, answer: str | None = None, columns: int = 100
) -> tuple[int, str]:
    """Run the command on a terminal, and type an answer, if there is one. Returns its exit code,
    and all that it has sent to the screen."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    words = [COMMAND, *map(str, args)]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        if answer is not None:
            os.write(ours, f"{answer}\n".encode())
        text = b""
        with suppress(OSError):  # Linux's error when the other side is closed
            while piece := os.read(ours, 1 << 16):
                text += piece
    os.close(ours)
    return process.returncode, text.decode()


def tensors(seed: int = 0, rows: int = 256) -> dict[str, np.ndarray]:
    """Tensors like those of a model, and shapes that are easily forgotten."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.02, (rows, 256)).astype(np.float32)
    return {
        "layers.0.weight": weight.astype(ml_dtypes.bfloat16),
        "layers.1.weight": weight,
        "layers.1.bias": np.zeros(rows, np.float16),
        "ids": np.arange(1000, dtype=np.int64),
        "scale": np.full((), 0.5, np.float32),
        "none": np.empty((0, 7), np.uint8),
    }


def write_model(path: Path, seed: int = 0, rows: int = 256) -> Path:
    """A safetensors file of `tensors`."""
    save_file(tensors(seed, rows), path, METADATA)
    return path


def write_large_model(path: Path, nbytes: int) -> Path:
    """A file of one large bf16 tensor: repetitions of a piece that is longer than a chunk."""
    piece = np.random.default_rng(1).normal(0, 0.02, 1 << 20).astype(ml_dtypes.bfloat16)
    save_file({"large": np.tile(piece, nbytes // piece.nbytes)}, path)
    return path


def write_folder(path: Path) -> Path:
    """A model folder of two shards with an index, other files and a folder below."""
    (path / "tokenizer").mkdir(parents=True)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {}
    for i, name in enumerate(names):
        shard = {f"{key}.{i}": value for key, value in tensors(i).items()}
        save_file(shard, path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    (path / "config.json").write_text('{"hidden_size": 256}\n')
    (path / "tokenizer" / "vocab.txt").write_text("one\ntwo\n")
    return path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files: for comparing before and after."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write_header(path: Path, header: str | bytes, data: bytes = b"") -> Path:
    """A file with any text instead of a safetensors header."""
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def flip_bytes(path: Path, *offsets: int) -> None:
    """Change the bytes at these offsets."""
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 0x55
    path.write_bytes(data)


def frame_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Where the frame of each tensor of a packed file starts and ends."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: (start + info["data_offsets"][0], start + info["data_offsets"][1])
        for name, info in header.items()
        if name != "__metadata__"
    }


def default_signals() -> None:
    """Let a child process answer Ctrl-C and hanging up, though this one ignores them.

    Under `nohup`, and as a job in the background of a script, all of a process's children do.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def obey_permissions() -> None:
    """Make a child process of root heed permission bits like any other user."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
