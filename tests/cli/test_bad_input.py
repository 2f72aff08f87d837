"""Bad input on the command line.

Each case prints one line that names the file and says what to do, and ends with the documented exit
code. Nothing is left behind, and the source is unchanged.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_samples import Ended, contents, flip_bytes, frame_offsets, write_header, write_model
from safetensors.numpy import load_file

Run = Callable[..., Ended]


def _entry(start: int, stop: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [stop - start], "data_offsets": [start, stop]}


def _header(**entries: object) -> str:
    return json.dumps(entries)


BAD_FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("I am not a model, I am a letter to a friend.\n"),
    "truncated": lambda path: path.write_bytes(write_model(path).read_bytes()[:-1]),
    "truncated_in_the_header": lambda path: path.write_bytes(write_model(path).read_bytes()[:50]),
    "longer_than_declared": lambda path: path.write_bytes(write_model(path).read_bytes() + b"x"),
    "header_longer_than_the_file": lambda path: path.write_bytes(b"\xff\0\0\0\0\0\0\0{}"),
    "header_longer_than_allowed": lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{}"),
    "not_json": lambda path: write_header(path, "{]"),
    "not_utf8": lambda path: write_header(path, b'{"\xff": 1}'),
    "overlap": lambda path: write_header(path, _header(a=_entry(0, 4), b=_entry(2, 6)), b"abcdef"),
    "hole": lambda path: write_header(path, _header(a=_entry(0, 2), b=_entry(4, 6)), b"abcdef"),
    "backwards": lambda path: write_header(
        path, _header(a={"dtype": "U8", "shape": [2], "data_offsets": [4, 2]}), b"abcd"
    ),
    "duplicate_key": lambda path: write_header(
        path, f'{{"a": {json.dumps(_entry(0, 2))}, "a": {json.dumps(_entry(0, 2))}}}', b"ab"
    ),
    "unknown_dtype": lambda path: write_header(path, _header(a=_entry(0, 2, "F3")), b"ab"),
    "shape_against_size": lambda path: write_header(
        path, _header(a={"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}), b"abcd"
    ),
    "zip": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
}


@pytest.mark.parametrize("make", BAD_FILES.values(), ids=BAD_FILES.keys())
@pytest.mark.parametrize("verb", ["pack", "unpack", "inspect", "bench"])
def test_bad_file_is_told_in_one_line(
    tmp_path: Path, run: Run, make: Callable[[Path], object], verb: str
):
    path = tmp_path / ("bad.ph.safetensors" if verb == "unpack" else "bad.safetensors")
    make(path)
    before = contents(tmp_path)
    done = run(verb, path)
    assert done.code == 1
    assert done.out == ""
    assert done.error.startswith(f"{path}: ")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_verify_reports_a_bad_file(tmp_path: Path, run: Run, make: Callable[[Path], object]):
    path = tmp_path / "bad.ph.safetensors"
    make(path)
    done = run("verify", path)
    assert done.code == 1
    assert done.err == ""
    (line,) = done.out.splitlines()
    assert line.startswith(f"bad: {path}: ")


@pytest.mark.parametrize("verb", ["pack", "unpack", "inspect", "verify", "bench"])
def test_missing_file(tmp_path: Path, run: Run, verb: str):
    path = tmp_path / "nowhere.ph.safetensors"
    done = run(verb, path)
    assert done.code == 3
    assert str(path) in done.error
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("verb", ["pack", "unpack", "inspect", "verify"])
def test_folder_without_models(tmp_path: Path, run: Run, verb: str):
    folder = tmp_path / "photos.ph"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"meow")
    before = contents(tmp_path)
    done = run(verb, folder)
    assert done.code == 2
    assert str(folder) in done.error
    assert ".safetensors" in done.error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickle_is_refused_with_a_recipe(tmp_path: Path, run: Run, name: str):
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    done = run("pack", path)
    assert done.code == 2
    for word in (str(path), "pickle", "weights_only=True", "save_file"):
        assert word in done.error
    assert list(contents(tmp_path)) == [name]


def test_recipe_for_pickles_works(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "shared": weight, "b": weight.T}, tmp_path / "model.bin")
    recipe = run("pack", tmp_path / "model.bin").error.partition("`")[2].rpartition("`")[0]
    monkeypatch.chdir(tmp_path)
    exec(recipe, {})
    assert run("pack", "model.safetensors").code == 0
    loaded = load_file(tmp_path / "model.safetensors")
    assert np.array_equal(loaded["b"], weight.T.numpy())
    assert np.array_equal(loaded["shared"], weight.numpy())


def test_folder_of_pickles_is_refused_with_a_recipe(tmp_path: Path, run: Run):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    done = run("pack", tmp_path / "old")
    assert done.code == 2
    assert "weights_only=True" in done.error
    assert not (tmp_path / "old.ph").exists()


@pytest.mark.parametrize(
    "link", [shutil.copyfile, os.link, os.symlink], ids=["path", "hard", "sym"]
)
@pytest.mark.parametrize("options", [[], ["--force"]], ids=["", "force"])
def test_output_equal_to_input(
    tmp_path: Path, model: Path, run: Run, link: Callable[..., object], options: list[str]
):
    target = model
    if link is not shutil.copyfile:
        target = tmp_path / "other.safetensors"
        link(model, target)
    before = contents(tmp_path)
    done = run("pack", model, "-o", target, *options)
    assert done.code == 2
    assert str(target) in done.error
    assert contents(tmp_path) == before


def test_folder_into_itself(tmp_path: Path, folder: Path, run: Run):
    before = contents(tmp_path)
    for target in (folder, folder / "packed"):
        done = run("pack", folder, "-o", target, "--force")
        assert done.code == 2
        assert str(target) in done.error
    assert contents(tmp_path) == before


def test_two_sources_for_one_output(tmp_path: Path, run: Run):
    sources = [tmp_path / name / "model.safetensors" for name in "ab"]
    for path in sources:
        path.parent.mkdir()
        write_model(path)
    (tmp_path / "out").mkdir()
    done = run("pack", *sources, "-o", tmp_path / "out")
    assert done.code == 2
    assert all(str(path) in done.error for path in sources)
    assert list((tmp_path / "out").iterdir()) == []


def test_several_sources_need_a_folder(tmp_path: Path, model: Path, run: Run):
    other = write_model(tmp_path / "other.safetensors")
    done = run("pack", model, other, "-o", tmp_path / "missing")
    assert done.code == 2
    assert str(tmp_path / "missing") in done.error


def test_output_in_a_folder_that_is_not_there(tmp_path: Path, model: Path, run: Run):
    done = run("pack", model, "-o", tmp_path / "missing" / "out.ph.safetensors")
    assert done.code == 3
    assert str(tmp_path / "missing") in done.error


def test_packed_is_not_packed_again(packed: Path, run: Run):
    done = run("pack", packed, "-o", packed.with_name("twice.ph.safetensors"))
    assert done.code == 2
    assert str(packed) in done.error
    assert "already packed" in done.error


@pytest.mark.parametrize("verb", ["unpack", "inspect", "verify"])
def test_plain_file_is_not_packed(tmp_path: Path, model: Path, run: Run, verb: str):
    options = ["-o", tmp_path / "out.safetensors"] if verb == "unpack" else []
    done = run(verb, model, *options)
    assert done.code == 2
    assert str(model) in done.error
    assert "not a packed file" in done.error


def test_unpack_needs_a_name_it_can_derive(tmp_path: Path, packed: Path, run: Run):
    odd = packed.rename(tmp_path / "odd")
    done = run("unpack", odd)
    assert done.code == 2
    assert "-o" in done.error
    assert run("unpack", odd, "-o", tmp_path / "out.safetensors").code == 0


def test_newer_file_version(tmp_path: Path, packed: Path, run: Run):
    data = packed.read_bytes()
    newer = data.replace(rb"{\"version\":1,", rb"{\"version\":9,")
    assert newer != data
    packed.write_bytes(newer)
    for verb in ("unpack", "inspect"):
        done = run(verb, packed, *(["--force"] if verb == "unpack" else []))
        assert done.code == 1
        assert "version 9" in done.error
        assert str(packed) in done.error
    assert "version 9" in run("verify", packed).out


def test_newer_frame_version(packed: Path, run: Run):
    start, _ = frame_offsets(packed)["layers.0.weight"]
    data = bytearray(packed.read_bytes())
    data[start + 4] = 9
    packed.write_bytes(data)
    done = run("unpack", packed, "--force")
    assert done.code == 1
    for word in (str(packed), "'layers.0.weight'", "version is 9"):
        assert word in done.error


@pytest.mark.parametrize("place", ["header", "table", "payload"])
def test_damaged_frame_leaves_the_target_alone(packed: Path, run: Run, place: str):
    start, stop = frame_offsets(packed)["layers.1.weight"]
    flip_bytes(packed, {"header": start + 20, "table": start + 70, "payload": stop - 1000}[place])
    target = packed.with_name("model.safetensors")
    before = contents(packed.parent)
    done = run("unpack", packed, "--force")
    assert done.code == 1
    assert str(packed) in done.error
    assert "'layers.1.weight'" in done.error
    assert target.exists()
    assert contents(packed.parent) == before


@pytest.mark.parametrize(
    "words",
    [["--level", "best"], ["--threads", "0"], ["--threads", "many"], ["--colour"]],
    ids=" ".join,
)
def test_wrong_option(tmp_path: Path, model: Path, run: Run, words: list[str]):
    before = contents(tmp_path)
    done = run("pack", model, *words)
    assert done.code == 2
    assert words[0] in done.err
    assert contents(tmp_path) == before
