"""Frames and files of earlier releases, which every later release must read. None is ever edited.

`golden/manifest.json` has the SHA-256 of each file and of what it decodes to, and says what is in
it. Encoders are free to write other bytes, so nothing here compares those; today's frames of the
same tensors must decode to the same tensors. After adding a case, write the missing files with

    PYTHONPATH=tests/samples python tests/codecs/test_golden.py --write-missing

which never touches an existing file, and refuses to write for an older version of the format.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frame_builder as fb
import numpy as np
import pytest
from codec_battery import (
    FLOATS,
    ISAS,
    check_tensor,
    forced,
    guarded,
    guarded_output,
    make_data,
    second_moment,
    tensor_shape,
)

from packhorse.disk import PackedFile, pack_file, unpack_file, verify_file
from packhorse.disk.folder_index import pack_index, unpack_index
from packhorse.frame import Frame, compress_buffer
from packhorse.frame.follow import Follower
from packhorse.layout import BASE_MODES, DTYPES, FRAME_VERSION, Level, Mode
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.reference import content_sum, decode_file, decode_frame

FOLDER = Path(__file__).parents[1] / "golden"
MANIFEST = FOLDER / "manifest.json"
VERSION = 4  # of the format; a new one gets cases of its own, beside these


@dataclass(frozen=True)
class Case:
    """A tensor, and how it was packed when its file was written."""

    dtype: str
    kind: str
    n_units: int
    level: Level | str = "default"

    def write(self) -> bytes:
        data = make_data(self.kind, self.dtype, self.n_units)
        shape = tensor_shape(data, self.dtype)
        return compress_buffer(data, self.dtype, shape, level=self.level).to_bytes()


@dataclass(frozen=True)
class Moments:
    """An optimizer's second moment, whose values depend on row and column."""

    dtype: str
    level: Level

    def write(self) -> bytes:
        spread = 1 if self.dtype.startswith("F8") else 3
        tensor = second_moment((160, 210), spread=spread).astype(FLOATS[self.dtype])
        data = tensor.tobytes()
        return compress_buffer(data, self.dtype, tensor.shape, level=self.level).to_bytes()


@dataclass(frozen=True)
class Delta:
    """A tensor some training steps away from the golden tensor that is its base."""

    base: str
    dtype: str
    scale: float
    share: float = 1.0
    level: Level = Level.DEFAULT
    has_sum: bool = False

    def write(self) -> bytes:
        base = decode_frame(golden(self.base))
        unit = {row.name: row.unit_nbytes for row in DTYPES}[self.dtype]
        if base.dtype == self.dtype:
            units = np.frombuffer(base.data, f"<u{unit}")
        else:  # rounded
            units = np.frombuffer(base.data, "<f4").astype(FLOATS[self.dtype]).view(f"<u{unit}")
        rng = np.random.default_rng([len(self.base), unit, int(self.scale)])
        steps = np.rint(rng.normal(0, self.scale, units.size)) * (
            rng.random(units.size) < self.share
        )
        data = (units + steps.astype(np.int64).view(np.uint64).astype(units.dtype)).tobytes()
        if self.has_sum:
            held = np.frombuffer(base.data, np.uint8)
            follower = Follower(self.dtype, base.shape, np.empty_like(held), self.level)
            follower.keep(held)
            frame = follower.follow(np.frombuffer(data, np.uint8))
            assert frame is not None
            return frame.to_bytes()
        return compress_buffer(
            data, self.dtype, base.shape, level=self.level, base=base.data, base_dtype=base.dtype
        ).to_bytes()


