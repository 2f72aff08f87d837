"""The catalogue: a store opens without parsing its manifests; a wrong catalogue does no harm."""

import gc
import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from snapshot_samples import assert_same

from packhorse.codecs.content import crc32c
from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots import catalog, finder, index, records
from packhorse.disk.snapshots.records import Page, decode_page, encode_page
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.frames.refs import FrameRef

RNG = np.random.default_rng(0)
BASE = RNG.standard_normal((8, 40)).astype(np.float32)


def state_of(i: int) -> dict[str, Any]:
    """Eight tensors, of which one differs from those of the state before."""
    arrays = {f"w{k}": BASE[k] + np.float32((i + 7 - k) // 8) for k in range(8)}
    return {**arrays, "step": i}


def make_store(folder: Path, n: int = 12) -> SnapshotStore:
    store = SnapshotStore(folder, threads=1)
    for i in range(n):
        store.take(f"s{i}", state_of(i))
    return store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    make_store(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A store of twelve snapshots that a test may change; `copytree` keeps the times of files."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def pages_of(folder: Path) -> list[Path]:
    return sorted((folder / "catalog").glob("*.bin"))


def look(folder: Path) -> Any:
    """Everything that a store reports."""
    store = SnapshotStore(folder, threads=1)
    lineages = [store.lineage(each.name) for each in store.overview().snapshots]
    return store.names(), store.overview(), lineages


def look_without(folder: Path, to: Path) -> Any:
    """The same for a copy that has no catalogue."""
    ignore = shutil.ignore_patterns("catalog", "writer.lock")
    shutil.copytree(folder, to, ignore=ignore)
    found = look(to)
    shutil.rmtree(to)
    names, overview, lineages = found
    for problem in overview.damaged:
        message = problem.message.replace(str(to), str(folder))
        file = problem.file.replace(str(to), str(folder))
        overview.damaged[overview.damaged.index(problem)] = replace(
            problem, message=message, file=file
        )
    return names, overview, lineages


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The snapshots whose manifests were parsed."""
    found: list[str] = []
    real = catalog.parse_manifest

    def parse(text: bytes, file: Any, *args: Any) -> Any:
        found.append(file.snapshot)
        return real(text, file, *args)

    monkeypatch.setattr(catalog, "parse_manifest", parse)
    return found


# What it saves.


def test_a_store_opens_without_parsing_its_manifests(folder: Path, parsed: list[str]) -> None:
    assert len(SnapshotStore(folder).overview().snapshots) == 12
    assert len(SnapshotStore(folder).names()) == 12
    assert parsed == []
    SnapshotStore(folder).lineage("s5")
    assert parsed == ["s5"]
    parsed.clear()
    writer = SnapshotStore(folder)
    writer.take("s12", state_of(12))
    assert parsed == ["s11"]
    writer.delete("s3")
    SnapshotStore(folder).prune(remove=["s4"])
    assert set(parsed) == {f"s{i}" for i in range(13)} - {"s3", "s4"}  # as they are kept


def test_what_older_snapshots_have_is_found_again(folder: Path, parsed: list[str]) -> None:
    writer = SnapshotStore(folder)
    writer.take("other", {"x": RNG.standard_normal(50)})
    assert writer.take("again", state_of(2)).stored_nbytes == 0
    assert parsed.count("s2") == 1
    assert len(parsed) <= 3
    assert_same(writer.restore("again"), state_of(2))
    # The one with the fewest deltas, of all that have it.
    deltas = SnapshotStore(folder, max_chain=3, level="max")
    wide = RNG.standard_normal(20_000).astype(np.float32)
    deltas.take("full", {"w": wide})
    deltas.take("delta", {"w": wide + np.float32(1e-6)}, base="full")
    deltas.take("last", {})
    info = SnapshotStore(folder).take("found", {"w": wide + np.float32(1e-6), "v": wide})
    assert info.stored_nbytes == 0
    assert [tensor.n_deltas for tensor in info.tensors] == [1, 0]


def test_equal_fingerprints_of_other_contents_are_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records, finder):
        monkeypatch.setattr(module, "fingerprint", lambda content: 1)
    shutil.rmtree(folder / "catalog")
    writer = SnapshotStore(folder)
    writer.take("x", {"x": np.arange(77.0)})
    writer.take("y", {"y": np.arange(78.0), "w0": state_of(0)["w0"]})
    assert_same(writer.restore("y"), {"y": np.arange(78.0), "w0": state_of(0)["w0"]})
    assert writer.verify() == []


def count_frames() -> int:
    gc.collect()
    return sum(type(each) is FrameRef for each in gc.get_objects())


def test_a_writer_keeps_nothing_of_old_snapshots(tmp_path: Path) -> None:
    before = count_frames()
    store = make_store(tmp_path / "store", 20)
    assert count_frames() - before <= 5 * 9  # of the last manifests, and of 20 without bound
    store.close()
    assert count_frames() - before == 0
    assert store.take("next", state_of(20)).stored_nbytes > 0


def test_pages_are_bounded_and_go_with_what_they_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records, index):
        monkeypatch.setattr(module, "MAX_RECORDS", 4)
    folder = tmp_path / "store"
    store = make_store(folder, 11)
    sizes = sorted(len(decode_page(path.read_bytes()).paths) for path in pages_of(folder))
    assert sizes == [3, 4, 4]
    for i in (0, 1, 2):
        store.delete(f"s{i}")
    assert sum(len(decode_page(p.read_bytes()).paths) for p in pages_of(folder)) == 9
    assert look(folder) == look_without(folder, tmp_path / "plain")
    for name in store.names():
        store.delete(name)
    assert not (folder / "catalog").exists()


def test_a_store_in_memory_is_listed_with_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/store"
    store = SnapshotStore(url, threads=1)
    for i in range(12):
        store.take(f"s{i}", state_of(i))
    fs = type(fsspec.filesystem("memory"))
    calls: list[str] = []
    for name in ("cat_file", "info"):
        real = getattr(fs, name)

        def call(self: Any, path: str, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            calls.append(path)
            return real(self, path, *args, **kwargs)

        monkeypatch.setattr(fs, name, call)
    assert len(SnapshotStore(url).overview().snapshots) == 12
    assert SnapshotStore(url).stored_nbytes() > 0
    assert not any("/snapshots/" in path and path.endswith(".json") for path in calls)


# What it tells.


def test_what_snapshots_add_and_build_on_is_told(tmp_path: Path) -> None:
    """Compared with what follows from the manifests, tensor by tensor."""
    rng = random.Random(1)
    folder = tmp_path / "store"
    store = SnapshotStore(folder, threads=1, level="max", max_chain=3)
    wide = RNG.standard_normal((3, 5000)).astype(np.float32)
    for i in range(24):
        state = state_of(rng.randrange(12))
        for key in rng.sample(sorted(state), rng.randrange(5)):
            del state[key]
        state |= {f"v{k}": wide[k] + np.float32(1e-6 * rng.randrange(4)) for k in range(3)}
        if i % 5 == 0:
            state |= {"twin": state["v0"], "bits": state["v1"].view(np.int32)}
        base = rng.choice(["auto", None, *store.names()])
        store.take(f"s{i}", state, base=base)
    infos = [store.info(name) for name in store.names()]
    assert [(each.new_nbytes, each.base) for each in store.overview().snapshots] == told(infos)
    for info, (new_nbytes, base) in zip(infos, told(infos), strict=True):
        lineage = store.lineage(info.name)
        assert (lineage.info, lineage.new_nbytes, lineage.base) == (info, new_nbytes, base)
    for summary, info in zip(store.overview().snapshots, infos, strict=True):
        assert (summary.name, summary.order, summary.time) == (info.name, info.order, info.time)
        assert (summary.n_tensors, summary.nbytes) == (len(info.tensors), info.nbytes)
        assert summary.max_deltas == info.max_deltas
        assert summary.stored_nbytes == info.stored_nbytes
    assert any(summary.max_deltas for summary in store.overview().snapshots)


def told(infos: list[Any]) -> list[tuple[int, str | None]]:
    """The data that each of some snapshots added, and the older snapshot that it is based on."""
    owners: dict[tuple[bytes, str], str] = {}
    found = []
    for info in infos:
        votes: dict[str, int] = {}
        new = {}
        for tensor in info.tensors:
            keys = [(tensor.content_hash, tensor.dtype), (tensor.base_hash, tensor.dtype)]
            owner = next((owners[key] for key in keys if key in owners), None)
            if owner is not None:
                votes[owner] = votes.get(owner, 0) + tensor.nbytes
            if keys[0] not in owners:
                new[keys[0]] = tensor.packed_nbytes
        base = max(votes, key=lambda name: votes[name]) if votes else None
        found.append((sum(new.values()), base))
        owners |= {(tensor.content_hash, tensor.dtype): info.name for tensor in info.tensors}
    return found


# That it may be missing, old or wrong.


def test_without_it_all_is_the_same(folder: Path, tmp_path: Path) -> None:
    assert look(folder) == look_without(folder, tmp_path / "plain")


def test_reading_writes_nothing(folder: Path) -> None:
    shutil.rmtree(folder / "catalog")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    store = SnapshotStore(folder)
    store.overview(), store.lineage("s3"), store.restore("s4"), store.verify("s5")
    store.diff("s1", "s2"), store.stored_nbytes(), store.close()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_an_older_catalogue_is_as_good(folder: Path, tmp_path: Path) -> None:
    """A catalogue after an older release has written to the store: it lacks some manifests, and
    lists some that are gone."""
    old = shutil.copytree(folder / "catalog", tmp_path / "old")
    writer = SnapshotStore(folder)
    writer.take("s12", state_of(12))
    writer.take("s3", state_of(13), replace=True)
    writer.delete("s5")
    shutil.rmtree(folder / "catalog")
    shutil.copytree(old, folder / "catalog")
    assert look(folder) == look_without(folder, tmp_path / "plain")
    assert SnapshotStore(folder).take("again", state_of(12)).stored_nbytes == 0
    assert SnapshotStore(folder).verify() == []


def test_a_manifest_that_was_changed_in_its_place_is_read_again(folder: Path) -> None:
    (path,) = (folder / "snapshots" / "s7").iterdir()
    document = {**json.loads(path.read_text()), "stored_nbytes": 7, "crc32c": "0" * 8}
    text = json.dumps(document, separators=(",", ":"))
    path.write_bytes(text.replace("0" * 8, f"{crc32c(text.encode()):08x}", 1).encode())
    assert SnapshotStore(folder).overview().snapshots[7].stored_nbytes == 7
    path.write_bytes(b"damaged")
    found = SnapshotStore(folder).overview()
    assert [problem.snapshot for problem in found.damaged] == ["s7"]
    assert str(path) in found.damaged[0].message
    assert len(found.snapshots) == 11


def test_every_truncation_and_flipped_bit_is_noticed(folder: Path) -> None:
    (path,) = pages_of(folder)
    good = path.read_bytes()
    wanted = decode_page(good).paths
    for n in range(len(good)):
        with pytest.raises(CorruptionError):
            decode_page(good[:n])
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            decode_page(bytes(bad))
    assert decode_page(good).paths == wanted


@pytest.mark.parametrize("damage", [b"", b"\x00" * 100, None], ids=["empty", "zeros", "half"])
def test_a_bad_page_is_made_anew_by_the_next_writer(
    folder: Path, tmp_path: Path, damage: bytes | None
) -> None:
    (path,) = pages_of(folder)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] if damage is None else damage)
    (folder / "catalog" / "notes.txt").write_text("foreign")
    (folder / "catalog" / ".packhorse-0123456789abcdef.tmp").write_bytes(b"left")
    assert look(folder) == look_without(folder, tmp_path / "plain")
    SnapshotStore(folder).take("next", state_of(3))
    (new,) = pages_of(folder)
    assert new != path
    assert len(decode_page(new.read_bytes()).paths) == 13
    left = {file.name for file in (folder / "catalog").iterdir()}
    assert left == {"notes.txt", new.name}


def sealed(head: tuple[int, ...], parts: list[bytes]) -> bytes:
    """A page with a right checksum."""
    rest = struct.pack("<9I", *head, *map(len, parts)) + b"".join(parts)
    return struct.pack("<4sII", b"\x89PHC", 1, crc32c(rest)) + rest


def opened(page: bytes) -> tuple[list[int], list[bytes]]:
    *counts, first, second, third = struct.unpack_from("<9I", page, 12)
    cuts = [48, 48 + first, 48 + first + second, 48 + first + second + third]
    parts = [page[a:b] for a, b in pairwise(cuts)]
    return counts, [zstandard.decompress(part) for part in parts]


def test_lies_under_a_right_checksum_are_refused_or_harmless(folder: Path) -> None:
    (path,) = pages_of(folder)
    counts, parts = opened(path.read_bytes())
    packed = [zstandard.compress(part) for part in parts]
    assert decode_page(sealed(tuple(counts), packed)).paths
    for i in range(6):
        for value in (0, counts[i] - 1, counts[i] + 1, 1 << 20, (1 << 32) - 1):
            with pytest.raises(CorruptionError):
                decode_page(sealed((*counts[:i], value, *counts[i + 1 :]), packed))
    rng = random.Random(0)
    n_read = 0
    for _ in range(120):
        part, bad = rng.randrange(3), [bytearray(part) for part in parts]
        at = rng.randrange(0, len(bad[part]) - 8)
        bad[part][at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), rng.randbytes(4)])
        try:
            page = decode_page(sealed(tuple(counts), [zstandard.compress(p) for p in bad]))
        except CorruptionError:
            continue
        n_read += 1
        path.write_bytes(encode_page(page.records()) or b"")
        SnapshotStore(folder).overview()
    assert 20 < n_read < 120


def test_a_bomb_takes_no_memory() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(CorruptionError, match="are declared"):
        decode_page(sealed((1, 0, 0, 0, 0, 5), [bomb] * 3))
    with pytest.raises(CorruptionError, match="are declared"):
        decode_page(sealed((64, 0, 0, 0, 0, (1 << 28) - 48 * 64), [bomb] * 3))


def test_a_record_has_no_more_rows_than_its_manifest_has_room_for(folder: Path) -> None:
    (path,) = pages_of(folder)
    record = decode_page(path.read_bytes()).records()[0]
    many = np.zeros(1 << 16, np.uint64)
    contents = records.Contents(many, many.astype(np.uint8), many.size)
    for lie in (
        replace(record, contents=contents, sizes=records.Sizes(many, many, many)),
        replace(record, packs=bytes(16 * 1000)),
    ):
        data = encode_page([lie])
        assert data is not None
        with pytest.raises(CorruptionError, match="too many for a manifest of that size"):
            decode_page(data)
    data = encode_page([replace(record, path=f"snapshots/{i}") for i in range(65)])
    assert data is not None
    with pytest.raises(CorruptionError, match="65 records"):
        decode_page(data)


Lie = Callable[[records.Record], records.Record]
NONE = np.empty(0, np.uint64)
LIES: dict[str, Lie] = {
    "no packs": lambda record: replace(record, packs=b""),
    "other packs": lambda record: replace(record, packs=bytes(16)),
    "no contents": lambda record: replace(
        record,
        contents=records.Contents(NONE, NONE.astype(np.uint8), 0),
        sizes=records.Sizes(NONE, NONE, NONE),
    ),
    "other checksum": lambda record: replace(record, crc=record.crc ^ 1),
    "other stamp": lambda record: replace(record, stamp=records.Stamp(1, 2)),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_nothing_is_removed_on_the_word_of_the_catalogue(folder: Path, lie: str) -> None:
    (path,) = pages_of(folder)
    told = [LIES[lie](record) for record in decode_page(path.read_bytes()).records()]
    data = encode_page(told)
    assert data is not None
    path.write_bytes(data)
    before = set((folder / "packs").iterdir())
    writer = SnapshotStore(folder)
    writer.take("next", state_of(12))
    assert before <= set((folder / "packs").iterdir())
    writer.delete("s0")
    SnapshotStore(folder).delete("s7")
    assert SnapshotStore(folder).prune(keep=4).removed
    for i in (9, 10, 11):
        assert_same(SnapshotStore(folder).restore(f"s{i}"), state_of(i))
    assert SnapshotStore(folder).verify() == []


def test_a_page_that_lies_after_its_manifest_was_confirmed_removes_nothing(tmp_path: Path) -> None:
    """This happens in a remote store, where a manifest is not read each time."""
    url = f"memory://{tmp_path.name}/store"
    store = SnapshotStore(url)
    for i in range(3):
        store.take(f"s{i}", {"x": np.random.default_rng(i).standard_normal(5000)})
    store.delete("s1")  # by which the manifests of the others are confirmed
    fs = fsspec.filesystem("memory")
    for path in fs.ls(f"/{tmp_path.name}/store/catalog", detail=False):
        records = decode_page(fs.cat_file(path)).records()
        fs.rm_file(path)
        data = encode_page([replace(record, packs=bytes(16)) for record in records])
        assert data is not None
        fs.pipe_file(f"{path[:-5]}f.bin", data)
    store.delete("s2")
    assert store.verify() == []


def test_a_good_manifest_that_fits_no_page_is_parsed_each_time(
    folder: Path, parsed: list[str]
) -> None:
    (path,) = (folder / "snapshots" / "s5").iterdir()
    document = {**json.loads(path.read_text()), "stored_nbytes": 1 << 60, "crc32c": "0" * 8}
    text = json.dumps(document, separators=(",", ":"))
    path.write_bytes(text.replace("0" * 8, f"{crc32c(text.encode()):08x}", 1).encode())
    for i in (12, 13, 14):
        SnapshotStore(folder).take(f"s{i}", state_of(i))
        (page,) = pages_of(folder)
        assert len(decode_page(page.read_bytes()).paths) == i
    parsed.clear()
    assert SnapshotStore(folder).overview().snapshots[5].stored_nbytes == 1 << 60
    assert parsed == ["s5"]


def test_a_manifest_of_a_newer_release_is_not_cleared_by_the_catalogue(folder: Path) -> None:
    """The newer release has written the catalogue, according to which the manifest is good."""
    (path,) = (folder / "snapshots" / "s5").iterdir()
    (page,) = pages_of(folder)
    document = {**json.loads(path.read_text()), "version": 2, "crc32c": "0" * 8}
    text = json.dumps(document, separators=(",", ":"))
    crc = crc32c(text.encode())
    path.write_bytes(text.replace("0" * 8, f"{crc:08x}", 1).encode())
    stamp = records.Stamp(path.stat().st_size, path.stat().st_mtime_ns)
    told = [
        replace(record, crc=crc, stamp=stamp) if "/s5/" in record.path else record
        for record in decode_page(page.read_bytes()).records()
    ]
    page.write_bytes(encode_page(told) or b"")
    before = set((folder / "packs").iterdir())
    with pytest.raises(CompatibilityError, match=r"snapshot 's5': .*version 2"):
        SnapshotStore(folder).prune(keep=1)
    SnapshotStore(folder).delete("s0")
    assert set((folder / "packs").iterdir()) == before


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_it_the_store_is_the_same(tmp_path: Path, seed: int) -> None:
    """Two stores go the same way; the catalogue of one is lost, damaged or rolled back."""
    rng = random.Random(seed)
    plain, hurt = tmp_path / "plain", tmp_path / "hurt"
    kept: list[dict[str, bytes]] = [{}]
    for step in range(16):
        step_rng = rng.getrandbits(32)
        names = [live(folder, random.Random(step_rng), step) for folder in (plain, hurt)]
        assert names[0] == names[1]
        kept.append({path.name: path.read_bytes() for path in pages_of(hurt)})
        hurt_catalogue(hurt, kept, rng)
        summaries = [SnapshotStore(folder).overview() for folder in (plain, hurt)]
        assert strip(summaries[0]) == strip(summaries[1])
    assert SnapshotStore(hurt).verify() == []
    assert pack_sizes(plain) == pack_sizes(hurt)


def live(folder: Path, rng: random.Random, step: int) -> list[str]:
    """Does one step; returns the names that exist afterwards."""
    store = SnapshotStore(folder, threads=1)
    names, what = store.names(), rng.randrange(8)
    state = state_of(rng.randrange(30))
    if what == 0 and len(names) > 2:
        store.delete(rng.choice(names))
    elif what == 1 and len(names) > 4:
        store.prune(keep=rng.sample(names, 4))
    elif what == 2 and names:
        store.take(rng.choice(names), state, replace=True)
    else:
        store.take(f"n{step}", state)
    return store.names()


def hurt_catalogue(folder: Path, kept: list[dict[str, bytes]], rng: random.Random) -> None:
    what, paths = rng.randrange(5), pages_of(folder)
    if what == 0:
        shutil.rmtree(folder / "catalog", ignore_errors=True)
    elif what == 1 and paths:
        data = rng.choice(paths).read_bytes()
        rng.choice(paths).write_bytes(data[: rng.randrange(len(data))])
    elif what == 2:
        shutil.rmtree(folder / "catalog", ignore_errors=True)
        (folder / "catalog").mkdir()
        for name, data in rng.choice(kept).items():
            (folder / "catalog" / name).write_bytes(data)
    elif what == 3:  # old ones beside new ones
        (folder / "catalog").mkdir(exist_ok=True)
        for name, data in rng.choice(kept).items():
            (folder / "catalog" / name).write_bytes(data)


def strip(overview: Any) -> Any:
    return [replace(each, time=None) for each in overview.snapshots], overview.damaged


def pack_sizes(folder: Path) -> list[int]:
    return sorted(path.stat().st_size for path in (folder / "packs").iterdir())


def test_a_catalogue_that_cannot_be_written_does_no_harm(folder: Path) -> None:
    shutil.rmtree(folder / "catalog")
    (folder / "catalog").write_text("in the way")
    SnapshotStore(folder).take("next", state_of(12))
    assert len(SnapshotStore(folder).overview().snapshots) == 13
    SnapshotStore(folder).prune(keep=2)
    assert SnapshotStore(folder).verify() == []


def test_a_page_that_vanishes_is_replaced_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer replaces a page by a better one after a reader has listed the old one."""
    reader = SnapshotStore(folder)
    real, todo = reader._storage.read, [lambda: SnapshotStore(folder).take("next", state_of(12))]

    def read(path: str, max_nbytes: int) -> bytes:
        if path.startswith("catalog") and todo:
            todo.pop()()
        return real(path, max_nbytes)

    monkeypatch.setattr(reader._storage, "read", read)
    assert len(reader.overview().snapshots) == 12


# Imports.


def test_reading_a_manifest_imports_nothing(folder: Path) -> None:
    """A child that is forked while another thread imports would wait for that import forever."""
    code = (
        "import sys; from packhorse.disk import SnapshotStore\n"
        "before = set(sys.modules); store = SnapshotStore(sys.argv[1])\n"
        "store.info('s3'), store.overview(), store.lineage('s4')\n"
        "print(*set(sys.modules) - before)"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}", str(folder)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == []


def test_a_page_holds_what_was_put_in(folder: Path) -> None:
    (path,) = pages_of(folder)
    page = decode_page(path.read_bytes())
    assert isinstance(page, Page)
    again = encode_page(page.records())
    assert again is not None
    for old, new in zip(page.records(), decode_page(again).records(), strict=True):
        assert replace(old, contents=None, sizes=None) == replace(new, contents=None, sizes=None)
        for a, b in zip(
            (*old.contents[:2], *old.sizes), (*new.contents[:2], *new.sizes), strict=True
        ):
            assert np.array_equal(a, b)
