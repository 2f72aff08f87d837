"""Plain safetensors files, which are read like packed ones: by the safetensors library where it
can, and never mistaken for packed ones."""

import pickle
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from disk_samples import write_sample
from safetensors import safe_open

import packhorse
import packhorse.numpy
import packhorse.torch
from packhorse.disk import pack_file
from packhorse.torch import FRAMEWORK as TORCH

NAMES = {"np": packhorse.numpy, "pt": packhorse.torch}
INDICES = [
    (), ..., 3, -1, slice(2, 9), slice(5, 290, 7), (slice(None), 1), (7, slice(3, 7)), [4, 2, 4],
    (slice(1, 2), ..., slice(1, 20)), (slice(None), slice(None, None, 2)), slice(3, 3), slice(400),
]  # fmt: skip


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_sample(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def same(got, expected) -> bool:
    """Whether two tensors are of the same framework, dtype and shape, and equal bit for bit."""
    if type(got) is not type(expected) or (got.dtype, got.shape) != (
        expected.dtype,
        expected.shape,
    ):
        return False
    if isinstance(got, torch.Tensor):
        got, expected = (TORCH.readable(tensor)[0] for tensor in (got, expected))
    return got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("framework", NAMES)
def test_a_plain_file_reads_as_if_it_were_packed(plain, tmp_path, framework):
    packed = tmp_path / "model.ph.safetensors"
    pack_file(plain, packed)
    with (
        packhorse.open_file(plain, framework, "cpu") as file,
        packhorse.open_file(packed, framework, "cpu") as expected,
        safe_open(plain, framework, "cpu") as theirs,
    ):
        assert file.keys() == expected.keys() == theirs.keys() == list(file)
        assert file.offset_keys() == theirs.offset_keys()
        assert file.metadata() == expected.metadata() == theirs.metadata() == {"format": "np"}
        assert len(file) == len(expected)
        assert "scalar" in file
        assert "absent" not in file
        assert file.base_name is None
        assert (file.is_packed, expected.is_packed) == (False, True)
        for key in theirs.keys():  # noqa: SIM118
            assert file.entry(key) == expected.entry(key)
            assert same(file.get_tensor(key), theirs.get_tensor(key))
            part, whole = file.get_slice(key), expected.get_slice(key)
            assert (part.get_shape(), part.get_dtype()) == (whole.get_shape(), whole.get_dtype())
        part, whole = (f.get_slice("layers.0.weight") for f in (file, expected))
        for index in INDICES:
            assert same(part[index], whole[index]), index
        tensors = file.get_tensors()
    loaded = NAMES[framework].load_file(plain)
    in_memory = NAMES[framework].load(plain.read_bytes())
    for key, tensor in NAMES[framework].load_file(packed).items():
        assert all(same(found[key], tensor) for found in (tensors, loaded, in_memory))
    assert list(loaded) == sorted(loaded)


def test_load_reads_a_plain_file_too(plain):
    expected = safetensors.torch.load_file(plain)
    for loaded in (packhorse.torch.load(plain), packhorse.torch.load(plain, "cpu")):
        assert all(same(loaded[key], tensor) for key, tensor in expected.items())
    with plain.open("rb") as file:
        assert packhorse.torch.load(file).keys() == expected.keys()
    assert packhorse.torch.load_file(plain, "meta")["zeros"].device.type == "meta"


def test_numpy_reads_dtypes_that_the_library_does_not_give_it(tmp_path):
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz"]
    tensors = {name: torch.arange(1, 9).to(getattr(torch, name)).reshape(2, 4) for name in names}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path)
    with packhorse.open_file(path, "np") as file:
        for name, tensor in tensors.items():
            array = file.get_tensor(name)
            assert array.dtype == getattr(ml_dtypes, name)
            assert array.tobytes() == TORCH.readable(tensor)[0].tobytes()
            assert file.get_slice(name)[1, 2:].tobytes() == array[1, 2:].tobytes()
    loaded = packhorse.torch.load_file(path)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_limits_hold_for_plain_files(plain):
    with packhorse.open_file(plain, "pt", max_nbytes=1000) as file:
        for work in (file.get_tensors, lambda: file.get_tensor("layers.0.weight")):
            with pytest.raises(packhorse.CorruptionError, match=r"more than max_nbytes = 1000"):
                work()
        assert file.get_slice("layers.0.weight")[0, 0].shape == (50,)
        with pytest.raises(packhorse.CorruptionError, match=r"max_nbytes = 1000; read slices"):
            file.get_slice("layers.0.weight")[:9]
    for load in (packhorse.numpy.load_file, packhorse.torch.load_file):
        with pytest.raises(packhorse.CorruptionError, match="in total, more than max_nbytes = 9"):
            load(plain, max_nbytes=9)
    with pytest.raises(packhorse.CorruptionError, match="max_nbytes = 9"):
        packhorse.numpy.load(plain.read_bytes(), max_nbytes=9)


