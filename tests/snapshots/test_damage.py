"""A damaged store: the error names snapshot, tensor and file; other snapshots stay readable."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from snapshot_samples import assert_same, signed

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots.manifest import parse_manifest, render_manifest
from packhorse.disk.snapshots.names import parse_manifest_file
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError

RNG = np.random.default_rng(0)
OLD = {"w": RNG.standard_normal(3000).astype(np.float32), "n": 1}
NEW = {"model": {"w": RNG.standard_normal(5000), "b": torch.ones(70)}, "n": 2}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store to be copied: taking waits for the disk."""
    folder = tmp_path_factory.mktemp("taken") / "store"
    writer = SnapshotStore(folder)
    writer.take("old", OLD)
    writer.take("new", NEW)
    return folder


@pytest.fixture
def store(tmp_path: Path, taken: Path) -> Path:
    """A store of the snapshots "old" and "new", which share nothing."""
    return shutil.copytree(taken, tmp_path / "store")


def manifest_of(store: Path, name: str) -> Path:
    (path,) = (store / "snapshots" / name).iterdir()
    return path


def pack_of(store: Path, name: str) -> Path:
    (pack,) = json.loads(manifest_of(store, name).read_text())["packs"]
    return store / "packs" / f"{pack}.ph.safetensors"


