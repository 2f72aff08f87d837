"""Damaged and lying packed files raise the documented error, which names file, tensor and place."""

import base64
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import frame_builder as fb
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard
from disk_samples import (
    file_bytes,
    file_of_samples,
    leftovers,
    small_packed_file,
    write_sample,
)

from packhorse.disk import PackedFile, pack_file, unpack_file, verify_file
from packhorse.disk.packed_header import PrefixWriter
from packhorse.errors import (
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.numpy import load, save, save_file
from packhorse.storage.safetensors_header import build_header, read_header


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> bytes:
    """A small packed file with frames of several modes."""
    return small_packed_file(tmp_path_factory.mktemp("packed"))


def read_all(path: Path, folder: Path) -> list[str]:
    """The messages of all readers about a file: documented errors that name it."""
    told = []
    for work in (read_tensors, lambda p: unpack_file(p, folder / "out", force=True), verified):
        try:
            work(path)
        except (PackhorseError, ValueError) as error:
            told.append(str(error))
    assert all(str(path) in message for message in told)
    return told


def read_tensors(path: Path) -> None:
    with PackedFile(path, NUMPY) as file:
        file.get_tensors()


def verified(path: Path) -> None:
    problems = verify_file(path)
    if problems:
        raise PackhorseError("; ".join(problem.message for problem in problems))


@pytest.mark.parametrize("step", [1, 97])
def test_every_truncation_is_told(tmp_path, packed, step):
    """A tiny file is cut at every length, a larger one at some."""
    whole = file_of_samples("rans-carry")[0] if step == 1 else packed
    path = tmp_path / "cut"
    for nbytes in [*range(0, len(whole), step), len(whole) - 1]:
        path.write_bytes(whole[:nbytes])
        for work in (read_tensors, lambda p: unpack_file(p, tmp_path / "out")):
            with pytest.raises(TruncationError, match=f"^{path}: "):
                work(path)
        assert len(verify_file(path)) == 1
    assert not leftovers(tmp_path, "cut")


def test_appended_bytes_are_told(tmp_path, packed):
    path = tmp_path / "long"
    path.write_bytes(packed + b"\0")
    with pytest.raises(CorruptionError, match="1 more bytes follow"):
        read_tensors(path)


def test_every_flipped_bit_is_told(tmp_path, packed):
    """Bits flip anywhere in the header and densely in the frames; none gives a wrong file."""
    header_nbytes = read_header_nbytes(packed)
    places = [*range(0, header_nbytes, 3), *range(header_nbytes, len(packed), 41)]
    path = tmp_path / "flipped"
    for count, place in enumerate(places):
        data = bytearray(packed)
        data[place] ^= 1 << count % 8
        path.write_bytes(data)
        told = read_all(path, tmp_path)
        assert len(told) == 3, f"byte {place}: {told}"
        assert not leftovers(tmp_path, "flipped")


@pytest.mark.parametrize(
    ("names", "bits"),
    [(("palette",), range(8)), ((), (5,))],
    ids=["every bit of one frame", "a bit of each byte, every mode"],
)
def test_verify_finds_every_flipped_bit(tmp_path, names, bits):
    """Flips bits of the header, record, spaces, frames and padding. Some flips change nothing, such
    as some bits of a Zstandard frame, or the case of digits in a JSON escape."""
    whole, _ = file_of_samples(*names)
    path, missed = tmp_path / "flipped", []
    path.write_bytes(whole)
    for place, bit in product(range(len(whole)), bits):
        with flipped(path, whole, place, bit):
            if not verified_or_refused(path):
                missed.append((place, bit))
    assert missed == []


def test_a_capital_digit_in_an_escape_is_told_with_the_file(tmp_path):
    packed = save({"\x1f": np.zeros(3, np.float32)})
    path = tmp_path / "capital"
    for text, problems in ((packed, 0), (packed.replace(rb"\u001f", rb"\u001F"), 1)):
        path.write_bytes(text)
        found = verify_file(path)
        assert len(found) == problems
        assert all(str(path) in problem.message for problem in found)
    assert load(path.read_bytes()).keys() == {"\x1f"}


@contextmanager
def flipped(path: Path, whole: bytes, place: int, bit: int) -> Iterator[None]:
    """Flip one bit of a file, and flip it back afterwards."""
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([whole[place] ^ 1 << bit]), place)
        yield
        os.pwrite(file.fileno(), whole[place : place + 1], place)


def verified_or_refused(path: Path) -> list[object]:
    """The problems that verifying finds. A file that is not marked as packed is refused."""
    try:
        return [*verify_file(path, threads=1)]
    except ValueError as error:
        return re.findall("not a packed file", str(error))


def test_a_flipped_bit_in_the_recorded_header_is_told(tmp_path):
    """A lie in the record's text, which is compressed again, so that every checksum is right."""
    whole, original = file_of_samples("rans-carry", "zstd")
    text = original[8 : read_header_nbytes(original)].rstrip()
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        lie = edit(whole, lambda record: {**record, "header": recorded(bytes(damaged))})  # noqa: B023 - called at once
        try:
            load(lie)
        except PackhorseError:
            continue
        assert json.loads(damaged) == json.loads(text), f"bit {bit}"


