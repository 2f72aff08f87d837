"""Snapshots in the background: copies are made at once, errors surface, memory is bounded."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from snapshot_samples import Run, assert_same

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots.staging import Staging


def test_the_state_may_change_at_once(tmp_path: Path) -> None:
    run, taken = Run(), {}
    with SnapshotStore(tmp_path) as store:
        for i in range(6):
            run.step()
            taken[str(i)] = run.copy()
            store.take_async(str(i), run.state(), metadata={"i": i})
            with torch.no_grad():
                for tensor in run.model.parameters():
                    tensor.add_(0.01)
    reader = SnapshotStore(tmp_path)
    assert reader.names() == list(taken)
    assert reader.verify() == []
    for name, state in taken.items():
        assert_same(reader.restore(name, framework="pt"), state)
        assert reader.info(name).metadata == {"i": int(name)}


def test_the_future_gives_what_was_written(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    future = store.take_async("a", {"x": np.arange(100)})
    assert future.result(60) == store.info("a")
    assert future.exception() is None
    assert not future.cancel()
    store.close()
    store.take("b", {})  # a closed store may be used again
    store.take_async("c", {}).result(60)
    store.close()


@pytest.mark.parametrize("bound", [1, 1000, 100_000, None])
def test_the_bound_is_kept(tmp_path: Path, bound: int | None) -> None:
    rng = np.random.default_rng(0)
    states = [
        {str(i): rng.integers(0, 256, n, np.uint8) for i, n in enumerate((500, 3, 0, 90_000, 2000))}
        for _ in range(3)
    ]
    most = 0
    with SnapshotStore(tmp_path, staging_nbytes=bound) as store:
        staging = store._staging
        real = staging._take

        def take(nbytes: int) -> Any:
            nonlocal most
            memory = real(nbytes)
            most = max(most, staging._nbytes)
            return memory

        staging._take = take  # type: ignore[method-assign]
        for i, state in enumerate(states):
            store.take_async(str(i), state)
        for i, state in enumerate(states):
            store.close()
            assert_same(store.restore(str(i)), state)
    assert 90_000 <= most <= max(bound or 92_503, 90_000)  # one tensor is larger than the bound
    assert staging._nbytes == 0


def test_memory_is_used_again() -> None:
    staging = Staging(None)
    seen = set()
    for _ in range(5):
        staging.begin(0, 100_000)
        for n in (100, 100, 7):
            staging.put(np.ones(n, np.uint8))
        for _ in range(3):
            seen.add(staging.get().ctypes.data)
        staging.release()
    assert len(seen) == 3
    staging.drop()
    assert not staging._spare


def test_memory_does_not_grow_with_sizes_that_change(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path) as store:
        for i in range(6):
            store.take_async(str(i), {"log": np.zeros(10_000 + i, np.uint8), "n": np.zeros(50)})
            store.take_async(f"{i} more", {}).result(60)
            assert store._staging._spare_nbytes <= 10_000 + i + 400


# Errors.


def failing(store: SnapshotStore) -> Any:
    """A snapshot that fails in the background, because its name is taken."""
    future = store.take_async("a", {"x": np.arange(5000)})
    while not future.done():
        time.sleep(0.001)
    return future


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """A store with the snapshot "a"."""
    store = SnapshotStore(tmp_path)
    store.take("a", {})
    return store


def test_the_future_raises(store: SnapshotStore) -> None:
    with pytest.raises(FileExistsError, match="there is already a snapshot 'a'"):
        store.take_async("a", {}).result(60)
    store.take("b", {})  # it was told once
    store.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.take("b", {}),
        lambda store: store.take_async("b", {}),
        lambda store: store.names(),
        lambda store: store.info("a"),
        lambda store: store.restore("a"),
        lambda store: store.verify(),
        lambda store: store.delete("a"),
        lambda store: store.prune(keep=1),
        lambda store: store.close(),
        lambda store: store.__exit__(None, None, None),
    ],
)
def test_the_next_call_raises_at_the_latest(store: SnapshotStore, call: Any) -> None:
    failing(store)
    with pytest.raises(FileExistsError, match="there is already a snapshot 'a'"):
        call(store)
    assert store.names() == ["a"]  # once
    call(store)
    store.close()


def test_what_cannot_be_kept_is_told_at_once(store: SnapshotStore) -> None:
    with pytest.raises(TypeError, match=r"a\.b: bytes cannot be stored"):
        store.take_async("b", {"a": {"b": b""}})
    store.close()
    assert store.names() == ["a"]


def test_a_failure_while_copying_ends_both_threads(store: SnapshotStore) -> None:
    from packhorse.numpy import NumpyFramework

    state = {str(i): np.arange(1000 + i) for i in range(5)}
    real = NumpyFramework.readable

    def fail(self: NumpyFramework, tensor: Any) -> Any:
        if len(tensor) == 1003:
            raise MemoryError("no more")
        return real(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyFramework, "readable", fail)
        with pytest.raises(MemoryError, match="no more"):
            store.take_async("b", state)
    assert store.names() == ["a"]
    store.take_async("b", state).result(60)
    store.close()
    assert_same(store.restore("b"), state)


def test_a_failure_while_packing_lets_the_caller_go(tmp_path: Path) -> None:
    """With little memory the caller waits for room, which a writer that failed never makes."""
    holder, other = SnapshotStore(tmp_path), SnapshotStore(tmp_path, staging_nbytes=100)
    held, go = threading.Event(), threading.Event()

    def hold(nbytes: int) -> None:
        held.set()
        go.wait(60)

    thread = threading.Thread(target=lambda: holder.take("a", {"x": np.arange(9)}, progress=hold))
    thread.start()
    held.wait(60)
    future = other.take_async("b", {str(i): np.arange(100) for i in range(9)})
    with pytest.raises(BlockingIOError, match="another SnapshotStore of this process"):
        future.result(60)
    go.set()
    thread.join()
    other.take_async("b", {str(i): np.arange(100) for i in range(9)})
    other.close()
    assert other.names() == ["a", "b"]


def test_readers_do_not_wait(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"x": np.arange(10)})
    from packhorse.disk.snapshots import store as module

    go = threading.Event()
    real = module.take_snapshot

    def slow(*args: Any, **kwargs: Any) -> Any:
        go.wait(60)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "take_snapshot", slow)
        future = store.take_async("b", {"x": np.arange(20)})
        assert store.names() == ["a"]
        assert_same(store.restore("a"), {"x": np.arange(10)})
        assert not future.done()
        go.set()
        store.close()
    assert store.names() == ["a", "b"]


def test_a_program_that_ends_finishes_its_snapshot(tmp_path: Path) -> None:
    code = """
