"""Fuzz the small files of snapshot stores: manifests, the store's own file, and catalogue pages.

Manifests of distributed checkpoints are fuzzed too. An input is a control byte and a JSON object
without its checksum, which the target puts in front. The two low bits of the first byte choose
what the object is:

0, 1. the manifest of a snapshot in the store of sample_store.py, which is then read in all ways;
2. the manifest of a distributed checkpoint (of a snapshot where PyTorch is missing);
3. `store.json`.

Bit 2 says that the input is the whole file, with its checksum. Bit 3 makes it a page: six counts,
the lengths of two parts, and three parts, which the target compresses and seals. The page lies in
a store of good manifests, whose snapshots must be restored whatever the page says.

A file that is refused must give a documented error. A file that is accepted must have the same
content when it is written and read again. No reader may allocate memory only because a manifest
asks for it.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import harness
import zstandard
from harness import PackhorseError

if find_spec("torch") is not None:
    import torch  # noqa: F401  before modules that import it are instrumented

with harness.instrumented():
    from packhorse.codecs.content import crc32c
    from packhorse.disk.snapshots import SnapshotStore
    from packhorse.disk.snapshots.manifest import (
        parse_manifest,
        parse_store_file,
        render_manifest,
        render_store_file,
    )
    from packhorse.disk.snapshots.names import ManifestFile, parse_manifest_file
    from packhorse.disk.snapshots.records import decode_page, encode_page

    if find_spec("torch") is not None:
        from packhorse.disk.dcp import checkpoint_manifest as checkpoint
from edits import edit_json, sealed, sealed_checkpoint
from sample_store import build_store

_SHARE_OF_JSON = 0.7  # of all mutations
# Messages that a ValueError of the store may have.
_NO_SUCH_THING = ("no snapshot is named", "has nothing at")
_FOLDER = harness.scratch_folder() / "store"
_FILE = ManifestFile("step-2", 3, 1, "0" * 16)
build_store(_FOLDER)
_WHOLE = _FOLDER.with_name("whole")
shutil.copytree(_FOLDER, _WHOLE)
shutil.rmtree(_FOLDER / "snapshots")
shutil.rmtree(_FOLDER / "catalog")
_NAMES = SnapshotStore(_WHOLE).names()


def main(data: bytes) -> None:
    """Run one input."""
    control, text = data[0] if data else 0, data[1:]
    form = control & 3
    if control & 8:
        check_page(text if control & 4 else sealed_page(text))
        return
    if form == 2 and find_spec("torch") is not None:
        check_checkpoint(text if control & 4 else sealed_checkpoint(text))
        return
    text = text if control & 4 else sealed(text)
    if form == 3:
        outcome(lambda: parse_store_file(text, "store.json"))
    else:
        check_snapshot(text)


def sealed_page(data: bytes) -> bytes:
    """A page of the catalogue."""
    *counts, first, second = struct.unpack("<8I", data[:32].ljust(32, b"\0"))
    cuts = (32, 32 + first, 32 + first + second)
    raw = (data[cuts[0] : cuts[1]], data[cuts[1] : cuts[2]], data[cuts[2] :])
    parts = [zstandard.compress(part) for part in raw]
    rest = struct.pack("<9I", *counts, *map(len, parts)) + b"".join(parts)
    return struct.pack("<4sII", b"\x89PHC", 1, crc32c(rest)) + rest


def check_page(data: bytes) -> None:
    """Decode a page, write it again, and use it."""
    page = outcome(lambda: decode_page(data))
    if page is not None:
        again = encode_page(page.records())
        assert again is not None, "a page that was read cannot be written"
        assert encode_page(decode_page(again).records()) == again, "it changes with each writing"
    for path in (_WHOLE / "catalog").iterdir():
        path.unlink()
    (_WHOLE / "catalog" / f"{0:016x}.bin").write_bytes(data)
    store = SnapshotStore(_WHOLE, threads=1)
    assert [each.name for each in store.overview().snapshots] == _NAMES
    assert store.lineage(_NAMES[-1]).info == store.info(_NAMES[-1])


def check_snapshot(text: bytes) -> None:
    """Parse a manifest in a store, write it again, and use it."""
    file = file_of(text)
    manifest = outcome(lambda: parse_manifest(text, file, "m"))
    if manifest is not None:
        again = parse_manifest(render_manifest(manifest), file, "m")
        assert again == manifest, "its content changes when it is written again"
    path = _FOLDER / file.path
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    try:
        use_store(file.snapshot, is_good=manifest is not None)
    finally:
        shutil.rmtree(_FOLDER / "snapshots")


def file_of(text: bytes) -> ManifestFile:
    """The name that a manifest gives itself, if a file can have that name."""
    try:
        document = json.loads(text)
        name, order, generation = (document[key] for key in ("name", "order", "generation"))
        file = ManifestFile(name, order, generation, "0" * 16)
        if type(order) is type(generation) is int:
            return parse_manifest_file(file.path.removeprefix("snapshots/")) or _FILE
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return _FILE


def use_store(name: str, *, is_good: bool) -> None:
    """Read a snapshot in all ways."""
    store = SnapshotStore(_FOLDER, threads=1)
    assert outcome(store.names) == [name]
    info = outcome(lambda: store.info(name))
    assert (info is not None) == is_good
    state = outcome(lambda: store.restore(name, max_nbytes=harness.MAX_NBYTES))
    problems = outcome(lambda: store.verify(name))
    if problems == []:
        small = info.nbytes <= harness.MAX_NBYTES
        assert state is not None or not small, "a snapshot that was verified cannot be restored"
    outcome(lambda: store.diff(name, name))


def check_checkpoint(text: bytes) -> None:
    """Parse the manifest of a checkpoint, and write it again."""
    metadata = outcome(lambda: checkpoint.parse_manifest(text, "m"))
    if metadata is not None:
        again = checkpoint.parse_manifest(checkpoint.render_manifest(metadata), "m")
        assert again == metadata, "its content changes when it is written again"


def outcome(work: Callable[[], Any]) -> Any:
    """The result of a call, or None for a documented error."""
    try:
        return work()
    except PackhorseError:
        return None
    except ValueError as error:
        if not any(words in str(error) for words in _NO_SUCH_THING):
            raise
        return None


def mutate(data: bytes, max_nbytes: int, seed: int) -> bytes:
    """Mutate bytes as libFuzzer does, or one value of a JSON document."""
    rng = random.Random(seed)
    if rng.random() < _SHARE_OF_JSON:
        try:
            edited = data[:1] + edit_json(json.loads(data[1:]), rng)
        except (ValueError, RecursionError):
            edited = b""
        if 0 < len(edited) <= max_nbytes:
            return edited
    return harness.mutate_bytes(data, max_nbytes)


if __name__ == "__main__":
    parse_store_file(render_store_file(), "store.json")
    harness.fuzz(main, mutate)
