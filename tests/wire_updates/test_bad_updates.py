"""Updates with missing, flipped or lying bytes: a documented error, and nothing is changed."""

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from update_samples import bits_of

from packhorse.codecs.content import crc32c
from packhorse.errors import (
    BaseMismatchError,
    CompatibilityError,
    CorruptionError,
    PackhorseError,
    TruncationError,
)
from packhorse.wire.updates import DeltaReceiver, DeltaSender, Update
from packhorse.wire.updates.message import HEADER_NBYTES

N_FLIPS = 1500


def weights() -> dict[str, Any]:
    """A large tensor, two small ones that share a frame, and one that does not change."""
    rng = np.random.default_rng(0)
    large = rng.standard_normal(40_000).astype(np.float32)
    return {"a": large, "b": large[:7].copy(), "c": large[7:9].copy(), "d": large[:30_000] * 2}


@cache
def updates() -> tuple[bytes, bytes]:
    """An anchor, and a delta."""
    state = weights()
    packer = DeltaSender(state)
    anchor = bytes(packer.pack())
    rng = np.random.default_rng(1)
    state["a"][rng.integers(0, 40_000, 400)] *= np.float32(1 + 2**-20)
    state["b"][3] = 9
    state["a"] = state["a"].copy()
    return anchor, bytes(packer.pack())


def receiver(kind: str, *, in_place: bool = False) -> tuple[DeltaReceiver, dict[str, Any]]:
    """A receiver that could apply the update."""
    state = {name: tensor * 0 for name, tensor in weights().items()}
    taker = DeltaReceiver(into=state, threads=1, in_place=in_place)
    if kind == "delta":
        taker.unpack(updates()[0])
    return taker, state


def payload(kind: str) -> bytes:
    return updates()[kind == "delta"]


