"""Updates through a folder or an object store: publishing, joining late, pruning, bad files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from s3_server import Server
from update_samples import TinyModel, same

from packhorse.errors import CompatibilityError, CorruptionError, TruncationError
from packhorse.storage.documents import sign
from packhorse.wire.updates import (
    DeltaReceiver,
    DeltaSender,
    Refusal,
    UpdateFolder,
    UpdateMismatchError,
)
from packhorse.wire.updates.transports.routes import Entry, find_route


@pytest.fixture(params=["files", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder that does not exist yet, and one of an object store."""
    if request.param == "files":
        yield str(tmp_path / "run" / "updates")
        return
    server: Server = request.getfixturevalue("s3")
    assert server.url
    yield "s3://bucket/run/updates"


def test_receivers_follow_a_folder(folder: str) -> None:
    trained = TinyModel(1)
    packer = DeltaSender(trained, anchor_every=3)
    writer, reader = UpdateFolder(folder), UpdateFolder(folder)
    served = TinyModel(2)
    receiver = DeltaReceiver(into=served)
    assert reader.stream_id() is None
    assert reader.stage_newest(receiver) is None
    for step in range(5):
        writer.publish(packer.pack())
        staged = reader.stage_newest(receiver)
        assert staged is not None
        receiver.commit(staged)
        assert same(served.state_dict(), trained.state_dict())
        assert receiver.version == step + 1
        assert reader.stage_newest(receiver) is None
        trained.step(step)
    assert [entry.base_number for entry in reader.entries()] == [None, 1, 2, None, 4]
    joiner = DeltaReceiver()
    staged = reader.stage_newest(joiner)
    assert staged is not None
    joiner.commit(staged)
    assert same(joiner.state, served.state_dict())
    assert writer.prune() == 3
    assert [entry.number for entry in reader.entries()] == [4, 5]
    late = DeltaReceiver(into=TinyModel(3))
    staged = reader.stage_newest(late, upto=4)
    assert staged is not None
    late.commit(staged)
    assert late.version == 4
    staged = reader.stage_newest(late)
    assert staged is not None
    late.commit(staged)
    assert same(late.state, served.state_dict())


def test_a_receiver_that_was_away_reads_what_it_missed(tmp_path: Path) -> None:
    trained, served = TinyModel(1), TinyModel(1)
    packer = DeltaSender(trained, anchor_every=None, receivers_have_it=True)
    folder = UpdateFolder(tmp_path)
    receiver = DeltaReceiver(into=served)
    for step in range(4):
        trained.step(step)
        folder.publish(packer.pack())
    folder.publish(packer.anchor())
    read = []
    original = folder._read

    def counting(stream: bytes, entry: Entry) -> object:
        read.append((entry.number, entry.base_number))
        return original(stream, entry)

    folder._read = counting  # type: ignore[method-assign,assignment]
    staged = folder.stage_newest(receiver)  # it has the weights that the sender began with
    assert staged is not None
    receiver.commit(staged)
    assert read == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert same(served.state_dict(), trained.state_dict())
    read.clear()
    stranger = DeltaReceiver(into=TinyModel(5))
    staged = folder.stage_newest(stranger)
    assert staged is not None
    stranger.commit(staged)
    assert read[-1] == (4, None)
    assert same(stranger.state, trained.state_dict())


def test_a_new_trainer_takes_over(tmp_path: Path) -> None:
    trained = TinyModel(1)
    folder = UpdateFolder(tmp_path)
    receiver = DeltaReceiver(into=TinyModel(2))
    for resumed in (False, True):
        packer = DeltaSender(trained, receivers_have_it=resumed)
        for step in range(2):
            trained.step(step)
            folder.publish(packer.pack())
            staged = UpdateFolder(tmp_path).stage_newest(receiver)
            assert staged is not None
            receiver.commit(staged)
            assert same(receiver.state, trained.state_dict())
    assert receiver.stream_id == packer.stream_id
    assert receiver.version == 2


def test_a_version_is_published_once(tmp_path: Path) -> None:
    update = DeltaSender({"w": np.zeros(3)}).pack()
    folder = UpdateFolder(tmp_path)
    folder.publish(update)
    with pytest.raises(FileExistsError):
        folder.publish(update)