CASES: dict[str, Callable[[], bytes]] = {
    **{
        f"{dtype.name}-weights-{level.name.lower()}": Case(
            dtype.name, "weights", 9001 if dtype.name in ("F16", "BF16") else 1501, level
        ).write
        for dtype in DTYPES
        for level in Level
    },
    **{
        f"{dtype}-moments-{level.name.lower()}": Moments(dtype, level).write
        for dtype, level in (
            ("F32", Level.DEFAULT),
            ("BF16", Level.DEFAULT),
            ("BF16", Level.MAX),
            ("F8_E5M2", Level.DEFAULT),
        )
    },
    "F64-sparse": Case("F64", "sparse", 3001).write,
    "F32-constant": Case("F32", "constant", 200_001).write,
    "F32-outlier": Case("F32", "outlier", 200_001).write,
    "BF16-noise": Case("BF16", "noise", 2001).write,
    "BF16-empty": Case("BF16", "weights", 0).write,
    "F16-one": Case("F16", "weights", 1).write,
    "I64-sorted": Case("I64", "sorted", 9001).write,
    "I32-sorted-max": Case("I32", "sorted", 9001, "max").write,
    "F8_E4M3-33-values": Case("F8_E4M3", "33 values", 9001).write,
    "F8_E5M2-31-values-max": Case("F8_E5M2", "31 values", 9001, "max").write,
    "F8_E4M3FNUZ-few-fast": Case("F8_E4M3FNUZ", "few", 2001, "fast").write,
    "U16-255-values": Case("U16", "255 values", 8193, "max").write,
    **{f"built-{name}": (lambda build=build: bytes(build())) for name, build in fb.SMALL.items()},
}
# For each, the golden frame whose tensor is the base.
DELTAS: dict[str, Delta] = {
    "BF16-delta": Delta("BF16-weights-default", "BF16", 3),
    "BF16-delta-far-max": Delta("BF16-weights-default", "BF16", 90, level=Level.MAX),
    "BF16-delta-sparse": Delta("BF16-moments-max", "BF16", 2, share=0.02),
    "BF16-delta-equal": Delta("BF16-moments-default", "BF16", 0),
    "BF16-delta-cast": Delta("F32-moments-default", "BF16", 1, share=0.1),
    "F16-delta-cast-equal": Delta("F32-moments-default", "F16", 0),
    "F16-delta": Delta("F16-weights-default", "F16", 20),
    "F32-delta": Delta("F32-weights-max", "F32", 5000),
    "F64-delta": Delta("F64-weights-default", "F64", 1e9),
    "I64-delta": Delta("I64-sorted", "I64", 40),
    "I32-delta": Delta("I32-sorted-max", "I32", 1e6, share=0.3),
    "U16-delta-fast": Delta("U16-255-values", "U16", 4, level=Level.FAST),
    "F8_E4M3-delta": Delta("F8_E4M3-33-values", "F8_E4M3", 1, share=0.3),
}
# Those that came with version 2.
SPARSE: dict[str, Delta] = {
    "BF16-sparse-max": Delta("BF16-weights-max", "BF16", 2, share=0.05, level=Level.MAX),
    "BF16-sparse-cast": Delta("F32-moments-default", "BF16", 1, share=0.02),
    "F16-sparse": Delta("F16-weights-fast", "F16", 3, share=0.03, level=Level.FAST),
    "F32-sparse": Delta("F32-outlier", "F32", 5000, share=0.004),
    "F64-sparse-delta": Delta("F64-weights-max", "F64", 1e9, share=0.03),
    "I32-sparse": Delta("I32-sorted-max", "I32", 1e5, share=0.02),
    "F8_E4M3-sparse": Delta("F8_E4M3-33-values", "F8_E4M3", 1, share=0.05),
}
# Those that came with flag 1, of either version.
SUMS: dict[str, Delta] = {
    "F16-sum-delta": Delta("F16-weights-default", "F16", 9, has_sum=True),
    "F64-sum-delta": Delta("F64-weights-max", "F64", 1e9, has_sum=True),
}
SPARSE_SUMS: dict[str, Delta] = {
    "BF16-sum-sparse": Delta("BF16-weights-max", "BF16", 2, share=0.02, has_sum=True),
    "U8-sum-sparse-max": Delta("U8-weights-max", "U8", 3, 0.03, Level.MAX, has_sum=True),
}
# Those that came with version 3.
MATCHED: dict[str, Callable[[], bytes]] = {
    "I64-ids": Case("I64", "ids", 9001).write,
    "U16-ids-max": Case("U16", "ids", 20_001, "max").write,
    "I32-steps-fast": Case("I32", "steps", 9001, "fast").write,
}
BUILT_MATCHED = ("built-matches", "built-matches-differences")
# Those that came with version 4.
HALVED: dict[str, Callable[[], bytes]] = {
    "U8-halves": Case("U8", "halves", 9001).write,
    "I32-halves-max": Case("I32", "halves", 2501, "max").write,
}
BUILT_HALVED = ("built-nibbles", "built-nibbles-of-words")
CASES |= MATCHED | HALVED
SUMS |= SPARSE_SUMS
SPARSE |= SPARSE_SUMS
DELTAS |= SPARSE | SUMS
CASES |= {name: delta.write for name, delta in DELTAS.items()}
FILE = "file.packed"
INDEX = "index.packed"  # of a folder
BASED = "based.packed"  # a file that needs the first as its base
FILES = {FILE, INDEX, BASED}
FILE_METADATA = {"format": "pt", "note": "golden"}


def original_file() -> bytes:
    tensors = {
        "layers.0.weight": ("BF16", [30, 40], make_data("weights", "BF16", 1200)),
        "ids ☃": ("I64", [301], make_data("sorted", "I64", 301)),
        "nothing": ("F32", [0, 3], b""),
        "scalar": ("F64", [], make_data("noise", "F64", 1)),
    }
    return fb.original_file(tensors, FILE_METADATA)


