"""Reading parts of checkpoints: only the bytes that a box needs are decoded."""

import itertools
import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from dcp_samples import blank, load, load_box, pack_file, save, shards_of, weights

from packhorse.disk.dcp.regions import cut_box, strides_of
from packhorse.frame import Frame

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")


@each("seed, max_numel", product(range(60), [1 << 20, 20, 1]))
def test_runs_cover_a_box_and_meet_no_chunk_in_vain(seed: int, max_numel: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 7) for _ in range(rng.randint(0, 4))]
    lengths = [rng.randint(0 if seed % 5 == 0 else 1, size) for size in shape]
    offsets = [rng.randint(0, size - n) for size, n in zip(shape, lengths, strict=True)]
    chunk = rng.randint(1, 12)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    found = np.full(lengths, -1)
    met = set()
    for piece in cut_box(shape, offsets, lengths, chunk, max_numel):
        run = numbers.reshape(-1)[piece.start : piece.stop]
        assert len(run) == piece.stop - piece.start
        strides = [run.itemsize * stride for stride in strides_of(shape)]
        part = np.lib.stride_tricks.as_strided(run, piece.lengths, strides)
        ends = [o + n for o, n in zip(piece.offsets, piece.lengths, strict=True)]
        found[tuple(itertools.starmap(slice, zip(piece.offsets, ends, strict=True)))] = part
        met |= set((run // chunk).tolist())
        assert piece.is_run == (run.size == part.size)
        assert piece.is_run or run.size <= max_numel
    assert np.array_equal(found, box)
    assert met == set((box // chunk).flatten().tolist())


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths", "n_chunks"),
    [
        ((1024, 1024), (0, 0), (1024, 1024), 16),
        ((1024, 1024), (66, 0), (10, 1024), 1),
        ((1024, 1024), (120, 0), (10, 1024), 2),
        ((1024, 1024), (0, 5), (1024, 9), 16),  # every chunk has some of each column
        ((1024, 1024), (512, 5), (64, 9), 1),
        ((4, 1024, 256), (0, 0, 0), (4, 10, 256), 4),  # a run for each of the four
        ((4, 1024, 256), (1, 500, 3), (2, 30, 7), 4),
        ((2, 524288), (0, 131072), (2, 100), 2),
        ((1048576,), (131071,), (2,), 2),
    ],
)
def test_only_chunks_that_a_box_meets_are_decoded(
    tmp_path: Path,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    n_chunks: int,
) -> None:
    """The chunks are counted. All other chunks are damaged, which is not noticed, so they are not
    decoded."""
    whole = weights(*shape)
    save({"w": whole}, tmp_path, level="fast")
    (shard,) = shards_of(tmp_path).values()
    path = pack_file(tmp_path)
    data = bytearray(path.read_bytes())
    at = shard.frame.offset
    frame = Frame.from_buffer(bytes(data[at : at + shard.frame.nbytes]))
    assert frame.chunk_nbytes == 1 << 18
    ends = [o + n for o, n in zip(offsets, lengths, strict=True)]
    cut = tuple(itertools.starmap(slice, zip(offsets, ends, strict=True)))
    numbers = np.arange(whole.numel()).reshape(shape)[cut]
    needed = set((numbers * 4 // frame.chunk_nbytes).flatten().tolist())
    for chunk in set(range(frame.n_chunks)) - needed:
        start, stop = frame.payload_range(chunk << 18, (chunk + 1) << 18)
        data[at + start : at + stop] = bytes(stop - start)
    path.write_bytes(data)
    found, reader = load_box(tmp_path, offsets, lengths)
    assert torch.equal(found, whole[cut])
    assert reader.stats.n_chunks == len(needed) == n_chunks


def test_reads_of_the_same_chunk_decode_it_once(tmp_path: Path) -> None:
    same = weights(100, 100)
    save({"a": same, "b": same}, tmp_path)
    found = blank({"a": same, "b": same})
    reader = load(found, tmp_path)
    assert torch.equal(found["b"], same)
    assert (reader.stats.n_chunks, reader.stats.decoded_nbytes) == (1, same.nbytes)


def test_a_remote_file_is_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"memory://{tmp_path.name}"
    whole = weights(2048, 1024)
    save({"w": whole, "v": weights(9)}, url)
    fetched = []
    real = MemoryFileSystem.cat_file

    def spy(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        data = real(self, path, start=start, end=end, **more)
        fetched.append((path, len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", spy)
    found, reader = load_box(url, (1000, 0), (20, 1024))
    assert torch.equal(found, whole[1000:1020])
    assert reader.stats.n_chunks == 1
    nbytes = sum(n for path, n in fetched if "shards-" in path)
    assert nbytes < whole.nbytes / 8


def test_long_runs_are_decoded_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays bounded, and a chunk that two pieces need is decoded twice."""
    whole = weights(1024, 1024)
    save({"w": whole}, tmp_path)
    monkeypatch.setattr("packhorse.disk.dcp.reader._MAX_RUN_NBYTES", 900_000)
    found, reader = load_box(tmp_path, (0, 100), (1024, 300))
    assert torch.equal(found, whole[:, 100:400])
    assert reader.stats.n_chunks == 16 + 4
