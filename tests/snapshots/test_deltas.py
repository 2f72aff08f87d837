"""Chains of deltas: their length, their bases, and the check of each link."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from snapshot_samples import Run, assert_same, signed

from packhorse.codecs.content import crc32c
from packhorse.disk import SnapshotStore
from packhorse.errors import CorruptionError
from packhorse.frame import compress_buffer
from packhorse.storage.frames import pack_store

RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal(20_000).astype(np.float32)


def drifted(i: int) -> np.ndarray[Any, Any]:
    """Weights that drift a little with each step."""
    return WEIGHTS + np.float32(1e-5) * np.arange(i + 1, dtype=np.float32).sum()


def deltas_of(store: SnapshotStore) -> list[int]:
    return [store.info(name).tensors[0].n_deltas for name in store.names()]


@pytest.mark.parametrize("max_chain", [0, 1, 3, 8])
def test_chains_end_with_a_full_frame(tmp_path: Path, max_chain: int) -> None:
    store = SnapshotStore(tmp_path, max_chain=max_chain)
    for i in range(10):
        store.take(str(i), {"w": drifted(i)})
    assert deltas_of(store) == [i % (max_chain + 1) for i in range(10)]
    assert store.verify() == []
    for i in range(10):
        assert_same(store.restore(str(i)), {"w": drifted(i)})
    full, delta = (store.info(str(i)).tensors[0].packed_nbytes for i in (0, 1))
    if max_chain:
        assert delta < 0.8 * full


def test_the_base_may_be_chosen(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"w": drifted(0)})
    store.take("b", {"w": RNG.standard_normal(20_000).astype(np.float32)})
    store.take("c", {"w": drifted(1)}, base="a")
    store.take("d", {"w": drifted(2)}, base=None)
    assert deltas_of(store) == [0, 0, 1, 0]
    c, d = (store.info(name) for name in "cd")
    assert c.stored_nbytes < 0.8 * d.stored_nbytes
    store.delete("a")
    assert_same(store.restore("c"), {"w": drifted(1)})
    assert store.verify() == []


def test_only_the_same_path_dtype_and_shape_is_a_base(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"w": drifted(0)})
    others = [{"v": drifted(1)}, {"w": drifted(2).reshape(100, 200)}, {"w": drifted(3)[1:]}]
    others.append({"w": drifted(4).view(np.int32)})
    for i, state in enumerate(others):
        info = store.take(str(i), state, base="a")
        assert info.max_deltas == 0
        assert_same(store.restore(str(i)), state)


def test_a_damaged_base_is_not_built_upon(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"w": drifted(0)})
    (pack,) = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)
    info = store.take("b", {"w": drifted(1)})
    assert info.max_deltas == 0
    assert {problem.snapshot for problem in store.verify()} == {"a"}


def test_a_damaged_link_is_told_for_all_that_need_it(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    packs = []
    for i in range(4):
        before = set((tmp_path / "packs").glob("*"))
        store.take(str(i), {"model": {"w": drifted(i)}, "own": np.arange(i, i + 50)})
        packs += set((tmp_path / "packs").glob("*")) - before
    good = packs[1].read_bytes()
    frame = next(f for f in rows_of(tmp_path, "1") if f[4] == "F32")
    data = bytearray(good)
    data[frame[1] + frame[2] - 65] ^= 1
    packs[1].write_bytes(data)
    reader = SnapshotStore(tmp_path)
    told = [(problem.snapshot, problem.tensor) for problem in reader.verify()]
    assert told == [("1", "model.w"), ("2", "model.w"), ("3", "model.w")]
    for name in "123":
        with pytest.raises(CorruptionError, match=rf"snapshot '{name}'.*{packs[1].name}.*model\.w"):
            reader.restore(name)
        assert_same(reader.restore(name, keys="own")["own"], np.arange(int(name), int(name) + 50))
    assert_same(reader.restore("0")["model"]["w"], drifted(0))
    assert reader.verify("0") == []


def rows_of(store: Path, name: str) -> list[list[Any]]:
    (path,) = (store / "snapshots" / name).iterdir()
    rows: list[list[Any]] = json.loads(path.read_text())["frames"]
    return rows


def test_a_link_that_holds_something_else_is_noticed(tmp_path: Path) -> None:
    """The hash of the tensor proves its chain; if it differs, the hash of each link is checked."""
    store = SnapshotStore(tmp_path)
    for i in range(3):
        store.take(str(i), {"w": drifted(i)})
    paths = sorted((tmp_path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    middle = store._catalog.load("1").tensors[0].frame
    for k in range(100):  # until its frame is as long
        other = drifted(1)
        other[k] = WEIGHTS[k]
        lie = compress_buffer(other, "F32", (20_000,), base=drifted(0), level="default")
        if lie.nbytes == middle.nbytes:
            break
    frame = bytearray(lie.to_bytes())
    header_nbytes = int.from_bytes(frame[12:16], "little")
    header = frame[:header_nbytes].replace(lie.content_hash, middle.content[0])
    header[44:48] = bytes(4)
    header[44:48] = crc32c(bytes(header)).to_bytes(4, "little")
    frame[:header_nbytes] = header
    with paths[1].open("r+b") as file:
        file.seek(middle.offset)
        file.write(frame)
    reader = SnapshotStore(tmp_path)
    with pytest.raises(CorruptionError, match=rf"snapshot '1': .*{paths[1].name}.*content hash"):
        reader.restore("1")
    with pytest.raises(
        CorruptionError, match=rf"snapshot '2': .*{middle.content[0].hex()} is needed"
    ):
        reader.restore("2")
    assert_same(reader.restore("0"), {"w": drifted(0)})
    assert [problem.snapshot for problem in reader.verify()] == ["1", "2"]


def test_lies_about_bases_are_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for i in range(3):
        store.take(str(i), {"w": drifted(i)})
    (path,) = (tmp_path / "snapshots" / "2").iterdir()
    good = json.loads(path.read_text())
    assert [row[6] for row in good["frames"]] == [1, 2, None]
    for bases in ([2, 2, None], [None, 2, None], [1, None, None]):
        document = json.loads(json.dumps(good))
        for row, base in zip(document["frames"], bases, strict=True):
            row[6] = base
        path.write_bytes(signed(document))
        with pytest.raises(CorruptionError, match=r"tensor 'w' at .*the frame is a delta against"):
            SnapshotStore(tmp_path).restore("2")


@pytest.mark.parametrize("keep", [["0"], ["5"], ["0", "5"], ["2", "3", "7"], ["1", "9"], 3])
def test_pruning_makes_deltas_against_what_stays(tmp_path: Path, keep: Any) -> None:
    store = SnapshotStore(tmp_path, max_chain=20)
    for i in range(10):
        store.take(str(i), {"w": drifted(i), "n": i})
    result = store.prune(keep=keep)
    names = store.names()
    assert names == [str(i) for i in range(10) if str(i) not in result.removed]
    assert deltas_of(store) == list(range(len(names)))  # the first is full now
    assert store.verify() == []
    for name in names:
        assert_same(store.restore(name), {"w": drifted(int(name)), "n": int(name)})
    assert len(list((tmp_path / "packs").iterdir())) == len(names)
    store.take("next", {"w": drifted(10)})
    assert store.info("next").tensors[0].n_deltas == len(names)


def test_in_place_along_a_chain(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    for i in range(8):
        store.take(str(i), {"w": drifted(i)})
    for i in (7, 0, 4):
        into = {"w": np.empty_like(WEIGHTS)}
        store.restore(str(i), into=into)
        assert_same(into, {"w": drifted(i)})


def test_a_run_in_the_background_makes_chains(tmp_path: Path) -> None:
    run = Run(width=512)
    with SnapshotStore(tmp_path) as store:
        for i in range(4):
            store.take_async(str(i), run.step().state())
    infos = [store.info(str(i)) for i in range(4)]
    assert [info.max_deltas for info in infos] == [0, 1, 2, 3]
    assert infos[3].stored_nbytes < 0.8 * infos[0].stored_nbytes
    assert store.verify() == []
    assert_same(store.restore("3", framework="pt"), run.state())


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0, 2.0])
def test_bases_may_be_kept_in_memory(tmp_path: Path, share: float) -> None:
    run, plain, taken = Run(width=200), SnapshotStore(tmp_path / "plain", threads=1), []
    nbytes = plain.take("0", run.step().state()).nbytes
    store = SnapshotStore(tmp_path / "cached", threads=1, cache_nbytes=int(share * nbytes))
    n_decoded = 0
    real = pack_store.Chain

    def count(*args: Any) -> Any:
        nonlocal n_decoded
        n_decoded += 1
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_store, "Chain", count)
        store.take("0", run.state())
        for i in range(1, 4):
            store.take(str(i), run.step().state())
            taken.append(run.copy())
    for i, state in enumerate(taken, 1):
        plain.take(str(i), state)
        assert_same(store.restore(str(i), framework="pt"), state)
        assert store.info(str(i)).stored_nbytes == plain.info(str(i)).stored_nbytes
    assert (n_decoded == 0) == (share >= 1)
    cache = store._options.cache
    assert cache._nbytes == sum(data.size for data in cache._kept.values()) <= share * nbytes
    store.close()
    assert cache._nbytes == 0


# Rounded copies.


def mixed_state(i: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A model in few bits, its masters and their moments, of one shape."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(100, 40, generator=generator) for _ in range(4)]
    for master in masters:
        master += 1e-4 * i * torch.randn(100, 40, generator=generator.manual_seed(i))
    return {
        "model": {str(k): master.to(dtype) for k, master in enumerate(masters)},
        "masters": masters,
        "moments": [torch.randn(100, 40, generator=generator) for _ in masters],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_background", [False, True])
def test_rounded_copies_of_masters_cost_next_to_nothing(
    tmp_path: Path, dtype: torch.dtype, in_background: bool
) -> None:
    store = SnapshotStore(tmp_path, max_chain=3, staging_nbytes=1)
    for i in range(6):
        state = mixed_state(i, dtype)
        if in_background:
            store.take_async(str(i), state).result(60)
        else:
            store.take(str(i), state)
        copies = [t for t in store.info(str(i)).tensors if t.path.startswith("model")]
        assert sum(tensor.packed_nbytes for tensor in copies) < 1000
        assert {tensor.n_deltas for tensor in copies} == {i % 4 + 1}
    assert store.verify() == []
    for i in range(6):
        assert_same(store.restore(str(i), framework="pt"), mixed_state(i, dtype))
        assert_same(store.restore(str(i), keys="model"), {"model": mixed_state(i, dtype)["model"]})
    store.prune(keep=["2", "5"])
    assert store.verify() == []
    for name in ("2", "5"):
        assert_same(store.restore(name, framework="pt"), mixed_state(int(name), dtype))
        copies = [t for t in store.info(name).tensors if t.path.startswith("model")]
        assert sum(tensor.packed_nbytes for tensor in copies) < 1000
    store.close()


def test_what_only_seems_a_rounded_copy_is_kept_too(tmp_path: Path) -> None:
    state = mixed_state(0)
    state["model"]["0"][50:] += 1  # behind what is looked at
    state["zeros"] = [torch.zeros(2000), torch.zeros(2000, dtype=torch.bfloat16)]
    state["strided"] = [state["masters"][1].T, state["model"]["1"].T]
    state["nan"] = [torch.full((2000,), torch.nan), torch.full((2000,), torch.nan).bfloat16()]
    store = SnapshotStore(tmp_path)
    store.take("a", state)
    assert_same(store.restore("a", framework="pt"), state)
    assert store.verify() == []


@pytest.mark.parametrize(
    "shape", [(4096,), (64, 64), (1, 1, 4096), (2048, 2), (4, 4, 4, 64), (0, 3)]
)
def test_the_head_of_a_tensor_is_its_first_elements(shape: tuple[int, ...]) -> None:
    from packhorse.numpy import FRAMEWORK as NP
    from packhorse.torch import FRAMEWORK as PT

    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for array in (values, np.asfortranarray(values)):
        wanted = np.ravel(array)[:64].tobytes()
        assert NP.head(array, 64).tobytes() == wanted
        assert PT.head(torch.from_numpy(array), 64).tobytes() == wanted
