"""Output of the disk hop is complete or absent, and the input is unchanged, even after errors."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from disk_samples import entry, file_bytes, leftovers, write_sample

import packhorse
from packhorse.codecs.content import crc32c
from packhorse.disk import (
    batches,
    pack_file,
    unpack_file,
    verify_file,
)
from packhorse.disk.container import write_packed
from packhorse.layout import HEADER_CRC_OFFSET
from packhorse.storage.safetensors_header import build_header


def test_an_existing_output_is_kept_without_force(sample):
    source, packed = sample
    before = packed.read_bytes()
    for work in (lambda: pack_file(source, packed), lambda: unpack_file(packed, source)):
        with pytest.raises(FileExistsError, match="force"):
            work()
    assert packed.read_bytes() == before
    pack_file(source, packed, force=True)
    assert packed.read_bytes() == before


def test_the_input_is_never_the_output(tmp_path, sample):
    source, packed = sample
    before = source.read_bytes()
    (tmp_path / "soft").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for name in ("model.safetensors", "soft", "hard"):
        with pytest.raises(ValueError, match="input itself"):
            pack_file(source, tmp_path / name, force=True)
    with pytest.raises(ValueError, match="input itself"):
        unpack_file(packed, packed, force=True)
    assert source.read_bytes() == before


def test_a_link_is_replaced_and_what_it_names_is_kept(tmp_path, sample):
    source, packed = sample
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(FileExistsError):
            pack_file(source, tmp_path / name)
        pack_file(source, tmp_path / name, force=True)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == packed.read_bytes()
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_an_output_that_is_no_file_is_refused(tmp_path, sample):
    source = sample[0]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        pack_file(source, tmp_path / "pipe", force=True)
    with pytest.raises(IsADirectoryError, match="folder"):
        pack_file(source, tmp_path, force=True)
    with pytest.raises(FileNotFoundError, match="no folder"):
        pack_file(source, tmp_path / "absent" / "a")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_permissions_follow_the_source(tmp_path, sample):
    source, _ = sample
    for mode in (0o600, 0o444):
        source.chmod(mode)
        pack_file(source, tmp_path / "packed", force=True)
        unpack_file(tmp_path / "packed", tmp_path / "back", force=True)
        assert stat.S_IMODE((tmp_path / "packed").stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "back").stat().st_mode) == mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_work_that_is_interrupted_leaves_nothing(tmp_path, error):
    header = build_header({"a": ("U8", [100_000]), "b": ("U8", [10])})
    (tmp_path / "old").write_text("old")

    def buffers():
        yield bytes(100_000)
        assert leftovers(tmp_path, "old")  # it is under way
        raise error

    with pytest.raises(error):
        write_packed(tmp_path / "new", header, buffers())
    with pytest.raises(error):
        write_packed(tmp_path / "old", header, buffers(), force=True)
    assert not leftovers(tmp_path, "old")
    assert (tmp_path / "old").read_text() == "old"


def test_progress_that_raises_ends_the_work_cleanly(sample, tmp_path):
    source, packed = sample

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    before = set(os.listdir(tmp_path))
    for work in (pack_file, unpack_file):
        path = source if work is pack_file else packed
        with pytest.raises(KeyboardInterrupt):
            work(path, tmp_path / "out", progress=stop)
    assert set(os.listdir(tmp_path)) == before


FULL = """
import errno, os, resource, sys
from packhorse.disk import pack_file, unpack_file
work, source, output, limit = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    {"pack": pack_file, "unpack": unpack_file}[work](source, output)
except OSError as error:
    print(errno.errorcode[error.errno], error.filename)
"""


@pytest.mark.parametrize("work", ["pack", "unpack"])
def test_a_disk_that_is_full_in_mid_write_leaves_nothing(tmp_path, sample, work):
    source = sample[0] if work == "pack" else sample[1]
    before = set(os.listdir(tmp_path))
    command = [sys.executable, "-c", FULL, work, str(source), str(tmp_path / "out"), "500000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"EFBIG {tmp_path / 'out'}\n"
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
def test_a_small_file_system_that_fills_up_leaves_nothing(tmp_path, sample):
    source, _ = sample
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            pack_file(source, small / "out")
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(small / "out")
        assert not os.listdir(small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.fixture
def nobody():
    """A folder that everybody can enter, used with the rights of an ordinary user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    is_root = os.geteuid() == 0
    write_sample(folder / "open")
    write_sample(folder / "secret")
    (folder / "open").chmod(0o644)
    (folder / "secret").chmod(0)
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o555)
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_no_permission_names_the_file(nobody):
    with pytest.raises(PermissionError) as caught:
        pack_file(nobody / "open", nobody / "closed" / "out")
    assert caught.value.filename == str(nobody / "closed" / "out")
    with pytest.raises(PermissionError) as caught:
        pack_file(nobody / "secret", nobody / "closed" / "out")
    assert caught.value.filename == str(nobody / "secret")
    assert not os.listdir(nobody / "closed")


