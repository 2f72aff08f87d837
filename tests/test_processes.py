"""Objects that go to other processes, forks at bad moments, and programs that end too early."""

import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import fork_context
from packed_rows import OpenRows
from safetensors.numpy import save_file as save_plain
from torch.utils.data import DataLoader

import packhorse
from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.disk import PackedFile, SnapshotStore
from packhorse.disk.base_files import open_bases
from packhorse.disk.snapshots.pending import ToldFuture
from packhorse.late_import import import_late
from packhorse.numpy import FRAMEWORK


def run_script(
    script: str, *args: object, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# Objects that are pickled.


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_what_was_opened_before_goes_to_workers_of_a_data_loader(how: str, tmp_path: Path) -> None:
    if how == "forkserver":
        fork_context()  # all tests share the server
    rows = torch.arange(40, dtype=torch.float32).reshape(10, 4)
    path = tmp_path / "rows.ph.safetensors"
    ph_torch.save_file({"rows": rows}, path)
    store = SnapshotStore(tmp_path / "store")
    store.take("a", {"rows": rows})
    with packhorse.open_file(path, framework="pt") as file:
        items = OpenRows(file, "rows", store)
        loader = DataLoader(items, batch_size=1, num_workers=1, multiprocessing_context=how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads, from 3.12
            batches = list(loader)
    assert [torch.equal(batch[0], rows[:2]) for batch in batches] == [True] * 3


def test_a_pickled_file_keeps_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is also found from another folder, with its base."""
    rng = np.random.default_rng(0)
    old = {"x": rng.standard_normal(50_000).astype(np.float32)}
    new = {"x": np.nextafter(old["x"], np.float32(9))}
    ph_numpy.save_file(old, tmp_path / "old.safetensors.ph.safetensors")
    monkeypatch.chdir(tmp_path)
    ph_numpy.save_file(new, "new.ph.safetensors", base="old.safetensors.ph.safetensors")
    with packhorse.open_file(
        "new.ph.safetensors", "np", max_nbytes=10_000, base="old.safetensors.ph.safetensors"
    ) as file:
        data = pickle.dumps(file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pickle.loads(data) as again:
        assert np.array_equal(again.get_slice("x")[:2000], new["x"][:2000])
        with pytest.raises(packhorse.CorruptionError, match="max_nbytes = 10000"):
            again.get_tensor("x")


OTHERS = {
    "another size": {"x": np.arange(10)},
    "another name": {"y": np.arange(9)},
    "other values": {"x": np.arange(9) + 1},
}


@pytest.mark.parametrize("other", [*OTHERS, "a copy", "not packed", "gone"])
def test_a_pickled_file_opens_no_other_file(other: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ph.safetensors"
    ph_numpy.save_file({"x": np.arange(9)}, path)
    with packhorse.open_file(path, framework="np") as file:
        size = path.stat().st_size
        path.rename(tmp_path / "old")
        if other in OTHERS:
            ph_numpy.save_file(OTHERS[other], path)
            assert other == "another size" or path.stat().st_size == size
        elif other == "a copy":
            shutil.copyfile(tmp_path / "old", path)
        elif other == "not packed":
            save_plain({"x": np.arange(9)}, path)
        for what in (file, file.get_slice("x")):  # of what was opened, wherever it is now
            data = pickle.dumps(what)
            if other == "a copy":
                assert pickle.loads(data) is not None
                continue
            with pytest.raises((packhorse.PackhorseError, ValueError, OSError)) as told:
                pickle.loads(data)
            assert str(path) in str(told.value)
            if other in OTHERS:
                assert isinstance(told.value, packhorse.ChangedError)
                assert f"{path}: is not the file that was pickled" in str(told.value)


def test_the_last_frames_of_many_tell_a_pickled_file_too(tmp_path: Path) -> None:
    path = tmp_path / "x.ph.safetensors"
    tensors = {f"{i:04}": np.full(4, i) for i in range(300)}
    ph_numpy.save_file(tensors, path)
    with packhorse.open_file(path, framework="np") as file:
        data = pickle.dumps(file)
    for name in ("0000", "0299"):
        ph_numpy.save_file({**tensors, name: np.full(4, 7_000)}, path)
        with pytest.raises(packhorse.ChangedError, match="is not the file that was pickled"):
            pickle.loads(data)
    ph_numpy.save_file(tensors, path)
    pickle.loads(data).close()


def test_a_closed_file_is_not_pickled(tmp_path: Path) -> None:
    path = tmp_path / "x.ph.safetensors"
    ph_numpy.save_file({"x": np.arange(9)}, path)
    file = packhorse.open_file(path, framework="np")
    file.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(file)


def test_a_base_that_is_open_here_alone_is_not_pickled(tmp_path: Path) -> None:
    base, path = tmp_path / "base.ph.safetensors", tmp_path / "x.ph.safetensors"
    ph_numpy.save_file({"x": np.arange(9)}, base)
    ph_numpy.save_file({"x": np.arange(9)}, path)
    with (
        open_bases(base) as bases,
        PackedFile(path, FRAMEWORK, base=bases) as file,
        pytest.raises(TypeError, match="with the path of the base"),
    ):
        pickle.dumps(file)


def test_a_pickled_store_keeps_its_place_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SnapshotStore("store", level="fast", max_chain=3, cache_nbytes=1 << 20)
    store.take("a", {"x": np.arange(9)})
    data = pickle.dumps(store)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = pickle.loads(data)
    assert again.names() == ["a"]
    assert again.__reduce__()[1] == store.__reduce__()[1]
    again.take("b", {"x": np.arange(8)})
    assert store.names() == ["a", "b"]


# Forks.

# A thread imports a module when it first uses it. The forked child must not wait for that import,
# because in the child nobody finishes it.
FORK = """
import faulthandler, os, sys, threading, time, warnings
import numpy as np
import packhorse
from packhorse.disk import SnapshotStore

warnings.simplefilter("ignore")
what, folder, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])

