"""`iter_chunks`: whole rows in order, all of one state, whatever happens meanwhile."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from packhorse.disk import Shelf, ShelfTensor
from packhorse.errors import ClosedError

ARRAY = np.arange(30_000).reshape(1000, 30)  # 59 chunks of 17 rows
RUN_NBYTES = 24_000  # 85 rows


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "data.shelf") as opened:
        opened.create("x", ARRAY.shape, ARRAY.dtype, chunk_nbytes=4096)[...] = ARRAY
        yield opened
        assert opened.verify() == []


def runs(x: ShelfTensor, nbytes: int | None = RUN_NBYTES) -> Iterator[np.ndarray]:
    return x.iter_chunks(nbytes)


@pytest.mark.parametrize("nbytes", [1, 240, 4000, 4080, RUN_NBYTES, 1 << 30, None, 0, -5])
def test_runs_of_every_length(shelf: Shelf, nbytes: int | None) -> None:
    found = list(runs(shelf["x"], nbytes))
    assert np.array_equal(np.concatenate(found), ARRAY)
    assert all(block.flags.writeable for block in found)
    assert not any(map(np.shares_memory, found, found[1:]))
    if nbytes and nbytes > 4080:
        assert all(block.nbytes <= nbytes and len(block) % 17 == 0 for block in found[:-1])
    if nbytes == 1:
        assert len(found) == 1000


def test_memory_of_a_run_is_used_again_once_nothing_refers_to_it(shelf: Shelf) -> None:
    kept, places = [], set()
    for i, block in enumerate(runs(shelf["x"])):
        places.add(block.ctypes.data)
        if i in (0, 3):  # a part of a run keeps all of it
            kept.append((i * 85, block[10:20, ::3].T))
        del block
    assert 3 <= len(places) <= 6  # of 12 runs
    for start, part in kept:
        assert np.array_equal(part.T, ARRAY[start + 10 : start + 20, ::3])


def test_tensors_without_rows_or_elements(shelf: Shelf) -> None:
    shelf["none"], shelf["thin"] = np.ones((0, 3)), np.ones((5, 0, 2))
    assert list(shelf["none"].iter_chunks()) == []
    assert [block.shape for block in shelf["thin"].iter_chunks()] == [(5, 0, 2)]
    assert list(shelf["none"]) == []
    assert [row.shape for row in shelf["thin"]] == [(0, 2)] * 5


def test_other_rows_are_written_meanwhile(shelf: Shelf) -> None:
    x = shelf["x"]
    found = []
    for i, block in enumerate(runs(x)):
        found.append(block)
        x[...] = -i
        x.append(np.ones((9, 30), int))
        if i % 3 == 0:
            shelf.compact()
    assert np.array_equal(np.concatenate(found), ARRAY)
    assert len(x) > 1000


def test_the_tensor_is_replaced_meanwhile(shelf: Shelf) -> None:
    steps: list[Callable[[], object]] = [
        lambda: shelf["x"].resize(3),
        lambda: shelf.rename("x", "y"),
        lambda: shelf.__setitem__("x", np.ones(4)),
        lambda: shelf.__delitem__("x"),
        lambda: shelf.tag("now"),
        lambda: shelf.__delitem__("y"),
        lambda: shelf.rollback("now"),
        lambda: shelf.untag("now"),
    ]
    found = []
    for block in runs(shelf["x"]):
        found.append(block)
        if steps:
            steps.pop(0)()
    assert not steps
    assert np.array_equal(np.concatenate(found), ARRAY)


def test_a_tag_that_is_forgotten_meanwhile(shelf: Shelf) -> None:
    shelf.tag("then")
    shelf["x"][...] = 0
    started = runs(shelf.at("then")["x"])
    found = [next(started)]
    shelf.untag("then")
    shelf.compact()
    assert np.array_equal(np.concatenate([*found, *started]), ARRAY)
    with pytest.raises(KeyError, match="there is no tag 'then'"):
        next(runs(shelf.at("then")["x"]))


def test_a_loop_that_ends_early(shelf: Shelf) -> None:
    x, n_threads = shelf["x"], threading.active_count()
    for block in runs(x):
        assert np.array_equal(block, ARRAY[: len(block)])
        break
    started = [runs(x) for _ in range(20)]
    for run in started:
        next(run)
    for run in started[:10]:
        run.close()
    del started, run
    gc.collect()
    assert threading.active_count() <= n_threads
    for i in range(30):  # nothing holds the old states
        x[...] = ARRAY + i
    info = shelf.info()
    assert info.free_nbytes < 20 * info.packed_nbytes


def test_inside_reading(shelf: Shelf) -> None:
    x = shelf["x"]
    with shelf.reading():
        assert len(x[0]) == 30  # holds the state
        x[...] = 0
        assert np.array_equal(np.concatenate(list(runs(x))), ARRAY)
        started = runs(x)
        first = next(started)
        with x.reading():
            second = next(started)
    # The loop goes on with the state that it began with.
    assert np.array_equal(np.concatenate([first, second, *started]), ARRAY)
    assert not any(block.any() for block in runs(x))


def test_a_loop_keeps_its_state_when_reading_begins(shelf: Shelf) -> None:
    x = shelf["x"]
    started = runs(x)
    found = [next(started)]
    x[...] = 0
    with shelf.reading():
        assert not x[500].any()
        found += [next(started), next(started)]
    assert np.array_equal(np.concatenate([*found, *started]), ARRAY)


def test_inside_a_transaction(shelf: Shelf) -> None:
    x = shelf["x"]
    with shelf.transaction():
        x[500:] = 0
        x.append(ARRAY)
        seen = []
        for i, block in enumerate(runs(x)):
            seen.append(block)
            if i == 2:
                x[900:] = 7
        assert np.array_equal(np.concatenate(seen)[:500], ARRAY[:500])
        assert (np.concatenate(seen)[900:] == 7).all()
        shorter = []
        for block in runs(x):
            x.resize(300)
            shorter.append(block)
        assert np.array_equal(np.concatenate(shorter), ARRAY[:300])
        started = runs(x)
        next(started)
    with pytest.raises(RuntimeError, match="'x': the transaction in which this loop began has end"):
        next(started)
    with shelf.transaction():
        x[0] = 1
        started = runs(x)
        next(started)
    with (
        shelf.transaction(),
        pytest.raises(RuntimeError, match="the transaction in which this loop began has ended"),
    ):
        next(started)


def test_a_loop_outside_goes_on_inside_a_transaction(shelf: Shelf) -> None:
    x = shelf["x"]
    started = runs(x)
    found = [next(started)]
    with shelf.transaction():
        x[...] = 5
        found.append(next(started))
    assert np.array_equal(np.concatenate([*found, *started]), ARRAY)


def test_several_loops_at_once(shelf: Shelf) -> None:
    x = shelf["x"]
    first, second = runs(x), runs(x, 5000)
    with ExitStack() as stack:
        for blocks in (first, second):
            stack.callback(blocks.close)  # type: ignore[attr-defined]
        pairs = list(zip(first, second, strict=False))
    assert all(np.array_equal(a[:17], ARRAY[85 * i :][:17]) for i, (a, _) in enumerate(pairs))
    assert all(np.array_equal(b, ARRAY[17 * i :][:17]) for i, (_, b) in enumerate(pairs))


def test_a_loop_goes_to_another_thread(shelf: Shelf) -> None:
    started = runs(shelf["x"])
    found = [next(started)]
    thread = threading.Thread(target=lambda: found.extend(started))
    shelf["x"][...] = 0
    thread.start()
    thread.join()
    assert np.array_equal(np.concatenate(found), ARRAY)


def test_a_shelf_that_is_closed_meanwhile(shelf: Shelf) -> None:
    with Shelf(shelf.path, "r") as other:
        started = runs(other["x"])
        next(started)
    with pytest.raises(ClosedError, match="the shelf is closed; open it again"):
        next(started)


def in_child(work: Callable[[], bool]) -> None:
    """Forks, and expects that the function is true in the child."""
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True])
def test_a_loop_goes_on_in_a_forked_child(shelf: Shelf, *, held: bool) -> None:
    with ExitStack() as stack:
        if held:
            stack.enter_context(shelf.reading())
        started = runs(shelf["x"])
        first = next(started)

        def rest() -> bool:
            return np.array_equal(np.concatenate([first, *started]), ARRAY)

        in_child(rest)
        in_child(lambda: np.array_equal(np.concatenate(list(runs(shelf["x"]))), ARRAY))
        assert rest()
        assert np.array_equal(np.concatenate(list(runs(shelf["x"]))), ARRAY)


def test_pytorch(shelf: Shelf) -> None:
    torch = pytest.importorskip("torch")
    pt = shelf["x"].as_framework("pt")
    assert torch.equal(torch.cat(list(pt.iter_chunks(RUN_NBYTES))), torch.from_numpy(ARRAY))
    assert torch.equal(torch.stack(list(pt)), torch.from_numpy(ARRAY))
