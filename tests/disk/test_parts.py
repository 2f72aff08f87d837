"""A long tensor is packed in parts. Its frame is that of a tensor that is packed as a whole."""

import subprocess
import sys
import weakref
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
from codec_battery import make_data, scaled
from disk_samples import leftovers
from safetensors.numpy import load_file, save_file

import packhorse
from packhorse import _core
from packhorse import numpy as ph_numpy
from packhorse.disk import batches, pack_file, unpack_file, verify_file
from packhorse.disk.batches import Listed
from packhorse.disk.container import write_packed
from packhorse.frame import Frame, compress_buffer
from packhorse.frame.compress import FrameInParts
from packhorse.layout import MAX_CHUNK_NBYTES, Level, Mode
from packhorse.storage.source import header_at

PART = MAX_CHUNK_NBYTES
RNG = np.random.default_rng(0)


def weights(n: int) -> np.ndarray:
    return (RNG.standard_normal(n) * 0.02).astype(ml_dtypes.bfloat16)


# Lengths with a short last part, with one of a few bytes, and of whole parts.
TENSORS = {
    "planes": weights(3_500_001),
    "planes, and a few bytes": weights(3 * PART // 2 + 3),
    "whole parts": RNG.standard_normal(4 * PART // 4).astype(np.float32),
    "rows and columns": np.frombuffer(scaled(3500, 1000), ml_dtypes.bfloat16).reshape(3500, 1000),
    "matches": np.frombuffer(make_data("ids", "I64", 900_001), np.int64),
    "nibbles": np.frombuffer(make_data("halves", "U8", 6_500_000), np.uint8),
    "zstd": np.frombuffer(b"All the horses of the world carry packs. " * 160_001, np.uint8),
    "noise": RNG.integers(0, 256, 6_500_003, np.uint8),
    "zeros": np.zeros(7_000_000, np.float16),
}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(batches, "PART_NBYTES", PART)
    monkeypatch.setattr(batches, "WHOLE_NBYTES", 3 * PART)


@pytest.mark.parametrize("level", ["fast", "default", "max"])
@pytest.mark.parametrize("kind", TENSORS)
def test_parts_make_the_frame_of_the_whole(tmp_path, small_parts, kind, level):
    tensor = TENSORS[kind]
    assert tensor.nbytes > 3 * PART
    save_file({"w": tensor}, tmp_path / "plain")
    whole = ph_numpy.compress(tensor, level=level)
    steps: list[int] = []
    paths = tmp_path / "plain", tmp_path / "packed"
    pack_file(*paths, level=level, threads=2, progress=steps.append)
    with packhorse.open_file(tmp_path / "packed") as file:
        assert bytes(file.frame("w").buffer()) == whole.to_bytes()
    assert len(steps) == -(-tensor.nbytes // PART)
    assert sum(steps) == tensor.nbytes
    assert verify_file(tmp_path / "packed") == []
    unpack_file(tmp_path / "packed", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "plain").read_bytes()


def test_the_tensors_above_are_of_all_modes():
    frames = {kind: ph_numpy.compress(tensor) for kind, tensor in TENSORS.items()}
    wholes = {kind: frame.plan.whole for kind, frame in frames.items() if frame.plan.whole}
    assert wholes == {"matches": Mode.MATCHES, "nibbles": Mode.NIBBLES, "zstd": Mode.ZSTD}
    assert frames["rows and columns"].plan.side.saving


def test_long_tensors_among_others_and_in_memory(tmp_path, small_parts):
    """Batches of several tensors, and parts, in one file; from a file, from tensors, at a URL."""
    tensors = {
        "a": np.arange(10), "b": TENSORS["planes"], "c": weights(9_000_000),
        "d": weights(8_500_000), "e": np.arange(0), "f": TENSORS["matches"],
        "g": weights(17_000_000),
    }  # fmt: skip
    save_file(tensors, tmp_path / "plain")
    pack_file(tmp_path / "plain", tmp_path / "packed")
    expected = (tmp_path / "packed").read_bytes()
    with packhorse.open_file(tmp_path / "packed") as file:
        for name, tensor in tensors.items():
            assert bytes(file.frame(name).buffer()) == ph_numpy.compress(tensor).to_bytes()
    tensors = load_file(tmp_path / "plain")
    ph_numpy.save_file(tensors, tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == ph_numpy.save(tensors) == expected
    url = f"memory://{tmp_path.name}"
    with fsspec.open(f"{url}/plain", "wb") as file:
        file.write((tmp_path / "plain").read_bytes())
    steps: list[int] = []
    pack_file(f"{url}/plain", f"{url}/packed", threads=1, progress=steps.append)
    assert max(steps) < max(tensor.nbytes for tensor in tensors.values())
    with fsspec.open(f"{url}/packed") as file:
        assert file.read() == expected


def test_a_long_tensor_with_a_base_is_packed_as_a_whole(tmp_path, small_parts):
    base = TENSORS["planes"]
    tuned = base.copy()
    tuned[::1000] += 1
    for name, tensor in (("base", base), ("tuned", tuned)):
        save_file({"w": tensor}, tmp_path / name)
    pack_file(tmp_path / "tuned", tmp_path / "packed", base=tmp_path / "base")
    dtype, shape = "BF16", tuned.shape
    whole = compress_buffer(tuned.view(np.uint8), dtype, shape, base=base.view(np.uint8))
    with packhorse.open_file(tmp_path / "packed") as file:
        assert bytes(file.frame("w").buffer()) == whole.to_bytes()


def test_an_interrupted_part_leaves_nothing(tmp_path, small_parts):
    save_file({"w": TENSORS["planes"]}, tmp_path / "plain")
    steps: list[int] = []

    def interrupt(nbytes: int) -> None:
        steps.append(nbytes)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_file(tmp_path / "plain", tmp_path / "packed", progress=interrupt)
    assert not leftovers(tmp_path, "plain")


def test_what_changes_between_parts_is_packed_as_it_was_read():
    """The plan is that of the tensor before, and the frame holds the parts."""
    tensor = TENSORS["planes"]
    read = np.concatenate([tensor[: PART // 2], -tensor[PART // 2 :]])
    parts = FrameInParts(tensor.view(np.uint8), "BF16", tensor.shape, level=Level.DEFAULT)
    pieces = []
    for start in range(0, tensor.nbytes, PART):
        data = read.view(np.uint8)[start : start + PART]
        room = np.empty(-(-data.size // 64) * 64, np.uint8)
        pieces.append(parts.add(data, room, threads=1).tobytes())
    frame = Frame.from_buffer(b"".join([parts.header().tobytes(), *pieces]))
    assert frame.nbytes == parts.nbytes
    frame.verify()
    back = np.empty(read.nbytes, np.uint8)
    frame.decompress_into(back)
    assert back.tobytes() == read.tobytes()


@pytest.mark.parametrize("kind", ["iterable", "tensors"])
def test_a_long_tensor_is_released_before_the_next_is_taken(tmp_path, small_parts, kind):
    """What comes from a URL, a snapshot or a GPU is a copy, and only one long one is there."""
    tensor = np.resize(TENSORS["planes"], 9_000_000)  # no two of them fit into a batch
    save_file(dict.fromkeys("abc", tensor), tmp_path / "plain")
    header = header_at(tmp_path / "plain")
    copies: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def read(i: int) -> np.ndarray:
        alive.append(sum(copy() is not None for copy in copies))
        copy = tensor.view(np.uint8).copy()
        copies.append(weakref.ref(copy))
        return copy

    views = _core.views_of_buffers([np.zeros(0, np.uint8)] * 3, [], [])
    buffers = Listed(views, [0, 1, 2], read) if kind == "tensors" else map(read, range(3))
    steps: list[int] = []
    write_packed(tmp_path / "packed", header, buffers, threads=1, progress=steps.append)
    assert (len(steps), alive) == (3 * -(-tensor.nbytes // PART), [0, 0, 0])
    pack_file(tmp_path / "plain", tmp_path / "expected")
    assert (tmp_path / "packed").read_bytes() == (tmp_path / "expected").read_bytes()


def test_parts_end_where_chunks_do():
    tensor = TENSORS["planes"].view(np.uint8)
    parts = FrameInParts(tensor, "BF16", (tensor.size // 2,), level=Level.DEFAULT)
    with pytest.raises(ValueError, match="whole chunks"):
        parts.add(tensor[: PART - 2], np.empty(PART, np.uint8), threads=1)
    with pytest.raises(ValueError, match="too small"):
        parts.add(tensor[:PART], np.empty(PART - 64, np.uint8), threads=1)
    parts.add(tensor[:PART], np.empty(PART, np.uint8), threads=1)
    with pytest.raises(ValueError, match=f"{PART} of {tensor.size} bytes"):
        parts.header()


PEAK = """
import sys
from pathlib import Path
from packhorse.disk import batches, pack_file
def memory(_=0):
    lines = Path("/proc/self/status").read_text().splitlines()
    found.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")))
found = []
batches.PART_NBYTES = batches.WHOLE_NBYTES = int(sys.argv[1])
memory()
pack_file(sys.argv[2], sys.argv[3], progress=memory)
print(len(found), max(found) - found[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_parts_not_by_the_tensor(tmp_path):
    """Two parts of the frame are in memory, and what the encoder needs."""
    tensor = np.resize(TENSORS["planes"], 16 * PART)
    save_file({"w": tensor}, tmp_path / "plain")
    paths = [tmp_path / "plain", tmp_path / "packed"]
    command = [sys.executable, "-c", PEAK, str(4 * PART), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    n_steps, nbytes = map(int, done.stdout.split())
    assert (n_steps, nbytes < tensor.nbytes // 2) == (1 + 8, True), nbytes
