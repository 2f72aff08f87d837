"""Another thread writes to a tensor or to its base while the tensor is packed. Either the frame
holds what its hash names, or the call is refused with a message that names the tensor.

Each test goes on until a write has provably happened during a call: the frame has content that the
tensor never had as a whole, or the call is refused.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from codec_battery import ISAS, forced, make_data, tensor_shape
from dcp_samples import blank, load, save, shards_of
from disturbing import disturbed, need_overlap, rounds
from weight_samples import model_rows

from packhorse import numpy as ph_numpy
from packhorse.codecs import weights
from packhorse.codecs.content import content_hash, copy_with_hash
from packhorse.disk import SnapshotStore
from packhorse.disk.verify import verify_file
from packhorse.frame import Frame, compress_buffer
from packhorse.layout import WEIGHT_FORMATS, WeightFormat
from packhorse.storage.frames.base_cache import BaseCache

_Result = TypeVar("_Result")

_ENOUGH = 10  # writes that fell into a call


def attempt(call: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Returns what a call returns, and how it refuses."""
    try:
        return call(), ""
    except RuntimeError as error:
        return None, str(error)


# Dtype, level and two kinds of data, which are often coded in different modes.
CASES = [
    ("BF16", "default", "weights", "noise"),
    ("BF16", "default", "constant", "weights"),
    ("BF16", "fast", "weights", "sparse"),
    ("BF16", "max", "weights", "few"),
    ("F32", "default", "weights", "constant"),
    ("F32", "fast", "weights", "noise"),
    ("F64", "max", "weights", "sparse"),
    ("F8_E4M3", "default", "weights", "noise"),
    ("F8_E4M3", "fast", "few", "constant"),
    ("I32", "default", "few", "noise"),
    ("U8", "default", "few", "constant"),
    ("U8", "fast", "noise", "few"),
    ("U8", "max", "few", "noise"),
    ("I64", "default", "sorted", "noise"),
    ("I64", "default", "constant", "noise"),
    ("BOOL", "default", "few", "constant"),
]


def states_of(dtype: str, *kinds: str) -> list[bytes]:
    n = 640_000 // len(make_data(kinds[0], dtype, 1)) + 77
    return [make_data(kind, dtype, n) for kind in kinds]


def check_frame(frame: Frame, base: bytes | None = None) -> bytes:
    """Checks every checksum and the hash of a frame, and returns its content."""
    frame.verify(base=base, threads=1)
    return frame.content_hash


