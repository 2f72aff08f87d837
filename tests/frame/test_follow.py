"""Followers pack the versions of a tensor, each against the version before, and keep a copy of the
last one that agrees with what was packed, whatever is written to the tensor meanwhile."""

import numpy as np
import pytest
from codec_battery import ISAS, forced, make_data
from disturbing import disturbed, need_overlap, rounds
from update_samples import masters, train_step, trained_state

from packhorse import _core
from packhorse.codecs.content import content_sum
from packhorse.frame import Frame
from packhorse.frame.follow import Follower
from packhorse.layout import DTYPE_BY_NAME, DTYPES, Level

CHUNK = 1 << 20
WHOLE = [row.name for row in DTYPES if row.bits % 8 == 0]


def follower_of(old: np.ndarray, dtype: str, level: Level = Level.DEFAULT) -> Follower:
    """A follower that holds a version."""
    shape = (old.size * 8 // DTYPE_BY_NAME[dtype].bits,)
    follower = Follower(dtype, shape, np.empty_like(old), level, "w")
    follower.keep(old)
    return follower


def changed(old: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Bytes of which about a share differs."""
    rng = np.random.default_rng(seed)
    return old + (rng.random(old.size) < share).astype(np.uint8)


def decoded(frame: Frame, base: np.ndarray) -> np.ndarray:
    out = np.empty_like(base)
    Frame.from_buffer(frame.to_bytes()).decompress_into(out, base=base)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", WHOLE)
def test_versions_follow_each_other(dtype: str, isa: str) -> None:
    """Few differences, many, all, none, and chunks of each kind side by side."""
    for nbytes in (16, 240, 4096 + 16, 2 * CHUNK + 272):
        state = np.frombuffer(make_data("noise", dtype, nbytes), np.uint8)[:nbytes].copy()
        with forced(isa):
            follower = follower_of(state, dtype)
            for step, share in enumerate((0.001, 0.2, 1, 0, 0.02)):
                new = changed(state, share, step)
                new[: min(CHUNK, nbytes // 2)] = state[: min(CHUNK, nbytes // 2)]
                new[-1] += share > 0
                frame = follower.follow(new, threads=1 + step % 2)
                assert follower.content_sum == content_sum(new)
                assert decoded(follower.full(), state).tobytes() == new.tobytes()
                if share == 0:
                    assert frame is None
                    continue
                assert frame is not None
                assert frame.content_hash == content_sum(new)
                assert frame.base_hash in (None, content_sum(state))
                assert decoded(frame, state).tobytes() == new.tobytes()
                state = new


def test_paths_and_threads_write_the_same_bytes() -> None:
    old = np.frombuffer(make_data("weights", "BF16", 3 * CHUNK // 2 + 50), np.uint8)
    for share in (0.004, 0.3):
        frames = set()
        for isa in ISAS:
            for threads in (1, 3):
                with forced(isa):
                    frame = follower_of(old, "BF16").follow(changed(old, share, 1), threads)
                assert frame is not None
                frames.add(frame.to_bytes())
        assert len(frames) == 1


@pytest.mark.parametrize("level", Level)
def test_versions_of_a_real_model_follow_each_other(level: Level) -> None:
    weights = masters(1)
    name = max(weights, key=lambda each: weights[each].size)
    states = []
    for step in range(3):
        states.append(trained_state(weights)[name].reshape(-1).view(np.uint8))
        train_step(weights, 1e-6 * 10**step, step)
    follower = follower_of(states[0], "BF16", level)
    for old, new in ((states[0], states[1]), (states[1], states[2]), (states[2], states[0])):
        frame = follower.follow(new)
        assert frame is not None
        assert frame.base_hash == content_sum(old)
        assert frame.nbytes < follower.full().nbytes / 4
        assert decoded(frame, old).tobytes() == new.tobytes()


def test_a_version_that_packs_better_alone_has_no_base() -> None:
    old = np.frombuffer(make_data("noise", "F32", CHUNK), np.uint8)
    follower = follower_of(old, "F32")
    frame = follower.follow(np.zeros_like(old))
    assert frame is not None
    assert frame.base_hash is None
    assert frame.nbytes < old.size / 1000
    frame = follower.follow(old)
    assert frame is not None
    assert decoded(frame, np.zeros_like(old)).tobytes() == old.tobytes()


def test_no_elements() -> None:
    follower = follower_of(np.empty(0, np.uint8), "F32")
    assert follower.follow(np.empty(0, np.uint8)) is None
    assert follower.full().logical_nbytes == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kinds", [("weights", "weights"), ("weights", "noise")])
def test_frame_and_copy_agree_while_another_thread_writes(kinds: tuple[str, str], isa: str) -> None:
    """The frame leads from the copy before to the copy afterwards, which is what the hash names."""
    first = np.frombuffer(make_data(kinds[0], "BF16", 700_000), np.uint8)
    second = (
        changed(first, 0.003, 5) if kinds[0] == kinds[1] else make_data("noise", "BF16", 700_000)
    )
    states = [first.tobytes(), bytes(second)]
    memory = first.copy()
    kept = np.empty_like(first)
    follower = Follower("BF16", (first.size // 2,), kept, Level.DEFAULT)
    follower.keep(first)
    known = {content_sum(state) for state in states}
    n_torn = 0
    with forced(isa), disturbed(memory, *states):
        for _ in rounds():
            before = kept.copy()
            frame = follower.follow(memory)
            assert content_sum(kept) == follower.content_sum
            if frame is None:
                assert (kept == before).all()
                continue
            assert frame.content_hash == follower.content_sum
            assert (decoded(frame, before) == kept).all()
            n_torn += follower.content_sum not in known
            if n_torn > 10:
                break
    need_overlap(n_torn)


def test_the_core_refuses_to_keep_what_is_not_the_base() -> None:
    old = np.zeros(4096, np.uint8)
    geometry = _core.Geometry(2, 2, 19, old.size)
    table, leaves = np.empty((1, 3), np.uint32), np.zeros(16 + 240, np.uint8)
    payload, changes = np.empty(old.size, np.uint8), np.empty(25, np.uint8)

    def encode(base: _core.Base | None, kept: np.ndarray, base_leaves: bool = False) -> None:
        context = _core.EncodeContext(2, None, base, old.size)
        hashes = leaves if base_leaves else None
        output = _core.EncodeOutput(payload, table, None, hashes, kept, changes[:24])
        _core.encode_chunks(old.copy(), geometry, context, output, 1)

    encode(_core.Base(old, True, 0), old)
    for base, kept, has_leaves in (
        (None, old, False),
        (_core.Base(old, True, 0), old.copy(), False),
        (_core.Base(old, True, 0), old[:-2], False),
        (_core.Base(old, True, 0), old, True),
    ):
        with pytest.raises(ValueError, match="kept must be the base"):
            encode(base, kept, has_leaves)

    base, context = _core.Base(old, True, 0), _core.EncodeContext(2, None, None, old.size)
    for memory in (
        (leaves, None, old, changes[:24]),
        (None, None, None, None),
        (leaves, None, old),
    ):
        with pytest.raises(ValueError, match="either leaves are needed, or kept and changes"):
            _core.encode_chunks(
                old, geometry, context, _core.EncodeOutput(payload, table, *memory), 1
            )
    context = _core.EncodeContext(2, None, base, old.size)
    for given in (changes[:16], changes[1:]):
        output = _core.EncodeOutput(payload, table, None, None, old, given)
        with pytest.raises(ValueError, match="changes must have 24 bytes for each chunk"):
            _core.encode_chunks(old.copy(), geometry, context, output, 1)
