"""NumPy and PyTorch: every dtype and layout, `out=`, errors, and files like safetensors' own."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import packhorse
from packhorse import numpy as ph_numpy
from packhorse import torch as ph_torch
from packhorse.disk import pack_file, unpack_file
from packhorse.errors import CorruptionError, TruncationError
from packhorse.frame import max_frame_nbytes
from packhorse.layout import DTYPE_BY_NAME

NUMPY_DTYPES = {
    "BOOL": np.bool_,
    **{f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "UI" for n in (1, 2, 4, 8)},
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
TORCH_DTYPES = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
SUB_BYTE = {"F4", "F6_E2M3", "F6_E3M2"}


def any_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, so NaN payloads too; booleans are 0 and 1."""
    kind = np.dtype(NUMPY_DTYPES[dtype])
    bits = np.random.default_rng(3).integers(0, 256, (*shape, kind.itemsize)).astype(np.uint8)
    return (bits & 1 if dtype == "BOOL" else bits).view(kind).reshape(shape)


def any_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    array = any_array(dtype, shape)
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    raw = torch.frombuffer(bytearray(array.tobytes() + b"\0"), dtype=torch.uint8)[: array.nbytes]
    tensor.reshape(-1).view(torch.uint8).copy_(raw)
    return tensor


def array_bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def tensor_bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, array_bits(a)) == (b.dtype, b.shape, array_bits(b))


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, tensor_bits(a)) == (b.dtype, b.shape, tensor_bits(b))


def test_every_dtype_of_the_format_is_held_here_or_in_test_sub_byte() -> None:
    assert NUMPY_DTYPES.keys() == TORCH_DTYPES.keys() == DTYPE_BY_NAME.keys() - SUB_BYTE


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = any_array(dtype, shape)
    frame = ph_numpy.compress(array)
    assert (frame.dtype, frame.shape) == (dtype, shape)
    assert same_array(ph_numpy.decompress(frame), array)
    assert same_array(ph_numpy.decompress(frame.to_bytes()), array)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = any_tensor(dtype, shape)
    frame = ph_torch.compress(tensor)
    assert (frame.dtype, frame.shape) == (dtype, shape)
    assert same_tensor(ph_torch.decompress(frame), tensor)
    assert same_tensor(ph_torch.decompress(frame.to_bytes()), tensor)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_both_frameworks_make_the_same_frame(dtype: str) -> None:
    array, tensor = any_array(dtype, (70, 90)), any_tensor(dtype, (70, 90))
    packed = ph_numpy.compress(array).to_bytes()
    assert packed == ph_torch.compress(tensor).to_bytes()
    assert same_tensor(ph_torch.decompress(packed), tensor)


LAYOUTS = {
    "transposed": lambda a: a.T,
    "every second": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1, ::-1],
    "a column": lambda a: a[:, 1],
    "broadcast": lambda a: np.broadcast_to(a[0], (9, *a.shape[1:])),
    "fortran": np.asfortranarray,
    "offset by a byte": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, a.size, 1).reshape(
        a.shape
    ),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I64", "C64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_takes_any_layout(layout: str, dtype: str) -> None:
    base = any_array(dtype, (40, 30))
    view = LAYOUTS[layout](base)
    before = base.tobytes()
    back = ph_numpy.decompress(ph_numpy.compress(view))
    assert back.flags.c_contiguous
    assert back.flags.writeable
    assert same_array(back, view)
    assert base.tobytes() == before


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">u8", ">c8", ">f8", ">f2"])
def test_big_endian_arrays_keep_their_values(dtype: str) -> None:
    array = np.arange(1, 50).astype(dtype)
    back = ph_numpy.decompress(ph_numpy.compress(array))
    assert back.dtype == np.dtype(dtype).newbyteorder("<")
    assert np.array_equal(back, array)


def test_array_subclasses_and_structs() -> None:
    matrix = np.arange(6.0).reshape(2, 3).view(np.recarray)
    assert np.array_equal(
        ph_numpy.decompress(ph_numpy.compress(matrix)), np.arange(6.0).reshape(2, 3)
    )