def original_based_file() -> bytes:
    """The file above after some training steps, with one tensor more."""
    weights = np.frombuffer(make_data("weights", "BF16", 1200), "<u2")
    steps = np.rint(np.random.default_rng(4).normal(0, 2, weights.size)).astype("<i2")
    tensors = {
        "layers.0.weight": ("BF16", [1200], (weights + steps.view("<u2")).tobytes()),
        "ids ☃": ("I64", [301], make_data("sorted", "I64", 301)),
        "scalar": ("F64", [], make_data("noise", "F64", 1)),
        "more": ("F32", [50], make_data("weights", "F32", 50)),
    }
    return fb.original_file(tensors, FILE_METADATA)


def original_index() -> bytes:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weights = {f"layers.{i}.weight": shards[i % 2] for i in range(5)}
    document = {"metadata": {"total_size": 2400.0}, "weight_map": {**weights, "ids ☃": shards[0]}}
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def base_of(name: str) -> bytes | None:
    """The bytes of a golden frame's base."""
    return decode_frame(golden(DELTAS[name].base)).data if name in DELTAS else None


def describe(frame: bytes, base: bytes | None = None) -> dict[str, Any]:
    """Makes a line of the manifest with the slow decoder."""
    decoded = decode_frame(frame, base=base)
    return {
        "dtype": decoded.dtype,
        "shape": list(decoded.shape),
        "level": decoded.level,
        "modes": sorted({mode.name.lower() for modes in decoded.modes for mode in modes}),
        "frame_sha256": sha256(frame),
        "decoded_sha256": sha256(decoded.data),
    }


def read_manifest() -> dict[str, dict[str, Any]]:
    return json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}


def write_missing() -> list[str]:
    """Writes the missing files, and returns their names."""
    if FRAME_VERSION != VERSION:
        raise SystemExit(f"these cases are of version {VERSION}; add new ones for {FRAME_VERSION}")
    FOLDER.mkdir(exist_ok=True)
    manifest, written = read_manifest(), []
    for name, write in CASES.items():
        path = FOLDER / f"{name}.frame"
        if name not in manifest and not path.exists():
            path.write_bytes(write())
            manifest[name] = describe(path.read_bytes(), base_of(name))
            written.append(name)
    if FILE not in manifest and not (FOLDER / FILE).exists():
        source = FOLDER / "source.tmp"
        source.write_bytes(original_file())
        pack_file(source, FOLDER / FILE)
        source.unlink()
        packed = (FOLDER / FILE).read_bytes()
        decoded = sha256(decode_file(packed))
        manifest[FILE] = {"frame_sha256": sha256(packed), "decoded_sha256": decoded}
        written.append(FILE)
    if BASED not in manifest and not (FOLDER / BASED).exists():
        source = FOLDER / "source.tmp"
        source.write_bytes(original_based_file())
        pack_file(source, FOLDER / BASED, base=FOLDER / FILE)
        source.unlink()
        packed = (FOLDER / BASED).read_bytes()
        decoded = sha256(decode_file(packed, base=(FOLDER / FILE).read_bytes()))
        manifest[BASED] = {"frame_sha256": sha256(packed), "decoded_sha256": decoded}
        written.append(BASED)
    if INDEX not in manifest and not (FOLDER / INDEX).exists():
        packed = pack_index(original_index(), label=INDEX)
        (FOLDER / INDEX).write_bytes(packed)
        decoded = sha256(original_index())
        manifest[INDEX] = {"frame_sha256": sha256(packed), "decoded_sha256": decoded}
        written.append(INDEX)
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return written


GOLDEN = read_manifest()
FRAMES = [name for name in GOLDEN if name not in FILES]


def golden(name: str) -> bytes:
    return (FOLDER / (f"{name}.frame" if name in FRAMES else name)).read_bytes()


def test_no_golden_file_is_missing_changed_or_unknown() -> None:
    expected = {f"{name}.frame" if name in FRAMES else name for name in GOLDEN}
    found = {path.name for path in FOLDER.glob("*") if path.is_file()}
    assert found == expected | {MANIFEST.name}, "see the first lines of this file"
    assert {*CASES, *FILES} <= set(GOLDEN), "write the missing ones as this file's first lines say"
    for name, line in GOLDEN.items():
        assert sha256(golden(name)) == line["frame_sha256"], f"{name} was edited"


def test_golden_files_cover_the_format_and_stay_small() -> None:
    lines = [GOLDEN[name] for name in FRAMES]
    assert {line["dtype"] for line in lines} == {dtype.name for dtype in DTYPES}
    assert {mode for line in lines for mode in line["modes"]} == {m.name.lower() for m in Mode}
    assert {line["level"] for line in lines} >= set(Level)
    sizes = [path.stat().st_size for path in FOLDER.iterdir() if path.is_file()]
    assert sum(sizes) < 1 << 20
    assert len(sizes) <= 135