def read_header_nbytes(packed: bytes) -> int:
    return 8 + int.from_bytes(packed[:8], "little")


def test_verify_lists_every_bad_tensor_and_goes_on(tmp_path):
    source, path = tmp_path / "a", tmp_path / "b"
    write_sample(source)
    pack_file(source, path)
    header = read_header(path)
    data = bytearray(path.read_bytes())
    bad = {"layers.0.weight": -100, "noise": 3, "nothing": 30}
    frames = {tensor.name: tensor for tensor in header.entries}
    for name, place in bad.items():
        start, stop = frames[name].start, frames[name].stop
        data[header.data_offset + (stop if place < 0 else start) + place] ^= 4
    path.write_bytes(data)
    problems = verify_file(path)
    assert {problem.tensor for problem in problems} == set(bad)
    for problem in problems:
        assert problem.path == path
        assert problem.offset == header.data_offset + frames[problem.tensor].start
        assert str(path) in problem.message
        assert repr(problem.tensor) in problem.message
    with PackedFile(path, NUMPY) as file:
        assert file.get_tensor("scalar") == 3.25
        with pytest.raises(CorruptionError, match=f"^{path}: tensor 'noise'"):
            file.get_tensor("noise")


def test_verify_checks_frames_even_if_the_recorded_header_is_bad(tmp_path, packed):
    path = tmp_path / "a"
    path.write_bytes(edit(packed, lambda record: {**record, "header": "AAAA"}))
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)
    problems = verify_file(path)
    assert len(problems) == 2
    assert problems[0].tensor is None
    assert problems[1].tensor is not None


def test_a_wrong_content_hash_is_found_by_unpacking(tmp_path):
    """The frame belongs to another tensor of the same dtype and shape, with the right checksums."""
    header = build_header({"a": ("F32", [1000])})
    source, path = tmp_path / "a", tmp_path / "b"
    source.write_bytes(header.prefix() + np.random.default_rng(8).bytes(4000))
    pack_file(source, path)
    data = bytearray(path.read_bytes())
    frame = read_header(path).data_offset
    data[frame + 24] ^= 1  # the content hash
    size = struct.unpack_from("<I", data, frame + 12)[0]
    data[frame + 44 : frame + 48] = bytes(4)
    from packhorse import _core

    crc = _core.crc32c(np.frombuffer(bytes(data[frame : frame + size]), np.uint8))
    data[frame + 44 : frame + 48] = struct.pack("<I", crc)
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"'a'.*content hash"):
        unpack_file(path, tmp_path / "out")
    assert [problem.tensor for problem in verify_file(path)] == ["a"]
    assert not leftovers(tmp_path, "a", "b")


def test_checksums_are_no_signature(tmp_path):
    """Somebody may rewrite a file with other data; then it is a good file of that data."""
    path = tmp_path / "a"
    for data in (np.arange(100), np.arange(100) + 1):
        save_file({"a": data}, path)
        assert verify_file(path) == []
        assert np.array_equal(load(path.read_bytes())["a"], data)
    first, second = (save({"a": data}) for data in (np.zeros(64, np.uint8), np.ones(64, np.uint8)))
    nbytes = read_header_nbytes(first)
    path.write_bytes(first[:nbytes] + second[nbytes:])
    assert verify_file(path) == []
    assert load(path.read_bytes())["a"].all()


