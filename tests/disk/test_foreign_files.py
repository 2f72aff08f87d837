"""Good files of other kinds, and model files that are cut short: the error says what kind of file
it is."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_samples import Ended, write_model
from safetensors.numpy import load_file

from packhorse.errors import CorruptionError, TruncationError
from packhorse.numpy import compress
from packhorse.storage.foreign import PEEK_NBYTES, kind_of_file
from packhorse.storage.safetensors_header import read_header

Run = Callable[..., Ended]


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(9))
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.safetensors"), io.BytesIO())
    return file.getvalue()


def zipped(member: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, b"anything")
    return file.getvalue()


def torch_file() -> bytes:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, file)
    return file.getvalue()


KINDS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "npy": (npy, "an array of NumPy (.npy)", "packhorse.numpy.save_file"),
    "npz": (npz, "arrays of NumPy (.npz)", "packhorse.numpy.save_file"),
    "hdf5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(99), "an HDF5 file", "export it"),
    "onnx": (
        lambda: b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:" + bytes(99), "an ONNX file", "export it",
    ),
    "gguf": (lambda: b"GGUF\x03\0\0\0" + bytes(99), "a GGUF file", "use the model"),
    "gzip": (lambda: gzip.compress(b"model" * 99), "a gzip archive", "extract the model"),
    "tar": (tar, "a tar archive", "extract the model"),
    "zip": (lambda: zipped("a/b.txt"), "a zip archive", "extract the model"),
    "torch": (torch_file, "a checkpoint of PyTorch", "docs/cli.md"),
    "pickle": (lambda: b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.", "a Python pickle", "docs/cli.md"),
    "text": (lambda: "Liebe Grüße aus Köln!\n".encode() * 40, "text", "name a model"),
    "page": (lambda: b"<!DOCTYPE html><title>404</title>", "a web page", "get the file again"),
    "json": (lambda: json.dumps({"a": 1}).encode(), "JSON", "name the folder"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid x", "LFS", "git lfs pull"),
    "frame": (
        lambda: bytes(compress(np.arange(9999)).to_bytes()), "a single packed tensor", "Frame",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "name", "remedy"), KINDS.values(), ids=KINDS)
def test_every_verb_names_a_file_of_another_kind(
    tmp_path: Path, run: Run, make: Callable[[], bytes], name: str, remedy: str
):
    path = tmp_path / "model.ph.safetensors"
    path.write_bytes(make())
    for words in (
        ["pack", path, "-o", tmp_path / "out.safetensors"],
        ["inspect", path],
        ["bench", path],
        ["snapshot", "take", tmp_path / "store", "a", path],
    ):
        done = run(*words)
        assert done.code == 1
        assert f"{path}: not a safetensors file, but " in done.error
        assert name in done.error
        assert remedy in done.error
    verified = run("verify", path)
    assert (verified.code, verified.err) == (1, "")
    assert name in verified.out


def test_a_letter_that_is_cut_by_the_peek_is_a_letter():
    text = ("x" * (PEEK_NBYTES - 1) + "ü" * 9).encode()[:PEEK_NBYTES]
    assert kind_of_file(text) == "text: name a model file"
    assert kind_of_file(b"\xff\xfe" + bytes(99)) == ""
    assert kind_of_file(b"") == ""


@pytest.mark.parametrize("cut", [9, 40, 200, -1, -5000])
def test_a_file_that_is_cut_says_so(tmp_path: Path, run: Run, cut: int):
    path = write_model(tmp_path / "model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(TruncationError) as told:
        read_header(path)
    size = len(whole[:cut])
    header = 8 + int.from_bytes(whole[:8], "little")
    expected = (
        f"{path}: cut short: the header says {len(whole)} bytes, but the file has {size}; get the "
        "file again"
        if size >= header
        else f"{path}: cut short: bytes 0 to 7 declare a header of {header - 8} bytes, but the "
        f"file has {size} bytes; get the file again"
    )
    assert str(told.value) == expected
    for verb in ("pack", "bench"):
        done = run(verb, path)
        assert (done.code, done.error) == (1, expected)


def test_a_packed_file_that_is_cut_says_so(packed: Path, run: Run):
    data = packed.read_bytes()
    packed.write_bytes(data[:-1])
    words = f"{packed}: cut short: the header says {len(data)} bytes, but the file has "
    for verb in ("inspect", "unpack"):
        done = run(verb, packed, *(["--force"] if verb == "unpack" else []))
        assert (done.code, done.error.startswith(words)) == (1, True)
    assert words in run("verify", packed).out


def test_an_empty_file_says_so(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(CorruptionError, match="cut short: it has 0 bytes"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "files of GGUF"),
        ("model.onnx", "files of ONNX"),
        ("weights.h5", "files of HDF5"),
        ("flax_model.msgpack", "files of Flax"),
        ("notes.txt", "name a model folder"),
    ],
)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, run: Run, name: str, words: str):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / name).write_bytes(b"anything")
    for verb in ("pack", "verify", "inspect"):
        done = run(verb, folder)
        assert done.code == 2
        assert words in done.error


def test_a_folder_that_is_not_packed_is_told_to_be(folder: Path, run: Run):
    for verb in ("verify", "inspect"):
        done = run(verb, folder)
        assert done.code == 2
        assert done.error.endswith("its *.safetensors files are not packed, so pack it first")


# Names in an index that no file can have


def test_verifying_a_folder_goes_on_after_impossible_names(tmp_path: Path, folder: Path, run: Run):
    assert run("pack", folder).code == 0
    packed = folder.with_name("llama.ph")
    bad = packed / "a.safetensors.index.json"
    names = ["x" * 300, "nul\0byte.safetensors", "/etc/passwd", "../llama/config.json", "no"]
    index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
    (folder / "a.safetensors.index.json").write_text(json.dumps(index))
    assert run("pack", folder, "--force").code == 0
    assert run("verify", packed).code == 0  # they did not exist either when the folder was packed
    document = json.loads(bad.read_text())
    del document["packhorse"]["absent"]  # as in folders of the first releases
    bad.write_text(json.dumps(document))
    done = run("verify", packed, "--json")
    assert (done.code, done.err) == (1, "")
    (row,) = json.loads(done.out)["results"]
    assert [problem["path"] for problem in row["problems"]] == [str(bad)] * len(names)
    assert all("which is not in the folder" in problem["message"] for problem in row["problems"])
    data = bytearray((packed / "model-00002-of-00002.ph.safetensors").read_bytes())
    data[-100] ^= 1
    (packed / "model-00002-of-00002.ph.safetensors").write_bytes(data)
    done = run("verify", packed)
    assert len(done.out.splitlines()) == len(names) + 1  # the file after the index is checked
    assert load_file(folder / "model-00001-of-00002.safetensors")
