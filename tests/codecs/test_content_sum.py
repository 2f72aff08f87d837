"""Content sums (docs/format.md, section 7.2): as the reference computes them on every path, and the
same whether they are computed anew or from what has changed."""

import numpy as np
import pytest
from codec_battery import ISAS, forced
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import _core
from packhorse.codecs.content import changed_sum, content_sum
from packhorse.errors import BaseMismatchError
from packhorse.frame import Frame
from packhorse.frame.follow import Follower
from packhorse.frame.header import header_bytes
from packhorse.layout import DTYPES, Level, Mode
from packhorse.reference import content_sum as reference_sum
from packhorse.reference import decode_frame

LENGTHS = (0, 1, 2, 3, 4, 5, 31, 32, 33, 35, 1000, (1 << 18) + 7)


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("isa", ISAS)
def test_paths_agree_with_the_reference(isa: str) -> None:
    with forced(isa):
        for nbytes in LENGTHS:
            for data in (noise(nbytes), np.full(nbytes, 255, np.uint8)):
                expected = reference_sum(data.tobytes())
                assert content_sum(data) == expected, nbytes
                assert content_sum(data, threads=3) == expected, nbytes


def test_sums_of_a_few_words() -> None:
    """The first outputs of SplitMix64 from state 0, by Vigna's program."""
    keys = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for place, key in enumerate(keys):
        data = np.zeros(12, np.uint8)
        data[4 * place] = 1
        low, high = key & 0xFFFFFFFF, key >> 32
        assert content_sum(data) == low.to_bytes(8, "little") + high.to_bytes(8, "little")


@pytest.mark.parametrize("isa", ISAS)
def test_parts_add_up(isa: str) -> None:
    data = noise(100_000)
    with forced(isa):
        digest = bytes(16)
        for start, stop in ((0, 4), (4, 40_000), (40_000, 40_004), (40_004, 100_000)):
            digest = changed_sum(digest, *_core.content_sum(data[start:stop], start, 1))
        assert digest == content_sum(data)
    with pytest.raises(ValueError, match="first_byte must be a multiple of 4"):
        _core.content_sum(data, 2, 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [row.name for row in DTYPES if row.bits % 8 == 0])
def test_sums_follow_from_changes(dtype: str, isa: str) -> None:
    """On both sides, for few changes and many, in a first chunk and in later ones."""
    for nbytes in (8, 24, 4096, (1 << 20) + 32):
        old = noise(nbytes)
        for n_changes in (1, nbytes // 500 + 1, nbytes // 2):
            new = old.copy()
            new[noise(8 * n_changes, n_changes).view(np.uint64) % nbytes] += 1
            with forced(isa):
                follower = Follower(
                    dtype, (8 * nbytes // bits_of(dtype),), np.empty_like(old), Level.DEFAULT
                )
                follower.keep(old)
                frame = follower.follow(new)
                assert frame is not None
                assert follower.content_sum == frame.content_hash == content_sum(new)
                if frame.base_hash is None:
                    continue
                assert frame.base_hash == content_sum(old)
                patch = frame.prepare_patch(old)
            assert patch is not None
            assert patch.content_sum == content_sum(new)


def bits_of(dtype: str) -> int:
    return next(row.bits for row in DTYPES if row.name == dtype)


def test_the_slow_decoder_finds_the_same_base_check() -> None:
    """For a chunk of few changes, one of none, and one of many."""
    chunk = 1 << 20
    old = np.random.default_rng(1).standard_normal(chunk + 4000, np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16).view(np.uint8)
    new = old.copy()
    new[:chunk:200] += 1
    new[2 * chunk :: 2] += 1
    follower = Follower("BF16", (old.size // 2,), np.empty_like(old), Level.DEFAULT)
    follower.keep(old)
    frame = follower.follow(new)
    assert frame is not None
    assert frame.prepare_patch(old) is not None
    decoded = decode_frame(frame.to_bytes(), base=old.tobytes())
    assert decoded.data == new.tobytes()
    assert decoded.modes[:2] == ((Mode.SPARSE_DELTA,), (Mode.DELTA,))
    assert decoded.modes[2] != (Mode.SPARSE_DELTA,)

    follower = Follower("BF16", (4000,), np.empty(8000, np.uint8), Level.DEFAULT)
    follower.keep(old[:8000])
    frame = follower.follow(new[:8000])
    assert frame is not None
    header = frame.header
    assert header.base is not None
    lie = header._replace(base=header.base._replace(check=header.base.check ^ 1))
    data = header_bytes(lie) + frame.to_bytes()[header.header_nbytes :]
    with pytest.raises(BaseMismatchError, match="base check"):
        decode_frame(data, base=old[:8000].tobytes())
    with pytest.raises(BaseMismatchError, match="are not those of its base"):
        Frame.from_buffer(data).prepare_patch(old[:8000])


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=1, max_size=64), seed=st.integers(0, 2**32))
def test_other_bytes_have_another_sum(data: bytes, seed: int) -> None:
    """Bytes that change, swap or move: mistakes that updates must not survive."""
    rng = np.random.default_rng(seed)
    values = np.frombuffer(data, np.uint8)
    others = [np.roll(values, 1), values[::-1], rng.permutation(values)]
    others.append(values ^ (np.arange(values.size) == rng.integers(values.size)).astype(np.uint8))
    for other in others:
        same = bool((other == values).all())
        assert (content_sum(np.ascontiguousarray(other)) == content_sum(values)) == same