import numpy as np, sys
from packhorse.disk import SnapshotStore
x = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
SnapshotStore(sys.argv[1]).take_async("a", {str(i): x + np.uint8(i) for i in range(6)})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=True)
    store = SnapshotStore(tmp_path)
    assert store.names() == ["a"]
    assert store.verify() == []


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_wait_does_not_mix_snapshots(tmp_path: Path) -> None:
    """Ctrl-C while a call waits for the previous snapshot, and then one more snapshot."""
    states = [
        {str(i): np.random.default_rng(i).standard_normal(50_000) * k for i in range(20)}
        for k in (1, 2)
    ]
    old = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        with SnapshotStore(tmp_path, threads=1) as store:
            packing = threading.Event()
            go_on = threading.Event()
            real = store._staging.get

            def get() -> Any:
                packing.set()
                assert go_on.wait(60)
                return real()

            store._staging.get = get  # type: ignore[method-assign]
            store.take_async("a", states[0])
            assert packing.wait(60)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                store.take_async("never", states[1])
            threading.Timer(0.1, go_on.set).start()
            store.take_async("b", states[1]).result(60)
    finally:
        signal.signal(signal.SIGALRM, old)
    reader = SnapshotStore(tmp_path)
    assert reader.names() == ["a", "b"]
    for name, state in zip("ab", states, strict=True):
        assert_same(reader.restore(name), state)


def test_a_thread_that_reads_does_not_wait_for_one_that_writes(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.take("a", {"n": 1})
    found: list[Any] = []

    def read(nbytes: int) -> None:
        thread = threading.Thread(target=lambda: found.append((store.names(), store.restore("a"))))
        thread.start()
        thread.join(30)
        assert found == [(["a"], {"n": 1})]

    store.take("b", {"x": np.arange(5000)}, progress=read)
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_child_has_no_snapshot_in_the_background(tmp_path: Path) -> None:
    """It does not have the thread that writes it either, for which it would wait forever."""
    state = {"x": np.arange(5000.0)}
    with SnapshotStore(tmp_path / "parent") as store, SnapshotStore(tmp_path / "more") as more:
        more.take_async("a", state).result(60)  # its thread is idle, and not in the child
        wait = threading.Event()
        real = store._staging.get
        store._staging.get = lambda: (wait.wait(60), real())[1]  # type: ignore[method-assign]
        store.take_async("a", state)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                ok = store.names() == []
                more.take_async("b", state).result(30)
                more.close()
                store.close()
                os._exit(0 if ok and more.names() == ["a", "b"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        wait.set()
    assert SnapshotStore(tmp_path / "parent").names() == ["a"]
    assert SnapshotStore(tmp_path / "more").verify() == []