def test_a_plain_file_has_no_frames(plain):
    with packhorse.open_file(plain) as file:
        with pytest.raises(ValueError, match="which has no frames: pack it first"):
            file.frame("scalar")
        with pytest.raises(ValueError, match="no tensor is named 'nope'"):
            file.frame("nope")


def test_a_plain_file_is_pickled(plain):
    with packhorse.open_file(plain, "pt", max_nbytes=1 << 20, backend="pread") as file:
        data = pickle.dumps([file, file.get_slice("layers.0.bias")])
    again, part = pickle.loads(data)
    with again:
        assert same(part[3:9], again.get_tensor("layers.0.bias")[3:9])
        with pytest.raises(packhorse.CorruptionError, match="max_nbytes"):
            again.get_tensor("layers.0.weight")
    write_sample(plain, seed=1)  # the same header, and other values
    with pytest.raises(packhorse.ChangedError, match="is not the file that was pickled"):
        pickle.loads(data)


def test_the_backend_is_the_library_s(plain, monkeypatch):
    for name in ("mmap", "pread"):
        with packhorse.open_file(plain, "pt", "cpu", backend=name) as file:
            assert file.get_tensor("scalar") == 3.25
        assert packhorse.torch.load_file(plain, backend=name)["scalar"] == 3.25
        assert packhorse.numpy.load_file(plain, backend=name)["scalar"] == 3.25
    with pytest.raises(ValueError, match=r"backend is 'disk'; it must be one of 'mmap', 'pread'"):
        packhorse.open_file(plain, "pt", backend="disk")

    def old(filename, framework, device="cpu"):
        raise AssertionError("not called")

    monkeypatch.setattr(safetensors, "safe_open", old)
    with pytest.raises(packhorse.MissingBackendError, match=r"'pread' needs safetensors 0\.8"):
        packhorse.open_file(plain, "pt", backend="pread")


def test_without_the_library_the_message_names_the_extra(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(packhorse.MissingBackendError, match=r"install.*packhorse\[safetensors\]"):
        packhorse.numpy.load_file(plain)


def test_what_the_library_refuses_is_told(plain, monkeypatch):
    def refuse(*arguments, **options):
        raise safetensors.SafetensorError("a dtype of tomorrow")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(packhorse.CompatibilityError, match=r"model\.saf.*refuses.*of tomorrow"):
        packhorse.open_file(plain)


def test_a_packed_file_without_its_record_is_not_read_as_bytes(tmp_path):
    path = tmp_path / "a.ph.safetensors"
    packhorse.numpy.save_file({"a": np.zeros(9), "b": np.arange(5)}, path)
    path.write_bytes(path.read_bytes().replace(b'"packhorse"', b'"packhorsf"'))
    for load in (packhorse.numpy.load_file, packhorse.torch.load_file):
        with pytest.raises(packhorse.CorruptionError, match="its tensors are frames"):
            load(path)
    with pytest.raises(packhorse.CorruptionError, match="its tensors are frames"):
        packhorse.numpy.load(path.read_bytes())


@pytest.mark.parametrize("suffix", ["safetensors", "ph.safetensors"])
def test_an_unknown_device_fails_at_once(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    tensors = {"a": torch.zeros(3)}
    save = packhorse.torch.save_file if suffix.startswith("ph") else safetensors.torch.save_file
    save(tensors, path)
    absent = [name for name in ("cuda", "mps", "xpu") if not getattr(torch, name).is_available()]
    for device in ("foo", "cuda:99", 99, -1, *absent):
        for work in (packhorse.torch.load_file, packhorse.torch.load):
            with pytest.raises(ValueError, match=f"^device {device!r} "):
                work(path, device)
        with pytest.raises(ValueError, match=f"^device {device!r} "):
            packhorse.open_file(path, "pt", device)
    with pytest.raises(TypeError, match="it must be a device"):
        packhorse.open_file(path, "pt", 1.5)
    for device in ("cuda", 0, "foo"):
        with pytest.raises(ValueError, match="needs framework 'pt'"):
            packhorse.open_file(path, "np", device)
    for device in (None, "cpu", "cpu:0", torch.device("cpu")):
        with packhorse.open_file(path, "pt", device) as file:
            assert file.get_tensor("a").device.type == "cpu"


def test_a_default_device_changes_nothing(tmp_path, plain):
    packhorse.torch.save_file(safetensors.torch.load_file(plain), tmp_path / "packed")
    with torch.device("meta"):
        for path in (plain, tmp_path / "packed"):
            tensors = packhorse.torch.load_file(path)
            assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}


def test_a_closed_file_is_told(plain, tmp_path):
    pack_file(plain, tmp_path / "packed")
    for path in (plain, tmp_path / "packed"):
        with packhorse.open_file(path) as file:
            pass
        for error in (packhorse.ClosedError, packhorse.PackhorseError, ValueError):
            with pytest.raises(error, match="the file is closed"):
                file.keys()
