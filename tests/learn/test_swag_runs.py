"""SWAG in processes and threads: in the background, killed, forked, and when things fail."""

import errno
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import fork_context, run_program
from torch import nn

from packhorse.disk import Shelf
from packhorse.errors import ClosedError
from packhorse.learn import SWAG

EXAMPLE = Path(__file__).parents[2] / "examples" / "posterior.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "shelf") as opened:
        yield opened


def step(model: nn.Linear) -> np.ndarray:
    """Change the weights; returns them."""
    with torch.no_grad():
        model.weight += torch.randn(model.weight.shape)
    return model.weight.detach().flatten().numpy().copy()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False)


def check(swag: SWAG, shelf: Shelf, rows: list[np.ndarray]) -> None:
    """The posterior is that of these rows, also for one who reads it from the shelf."""
    wanted = np.stack(rows).astype(np.float64)
    assert swag.n_collected == len(rows)
    np.testing.assert_array_equal(np.asarray(shelf["swag/rows"]), wanted)
    for one in (swag, SWAG(linear(), shelf)):
        variance = one.variance()["weight"].numpy().ravel()
        np.testing.assert_allclose(variance, wanted.var(0), rtol=1e-12)
        mean = one.mean()["weight"].numpy().ravel()
        np.testing.assert_allclose(mean, wanted.mean(0), rtol=1e-6, atol=1e-7)


class Gate:
    """Stands in the way of writes, or lets them fail."""

    def __init__(self, swag: SWAG, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.error: BaseException | None = None
        self.n_calls = 0
        self._real: Callable[[Any], None] = swag._iterates.add
        monkeypatch.setattr(swag._iterates, "add", self)

    def __call__(self, rows: Any) -> None:
        self.n_calls += 1
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        self._real(rows)


def test_collect_returns_before_the_iterate_is_written(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf, max_pending=3)
    gate = Gate(swag, monkeypatch)
    for _ in range(3):
        rows.append(step(model))
        assert swag.collect()
    assert swag.n_collected == 0
    threading.Timer(0.3, gate.open.set).start()
    start = time.perf_counter()
    rows.append(step(model))
    assert swag.collect()  # the fourth waits
    assert time.perf_counter() - start > 0.25
    swag.flush()
    check(swag, shelf, rows)


def test_an_idle_swag_has_no_thread(shelf: Shelf) -> None:
    model = linear()
    swag = SWAG(model, shelf)
    swag.collect()
    swag.flush()
    deadline = time.monotonic() + 10
    while "packhorse-background" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline


def test_errors_of_the_thread_are_raised_and_nothing_is_lost(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf, max_pending=2)
    gate = Gate(swag, monkeypatch)
    gate.open.set()
    gate.error = OSError(errno.ENOSPC, "no space left")
    rows.append(step(model))
    swag.collect()
    while swag._queue._thread is not None:
        time.sleep(0.001)
    with pytest.raises(OSError, match="no space left"):
        swag.collect()
    rows.append(step(model))
    swag.collect()  # tries again, and fails again
    for call in (swag.collect, swag.flush, swag.flush, swag.sample):
        while swag._queue._thread is not None:
            time.sleep(0.001)
        with pytest.raises(OSError, match="no space left"):
            call()
    gate.error = None
    rows.append(step(model))
    swag.collect()  # the queue was full, so this one wrote
    swag.flush()
    check(swag, shelf, rows)


def test_a_transaction_that_fails_midway_leaves_no_trace(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf)
    for _ in range(20):
        rows.append(step(model))
        swag.collect()
    swag.flush()
    monkeypatch.setattr(swag._iterates, "_write_counts", lambda *_: 1 / 0)
    rows.append(step(model))
    swag.collect()
    with pytest.raises(ZeroDivisionError):
        swag.flush()
    check(SWAG(linear(), shelf), shelf, rows[:-1])
    monkeypatch.undo()
    swag.flush()
    check(swag, shelf, rows)


def test_a_shelf_that_is_closed_too_early(tmp_path: Path) -> None:
    model = linear()
    with Shelf(tmp_path / "shelf") as shelf:
        swag = SWAG(model, shelf)
        swag.collect()
        swag.flush()
    swag.collect()
    for call in (swag.flush, swag.close):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError, match="this SWAG is closed"):
        swag.collect()


def test_iterates_in_a_transaction_of_the_caller(shelf: Shelf) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf, max_pending=2)
    with shelf.transaction():
        for number in range(7):  # more than may wait
            rows.append(step(model))
            swag.collect(number)
        swag.flush()
        shelf["checkpoint"] = np.arange(3)
    check(swag, shelf, rows)
    step(model)
    with suppress(ZeroDivisionError), shelf.transaction():
        swag.collect(7)
        swag.flush()
        1 / 0  # noqa: B018
    assert swag.n_collected == 7
    rows.append(step(model))
    assert swag.collect(7)
    swag.flush()
    check(swag, shelf, rows)


def test_steps_that_were_collected_are_skipped(shelf: Shelf) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf)
    for number in range(1, 6):
        rows.append(step(model))
        assert swag.collect(number)
        assert not swag.collect(number)  # whether it is written yet or not
    swag.close()
    again = SWAG(model, shelf)
    assert [again.collect(number) for number in (3, 5)] == [False, False]
    rows.append(step(model))
    assert again.collect(6)
    again.flush()
    check(again, shelf, rows)