def change_manifest(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = manifest_of(store, "new")
    document = json.loads(path.read_text())
    assert signed(document) == path.read_bytes()
    change(document)
    path.write_bytes(signed(document))


def check_refused(
    store: Path, words: str, kind: type[PackhorseError] = CorruptionError
) -> PackhorseError:
    """The snapshot "new" is refused with this message, and "old" is unchanged."""
    reader = SnapshotStore(store)
    assert reader.names() == ["old", "new"]
    with pytest.raises(kind, match=rf"(?s)snapshot 'new'.*{words}") as caught:
        reader.restore("new")
    assert type(caught.value) is kind
    assert_same(reader.restore("old"), OLD)
    problems = reader.verify()
    assert {problem.snapshot for problem in problems} == {"new"}
    assert any(re.search(words, problem.message) for problem in problems)
    assert all(str(store) in problem.message for problem in problems)
    assert reader.verify("old") == []
    return caught.value


# Packs.


def test_a_flipped_bit_is_told_with_tensor_and_file(store: Path) -> None:
    pack = pack_of(store, "new")
    data = bytearray(pack.read_bytes())
    at = data.rindex(b"\x89PHF") - 1000 if data.count(b"\x89PHF") > 1 else len(data) - 100
    data[at] ^= 4
    pack.write_bytes(data)
    error = check_refused(store, r"model\.w.*chunk 0 of 1.*checksum")
    assert str(pack) in str(error)
    (problem,) = SnapshotStore(store).verify("new")
    assert (problem.tensor, problem.file) == ("model.w", str(pack))
    # Undamaged parts can still be read.
    assert_same(
        SnapshotStore(store).restore("new", keys=["model.b", "n"]),
        {"model": {"b": NEW["model"]["b"]}, "n": 2},
    )


def test_every_flipped_bit_of_a_pack_is_noticed_or_harmless(tmp_path: Path) -> None:
    state = {"a": np.arange(40, dtype=np.int16), "b": np.float32(range(30))}
    SnapshotStore(tmp_path).take("x", state)
    pack = pack_of(tmp_path, "x")
    good = pack.read_bytes()
    for at in range(0, len(good), 2):
        data = bytearray(good)
        data[at] ^= 1 << at // 2 % 8
        pack.write_bytes(data)
        reader = SnapshotStore(tmp_path)
        assert reader.verify("x"), at
        try:
            found = reader.restore("x")
        except (CorruptionError, CompatibilityError):
            continue
        assert_same(found, state)


def test_every_truncation_of_a_pack_is_noticed(store: Path) -> None:
    pack = pack_of(store, "new")
    good = pack.read_bytes()
    for nbytes in [0, 1, 7, 8, 100, 319, 320, 400, len(good) // 2, len(good) - 1]:
        pack.write_bytes(good[:nbytes])
        reader = SnapshotStore(store)
        with pytest.raises(CorruptionError, match=rf"snapshot 'new'.*{pack.name}.*cut short"):
            reader.restore("new")
        assert reader.verify("new")
        assert_same(reader.restore("old"), OLD)


def test_a_missing_pack_is_named(store: Path) -> None:
    pack = pack_of(store, "new")
    pack.unlink()
    check_refused(store, rf"{pack.name}: the pack does not exist")
    with pytest.raises(
        CorruptionError, match=r"snapshot 'new': tensor 'model\.w': .*the pack does not"
    ):
        SnapshotStore(store).restore("new")


def test_a_pack_of_another_snapshot_is_not_mistaken(store: Path) -> None:
    writer = SnapshotStore(store)
    writer.take("other", {"model": {key: -value for key, value in NEW["model"].items()}})
    shutil.copy(pack_of(store, "other"), pack_of(store, "new"))
    writer.delete("other")
    check_refused(store, r"the frame holds F64 of shape \[5000\] with content hash")


def test_a_damaged_pack_is_not_built_upon(store: Path) -> None:
    pack = pack_of(store, "new")
    pack.write_bytes(pack.read_bytes()[:600])
    writer = SnapshotStore(store)
    info = writer.take("again", NEW)
    assert info.stored_nbytes > 30_000
    assert_same(writer.restore("again"), NEW)
    assert writer.verify("again") == []


# Manifests.


def test_every_flipped_bit_and_truncation_of_a_manifest_is_noticed(store: Path) -> None:
    path = manifest_of(store, "new")
    good = path.read_bytes()
    for at in range(0, len(good), 13):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        for bad in (data, good[:at]):
            path.write_bytes(bad)
            reader = SnapshotStore(store)
            assert reader.names() == ["old", "new"]
            for call in (reader.info, reader.restore):
                with pytest.raises(CorruptionError, match=rf"snapshot 'new': .*{path.name}"):
                    call("new")
    path.write_bytes(good + b" ")
    check_refused(store, "checksum")


def test_a_missing_manifest_leaves_the_others(store: Path) -> None:
    manifest_of(store, "new").unlink()
    reader = SnapshotStore(store)
    assert reader.names() == ["old"]
    with pytest.raises(ValueError, match="no snapshot is named 'new'"):
        reader.restore("new")
    assert reader.verify() == []


def test_a_manifest_under_another_name_is_refused(store: Path) -> None:
    path = manifest_of(store, "old")
    (store / "snapshots" / "copy").mkdir()
    shutil.copy(path, store / "snapshots" / "copy" / path.name)
    with pytest.raises(CorruptionError, match="name is 'old', but the file's name says 'copy'"):
        SnapshotStore(store).restore("copy")
    path.rename(path.with_name("000000000009" + path.name[12:]))
    with pytest.raises(CorruptionError, match="order is 1, but the file's name says 9"):
        SnapshotStore(store).restore("old")


def setter(*keys: Any) -> Callable[[dict[str, Any]], object]:
    """A change that sets document[k0][k1]... to the last argument."""
    *path, last, value = keys

    def change(document: Any) -> None:
        for key in path:
            document = document[key]
        document[last] = value

    return change


HASH = "0" * 32
LIES = [
    (setter("kind", "x"), "kind is 'x'"),
    (setter("version", 0), "version is 0"),
    (setter("version", True), "version is True"),
    (setter("time", "yesterday"), "time is 'yesterday'"),
    (setter("time", "2026-11-21T16:20:00.1234567Z"), "time is '2026"),
    (setter("time", "2026-11-21 16:20:00.123456Z"), "time is '2026-11-21 16"),
    (setter("time", "2026-11-21T16:20:00.123456"), "time is '2026-11-21T16:20:00.123456'"),
    (setter("time", "2026-11-21T16:20:00Z"), "time is '2026-11-21T16:20:00Z'"),
    (setter("time", "2026-11-21T16:20:00.1+00:00"), r"time is '2026.*\+00:00'"),
    (setter("time", "2026-11-21T24:00:00.0Z"), "time is '2026-11-21T24"),
    (setter("time", "2026-11-21T16:20:60.0Z"), "time is '2026-11-21T16:20:60"),
    (setter("time", "2026-02-29T16:20:00.0Z"), "time is '2026-02-29"),
    (setter("time", "2026-2-09T16:20:00.0Z"), "time is '2026-2-09"),
    (setter("time", "٢026-02-09T16:20:00.0Z"), "time is"),
    (setter("time", "0000-02-09T16:20:00.0Z"), "time is '0000"),
    (setter("time", "2026-W01-1T16:20:00.0Z"), "time is '2026-W01"),
    (setter("metadata", []), "metadata must be of type dict"),
    (setter("stored_nbytes", -1), "stored_nbytes is -1"),
    (setter("stored_nbytes", "1"), "stored_nbytes must be of type int"),
    (setter("packs", 0, "../../../../etc/passwd"), "not the name of a pack"),
    (setter("packs", 0, 7), "not the name of a pack"),
    (setter("packs", ["0" * 32] * 2), "a name occurs twice"),
    (setter("packs", {}), "packs must be of type list"),
    (setter("frames", None), "frames must be of type list"),
    (setter("frames", 0, None), "frame 0 is None"),
    (setter("frames", 0, []), r"frame 0 is \[\]"),
    (setter("frames", 0, 0, 1), "frame 0: pack is 1"),
    (setter("frames", 0, 0, -1), "frame 0: pack is -1"),
    (setter("frames", 0, 1, 1 << 70), "frame 0: offset"),
    (setter("frames", 0, 1, 65), "multiples of 64"),
    (setter("frames", 0, 1, 1 << 40), "cut short|header has no frame"),
    (setter("frames", 0, 2, 0), "frame 0: nbytes"),
    (setter("frames", 0, 2, 64), "header has no frame|cut short"),
    (setter("frames", 0, 2, 1 << 62), "cut short|header has no frame"),
    (setter("frames", 0, 3, "xyz"), "not a content hash"),
    (setter("frames", 0, 3, HASH.replace("0", "A")), "not a content hash"),
    (setter("frames", 0, 3, HASH), f"{HASH}"),
    (setter("frames", 0, 4, "F31"), "unknown dtype 'F31'"),
    (setter("frames", 0, 4, []), "dtype must be a string"),
    (setter("frames", 0, 5, 1 << 80), "frame 0: numel"),
    (setter("frames", 0, 5, 1.0), "frame 0: numel"),
    (setter("frames", 0, 5, 4999), "but its frame holds 4999"),
    (setter("frames", 0, 6, 0), "frame 0: base is 0"),
    (setter("frames", 1, 6, 0), "frame 1: base is 0"),
    (setter("frames", 0, 6, 2), "frame 0: base is 2"),
    (setter("frames", 0, 6, 1), "its base has 70 elements"),
    (setter("frames", 0, 6, "1"), "frame 0: base is '1'"),
    (lambda d: d["frames"].append(d["frames"][0]), "another frame is at the same place"),
    (lambda d: setter("frames", 1, 1, d["frames"][0][1])(d), "another frame is at the same place"),
    (setter("tensors", 0, 0, "model.v"), "tensor 0 does not have this path"),
    (setter("tensors", 0, 0, 7), "tensor 0 is"),
    (setter("tensors", 0, []), "tensor 0 is"),
    (setter("tensors", 0, 1, "F32"), "its frame holds"),
    (setter("tensors", 0, 1, ["F32"]), "its frame holds"),
    (setter("tensors", 0, 2, [5001]), "its frame holds"),
    (setter("tensors", 0, 2, [-5000]), "a size is -5000"),
    (setter("tensors", 0, 2, [1 << 62, 1 << 62, 0]), "more elements than any memory"),
    (setter("tensors", 0, 2, [1] * 65), "at most 64 sizes"),
    (setter("tensors", 0, 2, "5000"), "shape must be"),
    (setter("tensors", 0, 3, 2), "frame is 2"),
    (setter("tensors", 0, 3, 1), "its frame holds"),
    (lambda d: d["tensors"].pop(), "tensor 1 does not have this path"),
    (lambda d: d["tensors"].append(d["tensors"][0]), "2 tensors, but 3 are listed"),
    (lambda d: d["tensors"].reverse(), "tensor 0 does not have this path"),
    (setter("state", None), "the state is None"),
    (setter("state", 5), "the state is 5"),
    (setter("state", {"float": "7ff0000000000000"}), "not a container"),
    (setter("state", {}), "an object has 0 keys"),
    (setter("state", {"dict": [], "tuple": []}), "an object has 2 keys"),
    (setter("state", {"set": []}), "unknown object"),
    (setter("state", {"dict": {}}), "unknown object"),
    (setter("state", {"dict": [[1]]}), "is not a pair"),
    (setter("state", {"dict": [[[], 1]]}), "a list cannot be a key"),
    (setter("state", {"dict": [[{}, 1]]}), "not an infinity or NaN"),
    (setter("state", {"dict": [["a", 1], ["a", 2]]}), "occurs twice"),
    (setter("state", {"dict": [[1, 1], [1.0, 2]]}), "occurs twice"),
    (setter("state", {"dict": [["a", {"float": "3ff0000000000000"}]]}), "not an infinity or NaN"),
    (setter("state", {"dict": [["a", {"tensor": True}]]}), "unknown object"),
    (
        setter("state", {"dict": [["a", {"tensor": 1}]]}),
        "found tensor 1, but tensor 0 must come next",
    ),
    (setter("state", [json.loads("[" * 80 + "]" * 80)]), "64 deep"),
]


@pytest.mark.parametrize(("change", "words"), LIES, ids=[words for _, words in LIES])
def test_lying_manifests_are_refused(
    store: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    change_manifest(store, change)
    kind = CompatibilityError if "unknown dtype" in words else CorruptionError
    reader = SnapshotStore(store)
    with pytest.raises((CorruptionError, CompatibilityError), match="snapshot 'new'") as caught:
        reader.restore("new")
    assert isinstance(caught.value, kind)
    problems = [problem.message for problem in reader.verify()]
    assert any(re.search(words, text) for text in (*problems, str(caught.value)))
    assert_same(reader.restore("old"), OLD)
    assert SnapshotStore(store).names() == ["old", "new"]


def test_a_manifest_of_an_early_year_can_be_written_again(store: Path) -> None:
    change_manifest(store, setter("time", "0001-02-03T04:05:06.5Z"))
    path = manifest_of(store, "new")
    file = parse_manifest_file(f"new/{path.name}")
    assert file is not None
    manifest = parse_manifest(path.read_bytes(), file, "m")
    text = render_manifest(manifest)
    assert b'"0001-02-03T04:05:06.500000Z"' in text
    assert parse_manifest(text, file, "m") == manifest


def test_a_chain_too_long_is_refused(store: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        pack, offset, *rest, _ = document["frames"][0]
        rows = [[pack, offset + 64 * i, *rest, i + 1] for i in range(70)]
        document["frames"] = [*rows, [pack, offset + 64 * 70, *rest, None]]
        document["tensors"][1][3] = 0
        document["tensors"][0][3] = 0

    change_manifest(store, change)
    check_refused(store, "a chain of more than 64 deltas")


# Versions of the future.


def test_a_newer_store_is_refused_with_the_release_that_reads_it(store: Path) -> None:
    text = (store / "store.json").read_text()
    document = {**json.loads(text), "version": 2, "reader": "0.7.0"}
    (store / "store.json").write_bytes(signed(document))
    other = SnapshotStore(store)
    before = sorted(store.rglob("*"))
    for call in (other.names, lambda: other.take("x", {}), lambda: other.restore("old")):
        with pytest.raises(
            CompatibilityError,
            match=r"store\.json: version 2; .* up to 1; upgrade to packhorse '0\.7\.0'",
        ):
            call()
    assert sorted(store.rglob("*")) == before
    (store / "store.json").write_text(text[:-1])
    with pytest.raises(CorruptionError, match=r"store\.json: the checksum does not match"):
        SnapshotStore(store).names()


def test_a_newer_manifest_is_refused_with_the_release_that_reads_it(store: Path) -> None:
    change_manifest(store, lambda document: document.update(version=3, reader="1.2.0"))
    check_refused(
        store,
        r"version 3; this release reads versions up to 1; upgrade to packhorse '1\.2\.0'",
        CompatibilityError,
    )
    SnapshotStore(store).take("next", NEW)  # another can be taken, and nothing goes
    check = SnapshotStore(store)
    assert check.names() == ["old", "new", "next"]
    assert pack_of(store, "new").exists()


# Errors of the system.


def test_a_full_disk_leaves_the_store_as_it_was(store: Path) -> None:
    """The limit of file sizes stands in for a disk that is full in the middle of a pack."""
    code = """
import numpy as np, resource, signal, sys
from packhorse.disk import SnapshotStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
store = SnapshotStore(sys.argv[1])
state = {"x": np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)}
try: store.take("big", state)
except OSError as error: print(error.errno, error.filename)
future = store.take_async("big", state)
print(type(future.exception()).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.take("small", state)
store.close()
"""
    before = {path for path in store.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(store)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    number, place, kind = done.stdout.split()
    assert (int(number), kind) == (errno.EFBIG, "OSError")
    assert place.startswith(str(store / "packs"))
    reader = SnapshotStore(store)
    assert reader.names() == ["old", "new", "small"]
    assert reader.verify() == []
    new = {path for path in store.rglob("*") if path.is_file()} - before
    assert sorted(path.relative_to(store).parts[0] for path in new) == [
        "catalog", "packs", "snapshots",
    ]  # fmt: skip


def test_a_really_full_and_a_read_only_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        store = SnapshotStore(folder / "store")
        state = {"x": RNG.integers(0, 256, 300_000, np.uint8)}
        store.take("a", state)
        with pytest.raises(OSError, match="No space left") as caught:
            store.take("b", {"x": RNG.integers(0, 256, 2_000_000, np.uint8)})
        assert caught.value.errno == errno.ENOSPC
        assert_same(store.restore("a"), state)
        assert store.verify() == []
        store.take("c", {"x": RNG.integers(0, 256, 300_000, np.uint8)})
        store.delete("a")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            SnapshotStore(folder / "store").take("d", {})
        assert SnapshotStore(folder / "store").verify() == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_lost_permission_is_told(store: Path) -> None:
    (store / "packs").chmod(0o500)
    with pytest.raises(PermissionError, match="packs"):
        SnapshotStore(store).take("x", {"a": np.arange(5)})
    (store / "packs").chmod(0o700)
    assert SnapshotStore(store).names() == ["old", "new"]


def test_verifying_raises_what_the_system_refuses(store: Path) -> None:
    """Lost permissions or a failing disk say nothing about the stored data."""
    reader = SnapshotStore(store)
    names = reader.names()
    own = {frame.pack for frame in reader._catalog.load(names[-1]).frames()}
    for name in names[:-1]:
        own -= {frame.pack for frame in reader._catalog.load(name).frames()}
    real = reader._storage.open

    def open_unless_lost(path: str) -> Any:
        if any(pack in path for pack in own):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    reader._storage.open = open_unless_lost  # type: ignore[method-assign]
    with pytest.raises(PermissionError, match="Permission denied"):
        reader.verify()
    assert reader.verify(names[0]) == []


def test_interrupting_a_take_leaves_nothing(store: Path) -> None:
    def interrupt(nbytes: int) -> None:
        signal.raise_signal(signal.SIGINT)

    writer = SnapshotStore(store)
    before = {path for path in store.rglob("*") if path.is_file()}
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup lets it be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.take("x", {"a": np.arange(5)}, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, old)
    assert {path for path in store.rglob("*") if path.is_file()} == before
    writer.take("x", {"a": np.arange(5)})


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Taking and restoring in place never holds the whole state again."""
    code = """
import numpy as np, resource, sys
from packhorse.disk import SnapshotStore
part = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
state = {str(i): part ^ np.uint8(i) for i in range(16)}
store = SnapshotStore(sys.argv[1], level="fast", threads=2)
store.take("warm", {"x": part})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.take("a", state)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 110_000  # KiB; the state has 262,144


ODD_VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 64, 1 << 63, 10**4000, 1.5, 1e300, "", "a", "0" * 32, "F64"),
    *([], [[]], [1] * 7, {}, {"dict": []}, {"tensor": 0}, {"tuple": [{"tensor": 1}]}),
    {"float": "7ff8000000000000"},
]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a document: its container, and the key in that."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], found)
    return found


def test_random_edits_of_a_manifest_are_refused_or_harmless(tmp_path: Path) -> None:
    """Any manifest with a right checksum causes no errors but the documented ones."""
    store = SnapshotStore(tmp_path)
    for i in range(3):
        store.take(
            "new", {**NEW, "d": {1: np.float32(range(400)) + i, "t": (2.5, [])}}, replace=i > 0
        )
    path = manifest_of(tmp_path, "new")
    good, rng = path.read_text(), random.Random(0)
    n_read = 0
    for _ in range(300):
        document = json.loads(good)
        for _ in range(rng.randint(1, 3)):
            container, key = rng.choice(places(document, []))
            if rng.random() < 0.2:
                del container[key]
            else:
                other = rng.choice(places(document, []))
                choice = rng.choice([rng.choice(ODD_VALUES), other[0][other[1]]])
                container[key] = json.loads(json.dumps(choice))
        path.write_bytes(signed(document))
        reader = SnapshotStore(tmp_path, threads=1)
        reader.verify()
        with suppress(PackhorseError):
            reader.restore("new", max_nbytes=1 << 20)
            n_read += 1
    assert 0 < n_read < 250
