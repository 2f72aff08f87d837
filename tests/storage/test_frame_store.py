"""The duties of every frame store, tested with packs in a folder, packs on a remote file system,
and another kind of engine: frames as values of a dictionary, as a key-value store would keep
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.codecs.content import content_hash
from packhorse.disk.snapshots.snapshot_frames import SnapshotFrames
from packhorse.errors import ChangedError, CorruptionError
from packhorse.frame import Frame, compress_buffer
from packhorse.layout import Level
from packhorse.storage.frames import packer
from packhorse.storage.frames.base_cache import BaseCache
from packhorse.storage.frames.chain import Chain
from packhorse.storage.frames.frame_store import FrameBatch, FrameStore, NewFrame
from packhorse.storage.frames.packer import FramePacker, Item, PackOptions
from packhorse.storage.frames.refs import Content, FrameRef, TensorSpec
from packhorse.storage.frames.scratch import Scratch
from packhorse.storage.locations import open_storage

SHAPE = (80, 100)


class ValueStore:
    """Frames as values of a dictionary, found by their contents; a batch is a transaction."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.refs: dict[Content, FrameRef] = {}
        self.documents: dict[str, bytes] = {}

    def find(self, contents: Sequence[Content]) -> dict[Content, FrameRef]:
        return {content: self.refs[content] for content in contents if content in self.refs}

    def open(self, ref: FrameRef, name: str | None = None) -> Frame:
        return Frame.from_buffer(memoryview(self.values[ref.pack]), name=name)

    def open_all(self, wanted: Mapping[FrameRef, str | None]) -> list[Frame]:
        return [self.open(ref, name) for ref, name in wanted.items()]

    def chain(self, ref: FrameRef, name: str | None = None) -> Chain:
        links = ref.chain
        return Chain(ref, [self.open(at, name) for at in links], [at.pack for at in links], name)

    def fetch(self, refs: Iterable[FrameRef]) -> None:
        pass

    def release(self, refs: Iterable[FrameRef]) -> None:
        pass

    @contextmanager
    def batch(self, names: Sequence[str], nbytes: int) -> Iterator[FrameBatch]:
        transaction = Transaction()
        yield transaction
        self.values |= transaction.values
        self.refs |= transaction.refs

    def commit(self, name: str, document: bytes, *, replace: bool = False) -> None:
        self.documents[name] = document

    def delete(self, packs: Iterable[str]) -> None:
        for pack in packs:
            self.values.pop(pack, None)
        self.refs = {c: ref for c, ref in self.refs.items() if ref.pack in self.values}


class Transaction:
    """A `FrameBatch` of a `ValueStore`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.refs: dict[Content, FrameRef] = {}

    def put(self, frames: Sequence[NewFrame]) -> list[FrameRef]:
        made = []
        for new in frames:
            key, data = f"{new.content.digest.hex()}.{new.content.dtype}", bytes(new.data)
            n_deltas = 0 if new.base is None else new.base.n_deltas + 1
            ref = FrameRef(key, 0, len(data), new.content, new.base, n_deltas)
            self.values[key] = data
            self.refs[new.content] = ref
            made.append(ref)
        return made


@pytest.fixture(params=["folder", "remote", "values"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FrameStore]:
    if request.param == "values":
        yield ValueStore()
        return
    if request.param == "remote":
        pytest.importorskip("fsspec")
    url = tmp_path if request.param == "folder" else f"memory://{tmp_path.name}"
    storage = open_storage(url, None)
    storage.make()
    with SnapshotFrames(storage) as frames:
        yield frames


def options(**changes: Any) -> PackOptions:
    given = {"level": Level.DEFAULT, "threads": 2, "max_chain": 3, "max_deltas": 4}
    return PackOptions(**{**given, "cache": BaseCache(0), **changes})


def floats(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Weights that the steps of a training run move a little."""
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for step in range(seed):
        drift = np.random.default_rng(step + 1).standard_normal(SHAPE) * 1e-4
        values = (values + drift).astype(np.float32)
    return values


def item(name: str, array: np.ndarray[Any, Any], dtype: str = "F32", **more: Any) -> Item:
    return Item(TensorSpec(name, dtype, array.shape), array.reshape(-1).view(np.uint8), **more)


def rounded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bfloat16 copy of float32 numbers."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def add(
    store: FrameStore, items: Sequence[Item], made: PackOptions | None = None
) -> list[FrameRef]:
    with store.batch([each.spec.name for each in items], 1 << 20) as batch:
        return FramePacker(store, made or options()).add(batch, items)


def decoded(store: FrameStore, ref: FrameRef) -> bytes:
    store.chain(ref, "x").verify(1, Scratch())
    return bytes(store.chain(ref, "x").decode(2, Scratch()))


def test_what_is_put_comes_back(store: FrameStore) -> None:
    arrays = [floats(0), floats(0).astype(np.float64), np.zeros(0, np.float32), np.arange(7.0)]
    dtypes = ["F32", "F64", "F32", "F64"]
    items = [item(str(i), a, d) for i, (a, d) in enumerate(zip(arrays, dtypes, strict=True))]
    for array, ref in zip(arrays, add(store, items), strict=True):
        assert decoded(store, ref) == array.tobytes()
        assert ref.content.digest == content_hash(array.reshape(-1).view(np.uint8))
        assert store.open(ref).nbytes == ref.nbytes


def test_equal_tensors_of_a_group_are_stored_once(store: FrameStore) -> None:
    for strict in (True, False):
        items = [item("a", floats(1)), item("b", floats(2)), item("c", floats(1))]
        a, b, c = add(store, items, options(is_strict=strict))
        assert a is c
        assert a != b


