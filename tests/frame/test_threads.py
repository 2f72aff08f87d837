"""Frames in several threads, after a fork, in workers of a data loader, and while Python exits."""

import os
import resource
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import little_memory
import numpy as np
import pytest
import torch
from codec_battery import SANITIZED, make_data, tensor_shape
from packed_rows import PackedRows, PackedTensors
from torch.utils.data import ConcatDataset, DataLoader

from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.frame import Frame, compress_buffer

CASES = [
    ("BF16", "weights", 400_001),
    ("F32", "weights", 200_001),
    ("I64", "sorted", 50_001),
    ("U8", "few", 700_001),
    ("F16", "noise", 100_000),
    ("F64", "sparse", 70_000),
]


def pack_and_unpack(i: int, threads: int | None) -> bytes:
    dtype, kind, n = CASES[i % len(CASES)]
    data = make_data(kind, dtype, n)
    packed = compress_buffer(data, dtype, tensor_shape(data, dtype), threads=threads).to_bytes()
    target = bytearray(len(data))
    frame = Frame.from_buffer(packed)
    frame.decompress_into(target, threads=threads)
    frame.verify(threads=threads)
    assert target == data
    return packed


@pytest.mark.parametrize("threads", [1, 3, None])
def test_eight_threads_pack_and_unpack_at_once(threads: int | None) -> None:
    alone = [pack_and_unpack(i, 1) for i in range(len(CASES))]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: pack_and_unpack(i, threads), range(24)))
    assert together == [alone[i % len(CASES)] for i in range(24)]


def test_eight_threads_read_one_frame_at_once() -> None:
    array = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    frame = ph_numpy.compress(array)
    with ThreadPoolExecutor(8) as pool:
        for back in pool.map(lambda _: ph_numpy.decompress(frame, threads=2), range(16)):
            assert np.array_equal(back, array)


def test_the_caller_may_change_the_tensor_after_packing() -> None:
    array = np.random.default_rng(0).standard_normal(10_000)
    frame, copy = ph_numpy.compress(array), array.copy()
    array[:] = 0
    assert np.array_equal(ph_numpy.decompress(frame), copy)


