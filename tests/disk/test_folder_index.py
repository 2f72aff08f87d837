"""Indexes of packed folders: a damaged index is never taken for an ordinary file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_samples import leftovers
from safetensors.numpy import save_file

from packhorse.cli import main
from packhorse.disk import pack_file, pack_folder, unpack_folder, verify_folder
from packhorse.disk.folder_index import is_packed_index, pack_index, unpack_index
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.reference import decode_index

INDEX = "m.safetensors.index.json"
SHARDS = ["m-1.safetensors", "m-2.safetensors"]


def write_shards(folder: Path, index: dict | None = None) -> Path:
    folder.mkdir()
    for name in SHARDS:
        save_file({name: np.arange(3)}, folder / name)
    index = {"weight_map": {name: name for name in SHARDS}} if index is None else index
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.fixture
def packed(tmp_path):
    pack_folder(write_shards(tmp_path / "model"), tmp_path / "packed")
    return tmp_path / "packed"


def damaged(text: bytes) -> list[bytes]:
    """Every truncation, and every bit flipped."""
    cut = [text[:n] for n in range(len(text))]
    flips = [(i, 1 << bit) for i in range(len(text)) for bit in range(8)]
    return cut + [text[:i] + bytes([text[i] ^ flip]) + text[i + 1 :] for i, flip in flips]


def accepted(text: bytes, has) -> bytes:
    """The index that unpacking a folder restores."""
    if is_packed_index(text, label="here", has=has):
        return unpack_index(text, label="here", has=has)
    return text


def outcome(work) -> bytes | type[Exception]:
    try:
        return work()
    except PackhorseError as error:
        return type(error)


@pytest.mark.parametrize("kind", ["shards", "nothing", "other files", "a shard that was missing"])
def test_every_damage_to_an_index_is_told_or_harmless(kind):
    names = {
        "shards": {"a": "m-1.safetensors", "b": "m-2.safetensors"},
        "nothing": {},
        "other files": {"a": "m.bin"},
        "a shard that was missing": {"a": "m-1.safetensors", "b": "lost.safetensors"},
    }[kind]
    files = {"m-1.ph.safetensors", "m-2.ph.safetensors", "m.bin"}
    original = json.dumps({"weight_map": names}).encode()
    had = {name.replace(".ph", "") for name in files}
    packed = pack_index(original, label="here", has=had.__contains__)
    assert accepted(packed, files.__contains__) == original
    for text in damaged(packed):
        found = outcome(lambda text=text: accepted(text, files.__contains__))
        assert isinstance(found, type) or found == original, text
        assert outcome(lambda text=text: decode_index(text, files)) == found


def test_every_damage_to_an_index_is_told_by_the_commands(packed, tmp_path, capsys):
    path = packed / INDEX
    text, original = path.read_bytes(), (tmp_path / "model" / INDEX).read_bytes()
    variants = damaged(text)
    chosen = {0, 1, len(text) - 1, len(text), len(variants) - 1}
    chosen |= {*np.random.default_rng(0).integers(0, len(variants), 20)}
    for i in sorted(chosen):
        path.write_bytes(variants[i])
        code = main(["unpack", str(packed), "-o", str(tmp_path / "back")])
        if code == 0:
            assert (tmp_path / "back" / INDEX).read_bytes() == original
            shutil.rmtree(tmp_path / "back")
            continue
        assert (code, main(["verify", str(packed)])) == (1, 1)
        assert str(path) in capsys.readouterr().err
        assert not leftovers(tmp_path, "model", "packed")


def test_a_shard_that_is_gone_is_missed(packed, tmp_path):
    (packed / "m-2.ph.safetensors").unlink()
    words = f"{packed / INDEX}: names 'm-2.ph.safetensors', which is not in the folder"
    with pytest.raises(CorruptionError, match=words):
        unpack_folder(packed, tmp_path / "back")
    assert not leftovers(tmp_path, "model", "packed")


def test_a_model_of_which_a_part_was_fetched_comes_back(tmp_path):
    model = write_shards(tmp_path / "model")
    (model / SHARDS[1]).unlink()
    pack_folder(model, tmp_path / "packed")
    assert verify_folder(tmp_path / "packed") == []
    unpack_folder(tmp_path / "packed", tmp_path / "back")
    assert (tmp_path / "back" / INDEX).read_bytes() == (model / INDEX).read_bytes()


def test_what_first_releases_packed_of_a_part_of_a_model_comes_back(packed, tmp_path):
    """The first releases did not record missing files."""
    index = json.loads((packed / INDEX).read_text())
    del index["packhorse"]["absent"]
    (packed / INDEX).write_text(json.dumps(index))
    (packed / "m-2.ph.safetensors").unlink()
    unpack_folder(packed, tmp_path / "back")
    assert (tmp_path / "back" / INDEX).read_bytes() == (tmp_path / "model" / INDEX).read_bytes()


@pytest.mark.parametrize("n_packed", [1, 2])
def test_files_packed_one_by_one_unpack_beside_their_index(tmp_path, n_packed):
    folder = write_shards(tmp_path / "folder")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in SHARDS[:n_packed]:
        pack_file(folder / name, folder / name.replace(".s", ".ph.s"))
        (folder / name).unlink()
    unpack_folder(folder, tmp_path / "back")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == before


@pytest.mark.parametrize(
    ("absent", "words"),
    [("m", "'absent' must be a list"), ([1], "'absent' must be a list"), (["x"], None)],
)
def test_lies_about_what_was_missing_are_refused(packed, tmp_path, absent, words):
    index = json.loads((packed / INDEX).read_text())
    index["packhorse"]["absent"] = absent
    (packed / INDEX).write_text(json.dumps(index))
    files = {path.name for path in packed.iterdir()}
    if words is None:
        decode_index((packed / INDEX).read_bytes(), files)
        unpack_folder(packed, tmp_path / "back")
        return
    with pytest.raises(CorruptionError, match=words):
        unpack_folder(packed, tmp_path / "back")
    with pytest.raises(CorruptionError, match="absent"):
        decode_index((packed / INDEX).read_bytes(), files)
    (problem,) = verify_folder(packed)
    assert words in problem.message


def test_names_that_no_file_can_have_are_missed_as_others(packed, tmp_path):
    text = json.dumps({"weight_map": {"a": "n" * 300 + ".safetensors", "b": "\0.safetensors"}})
    (packed / INDEX).write_bytes(pack_index(text.encode(), label="", has=lambda name: True))
    with pytest.raises(CorruptionError, match="is not in the folder"):
        unpack_folder(packed, tmp_path / "back")
    assert len(verify_folder(packed)) == 2


# Each shard has exactly the tensors that the index names for it.

FOREIGN = (
    "{index}: 'm-1.ph.safetensors' holds other tensors than this index says: it has no tensor "
    "'m-1.safetensors', which the index puts there, and has tensor 'm-2.safetensors', which the "
    "index puts in 'm-2.ph.safetensors'; get that file again"
)


def refusal(packed: Path, capsys) -> str:
    """The messages of `verify` and `unpack` about a folder."""
    out = packed.with_name("back")
    assert main(["verify", str(packed)]) == 1
    (told,) = capsys.readouterr().out.splitlines()
    assert main(["unpack", str(packed), "-o", str(out)]) == 1
    words = told.removeprefix("bad: ")
    assert capsys.readouterr().err == f"packhorse: error: {words}\n"
    assert not leftovers(packed.parent, "model", "packed")
    return words


def test_a_shard_in_the_place_of_another_is_refused(packed, tmp_path, capsys):
    shutil.copy(packed / "m-2.ph.safetensors", packed / "m-1.ph.safetensors")
    words = FOREIGN.format(index=packed / INDEX)
    assert refusal(packed, capsys) == words
    with pytest.raises(CorruptionError, match=r"'m-1\.ph.*no tensor 'm-1\.saf"):
        unpack_folder(packed, tmp_path / "back")
    (problem,) = verify_folder(packed)
    assert (problem.path, problem.message) == (packed / INDEX, words)


def test_shards_that_changed_places_are_both_told(packed):
    one, two = (packed / name.replace(".s", ".ph.s") for name in SHARDS)
    one.rename(packed / "x")
    two.rename(one)
    (packed / "x").rename(two)
    assert [problem.message.split("'")[1] for problem in verify_folder(packed)] == [
        one.name,
        two.name,
    ]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (["m-1.safetensors", "more"], "it has tensor 'more', which the index does not name"),
        (["a", "b", "m-1.safetensors"], "it has tensor 'a' and 1 more, which the index does not"),
        ([], "it has no tensor 'm-1.safetensors', which the index puts there; get"),
    ],
)
def test_a_shard_with_more_or_fewer_tensors_is_refused(packed, tmp_path, capsys, tensors, words):
    save_file({name: np.arange(4) for name in tensors}, tmp_path / "other")
    (packed / "m-1.ph.safetensors").unlink()
    pack_file(tmp_path / "other", packed / "m-1.ph.safetensors")
    (tmp_path / "other").unlink()
    assert words in refusal(packed, capsys)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_damage_to_one_shard_hides_no_other_s(packed, is_damaged):
    """If a header cannot be read, its names are not compared."""
    one, two = (packed / name.replace(".s", ".ph.s") for name in SHARDS)
    two.write_bytes(one.read_bytes()[:50] if is_damaged else one.read_bytes())
    paths = {problem.path.name for problem in verify_folder(packed)}
    assert paths == ({two.name} if is_damaged else {INDEX})


def test_a_model_whose_index_was_wrong_before_comes_back(tmp_path):
    """The shard's fault was recorded when the folder was packed; other shards are still
    compared."""
    names = {"m-1.safetensors": SHARDS[0], "lost": SHARDS[0], "m-2.safetensors": SHARDS[1]}
    model = write_shards(tmp_path / "model", {"weight_map": names})
    packed = tmp_path / "packed"
    pack_folder(model, packed)
    record = json.loads((packed / INDEX).read_text())["packhorse"]
    assert record["inexact"] == ["m-1.ph.safetensors"]
    assert verify_folder(packed) == []
    unpack_folder(packed, tmp_path / "back")
    for path in model.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    shutil.copy(packed / "m-1.ph.safetensors", packed / "m-2.ph.safetensors")
    with pytest.raises(CorruptionError, match=r"'m-2\.ph\.safetensors' holds other tensors"):
        unpack_folder(packed, tmp_path / "back again")


def test_a_good_index_records_nothing_of_its_shards(packed):
    assert "inexact" not in json.loads((packed / INDEX).read_text())["packhorse"]


@pytest.mark.parametrize("lie", ["m", [1], {}])
def test_lies_about_shards_are_refused(packed, tmp_path, lie):
    index = json.loads((packed / INDEX).read_text())
    index["packhorse"]["inexact"] = lie
    (packed / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptionError, match="'inexact' must be a list"):
        unpack_folder(packed, tmp_path / "back")
    with pytest.raises(CorruptionError, match="inexact"):
        decode_index((packed / INDEX).read_bytes(), {path.name for path in packed.iterdir()})


@pytest.mark.parametrize("how", ["good", "copied", "known to be inexact", "an old folder"])
def test_the_slow_reader_agrees_on_shards(packed, how):
    index = json.loads((packed / INDEX).read_text())
    if how == "known to be inexact":
        index["packhorse"]["inexact"] = ["m-1.ph.safetensors"]
    if how == "an old folder":
        del index["packhorse"]["absent"]
    text = json.dumps(index).encode()
    names = ["m-2.safetensors"] if how != "good" else ["m-1.safetensors"]
    tensors = {"m-1.ph.safetensors": names, "m-2.ph.safetensors": ["m-2.safetensors"]}
    found = [
        outcome(lambda: decode_index(text, tensors.keys(), tensors)),
        outcome(
            lambda: unpack_index(text, label="", has=tensors.__contains__, tensors=tensors.get)
        ),
    ]
    assert found[0] == found[1]
    assert (found[0] is CorruptionError) == (how == "copied")


def test_files_packed_one_by_one_are_not_compared_with_their_index(tmp_path):
    """The record of such a file does not say that it matched the index."""
    folder = write_shards(tmp_path / "folder", {"weight_map": {"other": SHARDS[0]}})
    pack_file(folder / SHARDS[0], folder / "m-1.ph.safetensors")
    (folder / SHARDS[0]).unlink()
    assert verify_folder(folder) == []
    unpack_folder(folder, tmp_path / "back")


def test_a_folder_without_an_index_has_nothing_to_compare(packed, tmp_path):
    (packed / INDEX).unlink()
    shutil.copy(packed / "m-2.ph.safetensors", packed / "m-1.ph.safetensors")
    assert verify_folder(packed) == []
    unpack_folder(packed, tmp_path / "back")