PEAK = """
import sys
from pathlib import Path
from packhorse.disk import pack_file, unpack_file
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
before = peak()
{"pack": pack_file, "unpack": unpack_file}[sys.argv[1]](*sys.argv[2:])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_the_largest_tensor_not_the_file(tmp_path):
    tensor_nbytes, n_tensors = 32 << 20, 12
    tensors = {
        str(i): entry(i * tensor_nbytes, (i + 1) * tensor_nbytes, "BF16", [tensor_nbytes // 2])
        for i in range(n_tensors)
    }
    block = np.random.default_rng(6).standard_normal(tensor_nbytes // 2).astype(ml_dtypes.bfloat16)
    source, packed = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.write(file_bytes(tensors))
        for _ in range(n_tensors):
            file.write(block.tobytes())
    del block
    for work, paths in (("pack", (source, packed)), ("unpack", (packed, tmp_path / "c"))):
        command = [sys.executable, "-c", PEAK, work, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) < 4 * tensor_nbytes, work


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of several batches, with large tensors among small ones."""
    rng = np.random.default_rng(5)
    sizes = [40_000_000, 3, 20_000_000, 9_000_001, 0, 30_000_000, 5_000_000, 77]
    tensors, start = {}, 0
    for i, size in enumerate(sizes):
        tensors[str(i)] = entry(start, start + 2 * size, "BF16", [size])
        start += 2 * size
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    with path.open("wb") as file:
        file.write(file_bytes(tensors))
        block = rng.standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
        for size in sizes:
            file.write(np.resize(block, size).tobytes())
    return path


WAYS = {
    "as it is": {},
    "one thread": {"threads": 1},
    "batches one after the other": {"ahead": 0},
    "through the cache": {"direct": False},
}


@pytest.fixture(scope="module")
def packed_large(large):
    """The file, packed in the usual way."""
    packed = large.with_name("packed")
    pack_file(large, packed)
    return packed


@pytest.mark.parametrize("way", WAYS)
def test_batches_that_overlap_give_the_same_file(tmp_path, monkeypatch, large, packed_large, way):
    options = dict(WAYS[way])
    monkeypatch.setattr(batches, "AHEAD_NBYTES", options.pop("ahead", batches.AHEAD_NBYTES))
    if not options.pop("direct", True):
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    pack_file(large, tmp_path / "packed", **options)
    assert (tmp_path / "packed").read_bytes() == packed_large.read_bytes()
    assert verify_file(tmp_path / "packed", **options) == []
    unpack_file(tmp_path / "packed", tmp_path / "back", **options)
    assert (tmp_path / "back").read_bytes() == large.read_bytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_tensor_that_is_damaged_is_one_problem(tmp_path, packed_large, threads):
    packed = tmp_path / "packed"
    with packhorse.open_file(packed_large) as file:
        frames = [file.frame(str(i)) for i in (0, 2)]
        headers = [bytes(frame.buffer()[: frame.header.header_nbytes]) for frame in frames]
    data = bytearray(packed_large.read_bytes())
    starts = [data.index(header) for header in headers]
    # All chunks of the first tensor are good, and only the content hash is not.
    wrong = bytearray(headers[0].replace(frames[0].content_hash, bytes(16)))
    wrong[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = bytes(4)
    wrong[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc32c(wrong).to_bytes(4, "little")
    data[starts[0] : starts[0] + len(wrong)] = wrong
    for place in (frames[1].nbytes // 2, frames[1].nbytes - 5000):  # two chunks of the other
        data[starts[1] + place] ^= 1
    packed.write_bytes(data)
    problems = verify_file(packed, threads=threads)
    assert [problem.tensor for problem in problems] == ["0", "2"]
    assert "content hash" in problems[0].message
    assert "chunk" in problems[1].message
