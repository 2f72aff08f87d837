"""Sources that change while they are read, because a thread writes or a file is cut or replaced.

The outcome must be an error, or an output that can be unpacked.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from packhorse import numpy as packhorse_numpy
from packhorse.disk import SnapshotStore, pack_folder, unpack_folder, verify_file, verify_folder
from packhorse.errors import PackhorseError
from soak_parts.case import Case, Part, Place, claim
from soak_parts.children import run_child
from soak_parts.samples import Spec, make_array, write_file

__all__ = ["PART"]

_NUMEL = (1000, 100_000, 1_000_000)
_KINDS = ("weights", "bits", "moments", "few", "zeros", "phrases")
_LIMIT_S = 60.0
_QUIET_S = 0.02  # between the last change of a base and the end of packing
_VERBS_OF_MEMORY = ("compress", "compress_all", "save_file", "take", "take_async")
_VERBS_OF_FILES = ("pack", "pack folder", "take files", "command", "base")
_HOW = ("write", "write", "write", "map", "map", "cut", "append", "replace")


def draw(rng: Random) -> Case:
    """A case of one of the kinds below."""
    tensors = [_draw_large(rng) for _ in range(rng.randint(1, 4))]
    case: Case = {"tensors": tensors, "threads": rng.randint(1, 2), "seed": rng.getrandbits(32),
                  "pause": rng.choice((0, 0, 1e-5, 1e-4)), "wide": rng.random() < 0.3}  # fmt: skip
    if rng.random() < 0.5:
        return {"kind": "memory", "verb": rng.choice(_VERBS_OF_MEMORY), **case}
    return {"kind": "file", "verb": rng.choice(_VERBS_OF_FILES), "how": rng.choice(_HOW),
            "after": rng.random() * 0.01, **case}  # fmt: skip


def _draw_large(rng: Random) -> Spec:
    dtype = rng.choice(("BF16", "F32", "U8", "F64"))
    numel, kind = rng.choice(_NUMEL), rng.choice(_KINDS)
    return {"dtype": dtype, "shape": [8, numel // 8], "kind": kind, "seed": rng.getrandbits(32)}


def run(case: Case, place: Place) -> None:
    """Run a case."""
    if case["kind"] == "memory":
        _memory(case, place)
        return
    ended = run_child(lambda: _file(case, place), place.folder, limit_s=_LIMIT_S)
    if ended.code == -signal.SIGBUS and case["how"] in ("cut", "replace"):
        place.kill()  # a signal like this ends any reader whose mapped file is cut
        return
    words = f"{case['verb']} of a file that changes ({case['how']}): {ended.last_line}"
    claim(ended.code in (0, 1), words, ended.err)
    if ended.is_good:
        place.accept()
    else:
        place.refuse()


# Tensors in memory.


def _memory(case: Case, place: Place) -> None:
    arrays = [make_array(spec) for spec in case["tensors"]]
    verb, folder = case["verb"], place.folder
    state = {f"t{i}": array for i, array in enumerate(arrays)}
    with _changing(case, [array.reshape(-1).view(np.uint8) for array in arrays]):
        try:
            packed = _pack_memory(case, place, state)
        except (PackhorseError, RuntimeError, ValueError, OSError):
            packed = None
    if packed is None:
        place.refuse()
        claim(not (folder / "out").exists(), f"{verb} was refused, and left its output")
        return
    place.accept()
    if verb.startswith("compress"):
        for frame in packed:
            frame.verify(threads=1)
            place.operations.decompress(frame)
    elif verb == "save_file":
        claim(verify_file(folder / "out") == [], "a file that was saved cannot be read")
        packhorse_numpy.load_file(folder / "out")
    else:
        reader = SnapshotStore(folder / "store")
        place.operations.restore(reader, "a")
        claim(reader.verify() == [], "what was taken is not restored")


def _pack_memory(case: Case, place: Place, state: dict[str, np.ndarray]) -> Any:
    verb, arrays, threads = case["verb"], list(state.values()), case["threads"]
    if verb == "compress":
        return [place.operations.compress(array, threads=threads) for array in arrays]
    if verb == "compress_all":
        return packhorse_numpy.compress_all(arrays, threads=threads)
    if verb == "save_file":
        packhorse_numpy.save_file(state, place.folder / "out", threads=threads)
        return True
    store = SnapshotStore(place.folder / "store", threads=threads)
    if verb == "take":
        return place.operations.take(store, "a", state)
    with store:
        return store.take_async("a", state).result()


class _Changer(threading.Thread):
    """A thread that changes something until it is stopped, or for some time.

    Attributes:
        ended: the time of its last change, once it has ended.
    """

    def __init__(self, change: Callable[[Random], None], case: Case, seconds: float) -> None:
        super().__init__(daemon=True)
        self._change = change
        self._rng = Random(case["seed"])
        self._pause = case["pause"]
        self._until = time.monotonic() + seconds
        self._done = threading.Event()
        self.ended = math.inf

    def run(self) -> None:
        while not self._done.is_set() and time.monotonic() < self._until:
            self._change(self._rng)
            if self._pause:
                time.sleep(self._pause)
        self.ended = time.monotonic()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _changing(case: Case, places: list[Any], seconds: float = math.inf) -> _Changer:
    """A thread that writes to all of these places."""
    width = 4096 if case["wide"] else 1

    def change(rng: Random) -> None:
        for place in places:
            at = rng.randrange(len(place))
            stop = min(at + width, len(place))
            place[at:stop] = rng.randrange(256)

    return _Changer(change, case, seconds)


# Files. These cases run in a child, because a file that is cut may end the process.


def _file(case: Case, place: Place) -> int:
    """The exit code: 0 if the outcome is whole, 1 if the change was reported."""
    folder = place.folder / "source"
    folder.mkdir()
    source, base = folder / "a.safetensors", folder / "base.safetensors"
    write_file(source, case["tensors"])
    if case["verb"] == "base":
        write_file(base, [{**spec, "kind": "weights"} for spec in case["tensors"]])
    changed, before = (base, place.folder / "before") if base.exists() else (source, None)
    if before is not None:
        shutil.copy(base, before)
    with _changing_file(case, changed) as changer:
        try:
            code = _pack_source(case, place, source, base)
        except (PackhorseError, RuntimeError, ValueError, OSError) as error:
            code = 1
            is_named = str(folder) in str(error) or re.search(r"\bt\d", str(error))
            claim(is_named, f"neither file nor tensor is named: {error!r}")
        is_quiet = time.monotonic() - changer.ended > _QUIET_S
    if code == 0 and before is not None:
        _check_based(place, [base, before], is_quiet)
    elif code == 0:
        _check_packed(case, place)
    else:
        left = [path.name for path in place.folder.iterdir() if path.name.startswith("out")]
        claim(not left, f"a source was refused, but an output was written: {left}")
    return int(code != 0)


def _pack_source(case: Case, place: Place, source: Path, base: Path) -> int:
    verb, out, threads = case["verb"], place.folder / "out.ph.safetensors", case["threads"]
    if verb == "pack":
        place.operations.pack_file(source, out, threads=threads)
    elif verb == "base":
        place.operations.pack_file(source, out, threads=threads, base=base)
    elif verb == "pack folder":
        pack_folder(source.parent, out, threads=threads)
    elif verb == "take files":
        store = SnapshotStore(place.folder / "store", threads=threads)
        store.take_files("a", [source])
    else:
        return place.operations.command(["pack", str(source), "-o", str(out)])
    return 0


def _check_packed(case: Case, place: Place) -> None:
    """Check that what was written without an error can be unpacked."""
    verb, out, back = case["verb"], place.folder / "out.ph.safetensors", place.folder / "back"
    if verb == "take files":
        reader = SnapshotStore(place.folder / "store")
        place.operations.restore(reader, "a")
        claim(reader.verify() == [], "what was taken is not restored")
    elif verb == "pack folder":
        claim(verify_folder(out) == [], "what was packed cannot be read")
        unpack_folder(out, back)
    else:
        claim(verify_file(out) == [], "what was packed cannot be read")
        place.operations.unpack_file(out, back)


def _check_based(place: Place, bases: list[Path], is_quiet: bool) -> None:
    """Check that a file packed against a changing base can be unpacked with the base before or
    after the change, unless the base has changed again since."""
    out, back = place.folder / "out.ph.safetensors", place.folder / "back"
    problems: list[Any] = []
    for base in bases:
        try:
            problems = verify_file(out, base=base)
        except PackhorseError as error:  # the base is not a valid file any more
            problems = [error]
        if not problems:
            place.operations.unpack_file(out, back, base=base)
            return
    claim(not is_quiet, f"no version of the base unpacks it: {problems}")


@contextmanager
def _changing_file(case: Case, path: Path) -> Iterator[_Changer]:
    """Change the file as the case says; a base only for a while."""
    how, size = case["how"], path.stat().st_size
    seconds = case["after"] if case["verb"] == "base" else math.inf
    if how == "map":
        with (
            path.open("r+b") as file,
            mmap.mmap(file.fileno(), size) as mapped,
            _changing(case, [_Tail(mapped, size // 4)], seconds) as changer,
        ):
            yield changer
    elif how == "write":
        with path.open("r+b") as file:
            descriptor = file.fileno()

            def write(rng: Random) -> None:
                os.pwrite(descriptor, rng.randbytes(9), rng.randrange(size // 4, size))

            with _Changer(write, case, seconds) as changer:
                yield changer
    else:
        once = _Changer(lambda rng: _change_once(case, path, rng), case, case["after"])
        with once as changer:
            yield changer


class _Tail:
    """The bytes of a mapped file behind its header."""

    def __init__(self, mapped: mmap.mmap, start: int) -> None:
        self._mapped = mapped
        self._start = start

    def __len__(self) -> int:
        return len(self._mapped) - self._start

    def __setitem__(self, where: slice, value: int) -> None:
        n = where.stop - where.start
        at = self._start + where.start
        self._mapped[at : at + n] = bytes([value]) * n


def _change_once(case: Case, path: Path, rng: Random) -> None:
    """Change a file after a while, permanently."""
    how = case["how"]
    time.sleep(case["after"])
    if how == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif how == "append":
        with path.open("ab") as file:
            file.write(b"more")
    else:
        new = path.with_name("new")
        new.write_bytes(path.read_bytes()[::-1])
        new.replace(path)


PART = Part(
    "changes", "sources that change while they are read", draw, run, limit_s=120.0, is_exact=False
)