def edit(packed: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A packed file with another record; everything else in it is right."""
    nbytes = read_header_nbytes(packed)
    document = json.loads(packed[8:nbytes])
    record = json.loads(document["__metadata__"]["packhorse"])
    record = change(record)
    if isinstance(record, dict) and record.get("crc32c") != "a lie":
        record["crc32c"] = fb.record_crc(record)
    document["__metadata__"]["packhorse"] = json.dumps(record)
    text = json.dumps(document).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return file_bytes(text, packed[nbytes:])


def recorded(text: bytes, **options: Any) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(**options).compress(text)).decode()


def bomb() -> str:
    """A record of a few bytes that declares 2^40 bytes."""
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(70_000)))
    assert frame[4] >> 6 == 2  # the content size takes four bytes
    frame[4] = frame[4] & 0x3F | 0xC0
    frame[5:9] = (1 << 40).to_bytes(8, "little")
    return base64.b64encode(frame).decode()


LIES = {
    "newer version": (lambda r: {**r, "version": 2}, CompatibilityError, "version 2.*upgrade"),
    "version zero": (lambda r: {**r, "version": 0}, CorruptionError, "from 1, but is 0"),
    "version text": (lambda r: {**r, "version": "1"}, CorruptionError, "is '1'"),
    "version true": (lambda r: {**r, "version": True}, CorruptionError, "is True"),
    "no version": (lambda r: {"header": r["header"]}, CorruptionError, "is None"),
    "no header": (lambda r: {"version": 1}, CorruptionError, "missing or not a string"),
    "header is a list": (lambda r: {**r, "header": []}, CorruptionError, "not a string"),
    "not base64": (lambda r: {**r, "header": "ä!"}, CorruptionError, "cannot be decoded"),
    "stray base64 bits": (lambda r: {**r, "header": "QR=="}, CorruptionError, "stray bits"),
    "not zstd": (lambda r: {**r, "header": "QUJD"}, CorruptionError, "cannot be decoded"),
    "size not declared": (
        lambda r: {**r, "header": recorded(b"{}", write_content_size=False)},
        CorruptionError,
        "declare a size",
    ),
    "bomb": (lambda r: {**r, "header": bomb()}, CorruptionError, "at most 100000000"),
    "two zstd frames": (
        lambda r: {**r, "header": base64.b64encode(base64.b64decode(recorded(b"{}")) * 2).decode()},
        CorruptionError,
        "cannot be decoded",
    ),
    "recorded header is bad": (
        lambda r: {**r, "header": recorded(b'{"a":1}')},
        CorruptionError,
        "recorded header: tensor 'a'",
    ),
    "recorded header lacks tensors": (
        lambda r: {**r, "header": recorded(b"{}")},
        CorruptionError,
        "'none' has a frame, but is not",
    ),
    "no CRC": (lambda r: {**r, "crc32c": "a lie"}, CorruptionError, "'crc32c' is 'a lie'.*damaged"),
    "record is a list": (lambda r: [r], CorruptionError, "must be a JSON object"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_record_that_lies_is_told(tmp_path, packed, case):
    change, error, words = LIES[case]
    path = tmp_path / "lie"
    path.write_bytes(edit(packed, change))
    for work in (read_tensors, lambda p: unpack_file(p, tmp_path / "out")):
        with pytest.raises(error, match=f"^{path}: .*{words}"):
            work(path)
    assert verify_file(path)[0].tensor is None
    assert not leftovers(tmp_path, "lie")


def original_of(packed: bytes) -> dict[str, Any]:
    record = json.loads(
        json.loads(packed[8 : read_header_nbytes(packed)])["__metadata__"]["packhorse"]
    )
    return json.loads(zstandard.ZstdDecompressor().decompress(base64.b64decode(record["header"])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [50, 60]}, r"'weight' at byte \d+: the frame holds F32 of shape \[60, 50\]"),
        ({"dtype": "I32"}, r"'weight'.*the recorded header says I32"),
    ],
)
def test_a_frame_that_is_not_the_recorded_tensor_is_told(tmp_path, packed, change, words):
    original = original_of(packed)
    original["weight"] |= change
    text = json.dumps(original).encode()
    path = tmp_path / "lie"
    path.write_bytes(edit(packed, lambda record: {**record, "header": recorded(text)}))
    told = read_all(path, tmp_path)
    assert len(told) == 3
    for message in told:
        assert message.startswith(f"{path}: tensor 'weight'")
    with pytest.raises(CorruptionError, match=words):
        read_tensors(path)


def test_metadata_that_differs_from_the_record_is_told(tmp_path, packed):
    path = tmp_path / "lie"
    path.write_bytes(packed.replace(b'"format":"np"', b'"format":"pt"'))
    assert len(read_all(path, tmp_path)) == 3
    with pytest.raises(CorruptionError, match="'format' is 'pt', but 'np' in the recorded"):
        read_tensors(path)


def test_a_frame_that_is_no_run_of_bytes_is_told(tmp_path, packed):
    nbytes = read_header_nbytes(packed)
    document = json.loads(packed[8:nbytes])
    document["zeros"]["shape"] = [1, *document["zeros"]["shape"]]
    path = tmp_path / "lie"
    path.write_bytes(file_bytes(document, packed[nbytes:]))
    with pytest.raises(CorruptionError, match=r"'zeros': a frame is U8 of one dimension"):
        read_tensors(path)


def test_a_file_resaved_by_the_safetensors_library_still_unpacks(tmp_path, packed):
    """The order, the alignment and further metadata may differ: only the frames matter."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(packed)
    with safetensors.safe_open(path, "np") as file:
        tensors, metadata = file.get_tensors(), file.metadata()
    safetensors.numpy.save_file(tensors, other, {**metadata, "more": "x"})
    unpack_file(path, tmp_path / "c")
    unpack_file(other, tmp_path / "d")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()
    assert verify_file(other) == []


def test_a_packed_header_beyond_the_cap_is_refused(monkeypatch):
    header = build_header({"a": ("U8", [1])}, {"k": "x" * 1000})
    monkeypatch.setattr("packhorse.disk.packed_header.MAX_FILE_HEADER_NBYTES", 900)
    with pytest.raises(CompatibilityError, match=r"at most 900.*shards"):
        PrefixWriter(header)
