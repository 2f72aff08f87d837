"""Processes that are ended while they write: a store, a checkpoint, the output of the command.

They end themselves at a call that changes files, or are ended at some moment. Afterwards,
everything that was acknowledged must be readable, no half-written file may have its final name, the
source must be unchanged, and the next run must succeed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from cli_samples import COMMAND
from snapshot_child import make_state, write_until_killed
from snapshot_ledger import Ledger
from snapshot_samples import assert_same

from packhorse.cli.signals import ENDING, stop_start
from packhorse.disk import SnapshotStore, verify_file, verify_folder
from soak_parts.case import Case, Part, Place, claim
from soak_parts.children import Ended, end_at_call, start_child
from soak_parts.samples import digest, draw_tensors, write_file, write_folder

__all__ = ["PART"]

_SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGINT")
_LIMIT_S = 30.0
_CHILD_FAILED = 1  # Python's exit code after an exception
_VERBS = ("pack", "pack", "unpack", "take", "prune", "restore")


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    kind = rng.choice(["store"] * 3 + ["checkpoint"] * 2 + ["command"] * 4 + ["process"])
    return {"kind": kind, **_DRAWN[kind](rng)}


def run(case: Case, place: Place) -> None:
    """Run a case."""
    _RUN[case["kind"]](case, place)


def _draw_end(rng: Random, most: int) -> Case:
    """Draw when and how a process ends: at a call, or after some seconds."""
    end: Case = {"signal": rng.choice(_SIGNALS)}
    if rng.random() < 0.8:
        naming = rng.random() < 0.5  # few of all calls change names, but they are the critical ones
        call = rng.randrange(most // 4 if naming else most)
        return {**end, "call": call, "after": rng.random() < 0.5, "naming": naming}
    return {**end, "seconds": rng.choice((0.005, 0.05, 0.3)) * rng.random()}


def _run_until_ended(work: Callable[[], Any], end: Case, place: Place) -> Ended:
    """A child that does something until it is ended, or done."""
    number = signal.Signals[end["signal"]]

    def until_ended() -> Any:
        if "call" in end:
            end_at_call(end["call"], number, after=end["after"], naming=end["naming"])
        return work()

    child = start_child(until_ended, place.folder)
    if "seconds" in end:
        time.sleep(end["seconds"])
        child.end(number)
    ended = child.wait(_LIMIT_S, again=number)
    if ended.code:
        place.kill()
    return ended


# Stores.


def _draw_store(rng: Random) -> Case:
    ends = [_draw_end(rng, 150) for _ in range(4)]
    return {"seed": rng.getrandbits(32), "ends": ends}


def _store(case: Case, place: Place) -> None:
    """Writers that are ended one after the other, then a writer that is not ended."""
    folder, log, ledger = place.folder / "store", place.folder / "log", Ledger()
    for i, end in enumerate(case["ends"]):
        names, seed = list(ledger.seeds), case["seed"] + i
        log.write_bytes(b"")

        def write(names: list[str] = names, seed: int = seed) -> None:
            write_until_killed(str(folder), str(log), seed, names)

        ended = _run_until_ended(write, end, place)
        claim(ended.code, "a writer ended normally that should have been killed")
        ledger.read(log.read_text().split("\n")[:-1])
        ledger.check(SnapshotStore(folder), place.operations.restore)
    writer = SnapshotStore(folder)
    place.operations.take(writer, "after", make_state(1))
    claim(writer.verify() == [], "verify finds something after writers were killed")
    needed = {pack for path in folder.glob("snapshots/*/*.json")
              for pack in json.loads(path.read_bytes())["packs"]}  # fmt: skip
    left = {path.name.partition(".")[0] for path in folder.glob("packs/*")} - needed
    claim(not left and not list(folder.rglob(".packhorse-*")), f"killed writers leave {left}")


# Checkpoints of PyTorch.


def _draw_checkpoint(rng: Random) -> Case:
    return {"ends": [_draw_end(rng, 25) for _ in range(4)], "based": rng.random() < 0.5}


def _checkpoint(case: Case, place: Place) -> None:
    """Saves over the last checkpoint, which are ended: either the old checkpoint is intact, or the
    new one is."""
    from dcp_samples import save

    folder, reports = place.folder / "run", place.folder / "reports"
    reports.mkdir()
    (reports / "0").mkdir()
    base = str(folder) if case["based"] else None
    save(_numbered(0), folder, threads=1)
    last = 0
    for end in case["ends"]:

        def save_on(first: int = last + 1) -> None:
            for number in count(first):
                save(_numbered(number), folder, overwrite=True, base=base, threads=1)
                (reports / f"{number}").mkdir()

        ended = _run_until_ended(save_on, end, place)
        claim(ended.code, "a process ended normally that should have been killed")
        reported = max(last, *(int(path.name) for path in reports.iterdir()))
        found = _load(folder)
        n = found["n"]
        claim(n in (reported, reported + 1), f"{reported} was saved, and {n} is there")
        assert_same(found, _numbered(n))
        last = n
    save(_numbered(0), folder, overwrite=True, threads=1)
    claim(len(list(folder.iterdir())) == 2, f"leftovers: {sorted(os.listdir(folder))}")


def _numbered(n: int) -> dict[str, Any]:
    import torch

    state = make_state(n)
    return {"n": n, "weights": torch.from_numpy(state["weights"]), "half": torch.full((9,), n)}


def _load(folder: Path) -> dict[str, Any]:
    from dcp_samples import blank, load

    found: dict[str, Any] = blank(_numbered(0))
    load(found, folder, threads=1)
    return found


# The command.


def _draw_command(rng: Random) -> Case:
    folder, old = rng.random() < 0.4, rng.random() < 0.4
    specs = draw_tensors(rng, rng.randint(1, 6), in_file=True)
    return {"verb": rng.choice(_VERBS), "tensors": specs, "folder": folder, "old": old,
            "end": _draw_end(rng, 60), "shards": [specs], "index": True, "below": True}  # fmt: skip


def _command(case: Case, place: Place) -> None:
    """A verb of the command that is ended, and then run again."""
    work = place.folder / "work"
    work.mkdir()
    args, output, check = _prepare(case, work, place)
    before = digest(work)
    old = digest(output) if output.exists() else None

    def run_command() -> Any:
        for number in ENDING:  # as the installed command does before it imports anything
            signal.signal(number, stop_start)
        return place.operations.command(args)

    ended = _run_until_ended(run_command, case["end"], place)
    _check_end(ended, case["end"])
    now = {path: mark for path, mark in digest(work).items() if not _is_output(path, output, work)}
    kept = {path: mark for path, mark in before.items() if not _is_output(path, output, work)}
    claim(kept.items() <= now.items(), "the source was changed")
    if case["end"]["signal"] != "SIGKILL":
        left = [path.name for path in work.rglob(".packhorse-*")]
        claim(not left, f"{args}: a signal that can be answered leaves {left}")
    if ended.code == 0:
        check()
        return
    if old is not None:
        claim(output.exists(), f"{args}: the output that was to be replaced is gone")
        if digest(output) != old:
            check()
    elif output.exists() and case["verb"] not in ("take", "prune"):
        check()
    again = args if old is not None or not output.exists() else [*args, "--force"]
    child = start_child(lambda: place.operations.command(again), place.folder)
    ended = child.wait(_LIMIT_S)
    claim(ended.is_good or _is_done_before(case, ended), f"again: {again}: {ended.last_line}")
    check()


def _is_done_before(case: Case, ended: Ended) -> bool:
    """Whether the run took its snapshot, because it was ended only after its last step."""
    return case["verb"] == "take" and "already" in ended.err


def _is_output(path: str, output: Path, work: Path) -> bool:
    return path.split(os.sep)[0] == output.relative_to(work).parts[0] or ".packhorse-" in path


def _check_end(ended: Ended, end: Case) -> None:
    number = signal.Signals[end["signal"]]
    codes = {0, -number, 128 + number}
    claim(ended.code in codes, f"exit code {ended.code} after {end}: {ended.last_line}", ended.err)
    claim("Traceback" not in ended.err, f"a traceback after {end}: {ended.last_line}", ended.err)


def _prepare(case: Case, work: Path, place: Place) -> tuple[list[str], Path, Callable[[], None]]:
    """The words of the command, where its output goes, and a check of that."""
    if case["verb"] in ("take", "prune", "restore"):
        return _prepare_snapshots(case, work, place)
    source = work / ("llama" if case["folder"] else "a.safetensors")
    if case["folder"]:
        write_folder(case, source)
    else:
        write_file(source, case["tensors"])
    wanted = digest(source)
    verbs = (place.operations.unpack_folder, verify_folder) if case["folder"] else (
        place.operations.unpack_file, verify_file)  # fmt: skip
    unpack, verify = verbs
    packed, back = work / "out.ph.safetensors", place.folder / "back"

    def check_packed() -> None:
        claim(verify(packed, threads=1) == [], "what stands there is not whole")
        _remove(back)
        unpack(packed, back, threads=1)
        claim(digest(back) == wanted, "what stands there is another")

    def check_unpacked() -> None:
        claim(digest(work / "back.safetensors") == wanted, "what stands there is another")

    force = ["--force"] * case["old"]
    if case["verb"] == "pack":
        if case["old"]:
            place.operations.command(["pack", str(source), "-o", str(packed), "--level", "fast"])
        return ["pack", str(source), "-o", str(packed), *force], packed, check_packed
    place.operations.command(["pack", str(source), "-o", str(packed)])
    output = work / "back.safetensors"
    if case["old"]:
        place.operations.command(["unpack", str(packed), "-o", str(output)])
    return ["unpack", str(packed), "-o", str(output), *force], output, check_unpacked


def _prepare_snapshots(
    case: Case, work: Path, place: Place
) -> tuple[list[str], Path, Callable[[], None]]:
    store, source, output = work / "store", work / "a.safetensors", work / "restored.safetensors"
    write_file(source, case["tensors"])
    taken = SnapshotStore(store, threads=1)
    for n in range(3):
        place.operations.take(taken, f"n{n}", make_state(n))
    wanted = ["n2"] if case["verb"] == "prune" else ["n0", "n1", "n2"]

    def check() -> None:
        reader = SnapshotStore(store, threads=1)
        for name in wanted:
            assert_same(place.operations.restore(reader, name), make_state(int(name[1:])))
        claim(reader.verify() == [], "verify finds something")

    if case["verb"] == "take":
        return ["snapshot", "take", str(store), "new", str(source)], store, check
    if case["verb"] == "prune":
        return ["snapshot", "prune", str(store), "--keep", "1", "--yes"], store, check
    args = ["snapshot", "restore", str(store), "n1", "-o", str(output)]
    return args, output, check


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


# The command as a program, ended at any moment, even while it starts.


def _draw_process(rng: Random) -> Case:
    return {"tensors": draw_tensors(rng, 2), "seconds": rng.random() * 0.8,
            "signal": rng.choice(("SIGTERM", "SIGINT", "SIGKILL"))}  # fmt: skip


def _process(case: Case, place: Place) -> None:
    """The program prints one line or none, ends with the documented code, and leaves no output or a
    whole one."""
    source, output = place.folder / "a.safetensors", place.folder / "out.ph.safetensors"
    write_file(source, case["tensors"])
    args = [str(COMMAND), "pack", str(source), "-o", str(output)]
    child = start_child(lambda: os.execv(args[0], args), place.folder)
    time.sleep(case["seconds"])
    child.end(signal.Signals[case["signal"]])
    ended = child.wait(_LIMIT_S)
    place.kill()
    err = ended.err
    if "Traceback" in err and f'{os.sep}start.py", line' not in err:
        return  # Python was still starting or importing the package: `main` had not begun
    claim(len(err.splitlines()) <= 1, f"after {case['seconds']:.3f} s: {ended.last_line}", err)
    _check_end(ended, case)
    if output.exists():
        claim(verify_file(output) == [], "what stands there is not whole")


_DRAWN: dict[str, Callable[[Random], Case]] = {
    "store": _draw_store,
    "checkpoint": _draw_checkpoint,
    "command": _draw_command,
    "process": _draw_process,
}
_RUN: dict[str, Callable[[Case, Place], None]] = {
    "store": _store,
    "checkpoint": _checkpoint,
    "command": _command,
    "process": _process,
}
PART = Part(
    "kills", "writers of stores, checkpoints and files that are ended at any moment", draw, run,
    limit_s=180.0, is_exact=False,
)  # fmt: skip
