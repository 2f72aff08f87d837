"""Model folders: shards, index and other files are restored exactly, or nothing is written."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_samples import file_bytes, leftovers, write_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from packhorse.disk import (
    PackedFile,
    folder_logical_nbytes,
    pack_file,
    pack_folder,
    packed_files,
    plan_folder,
    unpack_folder,
    verify_folder,
)
from packhorse.disk.folder_index import pack_index, unpack_index
from packhorse.errors import CompatibilityError, CorruptionError, PackhorseError, TruncationError
from packhorse.numpy import FRAMEWORK as NUMPY
from packhorse.storage import atomic

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def make_model(folder: Path) -> Path:
    """A model in the layout of Hugging Face, with a subfolder, an empty folder and odd names."""
    (folder / "vae" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / ".cache").mkdir()
    weight_map = {}
    for seed, name in enumerate(SHARDS):
        tensors = write_sample(folder / name, seed)
        weight_map |= {f"{seed}.{tensor}": name for tensor in tensors}
    # Unusual JSON: the order of keys, the indent, escapes, no line break at the end.
    index = {"weight_map": weight_map, "metadata": {"total_size": 2530644.0, "é": None}}
    (folder / INDEX).write_text(json.dumps(index, indent=3))
    write_sample(folder / "vae" / "diffusion.safetensors", 5)
    (folder / "config.json").write_text('{"architectures": ["Test"]}\n')
    (folder / "vae" / "deep" / "tokenizer.model").write_bytes(bytes(range(256)) * 9)
    (folder / "optimizer.pt").write_bytes(b"\x80\x02 not to be read")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".cache" / "model.safetensors.lock").write_bytes(b"")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """The bytes of every file, and None for every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def packed(model, tmp_path):
    pack_folder(model, tmp_path / "packed")
    return tmp_path / "packed"


def test_a_model_folder_comes_back_exactly(model, packed, tmp_path):
    before = contents(model)
    assert set(contents(packed)) == {
        name.removesuffix(".safetensors") + ".ph.safetensors"
        if name.endswith(".safetensors")
        else name
        for name in before
    }
    assert verify_folder(packed) == []
    unpack_folder(packed, tmp_path / "back")
    assert contents(tmp_path / "back") == before == contents(model)
    assert not leftovers(tmp_path, "model", "packed", "back")


def test_the_packed_index_names_the_packed_shards(model, packed):
    before = json.loads((model / INDEX).read_text())
    after = json.loads((packed / INDEX).read_text())
    assert after["metadata"] == before["metadata"]
    assert list(after["weight_map"]) == list(before["weight_map"])
    for name, file in after["weight_map"].items():
        assert file == before["weight_map"][name].replace(".safetensors", ".ph.safetensors")
        with safe_open(packed / file, "np") as shard:
            assert name.partition(".")[2] in shard.keys()  # noqa: SIM118
    with PackedFile(packed / file, NUMPY) as shard:
        assert shard.get_tensor("scalar") == 3.25