def test_a_forked_child_packs_and_unpacks() -> None:
    expected = pack_and_unpack(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, from 3.12
        child = os.fork()
    if child == 0:
        code = 1
        try:
            same = pack_and_unpack(0, 2) == expected
            code = 0 if same and pack_and_unpack(2, 3) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader_unpack(how: str, tmp_path: Path) -> None:
    """The parent has used threads before its workers are forked, and a file it had opened."""
    pack_and_unpack(0, 2)
    path = tmp_path / "rows.ph.safetensors"
    names = [f"row {i}" for i in range(4)]
    tensors = {name: torch.full((50, 40), i, dtype=torch.float32) for i, name in enumerate(names)}
    ph_torch.save_file(tensors, path)
    stored = PackedTensors(path, names)
    if how == "fork":
        assert stored[3].unique().tolist() == [3]
    rows = ConcatDataset([PackedRows(4), stored])
    loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context=how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batches = list(loader)
    assert [batch[:, 0, 0].tolist() for batch in batches] == [[0, 1], [2, 3]] * 2
    assert [batch.dtype for batch in batches] == [torch.bfloat16] * 2 + [torch.float32] * 2


def run_script(script: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in another Python, which must end by itself."""
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


BUSY = """
import sys, threading
import numpy as np
from packhorse import numpy as ph

rng = np.random.default_rng(0)
kind, n = sys.argv[1], int(sys.argv[2])
weights = rng.standard_normal(n).astype(np.float32)
array = {"rans": weights, "zstd": np.cumsum(rng.integers(0, 3, n)), "file": weights}[kind]
started = threading.Semaphore(0)

def around():
    if kind == "file":
        return ph.load(ph.save({"x": array}, threads=2), threads=2)["x"]
    return ph.decompress(ph.compress(array, threads=2), threads=2)

def work(rounds):
    for i in range(rounds):
        assert np.array_equal(array, around())
        if i == 0:
            started.release()
    sys.stdout.write("done\\n")
"""


@pytest.mark.parametrize("kind", ["rans", "zstd", "file"])
@pytest.mark.parametrize("n", [30, 400_000])
def test_the_interpreter_may_end_while_daemon_threads_pack(kind: str, n: int) -> None:
    """There is neither a crash nor a hang; the work of the threads is lost."""
    script = (
        BUSY
        + """
for _ in range(4):
    threading.Thread(target=work, args=(10**9,), daemon=True).start()
for _ in range(4):
    started.acquire()
print("main ends")
"""
    )
    ended = run_script(script, kind, str(n))
    assert (ended.returncode, ended.stdout) == (0, "main ends\n"), ended.stderr


@pytest.mark.parametrize("kind", ["rans", "zstd", "file"])
def test_threads_pack_on_after_the_main_thread(kind: str) -> None:
    script = (
        BUSY
        + """
for _ in range(3):
    threading.Thread(target=work, args=(10,)).start()
"""
    )
    ended = run_script(script, kind, "600000" if kind == "zstd" else "100000")
    assert (ended.returncode, ended.stdout) == (0, "done\n" * 3), ended.stderr


def test_a_child_that_is_forked_while_threads_pack_packs_too() -> None:
    script = (
        BUSY
        + """
import os, warnings

warnings.simplefilter("ignore")
for _ in range(3):
    threading.Thread(target=work, args=(10**9,), daemon=True).start()
for _ in range(3):
    started.acquire()
for _ in range(20):
    child = os.fork()
    if child == 0:
        packed = ph.compress(array, threads=2)
        os._exit(0 if np.array_equal(ph.decompress(packed, threads=2), array) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("all well")
"""
    )
    ended = run_script(script, "rans", "300000")
    assert (ended.returncode, ended.stdout) == (0, "all well\n"), ended.stderr


@pytest.mark.skipif(SANITIZED, reason="the sanitizer does not allow for it")
def test_a_thread_without_memory_ends_the_call_and_not_the_process() -> None:
    """Matches and nibbles take memory for each chunk, in the thread that codes it."""
    script = """
import json
import numpy as np
from little_memory import error_within
from packhorse import numpy as ph

rng = np.random.default_rng(0)
ids = np.tile(rng.integers(0, 1 << 40, 9000), 120)
halves = rng.binomial(15, 0.4, (2, 3 << 20)).astype(np.uint8)
pairs = halves[0] | halves[1] << 4
packed = [ph.compress(array, threads=1) for array in (ids, pairs)]
assert [frame.plan.whole.name for frame in packed] == ["MATCHES", "NIBBLES"]
outs = [np.zeros(array.nbytes + 10_000, np.uint8) for array in (ids, pairs)]
backs = [np.zeros_like(array) for array in (ids, pairs)]

def pack_and_unpack():
    for array, frame, out, back in zip((ids, pairs), packed, outs, backs):
        ph.compress(array, threads=3, out=out)
        ph.decompress(frame, threads=3, out=back)

found = {error_within(room, pack_and_unpack) for room in range(4 << 20, 96 << 20, 1 << 20)}
print(json.dumps(sorted(found)))
"""

    def small_stacks() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 18, 1 << 18))

    # With an arena for each thread, the C library ends a process that has no room for another.
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    env["PYTHONPATH"] = str(Path(little_memory.__file__).parent)
    ended = run_script(script, preexec_fn=small_stacks, env=env)
    assert (ended.returncode, ended.stdout) == (0, '["MemoryError", "fine"]\n'), ended.stderr


@pytest.mark.skipif(SANITIZED, reason="the sanitizer does not allow for it")
def test_without_memory_for_threads_one_does_the_work() -> None:
    script = """
import resource, sys, threading
import numpy as np
from packhorse import numpy as ph

array = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
out = np.zeros(array.nbytes + 10_000, np.uint8)
back = np.zeros_like(array)
alone = ph.compress(array, threads=1).to_bytes()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
try:
    threading.Thread(target=print).start()
    sys.exit("a thread could be started")
except RuntimeError:
    pass
frame = ph.compress(array, threads=8, out=out)
ph.decompress(frame, threads=8, out=back)
print(bytes(frame.buffer()) == alone and np.array_equal(array, back))
"""

    def large_stacks() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, 1 << 30))

    ended = run_script(script, preexec_fn=large_stacks)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