UNSUPPORTED = {
    "float128": np.zeros(3, np.longdouble),
    "complex128": np.zeros(3, np.complex128),
    "object": np.array([None]),
    "str": np.array(["a"]),
    "bytes": np.array([b"a"]),
    "datetime": np.zeros(3, "M8[s]"),
    "struct": np.zeros(3, "f4,i4"),
    "int4": np.zeros(3, ml_dtypes.int4),
}


@pytest.mark.parametrize("array", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_numpy_refuses_what_safetensors_does_not_have(array: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"safetensors has no dtype for .*; convert the (array|tensor)"
    ):
        ph_numpy.compress(array)
    with pytest.raises(TypeError, match="safetensors has no dtype for"):
        ph_numpy.save_file({"x": array}, tmp_path / "x.ph.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("thing", [[1.0], 3, None, b"abc", torch.zeros(3)], ids=repr)
def test_numpy_refuses_what_is_no_array(thing: object) -> None:
    with pytest.raises(TypeError, match="a NumPy array is needed, not"):
        ph_numpy.compress(thing)


TORCH_REFUSED = {
    "complex128": (
        torch.zeros(3, dtype=torch.complex128),
        "safetensors has no dtype for torch.complex128",
    ),
    "sparse": (torch.zeros(3, 3).to_sparse(), "layout torch.sparse_coo"),
    "array": (np.zeros(3), "not ndarray"),
    "None": (None, "not NoneType"),
}


@pytest.mark.parametrize(("thing", "words"), TORCH_REFUSED.values(), ids=TORCH_REFUSED)
def test_torch_refuses_what_safetensors_does_not_have(thing: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ph_torch.compress(thing)


TORCH_LAYOUTS = {
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(9, -1),
    "permuted": lambda t: t.reshape(4, 10, 30).permute(2, 0, 1),
    "offset": lambda t: t.reshape(-1)[7:],
    "parameter": lambda t: torch.nn.Parameter(t),
    "result of an operation": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_takes_any_layout(layout: str) -> None:
    base = torch.randn(40, 30)
    view, before = TORCH_LAYOUTS[layout](base), base.clone()
    back = ph_torch.decompress(ph_torch.compress(view))
    assert not back.requires_grad
    assert same_tensor(back, view)
    assert torch.equal(base, before)


@pytest.mark.parametrize(("size", "stride"), [((0,), (0,)), ((1,), (0,)), ((1, 1), (5, 7))])
def test_torch_takes_odd_strides_of_one_element_or_none(
    size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """PyTorch calls these tensors contiguous, but cannot view them as bytes."""
    tensor = torch.empty_strided(size, stride).fill_(2.5)
    frame = ph_torch.compress(tensor)
    assert ph_torch.decompress(frame).tolist() == tensor.tolist()
    out = torch.empty_strided(size, stride)
    assert ph_torch.decompress(frame, out=out).tolist() == tensor.tolist()


def test_lazy_conjugate_and_negative_views_are_resolved() -> None:
    base = torch.complex(torch.randn(9, 9), torch.randn(9, 9))
    for view in (base.conj(), base.conj().imag, base.conj().t()):
        assert view.is_conj() or view.is_neg()
        back = ph_torch.decompress(ph_torch.compress(view))
        assert not back.is_conj()
        assert not back.is_neg()
        assert torch.equal(back, view)


def test_decompress_into_the_array_that_is_given() -> None:
    array = any_array("F32", (40, 30))
    frame, out = ph_numpy.compress(array), np.empty((40, 30), np.float32)
    assert ph_numpy.decompress(frame, out=out) is out
    assert same_array(out, array)
    for wrong in (np.empty((30, 40), np.float32), np.empty((40, 30), np.int32)):
        with pytest.raises(ValueError, match=r"out is .*; it must be (torch\.)?float32 \(40, 30\)"):
            ph_numpy.decompress(frame, out=wrong)
    frozen = np.empty((40, 30), np.float32)
    frozen.flags.writeable = False
    for wrong in (np.empty((30, 40), np.float32).T, frozen, [0.0], bytearray(4800)):
        with pytest.raises(TypeError, match="writable C-contiguous NumPy array"):
            ph_numpy.decompress(frame, out=wrong)


def test_decompress_into_the_tensor_that_is_given() -> None:
    tensor = any_tensor("BF16", (40, 30))
    frame, out = ph_torch.compress(tensor), torch.empty(40, 30, dtype=torch.bfloat16)
    assert ph_torch.decompress(frame, out=out) is out
    assert same_tensor(out, tensor)
    for wrong in (torch.empty(30, 40, dtype=torch.bfloat16), torch.empty(40, 30)):
        with pytest.raises(ValueError, match=r"out is .*; it must be .*bfloat16"):
            ph_torch.decompress(frame, out=wrong)
    meta = torch.empty(40, 30, dtype=torch.bfloat16, device="meta")
    for wrong in (torch.empty(30, 40, dtype=torch.bfloat16).t(), meta, np.empty((40, 30))):
        with pytest.raises(TypeError, match="contiguous PyTorch tensor in host memory"):
            ph_torch.decompress(frame, out=wrong)


def test_a_parameter_is_filled_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    ph_torch.decompress(ph_torch.compress(torch.ones(8, 8)), out=weight)
    assert torch.equal(weight.detach(), torch.ones(8, 8))


@pytest.mark.parametrize("module", [ph_numpy, ph_torch])
def test_compress_into_recycled_memory(module) -> None:
    tensor = any_array("F32", (64, 64)) if module is ph_numpy else any_tensor("F32", (64, 64))
    out = bytearray(max_frame_nbytes("F32", (64, 64)))
    frame = module.compress(tensor, out=out, level="max", threads=2)
    assert out[: frame.nbytes] == frame.to_bytes()


@pytest.mark.parametrize("module", [ph_numpy, ph_torch])
def test_bad_frames_and_limits_are_documented_errors(module) -> None:
    packed = ph_numpy.compress(any_array("F32", (64,))).to_bytes()
    with pytest.raises(TruncationError):
        module.decompress(packed[:-1])
    with pytest.raises(CorruptionError, match="checksum"):
        module.decompress(packed[:-64] + b"x" * 64)
    with pytest.raises(CorruptionError, match="max_nbytes = 255"):
        module.decompress(packed, max_nbytes=255)


# Files.


def numpy_tensors() -> dict[str, np.ndarray]:
    return {
        **{f"t.{dtype}": any_array(dtype, (13, 5)) for dtype in NUMPY_DTYPES},
        "weight": (np.random.default_rng(0).standard_normal((70, 90)) * 0.02).astype(np.float32),
        "naïve ☃": np.arange(5),
        "nothing": np.zeros((0, 3), np.float16),
        "scalar": np.array(2.5),
    }


def torch_tensors() -> dict[str, torch.Tensor]:
    return {
        **{f"t.{dtype}": any_tensor(dtype, (13, 5)) for dtype in TORCH_DTYPES},
        "weight": torch.randn(70, 90) * 0.02,
        "naïve ☃": torch.arange(5),
        "nothing": torch.zeros(0, 3, dtype=torch.float16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


FRAMEWORKS = {
    "numpy": (ph_numpy, safetensors.numpy, numpy_tensors, same_array),
    "torch": (ph_torch, safetensors.torch, torch_tensors, same_tensor),
}


def known_to(library, tensors: dict) -> dict:
    """Leaves out the dtypes that this release of the safetensors library cannot write."""
    kept = {}
    for name, tensor in tensors.items():
        try:
            library.save({name: tensor})
        except Exception:
            continue
        kept[name] = tensor
    assert len(kept) >= 15
    return kept


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=["none", "empty", "one"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_unpacking_a_saved_file_gives_safetensors_own(
    framework: str, metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    ours, theirs, tensors, _ = FRAMEWORKS[framework]
    kept = known_to(theirs, tensors())
    theirs.save_file(kept, tmp_path / "theirs.safetensors", metadata)
    ours.save_file(kept, tmp_path / "ours.ph.safetensors", metadata)
    unpack_file(tmp_path / "ours.ph.safetensors", tmp_path / "ours.safetensors")
    got = (tmp_path / "ours.safetensors").read_bytes()
    assert got == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_saved_file_is_what_packing_makes(framework: str, tmp_path: Path) -> None:
    ours, theirs, tensors, _ = FRAMEWORKS[framework]
    kept = known_to(theirs, tensors())
    theirs.save_file(kept, tmp_path / "theirs.safetensors", {"a": "b"})
    pack_file(tmp_path / "theirs.safetensors", tmp_path / "packed.ph.safetensors")
    ours.save_file(kept, tmp_path / "saved.ph.safetensors", {"a": "b"})
    saved = (tmp_path / "saved.ph.safetensors").read_bytes()
    assert saved == (tmp_path / "packed.ph.safetensors").read_bytes()
    assert saved == ours.save(kept, {"a": "b"})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_save_and_load(framework: str, tmp_path: Path) -> None:
    ours, _, tensors, same = FRAMEWORKS[framework]
    expected = tensors()
    path = tmp_path / "m.ph.safetensors"
    ours.save_file(expected, path, {"k": "v"}, level="fast", threads=2)
    for loaded in (
        ours.load_file(path, threads=2),
        ours.load_file(str(path)),
        ours.load(path.read_bytes()),
        ours.load(memoryview(ours.save(expected))),
    ):
        assert loaded.keys() == expected.keys()
        assert all(same(loaded[name], tensor) for name, tensor in expected.items())
    with packhorse.open_file(path, framework) as file:
        assert file.metadata() == {"k": "v"}
        assert file.keys() == sorted(expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_safetensors_opens_a_packed_file_and_lists_it(framework: str, tmp_path: Path) -> None:
    ours, _, tensors, _ = FRAMEWORKS[framework]
    expected = tensors()
    ours.save_file(expected, tmp_path / "m.ph.safetensors", {"k": "v"})
    with safetensors.safe_open(tmp_path / "m.ph.safetensors", "np") as file:
        assert set(file.keys()) == set(expected)
        assert file.metadata()["k"] == "v"
        frame = file.get_tensor("weight")
    assert same_array(ph_numpy.decompress(frame), np.asarray(expected["weight"]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_saving_replaces_a_file_at_once(framework: str, tmp_path: Path) -> None:
    ours, _, tensors, _ = FRAMEWORKS[framework]
    path = tmp_path / "m.ph.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        ours.save_file({**tensors(), "bad": None}, path)
    assert path.read_bytes() == b"old"
    ours.save_file(tensors(), path)
    assert ours.load_file(path).keys() == tensors().keys()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.ph.safetensors"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bad_arguments_of_save(framework: str, tmp_path: Path) -> None:
    ours, _, tensors, _ = FRAMEWORKS[framework]
    one = {"x": tensors()["weight"]}
    path = tmp_path / "m.ph.safetensors"
    with pytest.raises(ValueError, match="level is"):
        ours.save_file(one, path, level="best")
    with pytest.raises(ValueError, match="threads is 0"):
        ours.save_file(one, path, threads=0)
    with pytest.raises(TypeError, match="metadata must map strings to strings"):
        ours.save_file(one, path, {"k": 1})
    with pytest.raises(TypeError, match="metadata must be a dict of strings, not list"):
        ours.save_file(one, path, ["k"])
    with pytest.raises(ValueError, match="no tensor can have the name '__metadata__'"):
        ours.save_file({"__metadata__": one["x"]}, path)
    for tensors, words in (
        ([one["x"]], "a dict of tensors by name is needed, not list"),
        ({1: one["x"]}, "name must be a string, not 1"),
        ({**one, "wrong": [1.0]}, r"^tensor 'wrong': .* needed, not list"),
        ({**one, "wrong": None}, r"^tensor 'wrong': .* needed, not NoneType"),
    ):
        for save in (ours.save_file, lambda tensors, path: ours.save(tensors)):
            if save is ours.save_file or framework == "numpy":
                with pytest.raises(TypeError, match=words):
                    save(tensors, path)
    with pytest.raises(FileNotFoundError):
        ours.save_file(one, tmp_path / "absent" / "m.ph.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_absent_is_told(tmp_path: Path) -> None:
    for load in (ph_numpy.load_file, ph_torch.load_file):
        with pytest.raises(FileNotFoundError, match=r"absent\.ph\.safetensors"):
            load(tmp_path / "absent.ph.safetensors")


def test_devices_are_for_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.ph.safetensors"
    ph_torch.save_file({"x": torch.ones(3)}, path)
    assert ph_torch.load_file(path, "meta")["x"].device.type == "meta"
    assert ph_torch.load_file(path, torch.device("cpu"))["x"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="device 'cuda' needs framework 'pt'"):
        packhorse.open_file(path, "np", device="cuda")