def test_tags_give_the_posterior_of_that_time(shelf: Shelf) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf)
    for number in range(40):
        rows.append(step(model))
        swag.collect(number)
        if number == 19:
            swag.flush()
            shelf.tag("middle")
    swag.flush()
    then = SWAG(model, shelf.at("middle"))
    assert then.n_collected == 20
    drawn = then.sample(2, seed=0)
    with pytest.raises(PermissionError, match="the posterior 'swag' can only be read"):
        then.collect(20)
    check(swag, shelf, rows)
    shelf.rollback("middle")
    check(swag, shelf, rows[:20])
    for one, other in zip(drawn, swag.sample(2, seed=0), strict=True):
        assert torch.equal(one["weight"], other["weight"])
    assert swag.collect(20)
    swag.flush()
    assert swag.n_collected == 21


def test_a_reader_samples_beside_the_writer(shelf: Shelf, tmp_path: Path) -> None:
    model = linear()
    swag = SWAG(model, shelf)
    for _ in range(5):
        step(model)
        swag.collect()
    swag.flush()
    with fork_context().Pool(1) as pool:
        found = pool.apply(read_and_sample, (tmp_path / "shelf",))
    assert found == (5, swag.sample(1, seed=0)[0]["weight"].tolist())


def read_and_sample(folder: Path) -> tuple[int, Any]:
    torch.set_num_threads(1)
    with Shelf(folder, mode="r") as shelf, SWAG(nn.Linear(3, 2, bias=False), shelf) as swag:
        return swag.n_collected, swag.sample(1, seed=0)[0]["weight"].tolist()


def test_a_forked_process_does_not_collect(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = linear(), []
    swag = SWAG(model, shelf)
    gate = Gate(swag, monkeypatch)
    rows.append(step(model))
    swag.collect()
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="belongs to the process that forked this one"):
                swag.collect()
            swag.close()
            code = 0
        finally:
            os._exit(code)
    gate.open.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rows.append(step(model))
    swag.collect()
    swag.flush()
    check(swag, shelf, rows)


def test_a_program_that_ends_writes_what_waits(tmp_path: Path) -> None:
    code = f"""
import torch
from packhorse.disk import Shelf
from packhorse.learn import SWAG
model = torch.nn.Linear(400, 400)
swag = SWAG(model, Shelf({str(tmp_path / "shelf")!r}), max_pending=50)
for _ in range(50):
    swag.collect()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Shelf(tmp_path / "shelf", mode="r") as shelf:
        assert SWAG(nn.Linear(400, 400), shelf).n_collected == 50


def test_iterates_that_are_lost_are_reported_at_the_end(tmp_path: Path) -> None:
    code = f"""
import torch
from packhorse.disk import Shelf
from packhorse.learn import SWAG
swag = SWAG(torch.nn.Linear(3, 2), Shelf({str(tmp_path / "shelf")!r}))
def fail(rows):
    raise OSError(28, "no space left on device")
swag._iterates.add = fail
swag.collect()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    words = "RuntimeWarning: 1 iterates were not written: OSError: [Errno 28] no space left on dev"
    assert words in done.stderr


# The example, killed.


def posterior_of(folder: Path) -> list[bytes]:
    with Shelf(folder, mode="r") as shelf:
        names = ("rows", "mean", "squares", "counts")
        return [np.asarray(shelf[f"swag/{name}"]).tobytes() for name in names]


def run(folder: Path, kill_after: float | None = None) -> tuple[str, int]:
    """Run the example. Returns what it printed, and its exit code.

    Args:
        folder: the shelf.
        kill_after: the step whose line the parent reads before it kills the process, plus a
            fraction of some milliseconds that it waits.
    """
    output, words = folder.with_suffix(".out"), [str(folder), "--steps", "110", "--start", "30"]
    output.touch()
    process = fork_context().Process(target=run_program, args=(EXAMPLE, output, words))
    process.start()
    if kill_after is not None:
        while f"step {int(kill_after)}:" not in output.read_text():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(kill_after % 1 * 0.02)
        process.kill()
    process.join(60)
    assert process.exitcode is not None
    return output.read_text(), process.exitcode


def test_a_killed_run_ends_with_the_identical_posterior(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    whole, code = run(tmp_path / "whole")
    assert code == 0
    assert re.search(r"^posterior: \[0\.\d+, 0\.\d+\]$", whole, re.M)
    assert re.search(r"^80 iterates take \d+,[\d,]+ bytes$", whole, re.M)
    chosen = random.Random(0)
    for first in (12, 73):  # before the first iterate, and at a random moment
        _, code = run(tmp_path / "killed", first + chosen.random())
        assert code == -9
    rest, code = run(tmp_path / "killed")
    assert code == 0
    assert rest.startswith("goes on from step ")
    assert rest.splitlines()[-3:] == whole.splitlines()[-3:]
    assert posterior_of(tmp_path / "killed") == posterior_of(tmp_path / "whole")
