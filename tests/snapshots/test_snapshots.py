"""Snapshots are restored whole, in part and in place; equal tensors are stored once."""

import collections
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from snapshot_samples import Run, assert_same, copied, every_tensor, odd_state

import packhorse
from packhorse.disk import SnapshotStore
from packhorse.frame import Frame


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a store: a folder, or memory through fsspec."""
    if request.param == "folder":
        return str(tmp_path / "run" / "snapshots")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path.name}/snapshots"


def packs_of(store: Path) -> list[Path]:
    return sorted((store / "packs").glob("*"))


# Restored states.


def test_a_training_run_comes_back_step_by_step(url: str) -> None:
    run, taken = Run(), {}
    store = SnapshotStore(url)
    assert store.names() == []
    for _ in range(4):
        run.step()
        name = f"step {run.n_steps}/ünï"
        info = store.take(name, run.state(), metadata={"loss": 1.5, "tags": ["a", None]})
        taken[name] = run.copy()
        assert info == store.info(name)
        assert info.metadata == {"loss": 1.5, "tags": ["a", None]}
        assert info.nbytes == sum(tensor.nbytes for tensor in info.tensors)
    again = SnapshotStore(url)
    assert again.names() == list(taken)
    assert [again.info(name).order for name in taken] == [1, 2, 3, 4]
    assert again.verify() == []
    for name, state in taken.items():
        assert_same(again.restore(name, framework="pt"), state)
        assert_same(again.restore(name, framework="np"), state)


def test_a_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run = Run().step(2)
    store = SnapshotStore(tmp_path)
    store.take("here", run.state())
    run.step(3)
    resumed = Run(seed=9)
    state = store.restore("here", framework="pt")
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.generator.set_state(state["rng"])
    resumed.n_steps = state["step"]
    assert_same(resumed.step(3).state(), run.copy())


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_everything_that_may_be_in_a_state_comes_back(url: str, framework: str) -> None:
    store = SnapshotStore(url)
    state = odd_state()
    before = copied(state)
    store.take("odd", state)
    assert_same(state, before)
    assert_same(store.restore("odd", framework=framework), state)


@pytest.mark.parametrize(
    "state", [[], {}, (), [np.arange(3)], (torch.ones(2), {"a": 1}), {"only": "text"}]
)
def test_any_container_is_a_state(tmp_path: Path, state: Any) -> None:
    store = SnapshotStore(tmp_path)
    store.take("x", state)
    assert_same(store.restore("x"), state)
    assert store.verify() == []


def test_subclasses_come_back_as_the_plain_types(tmp_path: Path) -> None:
    class Colour(str): ...

    state = {
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, b=2),
        "size": torch.Size([3, 4]),
        "text": Colour("red"),
        "number": np.float64(1.25),
    }
    store = SnapshotStore(tmp_path)
    store.take("x", state)
    plain = {"ordered": {"a": 1}, "default": {"b": 2}, "size": (3, 4), "text": "red"}
    assert_same(store.restore("x"), {**plain, "number": 1.25})


class Foo: ...


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Foo(), "Foo cannot be stored"),
        (b"bytes", "bytes cannot be stored"),
        ({1, 2}, "set cannot be stored"),
        (1j, "complex cannot be stored"),
        (torch.float32, "dtype cannot be stored"),
        ({(1, 2): 3}, "a key of type tuple"),
        (np.array(["a"]), "safetensors has no dtype for <U1"),
        (np.array([Foo()]), "safetensors has no dtype for object"),
        (np.arange(3, dtype=np.complex128), "no dtype for .*complex128"),
        (np.ma.masked_array([1, 2], [0, 1]), "lose its mask"),
        (torch.ones(2, 2).to_sparse(), "dense PyTorch tensor"),
        (torch.ones(2, device="meta"), "no memory of its own"),
        (torch.ones(2, dtype=torch.complex128), "no dtype for .*complex128"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named_by_its_path(tmp_path: Path, value: Any, words: str) -> None:
    store = SnapshotStore(tmp_path / "store")
    with pytest.raises(TypeError, match=rf"optimizer\.state\[3\]\.foo.*{words}"):
        store.take("x", {"optimizer": {"state": {3: {"foo": value}}}})
    assert not (tmp_path / "store").exists()


def test_values_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    loop: list[Any] = []
    loop.append(loop)
    for value, words in [("\ud800", "not Unicode"), (1 << 9000, "8192 bits"), (loop, "64 deep")]:
        with pytest.raises(ValueError, match=rf"^a\.b.*{words}"):
            store.take("x", {"a": {"b": value}})
    with pytest.raises(TypeError, match="a dict, a list or a tuple, not Tensor"):
        store.take("x", torch.ones(3))
    for metadata in (
        {"a": {1: 2}},
        {"a": float("nan")},
        {"a": Foo()},
        {"a": "\ud800"},
        {"a": (1,)},
    ):
        with pytest.raises((ValueError, TypeError), match="metadata"):
            store.take("x", {}, metadata=metadata)


def test_a_dtensor_is_refused_with_advice(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        words = r"w: a DTensor is spread over processes; pass tensor.full_tensor\(\)"
        with pytest.raises(TypeError, match=words):
            SnapshotStore(tmp_path / "s").take("x", {"w": tensor})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["", "x" * 300, "\ud800", 3, None])
def test_bad_names(tmp_path: Path, name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"(the|a) snapshot's name"):
        SnapshotStore(tmp_path / "store").take(name, {})


@pytest.mark.parametrize("name", [".", "..", "../up", "/root", "a\0b", " ", "CON", "%2E", "ü" * 30])
def test_odd_names_stay_in_the_store(tmp_path: Path, name: str) -> None:
    store = SnapshotStore(tmp_path / "store")
    store.take(name, {"a": 1})
    assert store.names() == [name]
    assert store.restore(name) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    store.delete(name)
    assert store.names() == []


def test_a_name_is_taken_once_unless_it_may_be_replaced(url: str) -> None:
    store = SnapshotStore(url)
    store.take("last", {"a": np.arange(1000)})
    store.take("other", {"a": np.arange(9)})
    with pytest.raises(FileExistsError, match="there is already a snapshot 'last'"):
        store.take("last", {"a": np.arange(5)})
    assert len(store.restore("last")["a"]) == 1000
    store.take("last", {"a": np.arange(2000, 3000)}, replace=True)
    assert store.restore("last")["a"][0] == 2000
    assert store.names() == ["other", "last"]
    assert store.verify() == []


def test_unknown_names(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {})
    for call in (store.restore, store.info, store.delete, store.verify):
        with pytest.raises(ValueError, match=r"no snapshot is named 'b'; names\(\) lists the 1"):
            call("b")
    with pytest.raises(ValueError, match="no snapshot is named 'b'"):
        store.take("c", {}, base="b")
    with pytest.raises(ValueError, match="framework is 'tf'"):
        store.restore("a", framework="tf")


@pytest.mark.parametrize(
    "options", [{"max_chain": -1}, {"max_chain": 64}, {"threads": 0}, {"staging_nbytes": 0}]
)
def test_bad_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SnapshotStore(tmp_path, **options)


# Parts, and tensors in place.


@pytest.fixture
def taken(tmp_path: Path) -> tuple[SnapshotStore, dict[str, Any]]:
    """A store with the snapshot "x" of a real state."""
    run = Run().step()
    store = SnapshotStore(tmp_path)
    store.take("x", run.state())
    return store, run.copy()


def test_keys_choose_parts(taken: tuple[SnapshotStore, dict[str, Any]]) -> None:
    store, state = taken
    model = store.restore("x", framework="pt", keys="model")
    assert_same(model, {"model": state["model"]})
    some = store.restore("x", framework="pt", keys=["optimizer.state[1]", "step", "model.2"])
    second = {key: value for key, value in state["model"].items() if key.startswith("2.")}
    assert_same(
        some,
        {"model": second, "optimizer": {"state": {1: state["optimizer"]["state"][1]}}, "step": 1},
    )
    last = store.restore("x", keys=lambda path: path.endswith("params[5]"))
    assert last == {"optimizer": {"param_groups": [{"params": [None] * 5 + [5]}]}}
    with pytest.raises(ValueError, match="the snapshot has nothing at 'mod'"):
        store.restore("x", keys=["model", "mod"])


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("x", {"a": np.arange(99.0)})
    store.take("y", {"a": np.arange(99.0), "b": np.arange(77.0)})
    first, second = packs_of(tmp_path)
    for pack in (first, second):
        whole = pack.read_bytes()
        pack.unlink()
        good = [key for key in ("a", "b") if restores(store, "y", key)]
        assert len(good) == 1
        pack.write_bytes(whole)
    assert restores(store, "y", ["a", "b"])


def restores(store: SnapshotStore, name: str, keys: Any) -> bool:
    try:
        store.restore(name, keys=keys)
    except packhorse.CorruptionError:
        return False
    return True


def test_tensors_are_written_in_place(taken: tuple[SnapshotStore, dict[str, Any]]) -> None:
    store, state = taken
    other = Run(seed=5).step(3)
    live = other.state()
    where = {id(tensor) for tensor in live["model"].values()}
    back = store.restore("x", framework="pt", into={"model": live["model"]})
    assert {id(tensor) for tensor in back["model"].values()} == where
    assert_same(other.model.state_dict(), state["model"])
    assert_same(back, state)


def test_any_strides_are_written_in_place(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    store.take("x", {"a": values, "b": values, "c": torch.from_numpy(values), "d": values})
    into = {
        "a": np.zeros((4, 3), np.int32).T,
        "b": np.zeros((3, 4), ">i4"),
        "c": torch.zeros(3, 8, dtype=torch.int32)[:, ::2],
        "d": torch.zeros(3, 4, dtype=torch.int32),
    }
    store.restore("x", into=into)
    for found in into.values():
        assert np.array_equal(np.asarray(found), values)


def test_what_does_not_fit_in_place_is_named(taken: tuple[SnapshotStore, dict[str, Any]]) -> None:
    store, state = taken
    for change, words in [
        (lambda t: t[:1], r"of shape \[1"),
        (lambda t: t.float(), "F32 of shape"),
    ]:
        into = {"model": {**state["model"], "0.weight": change(state["model"]["0.weight"])}}
        before = copied(into)
        with pytest.raises(ValueError, match=rf"snapshot 'x': model\.0\.weight: .*{words}"):
            store.restore("x", into=into)
        assert_same(into, before)
    with pytest.raises(
        ValueError, match=r"extra: `into` has this tensor, but the snapshot does not"
    ):
        store.restore("x", into={"extra": torch.ones(3)})
    read_only = np.zeros(16, np.uint8)
    read_only.setflags(write=False)
    store.take("y", {"a": np.ones(16, np.uint8)})
    with pytest.raises(ValueError, match=r"a: .*read-only"):
        store.restore("y", into={"a": read_only})


def test_a_limit_is_kept(taken: tuple[SnapshotStore, dict[str, Any]]) -> None:
    store, _ = taken
    nbytes = store.info("x").nbytes
    store.restore("x", max_nbytes=nbytes)
    with pytest.raises(packhorse.CorruptionError, match=f"{nbytes} bytes would be decoded"):
        store.restore("x", max_nbytes=nbytes - 1)


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    store, run = SnapshotStore(tmp_path), Run().step()
    done: list[int] = []
    info = store.take("x", run.state(), progress=done.append)
    assert sum(done) == info.nbytes
    for call in (store.restore, store.verify):
        done.clear()
        call("x", progress=done.append)
        assert 0 < sum(done) <= info.nbytes


# Stored data and their places.


def test_equal_tensors_are_kept_once(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    first = store.take(
        "a", {"x": x, "again": x.copy(), "shaped": torch.from_numpy(x.reshape(100, 1000))}
    )
    assert 100_000 < first.stored_nbytes < 102_000
    second = store.take("b", {"moved": x})
    assert second.stored_nbytes == 0
    assert second.needed_nbytes == first.needed_nbytes
    assert len(packs_of(tmp_path)) == 1
    assert store.take("c", {"x": x.view(np.int8)}).stored_nbytes > 100_000
    store.delete("a")
    assert_same(store.restore("b"), {"moved": x})
    assert store.verify() == []


def test_packs_are_safetensors_files_of_frames(tmp_path: Path) -> None:
    state = odd_state()
    store = SnapshotStore(tmp_path)
    store.take("a", state)
    (pack,) = packs_of(tmp_path)
    assert pack.name.endswith(".ph.safetensors")
    with safe_open(pack, "np") as file:
        names = list(file.keys())
        for name in names:
            frame = Frame.from_buffer(file.get_tensor(name))
            assert name == f"{frame.content_hash.hex()}.{frame.dtype}"
    tensors: list[Any] = []
    every_tensor(state, tensors.append)
    assert len(names) == len(tensors) - 1  # two are one


def test_frames_are_aligned(tmp_path: Path) -> None:
    SnapshotStore(tmp_path).take("a", Run().step().state())
    (manifest,) = (tmp_path / "snapshots" / "a").iterdir()
    document = json.loads(manifest.read_text())
    assert all(frame[1] % 64 == 0 and frame[2] % 64 == 0 for frame in document["frames"])
    assert document["packs"] == [packs_of(tmp_path)[0].name.split(".")[0]]


def test_the_input_is_only_read(tmp_path: Path) -> None:
    array = np.arange(1000.0)
    array.setflags(write=False)
    SnapshotStore(tmp_path).take("a", {"x": array})


def test_a_tensor_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    from packhorse.storage.frames import packer

    array = np.zeros(1000)
    store = SnapshotStore(tmp_path)
    real = packer.compress_many

    def meddle(*args: Any, **kwargs: Any) -> Any:
        array[0] += 1
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "compress_many", meddle)
        with pytest.raises(RuntimeError, match="x: the tensor changed while"):
            store.take("a", {"x": array})
    assert store.names() == []
    store.take("a", {"x": array})
    assert len(packs_of(tmp_path)) == 1


def test_the_same_state_gives_the_same_frames(tmp_path: Path) -> None:
    state = Run().step().state()
    sizes = set()
    for threads in (1, 2, 5):
        store = SnapshotStore(tmp_path / str(threads), threads=threads)
        store.take("a", state)
        sizes.add(packs_of(tmp_path / str(threads))[0].read_bytes())
    assert len(sizes) == 1


# One writer, any number of readers.


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"x": np.arange(9)})
    ready, go = threading.Event(), threading.Event()

    def wait(nbytes: int) -> None:
        ready.set()
        go.wait(60)

    holder = threading.Thread(target=lambda: store.take("b", {"x": np.arange(99)}, progress=wait))
    holder.start()
    ready.wait(60)
    try:
        other = SnapshotStore(tmp_path)
        words = "being written by another SnapshotStore of this process .*one writer at a time"
        for write in (
            lambda: other.take("c", {}),
            lambda: other.delete("a"),
            lambda: other.prune(keep=1),
        ):
            with pytest.raises(BlockingIOError, match=words):
                write()
        assert other.names() == ["a"]
        assert_same(other.restore("a"), {"x": np.arange(9)})
        code = "import sys; from packhorse.disk import SnapshotStore as S\n"
        code += "try: S(sys.argv[1]).take('c', {})\nexcept BlockingIOError as e: print(e)"
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert f"being written by process {os.getpid()} on " in done.stdout
        assert str(tmp_path) in done.stdout
    finally:
        go.set()
        holder.join()
    assert other.names() == ["a", "b"]
    other.take("c", {})


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    children: list[int] = []
    release, hold = os.pipe()

    def fork(nbytes: int) -> None:
        if not children and (child := os.fork()) == 0:
            os.close(hold)
            os.read(release, 1)  # until the parent closes its end
            os._exit(0)
        elif not children:
            children.append(child)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads and fork do not mix
        store.take("a", {"x": np.arange(9)}, progress=fork)
    SnapshotStore(tmp_path).take("b", {})
    os.close(hold)
    os.waitpid(children[0], 0)
    os.close(release)


def test_readers_go_on_while_snapshots_come_and_go(tmp_path: Path) -> None:
    writer, reader = SnapshotStore(tmp_path, threads=1), SnapshotStore(tmp_path, threads=1)
    rng = np.random.default_rng(0)
    states = [{"x": rng.standard_normal(5000), "i": i} for i in range(60)]
    failures: list[BaseException] = []
    stop = threading.Event()
    n_read = [0]

    def read() -> None:
        while not stop.is_set():
            try:
                for name in reader.names():
                    assert_same(reader.restore(name), states[int(name)])
                    n_read[0] += 1
            except BaseException as error:
                if "no snapshot is named" not in str(error):  # it may have been pruned meanwhile
                    failures.append(error)
                    return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i, state in enumerate(states):
        writer.take(str(i), state)
        if i % 3 == 2:
            writer.prune(keep=2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert n_read[0] > 3


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    store = SnapshotStore(tmp_path)
    for call in (store.names, lambda: store.take("a", {}), store.verify):
        with pytest.raises(
            ValueError, match=r"not a snapshot store: it holds 'model\.bin', but no store"
        ):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


def test_numpy_users_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np; from packhorse.disk import SnapshotStore\n"
        "store = SnapshotStore(sys.argv[1]); store.take('a', {'x': np.arange(5)})\n"
        "print(store.restore('a')['x'].sum(), store.verify())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["10", "[]"]
