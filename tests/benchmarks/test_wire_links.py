"""The links and ranks of the benchmarks of the wire: made, held to a rate, and always removed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import import_afresh
from forked_ranks import fork_ranks

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests" / "samples"
# A process that opens links, says so, and runs a function that never ends.
PARENT = """
import sys
from benchmarks.wire import links, ranks
with links.connect(1, links.RATES["1G"]) as found:
    print(*found.namespaces, found.bridge, flush=True)
    options = {"folder": sys.argv[1]}
    ranks.launch(found, "wire_functions:hang", options, world=1, timeout=300)
"""


@pytest.fixture(scope="module")
def wire() -> Iterator[dict[str, ModuleType]]:
    """The modules that make links and ranks."""
    with import_afresh("wire.links", "wire.ranks") as modules:
        yield {name.partition(".")[2]: module for name, module in modules.items()}


@pytest.fixture
def shaped(wire: dict[str, ModuleType]) -> ModuleType:
    """The module of links, where they can be made."""
    reason = wire["links"].obstacle()
    if reason:
        pytest.skip(reason)
    return wire["links"]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the functions of the samples."""
    monkeypatch.setenv("PYTHONPATH", str(SAMPLES))


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _ended() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _children() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_only_namespaces_of_ended_processes_are_stale(wire: dict[str, ModuleType]) -> None:
    gone = _ended()
    names = [f"phw-{gone}-0-b", f"phw-{gone}-12-3", f"phw-{os.getpid()}-0-1", f"phw-{gone}"]
    names += ["other", f"xphw-{gone}-0-1", f"phw-{gone}-0-1x"]
    assert wire["links"].stale(names) == names[:2]


def test_without_commands_or_rights_links_say_what_is_missing(
    wire: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire["links"].os, "geteuid", lambda: 1000)
    monkeypatch.setattr(wire["links"].shutil, "which", lambda name: f"/sbin/{name}")
    assert wire["links"].obstacle() == "only root may make network namespaces"
    monkeypatch.setattr(wire["links"].shutil, "which", lambda name: None)
    assert wire["links"].obstacle() == "ip and tc not found; install iproute2"


def test_a_refused_step_is_named(
    wire: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire["links"], "COMMANDS", ())
    monkeypatch.setattr(wire["links"].os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert wire["links"].obstacle().startswith("ip: ")


def test_links_hold_their_rate_and_are_removed(shaped: ModuleType) -> None:
    made: list[str] = []

    def use(links: Any) -> None:
        made.extend([*links.namespaces, links.bridge])
        assert {*made} <= {*_namespaces()}
        for rank in range(3):
            command = [*links.command(rank), "tc", "qdisc", "show", "dev", links.device]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert "tbf" in shown
            assert "rate 5Gbit" in shown
        assert links.dropped() == 0
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), shaped.connect(3, shaped.RATES["5G"]) as links:
        use(links)
    assert len(made) == 4
    assert not {*made} & {*_namespaces()}


def test_what_a_killed_run_left_is_removed_by_the_next(shaped: ModuleType) -> None:
    left = f"phw-{_ended()}-0-1"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with shaped.connect(1, shaped.RATES["unshaped"]):
        assert left not in _namespaces()


def test_ranks_on_the_loopback_run_a_function(wire: dict[str, ModuleType], path: None) -> None:
    with wire["links"].loopback() as links:
        found = wire["ranks"].launch(
            links, "wire_functions:total", {"value": 10}, world=2, timeout=60
        )
    assert found == [{"rank": k, "sum": 21, "device": "lo"} for k in range(2)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("refuse", r"rank 1 ended with status 1:(.|\n)*ValueError: no such row: 17"),
        ("die", "rank 1 ended with status -9"),
    ],
)
def test_a_failure_of_one_rank_ends_all_and_is_shown(
    wire: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, function: str, words: str
) -> None:
    fork_ranks(monkeypatch, wire["ranks"])
    with wire["links"].loopback() as links, pytest.raises(wire["ranks"].RankError, match=words):
        wire["ranks"].launch(links, f"wire_functions:{function}", {}, world=2, timeout=60)


def test_ranks_that_do_not_end_are_ended(
    wire: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a program in the place of Python that hangs as soon as it starts."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(wire["ranks"].sys, "executable", str(python))
    before = _children()
    words = r"ranks \[0\] did not end in 1 s"
    with wire["links"].loopback() as links, pytest.raises(wire["ranks"].RankError, match=words):
        wire["ranks"].launch(links, "wire_functions:hang", {}, world=1, timeout=1)
    assert _children() <= before
    assert not _is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_ranks_die_with_the_run_and_nothing_stays(
    shaped: ModuleType, tmp_path: Path, end: signal.Signals
) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SAMPLES}"}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        names = parent.stdout.readline().split()
        _wait_until(lambda: len([*tmp_path.iterdir()]) == 1)
        pids = [int(file.read_text()) for file in tmp_path.iterdir()]
        parent.send_signal(end)
        parent.wait(30)
    _wait_until(lambda: not any(map(_is_alive, pids)))
    assert len(names) == 2
    shaped.remove_stale()
    assert not {*names} & {*_namespaces()}


def _wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
