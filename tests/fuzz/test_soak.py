"""The soak: each part runs and finds faults that are made on purpose, and old findings stay mended.

A finding of `make soak` becomes a test once it is mended: move its file from `build/soak/` to
`tests/fuzz/soak_cases/`, and name the file after the fault.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

FUZZ = Path(__file__).parents[2] / "fuzz"
CASES = Path(__file__).parent / "soak_cases"
PARTS = (
    *("round-trips", "lies", "stores", "kills", "changes", "forks", "crowds"),
    *("bounded", "updates"),
)
N_CASES = 2  # of each part
TENSOR = {"dtype": "BF16", "shape": [64, 50], "kind": "weights", "seed": 1}
FRAME = {"kind": "frame", "level": "default", "threads": 1, "tensor": TENSOR, "base": None,
         "in": "np", "isa": "portable"}  # fmt: skip

FILE = {"tensors": [TENSOR], "threads": 1, "seed": 1, "pause": 0, "wide": False, "after": 0.5}
BROKEN: dict[str, tuple[str, Any, str]] = {
    "round-trips": ("flip", FRAME, "decompress gives other bits"),
    "lies": (
        "lose",
        {"kind": "index", "shards": [[TENSOR]], "index": True, "below": False, "damage": "flip",
         "at": 0.5, "bit": 1, "command": False},
        "unpacked to another folder",
    ),
    "stores": (
        "lose",
        {"kind": "store", "n": 3, "edits": [], "keep": 1, "command": False, "prune first": True},
        "prune removed",
    ),
    "kills": (
        "tear",
        {"kind": "command", "verb": "pack", "tensors": [TENSOR], "folder": False, "old": False,
         "end": {"signal": "SIGKILL", "call": 10**6, "after": False, "naming": True}},
        "is not whole",
    ),
    "changes": (
        "tear",
        {"kind": "file", "verb": "pack", "how": "append", **FILE},
        "cannot be read",
    ),
    "forks": (
        "hang",
        {"kind": "threads", "tasks": ["compress"], "in child": "compress", "delays": [0.01],
         "fresh": False, "limit_s": 1},
        "a child hangs",
    ),
    "crowds": (
        "forget_force",
        {"kind": "outputs", "sources": [[TENSOR]], "verb": "pack", "n": 2, "folder": False,
         "force": False},
        "exit codes [0, 0]",
    ),
    "bounded": (
        "flip",
        {"kind": "plain", "dtype": "F32", "data": "weights", "segments": [[700, 0.001, 7, 0.0]],
         "stochastic": True, "seed": 1, "isa": "portable", "threads": 1, "lost": [], "flips": []},
        "the slow decoder gives other elements",
    ),
    "updates": (
        "lose",
        {"kind": "link", "tensors": [TENSOR], "steps": [["next", 7]], "anchor_every": None,
         "level": "default", "threads": 1, "in place": False, "have it": False,
         "own": False},
        "the receiver names another version",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    """The program."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FUZZ))
        yield import_module("soak")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("soak", "soak_parts", "soak_faults", "claims", "edits"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def try_case(
    soak: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Runs a case. Returns the finding, or None if there is none."""
    scratch, workers = tmp_path_factory.mktemp("soak"), {}

    def run(part: str, case: Any, fault: str | None = None, limit_s: float | None = None) -> Any:
        breaks = None if fault is None else getattr(import_module("soak_faults"), fault)
        worker = workers.setdefault((part, fault), soak.Worker(soak.PARTS[part], scratch, breaks))
        return worker.run(case, limit_s=limit_s).seen

    yield run
    for worker in workers.values():
        worker.close()


def first_cases(soak: ModuleType, part: str, n: int) -> Iterator[Any]:
    """The cases that are drawn first."""
    return (soak.draw_case(soak.PARTS[part], 1, number) for number in range(1, n + 1))


def test_the_parts_are_those(soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--list"]) == 0
    assert tuple(line.split()[0] for line in capsys.readouterr().out.splitlines()) == PARTS


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_is_mended(path: Path, soak: ModuleType) -> None:
    assert soak.replay(path) == 0


@pytest.mark.parametrize("part", PARTS)
def test_cases_go_through_json_and_are_the_same_for_a_seed(part: str, soak: ModuleType) -> None:
    for case, again in zip(first_cases(soak, part, 30), first_cases(soak, part, 30), strict=True):
        assert json.loads(json.dumps(case)) == case == again


@pytest.mark.parametrize("part", PARTS)
def test_a_part_finds_nothing(part: str, soak: ModuleType, try_case: Callable[..., Any]) -> None:
    for case in first_cases(soak, part, N_CASES):
        seen = try_case(part, case)
        assert seen is None, f"{case}\n{seen.text}\n{seen.trace}"


# Operations that are broken on purpose.


@pytest.mark.parametrize("part", PARTS)
def test_a_part_finds_what_is_broken(part: str, try_case: Callable[..., Any]) -> None:
    fault, case, words = BROKEN[part]
    seen = try_case(part, case, fault)
    assert seen is not None
    assert seen.kind == "wrong"
    assert words in seen.text


@pytest.mark.parametrize(("fault", "kind"), [("hang", "hang"), ("crash", "crash"),
                                             ("explode", "memory")])  # fmt: skip
def test_processes_are_watched(fault: str, kind: str, try_case: Callable[..., Any]) -> None:
    seen = try_case("round-trips", FRAME, fault, limit_s=1 if fault == "hang" else None)
    assert seen.kind == kind
    assert "soak_faults.py" in seen.trace
    assert try_case("round-trips", FRAME) is None


def test_a_finding_is_kept_and_runs_again(
    soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = soak.PARTS["round-trips"]
    run = soak.Soak([part], 1, tmp_path, import_module("soak_faults").flip)
    run.run(1)
    while not list(tmp_path.glob("found-*.json")):  # a busy machine may have begun one case alone
        run.run(1)
    assert run.summarize() == 1
    printed = capsys.readouterr().out
    kept = {path: soak.load_finding(path) for path in tmp_path.glob("found-*.json")}
    assert all(f"--replay {path}" in printed for path in kept)
    path = min(kept)
    assert kept[path].case == soak.draw_case(part, 1, kept[path].number)
    assert soak.replay(path) == 0, "it is not the package that is broken"


def test_a_file_that_is_no_finding_is_refused(soak: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"part": "lies"}')
    with pytest.raises(ValueError, match="not a finding of the soak"):
        soak.replay(path)