def frames_at(data: bytes) -> int:
    """Where the frames begin."""
    n_frames, n_packed = (
        struct.unpack_from("<I", data, 12)[0],
        struct.unpack_from("<I", data, 104)[0],
    )
    return -(-(HEADER_NBYTES + 8 * n_frames + n_packed) // 64) * 64


@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_a_truncated_update_is_told_apart(kind: str) -> None:
    taker, state = receiver(kind)
    before, data = bits_of(state), payload(kind)
    head = frames_at(data)
    for length in (*range(head + 1), *range(head + 1, len(data), 97), len(data) - 1):
        with pytest.raises(TruncationError, match="cut off"):
            taker.stage(data[:length])
        with pytest.raises(TruncationError):
            Update(data[:length])
    with pytest.raises(CorruptionError, match="1 bytes follow the end"):
        taker.stage(data + b"\0")
    assert bits_of(state) == before
    taker.unpack(data)


def flips(data: bytes) -> Iterator[int]:
    """Every bit before the frames, and some of the frames."""
    head = 8 * frames_at(data)
    yield from range(head)
    yield from np.random.default_rng(2).integers(head, 8 * len(data), N_FLIPS).tolist()


@pytest.mark.parametrize("kind", ["anchor", "delta"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_flipped_bit_changes_nothing(kind: str, in_place: bool) -> None:
    taker, state = receiver(kind, in_place=in_place)
    before = bits_of(state)
    for bit in flips(payload(kind)):
        data = bytearray(payload(kind))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptionError, CompatibilityError)):
            taker.stage(data)
    assert bits_of(state) == before
    taker.unpack(payload(kind))


def sealed(data: bytearray) -> bytearray:
    """The update with a checksum that fits."""
    data[112:116] = bytes(4)
    data[112:116] = struct.pack("<I", crc32c(data[: frames_at(data)]))
    return data


def patch(at: int, form: str, value: Any) -> Callable[[bytearray], bytearray]:
    """An edit of one field, under a checksum that fits."""

    def edit(data: bytearray) -> bytearray:
        struct.pack_into(form, data, at, value)
        return sealed(data)

    return edit


FIELDS = {
    "magic": (patch(0, "4s", b"\x89PHF"), CorruptionError, "an update begins with 89504855"),
    "version 0": (patch(4, "B", 0), CorruptionError, "version is 0"),
    "version 3": (patch(4, "B", 3), CompatibilityError, "version is 3.*upgrade packhorse"),
    "flags": (patch(5, "B", 2), CompatibilityError, "flags are 0x02.*upgrade packhorse"),
    "anchor with a base": (patch(5, "B", 1), CorruptionError, "an anchor names a base"),
    "shard": (patch(6, "<H", 1), CorruptionError, "shard 1 of 1"),
    "no shards": (patch(8, "<H", 0), CorruptionError, "shard 0 of 0"),
    "reserved": (patch(10, "<H", 1), CorruptionError, "reserved bytes"),
    "reserved end": (patch(120, "B", 1), CorruptionError, "reserved bytes"),
    "short": (patch(16, "<Q", 100), CorruptionError, "the update has 100 bytes"),
    "long": (patch(16, "<Q", 1 << 60), TruncationError, "cut off"),
    "to version 0": (patch(40, "<Q", 0), CorruptionError, "the version is 0"),
    "backwards": (patch(48, "<Q", 2), CorruptionError, "base version 2 is not below 2"),
    "missed": (patch(40, "<Q", 1 << 63), None, ""),
    "base": (patch(56, "B", 1), BaseMismatchError, "foreign"),
    "state": (patch(72, "B", 1), CorruptionError, "do not make the state"),
    "contents": (patch(88, "B", 1), CorruptionError, "not those that the header names"),
    "contents' text": (patch(108, "<I", 1), CorruptionError, "not those that the header names"),
    "bomb": (patch(108, "<I", (1 << 32) - 1), CorruptionError, "claim to hold 4294967295"),
    "unit": (patch(HEADER_NBYTES, "<I", 3), CorruptionError, "unit 3 after -1, of 3 units"),
    "frame": (patch(HEADER_NBYTES + 4, "<I", 1), CorruptionError, "the header needs"),
    "frame's end": (patch(HEADER_NBYTES + 4, "<I", 1 << 30), CorruptionError, "ends after"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_lying_field_is_refused(name: str) -> None:
    edit, kind, words = FIELDS[name]
    taker, state = receiver("delta")
    before = bits_of(state)
    if name in ("contents", "contents' text", "bomb"):  # otherwise those that are known would do
        taker = DeltaReceiver(into=state, threads=1)
    data = edit(bytearray(payload("delta")))
    if kind is None:
        taker.stage(data)  # a version may be any later one
        return
    with pytest.raises(kind, match=words):
        taker.stage(data)
    assert bits_of(state) == before


def with_text(text: bytes) -> bytearray:
    """The anchor with other contents."""
    data = payload("anchor")
    at = HEADER_NBYTES + 8 * struct.unpack_from("<I", data, 12)[0]
    packed = zstandard.ZstdCompressor().compress(text)
    head = bytearray(data[:at] + packed)
    head = head.ljust(-(-len(head) // 64) * 64, b"\0")
    struct.pack_into("<Q", head, 16, len(head) + len(data) - frames_at(data))
    head[88:104] = xxhash.xxh3_128_digest(text)
    struct.pack_into("<II", head, 104, len(packed), len(text))
    return sealed(head + data[frames_at(data) :])


GOOD = (
    '{"aliases":[],"units":[["F32",[["a",[40000]]]],["F32",[["b",[7]],["c",[2]]]],'
    '["F32",[["d",[30000]]]]]}'
)


def test_the_edit_of_contents_is_otherwise_good() -> None:
    taker = DeltaReceiver(threads=1)
    with pytest.raises(CorruptionError, match="do not make the state"):
        taker.stage(with_text(GOOD.replace('"c"', '"e"').encode()))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD, "[]", "must be a JSON object"),
        (GOOD, "{}", "instead of aliases and units"),
        (GOOD, '{"aliases":[],"units":[]}', "there is no unit"),
        (GOOD, '{"aliases":[],"units":' + "[" * 50_000, "nested too deeply|not JSON"),
        ('"c"', '"b"', "'b' is not a new name"),
        ('"c"', '""', "'' is not a new name"),
        ('"c"', "3", "is not a new name"),
        ('"c"', '"\\ud800"', "not Unicode"),
        ("[]", '[["c","b"]]', "is not a new name and the name of a tensor"),
        ("[]", '[["x","y"]]', "is not a new name and the name of a tensor"),
        ("[]", '[["x"]]', "is not a new name and the name of a tensor"),
        ("[40000]", "[40000.0]", "is not a shape and a range"),
        ("[40000]", "[true]", "is not a shape and a range"),
        ("[40000]", "[-1]", "is not a shape and a range"),
        ("[40000]", "[40001]", "its unit F32"),
        ("[40000]", "[200,200]", "its unit F32"),
        ("[40000]", "[4611686018427387904]", "2\\^63 bits"),
        ("[40000]", "[1" + ",1" * 64 + "]", "at most 64 dimensions"),
        ("[40000]", "[80000],0,40000", "do not make the state"),
        ("[40000]", "[80000],0,80000", "are not a part"),
        ("[40000]", "[80000],5,4", "are not a part"),
        ("[40000]", "[80000],0,80001", "are not a part"),
        ("[40000]", "[80000],0", "is not a part"),
        ('"F32"', '"F33"', "is not a unit"),
        ('"F32"', "[]", "is not a unit"),
        ('"F32"', '"I32"', "the frame of a is F32"),
    ],
)
def test_lying_contents_are_refused(old: str, new: str, words: str) -> None:
    taker = DeltaReceiver(threads=1)
    with pytest.raises(CorruptionError, match=words):
        taker.stage(with_text(GOOD.replace(old, new, 1).encode()))


def test_frames_of_another_update_are_refused() -> None:
    state = weights()
    packer = DeltaSender(state)
    packer.pack()
    state["a"][0] = 1
    first = bytes(packer.pack())
    state["a"][0] = 2
    second = bytes(packer.pack())
    taker, held = receiver("anchor")
    mixed = first[: frames_at(first)] + second[frames_at(second) :]
    with pytest.raises(PackhorseError):
        taker.stage(mixed)
    assert not held["a"].any()


@pytest.mark.parametrize("value", [b"", b"x", 3, None, "text", [], np.zeros((4, 4)).T])
def test_other_objects_are_no_update(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, TruncationError)):
        DeltaReceiver(into={"a": np.zeros(1)}).stage(value)