def test_links_of_a_download_cache_are_followed(model, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    shutil.move(model, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    pack_folder(snapshot, tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(blobs)
    assert not any(path.is_symlink() for path in (tmp_path / "back").rglob("*"))


def test_results_and_progress_count_all_files(model, tmp_path):
    total = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    done: list[int] = []
    result = pack_folder(model, tmp_path / "packed", progress=done.append)
    assert sum(done) == folder_logical_nbytes(model)
    assert result.original_nbytes == total
    packed_files = [path for path in (tmp_path / "packed").rglob("*") if path.is_file()]
    assert result.packed_nbytes == sum(path.stat().st_size for path in packed_files)
    assert result.n_copied == 5
    assert [file.output for file in result.files] == [
        tmp_path / "packed" / name
        for name in (
            "model-00001-of-00002.ph.safetensors",
            "model-00002-of-00002.ph.safetensors",
            "vae/diffusion.ph.safetensors",
        )
    ]
    for work in (
        lambda: unpack_folder(tmp_path / "packed", tmp_path / "back", progress=done.append),
        lambda: verify_folder(tmp_path / "packed", progress=done.append),
    ):
        done.clear()
        answer = work()
        assert sum(done) == folder_logical_nbytes(tmp_path / "packed")
        if answer:
            assert (answer.original_nbytes, answer.ratio) == (total, result.ratio)


def test_times_and_permissions_of_copied_files_are_kept(model, tmp_path):
    os.utime(model / "config.json", ns=(1_600_000_000_123_456_789, 1_600_000_000_987_654_321))
    (model / "config.json").chmod(0o640)
    pack_folder(model, tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "back")
    for name in ("packed", "back"):
        status = (tmp_path / name / "config.json").stat()
        assert status.st_mtime_ns == 1_600_000_000_987_654_321
        assert status.st_mode & 0o777 == 0o640


def test_plans_cover_every_model_file_and_write_nothing(model, tmp_path):
    plans = plan_folder(model, level="fast")
    assert [str(path) for path, _ in plans] == [*SHARDS, "vae/diffusion.safetensors"]
    assert all(plan.plan.reason for _, tensors in plans for plan in tensors)
    assert not leftovers(tmp_path, "model")


def test_a_folder_without_an_index_will_do(tmp_path):
    (tmp_path / "model").mkdir()
    write_sample(tmp_path / "model" / "model.safetensors")
    pack_folder(tmp_path / "model", tmp_path / "packed")
    assert os.listdir(tmp_path / "packed") == ["model.ph.safetensors"]


def test_an_existing_folder_is_kept_without_force(model, packed, tmp_path):
    before = contents(packed)
    with pytest.raises(FileExistsError, match="not empty.*force"):  # noqa: RUF043
        pack_folder(model, packed)
    assert contents(packed) == before
    pack_folder(model, packed, force=True)
    assert contents(packed) == before
    assert not leftovers(tmp_path, "model", "packed")


def test_an_empty_folder_is_filled(model, tmp_path):
    (tmp_path / "packed").mkdir()
    pack_folder(model, tmp_path / "packed")
    assert verify_folder(tmp_path / "packed") == []


def test_force_deletes_no_file_that_would_not_come_back(model, packed, tmp_path):
    (packed / "vae" / "notes.txt").write_text("mine")
    before = contents(packed)
    with pytest.raises(FileExistsError, match=r"contains vae/notes.txt.*move it away"):
        pack_folder(model, packed, force=True)
    assert contents(packed) == before
    assert not leftovers(tmp_path, "model", "packed")


def test_folders_may_not_overlap(model, packed, tmp_path):
    (tmp_path / "link").symlink_to(model)
    for output in (model, model / "inside", tmp_path, tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(ValueError, match="must not contain each other"):
            pack_folder(model, output, force=True)
    with pytest.raises(ValueError, match="must not contain each other"):
        unpack_folder(packed, packed, force=True)
    assert contents(model) == contents(make_model(tmp_path / "same"))


def test_an_output_that_is_no_folder_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError, match="not a folder"):
            pack_folder(model, tmp_path / name, force=True)
    with pytest.raises(FileNotFoundError, match="no folder"):
        pack_folder(model, tmp_path / "absent" / "out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_work_that_is_interrupted_leaves_no_folder(model, packed, tmp_path, error):
    count = 0

    def stop(nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise error

    before, packed_before = contents(model), contents(packed)
    for work, source, output, force in (
        (pack_folder, model, tmp_path / "new", False),
        (pack_folder, model, packed, True),
        (unpack_folder, packed, tmp_path / "new", False),
    ):
        count = 0
        with pytest.raises(type(error) if isinstance(error, OSError) else error):
            work(source, output, force=force, progress=stop)
        assert not leftovers(tmp_path, "model", "packed")
    assert contents(model) == before
    assert contents(packed) == packed_before


@pytest.mark.parametrize("knows_exchange", [True, False])
def test_a_rename_that_fails_puts_the_old_folder_back(
    model, packed, tmp_path, monkeypatch, knows_exchange
):
    before, rename, n_tried = contents(packed), os.rename, 0

    def fail(source: Path, target: Path) -> None:
        nonlocal n_tried
        n_tried += 1
        if n_tried == (1 if knows_exchange else 3):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    if not knows_exchange:
        monkeypatch.setattr(atomic, "exchange", lambda first, second: False)
    with pytest.raises(OSError, match="Input/output"):
        pack_folder(model, packed, force=True)
    assert contents(packed) == before
    assert not leftovers(tmp_path, "model", "packed")


def test_a_folder_without_models_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for work in (pack_folder, unpack_folder):
        with pytest.raises(
            ValueError, match=r"no \*\.(ph\.)?safetensors file in it or its subfolders"
        ):
            work(tmp_path / "model", tmp_path / "out")
    with pytest.raises(ValueError, match="no .*in it or its subfolders"):  # noqa: RUF043
        verify_folder(tmp_path / "model")
    assert not leftovers(tmp_path, "model")


def test_a_folder_of_pickles_is_refused_with_the_way_to_convert(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*weights_only=True"):
        pack_folder(tmp_path / "model", tmp_path / "out")
    assert not leftovers(tmp_path, "model")


def test_a_folder_that_is_packed_already_is_refused(packed, tmp_path):
    with pytest.raises(ValueError, match="already packed"):
        pack_folder(packed, tmp_path / "out")
    (tmp_path / "half").mkdir()
    shutil.copy(packed / INDEX, tmp_path / "half")
    write_sample(tmp_path / "half" / SHARDS[0])
    with pytest.raises(ValueError, match="index of a packed folder"):
        pack_folder(tmp_path / "half", tmp_path / "out")
    (tmp_path / "half" / INDEX).unlink()
    pack_file(tmp_path / "half" / SHARDS[0], tmp_path / "half" / "misnamed.safetensors")
    with pytest.raises(ValueError, match=r"misnamed.safetensors: already packed"):
        pack_folder(tmp_path / "half", tmp_path / "out")
    assert not leftovers(tmp_path, "model", "packed", "half")


def test_two_files_with_one_name_are_refused(packed, tmp_path):
    write_sample(packed / SHARDS[0])
    with pytest.raises(ValueError, match="both unpack to"):
        unpack_folder(packed, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        (SHARDS[1], file_bytes(b"{}", length=99), TruncationError, "99 bytes"),
        ("vae/x.safetensors", b"version https://git-lfs", CorruptionError, "git lfs pull"),
        (INDEX, b"[]", CorruptionError, "index.json must be a JSON object"),
        (INDEX, b"\xff", CorruptionError, "not UTF-8"),
        (INDEX, b"{}", CorruptionError, "'weight_map' must be an object, but is null"),
        (INDEX, b'{"weight_map": {"a": 1}}', CorruptionError, "'a' is a number"),
        (INDEX, b'{"weight_map": {}, "weight_map": {}}', CorruptionError, "occurs twice"),
        (INDEX, b'{"weight_map": {}, "x": 1e999}', CorruptionError, "the largest float"),
        (INDEX, b'{"weight_map": {}, "x": ["\\ud800"]}', CorruptionError, "not Unicode"),
    ],
)
def test_a_bad_file_is_found_before_anything_is_written(model, tmp_path, name, data, error, words):
    (model / name).write_bytes(data)
    done: list[int] = []
    with pytest.raises(error, match=words) as caught:
        pack_folder(model, tmp_path / "out", progress=done.append)
    assert str(model / name) in str(caught.value)
    assert not done
    assert not leftovers(tmp_path, "model")


def test_links_that_lead_nowhere_or_in_circles_are_refused(model, tmp_path):
    (model / "lost").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="lost: a link to nothing"):
        pack_folder(model, tmp_path / "out")
    (model / "lost").unlink()
    (model / "vae" / "circle").symlink_to(model)
    with pytest.raises(ValueError, match="a link to a folder that contains it"):
        pack_folder(model, tmp_path / "out")
    (model / "vae" / "circle").unlink()
    os.mkfifo(model / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        pack_folder(model, tmp_path / "out")
    assert not leftovers(tmp_path, "model")


def test_folders_too_deep_in_each_other_are_refused(model, packed, tmp_path):
    """Python's own functions would exhaust the stack while removing, and leave a partial folder."""
    for folder in (model, packed):
        folder.joinpath(*["d"] * 101).mkdir(parents=True)
    for work in (
        lambda: pack_folder(model, tmp_path / "out"),
        lambda: unpack_folder(packed, tmp_path / "out"),
        lambda: verify_folder(packed),
        lambda: packed_files(packed),
    ):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            work()
    assert not leftovers(tmp_path, "model", "packed")


def test_an_index_of_more_bytes_than_a_header_may_have_is_not_read(model, packed, tmp_path):
    for folder in (model, packed):
        os.truncate(folder / INDEX, 100_000_001)
    for work in (
        lambda: pack_folder(model, tmp_path / "out"),
        lambda: unpack_folder(packed, tmp_path / "out"),
    ):
        with pytest.raises(CorruptionError, match=f"{INDEX}: the index has 100000001 bytes"):
            work()
    (problem,) = verify_folder(packed)
    assert "at most 100000000" in problem.message
    assert not leftovers(tmp_path, "model", "packed")


def test_a_recorded_index_may_not_be_much_longer_than_the_packed_one():
    text = b'{"weight_map": {}}' + b" " * 3_000_000
    packed = pack_index(text, label="test")
    assert unpack_index(packed, label="test") == text
    with pytest.raises(CorruptionError, match=r"declares 3000018 bytes, but in \d+ bytes"):
        unpack_index(packed.rstrip(), label="test")


def test_an_index_with_the_key_of_a_packed_one_is_not_packed():
    text = b'{"weight_map": {"a": "m"}, "packhorse": {"a": "m"}}'
    with pytest.raises(
        ValueError, match="here: this is the index of a packed folder; unpack that folder"
    ):
        pack_index(text, label="here")


def test_verify_lists_every_bad_file_and_goes_on(packed):
    first, second = (packed / name.replace(".s", ".ph.s") for name in SHARDS)
    data = bytearray(first.read_bytes())
    data[-70] ^= 1
    data[-70_000] ^= 1
    first.write_bytes(data)
    write_sample(second)
    (packed / "vae" / "diffusion.ph.safetensors").unlink()
    index = json.loads((packed / INDEX).read_text())
    index["weight_map"]["x"] = "absent.safetensors"
    (packed / INDEX).write_text(json.dumps(index))
    problems = verify_folder(packed)
    assert {problem.path for problem in problems} == {first, second, packed / INDEX}
    assert sum(problem.path == first for problem in problems) == 2
    assert all(str(problem.path) in problem.message for problem in problems)


def test_verify_misses_shards_that_are_gone(packed):
    (packed / SHARDS[1].replace(".s", ".ph.s")).unlink()
    problems = verify_folder(packed)
    assert [problem.path for problem in problems] == [packed / INDEX]
    assert (
        "'model-00002-of-00002.ph.safetensors', which is not in the folder" in problems[0].message
    )


def test_damage_to_a_packed_folder_stops_unpacking(packed, tmp_path):
    index = (packed / INDEX).read_text()
    (packed / INDEX).write_text(index.replace('"total_size": 2530644.0', '"total_size": 1'))
    with pytest.raises(CorruptionError, match=r"index.json: .*disagree"):
        unpack_folder(packed, tmp_path / "out")
    (packed / INDEX).write_text(index.replace('"version": 1', '"version": 2'))
    with pytest.raises(CompatibilityError, match=r"version 2.*upgrade"):
        unpack_folder(packed, tmp_path / "out")
    (packed / INDEX).write_text(index)
    shard = packed / SHARDS[0].replace(".s", ".ph.s")
    data = bytearray(shard.read_bytes())
    data[-70] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match="tensor"):
        unpack_folder(packed, tmp_path / "out")
    assert not leftovers(tmp_path, "model", "packed")


@settings(max_examples=100, deadline=None)
@given(
    files=st.dictionaries(
        st.text(max_size=4),
        st.sampled_from(["a.safetensors", "b/c.safetensors", "d.ph.safetensors", "e.bin", ""]),
        max_size=4,
    ),
    rest=st.dictionaries(
        st.text(max_size=3).filter(lambda key: key not in ("packhorse", "weight_map")),
        st.none()
        | st.integers()
        | st.text(max_size=3)
        | st.floats(allow_nan=False, allow_infinity=False),
        max_size=3,
    ),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_any_index_comes_back(files, rest, indent, ascii_only):
    document = {**rest, "weight_map": files}
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    packed = pack_index(text, label="test")
    assert unpack_index(packed, label="test") == text
    assert {key: json.loads(packed)[key] for key in rest} == rest


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_an_index_never_gives_another_original(place, bit):
    text = b'{"metadata": {"total_size": 12}, "weight_map": {"a": "x.safetensors"}}'
    packed = bytearray(pack_index(text, label="test"))
    packed[place % len(packed)] ^= 1 << bit
    try:
        back = unpack_index(bytes(packed), label="test")
    except PackhorseError:
        return
    assert back == text


def test_arrays_of_a_packed_folder_are_those_of_the_model(model, packed):
    with (
        safe_open(model / SHARDS[0], "np") as before,
        PackedFile(packed / SHARDS[0].replace(".s", ".ph.s"), NUMPY) as after,
    ):
        for name in before.keys():  # noqa: SIM118
            assert np.array_equal(before.get_tensor(name), after.get_tensor(name))
