"""The seeds of the fuzz targets fit the format, because a fuzzer that starts from refused inputs
finds nothing."""

import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packhorse.numpy
from packhorse import _core
from packhorse.codecs.base import decode_plane
from packhorse.codecs.content import crc32c
from packhorse.disk import SnapshotStore
from packhorse.frame import Frame
from packhorse.layout import DTYPES, Level, Mode, Split
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.storage.safetensors_header import TensorEntry, parse_file_header
from packhorse.wire.pieces import Kind, decode_piece
from packhorse.wire.updates import DeltaReceiver

FUZZ = Path(__file__).parents[2] / "fuzz"
MADE_BY_TESTS = ("lie-", "made-")


def fuzz_module(name: str) -> Any:
    sys.path.insert(0, str(FUZZ))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(FUZZ))


@cache
def seeds(target: str) -> dict[str, bytes]:
    return dict(fuzz_module("make_corpus").TARGETS[target]())


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """The frames that the library made, each behind a control byte."""
    return [
        Frame.from_buffer(seed[1:], name=name)
        for name, seed in seeds("frame").items()
        if not name.startswith(MADE_BY_TESTS)
    ]


def test_every_seed_of_a_frame_is_good(frames: list[Frame]) -> None:
    for frame in frames:
        bits = {row.name: row.bits for row in DTYPES}[frame.base_dtype or "U8"]
        # The base that harness.py uses for every frame.
        base = (0x3C00 + 3 * np.arange(frame.numel * bits // 16 + 1)).astype("<u2").tobytes()
        frame.verify(threads=1, base=base[: frame.numel * bits // 8])


def test_seeds_have_every_dtype_level_split_and_mode(frames: list[Frame]) -> None:
    assert {frame.dtype for frame in frames} == {dtype.name for dtype in DTYPES}
    assert {frame.level for frame in frames} == set(Level)
    assert {frame.split for frame in frames} == set(Split)
    modes = {mode for frame in frames for plane in frame.planes() for mode in plane.modes}
    assert modes == set(Mode)


def test_every_seed_of_a_plane_decodes() -> None:
    modes = set()
    for seed in seeds("decode_plane").values():
        mode, n = Mode(seed[1]), 1 + int.from_bytes(seed[2:5], "little")
        if len(seed) > 5:  # else coding did not pay
            assert decode_plane(np.frombuffer(seed[5:], np.uint8), mode, n).size == n
            modes.add(mode)
    assert modes == {Mode.PALETTE, Mode.RANS}


def test_seeds_of_snapshots_are_those_of_a_good_store(tmp_path: Path) -> None:
    sample_store = fuzz_module("sample_store")
    sample_store.build_store(tmp_path / "store")
    texts = sample_store.snapshot_manifests(tmp_path / "store")
    for name, text in texts.items():  # the target builds the same store, and it fits its seeds
        assert seeds("manifest")[name] == bytes([3 * (name == "store")]) + text
    catalogue = sample_store.catalogue_parts(tmp_path / "store")
    assert seeds("manifest")["catalogue"] == b"\x08" + catalogue
    store = SnapshotStore(tmp_path / "store")
    assert [*store.names(), "store"] == [*texts]
    assert store.verify() == []
    frames = json.loads(texts["step-2"])["frames"]
    assert sum(row[-1] is not None for row in frames) == 3  # two deltas and a rounded copy


def test_seeds_of_checkpoints_are_good() -> None:
    pytest.importorskip("torch")
    from packhorse.disk.dcp.checkpoint_manifest import parse_manifest

    for name, seed in seeds("manifest").items():
        if name.startswith("checkpoint-"):
            text = seed[1:]
            whole = b'{"crc32c":"%08x","manifest":%s}\n' % (crc32c(text), text)
            assert parse_manifest(whole, name).storage_data


def test_seeds_of_files_with_a_base_unpack() -> None:
    chosen = {name: seed for name, seed in seeds("file").items() if re.fullmatch(r"based-\d", name)}
    assert len(chosen) == 9
    for name, seed in chosen.items():
        data = seed[1:]
        header = parse_file_header(memoryview(data), name)
        entry = next(entry for entry in header.entries if entry.name == "a")
        frame = Frame.from_buffer(data[header.data_offset + entry.start :][: entry.nbytes])
        base = NUMPY.empty(frame.dtype, frame.shape)
        raw = (0x3C00 + 3 * np.arange(frame.logical_nbytes // 2)).astype("<u2").tobytes()
        NUMPY.fill(base, lambda memory, raw=raw: np.copyto(memory, np.frombuffer(raw, np.uint8)))
        assert packhorse.numpy.load(data, base={"a": base}).keys() == {"a", "b"}


@pytest.mark.parametrize(
    "target",
    [
        *("decode_tensor", "round_trip", "short_tensor", "weights", "tables", "bounded"),
        *("file", "file_header"),
    ],
)
def test_every_target_has_seeds(target: str) -> None:
    assert len(seeds(target)) > 20


def test_the_core_reads_usual_headers_among_the_seeds() -> None:
    bits = {row.name: row.bits for row in DTYPES}
    for name, seed in seeds("file_header").items():
        is_read = _core.file_entries(seed, TensorEntry, bits) is not None
        assert is_read != name.startswith(MADE_BY_TESTS), name


def test_kept_inputs_are_of_targets_that_exist() -> None:
    kept = list((FUZZ / "corpus").glob("*/*"))
    assert {path.parent.name for path in kept} <= fuzz_module("make_corpus").TARGETS.keys()
    assert all(path.name.startswith("found-") for path in kept)


def test_every_seed_of_an_update_is_good() -> None:
    target = fuzz_module("fuzz_update")
    for name, seed in seeds("update").items():
        state = None if seed[0] & 8 else target.weights()
        receiver = DeltaReceiver(into=state, in_place=bool(seed[0] & 4))
        receiver.unpack(seed[1:])
        target.main(seed)
        assert len(seed) < 8192, name
        assert target.sealed(seed[1:]) == seed[1:], name


def test_pieces_decode() -> None:
    whole = [dtype for dtype in DTYPES if dtype.bits % 8 == 0]
    kinds = set()
    for name, seed in seeds("piece").items():
        dtype, nbytes = (
            whole[seed[1]],
            int.from_bytes(seed[2:4], "little") * whole[seed[1]].bits // 8,
        )
        assert name.rpartition("-")[0] == dtype.name
        start = (seed[0] >> 5) * 64
        memory = np.arange(start + nbytes).astype(np.uint8)
        decode_piece(np.frombuffer(seed[4:], np.uint8), dtype.name, memory, 1, start)
        kinds.add(seed[4 + 8])
    assert kinds == set(Kind)


def test_requests_ask_for_rows_that_are_there() -> None:
    target = fuzz_module("fuzz_request")
    kinds = set()
    for name, seed in seeds("request").items():
        rows = target.HOLDERS[seed[0]]
        wanted = target.unpack(seed[1:], rows)
        assert wanted is not None, name
        target.main(seed)
        kinds |= {(len(one.ids) > 0, one.lengths is None) for one in wanted}
    assert kinds == {(False, True), (True, True), (True, False)}
