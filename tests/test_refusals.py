"""Refusals of the system (memory, open files, permissions) are never reported as bad data.

If a verification calls a good store damaged, people throw it away.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import little_memory
import numpy as np
import pytest
from cli_samples import obey_permissions, run_command

from packhorse.disk import SnapshotStore, pack_file

RNG = np.random.default_rng(0)
CHILD = """
import resource, sys
from packhorse.cli import app
from packhorse.cli import main
room, *words = sys.argv[1:]
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(room),) * 2)
sys.exit(main(words))
"""
ZSTD = """
import json
import numpy as np
from little_memory import error_within
from packhorse.codecs.zstd import ChunkDecoder, compress_chunk, estimate_nbytes
from packhorse.disk.packed_header import read_record, write_record
from packhorse.layout import Level
chunk = np.random.default_rng(0).integers(0, 4, 1 << 20, np.uint8)
packed = np.frombuffer(compress_chunk(chunk, Level.MAX), np.uint8)
text = bytes(chunk)
record = write_record("header", text)
place = np.empty(chunk.size, np.uint8)
uses = {
    "encode": lambda: compress_chunk(chunk, Level.MAX),
    "search": lambda: compress_chunk(chunk, Level.DEFAULT, long_matches=True),
    "decode": lambda: ChunkDecoder().decode(packed, place),
    "record": lambda: write_record("header", text),
    "read": lambda: read_record(record, "header", text_nbytes=len(text), label="x"),
}
rooms = range(0, 12 << 20, 1 << 18)
found = {name: {error_within(room, use) for room in rooms} for name, use in uses.items()}
print(json.dumps({name: sorted(kinds) for name, kinds in found.items()}))
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three snapshots, in a pack each; nothing in them gets shorter."""
    writer = SnapshotStore(tmp_path / "store")
    for i in range(3):
        writer.take(f"s{i}", {"w": RNG.integers(0, 256, 100_000, np.uint8)})
    return tmp_path / "store"


def verify_with_limit(store: Path, n_files: int) -> subprocess.CompletedProcess[str]:
    """Verifies a store, after all imports, with this limit on open files."""
    code = (
        "import resource, sys; from packhorse.cli import main\n"
        "words = ['snapshot', 'verify', sys.argv[1]]\n"
        "assert main(words) == 0\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({n_files}, {n_files}))\n"
        "sys.exit(main(words))\n"
    )
    return subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True)


def test_one_open_file_at_a_time_is_enough(store: Path):
    """One file in addition to the three that every program has: a mapped pack needs none."""
    done = verify_with_limit(store, 4)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_few_open_files(store: Path):
    done = verify_with_limit(store, 3)
    assert done.returncode == 3, done.stdout
    assert f"{store}/" in done.stderr
    assert "too many open files; raise the limit on open files (ulimit -n)" in done.stderr


def test_too_few_open_files_in_python(store: Path):
    code = (
        "import resource, sys; from packhorse.disk import SnapshotStore\n"
        "store = SnapshotStore(sys.argv[1])\n"
        "assert store.verify() == []\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: print(store.verify())\n"
        "except OSError as error: print(error.errno, error.filename)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True)
    assert done.stdout.startswith(f"24 {store}/"), done.stdout + done.stderr


@pytest.mark.parametrize("what", ["snapshots/s1", "packs"])
def test_a_file_that_may_not_be_read(store: Path, what: str):
    file = sorted((store / what).iterdir())[0]
    file.chmod(0)
    done = run_command("snapshot", "verify", store, preexec_fn=obey_permissions)
    assert (done.code, done.out) == (3, "")
    assert done.error.startswith(f"{file}: permission denied; check the permissions")


def test_a_file_that_is_lost_is_bad_data(store: Path):
    """Unlike a file that the system refuses to open, a lost file can never be read again."""
    file = sorted((store / "packs").iterdir())[0]
    file.unlink()
    done = run_command("snapshot", "verify", store)
    assert (done.code, done.err) == (1, "")
    assert f"{file}: the pack does not exist" in done.out


def test_what_is_no_file_is_bad_data(store: Path):
    file = sorted((store / "packs").iterdir())[0]
    file.unlink()
    file.mkdir()
    done = run_command("snapshot", "verify", store)
    assert (done.code, done.err) == (1, "")
    assert f"{file}: not a regular file" in done.out


@pytest.fixture
def large(tmp_path: Path) -> dict[str, Path]:
    """One tensor that takes 48 MB, in all forms."""
    from safetensors.numpy import save_file

    tensors = {"w": RNG.integers(0, 256, 48_000_000, np.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    pack_file(tmp_path / "model.safetensors", tmp_path / "model.ph.safetensors")
    store = SnapshotStore(tmp_path / "store")
    store.take_files("a", [tmp_path / "model.safetensors"])
    changed = {"w": tensors["w"].copy()}
    changed["w"][::1000] ^= 1
    store.take("b", changed)
    return {
        "model": tmp_path / "model.safetensors",
        "packed": tmp_path / "model.ph.safetensors",
        "store": tmp_path / "store",
    }


def test_too_little_memory(large: dict[str, Path], tmp_path: Path):
    """Runs each verb on 48 MB with room for 36. The exit code must be 3, and no message may mention
    damage. With much less room, Python itself fails."""
    runs = (
        ["verify", large["packed"]],
        ["unpack", large["packed"], "-o", tmp_path / "back.safetensors"],
        ["pack", large["model"], "-o", tmp_path / "again.ph.safetensors"],
        ["bench", large["model"], "--repeat", "1"],
        ["snapshot", "verify", large["store"]],
        ["snapshot", "diff", large["store"], "a", "b"],
        ["snapshot", "restore", large["store"], "b", "-o", tmp_path / "b.safetensors"],
        ["snapshot", "take", large["store"], "c", large["packed"], "--base", "none"],
    )
    for words in runs:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(36_000_000), *map(str, words), "-t", "1"],
            capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (3, ""), (words, done)
        (line,) = done.stderr.splitlines()
        assert "memory" in line
    assert SnapshotStore(large["store"]).verify() == []


def test_zstandard_never_calls_a_lack_of_memory_bad_data():
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0"}
    env["PYTHONPATH"] = str(Path(little_memory.__file__).parent)
    done = subprocess.run([sys.executable, "-c", ZSTD], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(set(kinds) <= {"MemoryError", "fine"} for kinds in found.values()), found
    assert "MemoryError" in found["encode"]


def test_damage_is_still_told(store: Path):
    file = sorted((store / "packs").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    done = run_command("snapshot", "verify", store)
    assert (done.code, done.err) == (1, "")
    assert file.name in done.out