def use():
    if what == "store":
        return SnapshotStore(folder + "/store").restore("a")
    if what == "take":
        name = f"{threading.get_native_id()}"
        return SnapshotStore(f"{folder}/{name}").take(name, {"x": np.arange(9)})
    with packhorse.open_file(folder + "/x.ph.safetensors", framework="np") as file:
        return file.get_tensor("x")

threading.Thread(target=use).start()
time.sleep(delay)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(10, exit=True)
    use()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.02])
@pytest.mark.parametrize("what", ["store", "take", "file"])
def test_a_fork_while_a_thread_imports_what_it_needs(
    what: str, delay: float, tmp_path: Path
) -> None:
    SnapshotStore(tmp_path / "store").take("a", {"x": np.arange(9)})
    ph_numpy.save_file({"x": np.arange(9)}, tmp_path / "x.ph.safetensors")
    ended = run_script(FORK, what, tmp_path, delay)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_import_that_waits_for_another_thread_s_does_not_keep_that_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in imports a module late, while it is imported itself; that module needs the
    plug-in."""
    (tmp_path / "slow_plugin.py").write_text(
        "import threading, time\nimport plugin_state\nplugin_state.begun.set()\n"
        "plugin_state.other_begun.wait(10)\ntime.sleep(0.2)\n"
        "from packhorse.late_import import import_late\nimport_late('late_one')\n"
    )
    (tmp_path / "plugin_state.py").write_text(
        "import threading\nbegun, other_begun = threading.Event(), threading.Event()\n"
    )
    (tmp_path / "late_one.py").write_text("")
    (tmp_path / "late_two.py").write_text(
        "import plugin_state\nplugin_state.other_begun.set()\nimport slow_plugin\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_late("plugin_state").begun.clear()
    threads = [
        threading.Thread(target=import_module, args=("slow_plugin",), daemon=True),
        threading.Thread(target=import_late, args=("late_two",), daemon=True),
    ]
    for thread in threads:
        thread.start()
        import_late("plugin_state").begun.wait(10)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


HANDLERS = """
import os, sys
from packhorse.process import at_exit, at_fork

def note(word):
    def handler():
        os.write(1, f"{word}\\n".encode())  # at once: parent and child write to one pipe
        if word.startswith("bad"):
            raise RuntimeError(word)
    return handler

first = {name: note(f"first {name}") for name in ("before", "in_parent", "in_child")}
at_fork(**first)
at_fork(**first)
at_fork(before=note("second before"), in_child=note("bad in_child"))
at_fork(in_child=note("third in_child"))
last = note("exit 1")
at_exit(last)
at_exit(note("exit 2"))
at_exit(last)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_handlers_for_forks_and_for_the_end_run_once_and_in_order() -> None:
    ended = run_script(HANDLERS)
    lines = ended.stdout.splitlines()
    child = ["first in_child", "bad in_child", "third in_child"]
    assert [line for line in lines if line in child] == child
    own = ["second before", "first before", "first in_parent", "exit 2", "exit 1"]
    assert [line for line in lines if line not in child] == own
    assert "RuntimeError: bad in_child" in ended.stderr


# The end of a program.

LATE = """
import sys
import numpy as np
from packhorse.disk import SnapshotStore

folder, how, code = sys.argv[1:]
store = SnapshotStore(folder)
store.take("a", {"x": np.arange(5)})
future = store.take_async("a" if how != "good" else "b", {"x": np.arange(5)})
if how == "asked":
    print(type(future.exception(60)).__name__)
elif how == "closed":
    try:
        store.close()
    except FileExistsError:
        print("FileExistsError")
sys.exit(int(code))
"""


@pytest.mark.parametrize("code", [0, 7])
def test_a_failure_in_the_background_that_nobody_saw_is_told_as_the_program_ends(
    code: int, tmp_path: Path
) -> None:
    ended = run_script(LATE, tmp_path, "unasked", code)
    assert ended.returncode == (code or 1)
    assert "RuntimeWarning" in ended.stderr
    assert "snapshot 'a' was not taken, and result() of its future was never called" in ended.stderr
    assert "FileExistsError" in ended.stderr


def test_where_warnings_are_errors_the_exit_code_tells_it_too(tmp_path: Path) -> None:
    ended = run_script(LATE, tmp_path, "unasked", 0, flags=("-W", "error"))
    assert ended.returncode == 1
    assert "snapshot 'a' was not taken" in ended.stderr


def test_waiting_in_vain_for_a_future_is_not_to_have_seen_its_error() -> None:
    future, error = ToldFuture(), OSError("full")
    with pytest.raises(TimeoutError):
        future.result(0)
    assert not future.was_asked
    future.set_exception(error)
    with pytest.raises(OSError, match="full"):
        future.result()
    assert future.was_asked


@pytest.mark.parametrize("how", ["asked", "closed", "good"])
def test_a_program_whose_snapshots_are_well_or_told_ends_in_peace(how: str, tmp_path: Path) -> None:
    ended = run_script(LATE, tmp_path, how, 0)
    told = "" if how == "good" else "FileExistsError\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, told, "")