# Each case on every other code path in turn: hashing and packing are as independent as the two.
@pytest.mark.parametrize(
    ("case", "isa"),
    [(case, isa) for i, case in enumerate(CASES) for isa in ISAS[(i + i // 4) % 2 :: 2]],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_frame_holds_what_its_hash_names(case: tuple[str, str, str, str], isa: str) -> None:
    dtype, level, *kinds = case
    states = states_of(dtype, *kinds)
    memory = np.frombuffer(states[0], np.uint8).copy()
    known = {content_hash(state) for state in states}
    n_torn = 0
    with forced(isa), disturbed(memory, *states):
        for number in rounds():
            frame = compress_buffer(
                memory, dtype, tensor_shape(states[0], dtype), level=level, threads=1 + number % 2
            )
            n_torn += check_frame(frame) not in known
            if n_torn == _ENOUGH:
                break
    need_overlap(n_torn)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "I32", "U8"])
def test_a_frame_holds_what_its_hash_names_with_a_base(dtype: str, isa: str) -> None:
    """The source changes, the base does not."""
    base, noise = states_of(dtype, "weights" if dtype != "U8" else "few", "noise")
    near = np.frombuffer(base, np.uint8).copy()
    near[::64] ^= 1
    states = [near.tobytes(), base, noise[: len(noise) // 3] + base[len(noise) // 3 :]]
    memory, known = near.copy(), {content_hash(state) for state in states}
    shape = tensor_shape(base, dtype)
    n_torn = 0
    with forced(isa), disturbed(memory, *states):
        for number in rounds():
            frame = compress_buffer(memory, dtype, shape, base=base, threads=1 + number % 2)
            n_torn += check_frame(frame, base) not in known
            if n_torn == _ENOUGH:
                break
    need_overlap(n_torn)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("base_dtype", ["BF16", "F32"])
def test_a_base_that_changes_is_refused(base_dtype: str, isa: str) -> None:
    """The frame names a base that existed as a whole, or the message names the tensor."""
    first = make_data("weights", base_dtype, 300_077)
    second = np.frombuffer(first, np.uint8).copy()
    second[:: 2 * len(first) // 300_077] ^= 1
    states = {content_hash(state): state for state in (first, second.tobytes())}
    source = np.frombuffer(first, np.uint8)
    if base_dtype == "F32":
        source = source.view(np.uint16)[1::2].copy().view(np.uint8)
    memory = np.frombuffer(first, np.uint8).copy()
    n_refused = 0
    with forced(isa), disturbed(memory, *states.values()):
        for number in rounds():
            pack = partial(
                compress_buffer, source, "BF16", (300_077,), base=memory, base_dtype=base_dtype,
                name="w", threads=1 + number % 2,
            )  # fmt: skip
            frame, words = attempt(pack)
            if frame is None:
                assert words.startswith("tensor 'w': its base changed while")
                n_refused += 1
            elif frame.base_hash in states:
                check_frame(frame, states[frame.base_hash])
            if n_refused == _ENOUGH:
                break
    need_overlap(n_refused)


def test_a_known_base_is_compared_with_its_hash() -> None:
    data = make_data("weights", "BF16", 50_000)
    good, other = content_hash(data), content_hash(data[:-2])
    frame = compress_buffer(data, "BF16", (50_000,), base=data, base_hash=good)
    assert frame.base_hash == good
    with pytest.raises(RuntimeError, match="its base changed"):
        compress_buffer(data, "BF16", (50_000,), base=data, base_hash=other)


@pytest.mark.parametrize("base_dtype", ["BF16", "F32"])
def test_a_fixed_base_gives_the_same_frame(base_dtype: str) -> None:
    """Also where chunks equal the base, and where its values are rounded."""
    numel = 1_300_000  # three chunks
    wide = np.frombuffer(make_data("weights", "F32", numel), np.uint32)
    base = wide if base_dtype == "F32" else (wide >> 16).astype(np.uint16)
    data = (wide >> 16).astype(np.uint16) + (np.arange(numel) > numel // 2)
    data = data.astype(np.uint16)
    pack = partial(
        compress_buffer, data, "BF16", (numel,), base=base, base_dtype=base_dtype,
        base_hash=content_hash(base),
    )  # fmt: skip
    frame = pack(base_is_fixed=True)
    assert frame.to_bytes() == pack().to_bytes()
    assert frame.base_hash == content_hash(base)
    out = np.empty_like(data)
    frame.decompress_into(out, base=base)
    assert np.array_equal(out, data)


@pytest.mark.parametrize("nbytes", [0, 1, 240, 241, 1025, 4096, 4100, 262144, 262145, 700_003])
@pytest.mark.parametrize("isa", ISAS)
def test_a_copy_has_the_hash_of_its_bytes(nbytes: int, isa: str) -> None:
    data = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
    copy = np.empty_like(data)
    with forced(isa):
        assert copy_with_hash(data, copy) == content_hash(data)
    assert np.array_equal(copy, data)


def large_state() -> tuple[np.ndarray, bytes, bytes]:
    first = np.frombuffer(make_data("weights", "F32", 200_000), np.float32).copy()
    return first, first.tobytes(), (first * 2 + 1).tobytes()


def test_a_snapshot_can_be_restored_or_is_not_taken(tmp_path: Path) -> None:
    tensor, *states = large_state()
    store = SnapshotStore(tmp_path, cache_nbytes=1 << 24)
    n_refused = 0
    with disturbed(tensor.view(np.uint8), *states):
        for number in rounds():
            taken, words = attempt(partial(store.take, f"s{number}", {"x": tensor}))
            if taken is None:
                assert "x: the tensor changed while" in words
                n_refused += 1
            if n_refused == _ENOUGH:
                break
    need_overlap(n_refused)
    store.take("last", {"x": tensor})
    assert store.verify() == []
    assert np.array_equal(store.restore("last")["x"], tensor)


def test_a_copy_that_is_taken_with_its_master_can_be_restored(tmp_path: Path) -> None:
    tensor, *states = large_state()
    master = torch.from_numpy(tensor)
    state = {"master": master, "copy": master.bfloat16()}
    store = SnapshotStore(tmp_path)
    n_refused = 0
    with disturbed(tensor.view(np.uint8), *states):
        for number in rounds():
            taken, words = attempt(partial(store.take, f"s{number}", state))
            assert taken is not None or "changed while" in words
            n_refused += taken is None
            if n_refused == _ENOUGH:
                break
    need_overlap(n_refused)
    assert store.verify() == []


def test_what_is_kept_as_a_base_is_what_it_is_called() -> None:
    """The base has changed since it was hashed."""
    data = np.arange(100_000, dtype=np.uint8)
    cache = BaseCache(1 << 20)
    content = (content_hash(data), "U8", data.size)
    cache.put(content, np.zeros_like(data))
    assert cache.get(content) is None
    cache.put(content, data)
    kept = cache.get(content)
    assert kept is not None
    assert np.array_equal(kept, data)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_pytorch_holds_what_its_hashes_name(tmp_path: Path) -> None:
    tensor, *states = large_state()
    state = {"x": torch.from_numpy(tensor)}
    known = {content_hash(content) for content in states}
    n_torn = 0
    with disturbed(tensor.view(np.uint8), *states):
        for number in rounds():
            folder = tmp_path / str(number)
            save(state, folder)
            loaded = blank(state)
            load(loaded, folder)
            (shard,) = shards_of(folder).values()
            found = content_hash(loaded["x"].numpy().view(np.uint8))
            assert found == shard.frame.content.digest
            n_torn += found not in known
            if n_torn == _ENOUGH:
                break
    need_overlap(n_torn)


def test_a_packed_file_holds_what_its_hashes_name(tmp_path: Path) -> None:
    tensor, *states = large_state()
    known = {content_hash(content) for content in states}
    path = tmp_path / "x.ph.safetensors"
    n_torn = 0
    with disturbed(tensor.view(np.uint8), *states):
        for _ in rounds():
            ph_numpy.save_file({"x": tensor}, path)
            assert not list(verify_file(path))
            n_torn += content_hash(ph_numpy.load_file(path)["x"].view(np.uint8)) not in known
            if n_torn == _ENOUGH:
                break
    need_overlap(n_torn)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=lambda format: format.name)
def test_weights_that_change_while_they_are_packed_are_weights(
    format: WeightFormat, isa: str
) -> None:
    """There is no hash to compare: old and new weights may be mixed, in valid arrays."""
    first = model_rows(64, 4000)
    second = np.random.default_rng(1).integers(0, 1 << 16, first.shape, np.uint16)
    memory = first.copy()
    n_mixed = 0
    with forced(isa), disturbed(memory.reshape(-1).view(np.uint8), *map(bytes, (first, second))):
        for number in rounds():
            arrays = weights.pack(memory, format, threads=1 + number % 2)
            weights.check(arrays, format, 4000)
            back = np.empty_like(memory)
            weights.unpack_into(arrays, format, 4000, back)
            n_mixed += not np.array_equal(back, first) and not np.array_equal(back, second)
            if n_mixed == _ENOUGH:
                break
    need_overlap(n_mixed)