def test_a_killed_writer_leaves_no_half_update(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    packer, folder = DeltaSender(state), UpdateFolder(tmp_path)
    folder.publish(packer.pack())
    stream = next(path for path in tmp_path.iterdir() if path.is_dir())
    # What a kill leaves: a temporary file beside the destination.
    (stream / ".packhorse-0123456789abcdef.tmp").write_bytes(bytes(packer.pack())[:50])
    receiver = DeltaReceiver()
    staged = folder.stage_newest(receiver)
    assert staged is not None
    receiver.commit(staged)
    assert receiver.version == 1
    assert len(folder.entries()) == 1


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda data: data[:-1], TruncationError, r"\.anchor: byte .* cut off"),
        (lambda data: b"", TruncationError, r"\.anchor: byte 0"),
        (lambda data: data[:70] + b"?" + data[71:], CorruptionError, "anchor: byte 112: the check"),
        (lambda data: bytes(DeltaSender({"w": np.ones(3)}).pack()), CorruptionError, "another up"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, damage, kind, words: str) -> None:  # type: ignore[no-untyped-def]
    folder = UpdateFolder(tmp_path)
    folder.publish(DeltaSender({"w": np.zeros(3)}).pack())
    path = next(tmp_path.rglob("*.anchor"))
    data = damage(path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(kind, match=words):
        folder.stage_newest(DeltaReceiver())


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (b"{}", CorruptionError, "does not begin with a checksum"),
        (sign({"kind": "x", "version": 1}), CorruptionError, "kind is 'x'"),
        (sign({"kind": "updates", "version": 2}), CompatibilityError, "version 2"),
        (sign({"kind": "updates", "version": 1}), CorruptionError, "not a content hash"),
        (
            sign({"kind": "updates", "version": 1, "stream": "../../etc"}),
            CorruptionError,
            "not a content hash",
        ),
        (b"x" * 5000, CorruptionError, "longer than 4096 bytes"),
    ],
)
def test_a_bad_stream_file_is_refused(
    tmp_path: Path, text: bytes, kind: type[Exception], words: str
) -> None:
    (tmp_path / "stream.json").write_bytes(text)
    with pytest.raises(kind, match=words):
        UpdateFolder(tmp_path).stage_newest(DeltaReceiver())


def test_a_missing_file_is_not_skipped(tmp_path: Path) -> None:
    """Without the update in between, the chain cannot be followed, and there is no other anchor."""
    state = {"w": np.zeros(3)}
    packer, folder = DeltaSender(state), UpdateFolder(tmp_path)
    receiver = DeltaReceiver()
    for step in range(3):
        state["w"][0] = step
        folder.publish(packer.pack())
        if step == 0:
            staged = folder.stage_newest(receiver)
            assert staged is not None
            receiver.commit(staged)
    next(tmp_path.rglob("*2.*.delta")).unlink()
    assert folder.stage_newest(receiver) is None
    with pytest.raises(UpdateMismatchError) as caught:
        receiver.stage(packer.pack())
    assert caught.value.reason is Refusal.MISSED


def test_keep_at_least_one_anchor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_anchors is 0"):
        UpdateFolder(tmp_path).prune(0)
    assert UpdateFolder(tmp_path).prune() == 0


DELTA, ANCHOR = 10, 100


def entries(*pairs: tuple[int, int | None]) -> list[Entry]:
    return [Entry(n, base, ANCHOR if base is None else DELTA * (n - base)) for n, base in pairs]


@pytest.mark.parametrize(
    ("there", "held", "route"),
    [
        ([], None, []),
        ([(1, None)], None, [1]),
        ([(1, None), (2, 1), (3, 2)], None, [1, 2, 3]),
        ([(1, None), (2, 1), (3, 2)], 1, [2, 3]),
        ([(1, None), (2, 1), (3, 2)], 3, []),
        ([(1, None), (2, 1), (3, 2), (3, None)], 2, [3]),
        ([(1, None), (2, 1), (3, None), (4, 3)], None, [3, 4]),
        ([(n, n - 1) for n in range(2, 20)] + [(18, None)], 1, [18, 19]),
        ([(2, 1), (4, 3)], 1, [2]),
        ([(2, 1), (4, 3)], None, []),
        ([(2, 1), (3, 2), (3, 1)], 1, [2, 3]),
    ],
)
def test_the_route_has_the_fewest_bytes(
    there: list[tuple[int, int | None]], held: int | None, route: list[int]
) -> None:
    assert [entry.number for entry in find_route(entries(*there), held)] == route
