"""Frames whose bytes are chosen by an adversary: the documented error, and nothing else.

Lies are those that the slow decoder is tested with; here every code path must refuse them for the
same kind of reason. Random damage runs in guarded memory, so an access out of bounds ends the run.
"""

import random
import re
from functools import cache

import frame_builder as fb
import pytest
from codec_battery import ISAS, forced, guarded, guarded_output, make_data, tensor_shape
from format_page import clauses
from frame_builder import SMALL
from lying_frames import LIES

from packhorse.errors import CorruptionError, PackhorseError, TruncationError
from packhorse.frame import Frame, compress_buffer
from packhorse.layout import Mode


def read_all(
    data: bytes, *, name: str | None = None, offset: int = 0, max_nbytes: int = 1 << 26
) -> bytes:
    frame = Frame.from_buffer(data, name=name, offset=offset, max_nbytes=max_nbytes)
    frame.verify(threads=2)
    target = guarded_output(frame.logical_nbytes)
    frame.decompress_into(target)
    return bytes(target)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(lie: str, isa: str) -> None:
    data, limit = LIES[lie].frame(), LIES[lie].max_nbytes or 1 << 26
    with forced(isa), pytest.raises(PackhorseError) as caught:
        read_all(data, name="layers.0.w", offset=100_000, max_nbytes=limit)
    assert {caught.type} == clauses()[LIES[lie].clause]
    match = re.match(r"tensor 'layers\.0\.w': byte (\d+): ", str(caught.value))
    assert match, caught.value
    assert 100_000 <= int(match[1]) <= 100_000 + len(data)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SMALL)
def test_the_frames_that_are_damaged_here_are_good(name: str, isa: str) -> None:
    built = SMALL[name]()
    with forced(isa):
        assert read_all(guarded(bytes(built))) == built.source


@pytest.mark.parametrize("name", SMALL)
def test_every_truncation_is_reported(name: str) -> None:
    whole = bytes(SMALL[name]())
    for length in range(len(whole)):
        with pytest.raises(TruncationError, match=rf"^tensor 'w': byte {77 + length}: .* cut off"):
            Frame.from_buffer(whole[:length], name="w", offset=77)


@pytest.mark.parametrize("kind", ["weights", "sorted", "noise", "constant"])
def test_every_truncation_of_a_real_frame_is_reported(kind: str) -> None:
    data = make_data(kind, "I32", 500)
    whole = compress_buffer(data, "I32", (500,)).to_bytes()
    for length in range(len(whole)):
        with pytest.raises(TruncationError):
            Frame.from_buffer(whole[:length])


@pytest.mark.parametrize("name", SMALL)
def test_every_flipped_bit_is_noticed(name: str) -> None:
    whole = bytes(SMALL[name]())
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PackhorseError):
            read_all(damaged)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SMALL)
def test_a_flipped_bit_under_new_checksums_is_refused_or_harmless(name: str, isa: str) -> None:
    """The content hash still tells the truth, so what decodes at all must be the same bytes."""
    built = SMALL[name]()
    header_nbytes = len(built.data) - sum(nbytes for _, nbytes in built.chunks)
    whole, n_refused = bytes(built), 0
    with forced(isa):
        for bit in random.Random(name).sample(range(8 * len(whole)), 500):
            built.data[:] = whole
            built.patch(bit // 8, bytes([whole[bit // 8] ^ 1 << bit % 8]))
            try:
                assert read_all(bytes(built)) == built.source, f"bit {bit}"
            except PackhorseError:
                n_refused += 1
    assert n_refused > (200 if header_nbytes < len(whole) else 100)


REAL = {  # dtype, kind of data, level, a mode that is met
    "real rans": ("BF16", "weights", "default", Mode.RANS),
    "real rans of several planes": ("U32", "31 values", "max", Mode.RANS),
    "real plain rans": ("F8_E4M3", "100 values", "max", Mode.RANS),
    "real palette": ("BF16", "weights", "fast", Mode.PALETTE),
    "real zstd": ("I64", "sorted", "default", Mode.ZSTD),
    "real stored": ("F32", "noise", "default", Mode.STORED),
    "real constant": ("F32", "constant", "default", Mode.CONSTANT),
    "real outlier": ("F16", "outlier", "default", Mode.ZSTD),
}


@cache
def real_frame(name: str) -> bytes:
    dtype, kind, level, _ = REAL[name]
    data = make_data(kind, dtype, 2500)
    return compress_buffer(data, dtype, tensor_shape(data, dtype), level=level).to_bytes()


@pytest.mark.parametrize("name", REAL)
def test_the_real_frames_are_of_the_modes_they_stand_for(name: str) -> None:
    planes = Frame.from_buffer(real_frame(name)).planes()
    assert REAL[name][3] in {mode for plane in planes for mode in plane.modes}


def payload_offset(frame: bytes) -> int:
    return int.from_bytes(frame[12:16], "little")


def damage(frame: bytes, rng: random.Random) -> bytes:
    """Random bytes, small numbers and runs in the payload, most of them near its start."""
    damaged, start = bytearray(frame), payload_offset(frame)
    for _ in range(rng.randint(1, 4)):
        at = start + int(rng.random() ** 3 * (len(frame) - start))
        value = rng.choice((0, 1, 255, rng.randrange(256)))
        n = min(rng.choice((1, 1, 2, 8)), len(frame) - at)
        damaged[at : at + n] = bytes([value]) * n
    return bytes(damaged)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*(name for name in SMALL if name != "empty"), *REAL])
def test_unchecked_damage_is_refused_or_decodes_to_something(name: str, isa: str) -> None:
    whole = bytes(SMALL[name]()) if name in SMALL else real_frame(name)
    rng, n_decoded, n_tries = random.Random(name), 0, 600 if name in SMALL else 250
    with forced(isa):
        for _ in range(n_tries):
            frame = Frame.from_buffer(guarded(damage(whole, rng)))
            try:
                frame.decompress_into(guarded_output(frame.logical_nbytes), check=False, threads=1)
                n_decoded += 1
            except CorruptionError:
                continue
    assert n_decoded < n_tries or any(w in name for w in ("stored", "constant"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*SMALL, "real rans of several planes", "real zstd"])
def test_damaged_headers_under_a_new_checksum_are_refused_or_harmless(name: str, isa: str) -> None:
    """The header's fields lie at random, with a CRC to match; nothing large may be allocated."""
    whole = bytes(SMALL[name]()) if name in SMALL else real_frame(name)
    header_nbytes, rng = payload_offset(whole), random.Random(name)
    with forced(isa):
        for _ in range(300):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(4, min(header_nbytes, 100))
                damaged[at] = rng.choice((0, 1, 2, 6, 7, 63, 64, 128, 255, rng.randrange(256)))
            damaged[44:48] = bytes(4)
            damaged[44:48] = fb.crc32c(damaged[:header_nbytes]).to_bytes(4, "little")
            try:
                frame = Frame.from_buffer(guarded(bytes(damaged)), max_nbytes=1 << 24)
                frame.decompress_into(guarded_output(frame.logical_nbytes), check=False)
            except PackhorseError:
                continue


def test_a_short_frame_cannot_ask_for_much_memory() -> None:
    """64 bytes of payload and 8 of table stand for at most 2 MiB."""
    data = bytes(40 << 20)
    frame = compress_buffer(data, "U8", (len(data),))
    assert frame.logical_nbytes / frame.nbytes < 29_000