def test_shapes_may_keep_frames_apart(store: FrameStore) -> None:
    items = [item("a", floats(1)), item("b", floats(1).reshape(-1))]
    a, b = add(store, items, options(keeps_shapes=True))
    assert a != b
    assert (a.content.shape, b.content.shape) == (SHAPE, (SHAPE[0] * SHAPE[1],))
    a, b = add(store, items)
    assert a is b


def test_chains_end_and_deltas_are_shorter(store: FrameStore) -> None:
    refs: list[FrameRef] = []
    for step in range(6):
        refs += add(store, [item("x", floats(step), base=refs[-1] if refs else None)])
        assert decoded(store, refs[-1]) == floats(step).tobytes()
    assert [ref.n_deltas for ref in refs] == [0, 1, 2, 3, 0, 1]
    assert refs[1].nbytes < refs[0].nbytes
    assert [link.n_deltas for link in refs[3].chain] == [3, 2, 1, 0]


@pytest.mark.parametrize("strict", [True, False])
def test_copies_build_upon_masters_and_masters_leave_room(store: FrameStore, strict: bool) -> None:
    made = options(max_chain=4, is_strict=strict)
    base = None
    for step in range(7):
        master, copy = item("m", floats(step), base=base), item("c", rounded(floats(step)), "BF16")
        base, ref = add(store, [master, copy._replace(master=0)], made)
        assert ref.base == base
        assert ref.n_deltas <= made.max_deltas
        assert ref.nbytes < 700  # beside its master a copy takes next to nothing
        assert decoded(store, ref) == rounded(floats(step)).tobytes()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("has_base", [True, False])
def test_a_master_that_equals_the_end_of_a_long_chain(
    store: FrameStore, strict: bool, has_base: bool
) -> None:
    made = options(max_chain=2, max_deltas=2, is_strict=strict)
    refs: list[FrameRef] = []
    for step in range(2):
        refs += add(store, [item("x", floats(step), base=refs[-1] if refs else None)], made)
    last = item("x", floats(2), base=refs[-1])
    master = item("m", floats(2), base=refs[0] if has_base else None)
    copy = item("c", rounded(floats(2)), "BF16", master=1)
    end, same, ref = add(store, [last, master, copy], made)
    assert end.n_deltas == 2
    assert same == end
    assert ref.base is None
    assert decoded(store, ref) == rounded(floats(2)).tobytes()


@pytest.mark.parametrize("strict", [True, False])
def test_frames_are_written_together(store: FrameStore, strict: bool) -> None:
    """But a master has its place before its copy is written, which names it."""
    items = [item(f"x{i}", floats(0)[: 2 + i % 20]) for i in range(30)]  # ten of them are equal
    items += [item("m", floats(2)), item("c", rounded(floats(2)), "BF16", master=30)]
    items += [item("d", rounded(floats(2)), "BF16", master=30), item("y", floats(1))]
    counts: list[int] = []
    with store.batch([it.spec.name for it in items], 1 << 22) as batch:

        class Counted:
            def put(self, frames: Sequence[NewFrame]) -> list[FrameRef]:
                counts.append(len(frames))
                return batch.put(frames)

        refs = FramePacker(store, options(is_strict=strict)).add(Counted(), items)
    assert counts == [21, 2]  # the copies are equal
    assert refs[31].base == refs[30]
    for ref, it in zip(refs, items, strict=True):
        assert decoded(store, ref) == it.data.tobytes()


def test_only_whole_frames_where_only_those_will_do(store: FrameStore) -> None:
    (base,) = add(store, [item("x", floats(0))])
    (ref,) = add(store, [item("x", floats(1), base=base, is_whole=True)])
    assert ref.base is None


def test_a_batch_that_fails_leaves_nothing(store: FrameStore) -> None:
    content = Content(content_hash(np.zeros(9, np.uint8)), "U8", 9)
    frame = compress_buffer(np.zeros(9, np.uint8), "U8", (9,)).buffer()
    refs = []

    def put_and_fail() -> None:
        with store.batch(["x"], 1000) as batch:
            refs.extend(batch.put([NewFrame(frame, content, None, "x")]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        put_and_fail()
    with pytest.raises((FileNotFoundError, KeyError)):
        store.open(refs[0])


def test_documents_and_packs_go(store: FrameStore) -> None:
    kept, gone = add(store, [item("a", floats(1))]), add(store, [item("b", floats(2))])
    store.commit("snapshots", b"{}")
    store.commit("snapshots", b"{} ", replace=True)
    store.delete([gone[0].pack])
    store.delete([gone[0].pack])
    assert decoded(store, kept[0]) == floats(1).tobytes()
    with pytest.raises((FileNotFoundError, KeyError)):
        store.open(gone[0])


def test_a_tensor_that_changes_meanwhile_is_refused(
    store: FrameStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, compress = floats(1), packer.compress_many

    def meddle(jobs: Any, **kwargs: Any) -> list[Frame]:
        if jobs:
            array[0, 0] += 1
        return compress(jobs, **kwargs)

    monkeypatch.setattr(packer, "compress_many", meddle)
    with pytest.raises(ChangedError, match="x: the tensor changed"):
        add(store, [item("x", array)])
    (ref,) = add(store, [item("x", array)], options(is_strict=False))
    assert decoded(store, ref) == array.tobytes()


def test_a_base_is_another(store: FrameStore) -> None:
    """The hash of the tensor proves its chain; the error names the frame with the wrong base."""
    full, other = add(store, [item("a", floats(0)), item("b", floats(5) * 3)])
    (delta,) = add(store, [item("a", floats(1), base=full)])
    frames = [store.open(delta), store.open(other)]
    with pytest.raises(CorruptionError, match=r"first: a base of F32 .* is needed"):
        Chain(delta, frames, ["first", "second"], "x").decode(1, Scratch())