@pytest.mark.parametrize("name", FRAMES)
def test_golden_frame_decodes_in_every_decoder(name: str) -> None:
    packed, line, base = golden(name), GOLDEN[name], base_of(name)
    assert describe(packed, base) == line
    for isa in ISAS:
        with forced(isa):
            frame = Frame.from_buffer(guarded(packed))
            target = guarded_output(frame.logical_nbytes)
            frame.decompress_into(target, base=base)
            frame.verify(base=base)
        assert sha256(bytes(target)) == line["decoded_sha256"]
        assert (frame.dtype, list(frame.shape)) == (line["dtype"], line["shape"])


def test_golden_deltas_have_bases() -> None:
    for name, delta in DELTAS.items():
        frame, base = Frame.from_buffer(golden(name)), decode_frame(golden(delta.base))
        digest = content_sum(base.data) if delta.has_sum else base.content_hash
        assert (frame.base_hash, frame.base_dtype) == (digest, base.dtype)
        assert frame.has_sum == delta.has_sum
        if delta.has_sum:
            patch, target = frame.prepare_patch(base.data), bytearray(base.data)
            assert patch is not None
            patch.write(target)
            assert sha256(bytes(target)) == GOLDEN[name]["decoded_sha256"]
        assert set(BASE_MODES) & set(frame.planes()[0].modes)
        assert (Mode.SPARSE_DELTA in frame.planes()[0].modes) == (name in SPARSE)


def test_only_frames_with_new_modes_have_a_new_version() -> None:
    versions = {name: golden(name)[4] for name in FRAMES}
    newer = {
        **dict.fromkeys(SPARSE, 2),
        **dict.fromkeys((*MATCHED, *BUILT_MATCHED), 3),
        **dict.fromkeys((*HALVED, *BUILT_HALVED), 4),
    }
    assert versions == {**dict.fromkeys(FRAMES, 1), **newer}


@pytest.mark.parametrize("name", FRAMES)
def test_todays_encoder_packs_the_same_tensor(name: str) -> None:
    base = base_of(name)
    decoded = decode_frame(golden(name), base=base)
    if base is not None:
        delta = DELTAS[name]
        frame = compress_buffer(
            decoded.data, delta.dtype, decoded.shape, base=base,
            base_dtype=GOLDEN[delta.base]["dtype"],
        )  # fmt: skip
        assert decode_frame(frame.to_bytes(), base=base).data == decoded.data
    for level in ("fast", "default", "max"):
        frame = check_tensor(decoded.data, decoded.dtype, level=level)
        assert decode_frame(frame.to_bytes()).data == decoded.data


def test_golden_file_unpacks_to_its_original(tmp_path: Path) -> None:
    if FILE not in GOLDEN:
        pytest.fail("the golden file is missing: see the first lines of this file")
    packed = FOLDER / FILE
    assert verify_file(packed) == []
    unpack_file(packed, tmp_path / "original")
    original = (tmp_path / "original").read_bytes()
    assert sha256(original) == GOLDEN[FILE]["decoded_sha256"]
    assert decode_file(packed.read_bytes()) == original
    pack_file(tmp_path / "original", tmp_path / "again")
    assert decode_file((tmp_path / "again").read_bytes()) == original


def test_golden_file_with_a_base_unpacks_to_its_original(tmp_path: Path) -> None:
    packed, base = FOLDER / BASED, FOLDER / FILE
    assert verify_file(packed, base=base) == []
    unpack_file(packed, tmp_path / "original", base=base)
    original = (tmp_path / "original").read_bytes()
    assert sha256(original) == GOLDEN[BASED]["decoded_sha256"]
    assert decode_file(packed.read_bytes(), base=base.read_bytes()) == original
    with PackedFile(packed, NUMPY, base=base) as file:
        assert file.base_name == FILE
        based = {name for name in file.keys() if file.frame(name).base_hash}  # noqa: SIM118
    assert based == {"layers.0.weight", "ids ☃", "scalar"}
    pack_file(tmp_path / "original", tmp_path / "again", base=base)
    assert decode_file((tmp_path / "again").read_bytes(), base=base.read_bytes()) == original


def test_golden_index_unpacks_to_its_original() -> None:
    original = unpack_index(golden(INDEX), label=INDEX)
    assert sha256(original) == GOLDEN[INDEX]["decoded_sha256"]
    assert unpack_index(pack_index(original, label=INDEX), label=INDEX) == original


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the golden files that are missing.")
    parser.add_argument("--write-missing", action="store_true", required=True)
    parser.parse_args()
    print("\n".join(write_missing()) or "nothing is missing")
